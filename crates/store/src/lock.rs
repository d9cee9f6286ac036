//! One process per data directory.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::Path;

use crate::error::{Result, StoreError};

/// Locks the directory until the file is dropped. The process id lies in a second file,
/// because a locked file is unreadable on Windows.
pub(crate) fn lock(directory: &Path) -> Result<File> {
    let io = |source| StoreError::Io {
        path: directory.to_owned(),
        source,
    };
    let pid_file = directory.join("spotter.pid");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(directory.join("spotter.lock"))
        .map_err(io)?;
    match file.try_lock() {
        Ok(()) => {
            fs::write(pid_file, std::process::id().to_string()).map_err(io)?;
            Ok(file)
        }
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse {
            directory: directory.to_owned(),
            pid: fs::read_to_string(pid_file).unwrap_or_else(|_| "unknown".to_owned()),
        }),
        Err(TryLockError::Error(error)) => Err(io(error)),
    }
}
