//! The training role: one run at a time, on its own thread.
//!
//! Owns the thread, pausing, cancelling and yielding to requests. What a run
//! does is the trainer's business; what is read from and written to the pipe is
//! the worker's.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use spotter_core::code::{Code, Failure};
use spotter_core::train::{TrainProgress, TrainRequest, TrainResult};
use spotter_core::worker::Report;
use spotter_model::LoadedModel;
use spotter_trainer::TrainError;
use spotter_trainer::ppo::{Observer, train};

/// Longest wait before a micro-batch while requests are being answered. Under
/// constant load training goes on slowly instead of never.
const MAX_YIELD: Duration = Duration::from_secs(5);

/// What the run is asked to do, shared with its thread.
#[derive(Debug, Default)]
struct Control {
    wishes: Mutex<Wishes>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct Wishes {
    paused: bool,
    cancelled: bool,
    stopping: bool,
    serving: bool,
}

impl Control {
    fn wishes(&self) -> MutexGuard<'_, Wishes> {
        self.wishes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Wishes)) {
        change(&mut self.wishes());
        self.changed.notify_all();
    }

    /// Waits until `ready`, at most until `deadline`.
    fn wait(&self, deadline: Option<Instant>, ready: impl Fn(Wishes) -> bool) -> Wishes {
        let mut wishes = self.wishes();
        while !ready(*wishes) {
            let left = match deadline {
                Some(deadline) => match deadline.checked_duration_since(Instant::now()) {
                    Some(left) => left,
                    None => break,
                },
                None => Duration::from_secs(60),
            };
            wishes = self
                .changed
                .wait_timeout(wishes, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        *wishes
    }
}

/// A run in progress. Dropping it ends the run at the next micro-batch, keeps its
/// checkpoint, and waits for the thread.
#[derive(Debug)]
pub struct TrainerThread {
    run: i64,
    control: Arc<Control>,
    handle: Option<JoinHandle<()>>,
}

impl TrainerThread {
    /// Starts `request` on its own thread. `report` receives `TrainProgress` and
    /// `TrainPaused` reports and, last, one `TrainEnded`.
    ///
    /// A run that finds a checkpoint in `request.checkpoint_dir` continues it.
    pub fn start(
        model: Arc<LoadedModel>,
        request: TrainRequest,
        report: impl Fn(Report) + Send + 'static,
    ) -> std::io::Result<Self> {
        let control = Arc::new(Control::default());
        let run = request.run;
        let shared = Arc::clone(&control);
        let handle = std::thread::Builder::new()
            .name(format!("train-{run}"))
            .spawn(move || {
                let result = run_to_the_end(&model, &request, &shared, &report);
                report(Report::TrainEnded { run, result });
            })?;
        Ok(Self {
            run,
            control,
            handle: Some(handle),
        })
    }

    /// The run's number.
    pub fn run(&self) -> i64 {
        self.run
    }

    /// Whether the thread still works, or is paused.
    pub fn is_running(&self) -> bool {
        self.handle.as_ref().is_some_and(|h| !h.is_finished())
    }

    /// Ends the run's work at the next micro-batch and frees its memory; its last
    /// update is on disk. [`Self::resume`] continues from there.
    pub fn pause(&self) {
        self.control.change(|wishes| wishes.paused = true);
    }

    /// Continues a paused run.
    pub fn resume(&self) {
        self.control.change(|wishes| wishes.paused = false);
    }

    /// Ends the run at the next micro-batch and deletes its checkpoint.
    pub fn cancel(&self) {
        self.control.change(|wishes| wishes.cancelled = true);
    }

    /// Tells the run whether requests are being answered now.
    pub fn set_serving(&self, active: bool) {
        self.control.change(|wishes| wishes.serving = active);
    }

    /// Ends the run at the next micro-batch but keeps its checkpoint, so that the
    /// same request continues it in the next process.
    pub fn stop(mut self) {
        self.join();
    }

    fn join(&mut self) {
        self.control.change(|wishes| wishes.stopping = true);
        if let Some(handle) = self.handle.take()
            && handle.join().is_err()
        {
            tracing::error!(run = self.run, "the training thread panicked outside a run");
        }
    }
}

impl Drop for TrainerThread {
    fn drop(&mut self) {
        self.join();
    }
}

struct Reporting<'a> {
    control: &'a Control,
    report: &'a dyn Fn(Report),
}

impl Observer for Reporting<'_> {
    fn progress(&mut self, progress: TrainProgress) {
        (self.report)(Report::TrainProgress {
            progress: Box::new(progress),
        });
    }

    fn between(&mut self) -> Result<(), TrainError> {
        let deadline = Instant::now() + MAX_YIELD;
        let wishes = self.control.wait(Some(deadline), |wishes| {
            !wishes.serving || wishes.paused || wishes.cancelled || wishes.stopping
        });
        if wishes.cancelled {
            Err(TrainError::Cancelled)
        } else if wishes.paused || wishes.stopping {
            Err(TrainError::Paused)
        } else {
            Ok(())
        }
    }
}

fn run_to_the_end(
    model: &LoadedModel,
    request: &TrainRequest,
    control: &Control,
    report: &dyn Fn(Report),
) -> TrainResult {
    loop {
        let mut observer = Reporting { control, report };
        let outcome = catch_unwind(AssertUnwindSafe(|| train(model, request, model, &mut observer)));
        let error = match outcome {
            Ok(Ok(outcome)) => {
                remove_checkpoint(&request.checkpoint_dir);
                return TrainResult::Done {
                    outcome: Box::new(outcome),
                };
            }
            Ok(Err(error)) => error,
            Err(_) => {
                return failed(Failure::new(
                    Code::Internal,
                    "The trainer panicked; the live adapter and the run's last checkpoint are kept. The log has the details.",
                ));
            }
        };
        match error {
            TrainError::Paused => {
                let stopping = || {
                    failed(Failure::new(
                        Code::Cancelled,
                        "The worker is stopping; the run's checkpoint is kept, and it continues when it is started again.",
                    ))
                };
                if control.wishes().stopping {
                    return stopping();
                }
                report(Report::TrainPaused {
                    run: request.run,
                    paused: true,
                });
                let wishes = control.wait(None, |wishes| {
                    !wishes.paused || wishes.cancelled || wishes.stopping
                });
                if wishes.cancelled {
                    remove_checkpoint(&request.checkpoint_dir);
                    return failed(TrainError::Cancelled.failure());
                }
                if wishes.stopping {
                    return stopping();
                }
                report(Report::TrainPaused {
                    run: request.run,
                    paused: false,
                });
            }
            TrainError::NothingToLearn { failure, dropped } => {
                remove_checkpoint(&request.checkpoint_dir);
                return TrainResult::Failed { failure, dropped };
            }
            TrainError::Cancelled => {
                remove_checkpoint(&request.checkpoint_dir);
                return failed(TrainError::Cancelled.failure());
            }
            error => return failed(error.failure()),
        }
    }
}

fn failed(failure: Failure) -> TrainResult {
    TrainResult::Failed {
        failure,
        dropped: Vec::new(),
    }
}

fn remove_checkpoint(dir: &Path) {
    if let Err(error) = std::fs::remove_dir_all(dir)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(dir = %dir.display(), %error, "the run's checkpoint could not be deleted");
    }
}
