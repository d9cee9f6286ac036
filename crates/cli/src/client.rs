//! Talking to a running daemon.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use reqwest::{Method, RequestBuilder, Response};
use serde_json::Value;
use spotter_daemon::data_dir::DataDir;
use spotter_daemon::secrets;

/// The daemon said no.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Refused {
    /// A `core::Code` name.
    pub(crate) code: String,
    /// Its message.
    pub(crate) message: String,
}

/// A daemon that can be asked.
pub(crate) struct Client {
    http: reqwest::Client,
    url: String,
    token: Option<String>,
}

impl Client {
    /// The daemon at this address, else the one that runs on the data directory.
    pub(crate) fn find(data_dir: &DataDir, url: Option<&str>) -> Result<Self> {
        let url = match url {
            Some(url) => url.to_owned(),
            None => {
                data_dir
                    .read_connection()
                    .with_context(|| {
                        format!(
                            "no daemon runs on {}; start one with `spotter serve`",
                            data_dir.root.display()
                        )
                    })?
                    .url
            }
        };
        let token = secrets::find_token(data_dir, |key| std::env::var(key).ok())?;
        Ok(Self {
            // The daemon is on this machine or named outright; a proxy is neither.
            http: reqwest::Client::builder()
                .no_proxy()
                .connect_timeout(Duration::from_secs(3))
                .build()?,
            url: url.trim_end_matches('/').to_owned(),
            token: token.map(|(token, _)| token),
        })
    }

    /// The daemon's address.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self
            .http
            .request(method, format!("{}/api/v1/{path}", self.url));
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response> {
        let response = request.send().await.map_err(|error| {
            if error.is_connect() {
                anyhow!(
                    "no daemon answers on {}; start one with `spotter serve`",
                    self.url
                )
            } else {
                anyhow::Error::new(error.without_url()).context("the daemon did not answer")
            }
        })?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body: Value = response.json().await.unwrap_or_default();
        let error = &body["error"];
        match (error["code"].as_str(), error["message"].as_str()) {
            (Some(code), Some(message)) => Err(Refused {
                code: code.to_owned(),
                message: message.to_owned(),
            }
            .into()),
            _ => bail!("the daemon answered {status}"),
        }
    }

    async fn json(&self, request: RequestBuilder) -> Result<Value> {
        let response = self.send(request).await?;
        let bytes = response.bytes().await.context("the answer broke off")?;
        if bytes.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&bytes).context("the daemon's answer is not JSON")
    }

    /// GET of a path below `/api/v1/`.
    pub(crate) async fn get(&self, path: &str) -> Result<Value> {
        self.json(self.request(Method::GET, path)).await
    }

    /// POST of a JSON body.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        self.json(self.request(Method::POST, path).json(body)).await
    }

    /// PUT of a JSON body.
    pub(crate) async fn put(&self, path: &str, body: &Value) -> Result<Value> {
        self.json(self.request(Method::PUT, path).json(body)).await
    }

    /// DELETE.
    pub(crate) async fn delete(&self, path: &str) -> Result<Value> {
        self.json(self.request(Method::DELETE, path)).await
    }

    /// POST of JSON lines.
    pub(crate) async fn post_lines(&self, path: &str, lines: Vec<u8>) -> Result<Value> {
        let request = self
            .request(Method::POST, path)
            .header(reqwest::header::CONTENT_TYPE, "application/x-ndjson")
            .body(lines);
        self.json(request).await
    }

    /// GET of a body that is read as it comes.
    pub(crate) async fn stream(&self, path: &str) -> Result<Response> {
        self.send(self.request(Method::GET, path)).await
    }
}

/// An id as a part of a path: letters, digits and marks that need no escape.
pub(crate) fn part(id: &str) -> Result<&str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if id.is_empty() || id.starts_with('.') || !id.chars().all(plain) {
        bail!("'{id}' is not an id");
    }
    Ok(id)
}
