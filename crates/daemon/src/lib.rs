//! The daemon: what `spotter serve` is made of.
//!
//! # Layout
//! - [`run`]: composition, from settings to shutdown.
//! - [`serving`], [`training`], `process`: the two workers, supervised.
//! - [`learning`], [`gate`], [`schedule`]: from rated answers to a live adapter.
//! - [`control`]: the control API.
//! - [`settings`], [`secrets`], [`data_dir`]: what it is told, and where it keeps things.
//! - [`catalog`], [`download`], [`hardware`], [`connect`]: models, the machine, clients.
//!
//! Holds no tensors and links no CUDA; it survives the death of any worker.

pub mod catalog;
pub mod connect;
pub mod control;
pub mod data_dir;
pub mod download;
pub mod gate;
pub mod hardware;
pub mod learning;
mod process;
pub use process::inspect;
pub mod schedule;
pub mod secrets;
pub mod serving;
pub mod settings;
pub mod training;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use spotter_core::AdapterVersion;
use spotter_core::train::AdapterFiles;
use spotter_gateway::App;
use spotter_gateway::control::events::EventHub;
use spotter_gateway::guard::Guard;
use spotter_gateway::pool::sqlite::SqlitePool;
use spotter_store::{AdapterState, Store};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::control::{Daemon, worker_settings};
use crate::data_dir::{Connection, DataDir};
use crate::serving::Serving;
use crate::settings::RawSettings;

/// How often the schedule is looked at and the status published.
const TICK: Duration = Duration::from_secs(1);
/// How many ports after a taken one are tried for a suggestion.
const NEXT_PORTS: u16 = 50;

/// What `spotter serve` is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Settings of the command line.
    pub raw: RawSettings,
    /// Where everything is kept.
    pub data_dir: DataDir,
    /// Prints `{"url": …, "token": …}` on standard output once it listens.
    pub print_connection: bool,
    /// The built interface; `None` looks in the usual places.
    pub ui_dir: Option<PathBuf>,
    /// Opens a browser once it listens.
    pub open: bool,
}

/// Runs the daemon until `shutdown` completes, then stops everything gracefully.
///
/// # Errors
/// When the data directory is in use or newer, the port is taken, or the settings are
/// wrong; the message says what to do.
pub async fn run(
    config: Config,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let Config {
        raw,
        data_dir,
        print_connection,
        ui_dir,
        open,
    } = config;
    let store = Store::open(&data_dir.root)?;
    let environment = |name: &str| std::env::var(name).ok();
    let settings = settings::resolve(&raw, environment, |key| store.setting(key).ok().flatten())?;
    let token = if settings.no_auth {
        None
    } else {
        Some(secrets::load_token(&data_dir, environment)?)
    };

    let resolved = catalog::resolve(&settings.model, &data_dir)?;
    let Some(model) = resolved.path else {
        bail!(
            "the model {} is not on this machine; `spotter model pull {}` fetches it",
            resolved.name,
            resolved.name
        );
    };
    let listener = bind(&settings.host, settings.port).await?;
    let address = listener.local_addr()?;
    let url = format!("http://{}", reachable(address));

    // The adapters that requests may name, and the one that was live, come back.
    let adapters = store.adapters()?;
    let usable = |a: &&spotter_store::AdapterRow| {
        a.base_model == resolved.name
            && a.state != AdapterState::Rejected
            && std::path::Path::new(&a.dir).exists()
    };
    let loaded: Vec<AdapterFiles> = adapters
        .iter()
        .filter(usable)
        .map(|a| AdapterFiles {
            version: a.version,
            dir: a.dir.clone().into(),
        })
        .collect();
    let live = adapters
        .iter()
        .filter(usable)
        .find(|a| a.state == AdapterState::Live)
        .map_or(AdapterVersion::BASE, |a| a.version);
    let serving = Serving::start(
        worker_settings(&settings, model.clone(), false),
        loaded,
        live,
    );

    let events = EventHub::default();
    let guard = Guard::new(address, token.as_ref().map(|(t, _)| t.as_str()), &[])?;
    let daemon = Arc::new(Daemon::new(
        store.clone(),
        serving.clone(),
        events.clone(),
        settings,
        raw,
        data_dir.clone(),
        url.clone(),
        token.clone(),
        (resolved.name, model),
    ));
    let ui_dir = ui_dir.or_else(find_ui);
    if ui_dir.is_none() {
        tracing::warn!(
            "the interface was not found; build it with `make ui`, or set SPOTTER_UI_DIR"
        );
    }
    let app = Arc::new(App::new(
        Arc::new(SqlitePool::new(store)),
        Arc::new(serving.clone()),
        daemon.clone(),
        events,
        guard,
        ui_dir,
    ));

    data_dir.write_connection(&Connection {
        url: url.clone(),
        pid: std::process::id(),
    })?;
    let secret = token.as_ref().map(|(t, _)| t.clone()).unwrap_or_default();
    announce(&url, &secret, print_connection, open)?;

    let closing = CancellationToken::new();
    let ticking = tokio::spawn({
        let (daemon, closing) = (daemon.clone(), closing.clone());
        async move {
            let mut ticks = tokio::time::interval(TICK);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    () = closing.cancelled() => return,
                    _ = ticks.tick() => daemon.tick().await,
                }
            }
        }
    });
    let served = spotter_gateway::run(listener, app, shutdown).await;
    tracing::info!("stopping");
    closing.cancel();
    let _ = ticking.await;
    daemon.learning.shutdown().await;
    serving.shutdown().await;
    data_dir.remove_connection();
    served.context("the listener failed")
}

/// Prints where it listens: for people, or as one line of JSON for programs.
#[allow(clippy::print_stdout)]
fn announce(url: &str, token: &str, json: bool, open: bool) -> Result<()> {
    use std::io::Write;
    let page = if token.is_empty() {
        format!("{url}/")
    } else {
        format!("{url}/?token={token}")
    };
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::json!({"url": url, "token": token}))?;
    } else {
        writeln!(
            out,
            "Spotter listens on {url}\n\n  interface       {page}\n  OpenAI clients  {url}/v1\n  others          {url}\n  token           {token}\n"
        )?;
    }
    out.flush()?;
    if open {
        let opener = if cfg!(target_os = "macos") {
            "open"
        } else {
            "xdg-open"
        };
        if let Err(error) = std::process::Command::new(opener).arg(&page).spawn() {
            tracing::warn!(%error, "no browser could be opened");
        }
    }
    Ok(())
}

/// The address under which this machine reaches the listener.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => {
            SocketAddr::from(([127, 0, 0, 1], v4.port()))
        }
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => {
            SocketAddr::from(([127, 0, 0, 1], v6.port()))
        }
        other => other,
    }
}

async fn bind(host: &str, port: u16) -> Result<TcpListener> {
    match TcpListener::bind((host, port)).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            let holder = port_holder(port)
                .map(|h| format!(" by {h}"))
                .unwrap_or_default();
            let mut free = None;
            for next in port.saturating_add(1)..=port.saturating_add(NEXT_PORTS) {
                if TcpListener::bind((host, next)).await.is_ok() {
                    free = Some(next);
                    break;
                }
            }
            match free {
                Some(next) => {
                    bail!("port {port} is taken{holder}; start with `--port {next}`, which is free")
                }
                None => bail!("port {port} is taken{holder}; start with another `--port`"),
            }
        }
        Err(error) => Err(error).with_context(|| format!("cannot listen on {host}:{port}")),
    }
}

/// Who listens on a port, where the platform tells (`/proc`).
fn port_holder(port: u16) -> Option<String> {
    let mut inodes = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in std::fs::read_to_string(table)
            .unwrap_or_default()
            .lines()
            .skip(1)
        {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let local = fields
                .get(1)
                .and_then(|a| a.rsplit(':').next())
                .and_then(|p| u16::from_str_radix(p, 16).ok());
            if local == Some(port) && fields.get(3) == Some(&"0A") {
                inodes.extend(fields.get(9).map(|i| format!("socket:[{i}]")));
            }
        }
    }
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        let Ok(descriptors) = std::fs::read_dir(entry.path().join("fd")) else {
            continue;
        };
        for descriptor in descriptors.flatten() {
            let Ok(target) = std::fs::read_link(descriptor.path()) else {
                continue;
            };
            if inodes.iter().any(|i| target.as_os_str() == i.as_str()) {
                let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
                return Some(format!(
                    "{} (process {})",
                    name.trim(),
                    entry.file_name().to_string_lossy()
                ));
            }
        }
    }
    None
}

/// The built interface: `SPOTTER_UI_DIR`, beside the executable, or in the working tree.
fn find_ui() -> Option<PathBuf> {
    let mut places = Vec::new();
    places.extend(std::env::var_os("SPOTTER_UI_DIR").map(PathBuf::from));
    if let Ok(executable) = std::env::current_exe()
        && let Some(directory) = executable.parent()
    {
        places.push(directory.join("ui"));
        places.push(directory.join("../share/spotter/ui"));
        places.push(directory.join("../../ui/dist"));
    }
    places.push(PathBuf::from("ui/dist"));
    places.into_iter().find(|p| p.join("index.html").exists())
}
