//! An OpenAI-compatible server as an engine.
//!
//! vLLM is recognised by its model list and asked for token ids and
//! log-probabilities; other servers give neither, and their steps are stored
//! without. The adapter is whatever the server serves: the base, as far as Spotter
//! knows.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::StreamExt;
use serde_json::{Map, Value, json};
use spotter_core::AdapterVersion;
use spotter_core::chat::{Message, ResponseFormat, Role, ToolCall, ToolChoice};
use spotter_core::code::{Code, Failure};
use spotter_core::generate::{
    AdapterChoice, Completion, FinishReason, GenerateEvent, GenerateRequest, Prompt, TokenLogprob,
    ToolCallDelta,
};
use spotter_core::worker::ModelFacts;

use super::{Adapters, Engine, EventStream};
use crate::call::{call_id, compact};

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a health check may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Where an upstream is.
#[derive(Clone)]
pub struct Upstream {
    /// Its name for people.
    pub name: String,
    /// Address with `/v1`.
    pub url: String,
    /// Its key, from the keychain.
    pub key: Option<String>,
    /// The model to ask for; `None` takes the first of its list.
    pub model: Option<String>,
    /// The base model that is trained here. Token ids of a server that serves another
    /// one mean something else and are not kept; `None` keeps them all.
    pub base_model: Option<String>,
}

/// What a health check found.
#[derive(Clone, Debug)]
struct Found {
    model: String,
    context_length: u32,
    is_vllm: bool,
    /// Whether its token ids are those of the model that is trained here.
    same_base: bool,
}

/// The engine.
pub struct RemoteEngine {
    upstream: Upstream,
    http: reqwest::Client,
    found: Mutex<Option<Found>>,
    ready: Arc<AtomicBool>,
}

impl RemoteEngine {
    /// An engine that is not ready until [`RemoteEngine::probe`] has found the server.
    ///
    /// # Errors
    /// `Internal` when no HTTP client can be made on this system.
    pub fn new(upstream: Upstream) -> Result<Self, Failure> {
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .build()
            .map_err(|error| Failure::new(Code::Internal, error.to_string()))?;
        Ok(Self {
            upstream,
            http,
            found: Mutex::default(),
            ready: Arc::default(),
        })
    }

    /// The server's name for people.
    pub fn name(&self) -> &str {
        &self.upstream.name
    }

    fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        let url = format!("{}{path}", self.upstream.url.trim_end_matches('/'));
        let request = self.http.request(method, url);
        match &self.upstream.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    fn found(&self) -> Option<Found> {
        self.found
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn unreachable(&self) -> Failure {
        Failure::new(
            Code::Unavailable,
            format!("The server '{}' cannot be reached.", self.upstream.name),
        )
    }

    /// Checks whether the server is there and what it serves; to be called now and then.
    pub async fn probe(&self) -> bool {
        let found = self.look().await;
        self.ready.store(found.is_some(), Ordering::SeqCst);
        if let Some(found) = found {
            *self.found.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
        }
        self.ready()
    }

    async fn look(&self) -> Option<Found> {
        let response = self
            .request(reqwest::Method::GET, "/models")
            .timeout(PROBE_TIMEOUT)
            .send()
            .await
            .ok()?
            .error_for_status()
            .ok()?;
        let list: Value = response.json().await.ok()?;
        let models = list.get("data")?.as_array()?;
        let wanted = self.upstream.model.as_deref();
        let entry = models
            .iter()
            .find(|m| wanted.is_none_or(|name| m["id"].as_str() == Some(name)))?;
        let context = ["max_model_len", "context_length", "max_context_length"]
            .iter()
            .find_map(|key| entry[*key].as_u64())
            .and_then(|n| u32::try_from(n).ok());
        let model = entry["id"].as_str()?;
        // A served alias names the model it stands for as its root.
        let names = [Some(model), entry["root"].as_str()];
        let last = |name: &str| name.rsplit('/').next().unwrap_or(name).to_lowercase();
        let same_base = self.upstream.base_model.as_deref().is_none_or(|base| {
            let base = last(base);
            names.into_iter().flatten().any(|name| last(name) == base)
        });
        Some(Found {
            model: model.to_owned(),
            context_length: context.unwrap_or(8192),
            is_vllm: entry["owned_by"].as_str() == Some("vllm"),
            same_base,
        })
    }
}

fn message_json(message: &Message) -> Value {
    let mut json = json!({"role": message.role.as_str(), "content": message.content});
    if !message.tool_calls.is_empty() {
        json["tool_calls"] = crate::dialect::openai_chat::tool_calls_json(&message.tool_calls);
        if message.content.is_empty() {
            json["content"] = Value::Null;
        }
    }
    if message.role == Role::Tool {
        json["tool_call_id"] = json!(message.tool_call_id.clone().unwrap_or_default());
    }
    if let Some(name) = &message.name {
        json["name"] = json!(name);
    }
    json
}

/// The path and the body of the upstream request.
fn translate(request: &GenerateRequest, found: &Found) -> (&'static str, Value) {
    let sampling = &request.sampling;
    let mut body = json!({
        "model": found.model,
        "stream": true,
        "stream_options": {"include_usage": true},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    });
    if let Some(limit) = sampling.max_tokens {
        body["max_tokens"] = json!(limit);
    }
    if let Some(seed) = sampling.seed {
        body["seed"] = json!(seed);
    }
    if !sampling.stop.is_empty() {
        body["stop"] = json!(sampling.stop);
    }
    if !sampling.logit_bias.is_empty() {
        body["logit_bias"] = sampling
            .logit_bias
            .iter()
            .map(|(id, bias)| (id.to_string(), json!(bias)))
            .collect::<Map<_, _>>()
            .into();
    }
    if found.is_vllm {
        body["return_token_ids"] = json!(true);
        body["top_k"] = json!(if sampling.top_k == 0 {
            -1
        } else {
            i64::from(sampling.top_k)
        });
        body["min_p"] = json!(sampling.min_p);
        body["repetition_penalty"] = json!(sampling.repetition_penalty);
        body["ignore_eos"] = json!(sampling.ignore_eos);
    }
    match &request.prompt {
        Prompt::Chat {
            messages,
            tools,
            template_variables,
        } => {
            body["messages"] = messages.iter().map(message_json).collect();
            if !tools.is_empty() {
                body["tools"] = tools
                    .iter()
                    .map(|tool| json!({"type": "function", "function": tool}))
                    .collect();
                body["tool_choice"] = match &request.tool_choice {
                    ToolChoice::Auto => json!("auto"),
                    ToolChoice::None => json!("none"),
                    ToolChoice::Required => json!("required"),
                    ToolChoice::Named(name) => {
                        json!({"type": "function", "function": {"name": name}})
                    }
                };
            }
            match &request.response_format {
                ResponseFormat::Text => {}
                ResponseFormat::JsonObject => {
                    body["response_format"] = json!({"type": "json_object"})
                }
                ResponseFormat::JsonSchema(schema) => {
                    body["response_format"] = json!({"type": "json_schema",
                        "json_schema": {"name": "answer", "strict": true, "schema": schema}});
                }
            }
            if found.is_vllm && !template_variables.is_empty() {
                body["chat_template_kwargs"] = json!(template_variables);
            }
            if found.is_vllm || request.top_logprobs.is_some() {
                body["logprobs"] = json!(true);
                body["top_logprobs"] = json!(request.top_logprobs.unwrap_or(0));
            }
            ("/chat/completions", body)
        }
        Prompt::Text(text) => {
            body["prompt"] = json!(text);
            raw(request, found, &mut body);
            ("/completions", body)
        }
        Prompt::Tokens(ids) => {
            body["prompt"] = json!(ids);
            raw(request, found, &mut body);
            ("/completions", body)
        }
    }
}

fn raw(request: &GenerateRequest, found: &Found, body: &mut Value) {
    if found.is_vllm || request.top_logprobs.is_some() {
        body["logprobs"] = json!(request.top_logprobs.unwrap_or(0));
    }
}

/// A refusal of the upstream as a failure of ours.
fn refused(name: &str, status: u16, body: &str) -> Failure {
    let error: Value = serde_json::from_str(body).unwrap_or(Value::Null);
    let detail = error["error"]["message"]
        .as_str()
        .or_else(|| error["message"].as_str())
        .unwrap_or_default();
    let too_long = detail.contains("maximum context length")
        || error["error"]["code"].as_str() == Some("context_length_exceeded");
    let code = match status {
        400 | 422 if too_long => Code::ContextLengthExceeded,
        400 | 413 | 422 => Code::InvalidRequest,
        404 => Code::ModelNotFound,
        429 => Code::Busy,
        // A wrong key of ours must not look like a wrong key of the client.
        _ => Code::Unavailable,
    };
    let message = match code {
        Code::ContextLengthExceeded | Code::InvalidRequest if !detail.is_empty() => {
            detail.to_owned()
        }
        _ => format!("The server '{name}' answered {status}."),
    };
    Failure::new(code, message)
}

/// What has been received of an answer.
#[derive(Default)]
struct Received {
    content: String,
    reasoning: String,
    calls: BTreeMap<u64, ToolCall>,
    /// The call whose arguments are still coming.
    open: Option<u64>,
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    finish: Option<FinishReason>,
    prompt_ids: Vec<u32>,
    prompt_tokens: u32,
    cached_tokens: u32,
}

impl Received {
    /// Takes one chunk and returns the pieces it holds.
    fn take(&mut self, chunk: &Value) -> Option<GenerateEvent> {
        if let Some(usage) = chunk.get("usage").filter(|u| u.is_object()) {
            self.prompt_tokens = number(&usage["prompt_tokens"]).unwrap_or(self.prompt_tokens);
            self.cached_tokens =
                number(&usage["prompt_tokens_details"]["cached_tokens"]).unwrap_or(0);
        }
        self.prompt_ids.extend(ids(&chunk["prompt_token_ids"]));
        let choice = chunk.get("choices")?.get(0)?;
        self.prompt_ids.extend(ids(&choice["prompt_token_ids"]));
        self.ids.extend(ids(&choice["token_ids"]));
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish = Some(match reason {
                "length" => FinishReason::Length,
                "tool_calls" | "function_call" => FinishReason::ToolCalls,
                _ => FinishReason::Stop,
            });
        }
        let logprobs = token_logprobs(&choice["logprobs"]);
        self.logprobs.extend(logprobs.iter().map(|t| t.logprob));
        let delta = &choice["delta"];
        let content = delta["content"]
            .as_str()
            .or_else(|| choice["text"].as_str())
            .unwrap_or_default()
            .to_owned();
        let reasoning = delta["reasoning_content"]
            .as_str()
            .or_else(|| delta["reasoning"].as_str())
            .unwrap_or_default()
            .to_owned();
        self.content.push_str(&content);
        self.reasoning.push_str(&reasoning);
        let mut tool_calls = Vec::new();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            self.take_call(call, &mut tool_calls);
        }
        let silent = content.is_empty() && reasoning.is_empty();
        (!silent || !tool_calls.is_empty() || !logprobs.is_empty()).then_some(
            GenerateEvent::Delta {
                content,
                reasoning,
                tool_calls,
                logprobs,
            },
        )
    }

    /// Takes a piece of a call. Arguments are held back until they are complete, so
    /// that they can be handed on in compact form.
    fn take_call(&mut self, piece: &Value, pieces: &mut Vec<ToolCallDelta>) {
        let index = piece["index"].as_u64().unwrap_or(0);
        if self.open != Some(index) {
            pieces.extend(self.close_call());
            self.open = Some(index);
        }
        let function = &piece["function"];
        let fresh = !self.calls.contains_key(&index);
        let call = self.calls.entry(index).or_insert_with(|| ToolCall {
            id: call_id(piece["id"].as_str().unwrap_or_default()),
            name: function["name"].as_str().unwrap_or_default().to_owned(),
            arguments: String::new(),
        });
        if let Some(arguments) = function["arguments"].as_str() {
            call.arguments.push_str(arguments);
        }
        if fresh {
            if call.id.is_empty() {
                call.id = uuid::Uuid::new_v4().simple().to_string();
            }
            pieces.push(ToolCallDelta {
                index: u32::try_from(index).unwrap_or(0),
                id: Some(call.id.clone()),
                name: Some(call.name.clone()),
                arguments: String::new(),
            });
        }
    }

    fn close_call(&mut self) -> Option<ToolCallDelta> {
        let index = self.open.take()?;
        let call = self.calls.get_mut(&index)?;
        call.arguments = compact(&call.arguments);
        Some(ToolCallDelta {
            index: u32::try_from(index).unwrap_or(0),
            id: None,
            name: None,
            arguments: call.arguments.clone(),
        })
    }

    /// Leaves the text, without what only another model's vocabulary explains.
    fn forget_ids(&mut self) {
        self.ids.clear();
        self.logprobs.clear();
        self.prompt_ids.clear();
    }

    fn complete(
        self,
        request: &GenerateRequest,
        begun: Instant,
        first: Option<Duration>,
    ) -> Completion {
        let complete = self.logprobs.len() == self.ids.len();
        let model_logprobs = if complete { self.logprobs } else { Vec::new() };
        let sampling = &request.sampling;
        // The server reports the model's own probabilities; they are those of the
        // sampling distribution only when nothing was applied to them.
        #[allow(clippy::float_cmp, reason = "exact defaults")]
        let plain = sampling.temperature == 1.0
            && sampling.top_p == 1.0
            && sampling.top_k == 0
            && sampling.min_p == 0.0
            && sampling.repetition_penalty == 1.0
            && sampling.presence_penalty == 0.0
            && sampling.frequency_penalty == 0.0
            && sampling.logit_bias.is_empty()
            && request.response_format == ResponseFormat::Text;
        let milliseconds = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        Completion {
            content: self.content,
            reasoning: (!self.reasoning.is_empty()).then_some(self.reasoning),
            tool_calls: self.calls.into_values().collect(),
            finish_reason: self.finish.unwrap_or(FinishReason::Stop),
            response_ids: self.ids,
            logprobs: if plain {
                model_logprobs.clone()
            } else {
                Vec::new()
            },
            model_logprobs,
            first_token_ms: milliseconds(first.unwrap_or_default()),
            total_ms: milliseconds(begun.elapsed()),
        }
    }
}

fn number(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

fn ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().into_iter().flatten();
    list.filter_map(number).collect()
}

#[allow(clippy::cast_possible_truncation)]
fn token_logprobs(value: &Value) -> Vec<TokenLogprob> {
    let entries = value["content"].as_array().into_iter().flatten();
    entries
        .filter_map(|entry| {
            let top = entry["top_logprobs"].as_array().into_iter().flatten();
            Some(TokenLogprob {
                id: 0,
                text: entry["token"].as_str()?.to_owned(),
                logprob: entry["logprob"].as_f64()? as f32,
                top: top
                    .filter_map(|t| {
                        Some((
                            0,
                            t["token"].as_str()?.to_owned(),
                            t["logprob"].as_f64()? as f32,
                        ))
                    })
                    .collect(),
            })
        })
        .collect()
}

#[async_trait]
impl Engine for RemoteEngine {
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream, Failure> {
        if let AdapterChoice::Version(version) = request.adapter
            && !version.is_base()
        {
            return Err(Failure::new(
                Code::ModelNotFound,
                format!(
                    "The server '{}' does not have {version}.",
                    self.upstream.name
                ),
            ));
        }
        let found = self.found().ok_or_else(|| self.unreachable())?;
        let begun = Instant::now();
        let (path, body) = translate(&request, &found);
        let sending = self.request(reqwest::Method::POST, path).json(&body).send();
        let name = self.upstream.name.clone();
        let ready = Arc::clone(&self.ready);
        let unreachable = self.unreachable();
        // Servers may answer only after the prompt is read; sending inside the stream
        // lets the client see signs of life meanwhile.
        Ok(Box::pin(async_stream::stream! {
            yield GenerateEvent::Queued { position: 0 };
            let response = match sending.await {
                Ok(response) => response,
                Err(error) => {
                    tracing::warn!(server = %name, %error, "an upstream failed");
                    ready.store(false, Ordering::SeqCst);
                    yield GenerateEvent::Failed { failure: unreachable };
                    return;
                }
            };
            let status = response.status();
            if !status.is_success() {
                let body = response.text().await.unwrap_or_default();
                yield GenerateEvent::Failed { failure: refused(&name, status.as_u16(), &body) };
                return;
            }
            let cut = || GenerateEvent::Failed {
                failure: Failure::new(Code::Unavailable, format!("The server '{name}' broke off.")),
            };
            let mut received = Received::default();
            let mut first = None;
            let mut bytes = response.bytes_stream();
            let mut buffer: Vec<u8> = Vec::new();
            let mut done = false;
            while !done {
                match bytes.next().await {
                    Some(Ok(more)) => buffer.extend_from_slice(&more),
                    Some(Err(_)) => {
                        yield cut();
                        return;
                    }
                    None => break,
                }
                while let Some(end) = buffer.iter().position(|b| *b == b'\n') {
                    let line: Vec<u8> = buffer.drain(..=end).collect();
                    let line = String::from_utf8_lossy(&line);
                    let Some(data) = line.trim().strip_prefix("data:").map(str::trim) else {
                        continue;
                    };
                    if data == "[DONE]" {
                        done = true;
                        break;
                    }
                    let Ok(chunk) = serde_json::from_str::<Value>(data) else {
                        continue;
                    };
                    if chunk.get("error").is_some_and(|e| !e.is_null()) {
                        yield GenerateEvent::Failed { failure: refused(&name, 500, data) };
                        return;
                    }
                    if let Some(event) = received.take(&chunk) {
                        first.get_or_insert_with(|| begun.elapsed());
                        yield event;
                    }
                }
            }
            if let Some(last) = received.close_call() {
                yield GenerateEvent::Delta {
                    content: String::new(),
                    reasoning: String::new(),
                    tool_calls: vec![last],
                    logprobs: Vec::new(),
                };
            }
            if received.finish.is_none() {
                yield cut();
                return;
            }
            if !found.same_base {
                received.forget_ids();
            }
            // Usage and ids are complete only now.
            yield GenerateEvent::Started {
                prompt_ids: std::mem::take(&mut received.prompt_ids),
                prompt_tokens: received.prompt_tokens,
                cached_tokens: received.cached_tokens,
                adapter: AdapterVersion::BASE,
            };
            yield GenerateEvent::Finished {
                completion: Box::new(received.complete(&request, begun, first)),
            };
        }))
    }

    async fn count_tokens(&self, prompt: Prompt) -> Result<u32, Failure> {
        let found = self.found().ok_or_else(|| self.unreachable())?;
        let body = match &prompt {
            Prompt::Chat { messages, .. } => json!({"model": found.model,
                "messages": messages.iter().map(message_json).collect::<Vec<_>>()}),
            Prompt::Text(text) => json!({"model": found.model, "prompt": text}),
            Prompt::Tokens(ids) => return Ok(u32::try_from(ids.len()).unwrap_or(u32::MAX)),
        };
        let unknown = || {
            Failure::new(
                Code::Unavailable,
                format!("The server '{}' does not count tokens.", self.upstream.name),
            )
        };
        if !found.is_vllm {
            return Err(unknown());
        }
        // vLLM's tokenizer endpoint lies beside `/v1`, not under it.
        let root = self.upstream.url.trim_end_matches('/');
        let root = root.strip_suffix("/v1").unwrap_or(root);
        let mut request = self.http.post(format!("{root}/tokenize")).json(&body);
        if let Some(key) = &self.upstream.key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.map_err(|_| self.unreachable())?;
        let answer: Value = response.json().await.map_err(|_| unknown())?;
        number(&answer["count"]).ok_or_else(unknown)
    }

    fn facts(&self) -> Option<ModelFacts> {
        let found = self.found()?;
        Some(ModelFacts {
            name: found.model,
            architecture: String::new(),
            fingerprint: String::new(),
            parameters: 0,
            context_length: found.context_length,
            vocab_size: 0,
            quantisation: String::new(),
            template_has_tools: true,
            device: format!("the server '{}'", self.upstream.name),
            load_seconds: 0.0,
        })
    }

    fn adapters(&self) -> Adapters {
        Adapters {
            live: AdapterVersion::BASE,
            loaded: vec![AdapterVersion::BASE],
        }
    }

    fn ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }
}
