//! Where a daemon is and how to speak to it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Deserialize;
use tauri::Url;

/// The address of a running daemon and the token it accepts: also the line that
/// `spotter serve --print-connection` writes.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Connection {
    /// Such as `http://127.0.0.1:8100`.
    pub(crate) url: Url,
    /// The bearer token; empty when the daemon needs none.
    #[serde(default)]
    pub(crate) token: String,
}

impl Connection {
    /// The page to show. The UI takes the token out of the address at once.
    pub(crate) fn page(&self) -> Url {
        let mut page = self.url.clone();
        if !self.token.is_empty() {
            page.query_pairs_mut().append_pair("token", &self.token);
        }
        page
    }

    /// An address below the daemon's.
    pub(crate) fn at(&self, path: &str) -> Url {
        let mut url = self.url.clone();
        url.set_path(path);
        url
    }
}

/// The HTTP client of the shell: short patience, no proxy, since it speaks to this machine only.
///
/// # Errors
/// Fails when the TLS library cannot be initialised.
pub(crate) fn client() -> anyhow::Result<reqwest::Client> {
    reqwest::Client::builder()
        .no_proxy()
        .connect_timeout(Duration::from_secs(2))
        .build()
        .context("cannot set up HTTP")
}

/// Where the daemon keeps its data, by the same rule as the daemon.
pub(crate) fn data_dir(default: Option<PathBuf>) -> Option<PathBuf> {
    match std::env::var_os("SPOTTER_DATA_DIR") {
        Some(dir) if !dir.is_empty() => Some(PathBuf::from(dir)),
        _ => default.map(|dir| dir.join("spotter")),
    }
}

/// Finds a daemon that runs already: `None` when nothing answers at its address.
///
/// # Errors
/// Fails when a Spotter answers there and does not accept the token that is known here.
pub(crate) async fn find(data_dir: Option<&Path>) -> anyhow::Result<Option<Connection>> {
    let url = std::env::var("SPOTTER_URL").unwrap_or_else(|_| "http://127.0.0.1:8100".to_owned());
    let connection = Connection {
        url: url
            .parse()
            .with_context(|| format!("SPOTTER_URL is not an address: {url}"))?,
        token: token(data_dir).unwrap_or_default(),
    };
    let client = client()?;
    let Ok(health) = client.get(connection.at("/healthz")).send().await else {
        return Ok(None);
    };
    if !health.status().is_success() {
        return Ok(None);
    }
    let status = client
        .get(connection.at("/api/v1/status"))
        .bearer_auth(&connection.token)
        .send()
        .await
        .with_context(|| format!("what answers at {url} does not speak as Spotter does"))?;
    match status.status().as_u16() {
        200 => Ok(Some(connection)),
        401 | 403 => bail!(
            "A Spotter runs at {url} already and does not accept the token known here. \
             Set SPOTTER_TOKEN or SPOTTER_DATA_DIR as it was started with, or stop it."
        ),
        _ => Ok(None),
    }
}

/// The token by the daemon's rule: the environment, then the file in its data.
fn token(data_dir: Option<&Path>) -> Option<String> {
    let given = std::env::var("SPOTTER_TOKEN").ok();
    given
        .or_else(|| std::fs::read_to_string(data_dir?.join("token")).ok())
        .map(|token| token.trim().to_owned())
        .filter(|token| !token.is_empty())
}

#[cfg(test)]
mod tests {
    use super::Connection;

    fn connection(token: &str) -> Connection {
        serde_json::from_str(&format!(
            r#"{{"url":"http://127.0.0.1:8123","token":"{token}"}}"#
        ))
        .expect("a connection line")
    }

    #[test]
    fn the_page_carries_the_token_and_escapes_it() {
        assert_eq!(
            connection("a b&c").page().as_str(),
            "http://127.0.0.1:8123/?token=a+b%26c"
        );
        assert_eq!(connection("").page().as_str(), "http://127.0.0.1:8123/");
    }

    #[test]
    fn paths_replace_the_page() {
        assert_eq!(
            connection("x").at("/healthz").as_str(),
            "http://127.0.0.1:8123/healthz"
        );
    }

    #[test]
    fn a_daemon_without_token_is_understood() {
        let line = r#"{"url":"http://127.0.0.1:8100"}"#;
        let connection: Connection = serde_json::from_str(line).expect("a connection line");
        assert!(connection.token.is_empty());
    }
}
