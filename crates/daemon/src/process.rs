//! One worker process: its pipes, its last words, its end.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use spotter_core::code::{Code, Failure};
use spotter_core::worker::{Command, Inspection, ModelFacts, Report, WorkerRole};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Child;
use tokio::sync::mpsc;

/// Lines of the worker's log that explain a crash.
const LAST_WORDS: usize = 12;

/// The worker's executable: `SPOTTER_WORKER`, else beside this one.
///
/// # Errors
/// When it is not there; the message says where it was looked for.
fn executable() -> Result<PathBuf, Failure> {
    let path = match std::env::var_os("SPOTTER_WORKER") {
        Some(path) => PathBuf::from(path),
        None => std::env::current_exe()
            .map_err(|e| Failure::new(Code::Internal, e.to_string()))?
            .with_file_name(format!("spotter-worker{}", std::env::consts::EXE_SUFFIX)),
    };
    if path.exists() {
        return Ok(path);
    }
    Err(Failure::new(
        Code::Unavailable,
        format!(
            "the worker {} is missing; build it, or set SPOTTER_WORKER to where it is",
            path.display()
        ),
    ))
}

/// Whether a model can be used at all, and its facts: a worker loads it and tells.
///
/// # Errors
/// When it cannot be loaded (the message names the file and says why), or there is no
/// worker to ask.
pub async fn inspect(model: &Path) -> Result<ModelFacts, Failure> {
    let output = tokio::process::Command::new(executable()?)
        .arg("--inspect")
        .arg(model)
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|e| Failure::new(Code::Unavailable, format!("the worker does not start: {e}")))?;
    match serde_json::from_slice(&output.stdout) {
        Ok(Inspection::Model(facts)) => Ok(*facts),
        Ok(Inspection::Failure(failure)) => Err(failure),
        Err(_) => Err(Failure::new(
            Code::BadModelFile,
            format!(
                "{} makes the worker end ({}); it was not taken in",
                model.display(),
                output.status
            ),
        )),
    }
}

/// A running worker.
pub(crate) struct Process {
    child: Child,
    commands: mpsc::UnboundedSender<Command>,
    /// What the worker says; ends when it dies.
    pub(crate) reports: mpsc::UnboundedReceiver<Report>,
    words: Arc<Mutex<VecDeque<String>>>,
}

impl Process {
    /// Starts a worker. It dies with this process, because its input ends then.
    pub(crate) fn spawn(roles: &[WorkerRole]) -> Result<Self, Failure> {
        let names: Vec<&str> = roles
            .iter()
            .map(|role| match role {
                WorkerRole::Serve => "serve",
                WorkerRole::Train => "train",
            })
            .collect();
        let role = names.join(",");
        let lost = |what: &str| Failure::new(Code::Internal, format!("the worker has no {what}"));
        let mut child = tokio::process::Command::new(executable()?)
            .args(["--role", &role])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| {
                Failure::new(Code::Unavailable, format!("the worker does not start: {e}"))
            })?;
        let mut stdin = child.stdin.take().ok_or_else(|| lost("input"))?;
        let stdout = child.stdout.take().ok_or_else(|| lost("output"))?;
        let stderr = child.stderr.take().ok_or_else(|| lost("log"))?;

        let (commands, mut outgoing) = mpsc::unbounded_channel::<Command>();
        tokio::spawn(async move {
            while let Some(command) = outgoing.recv().await {
                let Ok(mut line) = serde_json::to_vec(&command) else {
                    continue;
                };
                line.push(b'\n');
                if stdin.write_all(&line).await.is_err() || stdin.flush().await.is_err() {
                    return;
                }
            }
        });
        let (incoming, reports) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut lines = BufReader::with_capacity(1 << 16, stdout).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                match serde_json::from_str::<Report>(&line) {
                    Ok(report) => {
                        if incoming.send(report).is_err() {
                            return;
                        }
                    }
                    Err(error) => tracing::error!(%error, "a worker's report was not understood"),
                }
            }
        });
        let words = Arc::new(Mutex::new(VecDeque::new()));
        let heard = words.clone();
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                tracing::info!(target: "worker", role, "{line}");
                let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
                if heard.len() == LAST_WORDS {
                    heard.pop_front();
                }
                heard.push_back(line);
            }
        });
        Ok(Self {
            child,
            commands,
            reports,
            words,
        })
    }

    /// Hands a command to the worker's pipe.
    pub(crate) fn send(&self, command: Command) {
        // A broken pipe shows as the end of the reports.
        let _ = self.commands.send(command);
    }

    /// Its process id while it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits for the end and says how it came about.
    pub(crate) async fn died(&mut self) -> String {
        let status = match self.child.wait().await {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        // The log's reader may be a moment behind the process.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        let panic = words
            .iter()
            .rev()
            .find(|line| line.contains("panicked") || line.contains("ERROR"));
        match panic.or_else(|| words.back()) {
            Some(line) => format!("{status}; its last words: {line}"),
            None => status,
        }
    }

    /// Asks the worker to finish and waits; kills it when it does not.
    pub(crate) async fn shutdown(mut self, grace: Duration) {
        self.send(Command::Shutdown {
            grace_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
        });
        let patience = grace + Duration::from_secs(5);
        if tokio::time::timeout(patience, self.child.wait())
            .await
            .is_err()
        {
            tracing::warn!("a worker did not end in time and was killed");
            let _ = self.child.kill().await;
        }
    }
}
