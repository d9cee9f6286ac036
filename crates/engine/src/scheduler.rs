//! The loop: admit, batch, compute, sample, report.
//!
//! One thread owns everything. Each turn computes one ragged batch: the next token of
//! every answering sequence, a chunk of one waiting prompt, and a chunk of what is to be
//! scored, so neither a long prompt nor a scoring job stalls running answers.
//! Cancellation and deadlines are looked at before every turn, also in the middle of a
//! prompt.
//!
//! **Invariant:** what fails, an error or a panic, fails the request that caused it and
//! no other. A batch that fails is computed again one sequence at a time to find out.

use std::collections::{HashMap, VecDeque};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use spotter_core::Code;
use spotter_core::code::Failure;
use spotter_core::generate::{FinishReason, GenerateEvent, GenerateRequest};
use spotter_core::train::ScoreItem;
use spotter_core::worker::ServeCounters;
use spotter_model::{Batch, CacheSlots, KvPool, LoraAdapter, Segment};

use crate::adapters::Adapters;
use crate::compute::{Compute, Wants};
use crate::constraint::Constraint;
use crate::engine::{EngineSettings, EventSink, Order, Reply, busy};
use crate::output::{OutputParser, StopTexts};
use crate::pace::Pace;
use crate::prefix_cache::PrefixCache;
use crate::prepare::{Prepared, failure, isolated, lock};
use crate::sampler::Sampler;
use crate::sequence::{Answer, Sequence};

/// Tokens reserved for an answer when it is admitted; more are taken as it grows.
const RESERVED_ANSWER: usize = 256;
/// Fewest tokens of a scoring job per turn, so that it ends under any load.
const LEAST_SCORED: usize = 16;

/// A request that has not been admitted.
struct Waiting {
    prepared: Box<Prepared>,
    reported: Option<u32>,
}

/// Log-probabilities that somebody waits for.
struct ScoreJob {
    adapter: Option<Arc<LoraAdapter>>,
    items: VecDeque<ScoreItem>,
    current: Option<Scoring>,
    done: Vec<Vec<f32>>,
    reply: Reply<Vec<Vec<f32>>>,
}

/// The item of a job that is being computed.
struct Scoring {
    tokens: Vec<u32>,
    prompt_len: usize,
    computed: usize,
    blocks: Vec<u32>,
    logprobs: Vec<f32>,
}

impl Scoring {
    /// The rows of the next `len` tokens that predict a token of the answer.
    fn predicting(&self, len: usize) -> std::ops::Range<usize> {
        let first = self.computed.max(self.prompt_len - 1);
        let end = (self.computed + len).min(self.tokens.len() - 1);
        first.min(end) - self.computed..end - self.computed
    }
}

#[derive(Clone, Copy)]
enum Who {
    Sequence(usize),
    Score,
}

/// A share of the next batch.
#[derive(Clone, Copy)]
struct Planned {
    who: Who,
    len: usize,
}

/// What the batch gave one share.
#[derive(Default)]
struct Row {
    logits: Option<Vec<f32>>,
    logprobs: Option<Vec<f32>>,
}

pub(crate) struct Scheduler {
    compute: Arc<dyn Compute>,
    settings: EngineSettings,
    sink: EventSink,
    cache: PrefixCache,
    adapters: Adapters,
    waiting: VecDeque<Waiting>,
    running: Vec<Sequence>,
    scoring: VecDeque<ScoreJob>,
    next_prompt: usize,
    pace: Pace,
    per_block: u64,
    totals: ServeCounters,
    counters: Arc<Mutex<ServeCounters>>,
}

impl Scheduler {
    pub(crate) fn new(
        compute: Arc<dyn Compute>,
        settings: EngineSettings,
        sink: EventSink,
        counters: Arc<Mutex<ServeCounters>>,
    ) -> Self {
        let per_block = compute.block_bytes();
        Self {
            cache: PrefixCache::new(settings.blocks, KvPool::BLOCK_TOKENS),
            adapters: Adapters::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            scoring: VecDeque::new(),
            next_prompt: 0,
            pace: Pace::default(),
            per_block,
            totals: ServeCounters {
                cache_total: per_block * settings.blocks as u64,
                ..Default::default()
            },
            compute,
            settings,
            sink,
            counters,
        }
    }

    pub(crate) fn run(&mut self, inbox: &Receiver<Order>) {
        let mut closing: Option<Instant> = None;
        loop {
            // Single requests fail on their own; this net is for a fault of the bookkeeping
            // itself, after which none of it can be trusted.
            let turn = catch_unwind(AssertUnwindSafe(|| self.once(inbox, &mut closing)));
            match turn {
                Ok(ControlFlow::Continue(())) => {}
                Ok(ControlFlow::Break(())) => return,
                Err(_) => self.reset(),
            }
        }
    }

    /// Starts over with empty bookkeeping. Waiting requests and adapters are kept.
    fn reset(&mut self) {
        tracing::error!("the engine lost track of its cache and starts over with an empty one");
        self.cache = PrefixCache::new(self.settings.blocks, KvPool::BLOCK_TOKENS);
        let text = "the engine failed on this request; it can be repeated";
        let lost = Failure::new(Code::Unavailable, text);
        for sequence in std::mem::take(&mut self.running) {
            self.fail(sequence.id, lost.clone());
        }
        for job in std::mem::take(&mut self.scoring) {
            (job.reply)(Err(lost.clone()));
        }
    }

    fn once(&mut self, inbox: &Receiver<Order>, closing: &mut Option<Instant>) -> ControlFlow<()> {
        let idle = self.running.is_empty() && self.waiting.is_empty() && self.scoring.is_empty();
        if idle && closing.is_some() {
            return ControlFlow::Break(());
        }
        let mut next = if idle {
            inbox.recv().map_err(|_| TryRecvError::Disconnected)
        } else {
            inbox.try_recv()
        };
        loop {
            match next {
                Ok(Order::Shutdown(at)) => *closing = Some(at),
                Ok(order) => self.obey(order, closing.is_some()),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.fail_all("the engine was stopped");
                    return ControlFlow::Break(());
                }
            }
            next = inbox.try_recv();
        }
        if closing.is_some_and(|at| Instant::now() >= at) {
            self.fail_all("the engine is shutting down");
            return ControlFlow::Break(());
        }
        self.expire();
        self.admit();
        self.turn();
        self.publish();
        ControlFlow::Continue(())
    }

    fn emit(&self, id: u64, event: GenerateEvent) {
        (self.sink)(id, event);
    }

    fn fail(&self, id: u64, failure: Failure) {
        self.emit(id, GenerateEvent::Failed { failure });
    }

    fn fail_all(&mut self, text: &str) {
        self.end_early(|_, _, _| true, Code::Cancelled, text);
        for job in std::mem::take(&mut self.scoring) {
            (job.reply)(Err(Failure::new(Code::Cancelled, text)));
        }
    }

    fn publish(&mut self) {
        let mut now = self.totals.clone();
        now.running = self.running.len() as u32;
        now.queued = self.waiting.len() as u32;
        now.cache_used = self.cache.used() as u64 * self.per_block;
        *lock(&self.counters) = now;
    }

    fn obey(&mut self, order: Order, closing: bool) {
        match order {
            Order::Admit(prepared) => {
                let id = prepared.id;
                if let Err(failure) = self.queue(prepared, closing) {
                    self.fail(id, failure);
                }
            }
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
            Order::Score(adapter, items, reply) => match self.check_scores(&items) {
                Ok(()) => self.scoring.push_back(ScoreJob {
                    adapter,
                    items: items.into(),
                    current: None,
                    done: Vec::new(),
                    reply,
                }),
                Err(failure) => reply(Err(failure)),
            },
            Order::Shutdown(_) => {}
        }
    }

    fn check_scores(&self, items: &[ScoreItem]) -> Result<(), Failure> {
        let invalid = |text: String| Err(Failure::new(Code::InvalidRequest, text));
        let vocab = self.compute.vocab();
        for item in items {
            let (prompt, answer) = (&item.prompt_ids, &item.response_ids);
            if prompt.is_empty() || answer.is_empty() {
                return invalid("a prompt and an answer are needed to score".into());
            }
            if let Some(id) = prompt.iter().chain(answer).find(|t| **t as usize >= vocab) {
                return invalid(format!("token {id} is outside the vocabulary of {vocab}"));
            }
            let (len, most) = (
                prompt.len() + answer.len(),
                self.settings.blocks * KvPool::BLOCK_TOKENS,
            );
            if len > most {
                let text = format!("{len} tokens to score do not fit the cache of {most}");
                return Err(Failure::new(Code::ContextLengthExceeded, text));
            }
        }
        Ok(())
    }

    fn queue(&mut self, prepared: Box<Prepared>, closing: bool) -> Result<(), Failure> {
        if closing {
            let text = "the engine is shutting down; try again";
            return Err(Failure::new(Code::Unavailable, text));
        }
        if self.waiting.len() >= self.settings.max_queue {
            return Err(busy(self.waiting.len()));
        }
        self.adapters.check(prepared.request.adapter)?;
        self.waiting.push_back(Waiting {
            prepared,
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
            let p = &w.prepared;
            let end = which(p.id, &p.request, p.arrived);
            if end {
                ended.push(p.id);
            }
            !end
        });
        let mut kept = Vec::with_capacity(self.running.len());
        for s in std::mem::take(&mut self.running) {
            if which(s.id, &s.request, s.arrived) {
                self.let_go(&s);
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

    /// Gives a sequence's blocks back; what was computed is worth keeping for the next
    /// request of its conversation.
    fn let_go(&mut self, s: &Sequence) {
        self.cache
            .remember(s.version, &s.tokens[..s.computed], &s.blocks);
        self.cache.release(&s.blocks);
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
                load.get(self.waiting[*i].prepared.request.session.as_str())
                    .copied()
                    .unwrap_or(0)
            });
            let Some(next) = next.and_then(|i| self.waiting.remove(i)) else {
                break;
            };
            let id = next.prepared.id;
            match self.start(next) {
                Ok(None) => {}
                Ok(Some(back)) => {
                    self.waiting.push_front(back);
                    break;
                }
                Err(failure) => self.fail(id, failure),
            }
        }
        for (position, waiting) in self.waiting.iter_mut().enumerate() {
            let position = position as u32;
            if waiting.reported != Some(position) {
                waiting.reported = Some(position);
                (self.sink)(waiting.prepared.id, GenerateEvent::Queued { position });
            }
        }
    }

    /// Gives a request its version and blocks; returns it when there are too few blocks now.
    fn start(&mut self, w: Waiting) -> Result<Option<Waiting>, Failure> {
        let p = &w.prepared;
        let (version, adapter) = self
            .adapters
            .select(p.request.adapter, p.request.turn.as_deref())?;
        let window = self
            .settings
            .context_length
            .min(self.settings.blocks * KvPool::BLOCK_TOKENS);
        let room = window - p.prompt.len();
        let limit = p
            .request
            .sampling
            .max_tokens
            .map_or(room, |m| room.min(m as usize))
            .max(1);
        // The last prompt token is always computed: its hidden state begins the answer.
        let mut blocks = self.cache.reuse(version, &p.prompt, p.prompt.len() - 1);
        let cached = blocks.len() * KvPool::BLOCK_TOKENS;
        let wanted = (p.prompt.len() + limit.min(RESERVED_ANSWER)).div_ceil(KvPool::BLOCK_TOKENS);
        if wanted - blocks.len() > self.cache.available() {
            self.cache.release(&blocks);
            if self.running.is_empty() && self.scoring.is_empty() {
                let text = format!(
                    "the key/value cache of {} tokens cannot hold this request",
                    self.settings.blocks * KvPool::BLOCK_TOKENS
                );
                return Err(Failure::new(Code::OutOfMemory, text));
            }
            return Ok(Some(w));
        }
        while blocks.len() < wanted {
            match self.cache.allocate() {
                Some(block) => blocks.push(block),
                None => break,
            }
        }
        self.totals.prompt_tokens += p.prompt.len() as u64;
        self.totals.cached_tokens += cached as u64;
        self.emit(
            p.id,
            GenerateEvent::Started {
                prompt_tokens: p.prompt.len() as u32,
                prompt_ids: p.prompt.clone(),
                cached_tokens: cached as u32,
                adapter: version,
            },
        );
        let p = *w.prepared;
        let sampling = p.request.sampling.clone();
        let stops = StopTexts::new(sampling.stop.clone());
        let sampler = Sampler::new(sampling, &p.prompt);
        let parser = OutputParser::new(p.reading);
        let answer = Answer::new(sampler, stops, parser, Constraint::new(p.plan));
        self.running.push(Sequence {
            id: p.id,
            version,
            adapter,
            prompt_len: p.prompt.len(),
            computed: cached,
            blocks,
            limit,
            arrived: p.arrived,
            answer,
            tokens: p.prompt,
            request: p.request,
        });
        Ok(None)
    }

    /// Chooses the next batch: every answer's next token, a chunk of one prompt, a chunk of
    /// one scoring job.
    fn plan(&mut self) -> Vec<Planned> {
        self.make_room();
        let mut planned: Vec<Planned> = (0..self.running.len())
            .filter(|i| self.running[*i].answering())
            .map(|i| Planned {
                who: Who::Sequence(i),
                len: 1,
            })
            .collect();
        let mut budget = self.pace.chunk(planned.len());
        let prompts: Vec<usize> = (0..self.running.len())
            .filter(|i| !self.running[*i].answering())
            .collect();
        if !prompts.is_empty() {
            self.next_prompt = self.next_prompt.wrapping_add(1);
            for offset in 0..prompts.len() {
                let i = prompts[(self.next_prompt + offset) % prompts.len()];
                let s = &self.running[i];
                let len = (s.tokens.len() - s.computed).min(budget);
                if len > 0 {
                    planned.push(Planned {
                        who: Who::Sequence(i),
                        len,
                    });
                    budget -= len;
                }
            }
        }
        if let Some(left) = self.next_scored() {
            let len = left.min(budget.max(LEAST_SCORED));
            planned.push(Planned {
                who: Who::Score,
                len,
            });
        }
        // Rows of one adapter lie together, so its update runs once over all of them.
        planned.sort_by_key(|p| match p.who {
            Who::Sequence(i) => (0, self.running[i].version),
            Who::Score => (1, Default::default()),
        });
        planned
    }

    /// Begins the next item of the oldest scoring job when there are blocks for it; returns
    /// how many of its tokens are still to be computed.
    fn next_scored(&mut self) -> Option<usize> {
        loop {
            let job = self.scoring.front_mut()?;
            if let Some(current) = &job.current {
                // The last token predicts nothing that is asked for.
                return Some(current.tokens.len() - 1 - current.computed);
            }
            let Some(item) = job.items.front() else {
                let job = self.scoring.pop_front()?;
                (job.reply)(Ok(job.done));
                continue;
            };
            let tokens: Vec<u32> = item
                .prompt_ids
                .iter()
                .chain(&item.response_ids)
                .copied()
                .collect();
            let wanted = tokens.len().div_ceil(KvPool::BLOCK_TOKENS);
            if wanted > self.cache.available() {
                if self.running.is_empty() && self.waiting.is_empty() {
                    let text = "the key/value cache is too full to score this now";
                    let job = self.scoring.pop_front()?;
                    (job.reply)(Err(Failure::new(Code::OutOfMemory, text)));
                    continue;
                }
                return None;
            }
            let blocks = (0..wanted).map_while(|_| self.cache.allocate()).collect();
            job.current = Some(Scoring {
                tokens,
                prompt_len: item.prompt_ids.len(),
                computed: 0,
                blocks,
                logprobs: Vec::new(),
            });
            job.items.pop_front();
        }
    }

    /// Plans, computes and applies one batch.
    fn turn(&mut self) {
        let planned = self.plan();
        if planned.is_empty() {
            return;
        }
        let begun = Instant::now();
        let rows: Vec<Result<Row, Failure>> = match self.attempt(&planned) {
            Ok(rows) => rows.into_iter().map(Ok).collect(),
            Err(failure) if planned.len() == 1 => vec![Err(failure)],
            Err(_) => planned
                .iter()
                .map(|one| {
                    let rows = self.attempt(std::slice::from_ref(one))?;
                    Ok(rows.into_iter().next().unwrap_or_default())
                })
                .collect(),
        };
        let answers = planned
            .iter()
            .filter(|p| matches!(p.who, Who::Sequence(i) if self.running[i].answering()))
            .count();
        let tokens = planned.iter().map(|p| p.len).sum::<usize>() - answers;
        self.pace.observe(answers, tokens, begun.elapsed());
        let mut over: Vec<(usize, Result<FinishReason, Failure>)> = Vec::new();
        for (share, row) in planned.into_iter().zip(rows) {
            match share.who {
                Who::Score => self.scored(share.len, row),
                Who::Sequence(i) => {
                    let outcome =
                        row.and_then(|row| isolated(|| self.apply(i, share.len, row.logits)));
                    match outcome {
                        Ok(None) => {}
                        Ok(Some(reason)) => over.push((i, Ok(reason))),
                        Err(failure) => over.push((i, Err(failure))),
                    }
                }
            }
        }
        over.sort_by_key(|(i, _)| std::cmp::Reverse(*i));
        for (i, outcome) in over {
            let mut s = self.running.remove(i);
            let outcome = outcome.and_then(|reason| isolated(|| Ok(s.finish(reason))));
            match outcome {
                Ok(events) => {
                    self.let_go(&s);
                    for event in events {
                        self.emit(s.id, event);
                    }
                }
                Err(failure) => {
                    // What it computed is not to be trusted by later requests.
                    self.cache.release(&s.blocks);
                    self.fail(s.id, failure);
                }
            }
        }
    }

    /// Computes these shares as one batch.
    fn attempt(&self, planned: &[Planned]) -> Result<Vec<Row>, Failure> {
        let mut batch = Batch::default();
        let mut wants = Wants::default();
        let mut at = 0;
        let job = self.scoring.front();
        for share in planned {
            let (tokens, computed, blocks, adapter) = match share.who {
                Who::Sequence(i) => {
                    let s = &self.running[i];
                    if s.computed + share.len == s.tokens.len() {
                        wants.logits.push((at + share.len - 1) as u32);
                    }
                    (&s.tokens, s.computed, &s.blocks, &s.adapter)
                }
                Who::Score => {
                    let Some((job, s)) = job.and_then(|j| Some((j, j.current.as_ref()?))) else {
                        continue;
                    };
                    let rows = s.predicting(share.len);
                    if !rows.is_empty() {
                        let first = s.computed + 1;
                        let targets = s.tokens[first + rows.start..first + rows.end].to_vec();
                        wants
                            .logprobs
                            .push((at + rows.start..at + rows.end, targets));
                    }
                    (&s.tokens, s.computed, &s.blocks, &job.adapter)
                }
            };
            batch.segments.push(Segment {
                tokens: tokens[computed..computed + share.len].to_vec(),
                parent: None,
                cache: Some(CacheSlots {
                    blocks: blocks.clone(),
                    past: computed,
                    write: true,
                }),
                adapter: adapter.clone(),
            });
            at += share.len;
        }
        let computed = isolated(|| self.compute.run(&batch, &wants).map_err(failure))?;
        let mut logits = computed.logits.into_iter();
        let mut logprobs = computed.logprobs.into_iter();
        Ok(planned
            .iter()
            .map(|share| match share.who {
                Who::Sequence(i) => {
                    let s = &self.running[i];
                    let ready = s.computed + share.len == s.tokens.len();
                    Row {
                        logits: ready.then(|| logits.next()).flatten(),
                        logprobs: None,
                    }
                }
                Who::Score => Row {
                    logits: None,
                    logprobs: logprobs.next(),
                },
            })
            .collect())
    }

    /// Takes in what was computed of sequence `i`; says whether its answer has ended.
    fn apply(
        &mut self,
        i: usize,
        len: usize,
        logits: Option<Vec<f32>>,
    ) -> Result<Option<FinishReason>, Failure> {
        let compute = self.compute.clone();
        let s = &mut self.running[i];
        let was_prompt = s.computed < s.prompt_len;
        s.computed += len;
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
        let Some(logits) = logits else {
            return Ok(None);
        };
        let s = &mut self.running[i];
        let id = s.id;
        let (event, reason) = s.advance(&logits, compute.tokenizer())?;
        self.totals.generated_tokens += 1;
        if let Some(event) = event {
            self.emit(id, event);
        }
        Ok(reason)
    }

    /// Takes in what was computed of the oldest scoring job.
    fn scored(&mut self, len: usize, row: Result<Row, Failure>) {
        let Some(mut job) = self.scoring.pop_front() else {
            return;
        };
        let Some(mut s) = job.current.take() else {
            return self.scoring.push_front(job);
        };
        match row {
            Err(failure) => {
                self.cache.release(&s.blocks);
                (job.reply)(Err(failure));
            }
            Ok(row) => {
                s.computed += len;
                s.logprobs.extend(row.logprobs.unwrap_or_default());
                if s.computed + 1 >= s.tokens.len() {
                    self.cache.release(&s.blocks);
                    job.done.push(s.logprobs);
                } else {
                    job.current = Some(s);
                }
                if job.current.is_none() && job.items.is_empty() {
                    (job.reply)(Ok(job.done));
                } else {
                    self.scoring.push_front(job);
                }
            }
        }
    }

    /// Makes sure that the next token of every answer has a slot. When there is none left,
    /// the youngest request gives up its blocks and the others go on.
    fn make_room(&mut self) {
        while (0..self.running.len()).any(|i| !self.grow(i)) {
            let youngest = self.running.iter().max_by_key(|s| s.arrived).map(|s| s.id);
            let text = "the key/value cache is full; the request can be repeated";
            self.end_early(|id, _, _| Some(id) == youngest, Code::OutOfMemory, text);
        }
    }

    /// Takes the blocks that sequence `i` needs; false when there are too few.
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
}
