//! What can go wrong with model files and with computing.

use std::path::PathBuf;

/// A failure of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file is not what it should be; the message names what is wrong.
    #[error("{path} is not a usable model or adapter file: {reason}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor that the architecture needs is absent.
    #[error("the model has no tensor '{0}'")]
    MissingTensor(String),
    /// A request that cannot be computed; the message says why.
    #[error("{0}")]
    Invalid(String),
    /// The work was called off.
    #[error("it was cancelled; nothing was left behind")]
    Cancelled,
    /// The chat template failed.
    #[error("the chat template cannot be rendered: {0}")]
    Template(String),
    /// The tokeniser failed.
    #[error("tokeniser: {0}")]
    Tokenizer(String),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl ModelError {
    /// A bad file, with the reason.
    pub(crate) fn bad(path: &std::path::Path, reason: impl Into<String>) -> Self {
        Self::BadFile {
            path: path.to_owned(),
            reason: reason.into(),
        }
    }

    /// An input or output failure on this path.
    pub(crate) fn io(path: &std::path::Path, source: std::io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            source,
        }
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, ModelError>;
