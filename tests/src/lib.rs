//! The shared harness of the end-to-end tests: a real daemon in a directory of its
//! own, spoken to over HTTP and through the `spotter` command only.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// The token that every test daemon is started with.
pub const TOKEN: &str = "test-token-0123456789";

/// The path of a binary that the build put beside the tests.
///
/// # Errors
/// When it has not been built, naming the command that builds it.
pub fn binary(name: &str) -> Result<PathBuf> {
    let mut directory = std::env::current_exe()?;
    directory.pop();
    if directory.ends_with("deps") {
        directory.pop();
    }
    let path = directory.join(name);
    ensure!(
        path.exists(),
        "{} is missing; run `make build` first",
        path.display()
    );
    Ok(path)
}

/// The repository's root.
pub fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// A running `spotter serve`.
pub struct Daemon {
    child: Child,
    /// Where it listens.
    pub url: String,
    /// Its data directory; removed when the daemon is dropped, unless it was given.
    pub data_dir: PathBuf,
    http: reqwest::Client,
    _owned: Option<tempfile::TempDir>,
}

impl Daemon {
    /// Starts a daemon in a fresh data directory and waits until it would answer.
    ///
    /// # Errors
    /// When it does not become ready within two minutes; the end of its log is in the message.
    pub async fn start(model: &str) -> Result<Self> {
        let owned = tempfile::tempdir()?;
        let path = owned.path().to_owned();
        Self::launch(model, path, Some(owned), &[]).await
    }

    /// Starts a daemon in a fresh data directory with more command-line arguments.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub async fn start_with(model: &str, arguments: &[&str]) -> Result<Self> {
        let owned = tempfile::tempdir()?;
        let path = owned.path().to_owned();
        Self::launch(model, path, Some(owned), arguments).await
    }

    /// Starts a daemon in this data directory.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub async fn start_in(model: &str, data_dir: &Path) -> Result<Self> {
        Self::launch(model, data_dir.to_owned(), None, &[]).await
    }

    async fn launch(
        model: &str,
        data_dir: PathBuf,
        owned: Option<tempfile::TempDir>,
        arguments: &[&str],
    ) -> Result<Self> {
        let mut child = Command::new(binary("spotter")?)
            .args([
                "serve",
                "--port",
                "0",
                "--print-connection",
                "--model",
                model,
            ])
            .args(arguments)
            .arg("--data-dir")
            .arg(&data_dir)
            .env("SPOTTER_TOKEN", TOKEN)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(data_dir.join("stderr.log"))?)
            .kill_on_drop(true)
            .spawn()
            .context("spotter serve does not start")?;
        let stdout = child.stdout.take().context("no standard output")?;
        let mut lines = BufReader::new(stdout).lines();
        let url = tokio::time::timeout(Duration::from_secs(120), async {
            while let Some(line) = lines.next_line().await? {
                if let Ok(value) = serde_json::from_str::<Value>(&line)
                    && let Some(url) = value["url"].as_str()
                {
                    return Ok(url.trim_end_matches('/').to_owned());
                }
            }
            bail!(
                "spotter serve ended before it was ready: {}",
                tail(&data_dir)
            )
        })
        .await
        .with_context(|| format!("no connection line in time: {}", tail(&data_dir)))??;
        // The pipe is drained so that the daemon never blocks on it.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let daemon = Self {
            child,
            url,
            data_dir,
            http: reqwest::Client::new(),
            _owned: owned,
        };
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            if let Ok(response) = daemon
                .http
                .get(format!("{}/readyz", daemon.url))
                .send()
                .await
                && response.status().is_success()
            {
                return Ok(daemon);
            }
            ensure!(
                Instant::now() < deadline,
                "not ready in time: {}",
                tail(&daemon.data_dir)
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// A request with the token set.
    pub fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        self.http
            .request(method, format!("{}{path}", self.url))
            .bearer_auth(TOKEN)
    }

    /// GET, expecting success and JSON.
    ///
    /// # Errors
    /// On any other answer, with its body in the message.
    pub async fn get(&self, path: &str) -> Result<Value> {
        expect_json(self.request(reqwest::Method::GET, path)).await
    }

    /// POST, expecting success and JSON.
    ///
    /// # Errors
    /// On any other answer, with its body in the message.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        expect_json(self.request(reqwest::Method::POST, path).json(body)).await
    }

    /// PUT, expecting success and JSON.
    ///
    /// # Errors
    /// On any other answer, with its body in the message.
    pub async fn put(&self, path: &str, body: &Value) -> Result<Value> {
        expect_json(self.request(reqwest::Method::PUT, path).json(body)).await
    }

    /// Streams a chat completion to its end.
    ///
    /// # Errors
    /// When the answer is not a well-formed stream.
    pub async fn stream_chat(&self, body: &Value) -> Result<Streamed> {
        let response = self
            .request(reqwest::Method::POST, "/v1/chat/completions")
            .json(body)
            .send()
            .await?;
        ensure!(
            response.status().is_success(),
            "status {}",
            response.status()
        );
        let header = |name: &str| {
            response
                .headers()
                .get(name)
                .and_then(|v| v.to_str().ok())
                .map(str::to_owned)
                .with_context(|| format!("the answer has no {name} header"))
        };
        let (step, trajectory, adapter) = (
            header("x-spotter-step")?,
            header("x-spotter-trajectory")?,
            header("x-spotter-adapter")?,
        );
        let mut text = String::new();
        let mut bytes = response.bytes_stream();
        while let Some(chunk) = bytes.next().await {
            text.push_str(&String::from_utf8_lossy(&chunk?));
        }
        let data: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .collect();
        ensure!(
            data.last() == Some(&"[DONE]"),
            "the stream does not end with [DONE]: {text}"
        );
        let chunks = data[..data.len() - 1]
            .iter()
            .map(|line| serde_json::from_str(line).context("a chunk is not JSON"))
            .collect::<Result<Vec<Value>>>()?;
        let content = chunks
            .iter()
            .filter_map(|c| c["choices"][0]["delta"]["content"].as_str())
            .collect::<String>();
        Ok(Streamed {
            step,
            trajectory,
            adapter,
            chunks,
            content,
        })
    }

    /// Runs a `spotter` command against this daemon; returns exit code and standard output.
    ///
    /// # Errors
    /// When the command cannot be run.
    pub async fn cli(&self, arguments: &[&str]) -> Result<(i32, String)> {
        let output = Command::new(binary("spotter")?)
            .args(arguments)
            .env("SPOTTER_DATA_DIR", &self.data_dir)
            .env("SPOTTER_TOKEN", TOKEN)
            .stdin(Stdio::null())
            .output()
            .await?;
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            text.push_str(&String::from_utf8_lossy(&output.stderr));
        }
        Ok((output.status.code().unwrap_or(-1), text))
    }

    /// The daemon's process id.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Asks the daemon to stop, and waits for it.
    ///
    /// # Errors
    /// When it does not end within 30 seconds or ends with a failure.
    pub async fn stop(mut self) -> Result<()> {
        let pid = self.child.id().context("the daemon has ended by itself")?;
        let status = Command::new("kill")
            .args(["-TERM", &pid.to_string()])
            .status()
            .await?;
        ensure!(status.success(), "kill failed");
        let status = tokio::time::timeout(Duration::from_secs(30), self.child.wait())
            .await
            .context("the daemon does not stop")??;
        ensure!(
            status.success(),
            "the daemon ended with {status}: {}",
            tail(&self.data_dir)
        );
        Ok(())
    }
}

/// A streamed answer, taken apart.
#[derive(Debug)]
pub struct Streamed {
    /// `x-spotter-step`.
    pub step: String,
    /// `x-spotter-trajectory`.
    pub trajectory: String,
    /// `x-spotter-adapter`.
    pub adapter: String,
    /// Every chunk but `[DONE]`.
    pub chunks: Vec<Value>,
    /// The joined content.
    pub content: String,
}

async fn expect_json(request: reqwest::RequestBuilder) -> Result<Value> {
    let response = request.send().await?;
    let (status, url) = (response.status(), response.url().path().to_owned());
    let body = response.text().await?;
    ensure!(status.is_success(), "{url} answered {status}: {body}");
    if body.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_str(&body).with_context(|| format!("{url} did not answer with JSON: {body}"))
}

fn tail(data_dir: &Path) -> String {
    let log = std::fs::read_to_string(data_dir.join("stderr.log")).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
