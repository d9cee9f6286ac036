//! The absences that `ARCHITECTURE.md` states, checked against the dependency graph.

use std::process::Command;

/// Every crate that `package` depends on, directly or not, build and test code aside.
fn dependencies(package: &str) -> Vec<String> {
    let output = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--package",
            package,
            "--edges",
            "normal",
            "--prefix",
            "none",
        ])
        .args(["--format", "{p}", "--offline", "--locked"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .output()
        .expect("cargo tree starts");
    assert!(
        output.status.success(),
        "cargo tree failed for {package}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let names: Vec<String> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .collect();
    assert!(
        names.iter().any(|n| n == package),
        "cargo tree lists {package} itself"
    );
    names
}

fn check(package: &str, absent: &[&str]) {
    let names = dependencies(package);
    for name in absent {
        assert!(
            !names.iter().any(|n| n == name),
            "{package} must not depend on {name}"
        );
    }
}

#[test]
fn core_knows_no_io_no_async_no_tensors() {
    check(
        "spotter-core",
        &["tokio", "candle-core", "rusqlite", "axum", "tauri"],
    );
}

#[test]
fn store_knows_no_tensors_and_no_http() {
    check("spotter-store", &["candle-core", "axum", "tauri"]);
}

#[test]
fn engine_and_trainer_know_no_http_and_no_database() {
    for package in [
        "spotter-model",
        "spotter-engine",
        "spotter-trainer",
        "spotter-worker",
    ] {
        check(package, &["axum", "rusqlite", "reqwest", "tauri"]);
    }
}

#[test]
fn gateway_and_daemon_know_no_tensors() {
    for package in ["spotter-gateway", "spotter-daemon", "spotter-cli"] {
        check(
            package,
            &[
                "candle-core",
                "candle-nn",
                "gemm",
                "tokenizers",
                "cudarc",
                "tauri",
            ],
        );
    }
}

#[test]
fn a_dependency_that_is_there_is_found() {
    assert!(
        dependencies("spotter-store")
            .iter()
            .any(|n| n == "rusqlite")
    );
    assert!(
        dependencies("spotter-model")
            .iter()
            .any(|n| n == "candle-core")
    );
}
