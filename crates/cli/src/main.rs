//! The `spotter` command: it starts the daemon, and talks to a running one over HTTP.
//!
//! Results go to standard output, everything else to standard error. Exit codes: 0 done,
//! 1 failed with a reason, 2 misuse.

mod adapter;
mod args;
mod client;
mod connect;
mod data;
mod dataset;
mod doctor;
mod model;
mod output;
mod rate;
mod serve;
mod train;

use std::process::ExitCode;

use clap::Parser;
use serde_json::json;
use spotter_core::code::Failure;
use spotter_daemon::data_dir::DataDir;

use crate::args::{Args, Command};
use crate::client::{Client, Refused};
use crate::output::Output;

/// Misuse that only shows once the arguments are looked at together.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Misuse(String);

fn main() -> ExitCode {
    let args = Args::parse();
    let output = Output { json: args.json };
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start: {error}");
            return ExitCode::from(1);
        }
    };
    let result = runtime.block_on(run(args, output));
    // A blocking read of the keychain must not hold up the end.
    runtime.shutdown_background();
    match result {
        Ok(code) => code,
        Err(error) => report(&error, output),
    }
}

async fn run(args: Args, output: Output) -> anyhow::Result<ExitCode> {
    if let Command::Version = args.command {
        let version = env!("CARGO_PKG_VERSION");
        output.result(&json!({"version": version}), || {
            format!("spotter {version}")
        });
        return Ok(ExitCode::SUCCESS);
    }
    let data_dir = DataDir::resolve(args.data_dir)?;
    if let Command::Serve(serve) = args.command {
        return serve::run(serve, data_dir).await;
    }
    output::log_to_stderr();
    let client = || Client::find(&data_dir, args.url.as_deref());
    match args.command {
        Command::Serve(_) | Command::Version => {}
        Command::Model(command) => model::run(command, &data_dir, client, output).await?,
        Command::Connect(command) => connect::run(&command, &data_dir, client, output).await?,
        Command::Rate(command) => rate::run(command, &client()?, output).await?,
        Command::Train(command) => return train::run(command, &client()?, output).await,
        Command::Adapter(command) => adapter::run(command, &client()?, output).await?,
        Command::Data(command) => data::run(command, &client()?, output).await?,
        Command::Doctor => return doctor::run(&data_dir, client(), output).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// Says why it failed: in words on standard error, and with `--json` as an object on
/// standard output too.
fn report(error: &anyhow::Error, output: Output) -> ExitCode {
    eprintln!("error: {error:#}");
    if output.json {
        let code = if let Some(refused) = error.downcast_ref::<Refused>() {
            refused.code.clone()
        } else if let Some(failure) = error.downcast_ref::<Failure>() {
            failure.code.as_str().to_owned()
        } else {
            "failed".to_owned()
        };
        let message = format!("{error:#}");
        output.line(&json!({"error": {"code": code, "message": message}}).to_string());
    }
    ExitCode::from(if error.is::<Misuse>() { 2 } else { 1 })
}
