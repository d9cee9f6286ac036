//! `spotter-worker`: the serving and training engines behind JSON lines.
//!
//! Commands come on standard input, reports go to standard output, one JSON object per
//! line; the log goes to standard error. The end of standard input is the end of the
//! worker, so no worker outlives its daemon. See `spotter_core::worker` for the protocol.

mod exchange;
mod serve;
mod train;

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use spotter_core::Code;
use spotter_core::code::Failure;
use spotter_core::worker::{Command, PROTOCOL, Report, WorkerRole, WorkerSettings};

use crate::exchange::Exchange;
use crate::serve::Loaded;
use crate::train::TrainerThread;

/// How often a worker says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long answers may take to end when the daemon has gone.
const ORPHAN_GRACE: Duration = Duration::from_millis(200);

/// Serving and training engines of Spotter; started by the daemon.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// `serve`, `train` or `serve,train`.
    #[arg(
        long,
        value_delimiter = ',',
        required_unless_present = "inspect",
        conflicts_with = "inspect"
    )]
    role: Vec<String>,
    /// Load a model, print an `Inspection` as JSON, and end.
    #[arg(long, value_name = "PATH")]
    inspect: Option<PathBuf>,
}

fn main() -> Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_from_env("SPOTTER_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let arguments = Arguments::parse();
    if let Some(path) = arguments.inspect {
        let inspection = serve::inspect(&path);
        println!("{}", serde_json::to_string(&inspection)?);
        return Ok(());
    }
    let roles = arguments
        .role
        .iter()
        .map(|role| match role.as_str() {
            "serve" => Ok(WorkerRole::Serve),
            "train" => Ok(WorkerRole::Train),
            other => anyhow::bail!("'{other}' is not a role; serve and train are"),
        })
        .collect::<Result<Vec<_>>>()?;

    let (reports, outbox) = channel();
    let writer = std::thread::Builder::new()
        .name("writer".into())
        .spawn(move || write(&outbox))?;
    let mut worker = Worker {
        roles,
        reports: reports.clone(),
        loaded: None,
        trainer: None,
        exchange: Exchange::default(),
    };
    let beat = std::thread::Builder::new().name("heartbeat".into());
    let counters = Arc::new(serve::Counters::default());
    let shared = counters.clone();
    beat.spawn(move || heartbeat(&reports, &shared))?;

    let mut grace = ORPHAN_GRACE;
    for line in std::io::stdin().lock().lines() {
        let line = line.context("the daemon's pipe broke")?;
        match serde_json::from_str::<Command>(&line) {
            Ok(Command::Shutdown { grace_ms }) => {
                grace = Duration::from_millis(grace_ms);
                break;
            }
            Ok(command) => worker.obey(command, &counters),
            Err(error) => tracing::error!(%error, "a command was not understood"),
        }
    }
    worker.close(grace);
    counters.close();
    // The writer ends when the last sender is gone; the heartbeat's is dropped by `close`.
    let _ = writer.join();
    Ok(())
}

/// Writes reports, a line each; what is queued is flushed together.
fn write(outbox: &Receiver<Report>) {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut next = outbox.recv();
    while let Ok(report) = next {
        let written = serde_json::to_writer(&mut out, &report)
            .map_err(std::io::Error::from)
            .and_then(|()| out.write_all(b"\n"));
        if let Err(error) = written {
            // Nobody is there to report to; the closed standard input ends the worker.
            tracing::error!(%error, "the daemon does not read any more");
            return;
        }
        next = match outbox.try_recv() {
            Ok(report) => Ok(report),
            Err(_) => {
                if out.flush().is_err() {
                    return;
                }
                outbox.recv()
            }
        };
    }
}

fn heartbeat(reports: &Sender<Report>, counters: &serve::Counters) {
    while !counters.wait_closed(HEARTBEAT) {
        let beat = Report::Heartbeat {
            resident: resident_bytes(),
            serve: counters.get(),
        };
        if reports.send(beat).is_err() {
            return;
        }
    }
}

/// Resident memory of this process; 0 where the platform does not tell.
fn resident_bytes() -> u64 {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else {
        return 0;
    };
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .and_then(|kb| kb.trim().parse::<u64>().ok())
        .map_or(0, |kb| kb * 1024)
}

struct Worker {
    roles: Vec<WorkerRole>,
    reports: Sender<Report>,
    loaded: Option<Loaded>,
    trainer: Option<TrainerThread>,
    exchange: Exchange,
}

impl Worker {
    fn report(&self, report: Report) {
        // A closed pipe is noticed by the reading side.
        let _ = self.reports.send(report);
    }

    fn start(&mut self, protocol: u32, settings: &WorkerSettings) -> Result<(), Failure> {
        if protocol != PROTOCOL {
            return Err(Failure::new(
                Code::Conflict,
                format!(
                    "this worker speaks protocol {PROTOCOL}, the daemon {protocol}; they are of different versions"
                ),
            ));
        }
        let (loaded, facts) = Loaded::load(settings, &self.roles, self.reports.clone())?;
        self.loaded = Some(loaded);
        self.report(Report::Ready {
            protocol: PROTOCOL,
            roles: self.roles.clone(),
            model: Box::new(facts),
        });
        Ok(())
    }

    fn obey(&mut self, command: Command, counters: &serve::Counters) {
        if let Command::Start { protocol, settings } = &command {
            if let Err(failure) = self.start(*protocol, settings) {
                self.report(Report::LoadFailed { failure });
            }
            counters.follow(self.loaded.as_ref().and_then(Loaded::engine));
            return;
        }
        match command {
            Command::Train { request } => self.train(*request),
            Command::PauseTraining => self.with_trainer(TrainerThread::pause),
            Command::ResumeTraining => self.with_trainer(TrainerThread::resume),
            Command::CancelTraining => self.with_trainer(TrainerThread::cancel),
            Command::Serving { active } => self.with_trainer(|t| t.set_serving(active)),
            other => serve::obey(self.loaded.as_ref(), &self.exchange, &self.reports, other),
        }
    }

    fn with_trainer(&self, act: impl Fn(&TrainerThread)) {
        if let Some(trainer) = &self.trainer {
            act(trainer);
        }
    }

    fn train(&mut self, request: spotter_core::train::TrainRequest) {
        let run = request.run;
        let refuse = |code, text: &str| Report::TrainEnded {
            run,
            result: spotter_core::train::TrainResult::Failed {
                failure: Failure::new(code, text),
                dropped: Vec::new(),
            },
        };
        let Some(loaded) = &self.loaded else {
            return self.report(refuse(
                Code::Unavailable,
                "no model is loaded; nothing was trained",
            ));
        };
        if self.trainer.as_ref().is_some_and(TrainerThread::is_running) {
            return self.report(refuse(Code::Conflict, "a run is under way already"));
        }
        let reports = self.reports.clone();
        let started = TrainerThread::start(loaded.model(), request, move |report| {
            let _ = reports.send(report);
        });
        match started {
            Ok(trainer) => self.trainer = Some(trainer),
            Err(error) => self.report(refuse(
                Code::Internal,
                &format!("no thread for the run: {error}"),
            )),
        }
    }

    /// Ends the run at its last checkpoint, lets answers finish, frees everything.
    fn close(mut self, grace: Duration) {
        if let Some(trainer) = self.trainer.take() {
            trainer.stop();
        }
        self.exchange.close();
        if let Some(loaded) = self.loaded.take() {
            loaded.close(grace);
        }
    }
}
