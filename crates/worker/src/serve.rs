//! The loaded model and everything that is asked of it outside a training run.

use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use spotter_core::code::{Code, Failure};
use spotter_core::generate::GenerateEvent;
use spotter_core::train::{AdapterFiles, ScoreItem};
use spotter_core::worker::{
    Command, Inspection, ModelFacts, Report, ServeCounters, WorkerRole, WorkerSettings,
};
use spotter_engine::{Engine, EngineSettings};
use spotter_model::{Batch, KvPool, LoadOptions, LoadedModel, LoraAdapter, ModelError, Segment};

use crate::exchange::{Base, Exchange, Wanted};

/// Key/value memory when the settings leave it open.
const DEFAULT_CACHE_BYTES: u64 = 1 << 30;
/// Fewest tokens that the cache must hold to be of use.
const LEAST_CACHE_TOKENS: usize = 2048;

/// A model, with an engine when the worker serves.
pub(crate) struct Loaded {
    model: Arc<LoadedModel>,
    path: PathBuf,
    engine: Option<Arc<Engine>>,
}

pub(crate) fn failure(error: &ModelError) -> Failure {
    let code = match error {
        ModelError::Io { .. } | ModelError::BadFile { .. } | ModelError::MissingTensor(_) => {
            Code::BadModelFile
        }
        ModelError::Invalid(_) => Code::InvalidRequest,
        ModelError::Cancelled => Code::Cancelled,
        _ => Code::Internal,
    };
    Failure::new(code, error.to_string())
}

/// Loads a model only to see whether it can be used.
pub(crate) fn inspect(path: &Path) -> Inspection {
    let began = Instant::now();
    LoadedModel::load(path, &LoadOptions::default())
        .map_err(|e| failure(&e))
        .and_then(|model| facts(&model, path, None, "auto", began))
        .map_or_else(Inspection::Failure, |facts| {
            Inspection::Model(Box::new(facts))
        })
}

fn facts(
    model: &LoadedModel,
    path: &Path,
    context_length: Option<u32>,
    device: &str,
    began: Instant,
) -> Result<ModelFacts, Failure> {
    let config = model.model.config();
    let own = config.context;
    let context_length = context_length.map_or(own, |c| (c as usize).clamp(16, own));
    Ok(ModelFacts {
        name: model.name.clone(),
        architecture: config.architecture.clone(),
        fingerprint: spotter_model::load::fingerprint(path).map_err(|e| failure(&e))?,
        parameters: model.model.parameters(),
        context_length: context_length as u32,
        vocab_size: config.vocab as u32,
        quantisation: model.quantisation.clone(),
        template_has_tools: model.template.knows_tools(),
        device: match device {
            "auto" | "cpu" => "CPU".to_owned(),
            other => {
                format!("CPU ({other} was asked for, but this worker is built for the CPU)")
            }
        },
        load_seconds: began.elapsed().as_secs_f64(),
    })
}

impl Loaded {
    /// Loads the model and starts the engine.
    pub(crate) fn load(
        settings: &WorkerSettings,
        roles: &[WorkerRole],
        reports: Sender<Report>,
    ) -> Result<(Self, ModelFacts), Failure> {
        let began = Instant::now();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let serves = roles.contains(&WorkerRole::Serve);
        let threads = settings
            .threads
            .unwrap_or(if serves { cores } else { (cores - 1).max(1) });
        let options = LoadOptions {
            threads: Some(threads.max(1)),
            ..Default::default()
        };
        let model = LoadedModel::load(&settings.model, &options).map_err(|e| failure(&e))?;
        let model = Arc::new(model);
        let facts = facts(
            &model,
            &settings.model,
            settings.context_length,
            &settings.device,
            began,
        )?;
        let engine = if serves {
            let bytes = settings.cache_bytes.unwrap_or(DEFAULT_CACHE_BYTES);
            let per_block = KvPool::bytes_for(model.model.config(), 1).max(1);
            let least = LEAST_CACHE_TOKENS.div_ceil(KvPool::BLOCK_TOKENS);
            let blocks = usize::try_from(bytes / per_block)
                .unwrap_or(usize::MAX)
                .max(least);
            let limits = EngineSettings {
                context_length: facts.context_length as usize,
                blocks,
                max_batch: settings.max_batch.max(1) as usize,
                max_queue: settings.max_queue.max(1) as usize,
            };
            let sink = Arc::new(move |id, event: GenerateEvent| {
                let _ = reports.send(Report::Generate { id, event });
            });
            let engine = Engine::start(model.clone(), limits, sink).map_err(|e| {
                Failure::new(Code::Internal, format!("no thread for the engine: {e}"))
            })?;
            Some(Arc::new(engine))
        } else {
            None
        };
        let path = settings.model.clone();
        let loaded = Self {
            model,
            path,
            engine,
        };
        Ok((loaded, facts))
    }

    /// The model, for the training role.
    pub(crate) fn model(&self) -> Arc<LoadedModel> {
        self.model.clone()
    }

    /// The model and its file, for exports and imports.
    fn base(&self) -> Base {
        Base {
            model: self.model.clone(),
            path: self.path.clone(),
        }
    }

    /// The engine, when the worker serves.
    pub(crate) fn engine(&self) -> Option<&Arc<Engine>> {
        self.engine.as_ref()
    }

    /// Lets running answers finish within `grace`.
    pub(crate) fn close(self, grace: Duration) {
        if let Some(engine) = self.engine.and_then(Arc::into_inner) {
            engine.shutdown(grace);
        }
    }

    fn adapter(&self, files: &AdapterFiles) -> Result<LoraAdapter, Failure> {
        spotter_model::adapter_file::load_peft(&files.dir, self.model.model.config())
            .map_err(|e| failure(&e))
    }

    fn score(
        &self,
        adapter: Option<LoraAdapter>,
        items: &[ScoreItem],
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        let adapter = adapter.map(Arc::new);
        items
            .iter()
            .map(|item| {
                let (prompt, answer) = (&item.prompt_ids, &item.response_ids);
                if prompt.is_empty() || answer.is_empty() {
                    return Err(ModelError::Invalid(
                        "a prompt and an answer are needed to score".into(),
                    ));
                }
                let tokens = prompt.iter().chain(answer).copied().collect();
                let segment = Segment {
                    tokens,
                    adapter: adapter.clone(),
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
            })
            .collect()
    }
}

/// The counters that the heartbeat reports.
#[derive(Default)]
pub(crate) struct Counters {
    engine: Mutex<Weak<Engine>>,
    closed: Mutex<bool>,
    changed: Condvar,
}

impl Counters {
    pub(crate) fn follow(&self, engine: Option<&Arc<Engine>>) {
        *self.engine.lock().unwrap_or_else(PoisonError::into_inner) =
            engine.map(Arc::downgrade).unwrap_or_default();
    }

    pub(crate) fn get(&self) -> Option<ServeCounters> {
        let engine = self
            .engine
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .upgrade();
        engine.map(|e| e.counters())
    }

    pub(crate) fn close(&self) {
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits; true once closed.
    pub(crate) fn wait_closed(&self, time: Duration) -> bool {
        let closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        let (closed, _) = self
            .changed
            .wait_timeout_while(closed, time, |closed| !*closed)
            .unwrap_or_else(PoisonError::into_inner);
        *closed
    }
}

/// Carries out a command that is not about training.
pub(crate) fn obey(
    loaded: Option<&Loaded>,
    exchange: &Exchange,
    reports: &Sender<Report>,
    command: Command,
) {
    let (reports, sender) = (reports.clone(), reports.clone());
    let send = move |report| {
        let _ = reports.send(report);
    };
    let unavailable = || {
        Failure::new(
            Code::Unavailable,
            "no model is loaded; try again when it is",
        )
    };
    let engine = || {
        loaded
            .and_then(|l| l.engine.as_ref())
            .ok_or_else(unavailable)
    };
    match command {
        Command::Generate { id, request } => match engine() {
            Ok(engine) => engine.submit(id, *request),
            Err(failure) => send(Report::Generate {
                id,
                event: GenerateEvent::Failed { failure },
            }),
        },
        Command::Cancel { id } => {
            exchange.cancel(id);
            if let Ok(engine) = engine() {
                engine.cancel(id);
            }
        }
        Command::CountTokens { id, prompt } => match engine() {
            Ok(engine) => engine.count_tokens(*prompt, move |result| {
                send(Report::TokenCount { id, result })
            }),
            Err(failure) => send(Report::TokenCount {
                id,
                result: Err(failure),
            }),
        },
        Command::LoadAdapter { id, adapter } => {
            let result = engine().and_then(|engine| {
                let lora = loaded.ok_or_else(unavailable)?.adapter(&adapter)?;
                engine.insert_adapter(adapter.version, lora);
                Ok(adapter.version)
            });
            send(Report::AdapterLoaded { id, result });
        }
        Command::Swap { id, expected, to } => match engine() {
            Ok(engine) => engine.swap(expected, to, move |result| {
                send(Report::Swapped { id, result })
            }),
            Err(failure) => send(Report::Swapped {
                id,
                result: Err(failure),
            }),
        },
        Command::UnloadAdapter { version } => {
            if let Ok(engine) = engine() {
                engine.remove_adapter(version);
            }
        }
        Command::Score { id, adapter, items } => {
            let Some(loaded) = loaded else {
                return send(Report::Scores {
                    id,
                    result: Err(unavailable()),
                });
            };
            let adapter = adapter.as_ref().map(|a| loaded.adapter(a)).transpose();
            match (adapter, &loaded.engine) {
                (Err(failure), _) => send(Report::Scores {
                    id,
                    result: Err(failure),
                }),
                (Ok(adapter), Some(engine)) => {
                    engine.score(adapter, items, move |result| {
                        send(Report::Scores { id, result })
                    });
                }
                (Ok(adapter), None) => {
                    let result = loaded.score(adapter, &items).map_err(|e| failure(&e));
                    send(Report::Scores { id, result });
                }
            }
        }
        Command::Export {
            id,
            adapter,
            format,
            out,
            card,
        } => match loaded {
            Some(loaded) => {
                let wanted = Wanted {
                    adapter,
                    format,
                    out,
                    card,
                };
                exchange.export(loaded.base(), sender, id, wanted);
            }
            None => send(Report::Exported {
                id,
                result: Err(unavailable()),
            }),
        },
        Command::Import {
            id,
            source,
            out,
            force,
        } => match loaded {
            Some(loaded) => exchange.import(loaded.base(), sender, id, source, out, force),
            None => send(Report::Imported {
                id,
                result: Err(unavailable()),
            }),
        },
        // Handled before this function is called.
        Command::Start { .. }
        | Command::Train { .. }
        | Command::PauseTraining
        | Command::ResumeTraining
        | Command::CancelTraining
        | Command::Serving { .. }
        | Command::Shutdown { .. } => {}
    }
}
