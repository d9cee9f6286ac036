//! The handle of a running engine: what can be asked of it, and by whom it is done.
//!
//! Two threads stand behind it: one prepares prompts, one is the [`scheduler`](crate::scheduler)'s
//! loop. Neither ends by a request that fails.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use spotter_core::code::Failure;
use spotter_core::generate::{GenerateEvent, GenerateRequest, Prompt};
use spotter_core::train::ScoreItem;
use spotter_core::worker::ServeCounters;
use spotter_core::{AdapterVersion, Code};
use spotter_model::{KvPool, LoadedModel, LoraAdapter};

use crate::compute::{Compute, ModelCompute};
use crate::prepare::{Prepared, Preparer, Preparing, Task, lock, stopped};
use crate::scheduler::Scheduler;

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

pub(crate) type Reply<T> = Box<dyn FnOnce(Result<T, Failure>) + Send>;

/// Work for the loop.
pub(crate) enum Order {
    Admit(Box<Prepared>),
    Cancel(u64),
    Insert(AdapterVersion, Arc<LoraAdapter>),
    Swap(
        Option<AdapterVersion>,
        AdapterVersion,
        Reply<AdapterVersion>,
    ),
    Remove(AdapterVersion),
    Score(
        Option<Arc<LoraAdapter>>,
        Vec<ScoreItem>,
        Reply<Vec<Vec<f32>>>,
    ),
    Shutdown(Instant),
}

/// A running engine. Dropping it ends its threads.
pub struct Engine {
    tasks: Sender<Task>,
    orders: Sender<Order>,
    preparing: Preparing,
    max_queue: usize,
    sink: EventSink,
    thread: Option<std::thread::JoinHandle<()>>,
    counters: Arc<Mutex<ServeCounters>>,
}

impl Engine {
    /// Reserves the key/value memory and starts the loop.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(
        model: Arc<LoadedModel>,
        settings: EngineSettings,
        sink: EventSink,
    ) -> std::io::Result<Self> {
        let compute = ModelCompute::new(model, settings.blocks);
        Self::with_compute(Arc::new(compute), settings, sink)
    }

    /// Starts the loop over any [`Compute`].
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn with_compute(
        compute: Arc<dyn Compute>,
        settings: EngineSettings,
        sink: EventSink,
    ) -> std::io::Result<Self> {
        let (tasks, inbox) = channel();
        let (orders, loop_inbox) = channel();
        let counters = Arc::new(Mutex::new(ServeCounters {
            cache_total: compute.block_bytes() * settings.blocks as u64,
            ..Default::default()
        }));
        let preparing = Preparing::default();
        let max_queue = settings.max_queue;
        let mut preparer = Preparer {
            compute: compute.clone(),
            window: settings
                .context_length
                .min(settings.blocks * KvPool::BLOCK_TOKENS),
            preparing: preparing.clone(),
            orders: orders.clone(),
            sink: sink.clone(),
            grammars: None,
        };
        std::thread::Builder::new()
            .name("prepare".into())
            .spawn(move || preparer.run(&inbox))?;
        let (events, shared) = (sink.clone(), counters.clone());
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || Scheduler::new(compute, settings, events, shared).run(&loop_inbox))?;
        Ok(Self {
            tasks,
            orders,
            preparing,
            max_queue,
            sink,
            thread: Some(thread),
            counters,
        })
    }

    fn order(&self, order: Order) {
        // A loop that has ended has answered everything; what comes later has its own reply.
        let _ = self.orders.send(order);
    }

    /// Queues a generation. Its events go to the sink under this id.
    pub fn submit(&self, id: u64, request: GenerateRequest) {
        let mut preparing = lock(&self.preparing);
        let failure = if preparing.len() >= self.max_queue {
            busy(preparing.len())
        } else {
            preparing.insert(id);
            let task = Task::Submit(id, Box::new(request), Instant::now());
            match self.tasks.send(task) {
                Ok(()) => return,
                Err(_) => {
                    preparing.remove(&id);
                    stopped()
                }
            }
        };
        drop(preparing);
        (self.sink)(id, GenerateEvent::Failed { failure });
    }

    /// Stops a generation before the next turn of the loop.
    pub fn cancel(&self, id: u64) {
        let mut preparing = lock(&self.preparing);
        if !preparing.remove(&id) {
            self.order(Order::Cancel(id));
        }
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
        // Dropped unanswered only when the engine is gone, and its user with it.
        let _ = self
            .tasks
            .send(Task::Count(Box::new(prompt), Box::new(reply)));
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
        lock(&self.counters).clone()
    }

    /// Lets running answers finish until `grace` has passed, then ends the loop.
    pub fn shutdown(mut self, grace: Duration) {
        let at = Instant::now() + grace;
        if self.tasks.send(Task::Shutdown(at)).is_err() {
            self.order(Order::Shutdown(at));
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The queue is full.
pub(crate) fn busy(waiting: usize) -> Failure {
    Failure::new(
        Code::Busy,
        format!("{waiting} requests are waiting already; try again in a moment"),
    )
}
