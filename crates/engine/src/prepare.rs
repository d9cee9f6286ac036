//! From a request to token ids, on a thread of its own.
//!
//! Rendering and tokenising a long conversation takes tens of milliseconds; doing it
//! beside the loop keeps running answers steady. A panic in a template or a tokeniser
//! fails the request that caused it and nothing else.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use spotter_core::Code;
use spotter_core::chat::{ResponseFormat, Tool, ToolChoice};
use spotter_core::code::Failure;
use spotter_core::generate::{GenerateEvent, GenerateRequest, Prompt, Sampling};
use spotter_model::ModelError;

use crate::compute::Compute;
use crate::constraint::{Grammars, Plan};
use crate::dialect::Dialect;
use crate::engine::{EventSink, Order, Reply};
use crate::output::Reading;

/// Work for the preparing thread.
pub(crate) enum Task {
    Submit(u64, Box<GenerateRequest>, Instant),
    Count(Box<Prompt>, Reply<u32>),
    /// Forwarded in order, so that what came before is not lost.
    Shutdown(Instant),
}

/// A request whose prompt and form are known.
pub(crate) struct Prepared {
    pub(crate) id: u64,
    pub(crate) request: Box<GenerateRequest>,
    pub(crate) prompt: Vec<u32>,
    pub(crate) arrived: Instant,
    pub(crate) reading: Reading,
    pub(crate) plan: Plan,
}

/// Requests that are being prepared; one that is taken out is cancelled.
pub(crate) type Preparing = Arc<Mutex<HashSet<u64>>>;

/// What the preparing thread works with.
pub(crate) struct Preparer {
    pub(crate) compute: Arc<dyn Compute>,
    /// Most tokens of a prompt and its answer.
    pub(crate) window: usize,
    pub(crate) preparing: Preparing,
    pub(crate) orders: Sender<Order>,
    pub(crate) sink: EventSink,
    /// Made when first needed, since reading a large vocabulary takes a while.
    pub(crate) grammars: Option<Grammars>,
}

impl Preparer {
    pub(crate) fn run(&mut self, tasks: &Receiver<Task>) {
        while let Ok(task) = tasks.recv() {
            match task {
                Task::Submit(id, request, arrived) => {
                    let prepared = isolated(|| self.prepare(id, request, arrived));
                    let mut preparing = lock(&self.preparing);
                    let wanted = preparing.remove(&id);
                    let failure = match prepared {
                        _ if !wanted => Failure::new(Code::Cancelled, "the request was cancelled"),
                        Err(failure) => failure,
                        Ok(prepared) => {
                            // Sent under the lock: a cancellation either came before or finds
                            // the request in the loop.
                            match self.orders.send(Order::Admit(Box::new(prepared))) {
                                Ok(()) => continue,
                                Err(_) => stopped(),
                            }
                        }
                    };
                    drop(preparing);
                    (self.sink)(id, GenerateEvent::Failed { failure });
                }
                Task::Count(prompt, reply) => {
                    reply(isolated(|| self.prompt_ids(&prompt, true)).map(|ids| ids.len() as u32));
                }
                Task::Shutdown(at) => {
                    // A loop that has ended needs no order to end.
                    let _ = self.orders.send(Order::Shutdown(at));
                }
            }
        }
    }

    fn prepare(
        &mut self,
        id: u64,
        request: Box<GenerateRequest>,
        arrived: Instant,
    ) -> Result<Prepared, Failure> {
        check_sampling(&request.sampling)?;
        let prompt = self.prompt_ids(&request.prompt, request.tool_choice != ToolChoice::None)?;
        let window = self.window;
        if prompt.len() >= window {
            let text = format!(
                "This model's maximum context length is {window} tokens. However, your messages resulted in {} tokens.",
                prompt.len()
            );
            return Err(Failure::new(Code::ContextLengthExceeded, text));
        }
        let plan = self.plan(&request)?;
        let reading = self.reading(id, &request, &prompt);
        Ok(Prepared {
            id,
            request,
            prompt,
            arrived,
            reading,
            plan,
        })
    }

    /// What constrains the answer. Only a request that cannot be met is refused; what goes
    /// wrong with a grammar costs the constraint and not the answer.
    fn plan(&mut self, request: &GenerateRequest) -> Result<Plan, Failure> {
        let free = match request.tool_choice {
            ToolChoice::None => true,
            ToolChoice::Auto => offered(request).is_empty(),
            ToolChoice::Required | ToolChoice::Named(_) => false,
        };
        if free && request.response_format == ResponseFormat::Text {
            return Ok(Plan::default());
        }
        let plan = isolated(|| {
            if self.grammars.is_none() {
                let grammars = Grammars::new(self.compute.clone())
                    .map_err(|e| Failure::new(Code::Unavailable, e))?;
                self.grammars = Some(grammars);
            }
            match &mut self.grammars {
                Some(grammars) => grammars.plan(request),
                None => Ok(Plan::default()),
            }
        });
        match plan {
            Err(failure) if failure.code != Code::InvalidRequest => {
                tracing::warn!(%failure, "the answer is not constrained");
                Ok(Plan::default())
            }
            plan => plan,
        }
    }

    fn reading(&self, id: u64, request: &GenerateRequest, prompt: &[u32]) -> Reading {
        let tokenizer = self.compute.tokenizer();
        let tail = &prompt[prompt.len().saturating_sub(8)..];
        let tail: Vec<u8> = tail
            .iter()
            .flat_map(|id| tokenizer.token_bytes(*id))
            .copied()
            .collect();
        let chat = matches!(request.prompt, Prompt::Chat { .. });
        Reading {
            dialect: Dialect::of(self.compute.template()),
            tools: offered(request).iter().map(|t| t.name.clone()).collect(),
            id_prefix: format!("{:x}{id:x}", std::process::id()),
            reasoning: Reading::open_reasoning(&String::from_utf8_lossy(&tail)).filter(|_| chat),
        }
    }

    fn prompt_ids(&self, prompt: &Prompt, tools_allowed: bool) -> Result<Vec<u32>, Failure> {
        let tokenizer = self.compute.tokenizer();
        let ids = match prompt {
            Prompt::Chat {
                messages,
                tools,
                template_variables,
            } => {
                let tools = if tools_allowed { tools.as_slice() } else { &[] };
                self.compute
                    .template()
                    .prompt_ids(tokenizer, messages, tools, template_variables)
            }
            Prompt::Text(text) => tokenizer.encode(text).map(|mut ids| {
                if let Some(bos) = tokenizer.bos().filter(|b| ids.first() != Some(b)) {
                    ids.insert(0, bos);
                }
                ids
            }),
            Prompt::Tokens(ids) => Ok(ids.clone()),
        };
        let ids = ids.map_err(failure)?;
        let vocab = self.compute.vocab();
        match ids.iter().find(|id| **id as usize >= vocab) {
            _ if ids.is_empty() => Err(Failure::new(Code::InvalidRequest, "the prompt is empty")),
            Some(bad) => Err(Failure::new(
                Code::InvalidRequest,
                format!("token {bad} is outside the vocabulary of {vocab}"),
            )),
            None => Ok(ids),
        }
    }
}

/// The tools that the model may call.
fn offered(request: &GenerateRequest) -> &[Tool] {
    match &request.prompt {
        Prompt::Chat { tools, .. } if request.tool_choice != ToolChoice::None => tools,
        _ => &[],
    }
}

/// Refuses parameters that no distribution can be made of.
fn check_sampling(s: &Sampling) -> Result<(), Failure> {
    let fields = [
        ("temperature", s.temperature, 0.0, f32::MAX),
        ("top_p", s.top_p, 0.0, 1.0),
        ("min_p", s.min_p, 0.0, 1.0),
        ("repetition_penalty", s.repetition_penalty, 1e-3, 1e3),
        ("presence_penalty", s.presence_penalty, -1e3, 1e3),
        ("frequency_penalty", s.frequency_penalty, -1e3, 1e3),
    ];
    for (name, value, low, high) in fields {
        // A value that is not a number is in no range.
        if !(low..=high).contains(&value) {
            let text = format!("'{name}' is {value}; it must be between {low} and {high}");
            return Err(Failure::new(Code::InvalidRequest, text));
        }
    }
    match s.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
        Some((id, bias)) => Err(Failure::new(
            Code::InvalidRequest,
            format!("'logit_bias.{id}' is {bias}; it must be a number"),
        )),
        None => Ok(()),
    }
}

/// Runs work of one request; a panic in it is that request's failure.
pub(crate) fn isolated<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let reason = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no reason was given");
        tracing::error!(reason, "a request failed; the others go on");
        Err(Failure::new(
            Code::Unavailable,
            "the engine failed on this request; it can be repeated",
        ))
    })
}

/// What a model's error means for the request that met it.
pub(crate) fn failure(error: ModelError) -> Failure {
    match &error {
        ModelError::Template(_) | ModelError::Invalid(_) | ModelError::Tokenizer(_) => {
            Failure::new(Code::InvalidRequest, error.to_string())
        }
        _ => {
            tracing::error!(%error, "a request failed; the others go on");
            let text = format!("the engine failed on this request, it can be repeated: {error}");
            Failure::new(Code::Unavailable, text)
        }
    }
}

/// The engine has ended.
pub(crate) fn stopped() -> Failure {
    Failure::new(Code::Unavailable, "the engine was stopped; try again")
}

/// Locks; what a panic left behind is a set of numbers and still whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
