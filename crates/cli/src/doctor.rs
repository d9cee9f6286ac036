//! `spotter doctor`: the daemon's checks, or those that can be made without one.

use std::process::ExitCode;

use anyhow::Result;
use serde_json::{Value, json};
use spotter_daemon::data_dir::DataDir;
use spotter_daemon::{catalog, hardware};
use spotter_gateway::control::dto::{Check, Doctor};

use crate::client::{Client, Refused};
use crate::output::{Output, text};

/// Less free disk than this is worth a warning.
const LITTLE: u64 = 1 << 30;

pub(crate) async fn run(
    data_dir: &DataDir,
    client: Result<Client>,
    output: Output,
) -> Result<ExitCode> {
    let asked = match client {
        Ok(client) => client.get("doctor").await,
        Err(error) => Err(error),
    };
    let found = match asked {
        Ok(found) => found,
        Err(error) if error.is::<Refused>() => return Err(error),
        Err(error) => json!(Doctor {
            checks: alone(data_dir, &error)
        }),
    };
    let checks = || found["checks"].as_array().into_iter().flatten();
    output.result(&found, || {
        let line = |check: &Value| {
            let mark = match (check["ok"].as_bool(), text(check, "level")) {
                (Some(true), _) => "ok   ",
                (_, "error") => "error",
                _ => "note ",
            };
            let advice = match check["advice"].as_str() {
                Some(advice) => format!("\n       {advice}"),
                None => String::new(),
            };
            format!(
                "{mark}  {}: {}{advice}",
                text(check, "name"),
                text(check, "message")
            )
        };
        checks().map(line).collect::<Vec<_>>().join("\n")
    });
    let broken = checks().any(|check| check["ok"] == false && text(check, "level") == "error");
    Ok(ExitCode::from(u8::from(broken)))
}

/// What can be said without a daemon.
fn alone(data_dir: &DataDir, why: &anyhow::Error) -> Vec<Check> {
    let machine = hardware::probe(&data_dir.root);
    let models = catalog::installed(data_dir);
    let names: Vec<_> = models.iter().map(|model| model.name.as_str()).collect();
    let gpus: Vec<_> = machine.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
    vec![
        Check {
            level: "error".to_owned(),
            ..Check::new(
                "daemon",
                false,
                format!("{why:#}"),
                Some("Start it with `spotter serve`."),
            )
        },
        Check::new(
            "data directory",
            true,
            data_dir.root.display().to_string(),
            None,
        ),
        Check::new(
            "disk",
            machine.disk_free_bytes > LITTLE,
            format!("{} free", catalog::size(machine.disk_free_bytes)),
            Some("Free some space: adapters and recordings need it."),
        ),
        Check::new(
            "machine",
            true,
            format!(
                "{} cores, {} of {} memory free, {}",
                machine.cores,
                catalog::size(machine.memory_free_bytes),
                catalog::size(machine.memory_bytes),
                if gpus.is_empty() {
                    "no NVIDIA GPU".to_owned()
                } else {
                    gpus.join(", ")
                },
            ),
            None,
        ),
        Check::new(
            "models",
            !names.is_empty(),
            if names.is_empty() {
                "none installed".to_owned()
            } else {
                names.join(", ")
            },
            Some("`spotter serve` fetches the default model."),
        ),
    ]
}
