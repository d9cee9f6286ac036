//! Training of LoRA adapters from rated answers: PPO and its relatives.
//!
//! This crate reads the request it is given and returns an adapter with metrics.
//! It knows no database, no HTTP and no schedule; it never decides whether an
//! adapter goes live.
//!
//! # Layout
//! - [`ppo`]: one run, top to bottom. Start reading here.
//! - [`config`]: every knob, from a dial and overrides to resolved numbers.
//! - [`estimator`]: what each answer is used for, and advantages without a critic.
//! - [`batch`]: sequences, credit and examples of a run.
//! - [`critic`]: the value head and step-level GAE.
//! - [`packing`]: prefix trees and micro-batches.
//! - [`optimiser`]: AdamW and gradient clipping.
//! - [`learner`]: the model with its trainable adapter.
//! - [`evaluate`]: the gate's evidence.
//! - `retention`: the pull towards the base model on neutral texts.
//! - [`metrics`]: sums of one update as the metrics of the glossary.
//! - [`vocabulary`]: text to token ids.
//! - [`checkpoint`]: atomic checkpoints.

pub mod batch;
pub mod checkpoint;
pub mod config;
pub mod critic;
pub mod estimator;
pub mod evaluate;
pub mod learner;
pub mod metrics;
pub mod optimiser;
pub mod packing;
pub mod ppo;
mod retention;
pub mod vocabulary;

use spotter_core::code::{Code, Failure};

/// Why a run ended without an adapter.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The request or its data allow no training; the failure says why.
    #[error(transparent)]
    Refused(#[from] Failure),
    /// The run would change nothing.
    #[error("{failure}")]
    NothingToLearn {
        /// Why.
        failure: Failure,
        /// Steps that were looked at and dropped, each with its reason.
        dropped: Vec<(spotter_core::id::StepUid, String)>,
    },
    /// Paused: the checkpoint is on disk, and the same request continues from it.
    #[error("The run is paused; its checkpoint is kept.")]
    Paused,
    /// Cancelled by the person.
    #[error("The run was cancelled; the adapter that was live stays.")]
    Cancelled,
    /// A tensor operation failed.
    #[error("A tensor operation failed: {0}. The last checkpoint is kept.")]
    Tensor(#[from] candle_core::Error),
    /// The model could not compute something.
    #[error("The model could not compute: {0}. The last checkpoint is kept.")]
    Model(#[from] spotter_model::ModelError),
    /// The gradient is not a finite number.
    #[error(
        "The gradient is no longer a finite number; the update was left out and the live adapter is kept. Choose a gentler setting."
    )]
    Diverged,
    /// A file could not be read or written.
    #[error("A file of the run could not be read or written: {0}. The last checkpoint is kept.")]
    File(#[from] std::io::Error),
    /// A checkpoint is damaged.
    #[error("The run's checkpoint is damaged: {0}. Cancel the run to start afresh.")]
    Checkpoint(#[from] safetensors::SafeTensorError),
}

impl TrainError {
    /// The failure to report.
    pub fn failure(&self) -> Failure {
        let code = match self {
            Self::Refused(failure) | Self::NothingToLearn { failure, .. } => {
                return failure.clone();
            }
            Self::Paused | Self::Cancelled => Code::Cancelled,
            Self::File(error) if error.kind() == std::io::ErrorKind::StorageFull => Code::DiskFull,
            Self::Checkpoint(_) => Code::BadModelFile,
            Self::Tensor(_) | Self::Model(_) | Self::Diverged | Self::File(_) => Code::Internal,
        };
        Failure::new(code, self.to_string())
    }
}
