//! What can go wrong with the pool.

use std::path::PathBuf;

/// A failure of the data pool.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// SQLite's own reason.
    #[error("database: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// Another process has the data directory.
    #[error(
        "{directory} is in use by process {pid}; nothing was changed, stop that one or use another data directory"
    )]
    InUse {
        /// The data directory.
        directory: PathBuf,
        /// The holder's process id, or `unknown`.
        pid: String,
    },
    /// The file was written by a newer Spotter.
    #[error(
        "{path} has schema {found}, but this version of Spotter knows up to {known}; nothing was changed, install the newer version or use another data directory"
    )]
    Newer {
        /// The database file.
        path: PathBuf,
        /// Its schema version.
        found: usize,
        /// The newest one this binary knows.
        known: usize,
    },
    /// A migration failed; the backup is untouched.
    #[error("the database could not be migrated: {0}")]
    Migration(String),
    /// A file operation failed.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// There is no such thing.
    #[error("there is no {kind} '{id}'")]
    NotFound {
        /// Step, trajectory, run, …
        kind: &'static str,
        /// What was asked for.
        id: String,
    },
    /// A stored value does not decode; the row is left alone.
    #[error("stored data is damaged: {0}")]
    Damaged(String),
    /// A value outside its range.
    #[error("{0}")]
    Invalid(String),
    /// The transaction of a write could not be completed; nothing of it is stored.
    #[error("{reason}")]
    NotWritten {
        /// The database's reason.
        reason: String,
        /// Whether the disk is full.
        disk_full: bool,
    },
    /// The writer has stopped.
    #[error("the pool is closed")]
    Closed,
    /// The writer is behind; nothing was stored.
    #[error("the pool's queue is full; nothing was stored")]
    Full,
}

impl StoreError {
    /// Whether the disk is full.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Sqlite(rusqlite::Error::SqliteFailure(e, _)) => {
                e.code == rusqlite::ErrorCode::DiskFull
            }
            Self::NotWritten { disk_full, .. } => *disk_full,
            _ => false,
        }
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, StoreError>;
