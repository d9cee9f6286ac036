//! The one writer: a thread that owns the connection and batches work into transactions.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use rusqlite::Connection;

use crate::error::{Result, StoreError};

/// Pieces of work that may wait.
const QUEUE: usize = 1024;
/// Pieces of work in one transaction.
const BATCH: usize = 64;

type Work = Box<dyn FnOnce(&Connection) -> Result<()> + Send>;
/// Told, once the transaction has ended, whether it is on disk.
type After = Box<dyn FnOnce(bool) + Send>;

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
    /// The last failure, until a write succeeds again.
    pub stopped: Option<String>,
}

#[derive(Default)]
struct Shared {
    queued: AtomicUsize,
    failing: AtomicBool,
    reason: Mutex<Option<String>>,
}

pub(crate) struct Writer {
    orders: SyncSender<Order>,
    shared: Arc<Shared>,
}

impl Writer {
    pub(crate) fn start(connection: Connection) -> Result<Self> {
        let (orders, inbox) = sync_channel(QUEUE);
        let shared = Arc::new(Shared::default());
        let seen = shared.clone();
        std::thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || run(&connection, &inbox, &seen))
            .map_err(|source| StoreError::Io {
                path: "store-writer".into(),
                source,
            })?;
        Ok(Self { orders, shared })
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
        }
    }

    /// Queues work without waiting for it.
    pub(crate) fn post(
        &self,
        work: impl FnOnce(&Connection) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.shared.queued.fetch_add(1, Ordering::Relaxed);
        self.orders
            .try_send(Order::Batched(Piece {
                work: Box::new(work),
                after: None,
            }))
            .map_err(|e| {
                self.shared.queued.fetch_sub(1, Ordering::Relaxed);
                match e {
                    TrySendError::Full(_) => StoreError::Full,
                    TrySendError::Disconnected(_) => StoreError::Closed,
                }
            })
    }

    /// Queues work and waits until its transaction is on disk.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.wait(work, Order::Batched)
    }

    /// As [`Writer::run`], but outside any transaction.
    pub(crate) fn run_alone<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.wait(work, Order::Alone)
    }

    fn wait<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
        order: impl FnOnce(Piece) -> Order,
    ) -> Result<T> {
        let (done, answer) = sync_channel::<Result<T>>(1);
        let (ended, committed) = sync_channel::<bool>(1);
        let work = move |c: &Connection| {
            let outcome = work(c);
            let failed = outcome.is_err();
            let _ = done.send(outcome);
            // The caller reports the failure; the writer only needs to undo the piece.
            if failed {
                Err(StoreError::Invalid(String::new()))
            } else {
                Ok(())
            }
        };
        let after = move |ok| {
            let _ = ended.send(ok);
        };
        self.shared.queued.fetch_add(1, Ordering::Relaxed);
        let piece = Piece {
            work: Box::new(work),
            after: Some(Box::new(after)),
        };
        self.orders
            .send(order(piece))
            .map_err(|_| StoreError::Closed)?;
        let on_disk = committed.recv().map_err(|_| StoreError::Closed)?;
        let outcome = answer.recv().map_err(|_| StoreError::Closed)?;
        if on_disk || outcome.is_err() {
            return outcome;
        }
        Err(StoreError::Invalid(
            self.health()
                .stopped
                .unwrap_or_else(|| "the write failed".into()),
        ))
    }
}

fn run(connection: &Connection, inbox: &Receiver<Order>, shared: &Shared) {
    while let Ok(first) = inbox.recv() {
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
        let (works, afters): (Vec<Work>, Vec<Option<After>>) =
            batch.into_iter().map(|p| (p.work, p.after)).unzip();
        let outcome = if works.is_empty() {
            Ok(())
        } else {
            transaction(connection, works)
        };
        let on_disk = !matches!(outcome, Err(Failed::All(_)));
        let mut outcome = outcome.map_err(Failed::into_error);
        let mut ended: Vec<(After, bool)> = afters
            .into_iter()
            .flatten()
            .map(|after| (after, on_disk))
            .collect();
        if let Some(piece) = alone {
            let result = (piece.work)(connection);
            ended.extend(piece.after.map(|after| (after, true)));
            match result {
                Err(StoreError::Invalid(text)) if text.is_empty() => {}
                other => outcome = outcome.and(other),
            }
        }
        shared.queued.fetch_sub(count, Ordering::Relaxed);
        match outcome {
            Ok(()) => shared.failing.store(false, Ordering::Relaxed),
            Err(error) => {
                tracing::error!(%error, "the pool could not write");
                *shared.reason.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(error.to_string());
                shared.failing.store(true, Ordering::Relaxed);
            }
        }
        for (after, ok) in ended {
            after(ok);
        }
    }
}

/// How a batch failed.
enum Failed {
    /// Nothing of it is on disk.
    All(StoreError),
    /// One piece was undone, the rest is on disk.
    Piece(StoreError),
}

impl Failed {
    fn into_error(self) -> StoreError {
        match self {
            Self::All(error) | Self::Piece(error) => error,
        }
    }
}

/// Runs a batch in one transaction; each piece in a savepoint, so that one failure does
/// not undo the others. A failure of a piece that somebody waits for is theirs to report.
fn transaction(connection: &Connection, batch: Vec<Work>) -> std::result::Result<(), Failed> {
    let all = |e: rusqlite::Error| Failed::All(e.into());
    connection.execute_batch("BEGIN IMMEDIATE").map_err(all)?;
    let mut failure = None;
    for work in batch {
        let undo = |e: rusqlite::Error| {
            let _ = connection.execute_batch("ROLLBACK");
            Failed::All(e.into())
        };
        connection.execute_batch("SAVEPOINT piece").map_err(undo)?;
        match work(connection) {
            Ok(()) => connection.execute_batch("RELEASE piece").map_err(undo)?,
            Err(error) => {
                connection
                    .execute_batch("ROLLBACK TO piece; RELEASE piece")
                    .map_err(undo)?;
                match error {
                    StoreError::Invalid(text) if text.is_empty() => {}
                    other => failure = Some(other),
                }
            }
        }
    }
    if let Err(error) = connection.execute_batch("COMMIT") {
        let _ = connection.execute_batch("ROLLBACK");
        return Err(all(error));
    }
    failure.map_or(Ok(()), |e| Err(Failed::Piece(e)))
}
