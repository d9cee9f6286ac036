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
pub(crate) struct TrainerThread {
    run: i64,
    control: Arc<Control>,
    handle: Option<JoinHandle<()>>,
}

impl TrainerThread {
    /// Starts `request` on its own thread. `report` receives `TrainProgress` and
    /// `TrainPaused` reports and, last, one `TrainEnded`.
    ///
    /// A run that finds a checkpoint in `request.checkpoint_dir` continues it.
    pub(crate) fn start(
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

    /// Whether the thread still works, or is paused.
    pub(crate) fn is_running(&self) -> bool {
        self.handle.as_ref().is_some_and(|h| !h.is_finished())
    }

    /// Ends the run's work at the next micro-batch and frees its memory; its last
    /// update is on disk. [`Self::resume`] continues from there.
    pub(crate) fn pause(&self) {
        self.control.change(|wishes| wishes.paused = true);
    }

    /// Continues a paused run.
    pub(crate) fn resume(&self) {
        self.control.change(|wishes| wishes.paused = false);
    }

    /// Ends the run at the next micro-batch and deletes its checkpoint.
    pub(crate) fn cancel(&self) {
        self.control.change(|wishes| wishes.cancelled = true);
    }

    /// Tells the run whether requests are being answered now.
    pub(crate) fn set_serving(&self, active: bool) {
        self.control.change(|wishes| wishes.serving = active);
    }

    /// Ends the run at the next micro-batch but keeps its checkpoint, so that the
    /// same request continues it in the next process.
    pub(crate) fn stop(mut self) {
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
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            train(model, request, model, &mut observer)
        }));
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

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use spotter_core::adapter::AdapterVersion;
    use spotter_core::code::Code;
    use spotter_core::id::{StepUid, TrajectoryUid};
    use spotter_core::reward::RewardSource;
    use spotter_core::train::{Dial, Estimator, StepReward, TrainRequest, TrainResult, TrainStep};
    use spotter_core::worker::Report;
    use spotter_model::{LoadOptions, LoadedModel};

    use super::TrainerThread;

    fn start(name: &str) -> (TrainerThread, Receiver<Report>, PathBuf) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny/tiny.gguf");
        let options = LoadOptions {
            threads: Some(1),
            ..LoadOptions::default()
        };
        let model = Arc::new(LoadedModel::load(&path, &options).expect("the tiny model loads"));
        let dir = std::env::temp_dir().join(format!("train-{name}-{}", std::process::id()));
        let steps = (0..8u32)
            .map(|i| {
                let trajectory = TrajectoryUid::new();
                TrainStep {
                    uid: StepUid::new(),
                    prompt_uid: trajectory.as_str().to_owned(),
                    trajectory,
                    index: 0,
                    is_last: true,
                    prompt_ids: vec![10, 11, i],
                    response_ids: vec![40 + i, 50],
                    logprobs: vec![0.0, 0.0],
                    adapter: AdapterVersion::BASE,
                    temperature: 0.0,
                    top_p: 1.0,
                    reward: Some(StepReward {
                        value: if i % 2 == 0 { 1.0 } else { -1.0 },
                        source: RewardSource::User,
                        credit: 1.0,
                    }),
                    correction: None,
                }
            })
            .collect();
        let request = TrainRequest {
            run: 7,
            checkpoint_dir: dir.join("run"),
            output_dir: dir.join("v1"),
            version: AdapterVersion(1),
            parent: None,
            parent_state: None,
            live: AdapterVersion::BASE,
            steps,
            replay: vec![],
            held_out: vec![],
            dial: Dial::Normal,
            estimator: Estimator::Auto,
            overrides: serde_json::Map::from_iter([
                ("epochs".into(), 20.into()),
                ("probe_tokens".into(), 0.into()),
            ]),
            seed: 1,
        };
        let (send, receive) = channel();
        let thread = TrainerThread::start(model, request, move |report| {
            let _ = send.send(report);
        });
        (thread.expect("the thread starts"), receive, dir)
    }

    fn wait_for(reports: &Receiver<Report>, wanted: impl Fn(&Report) -> bool) -> Report {
        loop {
            let report = reports
                .recv_timeout(Duration::from_secs(60))
                .expect("a report");
            if wanted(&report) {
                return report;
            }
        }
    }

    fn ended(report: Report) -> TrainResult {
        match report {
            Report::TrainEnded { result, .. } => result,
            other => panic!("not the end: {other:?}"),
        }
    }

    #[test]
    fn a_paused_run_waits_and_finishes_when_resumed() {
        let (thread, reports, dir) = start("pause");
        wait_for(
            &reports,
            |r| matches!(r, Report::TrainProgress { progress } if progress.step == 2),
        );
        thread.pause();
        wait_for(&reports, |r| {
            matches!(r, Report::TrainPaused { paused: true, .. })
        });
        assert!(
            dir.join("run/run.safetensors").exists(),
            "its state is on disk"
        );
        thread.resume();
        let end = wait_for(&reports, |r| matches!(r, Report::TrainEnded { .. }));
        assert!(matches!(ended(end), TrainResult::Done { .. }));
        assert!(dir.join("v1/adapter_model.safetensors").exists());
        assert!(
            !dir.join("run").exists(),
            "a finished run leaves no checkpoint"
        );
        std::fs::remove_dir_all(dir).expect("cleaned up");
    }

    #[test]
    fn a_cancelled_run_leaves_nothing_and_a_stopped_one_its_checkpoint() {
        let (thread, reports, dir) = start("cancel");
        let second =
            |r: &Report| matches!(r, Report::TrainProgress { progress } if progress.step == 2);
        wait_for(&reports, second);
        thread.cancel();
        let end = wait_for(&reports, |r| matches!(r, Report::TrainEnded { .. }));
        let TrainResult::Failed { failure, .. } = ended(end) else {
            panic!("a cancelled run makes no adapter");
        };
        assert_eq!(failure.code, Code::Cancelled);
        assert!(!dir.join("run").exists() && !dir.join("v1").exists());

        let (thread, reports, dir) = start("stop");
        wait_for(&reports, second);
        thread.stop();
        assert!(dir.join("run/run.safetensors").exists());
        std::fs::remove_dir_all(dir).expect("cleaned up");
    }
}
