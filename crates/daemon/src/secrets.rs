//! The bearer token: where it is kept, and how it is made at first start.
//!
//! `SPOTTER_TOKEN` wins. Otherwise the token lies in the system's keychain, or, where
//! there is none that works, in a file that only its owner can read. A data directory
//! that was named explicitly never uses the keychain, because the keychain has one entry
//! for the user and several directories would share it.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rand::Rng;
use rand::distr::Alphanumeric;

use crate::data_dir::{DataDir, DataDirError, write_private};

const SERVICE: &str = "spotter";
const ENTRY: &str = "token";
const PROBE: &str = "probe";
/// A keychain without a desktop session may wait for a prompt that nobody sees.
const PATIENCE: Duration = Duration::from_secs(2);
const LENGTH: usize = 32;

/// Where the token is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenPlace {
    /// `SPOTTER_TOKEN`.
    Environment,
    /// The system's keychain.
    Keychain,
    /// A file with mode 0600.
    File(PathBuf),
}

impl fmt::Display for TokenPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Environment => f.write_str("the environment variable SPOTTER_TOKEN"),
            Self::Keychain => f.write_str("the system's keychain"),
            Self::File(path) => write!(f, "the file {}", path.display()),
        }
    }
}

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The token has characters an HTTP header cannot carry.
    #[error("the token in {0} must be letters, digits and marks without spaces")]
    Unusable(TokenPlace),
    /// The keychain has the token and does not hand it out.
    #[error(
        "the keychain holds the token but does not answer; unlock it, or set SPOTTER_TOKEN, \
         or delete {0} to make a new token"
    )]
    Locked(PathBuf),
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] DataDirError),
}

/// The token and where it lies; made if there is none yet.
pub fn load_token(
    data_dir: &DataDir,
    env: impl Fn(&str) -> Option<String>,
) -> Result<(String, TokenPlace), SecretError> {
    if let Some(found) = find_token(data_dir, env)? {
        return Ok(found);
    }
    let token: String = rand::rng()
        .sample_iter(Alphanumeric)
        .take(LENGTH)
        .map(char::from)
        .collect();
    if !data_dir.explicit && keychain_works() {
        let kept = token.clone();
        let set = in_time(move || keyring::Entry::new(SERVICE, ENTRY)?.set_password(&kept));
        if matches!(set, Some(Ok(()))) {
            write_private(&marker(data_dir), b"")?;
            return Ok((token, TokenPlace::Keychain));
        }
    }
    let path = data_dir.token_file();
    write_private(&path, token.as_bytes())?;
    Ok((token, TokenPlace::File(path)))
}

/// The token and where it lies; `None` when none was made yet.
pub fn find_token(
    data_dir: &DataDir,
    env: impl Fn(&str) -> Option<String>,
) -> Result<Option<(String, TokenPlace)>, SecretError> {
    if let Some(token) = env("SPOTTER_TOKEN").filter(|token| !token.is_empty()) {
        return usable(token, TokenPlace::Environment).map(Some);
    }
    let path = data_dir.token_file();
    match fs::read_to_string(&path) {
        Ok(text) if !text.trim().is_empty() => {
            return usable(text.trim().to_owned(), TokenPlace::File(path)).map(Some);
        }
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(source) => return Err(DataDirError::Io { path, source }.into()),
    }
    let marker = marker(data_dir);
    if data_dir.explicit || !marker.exists() {
        return Ok(None);
    }
    match in_time(|| keyring::Entry::new(SERVICE, ENTRY)?.get_password()) {
        Some(Ok(token)) => usable(token, TokenPlace::Keychain).map(Some),
        Some(Err(keyring::Error::NoEntry)) => Ok(None),
        _ => Err(SecretError::Locked(marker)),
    }
}

/// Its presence says that the keychain has this directory's token, so that a keychain
/// that is locked today does not lead to a second token.
fn marker(data_dir: &DataDir) -> PathBuf {
    data_dir.root.join("token.keychain")
}

fn usable(token: String, place: TokenPlace) -> Result<(String, TokenPlace), SecretError> {
    if token.bytes().all(|byte| byte.is_ascii_graphic()) {
        Ok((token, place))
    } else {
        Err(SecretError::Unusable(place))
    }
}

/// Whether the keychain keeps what it is given: some accept a secret and lose it.
fn keychain_works() -> bool {
    let round_trip = in_time(|| {
        let entry = keyring::Entry::new(SERVICE, PROBE)?;
        entry.set_password(PROBE)?;
        let read = entry.get_password()?;
        entry.delete_credential()?;
        Ok(read == PROBE)
    });
    matches!(round_trip, Some(Ok(true)))
}

/// Runs a keychain call on a thread of its own; `None` when it takes too long.
fn in_time<T: Send + 'static>(
    call: impl FnOnce() -> keyring::Result<T> + Send + 'static,
) -> Option<keyring::Result<T>> {
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new()
        .name("keychain".to_owned())
        .spawn(move || sender.send(call()))
        .ok()?;
    receiver.recv_timeout(PATIENCE).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir() -> (tempfile::TempDir, DataDir) {
        let scratch = tempfile::tempdir().unwrap();
        let dir = DataDir::resolve_from(Some(scratch.path().to_owned()), |_| None).unwrap();
        (scratch, dir)
    }

    #[test]
    fn a_token_is_made_once_and_kept_in_a_private_file() {
        let (_scratch, dir) = dir();
        assert!(find_token(&dir, |_| None).unwrap().is_none());
        let (token, place) = load_token(&dir, |_| None).unwrap();
        assert_eq!(token.len(), 32);
        assert!(token.bytes().all(|b| b.is_ascii_alphanumeric()));
        assert_eq!(place, TokenPlace::File(dir.token_file()));
        assert_eq!(load_token(&dir, |_| None).unwrap().0, token);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = fs::metadata(dir.token_file()).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        let (_other, second) = self::dir();
        assert_ne!(load_token(&second, |_| None).unwrap().0, token);
    }

    #[test]
    fn the_environment_wins_and_leaves_no_file() {
        let (_scratch, dir) = dir();
        let env = |key: &str| (key == "SPOTTER_TOKEN").then(|| "secret-1".to_owned());
        let found = load_token(&dir, env).unwrap();
        assert_eq!(found, ("secret-1".to_owned(), TokenPlace::Environment));
        assert!(!dir.token_file().exists());
        let bad = |key: &str| (key == "SPOTTER_TOKEN").then(|| "two words".to_owned());
        assert!(matches!(
            load_token(&dir, bad),
            Err(SecretError::Unusable(_))
        ));
    }
}
