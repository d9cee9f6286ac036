//! Starting, attaching to and stopping `spotter serve`.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use tauri::{AppHandle, Manager as _};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;

use crate::connection::{self, Connection};

/// How long the daemon may take until it listens; the model loads later.
const START: Duration = Duration::from_secs(60);
/// How long it may take to end after it was asked to.
const STOP: Duration = Duration::from_secs(10);
/// Lines of its output that are kept to explain a failed start.
const KEPT: usize = 12;

/// The daemon this shell has started, if it started one. One that ran before is not ours to stop.
#[derive(Default)]
pub(crate) struct Daemon {
    child: Mutex<Option<Child>>,
}

impl Daemon {
    /// Attaches to a running daemon, or starts one.
    ///
    /// # Errors
    /// Fails with a sentence for people: no program, an early end with its last words, or silence.
    pub(crate) async fn connect(&self, app: &AppHandle) -> anyhow::Result<Connection> {
        let data_dir = connection::data_dir(app.path().data_dir().ok());
        if let Some(running) = connection::find(data_dir.as_deref()).await? {
            return Ok(running);
        }
        self.start(&program()?, ui_dir(app)).await
    }

    async fn start(&self, program: &Path, ui_dir: Option<PathBuf>) -> anyhow::Result<Connection> {
        let mut command = Command::new(program);
        command
            .args(["serve", "--print-connection"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(dir) = ui_dir {
            command.env("SPOTTER_UI_DIR", dir);
        }
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot run {}", program.display()))?;
        let last_words = Arc::new(Mutex::new(VecDeque::new()));
        let (found, connection) = oneshot::channel();
        if let Some(output) = child.stdout.take() {
            tokio::spawn(read(output, Some(found), Arc::clone(&last_words)));
        }
        if let Some(output) = child.stderr.take() {
            tokio::spawn(read(output, None, Arc::clone(&last_words)));
        }
        let answer = tokio::time::timeout(START, connection).await;
        let said = || {
            let lines = last_words.lock().unwrap_or_else(PoisonError::into_inner);
            lines
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join("\n")
        };
        match answer {
            Ok(Ok(connection)) => {
                *self.child.lock().unwrap_or_else(PoisonError::into_inner) = Some(child);
                Ok(connection)
            }
            Ok(Err(_closed)) => {
                let status = child
                    .wait()
                    .await
                    .context("the daemon cannot be waited for")?;
                // Its other pipe may still hold the reason.
                tokio::time::sleep(Duration::from_millis(100)).await;
                bail!("The daemon ended with {status}.\n{}", said());
            }
            Err(_elapsed) => {
                child.start_kill().ok();
                bail!(
                    "The daemon did not listen within {} s.\n{}",
                    START.as_secs(),
                    said()
                );
            }
        }
    }

    /// Asks a daemon that was started here to end, waits, and ends it when it does not.
    pub(crate) fn stop(&self) {
        let child = self
            .child
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(mut child) = child {
            tauri::async_runtime::block_on(async {
                terminate(&mut child);
                if tokio::time::timeout(STOP, child.wait()).await.is_err() {
                    child.kill().await.ok();
                }
            });
        }
    }
}

/// A polite end where the system has one.
#[cfg(unix)]
fn terminate(child: &mut Child) {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    let pid = child.id().and_then(|id| i32::try_from(id).ok());
    if let Some(pid) = pid {
        kill(Pid::from_raw(pid), Signal::SIGTERM).ok();
    }
}

#[cfg(not(unix))]
fn terminate(child: &mut Child) {
    child.start_kill().ok();
}

/// Passes a daemon's output on, and hands over the connection when its line comes. Reading goes on
/// to the end: a full pipe would stop the daemon.
async fn read(
    output: impl AsyncRead + Unpin,
    mut found: Option<oneshot::Sender<Connection>>,
    last_words: Arc<Mutex<VecDeque<String>>>,
) {
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if found.is_some()
            && let Ok(connection) = serde_json::from_str::<Connection>(&line)
        {
            if let Some(found) = found.take() {
                found.send(connection).ok();
            }
            // Holds the token: not for the log.
            continue;
        }
        eprintln!("{line}");
        let mut kept = last_words.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(line);
    }
}

/// The `spotter` program: beside this one, where both the package and a build put it.
fn program() -> anyhow::Result<PathBuf> {
    let here = std::env::current_exe().context("cannot tell where this program is")?;
    let program = here.with_file_name(format!("spotter{}", std::env::consts::EXE_SUFFIX));
    if !program.exists() {
        bail!(
            "{} is missing. Install Spotter again, or build it with `make build`.",
            program.display()
        );
    }
    Ok(program)
}

/// The UI that came with the package; a build names its own in `SPOTTER_UI_DIR`.
fn ui_dir(app: &AppHandle) -> Option<PathBuf> {
    if std::env::var_os("SPOTTER_UI_DIR").is_some() {
        return None;
    }
    let dir = app.path().resource_dir().ok()?.join("ui");
    dir.join("index.html").exists().then_some(dir)
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::Daemon;

    /// Writes a program that stands in for `spotter`; the directory lives as long as the process.
    fn script(name: &str, body: &str) -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("spotter-shell-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let path = dir.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).expect("a script");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("its mode");
        path
    }

    #[tokio::test]
    async fn the_connection_line_is_found_among_other_output() {
        let program = script(
            "talks",
            r#"echo loading; echo '{"url":"http://127.0.0.1:4567","token":"t"}'; exec sleep 30"#,
        );
        let daemon = Daemon::default();
        let connection = daemon.start(&program, None).await.expect("a connection");
        assert_eq!(connection.url.port(), Some(4567));
        assert_eq!(connection.token, "t");
        let child = daemon.child.lock().expect("the lock").take();
        child.expect("a child").kill().await.expect("its end");
    }

    #[tokio::test]
    async fn an_early_end_is_told_with_its_last_words() {
        let program = script("ends", "echo 'port 8100 is taken by nginx' >&2; exit 1");
        let error = Daemon::default()
            .start(&program, None)
            .await
            .expect_err("no daemon");
        let text = error.to_string();
        assert!(text.contains("exit status: 1"), "{text}");
        assert!(text.contains("port 8100 is taken by nginx"), "{text}");
    }
}
