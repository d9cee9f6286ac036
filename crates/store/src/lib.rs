//! The data pool: every interaction, reward and adapter in one SQLite file.
//!
//! One writer thread, fed by a bounded queue, batches writes into transactions; readers
//! never block it. The API is synchronous; asynchronous callers use a blocking thread.
//!
//! # Layout
//! - [`Store`]: opening, the writer, readers.
//! - `table/`: one file per table: SQL, rows, reads and writes.
//! - [`query`]: what callers ask for, and what they get.
//!
//! Knows no tensors and no HTTP. Only the daemon opens the file.

mod blob;
mod error;
mod lock;
pub mod query;
mod table;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use include_dir::{Dir, include_dir};
use rusqlite::{Connection, OpenFlags};
use rusqlite_migration::{Migrations, SchemaVersion};
use spotter_core::AdapterVersion;
use spotter_core::id::{SessionUid, StepUid, TrajectoryUid};
use spotter_core::reward::Reward;
use spotter_core::step::{Channel, Step, StepKind, TrajectoryState};
use spotter_core::train::TrainStep;

pub use error::{Result, StoreError};
pub use query::{
    AdapterRow, AdapterState, Counts, LabelCounts, Page, RewardTarget, RunRow, SessionSummary,
    StepDetail, StepFilter, StepSummary,
};
pub use writer::Health;

use writer::Writer;

static MIGRATIONS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../migrations");
const FILE: &str = "spotter.db";
const READERS: usize = 3;

/// A handle on the pool; cloning shares it.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

struct Inner {
    path: PathBuf,
    writer: Writer,
    readers: Vec<Mutex<Connection>>,
    next_reader: std::sync::atomic::AtomicUsize,
    _lock: std::fs::File,
}

fn configure(connection: &Connection) -> Result<()> {
    connection.busy_timeout(Duration::from_secs(5))?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    connection.pragma_update(None, "secure_delete", true)?;
    connection.pragma_update(None, "cache_size", -32_768)?;
    Ok(())
}

fn migrate(connection: &mut Connection, path: &Path) -> Result<()> {
    let migrations = Migrations::from_directory(&MIGRATIONS)
        .map_err(|e| StoreError::Migration(e.to_string()))?;
    let known = MIGRATIONS.dirs().count();
    let version = |c: &Connection| -> Result<usize> {
        Ok(
            c.query_row("PRAGMA user_version", [], |r| r.get::<_, i64>(0))?
                .max(0) as usize,
        )
    };
    let found = version(connection)?;
    if found > known {
        return Err(StoreError::Newer {
            path: path.to_owned(),
            found,
            known,
        });
    }
    match migrations.current_version(connection) {
        Ok(SchemaVersion::Inside(_)) if found < known => {
            let backups = path.with_file_name("backups");
            std::fs::create_dir_all(&backups).map_err(|source| StoreError::Io {
                path: backups.clone(),
                source,
            })?;
            let copy = backups.join(format!("schema-{found}-{}.db", now()));
            connection.execute("VACUUM INTO ?1", [copy.to_string_lossy()])?;
        }
        _ => {}
    }
    migrations
        .to_latest(connection)
        .map_err(|e| StoreError::Migration(e.to_string()))
}

/// Milliseconds since the Unix epoch.
pub fn now() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX))
}

impl Store {
    /// Opens or creates the pool in this directory, migrating it when needed. Steps that
    /// a run had claimed when the last process died are free again.
    ///
    /// # Errors
    /// When the file is newer than this binary, damaged, or cannot be written.
    pub fn open(data_dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(data_dir).map_err(|source| StoreError::Io {
            path: data_dir.to_owned(),
            source,
        })?;
        let lock = lock::lock(data_dir)?;
        let path = data_dir.join(FILE);
        let mut connection = Connection::open(&path)?;
        configure(&connection)?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        migrate(&mut connection, &path)?;
        table::step::release_orphans(&connection)?;
        table::run::fail_orphans(&connection, now())?;
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let readers = (0..READERS)
            .map(|_| {
                let reader = Connection::open_with_flags(&path, flags)?;
                reader.busy_timeout(Duration::from_secs(5))?;
                Ok(Mutex::new(reader))
            })
            .collect::<Result<Vec<_>>>()?;
        let writer = Writer::start(connection)?;
        Ok(Self(Arc::new(Inner {
            path,
            writer,
            readers,
            next_reader: Default::default(),
            _lock: lock,
        })))
    }

    /// The database file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Whether recording works, and how full the queue is.
    pub fn health(&self) -> Health {
        self.0.writer.health()
    }

    fn read<T>(&self, work: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
        let next = self
            .0
            .next_reader
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let reader = self.0.readers[next % READERS]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        work(&reader)
    }

    fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.0.writer.run(work)
    }

    /// Hands a step to the writer and returns. It is on disk within 50 ms.
    ///
    /// # Errors
    /// `Full` when the queue is full, `Closed` when the writer has stopped.
    pub fn append_step(&self, step: Step) -> Result<()> {
        self.0.writer.post(move |c| table::step::insert(c, &step))
    }

    /// As [`Store::append_step`], but waits until the step is on disk.
    ///
    /// # Errors
    /// When the step cannot be stored.
    pub fn append_step_durably(&self, step: Step) -> Result<()> {
        self.write(move |c| table::step::insert(c, &step))
    }

    /// Opens a trajectory before its first step, as the Claw-R1 handshake does.
    ///
    /// # Errors
    /// When the database fails.
    pub fn open_trajectory(
        &self,
        uid: TrajectoryUid,
        prompt_uid: String,
        session: SessionUid,
        channel: Channel,
        metadata: Option<serde_json::Value>,
    ) -> Result<()> {
        self.write(move |c| {
            table::trajectory::open(
                c,
                &uid,
                &prompt_uid,
                &session,
                channel,
                metadata.as_ref(),
                now(),
            )
        })
    }

    /// Marks a trajectory's end.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn end_trajectory(&self, uid: TrajectoryUid, state: TrajectoryState) -> Result<()> {
        self.write(move |c| table::trajectory::end(c, &uid, state, now()))
    }

    /// Adds a reward row and brings the step's effective reward up to date.
    ///
    /// # Errors
    /// `NotFound` when the target is unknown, `Invalid` when the value is outside [-1, 1].
    pub fn add_reward(&self, target: RewardTarget, reward: Reward) -> Result<()> {
        self.write(move |c| table::reward::add(c, &target, &reward))
    }

    /// Overrides whether a step may be trained.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn set_kind(&self, uid: StepUid, kind: StepKind) -> Result<()> {
        self.write(move |c| table::step::set_kind(c, &uid, kind))
    }

    /// Forgets a step, its rewards and its text. Returns the adapters that learned from it.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn forget_step(&self, uid: StepUid) -> Result<Vec<AdapterVersion>> {
        self.write(move |c| table::step::forget(c, &[uid.to_string()]))
    }

    /// Forgets a conversation. Returns the adapters that learned from it.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn forget_session(&self, uid: SessionUid) -> Result<Vec<AdapterVersion>> {
        self.write(move |c| table::session::forget(c, &uid))
    }

    /// Forgets every step, then rewrites the file so that no page keeps old text, and
    /// deletes the backups.
    ///
    /// # Errors
    /// When the database fails.
    pub fn forget_everything(&self) -> Result<()> {
        let backups = self.0.path.with_file_name("backups");
        self.0.writer.run_alone(move |c| {
            table::step::forget_all(c)?;
            c.execute_batch("VACUUM; PRAGMA wal_checkpoint(TRUNCATE);")?;
            if backups.exists() {
                std::fs::remove_dir_all(&backups).map_err(|source| StoreError::Io {
                    path: backups.clone(),
                    source,
                })?;
            }
            Ok(())
        })
    }

    /// A page of steps, newest first.
    ///
    /// # Errors
    /// When the database fails.
    pub fn steps(&self, filter: &StepFilter) -> Result<Page<StepSummary>> {
        self.read(|c| table::step::page(c, filter))
    }

    /// One step, complete.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn step(&self, uid: &StepUid) -> Result<StepDetail> {
        self.read(|c| table::step::detail(c, uid))
    }

    /// The newest step of a turn (a trace id), main steps first.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub fn step_of_turn(&self, turn: &str) -> Result<StepUid> {
        self.read(|c| table::step::newest(c, "turn", turn))
    }

    /// The newest step of a session, main steps first.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub fn step_of_session(&self, session: &str) -> Result<StepUid> {
        self.read(|c| table::step::newest(c, "session", session))
    }

    /// The sampled ids of an answer with exactly this text in this session.
    ///
    /// # Errors
    /// When the database fails.
    pub fn answer_ids(&self, session: &str, answer: &str) -> Result<Option<Vec<u32>>> {
        self.read(|c| table::step::answer_ids(c, session, answer))
    }

    /// How many steps a trajectory has.
    ///
    /// # Errors
    /// When the database fails.
    pub fn trajectory_len(&self, uid: &TrajectoryUid) -> Result<u32> {
        self.read(|c| table::trajectory::len(c, uid))
    }

    /// A page of conversations, newest first.
    ///
    /// # Errors
    /// When the database fails.
    pub fn sessions(
        &self,
        q: Option<&str>,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<Page<SessionSummary>> {
        self.read(|c| table::session::page(c, q, cursor, limit))
    }

    /// One conversation's summary.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn session(&self, uid: &str) -> Result<SessionSummary> {
        self.read(|c| table::session::get(c, uid))
    }

    /// Totals for the status page.
    ///
    /// # Errors
    /// When the database fails.
    pub fn counts(&self) -> Result<Counts> {
        self.read(table::step::counts)
    }

    /// Rated, unconsumed steps, as the schedule counts them.
    ///
    /// # Errors
    /// When the database fails.
    pub fn fresh_labels(&self) -> Result<LabelCounts> {
        self.read(table::step::fresh_labels)
    }

    /// Claims up to `most` fresh rated main steps (oldest first) for a run, with the
    /// earlier steps of their turns at half credit.
    ///
    /// # Errors
    /// When the database fails.
    pub fn claim_batch(&self, run: i64, most: usize) -> Result<Vec<TrainStep>> {
        self.write(move |c| table::step::claim(c, run, most))
    }

    /// Gives a run's claimed steps back.
    ///
    /// # Errors
    /// When the database fails.
    pub fn release_batch(&self, run: i64) -> Result<()> {
        self.write(move |c| table::step::release(c, run))
    }

    /// Records what a run did with its steps.
    ///
    /// # Errors
    /// When the database fails.
    pub fn consume_batch(
        &self,
        run: i64,
        used: Vec<StepUid>,
        dropped: Vec<(StepUid, String)>,
    ) -> Result<()> {
        self.write(move |c| table::step::consume(c, run, &used, &dropped))
    }

    /// Rated steps that earlier runs used, newest first.
    ///
    /// # Errors
    /// When the database fails.
    pub fn replay(&self, most: usize) -> Result<Vec<TrainStep>> {
        self.read(|c| table::step::replay(c, most))
    }

    /// Creates a run and returns its number.
    ///
    /// # Errors
    /// When the database fails.
    pub fn insert_run(
        &self,
        state: &str,
        parent: AdapterVersion,
        detail: serde_json::Value,
    ) -> Result<i64> {
        let state = state.to_owned();
        self.write(move |c| table::run::insert(c, &state, parent, &detail, now()))
    }

    /// Replaces a run's state and detail.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn update_run(&self, row: RunRow) -> Result<()> {
        self.write(move |c| table::run::update(c, &row))
    }

    /// One run.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn run(&self, id: i64) -> Result<RunRow> {
        self.read(|c| table::run::get(c, id))
    }

    /// Runs, newest first.
    ///
    /// # Errors
    /// When the database fails.
    pub fn runs(&self, most: usize) -> Result<Vec<RunRow>> {
        self.read(|c| table::run::list(c, most))
    }

    /// Appends metrics of one optimiser step.
    ///
    /// # Errors
    /// `Full` when the queue is full.
    pub fn append_metrics(&self, run: i64, step: u32, metrics: Vec<(String, f64)>) -> Result<()> {
        self.0
            .writer
            .post(move |c| table::run_metric::append(c, run, step, &metrics))
    }

    /// A run's metrics, at most `points` per series, extremes kept.
    ///
    /// # Errors
    /// When the database fails.
    pub fn metrics(&self, run: i64, points: usize) -> Result<Vec<(String, Vec<(u32, f64)>)>> {
        self.read(|c| table::run_metric::series(c, run, points))
    }

    /// Stores an adapter row, replacing an earlier one of the same version.
    ///
    /// # Errors
    /// When the database fails.
    pub fn put_adapter(&self, row: AdapterRow) -> Result<()> {
        self.write(move |c| table::adapter::put(c, &row))
    }

    /// Adapters by version.
    ///
    /// # Errors
    /// When the database fails.
    pub fn adapters(&self) -> Result<Vec<AdapterRow>> {
        self.read(table::adapter::list)
    }

    /// Makes one version live; the one that was live is kept.
    ///
    /// # Errors
    /// `NotFound` when the version is unknown.
    pub fn set_live(&self, version: AdapterVersion) -> Result<()> {
        self.write(move |c| table::adapter::set_live(c, version))
    }

    /// Likes and dislikes of answers of each version.
    ///
    /// # Errors
    /// When the database fails.
    pub fn approval(&self) -> Result<Vec<(AdapterVersion, u64, u64)>> {
        self.read(table::adapter::approval)
    }

    /// A setting stored by the person.
    ///
    /// # Errors
    /// When the database fails.
    pub fn setting(&self, key: &str) -> Result<Option<String>> {
        self.read(|c| table::setting::get(c, key))
    }

    /// Stores or, with `None`, removes a setting.
    ///
    /// # Errors
    /// When the database fails.
    pub fn set_setting(&self, key: &str, value: Option<String>) -> Result<()> {
        let key = key.to_owned();
        self.write(move |c| table::setting::set(c, &key, value.as_deref()))
    }

    /// Every step as one JSON object, oldest first, handed to `each` line by line.
    ///
    /// # Errors
    /// When the database or `each` fails.
    pub fn export(&self, mut each: impl FnMut(&str) -> Result<()>) -> Result<()> {
        self.read(|c| table::step::export(c, &mut each))
    }
}
