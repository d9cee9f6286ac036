//! `spotter serve`: fetches the model if it must, then runs the daemon.

use std::io;
use std::process::ExitCode;

use anyhow::{Context, Result};
use spotter_daemon::Config;
use spotter_daemon::catalog;
use spotter_daemon::data_dir::DataDir;
use spotter_daemon::settings::{self, RawSettings, Schedule};
use spotter_store::Store;
use tokio_util::sync::CancellationToken;
use tracing_appender::non_blocking::WorkerGuard;
use tracing_appender::rolling::{RollingFileAppender, Rotation};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::{args, model, output};

/// Days of logs that are kept.
const LOG_FILES: usize = 7;

pub(crate) async fn run(args: args::Serve, data_dir: DataDir) -> Result<ExitCode> {
    let _log = log(&data_dir)?;
    let raw = RawSettings {
        host: args.host,
        port: args.port,
        model: args.model,
        no_auth: args.no_auth.then_some(true),
        device: args.device,
        context_length: args.context_length,
        schedule: args.schedule.map(|schedule| match schedule {
            args::Policy::Always => Schedule::Always,
            args::Policy::Idle => Schedule::Idle,
            args::Policy::Schedule => Schedule::Schedule,
            args::Policy::Manual => Schedule::Manual,
        }),
        ..RawSettings::default()
    };
    let stop = stop_signal();
    // Wrong settings and a directory in use come to light before a long download.
    let settings = {
        let store = Store::open(&data_dir.root)?;
        let env = |key: &str| std::env::var(key).ok();
        settings::resolve(&raw, env, |key| store.setting(key).ok().flatten())?
    };
    let found = catalog::resolve(&settings.model, &data_dir)?;
    if let (None, Some(entry)) = (found.path, found.entry) {
        tracing::info!("fetching the model {}", entry.name);
        model::fetch(entry, &data_dir, stop.clone()).await?;
    }
    let config = Config {
        raw,
        data_dir,
        print_connection: args.print_connection,
        ui_dir: args.ui_dir,
        open: args.open,
    };
    spotter_daemon::run(config, stop.cancelled_owned()).await?;
    Ok(ExitCode::SUCCESS)
}

/// Cancelled by the first SIGINT or SIGTERM; the second ends the process at once.
fn stop_signal() -> CancellationToken {
    let token = CancellationToken::new();
    let stop = token.clone();
    tokio::spawn(async move {
        signal().await;
        tracing::info!("stopping; once more stops at once");
        stop.cancel();
        signal().await;
        std::process::exit(130);
    });
    token
}

#[cfg(unix)]
async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
        }
        Err(_) => {
            let _ = tokio::signal::ctrl_c().await;
        }
    }
}

#[cfg(not(unix))]
async fn signal() {
    let _ = tokio::signal::ctrl_c().await;
}

/// The log goes to standard error and to a file a day.
fn log(data_dir: &DataDir) -> Result<WorkerGuard> {
    data_dir.create(&data_dir.logs())?;
    let files = RollingFileAppender::builder()
        .rotation(Rotation::DAILY)
        .filename_prefix("spotter")
        .filename_suffix("log")
        .max_log_files(LOG_FILES)
        .build(data_dir.logs())
        .context("the log file cannot be opened")?;
    let (files, guard) = tracing_appender::non_blocking(files);
    let terminal = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    let terminal = terminal.with_ansi(io::IsTerminal::is_terminal(&io::stderr()));
    tracing_subscriber::registry()
        .with(output::log_filter("info"))
        .with(terminal)
        .with(
            tracing_subscriber::fmt::layer()
                .with_writer(files)
                .with_ansi(false),
        )
        .try_init()
        .context("the log cannot be started")?;
    Ok(guard)
}
