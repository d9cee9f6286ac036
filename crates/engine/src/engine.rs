//! The loop: admit, batch, compute, sample, report.
//!
//! One thread owns everything. Each turn of the loop computes one ragged batch: the next
//! token of every answering sequence and a chunk of one waiting prompt, so a long
//! prompt never stalls running answers. Cancellation and deadlines are looked at before
//! every turn, also in the middle of a prompt.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use candle_core::Tensor;
use spotter_core::chat::{ToolCall, ToolChoice};
use spotter_core::code::Failure;
use spotter_core::generate::{
    Completion, FinishReason, GenerateEvent, GenerateRequest, Prompt, TokenLogprob, ToolCallDelta,
};
use spotter_core::train::ScoreItem;
use spotter_core::worker::ServeCounters;
use spotter_core::{AdapterVersion, Code};
use spotter_model::tokenizer::StreamDecoder;
use spotter_model::{Batch, CacheSlots, KvPool, LoadedModel, LoraAdapter, ModelError, Segment};

use crate::adapters::Adapters;
use crate::output::{OutputParser, Piece, StopTexts};
use crate::prefix_cache::PrefixCache;
use crate::sampler::Sampler;

/// Prompt tokens per turn of the loop while answers are running.
const CHUNK_BESIDE_ANSWERS: usize = 96;
/// Prompt tokens per turn of the loop otherwise.
const CHUNK_ALONE: usize = 512;
/// Tokens reserved for an answer when it is admitted; more are taken as it grows.
const RESERVED_ANSWER: usize = 256;

/// Receives every event of a generation, in order.
pub type EventSink = Arc<dyn Fn(u64, GenerateEvent) + Send + Sync>;

/// Resolved limits of an engine.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// Context window in tokens.
    pub context_length: usize,
    /// Key/value blocks, prefix cache included.
    pub blocks: usize,
    /// Most sequences computed at once.
    pub max_batch: usize,
    /// Most requests waiting.
    pub max_queue: usize,
}

type Reply<T> = Box<dyn FnOnce(Result<T, Failure>) + Send>;

enum Order {
    Submit(u64, Box<GenerateRequest>),
    Cancel(u64),
    Insert(AdapterVersion, Arc<LoraAdapter>),
    Swap(
        Option<AdapterVersion>,
        AdapterVersion,
        Reply<AdapterVersion>,
    ),
    Remove(AdapterVersion),
    Count(Box<Prompt>, Reply<u32>),
    Score(
        Option<Arc<LoraAdapter>>,
        Vec<ScoreItem>,
        Reply<Vec<Vec<f32>>>,
    ),
    Shutdown(Instant),
}

/// A running engine. Dropping it ends the loop.
pub struct Engine {
    orders: Sender<Order>,
    thread: Option<std::thread::JoinHandle<()>>,
    counters: Arc<Mutex<ServeCounters>>,
}

impl Engine {
    /// Reserves the key/value memory and starts the loop.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(
        model: Arc<LoadedModel>,
        settings: EngineSettings,
        sink: EventSink,
    ) -> std::io::Result<Self> {
        let (orders, inbox) = channel();
        let counters = Arc::new(Mutex::new(ServeCounters::default()));
        let shared = counters.clone();
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || {
                let config = model.model.config();
                let per_block = KvPool::bytes_for(config, 1);
                let mut state = State {
                    pool: KvPool::new(config, settings.blocks),
                    cache: PrefixCache::new(settings.blocks, KvPool::BLOCK_TOKENS),
                    adapters: Adapters::default(),
                    waiting: VecDeque::new(),
                    running: Vec::new(),
                    next_prompt: 0,
                    per_block,
                    totals: ServeCounters {
                        cache_total: per_block * settings.blocks as u64,
                        ..Default::default()
                    },
                    model,
                    settings,
                    sink,
                    counters: shared,
                };
                state.run(&inbox);
            })?;
        Ok(Self {
            orders,
            thread: Some(thread),
            counters,
        })
    }

    fn order(&self, order: Order) {
        // The loop outlives every handle unless it has panicked, and then nothing answers.
        let _ = self.orders.send(order);
    }

    /// Queues a generation. Its events go to the sink under this id.
    pub fn submit(&self, id: u64, request: GenerateRequest) {
        self.order(Order::Submit(id, Box::new(request)));
    }

    /// Stops a generation before the next turn of the loop.
    pub fn cancel(&self, id: u64) {
        self.order(Order::Cancel(id));
    }

    /// Makes an adapter available without making it live.
    pub fn insert_adapter(&self, version: AdapterVersion, adapter: LoraAdapter) {
        self.order(Order::Insert(version, Arc::new(adapter)));
    }

    /// Compare-and-swap of the live version; see [`Adapters::swap`].
    pub fn swap(
        &self,
        expected: Option<AdapterVersion>,
        to: AdapterVersion,
        reply: impl FnOnce(Result<AdapterVersion, Failure>) + Send + 'static,
    ) {
        self.order(Order::Swap(expected, to, Box::new(reply)));
    }

    /// Forgets a version once its last sequence has ended.
    pub fn remove_adapter(&self, version: AdapterVersion) {
        self.order(Order::Remove(version));
    }

    /// How many tokens a prompt has.
    pub fn count_tokens(
        &self,
        prompt: Prompt,
        reply: impl FnOnce(Result<u32, Failure>) + Send + 'static,
    ) {
        self.order(Order::Count(Box::new(prompt), Box::new(reply)));
    }

    /// Teacher-forced log-probabilities, one list per item.
    pub fn score(
        &self,
        adapter: Option<LoraAdapter>,
        items: Vec<ScoreItem>,
        reply: impl FnOnce(Result<Vec<Vec<f32>>, Failure>) + Send + 'static,
    ) {
        self.order(Order::Score(adapter.map(Arc::new), items, Box::new(reply)));
    }

    /// What the engine is doing.
    pub fn counters(&self) -> ServeCounters {
        self.counters
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Lets running answers finish until `grace` has passed, then ends the loop.
    pub fn shutdown(mut self, grace: Duration) {
        self.order(Order::Shutdown(Instant::now() + grace));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A request that has not been admitted.
struct Waiting {
    id: u64,
    request: Box<GenerateRequest>,
    prompt: Vec<u32>,
    arrived: Instant,
    reported: Option<u32>,
}

/// A request that holds blocks and is being computed.
struct Sequence {
    id: u64,
    request: Box<GenerateRequest>,
    version: AdapterVersion,
    adapter: Option<Arc<LoraAdapter>>,
    /// Prompt and answer.
    tokens: Vec<u32>,
    prompt_len: usize,
    /// How many of them have keys and values.
    computed: usize,
    blocks: Vec<u32>,
    limit: usize,
    sampler: Sampler,
    decoder: StreamDecoder,
    stops: StopTexts,
    parser: OutputParser,
    content: String,
    reasoning: String,
    calls: Vec<ToolCall>,
    logprobs: Vec<f32>,
    model_logprobs: Vec<f32>,
    arrived: Instant,
    first_token: Option<Instant>,
}

struct State {
    model: Arc<LoadedModel>,
    settings: EngineSettings,
    sink: EventSink,
    pool: KvPool,
    cache: PrefixCache,
    adapters: Adapters,
    waiting: VecDeque<Waiting>,
    running: Vec<Sequence>,
    next_prompt: usize,
    per_block: u64,
    totals: ServeCounters,
    counters: Arc<Mutex<ServeCounters>>,
}

fn failure(error: ModelError) -> Failure {
    let code = match &error {
        ModelError::Template(_) | ModelError::Invalid(_) | ModelError::Tokenizer(_) => {
            Code::InvalidRequest
        }
        _ => Code::Internal,
    };
    Failure::new(code, error.to_string())
}

impl State {
    fn run(&mut self, inbox: &Receiver<Order>) {
        let mut closing: Option<Instant> = None;
        loop {
            let idle = self.running.is_empty() && self.waiting.is_empty();
            if idle && closing.is_some() {
                return;
            }
            let mut next = if idle {
                inbox.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                inbox.try_recv()
            };
            loop {
                match next {
                    Ok(Order::Shutdown(at)) => closing = Some(at),
                    Ok(order) => self.obey(order, closing.is_some()),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        return self.fail_all(Code::Cancelled, "the engine was stopped");
                    }
                }
                next = inbox.try_recv();
            }
            if closing.is_some_and(|at| Instant::now() >= at) {
                return self.fail_all(Code::Cancelled, "the engine is shutting down");
            }
            self.expire();
            self.admit();
            if !self.running.is_empty() {
                let outcome = catch_unwind(AssertUnwindSafe(|| self.turn()));
                match outcome {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => self.fail_running(&failure(error)),
                    Err(_) => {
                        let text = "the engine failed on this batch; the request can be repeated";
                        self.fail_running(&Failure::new(Code::Internal, text));
                    }
                }
            }
            self.publish();
        }
    }

    fn emit(&self, id: u64, event: GenerateEvent) {
        (self.sink)(id, event);
    }

    fn fail(&self, id: u64, failure: Failure) {
        self.emit(id, GenerateEvent::Failed { failure });
    }

    fn fail_running(&mut self, failure: &Failure) {
        for sequence in std::mem::take(&mut self.running) {
            self.cache.release(&sequence.blocks);
            self.fail(sequence.id, failure.clone());
        }
    }

    fn fail_all(&mut self, code: Code, text: &str) {
        let failure = Failure::new(code, text);
        self.fail_running(&failure);
        for waiting in std::mem::take(&mut self.waiting) {
            self.fail(waiting.id, failure.clone());
        }
    }

    fn publish(&mut self) {
        let mut now = self.totals.clone();
        now.running = self.running.len() as u32;
        now.queued = self.waiting.len() as u32;
        now.cache_used = self.cache.used() as u64 * self.per_block;
        *self.counters.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    fn obey(&mut self, order: Order, closing: bool) {
        match order {
            Order::Submit(id, _) if closing => {
                self.fail(
                    id,
                    Failure::new(Code::Unavailable, "the engine is shutting down; try again"),
                );
            }
            Order::Submit(id, request) => match self.queue(id, request) {
                Ok(()) => {}
                Err(failure) => self.fail(id, failure),
            },
            Order::Cancel(id) => self.end_early(
                |i, _, _| i == id,
                Code::Cancelled,
                "the request was cancelled",
            ),
            Order::Insert(version, adapter) => self.adapters.insert(version, adapter),
            Order::Swap(expected, to, reply) => reply(self.adapters.swap(expected, to)),
            Order::Remove(version) => {
                self.adapters.remove(version);
                self.cache.forget(version);
            }
            Order::Count(prompt, reply) => {
                reply(self.prompt_ids(&prompt, true).map(|ids| ids.len() as u32))
            }
            Order::Score(adapter, items, reply) => {
                let scored: Result<Vec<Vec<f32>>, ModelError> = items
                    .iter()
                    .map(|item| self.score(adapter.as_ref(), item))
                    .collect();
                reply(scored.map_err(failure));
            }
            Order::Shutdown(_) => {}
        }
    }

    fn score(
        &self,
        adapter: Option<&Arc<LoraAdapter>>,
        item: &ScoreItem,
    ) -> Result<Vec<f32>, ModelError> {
        let (prompt, answer) = (&item.prompt_ids, &item.response_ids);
        if prompt.is_empty() || answer.is_empty() {
            return Err(ModelError::Invalid(
                "a prompt and an answer are needed to score".into(),
            ));
        }
        let tokens = prompt.iter().chain(answer).copied().collect();
        let segment = Segment {
            tokens,
            adapter: adapter.cloned(),
            ..Default::default()
        };
        let hidden = self.model.model.forward(
            &Batch {
                segments: vec![segment],
            },
            None,
        )?;
        let rows = hidden.narrow(0, prompt.len() - 1, answer.len())?;
        Ok(self
            .model
            .model
            .logprobs(&rows, answer, 1.0)?
            .logprobs
            .to_vec1()?)
    }

    fn prompt_ids(&self, prompt: &Prompt, tools_allowed: bool) -> Result<Vec<u32>, Failure> {
        let ids = match prompt {
            Prompt::Chat {
                messages,
                tools,
                template_variables,
            } => {
                let tools = if tools_allowed { tools.as_slice() } else { &[] };
                self.model.template.prompt_ids(
                    &self.model.tokenizer,
                    messages,
                    tools,
                    template_variables,
                )
            }
            Prompt::Text(text) => self.model.tokenizer.encode(text).map(|mut ids| {
                if let Some(bos) = self
                    .model
                    .tokenizer
                    .bos()
                    .filter(|b| ids.first() != Some(b))
                {
                    ids.insert(0, bos);
                }
                ids
            }),
            Prompt::Tokens(ids) => Ok(ids.clone()),
        };
        let ids = ids.map_err(failure)?;
        let vocab = self.model.model.config().vocab;
        match ids.iter().find(|id| **id as usize >= vocab) {
            _ if ids.is_empty() => Err(Failure::new(Code::InvalidRequest, "the prompt is empty")),
            Some(bad) => Err(Failure::new(
                Code::InvalidRequest,
                format!("token {bad} is outside the vocabulary of {vocab}"),
            )),
            None => Ok(ids),
        }
    }

    fn queue(&mut self, id: u64, request: Box<GenerateRequest>) -> Result<(), Failure> {
        if self.waiting.len() >= self.settings.max_queue {
            let text = format!(
                "{} requests are waiting already; try again in a moment",
                self.waiting.len()
            );
            return Err(Failure::new(Code::Busy, text));
        }
        let prompt = self.prompt_ids(&request.prompt, request.tool_choice != ToolChoice::None)?;
        let window = self
            .settings
            .context_length
            .min(self.settings.blocks * KvPool::BLOCK_TOKENS);
        if prompt.len() >= window {
            return Err(Failure::new(
                Code::ContextLengthExceeded,
                format!(
                    "This model's maximum context length is {window} tokens. However, your messages resulted in {} tokens.",
                    prompt.len()
                ),
            ));
        }
        self.waiting.push_back(Waiting {
            id,
            request,
            prompt,
            arrived: Instant::now(),
            reported: None,
        });
        Ok(())
    }

    /// Ends every request for which `which(id, request, arrived)` holds.
    fn end_early(
        &mut self,
        which: impl Fn(u64, &GenerateRequest, Instant) -> bool,
        code: Code,
        text: &str,
    ) {
        let mut ended = Vec::new();
        self.waiting.retain(|w| {
            let end = which(w.id, &w.request, w.arrived);
            if end {
                ended.push(w.id);
            }
            !end
        });
        let mut kept = Vec::with_capacity(self.running.len());
        for s in std::mem::take(&mut self.running) {
            if which(s.id, &s.request, s.arrived) {
                // What was computed is worth keeping for a repeated request.
                self.cache
                    .remember(s.version, &s.tokens[..s.computed], &s.blocks);
                self.cache.release(&s.blocks);
                ended.push(s.id);
            } else {
                kept.push(s);
            }
        }
        self.running = kept;
        for id in ended {
            self.fail(id, Failure::new(code, text));
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        let late = |_: u64, r: &GenerateRequest, arrived: Instant| {
            r.deadline_ms
                .is_some_and(|ms| now.duration_since(arrived) > Duration::from_millis(ms))
        };
        self.end_early(late, Code::Cancelled, "the request's deadline has passed");
    }

    /// Admits waiting requests: first the session with the fewest running ones, then the
    /// oldest.
    fn admit(&mut self) {
        while self.running.len() < self.settings.max_batch && !self.waiting.is_empty() {
            let mut load: HashMap<&str, usize> = HashMap::new();
            for s in &self.running {
                *load.entry(s.request.session.as_str()).or_default() += 1;
            }
            let next = (0..self.waiting.len()).min_by_key(|i| {
                load.get(self.waiting[*i].request.session.as_str())
                    .copied()
                    .unwrap_or(0)
            });
            let Some(next) = next.and_then(|i| self.waiting.remove(i)) else {
                break;
            };
            match self.start(next) {
                Ok(None) => {}
                Ok(Some(back)) => {
                    self.waiting.push_front(back);
                    break;
                }
                Err((id, failure)) => self.fail(id, failure),
            }
        }
        for (position, waiting) in self.waiting.iter_mut().enumerate() {
            let position = position as u32;
            if waiting.reported != Some(position) {
                waiting.reported = Some(position);
                (self.sink)(waiting.id, GenerateEvent::Queued { position });
            }
        }
    }

    /// Gives a request its version and blocks; returns it when there are too few blocks now.
    fn start(&mut self, w: Waiting) -> Result<Option<Waiting>, (u64, Failure)> {
        let id = w.id;
        let (version, adapter) = self
            .adapters
            .select(w.request.adapter, w.request.turn.as_deref())
            .map_err(|failure| (id, failure))?;
        let window = self
            .settings
            .context_length
            .min(self.settings.blocks * KvPool::BLOCK_TOKENS);
        let room = window - w.prompt.len();
        let limit = w
            .request
            .sampling
            .max_tokens
            .map_or(room, |m| room.min(m as usize))
            .max(1);
        // The last prompt token is always computed: its hidden state begins the answer.
        let mut blocks = self.cache.reuse(version, &w.prompt, w.prompt.len() - 1);
        let cached = blocks.len() * KvPool::BLOCK_TOKENS;
        let wanted = (w.prompt.len() + limit.min(RESERVED_ANSWER)).div_ceil(KvPool::BLOCK_TOKENS);
        if wanted - blocks.len() > self.cache.available() {
            self.cache.release(&blocks);
            if self.running.is_empty() {
                let text = format!(
                    "the key/value cache of {} tokens cannot hold this request",
                    self.settings.blocks * KvPool::BLOCK_TOKENS
                );
                return Err((id, Failure::new(Code::OutOfMemory, text)));
            }
            return Ok(Some(w));
        }
        while blocks.len() < wanted {
            match self.cache.allocate() {
                Some(block) => blocks.push(block),
                None => break,
            }
        }
        self.totals.prompt_tokens += w.prompt.len() as u64;
        self.totals.cached_tokens += cached as u64;
        self.emit(
            id,
            GenerateEvent::Started {
                prompt_tokens: w.prompt.len() as u32,
                prompt_ids: w.prompt.clone(),
                cached_tokens: cached as u32,
                adapter: version,
            },
        );
        let sampling = w.request.sampling.clone();
        let has_tools = matches!(&w.request.prompt, Prompt::Chat { tools, .. } if !tools.is_empty())
            && w.request.tool_choice != ToolChoice::None;
        let unique = format!("{:x}{id:x}", std::process::id());
        self.running.push(Sequence {
            id,
            version,
            adapter,
            prompt_len: w.prompt.len(),
            computed: cached,
            blocks,
            limit,
            stops: StopTexts::new(sampling.stop.clone()),
            sampler: Sampler::new(sampling, &w.prompt),
            decoder: StreamDecoder::default(),
            parser: OutputParser::new(has_tools, &unique),
            content: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
            logprobs: Vec::new(),
            model_logprobs: Vec::new(),
            arrived: w.arrived,
            first_token: None,
            tokens: w.prompt,
            request: w.request,
        });
        Ok(None)
    }

    /// One batch: every answer's next token, and a chunk of one prompt.
    fn turn(&mut self) -> Result<(), ModelError> {
        let answering =
            |s: &Sequence| s.computed + 1 == s.tokens.len() && s.tokens.len() > s.prompt_len;
        let mut planned: Vec<(usize, usize)> = Vec::new();
        let mut out_of_memory = Vec::new();
        for i in 0..self.running.len() {
            if answering(&self.running[i]) {
                if self.grow(i) {
                    planned.push((i, 1));
                } else {
                    out_of_memory.push(self.running[i].id);
                }
            }
        }
        let prompts: Vec<usize> = (0..self.running.len())
            .filter(|i| !answering(&self.running[*i]))
            .collect();
        if !prompts.is_empty() {
            self.next_prompt = self.next_prompt.wrapping_add(1);
            let mut budget = if planned.is_empty() {
                CHUNK_ALONE
            } else {
                CHUNK_BESIDE_ANSWERS
            };
            for offset in 0..prompts.len() {
                let i = prompts[(self.next_prompt + offset) % prompts.len()];
                let s = &self.running[i];
                let len = (s.tokens.len() - s.computed).min(budget);
                if len > 0 {
                    planned.push((i, len));
                    budget -= len;
                }
            }
        }
        if !out_of_memory.is_empty() {
            let text = "the key/value cache is full; the request can be repeated";
            self.end_early(
                |id, _, _| out_of_memory.contains(&id),
                Code::OutOfMemory,
                text,
            );
            return Ok(());
        }
        if planned.is_empty() {
            return Ok(());
        }
        // Rows of one adapter lie together, so its update runs once over all of them.
        planned.sort_by_key(|(i, _)| self.running[*i].version);
        let segments = planned
            .iter()
            .map(|(i, len)| {
                let s = &self.running[*i];
                Segment {
                    tokens: s.tokens[s.computed..s.computed + len].to_vec(),
                    parent: None,
                    cache: Some(CacheSlots {
                        blocks: s.blocks.clone(),
                        past: s.computed,
                        write: true,
                    }),
                    adapter: s.adapter.clone(),
                }
            })
            .collect();
        let hidden = self
            .model
            .model
            .forward(&Batch { segments }, Some(&self.pool))?;
        let (mut at, mut rows, mut ready) = (0u32, Vec::new(), Vec::new());
        for (i, len) in &planned {
            at += *len as u32;
            let s = &mut self.running[*i];
            let was_prompt = s.computed < s.prompt_len;
            s.computed += len;
            if s.computed == s.tokens.len() {
                rows.push(at - 1);
                ready.push(*i);
            }
            if was_prompt {
                let (id, done, total) = (s.id, s.computed as u32, s.prompt_len as u32);
                if s.computed >= s.prompt_len {
                    self.cache
                        .remember(s.version, &s.tokens[..s.prompt_len], &s.blocks);
                }
                self.emit(
                    id,
                    GenerateEvent::Prefill {
                        done: done.min(total),
                        total,
                    },
                );
            }
        }
        if rows.is_empty() {
            return Ok(());
        }
        let count = rows.len();
        let rows = hidden.index_select(&Tensor::from_vec(rows, count, hidden.device())?, 0)?;
        let logits = self.model.model.logits(&rows)?.to_vec2::<f32>()?;
        let mut finished = Vec::new();
        for (i, logits) in ready.into_iter().zip(&logits) {
            if let Some(reason) = self.answer(i, logits) {
                finished.push((i, reason));
            }
        }
        finished.sort_by_key(|(i, _)| std::cmp::Reverse(*i));
        for (i, reason) in finished {
            let s = self.running.remove(i);
            self.finish(s, reason);
        }
        Ok(())
    }

    /// Makes sure that the next token of sequence `i` has a slot.
    fn grow(&mut self, i: usize) -> bool {
        let needed = self.running[i].tokens.len().div_ceil(KvPool::BLOCK_TOKENS);
        while self.running[i].blocks.len() < needed {
            match self.cache.allocate() {
                Some(block) => self.running[i].blocks.push(block),
                None => return false,
            }
        }
        true
    }

    /// Draws a token, reports its text, and says whether the answer has ended.
    fn answer(&mut self, i: usize, logits: &[f32]) -> Option<FinishReason> {
        let model = self.model.clone();
        let tokenizer = &model.tokenizer;
        let s = &mut self.running[i];
        let ends = tokenizer.end_of_turn();
        let ignore_eos = s.request.sampling.ignore_eos;
        let wants = s.request.top_logprobs;
        let banned = if ignore_eos { ends } else { &[] };
        let sampled = s.sampler.sample(logits, wants.unwrap_or(0), banned);
        s.first_token.get_or_insert_with(Instant::now);
        s.tokens.push(sampled.id);
        s.logprobs.push(sampled.logprob);
        s.model_logprobs.push(sampled.model_logprob);
        self.totals.generated_tokens += 1;
        let ended = ends.contains(&sampled.id) && !ignore_eos;
        let mut text = String::new();
        // Tool-call marks are control tokens in some vocabularies; the parser needs them.
        let visible = !tokenizer.is_special(sampled.id) || !ends.contains(&sampled.id);
        if !ended && visible {
            text = s.decoder.push(tokenizer.token_bytes(sampled.id));
        }
        let (text, stopped) = s.stops.push(&text);
        let pieces = s.parser.push(&text);
        let piece_text = |id: u32| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
        let logprobs = wants.map(|_| TokenLogprob {
            id: sampled.id,
            text: piece_text(sampled.id),
            logprob: sampled.model_logprob,
            top: sampled
                .top
                .iter()
                .map(|(id, l)| (*id, piece_text(*id), *l))
                .collect(),
        });
        let length = s.tokens.len() - s.prompt_len >= s.limit;
        let id = s.id;
        if let Some(event) = delta(s, pieces, logprobs.into_iter().collect()) {
            self.emit(id, event);
        }
        if ended || stopped {
            Some(FinishReason::Stop)
        } else if length {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    fn finish(&mut self, mut s: Sequence, reason: FinishReason) {
        let mut rest = s.decoder.finish();
        if reason == FinishReason::Length {
            let (passed, _) = s.stops.push(&rest);
            rest = passed;
        }
        rest.push_str(&s.stops.finish());
        let mut pieces = s.parser.push(&rest);
        pieces.extend(s.parser.finish());
        if let Some(event) = delta(&mut s, pieces, Vec::new()) {
            self.emit(s.id, event);
        }
        self.cache
            .remember(s.version, &s.tokens[..s.computed], &s.blocks);
        self.cache.release(&s.blocks);
        let finish_reason = if s.calls.is_empty() || reason == FinishReason::Length {
            reason
        } else {
            FinishReason::ToolCalls
        };
        let ms = |at: Instant| {
            u64::try_from(at.duration_since(s.arrived).as_millis()).unwrap_or(u64::MAX)
        };
        let now = Instant::now();
        let completion = Completion {
            content: std::mem::take(&mut s.content),
            reasoning: Some(std::mem::take(&mut s.reasoning)).filter(|r| !r.is_empty()),
            tool_calls: std::mem::take(&mut s.calls),
            finish_reason,
            response_ids: s.tokens[s.prompt_len..].to_vec(),
            logprobs: std::mem::take(&mut s.logprobs),
            model_logprobs: std::mem::take(&mut s.model_logprobs),
            first_token_ms: ms(s.first_token.unwrap_or(now)),
            total_ms: ms(now),
        };
        self.emit(
            s.id,
            GenerateEvent::Finished {
                completion: Box::new(completion),
            },
        );
    }
}

/// Adds pieces to the answer; `None` when there is nothing to report.
fn delta(
    s: &mut Sequence,
    pieces: Vec<Piece>,
    logprobs: Vec<TokenLogprob>,
) -> Option<GenerateEvent> {
    let (mut content, mut reasoning, mut tool_calls) = (String::new(), String::new(), Vec::new());
    for piece in pieces {
        match piece {
            Piece::Content(text) => content.push_str(&text),
            Piece::Reasoning(text) => reasoning.push_str(&text),
            Piece::Call(call) => {
                tool_calls.push(ToolCallDelta {
                    index: s.calls.len() as u32,
                    id: Some(call.id.clone()),
                    name: Some(call.name.clone()),
                    arguments: call.arguments.clone(),
                });
                s.calls.push(call);
            }
        }
    }
    s.content.push_str(&content);
    s.reasoning.push_str(&reasoning);
    let empty =
        content.is_empty() && reasoning.is_empty() && tool_calls.is_empty() && logprobs.is_empty();
    (!empty).then_some(GenerateEvent::Delta {
        content,
        reasoning,
        tool_calls,
        logprobs,
    })
}
