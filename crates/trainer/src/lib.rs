//! Training of LoRA adapters from rated answers: PPO and its relatives.
//!
//! This crate reads the request it is given and returns an adapter with metrics.
//! It knows no database, no HTTP and no schedule; it never decides whether an
//! adapter goes live.
//!
//! # Layout
//! - [`config`]: every knob, from a dial and overrides to resolved numbers.
//! - [`estimator`]: what each answer is used for, and advantages without a critic.
//! - [`critic`]: the value head and step-level GAE.
//! - [`packing`]: prefix trees and micro-batches.
//! - [`optimiser`]: AdamW and gradient clipping.
//! - [`checkpoint`]: atomic checkpoints.

pub mod checkpoint;
pub mod config;
pub mod critic;
pub mod estimator;
pub mod optimiser;
pub mod packing;

use spotter_core::code::{Code, Failure};

/// Why a run ended without an adapter.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The request or its data allow no training; the failure says why.
    #[error(transparent)]
    Refused(#[from] Failure),
    /// Paused: the checkpoint is on disk, and the same request continues from it.
    #[error("The run is paused; its checkpoint is kept.")]
    Paused,
    /// Cancelled by the person.
    #[error("The run was cancelled; the adapter that was live stays.")]
    Cancelled,
    /// A tensor operation failed.
    #[error("A tensor operation failed: {0}. The last checkpoint is kept.")]
    Tensor(#[from] candle_core::Error),
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
            Self::Refused(failure) => return failure.clone(),
            Self::Paused | Self::Cancelled => Code::Cancelled,
            Self::File(error) if error.kind() == std::io::ErrorKind::StorageFull => Code::DiskFull,
            Self::Checkpoint(_) => Code::BadModelFile,
            Self::Tensor(_) | Self::File(_) => Code::Internal,
        };
        Failure::new(code, self.to_string())
    }
}
