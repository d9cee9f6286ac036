//! The data directory: where Spotter keeps its database, models, adapters and logs, and
//! what each place inside it is called.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The data directory could not be found or made.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// Neither a directory was named nor a home directory is known.
    #[error("no data directory: set SPOTTER_DATA_DIR or pass --data-dir, because HOME is not set")]
    NoHome,
    /// A path could not be created, read or written.
    #[error("{path}: {source}")]
    Io {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Where a running daemon answers. It lies in `connection.json` while the daemon runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// The address without a path.
    pub url: String,
    /// The daemon's process id.
    pub pid: u32,
}

/// An existing data directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataDir {
    /// Its path.
    pub root: PathBuf,
    /// Whether it was named on the command line or in the environment, as opposed to
    /// being the user's default one.
    pub explicit: bool,
}

impl DataDir {
    /// The command line's directory, else `SPOTTER_DATA_DIR`, else `spotter` in the
    /// user's data directory. It is created, readable by its owner only.
    pub fn resolve(cli: Option<PathBuf>) -> Result<Self, DataDirError> {
        Self::resolve_from(cli, |key| std::env::var(key).ok())
    }

    /// [`resolve`](Self::resolve) with the environment given.
    pub fn resolve_from(
        cli: Option<PathBuf>,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, DataDirError> {
        let set = |key: &str| env(key).filter(|value| !value.is_empty());
        let named = cli.or_else(|| set("SPOTTER_DATA_DIR").map(PathBuf::from));
        let explicit = named.is_some();
        let root = match named {
            Some(path) => path,
            None => user_data(&set).ok_or(DataDirError::NoHome)?.join("spotter"),
        };
        create_private(&root)?;
        let root = fs::canonicalize(&root).map_err(|source| DataDirError::Io {
            path: root.clone(),
            source,
        })?;
        Ok(Self { root, explicit })
    }

    /// Installed models, one directory each.
    pub fn models(&self) -> PathBuf {
        self.root.join("models")
    }

    /// Adapters, one directory per version.
    pub fn adapters(&self) -> PathBuf {
        self.root.join("adapters")
    }

    /// One adapter version (`v3`).
    pub fn adapter(&self, version: impl std::fmt::Display) -> PathBuf {
        self.adapters().join(version.to_string())
    }

    /// Checkpoints and metrics of one training run.
    pub fn run(&self, id: i64) -> PathBuf {
        self.root.join("runs").join(id.to_string())
    }

    /// Log files.
    pub fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }

    /// Exported adapters, where no other place was named.
    pub fn exports(&self) -> PathBuf {
        self.root.join("exports")
    }

    /// The bearer token, where the system has no keychain.
    pub fn token_file(&self) -> PathBuf {
        self.root.join("token")
    }

    /// Where the running daemon says how to reach it.
    pub fn connection_file(&self) -> PathBuf {
        self.root.join("connection.json")
    }

    /// Creates a directory below the root, readable by its owner only.
    pub fn create(&self, path: &Path) -> Result<(), DataDirError> {
        create_private(path)
    }

    /// Says how to reach this daemon.
    pub fn write_connection(&self, connection: &Connection) -> Result<(), DataDirError> {
        let text = serde_json::to_string(connection).unwrap_or_default();
        write_private(&self.connection_file(), text.as_bytes())
    }

    /// How to reach the daemon that was started last; `None` when none runs or the file
    /// makes no sense.
    pub fn read_connection(&self) -> Option<Connection> {
        serde_json::from_slice(&fs::read(self.connection_file()).ok()?).ok()
    }

    /// Removes what [`write_connection`](Self::write_connection) wrote.
    pub fn remove_connection(&self) {
        let _ = fs::remove_file(self.connection_file());
    }
}

/// The user's data directory of this system.
fn user_data(env: &impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    if cfg!(windows) {
        return env("LOCALAPPDATA").map(PathBuf::from);
    }
    let home = || env("HOME").map(PathBuf::from);
    if cfg!(target_os = "macos") {
        return Some(home()?.join("Library/Application Support"));
    }
    // The XDG specification says to ignore a relative path.
    match env("XDG_DATA_HOME").map(PathBuf::from) {
        Some(path) if path.is_absolute() => Some(path),
        _ => Some(home()?.join(".local/share")),
    }
}

/// Creates a directory and its parents with mode 0700; one that exists keeps its mode.
pub(crate) fn create_private(path: &Path) -> Result<(), DataDirError> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path).map_err(|source| DataDirError::Io {
        path: path.to_owned(),
        source,
    })
}

/// Replaces a file as a whole; only its owner can read it.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> Result<(), DataDirError> {
    let write = || -> io::Result<()> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.new", std::process::id()));
        let fresh = path.with_file_name(name);
        let mut options = fs::OpenOptions::new();
        options.create(true).truncate(true).write(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(&fresh)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&fresh, path)
    };
    write().map_err(|source| DataDirError::Io {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_wins_over_the_environment_over_the_default() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().canonicalize().unwrap().join(name);
        let env = |key: &str| match key {
            "SPOTTER_DATA_DIR" => Some(at("env").display().to_string()),
            _ => None,
        };
        let named = DataDir::resolve_from(Some(at("cli")), env).unwrap();
        assert_eq!((named.root, named.explicit), (at("cli"), true));
        let from_env = DataDir::resolve_from(None, env).unwrap();
        assert_eq!((from_env.root, from_env.explicit), (at("env"), true));
        assert!(matches!(
            DataDir::resolve_from(None, |_| None),
            Err(DataDirError::NoHome)
        ));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_default_follows_xdg_and_ignores_a_relative_path() {
        let scratch = tempfile::tempdir().unwrap();
        let home = scratch.path().canonicalize().unwrap();
        let resolve = |xdg: &str| {
            DataDir::resolve_from(None, |key| match key {
                "HOME" => Some(home.display().to_string()),
                "XDG_DATA_HOME" => Some(xdg.to_owned()),
                _ => None,
            })
            .unwrap()
        };
        let xdg = home.join("xdg");
        let dir = resolve(&xdg.display().to_string());
        assert_eq!((dir.root, dir.explicit), (xdg.join("spotter"), false));
        assert_eq!(resolve("relative").root, home.join(".local/share/spotter"));
    }

    #[cfg(unix)]
    #[test]
    fn only_the_owner_can_read_the_directory_and_its_secrets() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = tempfile::tempdir().unwrap();
        let dir = DataDir::resolve_from(Some(scratch.path().join("data")), |_| None).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&dir.root), 0o700);
        let connection = Connection {
            url: "http://127.0.0.1:8100".to_owned(),
            pid: 7,
        };
        dir.write_connection(&connection).unwrap();
        assert_eq!(mode(&dir.connection_file()), 0o600);
        assert_eq!(dir.read_connection(), Some(connection));
        fs::write(dir.connection_file(), "half").unwrap();
        assert_eq!(dir.read_connection(), None);
    }
}
