//! `kill -9` at random moments while a process writes: the file stays whole, what was
//! acknowledged as rated is there, and nothing is there twice.
#![cfg(unix)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{exported, step, vote};
use serde_json::{Value, json};
use spotter_core::AdapterVersion;
use spotter_store::{RewardTarget, Store};

/// Rounds of the plain test, and of the full one.
const ROUNDS: (u64, u64) = (10, 100);

/// Writes until it is killed: growing conversations from two threads, votes, runs that
/// claim and consume, and forgetting. A line on stdout is an acknowledgement.
fn write_until_killed(dir: &Path, round: u64) {
    let store = Store::open(dir).expect("opens");
    println!("open");
    let threads: Vec<_> = (0..2)
        .map(|thread| {
            let store = store.clone();
            std::thread::spawn(move || converse(&store, &format!("r{round}t{thread}")))
        })
        .collect();
    loop {
        let run = store
            .insert_run("training", AdapterVersion::BASE, json!({}))
            .expect("run");
        let batch = store.claim_batch(run, 8).expect("claimed");
        let used = batch.iter().step_by(2).map(|s| s.uid.clone()).collect();
        store
            .consume_batch(run, used, Vec::new())
            .expect("consumed");
        std::thread::sleep(Duration::from_millis(3));
        if threads.iter().all(std::thread::JoinHandle::is_finished) {
            return;
        }
    }
}

fn converse(store: &Store, session: &str) {
    let (mut prompt, mut messages) = (vec![1, 2, 3], Vec::new());
    for i in 0.. {
        messages.push(json!({"role": "user", "content": format!("question {i} of {session}")}));
        let mut s = step(
            session,
            &format!("{session}-{i}"),
            i,
            prompt.clone(),
            vec![i, i + 1],
        );
        s.request = json!({"messages": messages});
        prompt.extend([i, i + 1, 7]);
        let uid = s.uid.clone();
        store.append_step(s).expect("handed over");
        if i % 3 == 0 {
            store
                .add_reward(RewardTarget::Step(uid.clone()), vote(Some(-1.0)))
                .expect("rated");
            say(&format!("rated {uid}"));
        }
        if i % 42 == 40 {
            store.forget_step(uid.clone()).expect("forgotten");
            say(&format!("forgot {uid}"));
        }
        if i % 200 == 199 {
            (prompt, messages) = (vec![1, 2, 3], Vec::new());
        }
    }
}

/// One write per line, so that a line is whole or not there.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(format!("{line}\n").as_bytes());
    let _ = out.flush();
}

#[test]
fn killed_while_writing() {
    if let Ok(dir) = std::env::var("SPOTTER_TEST_CRASH") {
        let round = std::env::var("SPOTTER_TEST_ROUND").expect("round");
        write_until_killed(Path::new(&dir), round.parse().expect("number"));
        return;
    }
    let full = std::env::var_os("SPOTTER_TEST_FULL").is_some();
    let rounds = if full { ROUNDS.1 } else { ROUNDS.0 };
    let dir = tempfile::tempdir().expect("directory");
    let (mut rated, mut forgotten) = (BTreeSet::new(), BTreeSet::new());
    let mut seed = std::process::id().wrapping_mul(2_654_435_761);
    for round in 0..rounds {
        let mut child = Command::new(std::env::current_exe().expect("test binary"))
            .args(["--exact", "killed_while_writing", "--nocapture"])
            .env("SPOTTER_TEST_CRASH", dir.path())
            .env("SPOTTER_TEST_ROUND", round.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
        // The harness speaks first; the pool is open after that.
        while lines.next().expect("a line").expect("text") != "open" {}
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        std::thread::sleep(Duration::from_micros(u64::from(seed >> 8) % 150_000));
        child.kill().expect("killed");
        child.wait().expect("gone");
        for line in lines.map_while(Result::ok) {
            match line.split_once(' ') {
                Some(("rated", uid)) => rated.insert(uid.to_owned()),
                Some(("forgot", uid)) => forgotten.insert(uid.to_owned()),
                _ => false,
            };
        }
        check(dir.path(), &rated, &forgotten, round);
    }
    assert!(rated.len() as u64 > rounds, "the processes did write");
}

fn check(dir: &Path, rated: &BTreeSet<String>, forgotten: &BTreeSet<String>, round: u64) {
    let store = Store::open(dir).expect("opens after the kill");
    let c = rusqlite::Connection::open_with_flags(
        store.path(),
        rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY,
    )
    .expect("reader");
    let whole: String = c
        .query_row("PRAGMA integrity_check", [], |r| r.get(0))
        .expect("checked");
    assert_eq!(whole, "ok", "round {round}");
    let strays: i64 = c
        .query_row("SELECT count(*) FROM pragma_foreign_key_check", [], |r| {
            r.get(0)
        })
        .expect("checked");
    assert_eq!(strays, 0, "round {round}");
    let claimed: i64 = c
        .query_row(
            "SELECT count(*) FROM step WHERE learning = 'claimed'",
            [],
            |r| r.get(0),
        )
        .expect("counted");
    assert_eq!(claimed, 0, "a dead run gave everything back");

    // Every step can be read whole, and is there once.
    let mut places: BTreeMap<(String, u64), u32> = BTreeMap::new();
    let mut there = BTreeMap::new();
    for line in exported(&store) {
        let s: Value = serde_json::from_str(&line).expect("JSON");
        let place = (
            s["trajectory"].as_str().expect("trajectory").to_owned(),
            s["index"].as_u64().expect("index"),
        );
        *places.entry(place).or_default() += 1;
        let votes = s["rewards"].as_array().expect("rewards").len();
        there.insert(s["uid"].as_str().expect("uid").to_owned(), votes);
    }
    let twice: Vec<_> = places.iter().filter(|(_, n)| **n > 1).collect();
    assert!(twice.is_empty(), "round {round}: {twice:?}");
    assert_eq!(store.counts().expect("counts").steps, there.len() as u64);
    for uid in rated {
        assert_eq!(
            there.get(uid),
            Some(&1),
            "round {round}: the rated step {uid} is not there with its one vote"
        );
    }
    for uid in forgotten {
        assert!(!there.contains_key(uid), "round {round}: {uid} came back");
    }
}
