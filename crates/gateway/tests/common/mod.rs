//! A gateway on a free port, over a scripted engine and a pool in memory.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses a part of this"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use spotter_core::AdapterVersion;
use spotter_core::code::{Code, Failure};
use spotter_gateway::App;
use spotter_gateway::control::Control;
use spotter_gateway::control::dto::{
    Adapter, AdapterList, Check, ConnectGuide, ExportEstimate, ExportRequest, Exported,
    ImportAdapter, ModelList, PruneResult, Run, RunStarted, Series, Setting, Status,
};
use spotter_gateway::control::events::EventHub;
use spotter_gateway::engine::scripted::ScriptedEngine;
use spotter_gateway::guard::Guard;
use spotter_gateway::pool::memory::MemoryPool;
use tokio::sync::oneshot;

pub const TOKEN: &str = "test-token";

/// A control that holds one run and one adapter.
#[derive(Default)]
pub struct StubControl {
    pub recording_paused: AtomicBool,
    pub refuse_runs: AtomicBool,
}

fn adapter() -> Adapter {
    Adapter {
        version: "v1".into(),
        parent: Some("base".into()),
        state: "kept".into(),
        run_id: Some(1),
        ..Adapter::default()
    }
}

fn adapters() -> AdapterList {
    AdapterList {
        live: "base".into(),
        items: vec![adapter()],
    }
}

fn run() -> Run {
    Run {
        id: 1,
        state: "promoted".into(),
        parent: "base".into(),
        version: Some("v1".into()),
        progress: 1.0,
        ..Run::default()
    }
}

#[async_trait]
impl Control for StubControl {
    async fn status(&self) -> Result<Status, Failure> {
        Ok(Status {
            version: "test".into(),
            recording: self.recording(),
            ..Status::default()
        })
    }
    async fn start_run(&self) -> Result<RunStarted, Failure> {
        if self.refuse_runs.load(Ordering::SeqCst) {
            return Err(Failure::new(
                Code::NotEnoughLabels,
                "3 of 8 ratings are there.",
            ));
        }
        Ok(RunStarted { id: 1 })
    }
    async fn runs(&self) -> Result<Vec<Run>, Failure> {
        Ok(vec![run()])
    }
    async fn run(&self, id: i64) -> Result<Option<Run>, Failure> {
        Ok((id == 1).then(run))
    }
    async fn run_metrics(&self, _id: i64, points: usize) -> Result<Vec<Series>, Failure> {
        Ok(vec![Series {
            name: "policy_loss".into(),
            points: (0..points.min(3)).map(|at| (at as f64, 0.5)).collect(),
        }])
    }
    async fn pause_training(&self) -> Result<(), Failure> {
        Ok(())
    }
    async fn resume_training(&self) -> Result<(), Failure> {
        Ok(())
    }
    async fn cancel_run(&self, _id: i64) -> Result<(), Failure> {
        Ok(())
    }
    async fn adapters(&self) -> Result<AdapterList, Failure> {
        Ok(adapters())
    }
    async fn adapter(&self, version: AdapterVersion) -> Result<Option<Adapter>, Failure> {
        Ok((version == AdapterVersion(1)).then(adapter))
    }
    async fn activate_adapter(&self, version: AdapterVersion) -> Result<AdapterList, Failure> {
        if version > AdapterVersion(1) {
            return Err(Failure::new(Code::NotFound, "There is no such adapter."));
        }
        Ok(adapters())
    }
    async fn rollback_adapter(&self) -> Result<AdapterList, Failure> {
        Ok(adapters())
    }
    async fn export_adapter(
        &self,
        _version: AdapterVersion,
        request: ExportRequest,
    ) -> Result<Exported, Failure> {
        Ok(Exported {
            path: request.out.unwrap_or(request.format),
            bytes: 7,
        })
    }
    async fn export_estimate(
        &self,
        _version: AdapterVersion,
        _format: &str,
    ) -> Result<ExportEstimate, Failure> {
        Ok(ExportEstimate {
            bytes: 7,
            free_bytes: 70,
        })
    }
    async fn cancel_export(&self, _version: AdapterVersion) -> Result<(), Failure> {
        Ok(())
    }
    async fn import_adapter(&self, _request: ImportAdapter) -> Result<Adapter, Failure> {
        Ok(adapter())
    }
    async fn pin_adapter(&self, _version: AdapterVersion, _pinned: bool) -> Result<(), Failure> {
        Ok(())
    }
    async fn prune_adapters(&self) -> Result<PruneResult, Failure> {
        Ok(PruneResult::default())
    }
    async fn models(&self) -> Result<ModelList, Failure> {
        Ok(ModelList::default())
    }
    async fn pull_model(&self, _name: &str) -> Result<(), Failure> {
        Ok(())
    }
    async fn pause_model(&self, _name: &str) -> Result<(), Failure> {
        Ok(())
    }
    async fn activate_model(&self, _name: &str) -> Result<(), Failure> {
        Ok(())
    }
    async fn import_model(&self, path: &str) -> Result<String, Failure> {
        Ok(path.to_owned())
    }
    async fn remove_model(&self, _name: &str) -> Result<(), Failure> {
        Ok(())
    }
    async fn settings(&self) -> Result<Vec<Setting>, Failure> {
        Ok(vec![Setting {
            key: "port".into(),
            value: json!(8100),
            ..Setting::default()
        }])
    }
    async fn change_settings(&self, changes: Map<String, Value>) -> Result<Vec<Setting>, Failure> {
        Ok(changes
            .into_iter()
            .map(|(key, value)| Setting {
                key,
                value,
                ..Setting::default()
            })
            .collect())
    }
    async fn doctor(&self) -> Result<Vec<Check>, Failure> {
        Ok(vec![Check::default()])
    }
    async fn token(&self) -> Result<String, Failure> {
        Ok(TOKEN.into())
    }
    async fn set_recording(&self, paused: bool) -> Result<(), Failure> {
        self.recording_paused.store(paused, Ordering::SeqCst);
        Ok(())
    }
    fn recording(&self) -> bool {
        !self.recording_paused.load(Ordering::SeqCst)
    }
    async fn connect_guide(&self, client: &str) -> Result<Option<ConnectGuide>, Failure> {
        Ok((client == "openclaw").then(ConnectGuide::default))
    }
    fn request_seen(&self, _client: &str) {}
}

/// A running gateway.
pub struct Gateway {
    pub url: String,
    pub engine: Arc<ScriptedEngine>,
    pub pool: Arc<MemoryPool>,
    pub control: Arc<StubControl>,
    pub events: EventHub,
    http: reqwest::Client,
    stop: Option<oneshot::Sender<()>>,
    serving: Option<tokio::task::JoinHandle<std::io::Result<()>>>,
}

impl Gateway {
    pub async fn start() -> Self {
        Self::over(ScriptedEngine::default()).await
    }

    pub async fn over(engine: ScriptedEngine) -> Self {
        Self::with(engine, Some(TOKEN), None).await
    }

    pub async fn with(
        engine: ScriptedEngine,
        token: Option<&str>,
        ui_dir: Option<std::path::PathBuf>,
    ) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a free port");
        let address = listener.local_addr().expect("an address");
        let engine = Arc::new(engine);
        let pool = Arc::new(MemoryPool::default());
        let control = Arc::new(StubControl::default());
        let events = EventHub::default();
        let guard = Guard::new(address, token, &[]).expect("loopback");
        let app = App::new(
            Arc::clone(&pool) as _,
            Arc::clone(&engine) as _,
            Arc::clone(&control) as _,
            events.clone(),
            guard,
            ui_dir,
        );
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(spotter_gateway::run(listener, Arc::new(app), async {
            let _ = stopped.await;
        }));
        Self {
            url: format!("http://{address}"),
            engine,
            pool,
            control,
            events,
            http: reqwest::Client::new(),
            stop: Some(stop),
            serving: Some(serving),
        }
    }

    /// Asks the server to stop and waits until it has.
    pub async fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(serving) = self.serving.take() {
            serving.await.expect("no panic").expect("no error");
        }
    }

    pub fn request(&self, method: &str, path: &str) -> reqwest::RequestBuilder {
        let method = method.parse().expect("a method");
        self.http
            .request(method, format!("{}{path}", self.url))
            .bearer_auth(TOKEN)
    }

    pub async fn send(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        let mut request = self.request(method, path);
        if let Some(body) = body {
            request = request.json(&body);
        }
        let response = request.send().await.expect("an answer");
        let status = response.status().as_u16();
        let text = response.text().await.expect("a body");
        (
            status,
            serde_json::from_str(&text).unwrap_or(Value::String(text)),
        )
    }

    pub async fn get(&self, path: &str) -> Value {
        let (status, body) = self.send("GET", path, None).await;
        assert_eq!(status, 200, "GET {path}: {body}");
        body
    }

    pub async fn post(&self, path: &str, body: Value) -> Value {
        let (status, answer) = self.send("POST", path, Some(body)).await;
        assert!(
            (200..300).contains(&status),
            "POST {path}: {status} {answer}"
        );
        answer
    }

    /// Chats without a stream, with more headers; returns the answer's headers too.
    pub async fn chat(
        &self,
        body: Value,
        headers: &[(&str, &str)],
    ) -> (reqwest::header::HeaderMap, Value) {
        let mut request = self.request("POST", "/v1/chat/completions").json(&body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await.expect("an answer");
        assert_eq!(response.status().as_u16(), 200);
        let headers = response.headers().clone();
        (headers, response.json().await.expect("JSON"))
    }

    /// Posts and reads the whole stream.
    pub async fn stream(&self, path: &str, body: Value) -> Vec<SseEvent> {
        let response = self
            .request("POST", path)
            .json(&body)
            .send()
            .await
            .expect("an answer");
        assert_eq!(response.status().as_u16(), 200, "POST {path}");
        let kind = response.headers()["content-type"]
            .to_str()
            .expect("text")
            .to_owned();
        assert!(kind.starts_with("text/event-stream"), "{kind}");
        events(&response.text().await.expect("a body"))
    }
}

/// One server-sent event.
#[derive(Clone, Debug, PartialEq)]
pub struct SseEvent {
    pub name: Option<String>,
    pub data: String,
}

impl SseEvent {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|e| panic!("{e}: {}", self.data))
    }
}

/// Parses a whole stream.
pub fn events(text: &str) -> Vec<SseEvent> {
    text.split("\n\n")
        .filter_map(|block| {
            let mut name = None;
            let mut data = None;
            for line in block.lines() {
                if let Some(value) = line.strip_prefix("event: ") {
                    name = Some(value.to_owned());
                } else if let Some(value) = line.strip_prefix("data: ") {
                    data = Some(value.to_owned());
                }
            }
            data.map(|data| SseEvent { name, data })
        })
        .collect()
}

/// A chat stream, taken apart and checked for the order of its end.
#[derive(Debug, Default)]
pub struct ChatStream {
    pub id: String,
    pub model: String,
    pub content: String,
    pub reasoning: String,
    /// Name and joined arguments, by index.
    pub tool_calls: Vec<(String, String, String)>,
    pub finish_reason: String,
    pub usage: Option<Value>,
    pub empty_chunks_before_text: usize,
}

pub fn chat_stream(events: &[SseEvent]) -> ChatStream {
    let mut result = ChatStream::default();
    assert_eq!(
        events.last().map(|e| e.data.as_str()),
        Some("[DONE]"),
        "the stream ends with [DONE]"
    );
    for event in &events[..events.len() - 1] {
        let chunk = event.json();
        assert_eq!(chunk["object"], "chat.completion.chunk");
        result.id = chunk["id"].as_str().expect("an id").to_owned();
        result.model = chunk["model"].as_str().expect("a model").to_owned();
        let choices = chunk["choices"].as_array().expect("choices");
        if choices.is_empty() {
            assert!(
                !result.finish_reason.is_empty(),
                "usage comes after the finish reason"
            );
            assert!(result.usage.is_none(), "one usage chunk");
            result.usage = Some(chunk["usage"].clone());
            continue;
        }
        assert!(
            result.usage.is_none(),
            "nothing but [DONE] follows the usage"
        );
        let delta = &choices[0]["delta"];
        let content = delta["content"].as_str().unwrap_or_default();
        if content.is_empty() && delta["content"].is_string() && result.content.is_empty() {
            result.empty_chunks_before_text += 1;
        }
        result.content.push_str(content);
        result
            .reasoning
            .push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        if let Some(calls) = delta.get("tool_calls") {
            let calls = calls.as_array().expect("a list");
            assert!(
                !calls.is_empty(),
                "an empty tool_calls list confuses clients"
            );
            for call in calls {
                let index = call["index"].as_u64().expect("an index") as usize;
                if result.tool_calls.len() <= index {
                    assert_eq!(call["type"], "function");
                    result.tool_calls.push((
                        call["id"].as_str().expect("an id").to_owned(),
                        call["function"]["name"]
                            .as_str()
                            .expect("a name")
                            .to_owned(),
                        String::new(),
                    ));
                }
                result.tool_calls[index]
                    .2
                    .push_str(call["function"]["arguments"].as_str().expect("a fragment"));
            }
        }
        if let Some(reason) = choices[0]["finish_reason"].as_str() {
            assert!(result.finish_reason.is_empty(), "one finish reason");
            result.finish_reason = reason.to_owned();
        }
    }
    assert!(!result.finish_reason.is_empty(), "a finish reason was sent");
    result
}

/// A recorded request of a real client.
pub struct Recorded {
    pub name: String,
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Value,
}

pub fn recorded(name: &str) -> Recorded {
    let path = format!("{}/tests/fixtures/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let file: Value = serde_json::from_str(&text).expect("JSON");
    let headers = file["headers"]
        .as_object()
        .expect("headers")
        .iter()
        .filter(|(name, _)| {
            let name = name.to_lowercase();
            !matches!(
                name.as_str(),
                "authorization"
                    | "x-api-key"
                    | "host"
                    | "content-length"
                    | "connection"
                    | "accept-encoding"
                    | "transfer-encoding"
            )
        })
        .map(|(name, value)| (name.clone(), value.as_str().unwrap_or_default().to_owned()))
        .collect();
    Recorded {
        name: name.to_owned(),
        method: file["method"].as_str().expect("a method").to_owned(),
        path: file["path"].as_str().expect("a path").to_owned(),
        headers,
        body: file["body"].clone(),
    }
}

pub fn all_recorded() -> Vec<Recorded> {
    let dir = format!("{}/tests/fixtures", env!("CARGO_MANIFEST_DIR"));
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .expect("fixtures")
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            name.strip_suffix(".json").map(str::to_owned)
        })
        .collect();
    names.sort();
    names.iter().map(|name| recorded(name)).collect()
}

impl Recorded {
    /// Sends it as the client did, with a stream or without.
    pub async fn send(&self, gateway: &Gateway, stream: Option<bool>) -> reqwest::Response {
        let mut body = self.body.clone();
        if let Some(stream) = stream {
            body["stream"] = json!(stream);
        }
        let mut request = gateway.request(&self.method, &self.path);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request.json(&body).send().await.expect("an answer")
    }
}
