//! `spotter adapter`.

use std::convert::Infallible;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use futures::StreamExt;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use spotter_daemon::catalog::size;

use crate::args::Adapter;
use crate::client::{Client, part};
use crate::output::{Output, share_bar, table, text};

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
            let estimate = client.get(&format!("{path}?format={format}")).await?;
            let bytes = estimate["bytes"].as_u64().unwrap_or(0);
            let bar = share_bar();
            bar.set_message(format!("{version}, about {}", size(bytes)));
            // Ctrl-C closes the connection, which calls the export off.
            let exported = tokio::select! {
                exported = client.post(&path, &request) => exported,
                never = follow(client, format, &bar) => match never {},
            };
            bar.finish_and_clear();
            let exported = exported?;
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

/// Moves the bar as the daemon reports progress, for as long as it is waited for.
async fn follow(client: &Client, format: &str, bar: &ProgressBar) -> Infallible {
    if let Ok(response) = client.stream("events").await {
        let mut body = response.bytes_stream();
        let mut pending = Vec::new();
        while let Some(Ok(chunk)) = body.next().await {
            pending.extend_from_slice(&chunk);
            while let Some(end) = pending.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                let event: Value = std::str::from_utf8(&line)
                    .ok()
                    .and_then(|line| line.strip_prefix("data: "))
                    .and_then(|data| serde_json::from_str(data).ok())
                    .unwrap_or_default();
                if event["type"] == "export" && event["format"] == format {
                    let share = event["fraction"].as_f64().unwrap_or(0.0).clamp(0.0, 1.0);
                    bar.set_position((share * 1000.0) as u64);
                }
            }
        }
    }
    std::future::pending().await
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
