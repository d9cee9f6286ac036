//! Adapters that leave and come in: exports and imports, each on a thread of its own, so
//! that requests are answered meanwhile.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use serde_json::{Value, json};
use spotter_core::code::{Code, Failure};
use spotter_core::train::AdapterFiles;
use spotter_core::worker::Report;
use spotter_model::adapter_file::{load_foreign, load_peft, same_base, save_peft};
use spotter_model::export::{Format, Source, export};
use spotter_model::{LoadedModel, ModelError};

use crate::serve::failure;

/// Progress is reported in steps of this size.
const STEP: f64 = 0.01;

/// The base model, as exports and imports see it.
#[derive(Clone)]
pub(crate) struct Base {
    pub(crate) model: Arc<LoadedModel>,
    pub(crate) path: PathBuf,
}

/// The export that is asked for.
pub(crate) struct Wanted {
    pub(crate) adapter: AdapterFiles,
    pub(crate) format: String,
    pub(crate) out: PathBuf,
    /// Facts for the model card.
    pub(crate) card: Value,
}

/// The work under way.
#[derive(Default)]
pub(crate) struct Exchange {
    cancels: Arc<Mutex<HashMap<u64, Arc<AtomicBool>>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Exchange {
    /// Writes an adapter in another form; `Exported` follows.
    pub(crate) fn export(&self, base: Base, reports: Sender<Report>, id: u64, wanted: Wanted) {
        let cancelled = Arc::new(AtomicBool::new(false));
        lock(&self.cancels).insert(id, cancelled.clone());
        let cancels = self.cancels.clone();
        let reported = reports.clone();
        self.spawn("export", &reports, move || {
            let mut told = 0.0;
            let mut progress = |fraction: f64| {
                if fraction - told >= STEP {
                    told = fraction;
                    let _ = reported.send(Report::ExportProgress { id, fraction });
                }
                !cancelled.load(Ordering::Relaxed)
            };
            let result = write(&base, &wanted, &mut progress);
            lock(&cancels).remove(&id);
            Report::Exported { id, result }
        });
    }

    /// Checks an adapter made elsewhere and copies it; `Imported` follows.
    pub(crate) fn import(
        &self,
        base: Base,
        reports: Sender<Report>,
        id: u64,
        source: PathBuf,
        out: PathBuf,
        force: bool,
    ) {
        self.spawn("import", &reports, move || Report::Imported {
            id,
            result: take(&base, &source, &out, force),
        });
    }

    /// Calls an export off; nothing when it is none.
    pub(crate) fn cancel(&self, id: u64) {
        if let Some(cancelled) = lock(&self.cancels).get(&id) {
            cancelled.store(true, Ordering::Relaxed);
        }
    }

    /// Calls everything off and waits, so that nothing half-written stays.
    pub(crate) fn close(&self) {
        for cancelled in lock(&self.cancels).values() {
            cancelled.store(true, Ordering::Relaxed);
        }
        for thread in lock(&self.threads).drain(..) {
            let _ = thread.join();
        }
    }

    fn spawn(
        &self,
        name: &str,
        reports: &Sender<Report>,
        work: impl FnOnce() -> Report + Send + 'static,
    ) {
        let reports = reports.clone();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _ = reports.send(work());
            });
        let mut threads = lock(&self.threads);
        threads.retain(|t| !t.is_finished());
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => tracing::error!(%error, name, "no thread could be started"),
        }
    }
}

fn write(
    base: &Base,
    wanted: &Wanted,
    progress: &mut dyn FnMut(f64) -> bool,
) -> Result<u64, Failure> {
    let Wanted {
        adapter: files,
        format,
        out,
        card,
    } = wanted;
    let format = Format::from_name(format).ok_or_else(|| {
        let known = Format::ALL.map(Format::name).join(", ");
        Failure::new(
            Code::InvalidRequest,
            format!("'{format}' is not an export format ({known} are); nothing was written"),
        )
    })?;
    let adapter = load_peft(&files.dir, base.model.model.config()).map_err(|e| failure(&e))?;
    let name = files.version.to_string();
    let source = Source {
        base: &base.model,
        base_path: &base.path,
        adapter: &adapter,
        name: &name,
        facts: card,
    };
    export(source, format, out, progress).map_err(|e| failure(&e))
}

fn take(base: &Base, source: &Path, out: &Path, force: bool) -> Result<Value, Failure> {
    let config = base.model.model.config();
    let foreign = load_foreign(source, config).map_err(|e| failure(&e))?;
    if !force {
        check_base(base, foreign.base_model.as_deref()).map_err(|reason| {
            failure(&ModelError::Invalid(format!(
                "{} {reason}; it was not imported. If it is the same model under another name, import it with force",
                source.display()
            )))
        })?;
    }
    save_peft(&foreign.adapter, &base.model.name, out, None).map_err(|e| failure(&e))?;
    let lora = foreign.adapter.config();
    Ok(json!({
        "rank": lora.rank,
        "alpha": lora.alpha,
        "target_modules": lora.targets.iter().map(|t| t.name()).collect::<Vec<_>>(),
        "form": foreign.form,
        "named_base": foreign.base_model,
    }))
}

fn check_base(base: &Base, named: Option<&str>) -> Result<(), String> {
    let part = |path: Option<&std::ffi::OsStr>| {
        path.map(|p| p.to_string_lossy().into_owned())
            .unwrap_or_default()
    };
    let ours = [
        base.model.name.clone(),
        part(base.path.file_name()),
        part(base.path.parent().and_then(Path::file_name)),
    ];
    match named {
        Some(named) if same_base(named, ours.iter().map(String::as_str)) => Ok(()),
        Some(named) => Err(format!(
            "was made for the base '{named}', and the base here is '{}'",
            base.model.name
        )),
        None => Err("does not say which base it was made for".to_owned()),
    }
}
