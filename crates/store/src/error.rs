//! What can go wrong with the data pool, in words a person can act on.

use std::path::PathBuf;

/// A failure to open the data pool. The data is left as it was.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process holds the data directory.
    #[error(
        "the data directory {directory} is in use by process {pid}; nothing was changed; stop that process or choose another directory"
    )]
    InUse {
        /// The data directory.
        directory: PathBuf,
        /// The holder's process id, or `unknown`.
        pid: String,
    },
    /// The file was written by a newer program.
    #[error(
        "the data file has schema {found} and this program knows up to {known}; the file was left untouched; install a newer Spotter to open it"
    )]
    NewerSchema {
        /// The file's schema number.
        found: u32,
        /// The newest schema this program knows.
        known: u32,
    },
    /// A file operation failed.
    #[error("cannot use the data directory: {0}")]
    Io(#[from] std::io::Error),
    /// SQLite reported a failure.
    #[error("the data file cannot be used: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// A migration failed and was rolled back.
    #[error("the data file could not be brought up to date; it was kept as it was: {0}")]
    Migration(#[from] rusqlite_migration::Error),
    /// A step or reward could not be encoded or decoded.
    #[error("a stored record cannot be read or written: {0}")]
    Json(#[from] serde_json::Error),
}
