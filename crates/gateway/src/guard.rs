//! Who may speak to the gateway: the bearer token, `Host` and `Origin`.
//!
//! `Host` is checked against DNS rebinding, `Origin` against pages of other
//! sites; CORS stays closed, so no other site can read an answer.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use sha2::{Digest, Sha256};
use spotter_core::Code;
use spotter_core::code::Failure;

use crate::App;
use crate::error::{self, Form};

/// The rules of one listener.
pub struct Guard {
    /// The address it listens on.
    pub address: SocketAddr,
    /// Digest of the token; `None` lets everyone in, on loopback only.
    token: ArcSwapOption<[u8; 32]>,
    /// Host names besides `localhost` and IP addresses, in lower case.
    hosts: Vec<String>,
}

/// A listener that anyone on the network could use.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0} is reachable from other machines, and no token is set; set a token or listen on 127.0.0.1"
)]
pub struct OpenToTheNetwork(pub SocketAddr);

impl Guard {
    /// The rules for a listener on `address`. `hosts` are further host names under
    /// which it is reached.
    ///
    /// # Errors
    /// Without a token only loopback addresses are allowed.
    pub fn new(
        address: SocketAddr,
        token: Option<&str>,
        hosts: &[String],
    ) -> Result<Self, OpenToTheNetwork> {
        let token = token.filter(|token| !token.is_empty());
        if token.is_none() && !address.ip().is_loopback() {
            return Err(OpenToTheNetwork(address));
        }
        Ok(Self {
            address,
            token: ArcSwapOption::from(token.map(|t| Arc::new(digest(t)))),
            hosts: hosts.iter().map(|h| h.to_ascii_lowercase()).collect(),
        })
    }

    /// Replaces the token; requests in flight are not affected.
    ///
    /// # Errors
    /// As for [`Guard::new`].
    pub fn set_token(&self, token: Option<&str>) -> Result<(), OpenToTheNetwork> {
        let token = token.filter(|token| !token.is_empty());
        if token.is_none() && !self.address.ip().is_loopback() {
            return Err(OpenToTheNetwork(self.address));
        }
        self.token.store(token.map(|t| Arc::new(digest(t))));
        Ok(())
    }

    fn check(&self, method: &Method, path: &str, headers: &HeaderMap) -> Result<(), Failure> {
        let host = headers
            .get(header::HOST)
            .and_then(|value| value.to_str().ok());
        if !host.is_none_or(|host| self.knows(host)) {
            return Err(Failure::new(
                Code::Forbidden,
                "This Host is not allowed; add it to the allowed hosts in the settings.",
            ));
        }
        if let Some(origin) = headers.get(header::ORIGIN) {
            let origin = origin.to_str().unwrap_or_default();
            if !is_own(origin, host) {
                return Err(Failure::new(
                    Code::Forbidden,
                    "Requests from other sites are not allowed.",
                ));
            }
        }
        if is_open(method, path) || (path == "/metrics" && self.address.ip().is_loopback()) {
            return Ok(());
        }
        let expected = self.token.load();
        let Some(expected) = expected.as_deref() else {
            return Ok(());
        };
        // Digests have one length and reveal nothing of the token by the time they take.
        match presented(headers) {
            Some(token) if digest(token) == *expected => Ok(()),
            _ => Err(Failure::new(
                Code::Unauthorized,
                "The token is missing or wrong; `spotter connect` shows how to set it.",
            )),
        }
    }

    fn knows(&self, host: &str) -> bool {
        let name = host_name(host).to_ascii_lowercase();
        name == "localhost"
            || name.ends_with(".localhost")
            || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
            || self.hosts.contains(&name)
    }
}

fn digest(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

/// A `Host` without its port.
fn host_name(host: &str) -> &str {
    if host.starts_with('[') {
        return host.find(']').map_or(host, |end| &host[..=end]);
    }
    host.rsplit_once(':').map_or(host, |(name, _)| name)
}

/// Whether an origin is this server's own, or the desktop window.
fn is_own(origin: &str, host: Option<&str>) -> bool {
    let shell = [
        "tauri://localhost",
        "http://tauri.localhost",
        "https://tauri.localhost",
    ];
    if shell.contains(&origin) {
        return true;
    }
    let site = origin
        .strip_prefix("http://")
        .or_else(|| origin.strip_prefix("https://"));
    site.is_some() && site == host
}

/// The token a request carries, as OpenAI, Anthropic and Ollama clients send it.
fn presented(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
    bearer.or_else(|| {
        headers
            .get("x-api-key")
            .and_then(|value| value.to_str().ok())
    })
}

/// What needs no token: health, and the interface's own files, which hold no data.
fn is_open(method: &Method, path: &str) -> bool {
    if matches!(path, "/healthz" | "/readyz" | "/ready" | "/api/hello") {
        return true;
    }
    let reads = method == Method::GET || method == Method::HEAD;
    reads && !path.starts_with("/v1") && !path.starts_with("/api") && path != "/metrics"
}

/// The middleware in front of every route.
pub(crate) async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    match app.guard.check(request.method(), path, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(failure) => error::response(Form::of_path(path), &failure),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue, Method};
    use spotter_core::Code;

    use super::Guard;

    fn guard(token: Option<&str>) -> Guard {
        let address = "127.0.0.1:8100".parse().expect("an address");
        Guard::new(address, token, &["Box.lan".into()]).expect("loopback")
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.insert(*name, HeaderValue::from_str(value).expect("a value"));
        }
        headers
    }

    #[test]
    fn another_address_needs_a_token() {
        let address = "0.0.0.0:8100".parse().expect("an address");
        assert!(Guard::new(address, None, &[]).is_err());
        assert!(Guard::new(address, Some(""), &[]).is_err());
        assert!(Guard::new(address, Some("t"), &[]).is_ok());
    }

    #[test]
    fn the_token_is_taken_in_both_headers() {
        let guard = guard(Some("secret"));
        let check = |pairs: &[(&'static str, &str)]| {
            guard
                .check(&Method::POST, "/v1/chat/completions", &headers(pairs))
                .map_err(|f| f.code)
        };
        assert_eq!(check(&[("authorization", "Bearer secret")]), Ok(()));
        assert_eq!(check(&[("x-api-key", "secret")]), Ok(()));
        assert_eq!(
            check(&[("authorization", "Bearer wrong")]),
            Err(Code::Unauthorized)
        );
        assert_eq!(check(&[]), Err(Code::Unauthorized));
    }

    #[test]
    fn foreign_hosts_and_origins_are_refused() {
        let guard = guard(None);
        let check = |pairs: &[(&'static str, &str)]| {
            guard
                .check(&Method::GET, "/api/v1/status", &headers(pairs))
                .map_err(|f| f.code)
        };
        for host in [
            "localhost:8100",
            "127.0.0.1:8100",
            "[::1]:8100",
            "box.lan:1",
            "10.0.0.2",
        ] {
            assert_eq!(check(&[("host", host)]), Ok(()), "{host}");
        }
        assert_eq!(
            check(&[("host", "evil.example:8100")]),
            Err(Code::Forbidden)
        );
        let host = ("host", "127.0.0.1:8100");
        assert_eq!(check(&[host, ("origin", "http://127.0.0.1:8100")]), Ok(()));
        assert_eq!(check(&[host, ("origin", "tauri://localhost")]), Ok(()));
        for origin in ["https://evil.example", "null", "http://127.0.0.1:3000"] {
            assert_eq!(
                check(&[host, ("origin", origin)]),
                Err(Code::Forbidden),
                "{origin}"
            );
        }
    }

    #[test]
    fn health_and_the_interface_need_no_token() {
        let guard = guard(Some("secret"));
        for path in ["/healthz", "/readyz", "/", "/assets/app.js"] {
            assert!(
                guard.check(&Method::GET, path, &HeaderMap::new()).is_ok(),
                "{path}"
            );
        }
        for path in ["/v1/models", "/api/v1/status", "/api/tags"] {
            assert!(
                guard.check(&Method::GET, path, &HeaderMap::new()).is_err(),
                "{path}"
            );
        }
        assert!(
            guard
                .check(&Method::POST, "/init_trajectory", &HeaderMap::new())
                .is_err()
        );
    }
}
