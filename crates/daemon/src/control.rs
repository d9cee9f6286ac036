//! The control API over the parts of the daemon.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use serde_json::{Map, Value, json};
use spotter_core::AdapterVersion;
use spotter_core::code::{Code, Failure};
use spotter_core::train::AdapterFiles;
use spotter_core::worker::{WorkerSettings, partial_directory};
use spotter_gateway::control::Control;
use spotter_gateway::control::dto::{
    Adapter, AdapterList, AdapterStatus, Approval, Check, ConnectGuide, ConnectStatus, Counts,
    DiskStatus, DownloadProgress, ExportEstimate, ExportRequest, Exported, ImportAdapter, Model,
    ModelList, ModelStatus, PolicyStatus, PruneResult, Run, RunStarted, Series, Setting, Status,
    TrainingStatus, WorkerStatus,
};
use spotter_gateway::control::events::{EventBody, EventHub};
use spotter_gateway::engine::Engine as _;
use spotter_store::{AdapterRow, AdapterState, Store, now};
use tokio_util::sync::CancellationToken;

use crate::catalog::{self, Catalog};
use crate::data_dir::DataDir;
use crate::download;
use crate::hardware;
use crate::learning::{Learning, RunSettings, blocking, directory_bytes, stored_run};
use crate::schedule::{Decision, Floor, Now, Policy, decide, is_open};
use crate::secrets::TokenPlace;
use crate::serving::Serving;
use crate::settings::{self, RawSettings, Schedule, Settings};

/// Runs that the list shows.
const RUNS: usize = 200;
/// Versions that pruning keeps besides the live and pinned ones.
const KEPT_VERSIONS: usize = 3;

/// A download that is under way or has failed.
struct Download {
    state: &'static str,
    progress: DownloadProgress,
    error: Option<String>,
    cancel: CancellationToken,
}

type Downloads = Arc<Mutex<HashMap<String, Download>>>;

/// Everything the daemon knows and decides.
pub struct Daemon {
    pub(crate) store: Store,
    pub(crate) serving: Serving,
    pub(crate) learning: Learning,
    pub(crate) events: EventHub,
    pub(crate) settings: ArcSwap<Settings>,
    pub(crate) raw: RawSettings,
    pub(crate) data_dir: DataDir,
    pub(crate) url: String,
    pub(crate) token: Option<String>,
    pub(crate) token_place: Option<TokenPlace>,
    pub(crate) started: Instant,
    pub(crate) recording: AtomicBool,
    pub(crate) first_request: AtomicI64,
    pub(crate) last_request: AtomicI64,
    /// The model that answers: its name and its file.
    model: Mutex<(String, PathBuf)>,
    downloads: Downloads,
    exports: Exports,
}

/// Exports under way, with what calls them off.
type Exports = Arc<Mutex<Vec<(AdapterVersion, CancellationToken)>>>;

/// Takes an export off the list when it has ended, however it did.
struct Ended(Exports, CancellationToken);

impl Drop for Ended {
    fn drop(&mut self) {
        // Equal only to itself: a token that is cancelled here marks its own entry.
        self.1.cancel();
        lock(&self.0).retain(|(_, token)| !token.is_cancelled());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Zero in the settings means "choose".
fn chosen<T: PartialEq + Default>(value: T) -> Option<T> {
    (value != T::default()).then_some(value)
}

/// The settings of a worker for this model.
pub(crate) fn worker_settings(settings: &Settings, model: PathBuf, train: bool) -> WorkerSettings {
    let threads = if train {
        settings.threads_train
    } else {
        settings.threads_serve
    };
    WorkerSettings {
        model,
        threads: chosen(threads as usize),
        context_length: chosen(settings.context_length),
        cache_bytes: chosen(u64::from(settings.cache_mb)).map(|mb| mb << 20),
        max_batch: settings.max_batch,
        max_queue: settings.max_queue,
        device: settings.device.clone(),
    }
}

impl Daemon {
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        store: Store,
        serving: Serving,
        events: EventHub,
        settings: Settings,
        raw: RawSettings,
        data_dir: DataDir,
        url: String,
        token: Option<(String, TokenPlace)>,
        model: (String, PathBuf),
    ) -> Self {
        let learning = Learning::new(
            store.clone(),
            serving.clone(),
            data_dir.clone(),
            events.clone(),
        );
        let (token, token_place) = token.unzip();
        Self {
            recording: AtomicBool::new(settings.recording),
            settings: ArcSwap::from_pointee(settings),
            store,
            serving,
            learning,
            events,
            raw,
            data_dir,
            url,
            token,
            token_place,
            started: Instant::now(),
            first_request: AtomicI64::new(0),
            last_request: AtomicI64::new(now()),
            model: Mutex::new(model),
            downloads: Downloads::default(),
            exports: Exports::default(),
        }
    }

    fn model_name(&self) -> String {
        lock(&self.model).0.clone()
    }

    fn run_settings(&self) -> RunSettings {
        let settings = self.settings.load();
        let (base_model, path) = lock(&self.model).clone();
        RunSettings {
            worker: worker_settings(&settings, path, true),
            dial: settings.dial,
            // Checked when the setting was made.
            overrides: settings::overrides(&settings.training_overrides).unwrap_or_default(),
            least_labels: u64::from(settings.label_minimum),
            base_model,
        }
    }

    fn policy(&self) -> Policy {
        let s = self.settings.load();
        match s.schedule {
            Schedule::Always => Policy::Always,
            Schedule::Idle => Policy::Idle {
                minutes: u64::from(s.idle_minutes),
            },
            Schedule::Schedule => Policy::Hours {
                from: s.schedule_from.clone(),
                until: s.schedule_until.clone(),
                open: is_open(&s.schedule_from, &s.schedule_until, local_minute()),
            },
            Schedule::Manual => Policy::Manual,
        }
    }

    async fn decision(&self) -> Result<(Decision, spotter_store::LabelCounts), Failure> {
        let store = self.store.clone();
        let labels = blocking(move || store.fresh_labels()).await?;
        let s = self.settings.load();
        let floor = Floor {
            automatic: u64::from(s.label_floor),
            least: u64::from(s.label_minimum),
        };
        let idle = (now() - self.last_request.load(Ordering::Relaxed)).max(0) as u64 / 1000;
        let state = Now {
            labels,
            idle_seconds: idle,
            paused: self.learning.is_paused(),
            ready: self.serving.ready(),
        };
        Ok((decide(&self.policy(), floor, state), labels))
    }

    /// One look at the schedule: starts a run when it is time, watches approval.
    pub(crate) async fn tick(&self) {
        if let Err(error) = self.learning.watch_approval().await {
            tracing::warn!(%error, "the approval rate could not be read");
        }
        if self.learning.current().is_none()
            && let Ok((Decision::Start, _)) = self.decision().await
            && let Err(error) = self.learning.start(self.run_settings()).await
        {
            tracing::warn!(%error, "a lesson could not be started");
        }
        if let Ok(status) = self.status().await {
            self.events.publish(EventBody::Status(Box::new(status)));
        }
    }

    async fn adapter_rows(
        &self,
    ) -> Result<(Vec<AdapterRow>, HashMap<AdapterVersion, Approval>), Failure> {
        let store = self.store.clone();
        blocking(move || {
            let approval = store
                .approval()?
                .into_iter()
                .map(|(v, up, down)| (v, Approval { up, down }))
                .collect();
            Ok((store.adapters()?, approval))
        })
        .await
    }

    async fn row(&self, version: AdapterVersion) -> Result<AdapterRow, Failure> {
        let (rows, _) = self.adapter_rows().await?;
        let list: Vec<String> = rows.iter().map(|r| r.version.to_string()).collect();
        rows.into_iter()
            .find(|r| r.version == version)
            .ok_or_else(|| {
                let known = if list.is_empty() {
                    "none yet".to_owned()
                } else {
                    list.join(", ")
                };
                Failure::new(
                    Code::NotFound,
                    format!("there is no adapter {version}; these exist: {known}"),
                )
            })
    }
}

/// Names of the export forms; the worker writes them.
const FORMATS: [&str; 5] = [
    "peft",
    "gguf-lora",
    "merged-safetensors",
    "merged-gguf",
    "ollama",
];
/// What configuration, tokeniser and model card take at most, beside the weights.
const COMPANIONS: u64 = 1 << 20;

impl Daemon {
    /// An adapter that can be exported now.
    async fn exportable(
        &self,
        version: AdapterVersion,
        format: &str,
    ) -> Result<AdapterRow, Failure> {
        if !FORMATS.contains(&format) {
            return Err(Failure::new(
                Code::InvalidRequest,
                format!(
                    "'{format}' is not an export format; these are: {}",
                    FORMATS.join(", ")
                ),
            ));
        }
        let row = self.row(version).await?;
        let name = self.model_name();
        if row.base_model != name {
            return Err(Failure::new(
                Code::Conflict,
                format!(
                    "{version} belongs to the base {}, and {name} answers now; serve {} to export it",
                    row.base_model, row.base_model
                ),
            ));
        }
        Ok(row)
    }

    /// About how many bytes an export takes.
    fn export_bytes(&self, row: &AdapterRow, format: &str) -> u64 {
        let base = lock(&self.model).1.clone();
        let weights = match format {
            "merged-gguf" => std::fs::metadata(&base).map_or(0, |m| m.len()),
            "merged-safetensors" => {
                let facts = self.serving.facts();
                let width = match facts.as_ref().map(|f| f.quantisation.as_str()) {
                    Some("F32") => 4,
                    _ => 2,
                };
                facts.map_or(0, |f| f.parameters) * width
            }
            _ => return row.size_bytes + (COMPANIONS >> 6),
        };
        weights + COMPANIONS
    }

    /// What the model card says: where the adapter comes from, in numbers.
    async fn card(&self, row: &AdapterRow) -> Result<Value, Failure> {
        let (rows, approval) = self.adapter_rows().await?;
        let mut lineage = Vec::new();
        let mut learned = 0;
        let mut next = Some(row.version);
        while let Some(row) = next.and_then(|v| rows.iter().find(|r| r.version == v)) {
            let imported = if is_imported(row) { " (imported)" } else { "" };
            lineage.push(format!("{}{imported}", row.version));
            learned += row.steps_used;
            // A parent is older; a file that says otherwise cannot loop.
            next = row.parent.filter(|p| p.0 < row.version.0);
        }
        if next.is_none_or(AdapterVersion::is_base) {
            lineage.push("base".to_owned());
        }
        let own = approval.get(&row.version);
        let licence = Catalog::embedded()
            .get(&row.base_model)
            .map(|entry| entry.licence.clone());
        Ok(json!({
            "base_model": row.base_model,
            "base_licence": licence,
            "base_sha256": self.serving.facts().map(|f| f.fingerprint),
            "imported": is_imported(row),
            "lineage": lineage,
            "answers_learned_from": row.steps_used,
            "answers_learned_from_in_all": learned,
            "liked": own.map_or(0, |a| a.up),
            "disliked": own.map_or(0, |a| a.down),
            "made_at_ms": row.created_at,
            "metrics": row.metrics,
        }))
    }
}

/// Whether an adapter was made elsewhere; it stays so when it has been live.
fn is_imported(row: &AdapterRow) -> bool {
    row.run.is_none() && row.parent.is_none_or(AdapterVersion::is_base)
}

/// The nearest directory on the way to a path that is there already.
fn existing(path: &std::path::Path) -> &std::path::Path {
    path.ancestors()
        .find(|p| p.exists())
        .unwrap_or(std::path::Path::new("/"))
}

/// Changes what is known of a download and publishes it.
fn change_download(
    downloads: &Downloads,
    events: &EventHub,
    name: &str,
    change: impl FnOnce(&mut Download),
) {
    let mut downloads = lock(downloads);
    let Some(download) = downloads.get_mut(name) else {
        return;
    };
    change(download);
    events.publish(EventBody::Download {
        name: name.to_owned(),
        state: download.state.to_owned(),
        progress: Some(download.progress.clone()),
    });
}

/// Fetches a model in the background.
async fn pull(
    downloads: Downloads,
    events: EventHub,
    data_dir: DataDir,
    entry: &'static catalog::Entry,
    cancel: CancellationToken,
) {
    let report = |progress: download::Progress| {
        change_download(&downloads, &events, &entry.name, |d| {
            if d.state != "paused" {
                let verifying = matches!(progress.phase, download::Phase::Verifying);
                d.state = if verifying {
                    "verifying"
                } else {
                    "downloading"
                };
            }
            d.progress = progress.to_dto();
        });
    };
    let result = download::fetch(entry, &data_dir, report, cancel).await;
    change_download(&downloads, &events, &entry.name, |d| match &result {
        Ok(_) => d.state = "installed",
        Err(failure) if failure.code == Code::Cancelled => d.state = "paused",
        Err(failure) => {
            d.state = "failed";
            d.error = Some(failure.message.clone());
        }
    });
}

/// Minutes since midnight, local time where the platform tells, else UTC.
fn local_minute() -> u32 {
    let seconds = now() / 1000 + local_offset_seconds();
    (seconds.rem_euclid(86_400) / 60) as u32
}

/// Seconds that local time is ahead of UTC, as `date` knows it; read once.
fn local_offset_seconds() -> i64 {
    static OFFSET: std::sync::OnceLock<i64> = std::sync::OnceLock::new();
    *OFFSET.get_or_init(|| {
        let text = std::process::Command::new("date").arg("+%z").output().ok();
        let text = text
            .and_then(|o| String::from_utf8(o.stdout).ok())
            .unwrap_or_default();
        let digits = text.trim();
        let (sign, rest) = match digits.split_at_checked(1) {
            Some(("-", rest)) => (-1, rest),
            Some(("+", rest)) => (1, rest),
            _ => return 0,
        };
        match (
            rest.get(..2).and_then(|h| h.parse::<i64>().ok()),
            rest.get(2..4).and_then(|m| m.parse::<i64>().ok()),
        ) {
            (Some(h), Some(m)) => sign * (h * 3600 + m * 60),
            _ => 0,
        }
    })
}

fn adapter_dto(row: AdapterRow, live: AdapterVersion, approval: Option<&Approval>) -> Adapter {
    let state = if row.version == live {
        "live"
    } else {
        match row.state {
            AdapterState::Candidate => "candidate",
            AdapterState::Rejected => "rejected",
            AdapterState::Imported => "imported",
            _ if is_imported(&row) => "imported",
            AdapterState::Live | AdapterState::Kept => "kept",
        }
    };
    Adapter {
        version: row.version.to_string(),
        parent: row.parent.map(|p| p.to_string()),
        state: state.to_owned(),
        run_id: row.run,
        created_at: row.created_at,
        steps_used: row.steps_used,
        metrics: row.metrics.as_object().cloned().unwrap_or_default(),
        verdict: row.verdict.and_then(|v| serde_json::from_value(v).ok()),
        approval: approval.cloned(),
        pinned: row.pinned,
        size_bytes: row.size_bytes,
    }
}

#[async_trait]
impl Control for Daemon {
    async fn status(&self) -> Result<Status, Failure> {
        let store = self.store.clone();
        let (counts, health) = {
            let for_health = self.store.clone();
            (blocking(move || store.counts()).await?, for_health.health())
        };
        let state = self.serving.state();
        let settings = self.settings.load();
        let (decision, labels) = self.decision().await?;
        let current = self.learning.current();
        let (training_state, reason) = match (&current, decision) {
            (Some(run), _) if run.state == "paused" => (
                "paused",
                format!("Run {} is paused; its last update is on disk.", run.id),
            ),
            (Some(run), _) if run.state == "checking" => (
                "checking",
                format!("Run {} is being compared with the live adapter.", run.id),
            ),
            (Some(run), _) => ("training", format!("Run {} is training.", run.id)),
            (None, Decision::Wait(state, reason)) => (state, reason),
            (None, Decision::Start) => ("waiting", "A lesson is about to start.".to_owned()),
        };
        let name = self.model_name();
        let model_state = match (&state.facts, &state.load_error) {
            (Some(_), _) => "ready",
            (None, Some(_)) => "failed",
            (None, None) if name.is_empty() => "none",
            (None, None) => "loading",
        };
        let first = self.first_request.load(Ordering::Relaxed);
        Ok(Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.started.elapsed().as_secs(),
            recording: self.recording.load(Ordering::Relaxed),
            model: ModelStatus {
                name,
                context_length: state.facts.as_ref().map_or(0, |f| f.context_length),
                state: model_state.to_owned(),
                error: state.load_error.as_ref().map(|f| f.message.clone()),
            },
            worker: WorkerStatus {
                state: state.phase.to_owned(),
                pid: state.pid,
                restarts: state.restarts,
                last_crash: state.last_crash.clone(),
            },
            adapter: AdapterStatus {
                live: state.live.to_string(),
                candidate: current
                    .as_ref()
                    .filter(|r| r.state == "checking")
                    .and_then(|r| r.version.clone()),
            },
            training: TrainingStatus {
                state: training_state.to_owned(),
                reason,
                fresh_labels: labels.labels as u32,
                needed_labels: settings.label_floor,
                run_id: current.as_ref().map(|r| r.id),
                progress: current.as_ref().map(|r| r.progress),
                eta_s: current.as_ref().and_then(|r| r.eta_s),
            },
            counts: Counts {
                steps: counts.steps,
                unrated: counts.unrated,
                rated: counts.rated,
                up: counts.up,
                down: counts.down,
                sessions: counts.sessions,
            },
            connect: ConnectStatus {
                base_url: self.url.clone(),
                openai_url: format!("{}/v1", self.url),
                token_hint: self
                    .token
                    .as_ref()
                    .map(|t| t.chars().take(4).collect())
                    .unwrap_or_default(),
                first_request_at: (first > 0).then_some(first),
            },
            policy: PolicyStatus {
                schedule: settings.schedule.as_str().to_owned(),
                dial: format!("{:?}", settings.dial).to_lowercase(),
            },
            disk: DiskStatus {
                free_bytes: hardware::disk_free(&self.data_dir.root).unwrap_or(0),
                recording_stopped: health.stopped.map(|_| true),
            },
        })
    }

    async fn start_run(&self) -> Result<RunStarted, Failure> {
        let id = self.learning.start(self.run_settings()).await?;
        Ok(RunStarted { id })
    }

    async fn runs(&self) -> Result<Vec<Run>, Failure> {
        let store = self.store.clone();
        let rows = blocking(move || store.runs(RUNS)).await?;
        let current = self.learning.current();
        Ok(rows
            .into_iter()
            .map(|row| match &current {
                Some(run) if run.id == row.id => run.clone(),
                _ => stored_run(row),
            })
            .collect())
    }

    async fn run(&self, id: i64) -> Result<Option<Run>, Failure> {
        if let Some(run) = self.learning.current().filter(|r| r.id == id) {
            return Ok(Some(run));
        }
        let store = self.store.clone();
        match blocking(move || store.run(id)).await {
            Ok(row) => Ok(Some(stored_run(row))),
            Err(failure) if failure.code == Code::NotFound => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    async fn run_metrics(&self, id: i64, points: usize) -> Result<Vec<Series>, Failure> {
        let store = self.store.clone();
        let series = blocking(move || store.metrics(id, points)).await?;
        Ok(series
            .into_iter()
            .map(|(name, points)| Series {
                name,
                points: points
                    .into_iter()
                    .map(|(step, value)| (f64::from(step), value))
                    .collect(),
            })
            .collect())
    }

    async fn pause_training(&self) -> Result<(), Failure> {
        self.learning.pause();
        Ok(())
    }

    async fn resume_training(&self) -> Result<(), Failure> {
        self.learning.resume();
        Ok(())
    }

    async fn cancel_run(&self, id: i64) -> Result<(), Failure> {
        self.learning.cancel(id)
    }

    async fn adapters(&self) -> Result<AdapterList, Failure> {
        let (rows, approval) = self.adapter_rows().await?;
        let live = self.serving.state().live;
        let mut items: Vec<Adapter> = rows
            .into_iter()
            .map(|row| {
                let approval = approval.get(&row.version);
                adapter_dto(row, live, approval)
            })
            .collect();
        items.reverse();
        Ok(AdapterList {
            live: live.to_string(),
            items,
        })
    }

    async fn adapter(&self, version: AdapterVersion) -> Result<Option<Adapter>, Failure> {
        let list = self.adapters().await?;
        Ok(list
            .items
            .into_iter()
            .find(|a| a.version == version.to_string()))
    }

    async fn activate_adapter(&self, version: AdapterVersion) -> Result<AdapterList, Failure> {
        self.learning.activate(version).await?;
        self.adapters().await
    }

    async fn rollback_adapter(&self) -> Result<AdapterList, Failure> {
        self.learning.rollback().await?;
        self.adapters().await
    }

    async fn export_adapter(
        &self,
        version: AdapterVersion,
        request: ExportRequest,
    ) -> Result<Exported, Failure> {
        let row = self.exportable(version, &request.format).await?;
        let out = match request.out {
            Some(out) => PathBuf::from(out),
            None => self
                .data_dir
                .exports()
                .join(format!("{version}-{}-{}", request.format, now())),
        };
        let out = std::path::absolute(&out)
            .map_err(|e| Failure::new(Code::InvalidRequest, e.to_string()))?;
        if out.exists() {
            return Err(Failure::new(
                Code::InvalidRequest,
                format!(
                    "{} exists already; nothing was written, choose another directory",
                    out.display()
                ),
            ));
        }
        let bytes = self.export_bytes(&row, &request.format);
        if let Some(free) = hardware::disk_free(existing(&out)).filter(|free| *free < bytes) {
            return Err(Failure::new(
                Code::DiskFull,
                format!(
                    "the export takes about {}, and {} are free at {}; nothing was written",
                    catalog::size(bytes),
                    catalog::size(free),
                    out.display()
                ),
            ));
        }
        let card = self.card(&row).await?;
        let files = AdapterFiles {
            version,
            dir: row.dir.into(),
        };
        let token = CancellationToken::new();
        lock(&self.exports).push((version, token.clone()));
        let _ended = Ended(self.exports.clone(), token.clone());
        let (events, format) = (self.events.clone(), request.format.clone());
        let progress = move |fraction| {
            events.publish(EventBody::Export {
                version: version.to_string(),
                format: format.clone(),
                fraction,
            });
        };
        let written = self
            .serving
            .export(files, request.format, out.clone(), card, progress);
        let result = tokio::select! {
            result = written => result,
            () = token.cancelled() => Err(Failure::new(
                Code::Cancelled,
                "the export was called off; nothing of it stays",
            )),
        };
        if let Err(failure) = &result
            && failure.code == Code::Unavailable
        {
            // The worker died in the middle of it.
            let _ = tokio::fs::remove_dir_all(partial_directory(&out)).await;
        }
        Ok(Exported {
            path: out.to_string_lossy().into_owned(),
            bytes: result?,
        })
    }

    async fn export_estimate(
        &self,
        version: AdapterVersion,
        format: &str,
    ) -> Result<ExportEstimate, Failure> {
        let row = self.exportable(version, format).await?;
        Ok(ExportEstimate {
            bytes: self.export_bytes(&row, format),
            free_bytes: hardware::disk_free(existing(&self.data_dir.exports())).unwrap_or(0),
        })
    }

    async fn cancel_export(&self, version: AdapterVersion) -> Result<(), Failure> {
        let exports = lock(&self.exports);
        let mut found = false;
        for (_, token) in exports.iter().filter(|(v, _)| *v == version) {
            token.cancel();
            found = true;
        }
        if found {
            Ok(())
        } else {
            Err(Failure::new(
                Code::NotFound,
                format!("{version} is not being exported"),
            ))
        }
    }

    async fn import_adapter(&self, request: ImportAdapter) -> Result<Adapter, Failure> {
        // No run starts meanwhile and takes the same number; one that is under way has its own.
        let _no_run_starts = self.learning.hold().await;
        let (rows, _) = self.adapter_rows().await?;
        let last = rows.last().map_or(0, |r| r.version.0);
        let reserved = u32::from(self.learning.current().is_some());
        let version = AdapterVersion(last + 1 + reserved);
        let out = self.data_dir.adapter(version);
        // A directory without a row is what a process that was killed has left.
        if let Err(error) = tokio::fs::remove_dir_all(&out).await
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(Failure::new(
                Code::Internal,
                format!("{}: {error}", out.display()),
            ));
        }
        let facts = self
            .serving
            .import(request.path.into(), out.clone(), request.force)
            .await?;
        let row = AdapterRow {
            version,
            parent: None,
            state: AdapterState::Imported,
            run: None,
            dir: out.to_string_lossy().into_owned(),
            base_model: self.model_name(),
            steps_used: 0,
            size_bytes: directory_bytes(&out),
            metrics: facts,
            verdict: None,
            pinned: false,
            created_at: now(),
        };
        let (store, stored) = (self.store.clone(), row.clone());
        blocking(move || store.put_adapter(stored)).await?;
        let files = AdapterFiles { version, dir: out };
        self.serving.load_adapter(files).await?;
        let live = self.serving.state().live;
        let adapter = adapter_dto(row, live, None);
        self.events.publish(EventBody::Adapter {
            live: live.to_string(),
            adapter: Some(Box::new(adapter.clone())),
        });
        Ok(adapter)
    }

    async fn pin_adapter(&self, version: AdapterVersion, pinned: bool) -> Result<(), Failure> {
        let row = AdapterRow {
            pinned,
            ..self.row(version).await?
        };
        let store = self.store.clone();
        blocking(move || store.put_adapter(row)).await
    }

    async fn prune_adapters(&self) -> Result<PruneResult, Failure> {
        let (rows, _) = self.adapter_rows().await?;
        let live = self.serving.state().live;
        let parent = rows
            .iter()
            .find(|r| r.version == live)
            .and_then(|r| r.parent);
        let from = rows.len().saturating_sub(KEPT_VERSIONS);
        let mut result = PruneResult::default();
        for row in rows.into_iter().take(from) {
            // The live version's parent stays, so that a rollback stays possible.
            let keeps = row.pinned || row.version == live || Some(row.version) == parent;
            let dir = PathBuf::from(&row.dir);
            if keeps || !dir.exists() {
                continue;
            }
            self.serving.unload(row.version);
            let files = AdapterFiles {
                version: row.version,
                dir: dir.clone(),
            };
            let _ = tokio::fs::remove_dir_all(files.state_dir()).await;
            tokio::fs::remove_dir_all(&dir)
                .await
                .map_err(|e| Failure::new(Code::Internal, format!("{}: {e}", dir.display())))?;
            result.freed_bytes += row.size_bytes;
            result.removed.push(row.version.to_string());
        }
        Ok(result)
    }

    async fn models(&self) -> Result<ModelList, Failure> {
        let machine = hardware::probe(&self.data_dir.root);
        let active = self.model_name();
        let installed = catalog::installed(&self.data_dir);
        let downloads = lock(&self.downloads);
        let mut items = catalog::listing(&installed, &machine);
        for item in &mut items {
            let here = item.state == "installed";
            if let Some(download) = downloads.get(&item.name).filter(|_| !here) {
                item.state = download.state.to_owned();
                item.progress = Some(download.progress.clone());
                item.error = download.error.clone();
            } else if item.name == active {
                item.state = "active".to_owned();
            }
        }
        if items.iter().all(|i| i.name != active) && !active.is_empty() {
            let facts = self.serving.facts();
            items.push(Model {
                title: active.clone(),
                name: active,
                source: "a file outside the data directory".into(),
                context_length: facts.as_ref().map_or(0, |f| f.context_length),
                parameters: facts.map_or(0, |f| f.parameters),
                state: "active".into(),
                ..Model::default()
            });
        }
        Ok(ModelList {
            items,
            hardware: machine.to_json(),
        })
    }

    async fn pull_model(&self, name: &str) -> Result<(), Failure> {
        let entry = Catalog::embedded().get(name).ok_or_else(|| {
            Failure::new(
                Code::ModelNotFound,
                format!("there is no model '{name}' in the catalogue"),
            )
        })?;
        let cancel = CancellationToken::new();
        {
            let mut downloads = lock(&self.downloads);
            if downloads
                .get(name)
                .is_some_and(|d| d.state == "downloading" || d.state == "verifying")
            {
                return Ok(());
            }
            let progress = DownloadProgress {
                total: entry.size_bytes(),
                ..Default::default()
            };
            let download = Download {
                state: "downloading",
                progress,
                error: None,
                cancel: cancel.clone(),
            };
            downloads.insert(name.to_owned(), download);
        }
        change_download(&self.downloads, &self.events, name, |_| {});
        tokio::spawn(pull(
            self.downloads.clone(),
            self.events.clone(),
            self.data_dir.clone(),
            entry,
            cancel,
        ));
        Ok(())
    }

    async fn pause_model(&self, name: &str) -> Result<(), Failure> {
        change_download(&self.downloads, &self.events, name, |d| {
            d.cancel.cancel();
            d.state = "paused";
        });
        Ok(())
    }

    async fn activate_model(&self, name: &str) -> Result<(), Failure> {
        if self.learning.current().is_some() {
            return Err(Failure::new(
                Code::Conflict,
                "a lesson is under way; cancel it or wait for its end before changing the model",
            ));
        }
        let resolved = catalog::resolve(name, &self.data_dir)?;
        let path = resolved.path.ok_or_else(|| {
            Failure::new(
                Code::Unavailable,
                format!("the model {name} is not on this machine; pull it first"),
            )
        })?;
        // Adapters belong to the base they were trained on.
        self.serving.swap(None, AdapterVersion::BASE).await?;
        let store = self.store.clone();
        let value = json!(resolved.name).to_string();
        blocking(move || {
            store.set_live(AdapterVersion::BASE)?;
            store.set_setting("model", Some(value))
        })
        .await?;
        *lock(&self.model) = (resolved.name, path.clone());
        self.serving
            .configure(worker_settings(&self.settings.load(), path, false));
        Ok(())
    }

    async fn import_model(&self, path: &str) -> Result<String, Failure> {
        let (path, data_dir) = (PathBuf::from(path), self.data_dir.clone());
        crate::process::inspect(&path).await?;
        let installed = tokio::task::spawn_blocking(move || catalog::import(&path, &data_dir))
            .await
            .map_err(|e| Failure::new(Code::Internal, e.to_string()))??;
        Ok(installed.name)
    }

    async fn remove_model(&self, name: &str) -> Result<(), Failure> {
        if self.model_name() == name {
            return Err(Failure::new(
                Code::Conflict,
                format!("{name} answers now; serve another model first"),
            ));
        }
        lock(&self.downloads).remove(name);
        catalog::remove(name, &self.data_dir)
    }

    async fn settings(&self) -> Result<Vec<Setting>, Failure> {
        Ok(self.settings.load().list())
    }

    async fn change_settings(&self, changes: Map<String, Value>) -> Result<Vec<Setting>, Failure> {
        let mut texts = Vec::new();
        for (key, value) in &changes {
            let text = if value.is_null() {
                None
            } else {
                Some(settings::validate(key, value)?)
            };
            if settings::spec_of(key).is_none() {
                return Err(Failure::new(
                    Code::InvalidRequest,
                    format!("There is no setting '{key}'."),
                ));
            }
            texts.push((key.clone(), text));
        }
        let store = self.store.clone();
        blocking(move || {
            for (key, text) in texts {
                store.set_setting(&key, text)?;
            }
            Ok(())
        })
        .await?;
        let store = self.store.clone();
        let fresh = settings::resolve(
            &self.raw,
            |name| std::env::var(name).ok(),
            |key| store.setting(key).ok().flatten(),
        )?;
        self.recording.store(fresh.recording, Ordering::Relaxed);
        let list = fresh.list();
        self.settings.store(Arc::new(fresh));
        Ok(list)
    }

    async fn doctor(&self) -> Result<Vec<Check>, Failure> {
        let status = self.status().await?;
        let machine = hardware::probe(&self.data_dir.root);
        let gib = |bytes: u64| bytes as f64 / f64::from(1u32 << 30);
        let gpu = if machine.gpus.is_empty() {
            "No NVIDIA GPU was found; serving and training use the CPU.".to_owned()
        } else {
            machine
                .gpus
                .iter()
                .map(|g| format!("{} ({:.0} GiB)", g.name, gib(g.memory_bytes)))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let mut checks = vec![
            Check::new("gateway", true, format!("Listening on {}.", self.url), None),
            Check::new(
                "model",
                status.model.state == "ready",
                status
                    .model
                    .error
                    .clone()
                    .unwrap_or_else(|| format!("{} is {}.", status.model.name, status.model.state)),
                Some(
                    "Choose another model on the Models page, or `spotter model pull smollm2-135m-instruct`.",
                ),
            ),
            Check::new(
                "worker",
                status.worker.last_crash.is_none(),
                match &status.worker.last_crash {
                    None => format!("The serving worker is {}.", status.worker.state),
                    Some(crash) => format!(
                        "The serving worker was restarted {} times; last: {crash}.",
                        status.worker.restarts
                    ),
                },
                Some("See the log in the data directory."),
            ),
            Check::new(
                "memory",
                machine.memory_free_bytes > 1 << 30,
                format!(
                    "{:.1} of {:.1} GiB of memory are free.",
                    gib(machine.memory_free_bytes),
                    gib(machine.memory_bytes)
                ),
                Some("Close other programs before training."),
            ),
            Check::new(
                "disk",
                status.disk.free_bytes > 1 << 30 && status.disk.recording_stopped.is_none(),
                format!(
                    "{:.1} GiB are free in {}.",
                    gib(status.disk.free_bytes),
                    self.data_dir.root.display()
                ),
                Some("Free some space; recording goes on by itself then."),
            ),
            Check::new(
                "processor",
                true,
                format!("{} cores. {gpu}", machine.cores),
                None,
            ),
            Check::new("training", true, status.training.reason.clone(), None),
        ];
        let token = match &self.token_place {
            None => "No token is asked for; only this machine can reach Spotter.".to_owned(),
            Some(place) => format!("The token is in {place}."),
        };
        checks.push(Check::new("token", true, token, None));
        Ok(checks)
    }

    async fn token(&self) -> Result<String, Failure> {
        Ok(self.token.clone().unwrap_or_default())
    }

    async fn set_recording(&self, paused: bool) -> Result<(), Failure> {
        let change = Map::from_iter([("recording".to_owned(), json!(!paused))]);
        self.change_settings(change).await.map(|_| ())
    }

    fn recording(&self) -> bool {
        self.recording.load(Ordering::Relaxed)
    }

    async fn connect_guide(&self, client: &str) -> Result<Option<ConnectGuide>, Failure> {
        let context = self.serving.facts().map_or(8192, |f| f.context_length);
        let token = self.token.clone().unwrap_or_default();
        Ok(crate::connect::guide(client, &self.url, &token, context))
    }

    fn request_seen(&self, _client: &str) {
        let at = now();
        self.last_request.store(at, Ordering::Relaxed);
        let _ = self
            .first_request
            .compare_exchange(0, at, Ordering::Relaxed, Ordering::Relaxed);
    }
}
