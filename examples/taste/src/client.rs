//! Spotter's public HTTP interface, as much of it as this example needs.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// An answer and the id under which it is rated.
pub(crate) struct Answer {
    pub(crate) id: String,
    pub(crate) text: String,
}

/// A running `spotter serve`.
pub(crate) struct Client {
    http: reqwest::Client,
    url: String,
    token: String,
}

impl Client {
    pub(crate) fn new(url: &str, token: &str) -> Self {
        Self {
            http: reqwest::Client::new(),
            url: url.trim_end_matches('/').to_owned(),
            token: token.to_owned(),
        }
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Value> {
        let response = request
            .bearer_auth(&self.token)
            .send()
            .await
            .context("no answer from Spotter")?;
        let status = response.status();
        let body = response.text().await?;
        let value: Value = serde_json::from_str(&body).unwrap_or(Value::Null);
        if !status.is_success() {
            let message = value["error"]["message"].as_str().unwrap_or(&body);
            bail!("Spotter answered {status}: {message}");
        }
        Ok(value)
    }

    async fn get(&self, path: &str) -> Result<Value> {
        self.send(self.http.get(format!("{}{path}", self.url)))
            .await
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        self.send(self.http.post(format!("{}{path}", self.url)).json(body))
            .await
    }

    /// Asks one question in a conversation of its own.
    pub(crate) async fn ask(&self, prompt: &str, temperature: f32, seed: u64) -> Result<Answer> {
        let body = json!({
            "model": "spotter",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": temperature,
            "seed": seed,
            "max_tokens": 120,
            // Another seed is another conversation, even under the same question.
            "prompt_cache_key": format!("taste {seed} {prompt}"),
        });
        let reply = self.post("/v1/chat/completions", &body).await?;
        Ok(Answer {
            id: reply["id"]
                .as_str()
                .context("the answer has no id")?
                .to_owned(),
            text: reply["choices"][0]["message"]["content"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
        })
    }

    /// Rates an answer, with a correction where the person has one.
    pub(crate) async fn rate(&self, id: &str, up: bool, correction: Option<&str>) -> Result<()> {
        let mut body = json!({"id": id, "rating": if up { "up" } else { "down" }});
        if let Some(text) = correction {
            body["correction"] = json!(text);
        }
        self.post("/v1/feedback", &body).await.map(|_| ())
    }

    /// Trains on what has been rated and waits for the end of the run.
    pub(crate) async fn train(&self) -> Result<Value> {
        let started = self.post("/api/v1/training/runs", &json!({})).await?;
        let id = started["id"].as_i64().context("the run has no id")?;
        loop {
            let run = self.get(&format!("/api/v1/training/runs/{id}")).await?;
            match run["state"].as_str() {
                Some("queued" | "training" | "checking" | "paused") => {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                _ => return Ok(run),
            }
        }
    }
}
