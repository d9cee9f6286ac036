//! The training worker: started for a run, ended after it, so that its memory is free
//! in between.

use std::time::Duration;

use spotter_core::code::{Code, Failure};
use spotter_core::train::{TrainProgress, TrainRequest, TrainResult};
use spotter_core::worker::{Command, PROTOCOL, Report, WorkerRole, WorkerSettings};
use tokio::sync::{mpsc, watch};

use crate::process::Process;

/// How long the trainer may take to reach its next checkpoint when it is stopped.
const GRACE: Duration = Duration::from_secs(10);

/// How often a run goes on from its checkpoint after its worker died.
const RESTARTS: u32 = 2;

/// What a person, or the end of the daemon, asks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Checkpoint and free memory.
    Pause,
    /// Continue.
    Resume,
    /// Stop and delete the checkpoint.
    Cancel,
    /// Stop and keep the checkpoint.
    Stop,
}

/// What the run's owner is told while it goes on.
#[derive(Clone, Debug)]
pub enum Told {
    /// It moved on.
    Progress(Box<TrainProgress>),
    /// It is paused, or runs again.
    Paused(bool),
}

/// How one worker ended.
enum End {
    /// With a result, or a reason that another worker would meet too.
    Answered(Result<TrainResult, Failure>),
    /// It died; these are its last words.
    Died(String),
}

/// Trains in a worker of its own and returns how it ended. A run whose worker dies goes
/// on from its last checkpoint in a new one, twice at most.
///
/// # Errors
/// `Unavailable` when the worker cannot start, `BadModelFile` when it cannot load the
/// model, `Internal` with its last words when it keeps dying, `Cancelled` when stopped.
pub async fn train(
    settings: WorkerSettings,
    request: TrainRequest,
    mut wishes: mpsc::UnboundedReceiver<Wish>,
    mut activity: watch::Receiver<bool>,
    mut tell: impl FnMut(Told),
) -> Result<TrainResult, Failure> {
    let mut restarts = 0;
    loop {
        let end = attempt(&settings, &request, &mut wishes, &mut activity, &mut tell).await?;
        match end {
            End::Answered(result) => return result,
            End::Died(words) if restarts < RESTARTS => {
                restarts += 1;
                tracing::warn!(
                    run = request.run,
                    words,
                    restarts,
                    "the training worker died; the run goes on from its last checkpoint"
                );
            }
            End::Died(words) => {
                return Err(Failure::new(
                    Code::Internal,
                    format!(
                        "the training worker died {} times ({words}); all ratings are kept",
                        restarts + 1
                    ),
                ));
            }
        }
    }
}

async fn attempt(
    settings: &WorkerSettings,
    request: &TrainRequest,
    wishes: &mut mpsc::UnboundedReceiver<Wish>,
    activity: &mut watch::Receiver<bool>,
    tell: &mut impl FnMut(Told),
) -> Result<End, Failure> {
    let mut process = Process::spawn(&[WorkerRole::Train])?;
    process.send(Command::Start {
        protocol: PROTOCOL,
        settings: Box::new(settings.clone()),
    });
    let mut request = Some(request.clone());
    let outcome = loop {
        tokio::select! {
            report = process.reports.recv() => match report {
                None => return Ok(End::Died(process.died().await)),
                Some(Report::Ready { .. }) => {
                    if let Some(request) = request.take() {
                        process.send(Command::Train { request: Box::new(request) });
                        process.send(Command::Serving { active: *activity.borrow() });
                    }
                }
                Some(Report::LoadFailed { failure }) => break Err(failure),
                Some(Report::TrainProgress { progress }) => tell(Told::Progress(progress)),
                Some(Report::TrainPaused { paused, .. }) => tell(Told::Paused(paused)),
                Some(Report::TrainEnded { result, .. }) => break Ok(result),
                Some(_) => {}
            },
            wish = wishes.recv() => match wish {
                Some(Wish::Pause) => process.send(Command::PauseTraining),
                Some(Wish::Resume) => process.send(Command::ResumeTraining),
                Some(Wish::Cancel) => process.send(Command::CancelTraining),
                Some(Wish::Stop) | None => {
                    break Err(Failure::new(Code::Cancelled, "Spotter is stopping; the run's checkpoint is kept"));
                }
            },
            changed = activity.changed() => {
                if changed.is_ok() {
                    process.send(Command::Serving { active: *activity.borrow_and_update() });
                }
            }
        }
    };
    process.shutdown(GRACE).await;
    Ok(End::Answered(outcome))
}
