//! Opening the data file: exclusive lock, backup, migration.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::Path;

use include_dir::{Dir, include_dir};
use rusqlite::Connection;
use rusqlite_migration::Migrations;

use crate::StoreError;

static MIGRATIONS: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/../../migrations");
const FILE: &str = "spotter.db";

/// The open data pool; the directory stays locked until it is dropped.
#[derive(Debug)]
pub struct Store {
    pub(crate) connection: Connection,
    _lock: File,
}

impl Store {
    /// Opens or creates the pool in `directory` and brings its schema up to date.
    ///
    /// # Errors
    /// [`StoreError::InUse`] when another holder is open, [`StoreError::NewerSchema`] when a newer
    /// program wrote the file; otherwise a file or SQLite failure.
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        fs::create_dir_all(directory)?;
        let lock = lock(directory)?;
        let mut connection = Connection::open(directory.join(FILE))?;
        connection.pragma_update(None, "busy_timeout", 5000)?;
        connection.pragma_update(None, "foreign_keys", true)?;
        connection.pragma_update(None, "secure_delete", true)?;
        let migrations = Migrations::from_directory(&MIGRATIONS)?;
        let known = u32::try_from(MIGRATIONS.dirs().count()).unwrap_or(u32::MAX);
        let found: u32 = connection.pragma_query_value(None, "user_version", |r| r.get(0))?;
        if found > known {
            return Err(StoreError::NewerSchema { found, known });
        }
        if found > 0 && found < known {
            let backup = directory.join(format!("backup-schema-{found}.db"));
            if backup.exists() {
                fs::remove_file(&backup)?;
            }
            connection.execute("VACUUM INTO ?1", [backup.to_string_lossy()])?;
        }
        connection.pragma_update(None, "journal_mode", "WAL")?;
        migrations.to_latest(&mut connection)?;
        Ok(Self {
            connection,
            _lock: lock,
        })
    }

    /// The schema number of the open file.
    ///
    /// # Errors
    /// When SQLite cannot read the file.
    pub fn schema(&self) -> Result<u32, StoreError> {
        Ok(self
            .connection
            .pragma_query_value(None, "user_version", |r| r.get(0))?)
    }
}

/// The process id lies in a second file because a locked file is unreadable on Windows.
fn lock(directory: &Path) -> Result<File, StoreError> {
    let pid_file = directory.join("spotter.pid");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(directory.join("spotter.lock"))?;
    match file.try_lock() {
        Ok(()) => {
            fs::write(pid_file, std::process::id().to_string())?;
            Ok(file)
        }
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse {
            directory: directory.to_owned(),
            pid: fs::read_to_string(pid_file).unwrap_or_else(|_| "unknown".to_owned()),
        }),
        Err(TryLockError::Error(error)) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holder_is_told_who_has_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let first = Store::open(dir.path()).unwrap();
        assert_eq!(first.schema().unwrap(), 1);
        let error = Store::open(dir.path()).unwrap_err();
        assert!(
            error.to_string().contains(&std::process::id().to_string()),
            "{error}"
        );
        drop(first);
        Store::open(dir.path()).unwrap();
    }

    #[test]
    fn a_newer_file_is_refused_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store
            .connection
            .pragma_update(None, "user_version", 99)
            .unwrap();
        drop(store);
        let before = fs::read(dir.path().join(FILE)).unwrap();
        let error = Store::open(dir.path()).unwrap_err();
        assert!(
            matches!(
                error,
                StoreError::NewerSchema {
                    found: 99,
                    known: 1
                }
            ),
            "{error}"
        );
        assert_eq!(fs::read(dir.path().join(FILE)).unwrap(), before);
    }
}
