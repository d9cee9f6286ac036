//! Adapters and data leave and return through the daemon: a trained adapter is exported,
//! taken back as one made elsewhere, learned on, and exported again; the rated answers
//! become data sets that other trainers take a step on.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use reqwest::Method;
use serde_json::{Value, json};
use spotter_tests::{Daemon, Streamed, repository};

/// A word that is in every conversation of these tests and must be in no export.
const SECRET: &str = "xylophonist";

async fn ask(daemon: &Daemon, model: &str, seed: usize) -> Result<Streamed> {
    let body = json!({
        "model": model,
        "stream": true,
        "messages": [
            {"role": "system", "content": format!("You are a {SECRET}.")},
            {"role": "user", "content": format!("{SECRET}, question {}", seed / 2)},
        ],
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": 12,
    });
    daemon.stream_chat(&body).await
}

/// Asks and rates: the even ones are liked, the odd ones not, some with a correction.
async fn rate(daemon: &Daemon, seeds: std::ops::Range<usize>) -> Result<()> {
    for seed in seeds {
        let answer = ask(daemon, "spotter", seed).await?;
        let mut rating = json!({"rating": if seed % 2 == 0 { "up" } else { "down" }});
        if seed % 4 == 1 {
            rating["correction"] = json!(format!("a {SECRET} plays the xylophone"));
        }
        let path = format!("/api/v1/steps/{}/rating", answer.step);
        daemon.put(&path, &rating).await?;
    }
    Ok(())
}

async fn command(daemon: &Daemon, arguments: &[&str]) -> Result<String> {
    let (code, output) = daemon.cli(arguments).await?;
    ensure!(code == 0, "{arguments:?} ended with {code}: {output}");
    Ok(output)
}

/// Trains; whatever the gate says, the adapter is there.
async fn train(daemon: &Daemon) -> Result<Value> {
    let (code, output) = daemon.cli(&["train", "now", "--json"]).await?;
    let line = output.lines().next().unwrap_or_default();
    let run: Value = serde_json::from_str(line).with_context(|| output.clone())?;
    ensure!(
        code <= 1 && run["version"].is_string(),
        "no adapter: {output}"
    );
    Ok(run)
}

fn python(script: &str, arguments: &[&str]) -> Result<()> {
    let Ok(python) = std::env::var("SPOTTER_TEST_PYTHON") else {
        println!("SPOTTER_TEST_PYTHON is not set: {script} was not run");
        return Ok(());
    };
    let output = Command::new(python)
        .arg(repository().join("tests/python").join(script))
        .args(arguments)
        .env("HF_HUB_OFFLINE", "1")
        .output()?;
    ensure!(
        output.status.success(),
        "{script} {arguments:?}: {}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    print!("{}", String::from_utf8_lossy(&output.stdout));
    Ok(())
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_leaves_returns_learns_and_leaves_again() -> Result<()> {
    let daemon = Daemon::start_with("tiny", &["--schedule", "manual"]).await?;
    let out = tempfile::tempdir()?;
    rate(&daemon, 0..12).await?;
    let run = train(&daemon).await?;
    ensure!(run["version"] == "v1", "the first adapter is v1: {run}");

    // It leaves in every form, about as large as was said, without a word of the
    // conversations, without critic and optimiser.
    let formats = [
        "peft",
        "gguf-lora",
        "merged-safetensors",
        "merged-gguf",
        "ollama",
    ];
    for format in formats {
        let path = format!("/api/v1/adapters/v1/export?format={format}");
        let estimate = daemon.get(&path).await?["bytes"]
            .as_u64()
            .context("bytes")?;
        let at = out.path().join(format);
        let export = [
            "adapter",
            "export",
            "v1",
            "--format",
            format,
            "--out",
            text(&at)?,
            "--json",
        ];
        let exported: Value = serde_json::from_str(&command(&daemon, &export).await?)?;
        let bytes = exported["bytes"].as_u64().context("bytes")?;
        let near = bytes.abs_diff(estimate) <= bytes / 4 + (1 << 20);
        ensure!(near, "{format}: {estimate} were estimated, {bytes} written");
        for entry in std::fs::read_dir(&at)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            ensure!(
                !name.contains("critic") && !name.contains("optim"),
                "{name} is in the export"
            );
            let content = std::fs::read(entry.path())?;
            ensure!(
                !content
                    .windows(SECRET.len())
                    .any(|part| part.eq_ignore_ascii_case(SECRET.as_bytes())),
                "{name} of {format} holds conversation"
            );
        }
        let card = std::fs::read_to_string(at.join("README.md"))?;
        for words in ["v1 ← base", "apache-2.0", "answers it learned from | "] {
            ensure!(card.contains(words), "{format}: no '{words}' in\n{card}");
        }
    }
    let (code, output) = daemon
        .cli(&[
            "adapter",
            "export",
            "v1",
            "--out",
            text(&out.path().join("peft"))?,
        ])
        .await?;
    ensure!(
        code == 1 && output.contains("exists already"),
        "{code}: {output}"
    );
    let (code, output) = daemon.cli(&["adapter", "export", "v9"]).await?;
    ensure!(code == 1 && output.contains("v1"), "{code}: {output}");

    // Another base is refused unless it is forced.
    let other = out.path().join("other");
    std::fs::create_dir(&other)?;
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(out.path().join("peft").join(name), other.join(name))?;
    }
    let config = std::fs::read_to_string(other.join("adapter_config.json"))?;
    let config = config.replace("\"tiny\"", "\"someone/other-model\"");
    std::fs::write(other.join("adapter_config.json"), config)?;
    let (code, output) = daemon.cli(&["adapter", "import", text(&other)?]).await?;
    ensure!(
        code == 1 && output.contains("other-model"),
        "{code}: {output}"
    );
    command(&daemon, &["adapter", "import", text(&other)?, "--force"]).await?;

    // It returns as a GGUF LoRA, answers as the original does, and learns.
    let lora = out.path().join("gguf-lora/adapter.gguf");
    let imported = command(&daemon, &["adapter", "import", text(&lora)?, "--json"]).await?;
    let imported: Value = serde_json::from_str(&imported)?;
    ensure!(
        imported["version"] == "v3" && imported["state"] == "imported",
        "{imported}"
    );
    for seed in 0..3 {
        let original = ask(&daemon, "spotter:v1", seed).await?;
        let copy = ask(&daemon, "spotter:v3", seed).await?;
        ensure!(copy.adapter == "v3", "answered by {}", copy.adapter);
        ensure!(
            original.content == copy.content,
            "the copy answers otherwise"
        );
    }
    command(&daemon, &["adapter", "activate", "v3"]).await?;
    rate(&daemon, 100..112).await?;
    let run = train(&daemon).await?;
    ensure!(run["parent"] == "v3" && run["version"] == "v4", "{run}");
    let at = out.path().join("again");
    let export = [
        "adapter",
        "export",
        "v4",
        "--format",
        "gguf-lora",
        "--out",
        text(&at)?,
    ];
    command(&daemon, &export).await?;
    let card = std::fs::read_to_string(at.join("README.md"))?;
    ensure!(card.contains("v4 ← v3 (imported)"), "{card}");
    // It stays an imported one when another answers.
    command(&daemon, &["adapter", "activate", "base"]).await?;
    let shown = daemon.get("/api/v1/adapters/v3").await?;
    ensure!(shown["state"] == "imported", "{shown}");
    daemon.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn rated_answers_become_data_sets_that_other_trainers_take_a_step_on() -> Result<()> {
    let daemon = Daemon::start_with("tiny", &["--schedule", "manual"]).await?;
    let out = tempfile::tempdir()?;
    rate(&daemon, 0..8).await?;
    ask(&daemon, "spotter", 50).await?;
    let model = repository().join("models/tiny/hf");
    let rows = |path: &Path| -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(path)?;
        text.lines()
            .map(|line| Ok(serde_json::from_str(line)?))
            .collect()
    };
    let file = |format: &str| out.path().join(format);
    for format in ["jsonl", "trl-kto", "trl-dpo", "verl"] {
        let at = file(format);
        command(
            &daemon,
            &["data", "export", "--format", format, "--out", text(&at)?],
        )
        .await?;
    }
    ensure!(
        rows(&file("jsonl"))?.len() == 9,
        "all answers, rated or not"
    );
    let kto = rows(&file("trl-kto"))?;
    // Eight rated answers, two of them with a correction.
    ensure!(kto.len() == 10, "{} rows", kto.len());
    let liked = kto.iter().filter(|row| row["label"] == true).count();
    ensure!(liked == 6, "{liked} liked");
    // Each question was answered once well and once badly.
    let dpo = rows(&file("trl-dpo"))?;
    ensure!(dpo.len() == 4, "{} pairs", dpo.len());
    ensure!(dpo[0]["prompt"][0]["role"] == "system", "{}", dpo[0]);
    let (code, output) = daemon.cli(&["data", "export", "--format", "verl"]).await?;
    ensure!(code == 2, "parquet on a terminal: {output}");

    python(
        "trl_step.py",
        &["kto", text(&file("trl-kto"))?, text(&model)?],
    )?;
    python(
        "trl_step.py",
        &["dpo", text(&file("trl-dpo"))?, text(&model)?],
    )?;
    python("read_verl.py", &[text(&file("verl"))?, text(&model)?])?;
    daemon.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_that_is_called_off_leaves_nothing() -> Result<()> {
    let Ok(model) = std::env::var("SPOTTER_TEST_MODEL") else {
        println!("SPOTTER_TEST_MODEL is not set: the tiny model is exported too fast for this");
        return Ok(());
    };
    let daemon = Daemon::start_with(&model, &["--schedule", "manual"]).await?;
    let out = tempfile::tempdir()?;
    rate(&daemon, 0..8).await?;
    train(&daemon).await?;
    for how in ["request", "client", "crash"] {
        let at = out.path().join(format!("called-off-by-{how}"));
        let request = daemon
            .request(Method::POST, "/api/v1/adapters/v1/export")
            .json(&json!({"format": "merged-safetensors", "out": at}));
        let export = tokio::spawn(request.send());
        // Half of it or less is written when the file is there.
        while !partial(&at).join("model.safetensors").exists() {
            ensure!(
                !export.is_finished(),
                "it ended before it could be called off"
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        match how {
            "request" => {
                let answer = daemon
                    .request(Method::DELETE, "/api/v1/adapters/v1/export")
                    .send()
                    .await?;
                ensure!(answer.status().is_success(), "{}", answer.status());
                let answer = export.await??;
                ensure!(!answer.status().is_success(), "it was written in spite");
            }
            // The client goes away.
            "client" => export.abort(),
            // The worker dies in the middle of it.
            _ => {
                let status = daemon.get("/api/v1/status").await?;
                let pid = status["worker"]["pid"].as_u64().context("pid")?;
                let killed = Command::new("kill")
                    .args(["-9", &pid.to_string()])
                    .status()?;
                ensure!(killed.success(), "kill failed");
                let answer = export.await??;
                ensure!(!answer.status().is_success(), "it was written in spite");
            }
        }
        for _ in 0..500 {
            if !partial(&at).exists() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        ensure!(!partial(&at).exists(), "a part was left");
        ensure!(!at.exists(), "the directory is there");
    }
    daemon.stop().await
}

/// Where an export is written before it is complete.
fn partial(at: &Path) -> std::path::PathBuf {
    let mut name = at.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    at.with_file_name(name)
}
