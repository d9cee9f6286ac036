//! The one writer: a thread that owns the connection and batches work into transactions.

use std::cell::RefCell;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rusqlite::Connection;

use crate::error::{Result, StoreError};
use crate::recent::Recent;

/// Pieces of work that may wait.
const QUEUE: usize = 1024;
/// Pieces of work in one transaction.
const BATCH: usize = 64;
/// While writing fails, whether it works again is tried this often.
const PROBE: Duration = Duration::from_secs(1);
/// What a probe writes: more than any one step's pages, so that success means something.
const PROBE_BYTES: i64 = 256 * 1024;

/// What the writer works with.
pub(crate) struct Desk {
    connection: Connection,
    pub(crate) recent: RefCell<Recent>,
}

impl Desk {
    pub(crate) fn new(connection: Connection) -> Self {
        Self {
            connection,
            recent: RefCell::default(),
        }
    }
}

impl Deref for Desk {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

type Work = Box<dyn FnOnce(&Desk) -> Result<()> + Send>;
/// Told, once the transaction has ended, why it is not on disk, or nothing when it is.
type After = Box<dyn FnOnce(Option<NotWritten>) + Send>;

#[derive(Clone)]
struct NotWritten {
    reason: String,
    disk_full: bool,
}

struct Piece {
    work: Work,
    after: Option<After>,
}

enum Order {
    /// Part of a shared transaction.
    Batched(Piece),
    /// Outside a transaction.
    Alone(Piece),
}

/// Whether recording works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Work waiting for the writer.
    pub queued: usize,
    /// Most work that may wait.
    pub capacity: usize,
    /// The last failure, until a write succeeds again. While it lasts, the writer tries
    /// every second whether writing works again.
    pub stopped: Option<String>,
    /// Steps and metrics that were handed over and could not be stored, since the start.
    pub lost: u64,
}

#[derive(Default)]
struct Shared {
    queued: AtomicUsize,
    failing: AtomicBool,
    lost: AtomicU64,
    reason: Mutex<Option<String>>,
}

impl Shared {
    fn works(&self) {
        self.failing.store(false, Ordering::Relaxed);
    }

    fn fails(&self, error: &StoreError) {
        let text = error.to_string();
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        // Said once, not once per step.
        if !self.failing.load(Ordering::Relaxed) || reason.as_deref() != Some(&text) {
            tracing::error!(%error, "the pool could not write");
        }
        *reason = Some(text);
        self.failing.store(true, Ordering::Relaxed);
    }
}

pub(crate) struct Writer {
    /// `None` once it is closing.
    orders: Option<SyncSender<Order>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Writer {
    /// What was handed over is on disk when this returns.
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Writer {
    pub(crate) fn start(connection: Connection) -> Result<Self> {
        let (orders, inbox) = sync_channel(QUEUE);
        let shared = Arc::new(Shared::default());
        let seen = shared.clone();
        let thread = std::thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || run(&Desk::new(connection), &inbox, &seen))
            .map_err(|source| StoreError::Io {
                path: "store-writer".into(),
                source,
            })?;
        Ok(Self {
            orders: Some(orders),
            shared,
            thread: Some(thread),
        })
    }

    pub(crate) fn health(&self) -> Health {
        let reason = self
            .shared
            .reason
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        Health {
            queued: self.shared.queued.load(Ordering::Relaxed),
            capacity: QUEUE,
            stopped: reason.filter(|_| self.shared.failing.load(Ordering::Relaxed)),
            lost: self.shared.lost.load(Ordering::Relaxed),
        }
    }

    /// Queues work without waiting for it.
    pub(crate) fn post(
        &self,
        work: impl FnOnce(&Desk) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let orders = self.orders.as_ref().ok_or(StoreError::Closed)?;
        self.shared.queued.fetch_add(1, Ordering::Relaxed);
        orders
            .try_send(Order::Batched(Piece {
                work: Box::new(work),
                after: None,
            }))
            .map_err(|e| {
                self.shared.queued.fetch_sub(1, Ordering::Relaxed);
                self.shared.lost.fetch_add(1, Ordering::Relaxed);
                match e {
                    TrySendError::Full(_) => StoreError::Full,
                    TrySendError::Disconnected(_) => StoreError::Closed,
                }
            })
    }

    /// Queues work and waits until its transaction is on disk.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Desk) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.wait(work, Order::Batched)
    }

    /// As [`Writer::run`], but outside any transaction.
    pub(crate) fn run_alone<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Desk) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.wait(work, Order::Alone)
    }

    fn wait<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Desk) -> Result<T> + Send + 'static,
        order: impl FnOnce(Piece) -> Order,
    ) -> Result<T> {
        let (done, answer) = sync_channel::<Result<T>>(1);
        let (ended, committed) = sync_channel::<Option<NotWritten>>(1);
        let work = move |desk: &Desk| {
            let outcome = work(desk);
            let failure = outcome.as_ref().err().map(|error| StoreError::NotWritten {
                reason: error.to_string(),
                disk_full: error.is_disk_full(),
            });
            let _ = done.send(outcome);
            // The caller reports the failure; the writer only needs to undo the piece.
            failure.map_or(Ok(()), Err)
        };
        let after = move |outcome| {
            let _ = ended.send(outcome);
        };
        let orders = self.orders.as_ref().ok_or(StoreError::Closed)?;
        self.shared.queued.fetch_add(1, Ordering::Relaxed);
        let piece = Piece {
            work: Box::new(work),
            after: Some(Box::new(after)),
        };
        orders.send(order(piece)).map_err(|_| StoreError::Closed)?;
        let failed = committed.recv().map_err(|_| StoreError::Closed)?;
        match (failed, answer.recv()) {
            (None, answer) => answer.map_err(|_| StoreError::Closed)?,
            (Some(_), Ok(Err(own))) => Err(own),
            (Some(NotWritten { reason, disk_full }), _) => {
                Err(StoreError::NotWritten { reason, disk_full })
            }
        }
    }
}

fn run(desk: &Desk, inbox: &Receiver<Order>, shared: &Shared) {
    loop {
        let first = if shared.failing.load(Ordering::Relaxed) {
            match inbox.recv_timeout(PROBE) {
                Ok(order) => order,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    match probe(desk) {
                        Ok(()) => {
                            tracing::info!("the pool can write again");
                            shared.works();
                        }
                        Err(error) => shared.fails(&error),
                    }
                    continue;
                }
            }
        } else {
            match inbox.recv() {
                Ok(order) => order,
                Err(_) => return,
            }
        };
        let mut next = Some(first);
        let mut batch = Vec::new();
        let mut alone = None;
        while let Some(order) = next.take() {
            match order {
                Order::Batched(piece) => {
                    batch.push(piece);
                    if batch.len() < BATCH {
                        next = inbox.try_recv().ok();
                    }
                }
                Order::Alone(piece) => alone = Some(piece),
            }
        }
        let count = batch.len() + usize::from(alone.is_some());
        let mut ended: Vec<(After, Option<NotWritten>)> = Vec::new();
        if !batch.is_empty() {
            let (works, afters): (Vec<Work>, Vec<Option<After>>) =
                batch.into_iter().map(|p| (p.work, p.after)).unzip();
            let posted = afters.iter().filter(|after| after.is_none()).count() as u64;
            let outcome = transaction(desk, works, &afters, shared);
            let failed = outcome.as_ref().err().map(|error| NotWritten {
                reason: error.to_string(),
                disk_full: error.is_disk_full(),
            });
            match outcome {
                Ok(true) => shared.works(),
                // A piece failed and the rest is on disk; that failure was noted.
                Ok(false) => {}
                Err(error) => {
                    desk.recent.borrow_mut().clear();
                    shared.lost.fetch_add(posted, Ordering::Relaxed);
                    shared.fails(&error);
                }
            }
            ended.extend(
                afters
                    .into_iter()
                    .flatten()
                    .map(|after| (after, failed.clone())),
            );
        }
        if let Some(piece) = alone {
            desk.recent.borrow_mut().clear();
            // Its caller reports a failure.
            let _ = (piece.work)(desk);
            ended.extend(piece.after.map(|after| (after, None)));
        }
        shared.queued.fetch_sub(count, Ordering::Relaxed);
        for (after, outcome) in ended {
            after(outcome);
        }
    }
}

/// Writes something and takes it back.
fn probe(desk: &Desk) -> Result<()> {
    desk.execute(
        "INSERT OR REPLACE INTO setting (key, value) VALUES ('probe', hex(zeroblob(?1)))",
        [PROBE_BYTES / 2],
    )?;
    desk.execute("DELETE FROM setting WHERE key = 'probe'", [])?;
    Ok(())
}

/// Runs a batch in one transaction; each piece in a savepoint, so that one failure does
/// not undo the others. A failure of a piece that somebody waits for is theirs to report.
/// True when every posted piece succeeded; an error when nothing is on disk.
fn transaction(
    desk: &Desk,
    batch: Vec<Work>,
    afters: &[Option<After>],
    shared: &Shared,
) -> Result<bool> {
    desk.execute_batch("BEGIN IMMEDIATE")?;
    let mut whole = true;
    for (work, after) in batch.into_iter().zip(afters) {
        let undo = |e: StoreError| {
            let _ = desk.execute_batch("ROLLBACK");
            e
        };
        desk.execute_batch("SAVEPOINT piece")
            .map_err(|e| undo(e.into()))?;
        match work(desk) {
            Ok(()) => desk
                .execute_batch("RELEASE piece")
                .map_err(|e| undo(e.into()))?,
            Err(error) => {
                desk.recent.borrow_mut().clear();
                // A full disk may have ended the whole transaction already; the reason
                // that counts is the first one.
                if desk
                    .execute_batch("ROLLBACK TO piece; RELEASE piece")
                    .is_err()
                {
                    return Err(undo(error));
                }
                if error.is_disk_full() {
                    return Err(undo(error));
                }
                if after.is_none() {
                    whole = false;
                    shared.lost.fetch_add(1, Ordering::Relaxed);
                    shared.fails(&error);
                }
            }
        }
    }
    if let Err(error) = desk.execute_batch("COMMIT") {
        let _ = desk.execute_batch("ROLLBACK");
        return Err(error.into());
    }
    Ok(whole)
}
