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
mod jsonl;
mod lock;
pub mod query;
mod recent;
pub mod redact;
mod retention;
mod search;
mod table;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use include_dir::{Dir, include_dir};
use rusqlite::{Connection, OpenFlags};
use rusqlite_migration::{HookError, Migrations, MigrationsBuilder, SchemaVersion};
use spotter_core::AdapterVersion;
use spotter_core::id::{SessionUid, StepUid, TrajectoryUid};
use spotter_core::reward::Reward;
use spotter_core::step::{Channel, Step, StepKind, TrajectoryState};
use spotter_core::train::TrainStep;

pub use error::{Result, StoreError};
pub use jsonl::Imported;
pub use query::{
    AdapterRow, AdapterState, Batch, BatchRequest, Counts, Forgotten, LabelCounts, Page,
    RewardTarget, RunRow, Series, SessionSummary, StepDetail, StepFilter, StepSummary,
};
pub use redact::{Preview, Redactor};
pub use retention::{Maintained, Retention};
pub use writer::Health;

use writer::{Desk, Writer};

static MIGRATIONS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../migrations");
const FILE: &str = "spotter.db";
const READERS: usize = 3;
/// What `PRAGMA auto_vacuum` answers.
const INCREMENTAL: i64 = 2;
/// A truncated log waits this often for readers to let go, 20 ms each.
const CHECKPOINTS: usize = 250;
/// Deleted pages given back to the file system at once.
const VACUUM_PAGES: usize = 4096;

/// A handle on the pool; cloning shares it.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

struct Inner {
    path: PathBuf,
    writer: Writer,
    readers: Vec<Mutex<Connection>>,
    next_reader: std::sync::atomic::AtomicUsize,
    redactor: RwLock<Arc<Redactor>>,
    _lock: std::fs::File,
}

fn configure(connection: &Connection) -> Result<()> {
    connection.busy_timeout(Duration::from_secs(5))?;
    connection.pragma_update(None, "foreign_keys", true)?;
    // A rating that was acknowledged survives a power cut too.
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "secure_delete", true)?;
    connection.pragma_update(None, "cache_size", -32_768)?;
    connection.set_prepared_statement_cache_capacity(128);
    Ok(())
}

fn migrations() -> Result<Migrations<'static>> {
    let builder = MigrationsBuilder::from_directory(&MIGRATIONS)
        .map_err(|e| StoreError::Migration(e.to_string()))?;
    Ok(builder
        .edit(2, |m| {
            m.set_up_hook(|c: &rusqlite::Transaction<'_>| {
                table::step::backfill(c).map_err(|e| HookError::Hook(e.to_string()))
            })
        })
        .finalize())
}

/// The file's schema version, unless a newer Spotter wrote it. Changes nothing.
fn schema(connection: &Connection, path: &Path) -> Result<usize> {
    let found: i64 = connection.pragma_query_value(None, "user_version", |r| r.get(0))?;
    let (found, known) = (found.max(0) as usize, MIGRATIONS.dirs().count());
    if found > known {
        return Err(StoreError::Newer {
            path: path.to_owned(),
            found,
            known,
        });
    }
    Ok(found)
}

fn migrate(connection: &mut Connection, path: &Path, found: usize) -> Result<()> {
    let migrations = migrations()?;
    let known = MIGRATIONS.dirs().count();
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
        let found = schema(&connection, &path)?;
        // Counts for a file that has no table yet; an older file is rewritten once, below.
        connection.pragma_update(None, "auto_vacuum", "INCREMENTAL")?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        migrate(&mut connection, &path, found)?;
        let vacuum: i64 = connection.pragma_query_value(None, "auto_vacuum", |r| r.get(0))?;
        if vacuum != INCREMENTAL {
            connection.execute_batch("PRAGMA auto_vacuum = INCREMENTAL; VACUUM;")?;
        }
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
            redactor: RwLock::default(),
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
        work: impl FnOnce(&Desk) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.0.writer.run(work)
    }

    fn redactor(&self) -> Arc<Redactor> {
        self.0
            .redactor
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// From now on, what these patterns match is replaced before anything is stored.
    pub fn set_redaction(&self, redactor: Redactor) {
        *self
            .0
            .redactor
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Arc::new(redactor);
    }

    /// What these patterns would change in the newest steps.
    ///
    /// # Errors
    /// When the database fails.
    pub fn preview_redaction(&self, redactor: &Redactor, most: usize) -> Result<Vec<Preview>> {
        self.read(|c| table::step::preview(c, redactor, most))
    }

    /// Hands a step to the writer and returns. It is on disk within 50 ms.
    ///
    /// # Errors
    /// `Full` when the queue is full, `Closed` when the writer has stopped.
    pub fn append_step(&self, mut step: Step) -> Result<()> {
        let redactor = self.redactor();
        self.0.writer.post(move |desk| {
            redactor.step(&mut step);
            table::step::insert(desk, &step).map(|_| ())
        })
    }

    /// As [`Store::append_step`], but waits until the step is on disk.
    ///
    /// # Errors
    /// When the step cannot be stored.
    pub fn append_step_durably(&self, mut step: Step) -> Result<()> {
        let redactor = self.redactor();
        self.write(move |desk| {
            redactor.step(&mut step);
            table::step::insert(desk, &step).map(|_| ())
        })
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
    pub fn add_reward(&self, target: RewardTarget, mut reward: Reward) -> Result<()> {
        self.redactor().reward(&mut reward);
        self.write(move |c| table::reward::add(c, &target, &reward))
    }

    /// Overrides whether a step may be trained.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn set_kind(&self, uid: StepUid, kind: StepKind) -> Result<()> {
        self.write(move |c| table::step::set_kind(c, &uid, kind))
    }

    /// Forgets a step, its rewards and its text, from the file, its log and its backups.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn forget_step(&self, uid: StepUid) -> Result<Forgotten> {
        let forgotten = self.write(move |c| {
            let touched = table::step::forget(c, &[uid.to_string()])?;
            forgotten(c, 1, touched)
        })?;
        self.erase()?;
        Ok(forgotten)
    }

    /// Forgets a conversation, from the file, its log and its backups.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn forget_session(&self, uid: SessionUid) -> Result<Forgotten> {
        let forgotten = self.write(move |c| {
            let (steps, touched) = table::session::forget(c, &uid)?;
            forgotten(c, steps, touched)
        })?;
        self.erase()?;
        Ok(forgotten)
    }

    /// Forgets every step, then rewrites the file so that no page keeps old text, empties
    /// its log and deletes the backups.
    ///
    /// # Errors
    /// When the database fails.
    pub fn forget_everything(&self) -> Result<Forgotten> {
        let forgotten = self.0.writer.run_alone(move |c| {
            let steps = table::step::counts(c)?.steps;
            let touched = table::adapter::that_learned(c)?;
            table::step::forget_all(c)?;
            c.execute_batch("VACUUM")?;
            forgotten(c, steps, touched)
        })?;
        self.erase()?;
        Ok(forgotten)
    }

    /// Deleted text was overwritten in the file's own pages; this empties the log, gives
    /// free pages back and deletes the backups, which hold the text too.
    fn erase(&self) -> Result<()> {
        let backups = self.0.path.with_file_name("backups");
        self.0.writer.run_alone(move |c| {
            c.execute_batch("PRAGMA incremental_vacuum")?;
            let mut busy = true;
            for _ in 0..CHECKPOINTS {
                busy = c.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |r| r.get(0))?;
                if !busy {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            if busy {
                return Err(StoreError::Invalid(
                    "it is deleted, but somebody reads the file, so its log still holds the text; stop Spotter to empty it".into(),
                ));
            }
            if backups.exists() {
                std::fs::remove_dir_all(&backups).map_err(|source| StoreError::Io {
                    path: backups.clone(),
                    source,
                })?;
            }
            Ok(())
        })
    }

    /// Makes what these adapters learned from, as far as it is still there, fresh again, so
    /// that the next lesson learns from it. Returns how many steps.
    ///
    /// # Errors
    /// When the database fails.
    pub fn requeue(&self, adapters: Vec<AdapterVersion>) -> Result<u64> {
        self.write(move |c| table::step::requeue(c, &adapters))
    }

    /// Keeps the pool within its limits, and abandons announced attempts that were silent
    /// for `deadline`. Meant to be called every minute or so.
    ///
    /// # Errors
    /// When the database fails.
    pub fn maintain(&self, limits: Retention, deadline: Duration) -> Result<Maintained> {
        let at = now();
        let before = at - i64::try_from(deadline.as_millis()).unwrap_or(at);
        let mut done = Maintained {
            abandoned: self.write(move |c| table::trajectory::abandon(c, before, at))?,
            ..Default::default()
        };
        loop {
            let (removed, over) = self.write(move |c| retention::round(c, &limits, at))?;
            done.removed += removed;
            done.over_limit = over;
            if removed == 0 {
                break;
            }
        }
        if done.removed > 0 {
            self.0.writer.run_alone(|c| {
                c.execute_batch(&format!(
                    "PRAGMA incremental_vacuum({VACUUM_PAGES}); PRAGMA wal_checkpoint(TRUNCATE);"
                ))?;
                Ok(())
            })?;
        }
        Ok(done)
    }

    /// Bytes of the file that are in use.
    ///
    /// # Errors
    /// When the database fails.
    pub fn used_bytes(&self) -> Result<u64> {
        self.read(retention::used_bytes)
    }

    /// Why something was not kept or not learned from, and how often.
    ///
    /// # Errors
    /// When the database fails.
    pub fn drop_counts(&self) -> Result<Vec<(String, u64)>> {
        self.read(table::drop_count::list)
    }

    /// Limits the file to a number of pages, as a full disk would; `None` lifts the limit.
    ///
    /// # Errors
    /// When the database fails.
    pub fn limit_pages(&self, pages: Option<u32>) -> Result<()> {
        self.0.writer.run_alone(move |c| {
            c.execute_batch(&format!(
                "PRAGMA max_page_count = {}",
                pages.map_or(i64::from(u32::MAX) - 1, i64::from)
            ))?;
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

    /// One step as a list shows it.
    ///
    /// # Errors
    /// `NotFound` when it is unknown.
    pub fn summary(&self, uid: &StepUid) -> Result<StepSummary> {
        self.read(|c| Ok(table::step::summary_of(c, uid)?.1))
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
        let wanted = BatchRequest {
            run,
            most,
            oldest_adapter: None,
        };
        Ok(self.claim(wanted)?.steps)
    }

    /// Claims fresh rated main steps of the training channel (oldest first), with the
    /// earlier steps of their turns at half credit. Attempts at one prompt come together,
    /// once all of them have ended.
    ///
    /// # Errors
    /// When the database fails.
    pub fn claim(&self, wanted: BatchRequest) -> Result<Batch> {
        self.write(move |c| table::step::claim(c, &wanted))
    }

    /// Rated steps of the validation channel, newest first.
    ///
    /// # Errors
    /// When the database fails.
    pub fn held_out(&self, most: usize) -> Result<Vec<TrainStep>> {
        self.read(|c| table::step::held_out(c, most))
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
        self.write(move |c| table::step::consume(c, run, &used, &dropped, now()))
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
    pub fn metrics(&self, run: i64, points: usize) -> Result<Vec<Series>> {
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
        // Page by page, so that neither memory nor an old snapshot grows with the pool.
        let mut after = 0;
        while let Some((lines, last)) = self.read(|c| jsonl::page(c, after))? {
            lines.iter().try_for_each(|line| each(line))?;
            after = last;
        }
        Ok(())
    }

    /// Takes exported lines. A line that cannot be taken is reported with its number (from
    /// 1), and the others are taken all the same.
    ///
    /// # Errors
    /// When the database fails; what was taken before stays.
    pub fn import(&self, lines: impl IntoIterator<Item = String>) -> Result<Imported> {
        let mut all = Imported::default();
        let mut lines = (1..).zip(lines).filter(|(_, l)| !l.trim().is_empty());
        loop {
            let chunk: Vec<(u64, String)> = lines.by_ref().take(jsonl::CHUNK).collect();
            if chunk.is_empty() {
                return Ok(all);
            }
            let redactor = self.redactor();
            let taken = self.write(move |desk| jsonl::import(desk, &chunk, &redactor, now()))?;
            all.imported += taken.imported;
            all.known += taken.known;
            all.errors.extend(taken.errors);
        }
    }
}

fn forgotten(c: &Connection, steps: u64, adapters: Vec<AdapterVersion>) -> Result<Forgotten> {
    let clean = match adapters.is_empty() {
        true => None,
        false => Some(table::adapter::clean_ancestor(c, &adapters)?),
    };
    Ok(Forgotten {
        steps,
        adapters,
        clean,
    })
}
