//! An engine that follows a script instead of running a model: for tests of the
//! edge and of real clients, and for measuring the gateway by itself.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use spotter_core::AdapterVersion;
use spotter_core::chat::ToolCall;
use spotter_core::code::{Code, Failure};
use spotter_core::generate::{
    AdapterChoice, Completion, FinishReason, GenerateEvent, GenerateRequest, Prompt, TokenLogprob,
    ToolCallDelta,
};
use spotter_core::worker::ModelFacts;

use super::{Adapters, Engine, EventStream};

/// One scripted answer.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// Reasoning, sent first.
    pub reasoning: String,
    /// Visible text, sent in pieces of one word.
    pub content: String,
    /// Tool calls: name and arguments.
    pub tool_calls: Vec<(String, String)>,
    /// The answer ends at the token limit.
    pub cut: bool,
    /// Fail with this before anything is said.
    pub failure: Option<Failure>,
    /// Fail with this after the content.
    pub failure_after: Option<Failure>,
    /// Silence before `Started`.
    pub queue: Duration,
    /// Silence between `Started` and the first piece.
    pub prefill: Duration,
    /// Silence before each further piece.
    pub per_token: Duration,
}

impl Reply {
    /// A text.
    pub fn text(content: &str) -> Self {
        Self {
            content: content.to_owned(),
            ..Self::default()
        }
    }

    /// A tool call.
    pub fn call(name: &str, arguments: &str) -> Self {
        Self {
            tool_calls: vec![(name.to_owned(), arguments.to_owned())],
            ..Self::default()
        }
    }

    /// A failure.
    pub fn failure(code: Code, message: &str) -> Self {
        Self {
            failure: Some(Failure::new(code, message)),
            ..Self::default()
        }
    }
}

/// The engine. Replies are given in order; when none is left, `otherwise` decides.
pub struct ScriptedEngine {
    replies: Mutex<VecDeque<Reply>>,
    otherwise: Box<dyn Fn(&GenerateRequest) -> Reply + Send + Sync>,
    requests: Mutex<Vec<GenerateRequest>>,
    /// The version that answers.
    pub live: AtomicU32,
    /// Whether it is ready.
    pub ready: AtomicBool,
    cancelled: Arc<AtomicUsize>,
    /// Context window in tokens.
    pub context_length: u32,
}

impl Default for ScriptedEngine {
    fn default() -> Self {
        Self::new(|_| Reply::text("Hello from the script."))
    }
}

impl ScriptedEngine {
    /// An engine that answers as `otherwise` says.
    pub fn new(otherwise: impl Fn(&GenerateRequest) -> Reply + Send + Sync + 'static) -> Self {
        Self {
            replies: Mutex::default(),
            otherwise: Box::new(otherwise),
            requests: Mutex::default(),
            live: AtomicU32::new(0),
            ready: AtomicBool::new(true),
            cancelled: Arc::default(),
            context_length: 65_536,
        }
    }

    /// Adds a reply to the script.
    pub fn push(&self, reply: Reply) {
        self.replies
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back(reply);
    }

    /// What was asked so far.
    pub fn requests(&self) -> Vec<GenerateRequest> {
        self.requests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// How many generations were dropped before their end.
    pub fn cancelled(&self) -> usize {
        self.cancelled.load(Ordering::SeqCst)
    }
}

/// A token count that depends on the text alone: four bytes a token.
fn tokens(prompt: &Prompt) -> u32 {
    let bytes = match prompt {
        Prompt::Chat {
            messages, tools, ..
        } => {
            let texts: usize = messages.iter().map(|m| m.content.len() + 8).sum();
            let tools: usize = tools
                .iter()
                .map(|t| t.parameters.to_string().len() + t.description.len())
                .sum();
            texts + tools
        }
        Prompt::Text(text) => text.len(),
        Prompt::Tokens(ids) => return u32::try_from(ids.len()).unwrap_or(u32::MAX),
    };
    u32::try_from(bytes / 4 + 1).unwrap_or(u32::MAX)
}

/// Counts a drop before the end.
struct Unfinished {
    cancelled: Arc<AtomicUsize>,
    ended: bool,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.ended {
            self.cancelled.fetch_add(1, Ordering::SeqCst);
        }
    }
}

async fn silence(length: Duration) {
    if !length.is_zero() {
        tokio::time::sleep(length).await;
    }
}

fn delta(content: &str, reasoning: &str, logprobs: Vec<TokenLogprob>) -> GenerateEvent {
    GenerateEvent::Delta {
        content: content.to_owned(),
        reasoning: reasoning.to_owned(),
        tool_calls: Vec::new(),
        logprobs,
    }
}

#[async_trait]
impl Engine for ScriptedEngine {
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream, Failure> {
        let reply = {
            let mut replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
            replies.pop_front()
        };
        let reply = reply.unwrap_or_else(|| (self.otherwise)(&request));
        let adapter = match request.adapter {
            AdapterChoice::Version(version) => version,
            AdapterChoice::Current => AdapterVersion(self.live.load(Ordering::SeqCst)),
        };
        let prompt_tokens = tokens(&request.prompt);
        let wants_logprobs = request.top_logprobs.is_some();
        let number = {
            let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
            requests.push(request);
            requests.len()
        };
        if let Some(failure) = reply.failure {
            return Err(failure);
        }
        let unfinished = Unfinished {
            cancelled: Arc::clone(&self.cancelled),
            ended: false,
        };
        Ok(Box::pin(async_stream::stream! {
            // The whole guard moves in, so that dropping the stream drops it.
            let mut guard = unfinished;
            silence(reply.queue).await;
            yield GenerateEvent::Started {
                prompt_ids: (0..prompt_tokens).collect(),
                prompt_tokens,
                cached_tokens: prompt_tokens / 2,
                adapter,
            };
            silence(reply.prefill).await;
            let mut ids = Vec::new();
            if !reply.reasoning.is_empty() {
                yield delta("", &reply.reasoning, Vec::new());
            }
            for word in reply.content.split_inclusive(' ') {
                silence(reply.per_token).await;
                let id = u32::try_from(ids.len()).unwrap_or(0) + 1000;
                ids.push(id);
                let logprobs = if wants_logprobs {
                    vec![TokenLogprob { id, text: word.to_owned(), logprob: -0.5, top: Vec::new() }]
                } else {
                    Vec::new()
                };
                yield delta(word, "", logprobs);
            }
            if let Some(failure) = reply.failure_after {
                guard.ended = true;
                yield GenerateEvent::Failed { failure };
                return;
            }
            let calls: Vec<ToolCall> = reply.tool_calls.iter().enumerate().map(|(at, (name, arguments))| ToolCall {
                id: format!("call{number}x{at}"),
                name: name.clone(),
                arguments: arguments.clone(),
            }).collect();
            for (index, call) in calls.iter().enumerate() {
                let index = u32::try_from(index).unwrap_or(0);
                ids.push(2000 + index);
                // In two pieces, as a model would: the name, then the arguments.
                let piece = |id, name, arguments: &str| GenerateEvent::Delta {
                    content: String::new(),
                    reasoning: String::new(),
                    tool_calls: vec![ToolCallDelta { index, id, name, arguments: arguments.to_owned() }],
                    logprobs: Vec::new(),
                };
                yield piece(Some(call.id.clone()), Some(call.name.clone()), "");
                let middle = call.arguments.char_indices().map(|(at, _)| at).nth(call.arguments.chars().count() / 2).unwrap_or(0);
                yield piece(None, None, &call.arguments[..middle]);
                yield piece(None, None, &call.arguments[middle..]);
            }
            guard.ended = true;
            let logprobs = vec![-0.5; ids.len()];
            let finish_reason = if reply.cut {
                FinishReason::Length
            } else if calls.is_empty() {
                FinishReason::Stop
            } else {
                FinishReason::ToolCalls
            };
            yield GenerateEvent::Finished { completion: Box::new(Completion {
                content: reply.content,
                reasoning: (!reply.reasoning.is_empty()).then_some(reply.reasoning),
                tool_calls: calls,
                finish_reason,
                response_ids: ids,
                model_logprobs: logprobs.clone(),
                logprobs,
                first_token_ms: 1,
                total_ms: 2,
            }) };
        }))
    }

    async fn count_tokens(&self, prompt: Prompt) -> Result<u32, Failure> {
        Ok(tokens(&prompt))
    }

    fn facts(&self) -> Option<ModelFacts> {
        self.ready().then(|| ModelFacts {
            name: "scripted".to_owned(),
            architecture: "none".to_owned(),
            fingerprint: String::new(),
            parameters: 0,
            context_length: self.context_length,
            vocab_size: 0,
            quantisation: String::new(),
            template_has_tools: true,
            device: "none".to_owned(),
            load_seconds: 0.0,
        })
    }

    fn adapters(&self) -> Adapters {
        let live = AdapterVersion(self.live.load(Ordering::SeqCst));
        Adapters {
            live,
            loaded: (0..=live.0).map(AdapterVersion).collect(),
        }
    }

    fn ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }
}
