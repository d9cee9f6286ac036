//! `spotter model`: models in the data directory, with or without a daemon.

use std::path::PathBuf;

use anyhow::Result;
use serde_json::{Value, json};
use spotter_core::Code;
use spotter_core::code::Failure;
use spotter_daemon::catalog::{self, Catalog, Entry};
use spotter_daemon::data_dir::DataDir;
use spotter_daemon::download::{self, Phase, Progress};
use spotter_daemon::hardware;
use tokio_util::sync::CancellationToken;

use crate::args::Model;
use crate::client::{Client, part};
use crate::output::{self, Output};

pub(crate) async fn run(
    command: Model,
    data_dir: &DataDir,
    client: impl Fn() -> Result<Client>,
    output: Output,
) -> Result<()> {
    match command {
        Model::List => list(data_dir, output),
        Model::Pull { name } => {
            let entry = Catalog::embedded().get(&name).ok_or_else(|| {
                Failure::new(
                    Code::ModelNotFound,
                    format!("'{name}' is not in the catalogue; `spotter model list` shows it."),
                )
            })?;
            let cancel = CancellationToken::new();
            let stop = cancel.clone();
            tokio::spawn(async move {
                if tokio::signal::ctrl_c().await.is_ok() {
                    stop.cancel();
                }
            });
            let path = fetch(entry, data_dir, cancel).await?;
            let size = path.metadata().map_or(0, |metadata| metadata.len());
            output.result(
                &json!({"name": name, "path": path, "size_bytes": size}),
                || format!("{name} is installed."),
            );
        }
        Model::Import { path } => {
            spotter_daemon::inspect(&path).await?;
            let taken = catalog::import(&path, data_dir)?;
            output.result(
                &json!({"name": taken.name, "path": taken.path, "size_bytes": taken.size_bytes}),
                || {
                    format!(
                        "Imported as {name}; serve it with `spotter serve --model {name}`.",
                        name = taken.name
                    )
                },
            );
        }
        Model::Remove { name } => {
            // A running daemon knows whether the model is in use.
            let running = match client() {
                Ok(client) if client.get("status").await.is_ok() => Some(client),
                _ => None,
            };
            match running {
                Some(client) => {
                    client.delete(&format!("models/{}", part(&name)?)).await?;
                }
                None => catalog::remove(&name, data_dir)?,
            }
            output.result(&json!({"removed": name}), || format!("{name} is removed."));
        }
    }
    Ok(())
}

/// Downloads a model behind a progress bar.
pub(crate) async fn fetch(
    entry: &Entry,
    data_dir: &DataDir,
    cancel: CancellationToken,
) -> Result<PathBuf> {
    let bar = output::byte_bar(&entry.name, entry.size_bytes());
    let shown = bar.clone();
    let report = move |progress: Progress| {
        if progress.total > 0 {
            shown.set_length(progress.total);
        }
        shown.set_position(progress.done);
        if progress.phase == Phase::Verifying {
            shown.set_message(format!("{} (checking)", entry.name));
        }
    };
    let fetched = download::fetch(entry, data_dir, report, cancel).await;
    bar.finish_and_clear();
    Ok(fetched?)
}

fn list(data_dir: &DataDir, output: Output) {
    let machine = hardware::probe(&data_dir.root);
    let rows = catalog::listing(&catalog::installed(data_dir), &machine);
    let items: Vec<Value> = rows.iter().map(|row| json!(row)).collect();
    output.result(
        &json!({"items": items, "hardware": machine.to_json()}),
        || {
            let cells: Vec<_> = rows
                .iter()
                .map(|row| {
                    vec![
                        row.name.clone(),
                        row.state.clone(),
                        catalog::size(row.size_bytes),
                        row.fits.serve.clone(),
                        row.fits.train.clone(),
                        row.licence.clone(),
                    ]
                })
                .collect();
            output::table(
                &["NAME", "STATE", "SIZE", "SERVES", "TRAINS", "LICENCE"],
                &cells,
            )
        },
    );
}
