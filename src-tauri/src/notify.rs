//! Desktop notifications: a lesson has ended, and what came of it.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::Context as _;
use futures::StreamExt as _;
use serde::Deserialize;
use serde_json::Value;
use tauri::AppHandle;
use tauri_plugin_notification::NotificationExt as _;

use crate::connection::{self, Connection};
use crate::words::words;

/// A run as far as a notification needs it.
#[derive(Deserialize)]
struct Run {
    id: Value,
    #[serde(default)]
    version: Option<String>,
    #[serde(default)]
    ended_at: Option<i64>,
    #[serde(default)]
    verdict: Option<Verdict>,
    #[serde(default)]
    error: Option<String>,
}

#[derive(Deserialize)]
struct Verdict {
    promoted: bool,
    #[serde(default)]
    reasons: Vec<String>,
}

#[derive(Deserialize)]
struct Runs {
    items: Vec<Run>,
}

/// Follows the daemon's events for as long as the shell lives. Runs that had ended before are old
/// news.
pub(crate) async fn follow(app: AppHandle, connection: Connection) {
    let Ok(client) = connection::client() else {
        return;
    };
    let mut known: Option<HashSet<String>> = None;
    loop {
        if let Err(error) = listen(&app, &client, &connection, &mut known).await {
            eprintln!("The daemon's events are not heard for now: {error:#}");
        }
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
}

async fn listen(
    app: &AppHandle,
    client: &reqwest::Client,
    connection: &Connection,
    known: &mut Option<HashSet<String>>,
) -> anyhow::Result<()> {
    let events = client
        .get(connection.at("/api/v1/events"))
        .bearer_auth(&connection.token)
        .send()
        .await?
        .error_for_status()?;
    announce(app, client, connection, known).await?;
    let mut chunks = events.bytes_stream();
    let mut buffer = Vec::new();
    while let Some(chunk) = chunks.next().await {
        buffer.extend_from_slice(&chunk.context("the stream broke off")?);
        let mut news = false;
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = buffer.drain(..=end).collect();
            news |= tells_an_end(&line);
        }
        if news {
            announce(app, client, connection, known).await?;
        }
    }
    Ok(())
}

/// Whether an event line tells of a run that has ended; what came of it is asked for afterwards.
fn tells_an_end(line: &[u8]) -> bool {
    let Some(data) = line.strip_prefix(b"data:") else {
        return false;
    };
    serde_json::from_slice::<Value>(data)
        .is_ok_and(|event| event["type"] == "run" && event["run"]["ended_at"].is_number())
}

async fn announce(
    app: &AppHandle,
    client: &reqwest::Client,
    connection: &Connection,
    known: &mut Option<HashSet<String>>,
) -> anyhow::Result<()> {
    let runs: Runs = client
        .get(connection.at("/api/v1/training/runs"))
        .bearer_auth(&connection.token)
        .send()
        .await?
        .error_for_status()?
        .json()
        .await?;
    let first = known.is_none();
    let known = known.get_or_insert_default();
    for run in runs.items.iter().filter(|run| run.ended_at.is_some()) {
        if known.insert(run.id.to_string())
            && !first
            && let Some((title, body)) = message(run)
        {
            app.notification()
                .builder()
                .title(title)
                .body(body)
                .show()
                .ok();
        }
    }
    Ok(())
}

/// What to say about an ended run; nothing about one the person has cancelled.
fn message(run: &Run) -> Option<(&'static str, String)> {
    let words = words();
    let version = run.version.as_deref().unwrap_or_default();
    if let Some(verdict) = &run.verdict {
        let title = if verdict.promoted {
            words.went_live
        } else {
            words.was_rejected
        };
        let reason = verdict.reasons.first().map_or("", String::as_str);
        return Some((title, format!("{version}: {reason}")));
    }
    run.error
        .as_ref()
        .map(|error| (words.lesson_failed, error.clone()))
}

#[cfg(test)]
mod tests {
    use super::{Run, message, tells_an_end};

    fn run(json: &str) -> Run {
        serde_json::from_str(json).expect("a run")
    }

    #[test]
    fn only_ended_runs_are_news() {
        assert!(tells_an_end(
            b"data: {\"type\":\"run\",\"run\":{\"id\":3,\"ended_at\":17}}\n"
        ));
        assert!(tells_an_end(
            b"data:{\"type\":\"run\",\"run\":{\"ended_at\":1}}\n"
        ));
        assert!(!tells_an_end(
            b"data: {\"type\":\"run\",\"run\":{\"id\":3,\"progress\":0.5}}\n"
        ));
        assert!(!tells_an_end(b"data: {\"type\":\"metric\"}\n"));
        assert!(!tells_an_end(b": heartbeat\n"));
        assert!(!tells_an_end(b"data: not json\n"));
    }

    #[test]
    fn a_verdict_is_told_with_its_first_reason() {
        let rejected = run(
            r#"{"id":3,"version":"v3","ended_at":1,"verdict":{"promoted":false,"reasons":["It repeats itself."]}}"#,
        );
        let (_, body) = message(&rejected).expect("a message");
        assert_eq!(body, "v3: It repeats itself.");
    }

    #[test]
    fn a_cancelled_run_is_not_announced() {
        assert!(message(&run(r#"{"id":"4","ended_at":1}"#)).is_none());
    }
}
