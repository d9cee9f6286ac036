//! `spotter adapter`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde_json::{Value, json};
use spotter_daemon::catalog::size;

use crate::args::Adapter;
use crate::client::{Client, part};
use crate::output::{Output, table, text};

pub(crate) async fn run(command: Adapter, client: &Client, output: Output) -> Result<()> {
    match command {
        Adapter::List => {
            let list = client.get("adapters").await?;
            output.result(&list, || words(&list));
        }
        Adapter::Show { version } => {
            let adapter = client.get(&format!("adapters/{}", part(&version)?)).await?;
            output.result(&adapter, || {
                serde_json::to_string_pretty(&adapter).unwrap_or_default()
            });
        }
        Adapter::Activate { version } => {
            let path = format!("adapters/{}/activate", part(&version)?);
            let list = client.post(&path, &json!({})).await?;
            output.result(&list, || format!("{} is live.", text(&list, "live")));
        }
        Adapter::Rollback => {
            let list = client.post("adapters/rollback", &json!({})).await?;
            output.result(&list, || format!("{} is live.", text(&list, "live")));
        }
        Adapter::Export {
            version,
            format,
            out,
        } => {
            let format = format.to_possible_value();
            let format = format.as_ref().map_or("peft", |value| value.get_name());
            let out = out.as_deref().map(absolute).transpose()?;
            let path = format!("adapters/{}/export", part(&version)?);
            let request = json!({"format": format, "out": out});
            let exported = client.post(&path, &request).await?;
            output.result(&exported, || {
                let bytes = exported["bytes"].as_u64().unwrap_or(0);
                format!("{} ({})", text(&exported, "path"), size(bytes))
            });
        }
        Adapter::Import { path, force } => {
            let request = json!({"path": absolute(&path)?, "force": force});
            let adapter = client.post("adapters/import", &request).await?;
            output.result(&adapter, || {
                let version = text(&adapter, "version");
                format!(
                    "Imported as {version}; `spotter adapter activate {version}` makes it live."
                )
            });
        }
        Adapter::Prune => {
            let pruned = client.post("adapters/prune", &json!({})).await?;
            output.result(&pruned, || {
                let count = pruned["removed"].as_array().map_or(0, Vec::len);
                let bytes = pruned["freed_bytes"].as_u64().unwrap_or(0);
                format!("{count} removed, {} freed.", size(bytes))
            });
        }
    }
    Ok(())
}

/// The daemon has a working directory of its own.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("{} is no path", path.display()))
}

fn words(list: &Value) -> String {
    let rows: Vec<_> = list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|item| {
            let approval = &item["approval"];
            vec![
                text(item, "version").to_owned(),
                text(item, "state").to_owned(),
                item["parent"].as_str().unwrap_or("-").to_owned(),
                item["steps_used"].to_string(),
                match (approval["up"].as_u64(), approval["down"].as_u64()) {
                    (Some(up), Some(down)) => format!("{up} up, {down} down"),
                    _ => "-".to_owned(),
                },
                size(item["size_bytes"].as_u64().unwrap_or(0)),
            ]
        })
        .collect();
    let header = ["VERSION", "STATE", "FROM", "ANSWERS", "RATED", "SIZE"];
    format!("Live: {}\n{}", text(list, "live"), table(&header, &rows))
}
