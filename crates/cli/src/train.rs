//! `spotter train`: starts a run and follows it to its verdict.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::args::Train;
use crate::client::{Client, Refused};
use crate::output::{Output, share_bar, text};

const POLL: Duration = Duration::from_millis(500);
/// How long a daemon that does not answer is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) async fn run(command: Train, client: &Client, output: Output) -> Result<ExitCode> {
    match command {
        Train::Now { detach } => {
            let started = client.post("training/runs", &json!({})).await?;
            let id = started["id"].as_i64().context("the run has no number")?;
            if detach {
                output.result(&started, || format!("Run {id} has started."));
                return Ok(ExitCode::SUCCESS);
            }
            let run = follow(client, id).await?;
            output.result(&run, || verdict(&run));
            let promoted = text(&run, "state") == "promoted";
            return Ok(ExitCode::from(u8::from(!promoted)));
        }
        Train::Pause => {
            client.post("training/pause", &json!({})).await?;
            output.result(&json!({"paused": true}), || {
                "Training is paused.".to_owned()
            });
        }
        Train::Resume => {
            client.post("training/resume", &json!({})).await?;
            output.result(&json!({"paused": false}), || "Training goes on.".to_owned());
        }
        Train::Status => {
            let status = client.get("status").await?;
            let training = &status["training"];
            output.result(training, || {
                format!(
                    "{}: {}\n{} of {} new ratings; live adapter {}.",
                    text(training, "state"),
                    text(training, "reason"),
                    training["fresh_labels"],
                    training["needed_labels"],
                    text(&status["adapter"], "live"),
                )
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits until a run has ended.
async fn follow(client: &Client, id: i64) -> Result<Value> {
    let bar = share_bar();
    let mut answered = Instant::now();
    loop {
        match client.get(&format!("training/runs/{id}")).await {
            Ok(run) => {
                answered = Instant::now();
                let state = text(&run, "state");
                if matches!(state, "promoted" | "rejected" | "failed" | "cancelled") {
                    bar.finish_and_clear();
                    return Ok(run);
                }
                let share = run["progress"].as_f64().unwrap_or(0.0).clamp(0.0, 1.0);
                bar.set_position((share * 1000.0) as u64);
                bar.set_message(format!("run {id}: {state}"));
            }
            Err(error) if error.is::<Refused>() => return Err(error),
            Err(error) if answered.elapsed() > PATIENCE => {
                bail!(error.context(format!("run {id} can no longer be followed")))
            }
            Err(_) => {}
        }
        tokio::time::sleep(POLL).await;
    }
}

/// How a run ended, in words.
fn verdict(run: &Value) -> String {
    let reasons: Vec<_> = run["verdict"]["reasons"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let version = run["version"].as_str().unwrap_or("the new adapter");
    let mut out = match text(run, "state") {
        "promoted" => format!("{version} is live."),
        "rejected" => format!("{version} did not pass and is kept as rejected."),
        "cancelled" => "The run was cancelled.".to_owned(),
        _ => format!("The run failed: {}", text(run, "error")),
    };
    for reason in reasons {
        out.push_str(&format!("\n- {reason}"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_names_version_and_reasons() {
        let run = json!({"state": "rejected", "version": "v2", "verdict": {"reasons": ["a", "b"]}});
        assert_eq!(
            verdict(&run),
            "v2 did not pass and is kept as rejected.\n- a\n- b"
        );
        let run = json!({"state": "failed", "error": "out of memory"});
        assert_eq!(verdict(&run), "The run failed: out of memory");
    }
}
