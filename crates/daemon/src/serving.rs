//! The serving worker, supervised: started, watched, restarted, and asked.
//!
//! Requests that have not been answered with anything yet survive the worker's death:
//! they are handed to the next one. The live adapter is loaded again after a restart.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use futures::Stream;
use spotter_core::AdapterVersion;
use spotter_core::code::{Code, Failure};
use spotter_core::generate::{GenerateEvent, GenerateRequest, Prompt};
use spotter_core::train::AdapterFiles;
use spotter_core::worker::{
    Command, ModelFacts, PROTOCOL, Report, ServeCounters, WorkerRole, WorkerSettings,
};
use spotter_gateway::engine::{Adapters, Engine, EventStream};
use tokio::sync::{mpsc, oneshot, watch};

use crate::process::Process;

/// Waits between restarts: first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// How long answers may take to end when the daemon stops.
const GRACE: Duration = Duration::from_secs(10);

/// What the serving worker is doing, for the status page.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The model, once it is loaded.
    pub facts: Option<ModelFacts>,
    /// Why no model is loaded.
    pub load_error: Option<Failure>,
    /// `starting`, `running`, `restarting` or `stopped`.
    pub phase: &'static str,
    /// The worker's process id.
    pub pid: Option<u32>,
    /// Restarts since the daemon started.
    pub restarts: u32,
    /// What ended the last worker.
    pub last_crash: Option<String>,
    /// Counters of the last heartbeat.
    pub counters: ServeCounters,
    /// Resident bytes of the worker.
    pub resident: u64,
    /// The live version.
    pub live: AdapterVersion,
    /// Loaded versions, base excluded.
    pub loaded: Vec<AdapterFiles>,
}

/// Told the share done, 0 to 1.
type Progress = Box<dyn Fn(f64) + Send>;

/// Who waits for the answer to a command.
struct Asked {
    reply: oneshot::Sender<Report>,
    progress: Option<Progress>,
}

enum Order {
    Generate {
        id: u64,
        request: Box<GenerateRequest>,
        events: mpsc::UnboundedSender<GenerateEvent>,
    },
    Cancel(u64),
    Ask {
        id: u64,
        command: Box<Command>,
        asked: Asked,
    },
    Unload(AdapterVersion),
    Configure(Box<WorkerSettings>),
    Shutdown(oneshot::Sender<()>),
}

/// A handle on the supervised worker; cloning shares it.
#[derive(Clone)]
pub struct Serving {
    orders: mpsc::UnboundedSender<Order>,
    state: Arc<Mutex<State>>,
    next_id: Arc<AtomicU64>,
    active: watch::Receiver<bool>,
}

fn away() -> Failure {
    Failure::new(
        Code::Unavailable,
        "the serving worker is restarting; try again in a moment",
    )
}

impl Serving {
    /// Starts supervising. `loaded` and `live` are restored in every worker that starts.
    pub fn start(
        settings: WorkerSettings,
        loaded: Vec<AdapterFiles>,
        live: AdapterVersion,
    ) -> Self {
        let (orders, inbox) = mpsc::unbounded_channel();
        let state = Arc::new(Mutex::new(State {
            phase: "starting",
            loaded,
            live,
            ..State::default()
        }));
        let (activity, active) = watch::channel(false);
        let supervisor = Supervisor {
            settings,
            state: state.clone(),
            inbox,
            generations: HashMap::new(),
            asked: HashMap::new(),
            activity,
        };
        tokio::spawn(supervisor.run());
        Self {
            orders,
            state,
            next_id: Arc::new(AtomicU64::new(1)),
            active,
        }
    }

    /// A copy of the state.
    pub fn state(&self) -> State {
        lock(&self.state).clone()
    }

    /// Follows whether requests are being answered.
    pub fn activity(&self) -> watch::Receiver<bool> {
        self.active.clone()
    }

    /// Serves another model, or with other limits, from now on.
    pub fn configure(&self, settings: WorkerSettings) {
        let _ = self.orders.send(Order::Configure(Box::new(settings)));
    }

    async fn ask(&self, command: impl FnOnce(u64) -> Command) -> Result<Report, Failure> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.ask_as(id, command(id), None).await
    }

    async fn ask_as(
        &self,
        id: u64,
        command: Command,
        progress: Option<Progress>,
    ) -> Result<Report, Failure> {
        let (reply, answer) = oneshot::channel();
        self.orders
            .send(Order::Ask {
                id,
                command: Box::new(command),
                asked: Asked { reply, progress },
            })
            .map_err(|_| away())?;
        answer.await.map_err(|_| away())
    }

    /// Makes a version available.
    ///
    /// # Errors
    /// What the worker says of the files, or `Unavailable` while it is away.
    pub async fn load_adapter(&self, adapter: AdapterFiles) -> Result<(), Failure> {
        let files = adapter.clone();
        match self.ask(|id| Command::LoadAdapter { id, adapter }).await? {
            Report::AdapterLoaded { result, .. } => {
                result?;
                let mut state = lock(&self.state);
                state.loaded.retain(|a| a.version != files.version);
                state.loaded.push(files);
                Ok(())
            }
            _ => Err(away()),
        }
    }

    /// Compare-and-swap of the live version.
    ///
    /// # Errors
    /// `Conflict` when another version is live, `ModelNotFound` when `to` is not loaded.
    pub async fn swap(
        &self,
        expected: Option<AdapterVersion>,
        to: AdapterVersion,
    ) -> Result<(), Failure> {
        match self.ask(|id| Command::Swap { id, expected, to }).await? {
            Report::Swapped { result, .. } => {
                lock(&self.state).live = result?;
                Ok(())
            }
            _ => Err(away()),
        }
    }

    /// Forgets a version once its last sequence has ended.
    pub fn unload(&self, version: AdapterVersion) {
        lock(&self.state).loaded.retain(|a| a.version != version);
        let _ = self.orders.send(Order::Unload(version));
    }

    /// Writes an adapter in another form; answers the bytes written. Dropping the future
    /// calls the export off.
    ///
    /// # Errors
    /// What the worker says; nothing is left behind then.
    pub async fn export(
        &self,
        adapter: AdapterFiles,
        format: String,
        out: std::path::PathBuf,
        card: serde_json::Value,
        progress: impl Fn(f64) + Send + 'static,
    ) -> Result<u64, Failure> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut unless_answered = CancelOnDrop(Some(id), self.orders.clone());
        let command = Command::Export {
            id,
            adapter,
            format,
            out,
            card,
        };
        let report = self.ask_as(id, command, Some(Box::new(progress))).await;
        unless_answered.0 = None;
        match report? {
            Report::Exported { result, .. } => result,
            _ => Err(away()),
        }
    }

    /// Checks an adapter made elsewhere and copies it to `out`.
    ///
    /// # Errors
    /// What does not fit this base.
    pub async fn import(
        &self,
        source: std::path::PathBuf,
        out: std::path::PathBuf,
        force: bool,
    ) -> Result<serde_json::Value, Failure> {
        match self
            .ask(|id| Command::Import {
                id,
                source,
                out,
                force,
            })
            .await?
        {
            Report::Imported { result, .. } => result,
            _ => Err(away()),
        }
    }

    /// Lets answers finish, then ends the worker.
    pub async fn shutdown(&self) {
        let (done, ended) = oneshot::channel();
        if self.orders.send(Order::Shutdown(done)).is_ok() {
            let _ = ended.await;
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Cancels what nobody waits for any more.
struct CancelOnDrop(Option<u64>, mpsc::UnboundedSender<Order>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(id) = self.0 {
            let _ = self.1.send(Order::Cancel(id));
        }
    }
}

/// The events of one generation; dropping it early cancels.
struct Generation {
    id: u64,
    events: mpsc::UnboundedReceiver<GenerateEvent>,
    orders: mpsc::UnboundedSender<Order>,
    ended: bool,
}

impl Stream for Generation {
    type Item = GenerateEvent;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<GenerateEvent>> {
        let next = self.events.poll_recv(context);
        if let Poll::Ready(
            None | Some(GenerateEvent::Finished { .. } | GenerateEvent::Failed { .. }),
        ) = &next
        {
            self.ended = true;
        }
        next
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.orders.send(Order::Cancel(self.id));
        }
    }
}

#[async_trait]
impl Engine for Serving {
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream, Failure> {
        if let Some(failure) = lock(&self.state).load_error.clone() {
            return Err(Failure::new(Code::Unavailable, failure.message));
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, events) = mpsc::unbounded_channel();
        self.orders
            .send(Order::Generate {
                id,
                request: Box::new(request),
                events: sender,
            })
            .map_err(|_| away())?;
        Ok(Box::pin(Generation {
            id,
            events,
            orders: self.orders.clone(),
            ended: false,
        }))
    }

    async fn count_tokens(&self, prompt: Prompt) -> Result<u32, Failure> {
        match self
            .ask(|id| Command::CountTokens {
                id,
                prompt: Box::new(prompt),
            })
            .await?
        {
            Report::TokenCount { result, .. } => result,
            _ => Err(away()),
        }
    }

    fn facts(&self) -> Option<ModelFacts> {
        lock(&self.state).facts.clone()
    }

    fn adapters(&self) -> Adapters {
        let state = lock(&self.state);
        let mut loaded: Vec<AdapterVersion> = state.loaded.iter().map(|a| a.version).collect();
        loaded.push(AdapterVersion::BASE);
        loaded.sort_unstable();
        Adapters {
            live: state.live,
            loaded,
        }
    }

    fn ready(&self) -> bool {
        lock(&self.state).phase == "running"
    }
}

struct Running {
    request: Box<GenerateRequest>,
    events: mpsc::UnboundedSender<GenerateEvent>,
    /// Whether the client has been given part of an answer.
    begun: bool,
}

struct Supervisor {
    settings: WorkerSettings,
    state: Arc<Mutex<State>>,
    inbox: mpsc::UnboundedReceiver<Order>,
    generations: HashMap<u64, Running>,
    asked: HashMap<u64, Asked>,
    activity: watch::Sender<bool>,
}

/// Why one worker's life ended.
enum End {
    Died(String),
    Replaced,
    Closed(Option<oneshot::Sender<()>>),
}

impl Supervisor {
    async fn run(mut self) {
        let mut wait = BACKOFF.0;
        loop {
            let began = tokio::time::Instant::now();
            let mut process = match Process::spawn(&[WorkerRole::Serve]) {
                Ok(process) => process,
                Err(failure) => {
                    {
                        let mut state = lock(&self.state);
                        state.load_error = Some(failure);
                        state.phase = "stopped";
                    }
                    match self.wait_away(BACKOFF.1).await {
                        Some(done) => return finish(done),
                        None => continue,
                    }
                }
            };
            match self.life(&mut process).await {
                End::Closed(done) => {
                    lock(&self.state).phase = "stopped";
                    // The answers' last events are passed on while the worker ends.
                    let (events, mut rest) = mpsc::unbounded_channel();
                    std::mem::swap(&mut process.reports, &mut rest);
                    drop(events);
                    let passing = async {
                        while let Some(report) = rest.recv().await {
                            self.hear(report);
                        }
                    };
                    tokio::join!(process.shutdown(GRACE), passing);
                    for (_, running) in self.generations.drain() {
                        let failure = Failure::new(Code::Unavailable, "Spotter is stopping");
                        let _ = running.events.send(GenerateEvent::Failed { failure });
                    }
                    return done.map_or((), finish);
                }
                End::Replaced => {
                    lock(&self.state).phase = "restarting";
                    process.shutdown(Duration::from_secs(1)).await;
                    self.fail_begun();
                    wait = BACKOFF.0;
                }
                End::Died(reason) => {
                    tracing::error!(reason, "the serving worker died; it is started again");
                    {
                        let mut state = lock(&self.state);
                        state.phase = "restarting";
                        state.pid = None;
                        state.restarts += 1;
                        state.last_crash = Some(reason);
                    }
                    self.fail_begun();
                    // A worker that lived for a while is not in a crash loop.
                    if began.elapsed() > Duration::from_secs(30) {
                        wait = BACKOFF.0;
                    }
                    if let Some(done) = self.wait_away(wait).await {
                        return finish(done);
                    }
                    wait = (wait * 2).min(BACKOFF.1);
                }
            }
        }
    }

    /// Keeps taking orders while there is no worker; `Some` when asked to stop.
    async fn wait_away(&mut self, time: Duration) -> Option<oneshot::Sender<()>> {
        let deadline = tokio::time::Instant::now() + time;
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(deadline) => return None,
                order = self.inbox.recv() => match order {
                    Some(Order::Shutdown(done)) => return Some(done),
                    None => return Some(oneshot::channel().0),
                    Some(Order::Configure(settings)) => {
                        self.settings = *settings;
                        return None;
                    }
                    Some(Order::Generate { id, request, events }) => {
                        let _ = events.send(GenerateEvent::Queued { position: self.generations.len() as u32 });
                        self.generations.insert(id, Running { request, events, begun: false });
                    }
                    Some(Order::Cancel(id)) => drop(self.generations.remove(&id)),
                    // The reply is dropped, which tells the caller that the worker is away.
                    Some(Order::Ask { .. } | Order::Unload(_)) => {}
                }
            }
        }
    }

    /// Answers that had begun cannot be continued elsewhere.
    fn fail_begun(&mut self) {
        self.asked.clear();
        self.generations.retain(|_, running| {
            if running.begun {
                let failure = Failure::new(
                    Code::Unavailable,
                    "the serving worker ended in the middle of this answer; the request can be repeated",
                );
                let _ = running.events.send(GenerateEvent::Failed { failure });
            }
            !running.begun
        });
        self.publish_activity();
    }

    fn publish_activity(&self) {
        let active = !self.generations.is_empty();
        self.activity
            .send_if_modified(|now| std::mem::replace(now, active) != active);
    }

    /// From `Start` to the end of one worker.
    async fn life(&mut self, process: &mut Process) -> End {
        {
            let mut state = lock(&self.state);
            state.pid = process.pid();
            state.facts = None;
        }
        process.send(Command::Start {
            protocol: PROTOCOL,
            settings: Box::new(self.settings.clone()),
        });
        let mut ready = false;
        loop {
            tokio::select! {
                report = process.reports.recv() => match report {
                    None => return End::Died(process.died().await),
                    Some(Report::Ready { model, .. }) => {
                        ready = true;
                        self.restore(process);
                        let mut state = lock(&self.state);
                        state.facts = Some(*model);
                        state.load_error = None;
                        state.phase = "running";
                    }
                    Some(Report::LoadFailed { failure }) => {
                        tracing::error!(%failure, "the model cannot be loaded");
                        {
                            let mut state = lock(&self.state);
                            state.load_error = Some(failure.clone());
                            state.phase = "stopped";
                        }
                        for (_, running) in self.generations.drain() {
                            let failure = Failure::new(Code::Unavailable, failure.message.clone());
                            let _ = running.events.send(GenerateEvent::Failed { failure });
                        }
                    }
                    Some(report) => self.hear(report),
                },
                order = self.inbox.recv() => match order {
                    None => return End::Closed(None),
                    Some(Order::Shutdown(done)) => return End::Closed(Some(done)),
                    Some(Order::Configure(settings)) => {
                        self.settings = *settings;
                        return End::Replaced;
                    }
                    Some(Order::Generate { id, request, events }) => {
                        if ready {
                            process.send(Command::Generate { id, request: request.clone() });
                        } else {
                            let _ = events.send(GenerateEvent::Queued { position: self.generations.len() as u32 });
                        }
                        self.generations.insert(id, Running { request, events, begun: false });
                        self.publish_activity();
                    }
                    Some(Order::Cancel(id)) => {
                        if self.generations.remove(&id).is_some() {
                            process.send(Command::Cancel { id });
                            self.publish_activity();
                        } else if self.asked.remove(&id).is_some() {
                            process.send(Command::Cancel { id });
                        }
                    }
                    Some(Order::Ask { id, command, asked }) => {
                        if ready {
                            self.asked.insert(id, asked);
                            process.send(*command);
                        }
                    }
                    Some(Order::Unload(version)) => process.send(Command::UnloadAdapter { version }),
                }
            }
        }
    }

    /// Loads the adapters again and hands over what waits.
    fn restore(&mut self, process: &Process) {
        let (loaded, live) = {
            let state = lock(&self.state);
            (state.loaded.clone(), state.live)
        };
        // Answers to these ids are not waited for; a failure is in the worker's log.
        for adapter in loaded {
            process.send(Command::LoadAdapter { id: 0, adapter });
        }
        if !live.is_base() {
            process.send(Command::Swap {
                id: 0,
                expected: None,
                to: live,
            });
        }
        let mut ids: Vec<u64> = self.generations.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            process.send(Command::Generate {
                id,
                request: self.generations[&id].request.clone(),
            });
        }
    }

    fn hear(&mut self, report: Report) {
        match report {
            Report::Generate { id, event } => {
                let Some(running) = self.generations.get_mut(&id) else {
                    return;
                };
                let ends = matches!(
                    event,
                    GenerateEvent::Finished { .. } | GenerateEvent::Failed { .. }
                );
                // A restart repeats the preparation, which the client must not see twice.
                running.begun |= matches!(
                    event,
                    GenerateEvent::Started { .. } | GenerateEvent::Delta { .. }
                );
                let _ = running.events.send(event);
                if ends {
                    self.generations.remove(&id);
                    self.publish_activity();
                }
            }
            Report::Heartbeat { resident, serve } => {
                let mut state = lock(&self.state);
                state.resident = resident;
                state.counters = serve.unwrap_or_default();
            }
            Report::ExportProgress { id, fraction } => {
                if let Some(progress) = self.asked.get(&id).and_then(|a| a.progress.as_ref()) {
                    progress(fraction);
                }
            }
            Report::AdapterLoaded {
                id: 0,
                result: Err(failure),
            }
            | Report::Swapped {
                id: 0,
                result: Err(failure),
            } => {
                tracing::error!(%failure, "the adapter could not be restored; the base answers");
                lock(&self.state).live = AdapterVersion::BASE;
            }
            report => {
                let id = match &report {
                    Report::TokenCount { id, .. }
                    | Report::AdapterLoaded { id, .. }
                    | Report::Swapped { id, .. }
                    | Report::Scores { id, .. }
                    | Report::Exported { id, .. }
                    | Report::Imported { id, .. } => *id,
                    _ => return,
                };
                if let Some(asked) = self.asked.remove(&id) {
                    let _ = asked.reply.send(report);
                }
            }
        }
    }
}

fn finish(done: oneshot::Sender<()>) {
    let _ = done.send(());
}
