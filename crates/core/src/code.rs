//! Error codes that cross the edge.
//!
//! The UI translates codes, never messages; HTTP dialects map them to status
//! codes. A variant exists only when a consumer treats it differently.

use serde::{Deserialize, Serialize};

/// What kind of failure happened, in a form that a client can act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The request is malformed; the message names the field.
    InvalidRequest,
    /// The bearer token is missing or wrong.
    Unauthorized,
    /// The Host or Origin is not allowed, or the action is not allowed now.
    Forbidden,
    /// The named thing does not exist.
    NotFound,
    /// The model name or adapter version does not exist.
    ModelNotFound,
    /// The prompt and the reserved answer do not fit the context window.
    ContextLengthExceeded,
    /// The state changed in between (compare-and-swap failed, run already active).
    Conflict,
    /// The queue is full; try again after the stated time.
    Busy,
    /// The engine is starting, restarting or has no model; try again.
    Unavailable,
    /// The work was cancelled by the client or by shutdown.
    Cancelled,
    /// Memory ran out for this request; the rest go on.
    OutOfMemory,
    /// The disk is full; what is affected is in the message.
    DiskFull,
    /// The model or adapter file is missing, truncated or of an unknown kind.
    BadModelFile,
    /// A checksum did not match.
    ChecksumMismatch,
    /// Fewer rated answers than the label floor.
    NotEnoughLabels,
    /// The run would change nothing (equal rewards, all rejected, nothing fresh).
    NothingToLearn,
    /// Anything else; the log has the details.
    Internal,
}

impl Code {
    /// The snake_case name used in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::NotFound => "not_found",
            Self::ModelNotFound => "model_not_found",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::Conflict => "conflict",
            Self::Busy => "busy",
            Self::Unavailable => "unavailable",
            Self::Cancelled => "cancelled",
            Self::OutOfMemory => "out_of_memory",
            Self::DiskFull => "disk_full",
            Self::BadModelFile => "bad_model_file",
            Self::ChecksumMismatch => "checksum_mismatch",
            Self::NotEnoughLabels => "not_enough_labels",
            Self::NothingToLearn => "nothing_to_learn",
            Self::Internal => "internal",
        }
    }
}

/// A failure with its code and a message for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The kind of failure.
    pub code: Code,
    /// What happened, what was kept, and what to do.
    pub message: String,
}

impl Failure {
    /// A failure of this kind.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}
