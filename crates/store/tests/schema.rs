//! Files of earlier releases, of later ones, and of two processes at once.

mod common;

use common::{exported, open, step};
use spotter_core::id::StepUid;
use spotter_store::{Store, StoreError};

/// A file as the release with this schema wrote it, and what that release exported.
fn fixture(schema: usize) -> (tempfile::TempDir, Vec<serde_json::Value>) {
    let at = |name: String| {
        std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures")
            .join(name)
    };
    let dir = tempfile::tempdir().expect("directory");
    let packed = std::fs::File::open(at(format!("schema-{schema}.db.zst"))).expect("fixture");
    let bytes = zstd::decode_all(packed).expect("unpacks");
    std::fs::write(dir.path().join("spotter.db"), bytes).expect("written");
    let lines = std::fs::read_to_string(at(format!("schema-{schema}.jsonl"))).expect("lines");
    let lines = lines
        .lines()
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect();
    (dir, lines)
}

/// Numbers as single precision: the first release wrote more digits than they have.
fn single(value: &serde_json::Value) -> serde_json::Value {
    match value {
        serde_json::Value::Array(items) => items.iter().map(single).collect(),
        serde_json::Value::Number(n) if n.is_f64() => (n.as_f64().expect("a number") as f32).into(),
        other => other.clone(),
    }
}

#[test]
fn a_file_of_the_first_schema_keeps_everything() {
    let (dir, before) = fixture(1);
    let store = Store::open(dir.path()).expect("migrated");
    let after = exported(&store);
    assert_eq!(after.len(), before.len());
    for (before, after) in before.iter().zip(&after) {
        let after: serde_json::Value = serde_json::from_str(after).expect("JSON");
        for (field, value) in before.as_object().expect("object") {
            let (old, new) = (single(value), single(&after[field]));
            assert_eq!(new, old, "{field} of {}", before["uid"]);
        }
    }
    // What the new schema adds is there for the old steps.
    let counts = store.counts().expect("counts");
    assert_eq!((counts.steps, counts.up, counts.down), (15, 2, 1));
    assert_eq!(counts.unrated, 11, "side steps are not for review");
    let number = |uid: &str| {
        let uid = StepUid::from(uid);
        store.summary(&uid).expect("step").turn_number
    };
    assert_eq!(
        (number("alpha0"), number("alpha3"), number("alpha11")),
        (1, 2, 4)
    );
    let find = |q: &str| {
        let filter = spotter_store::StepFilter {
            q: Some(q.into()),
            ..Default::default()
        };
        store.steps(&filter).expect("found").items.len()
    };
    assert_eq!(
        (find("煮熟"), find("怎么"), find("question 3")),
        (15, 12, 1)
    );
    assert_eq!(
        store.drop_counts().expect("drops"),
        [("too old".to_owned(), 1)]
    );
    assert_eq!(
        store.setting("dial").expect("setting").as_deref(),
        Some("\"bold\"")
    );
    assert_eq!(store.adapters().expect("adapters").len(), 1);
    // The copy from before the migration is there.
    let backups: Vec<_> = std::fs::read_dir(dir.path().join("backups"))
        .expect("backups")
        .collect();
    assert_eq!(backups.len(), 1);
    // A text that two steps share outlives one of them, and goes with the last.
    let forgotten = store
        .forget_step(StepUid::from("alpha2"))
        .expect("forgotten");
    assert_eq!(forgotten.adapters.len(), 1, "v1 learned from it");
    assert_eq!(
        exported(&store)[2..],
        after[3..],
        "the others are as they were"
    );
    assert!(!dir.path().join("backups").exists());
}

#[test]
fn an_interrupted_migration_changes_nothing() {
    let (dir, before) = fixture(1);
    let path = dir.path().join("spotter.db");
    // Something of the new schema is in the way, so the migration fails half-way.
    let c = rusqlite::Connection::open(&path).expect("opens");
    c.execute_batch("CREATE TABLE drop_count (x INTEGER)")
        .expect("created");
    drop(c);
    assert!(matches!(
        Store::open(dir.path()),
        Err(StoreError::Migration(_))
    ));
    let c = rusqlite::Connection::open(&path).expect("opens");
    c.execute_batch("DROP TABLE drop_count").expect("dropped");
    let version: i64 = c
        .pragma_query_value(None, "user_version", |r| r.get(0))
        .expect("version");
    assert_eq!(version, 1);
    drop(c);
    let store = Store::open(dir.path()).expect("migrated");
    assert_eq!(exported(&store).len(), before.len());
}

#[test]
fn a_newer_file_is_refused_and_left_alone() {
    let (dir, store) = open();
    store
        .append_step_durably(step("s", "t", 0, vec![1], vec![2]))
        .expect("stored");
    let path = store.path().to_owned();
    drop(store);
    let c = rusqlite::Connection::open(&path).expect("opens");
    c.pragma_update(None, "user_version", 99).expect("version");
    drop(c);
    let before = std::fs::read(&path).expect("file");
    let Err(error) = Store::open(dir.path()) else {
        panic!("a newer file was opened")
    };
    let text = error.to_string();
    assert!(text.contains("99"), "{text}");
    assert!(text.contains("install the newer version"), "{text}");
    let after = std::fs::read(&path).expect("file");
    assert!(after == before, "the file was changed");
}

#[test]
fn a_second_process_is_told_who_has_the_directory() {
    if let Ok(dir) = std::env::var("SPOTTER_TEST_SECOND") {
        // The second process: this very test, started below.
        let Err(error) = Store::open(std::path::Path::new(&dir)) else {
            panic!("two holders")
        };
        println!("refused: {error}");
        return;
    }
    let (dir, store) = open();
    store
        .append_step_durably(step("s", "t", 0, vec![1], vec![2]))
        .expect("stored");
    let second = std::process::Command::new(std::env::current_exe().expect("test binary"))
        .args([
            "--exact",
            "a_second_process_is_told_who_has_the_directory",
            "--nocapture",
        ])
        .env("SPOTTER_TEST_SECOND", dir.path())
        .output()
        .expect("runs");
    let said = String::from_utf8_lossy(&second.stdout).into_owned();
    assert!(second.status.success(), "{said}");
    let holder = format!("process {}", std::process::id());
    assert!(
        said.contains("refused:") && said.contains(&holder),
        "{said}"
    );
    // The first one goes on, and the directory is free once it has gone.
    store
        .append_step_durably(step("s", "t", 1, vec![1], vec![2]))
        .expect("stored");
    drop(store);
    let store = Store::open(dir.path()).expect("free again");
    assert_eq!(store.counts().expect("counts").steps, 2);
}
