//! `spotter data`.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use futures::StreamExt;
use serde_json::{Value, json};

use crate::args::{Data, DataFormat, Forget};
use crate::client::{Client, part};
use crate::dataset::Dataset;
use crate::output::Output;
use crate::{Misuse, output};

/// An import is sent in parts, because the daemon limits the size of a request.
const PART: usize = 8 << 20;

pub(crate) async fn run(command: Data, client: &Client, output: Output) -> Result<()> {
    match command {
        Data::Stats => {
            let stats = client.get("data/stats").await?;
            output.result(&stats, || {
                serde_json::to_string_pretty(&stats).unwrap_or_default()
            });
        }
        Data::Export { format, out } => match format {
            DataFormat::Jsonl => export(client, out.as_deref(), output).await?,
            format => export_rated(client, format, out.as_deref(), output).await?,
        },
        Data::Import { file } => import(client, &file, output).await?,
        Data::Forget(what) => forget(client, what, output).await?,
    }
    Ok(())
}

async fn export(client: &Client, out: Option<&Path>, output: Output) -> Result<()> {
    let mut body = client.stream("data/export").await?.bytes_stream();
    let Some(path) = out else {
        while let Some(chunk) = body.next().await {
            output.bytes(&chunk.context("the export broke off")?);
        }
        return Ok(());
    };
    let cannot = || format!("cannot write {}", path.display());
    let (partial, mut file) = begin(path).with_context(cannot)?;
    let mut lines = 0;
    while let Some(chunk) = body.next().await {
        let chunk = chunk.context("the export broke off")?;
        lines += chunk.iter().filter(|&&byte| byte == b'\n').count();
        file.write_all(&chunk).with_context(cannot)?;
    }
    finish(file, &partial, path).with_context(cannot)?;
    output.result(&json!({"path": path, "lines": lines}), || {
        format!("{lines} lines are in {}.", path.display())
    });
    Ok(())
}

/// Writes the rated answers in the form of another trainer.
async fn export_rated(
    client: &Client,
    format: DataFormat,
    out: Option<&Path>,
    output: Output,
) -> Result<()> {
    if format == DataFormat::Verl && out.is_none() {
        return Err(Misuse("a parquet file needs --out FILE".to_owned()).into());
    }
    let mut body = client.stream("data/export").await?.bytes_stream();
    let mut dataset = Dataset::default();
    let mut pending = Vec::new();
    while let Some(chunk) = body.next().await {
        pending.extend_from_slice(&chunk.context("the export broke off")?);
        while let Some(end) = pending.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            dataset.add(String::from_utf8_lossy(&line).trim_end())?;
        }
    }
    let rows = match format {
        DataFormat::TrlDpo => dataset.dpo(),
        _ => dataset.kto(),
    };
    let Some(path) = out else {
        rows.iter().for_each(|row| output.line(&row.to_string()));
        return Ok(());
    };
    let cannot = || format!("cannot write {}", path.display());
    let (partial, mut file) = begin(path).with_context(cannot)?;
    let count = if format == DataFormat::Verl {
        dataset.verl(&mut file).with_context(cannot)?
    } else {
        for row in &rows {
            writeln!(file, "{row}").with_context(cannot)?;
        }
        rows.len()
    };
    finish(file, &partial, path).with_context(cannot)?;
    output.result(&json!({"path": path, "rows": count}), || {
        format!("{count} rows are in {}.", path.display())
    });
    Ok(())
}

/// A file that gets its name when it is complete.
fn begin(path: &Path) -> io::Result<(PathBuf, File)> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let partial = path.with_file_name(name);
    let file = private(&partial)?;
    Ok((partial, file))
}

fn finish(file: File, partial: &Path, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    std::fs::rename(partial, path)
}

/// Conversations are nobody else's business.
fn private(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.create(true).truncate(true).write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

async fn import(client: &Client, path: &Path, output: Output) -> Result<()> {
    let from: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin())
    } else {
        Box::new(File::open(path).with_context(|| format!("cannot read {}", path.display()))?)
    };
    let mut lines = BufReader::new(from);
    let (mut imported, mut errors, mut first) = (0, Vec::new(), 0);
    loop {
        let (mut part, mut count) = (Vec::new(), 0_u64);
        while part.len() < PART {
            let read = lines
                .read_until(b'\n', &mut part)
                .with_context(|| format!("cannot read {}", path.display()))?;
            if read == 0 {
                break;
            }
            count += 1;
        }
        if count == 0 {
            break;
        }
        let taken = client.post_lines("data/import", part).await?;
        imported += taken["imported"].as_u64().unwrap_or(0);
        for error in taken["errors"].as_array().into_iter().flatten() {
            let line = first + error["line"].as_u64().unwrap_or(0);
            errors.push(json!({"line": line, "message": error["message"]}));
        }
        first += count;
    }
    output.result(&json!({"imported": imported, "errors": errors}), || {
        let mut out = format!("{imported} answers imported.");
        for error in &errors {
            let message = output::text(error, "message");
            out.push_str(&format!("\nline {}: {message}", error["line"]));
        }
        out
    });
    anyhow::ensure!(
        imported > 0 || errors.is_empty(),
        "none of the lines could be imported"
    );
    Ok(())
}

async fn forget(client: &Client, what: Forget, output: Output) -> Result<()> {
    let path = if let Some(step) = &what.step {
        let uid = step.rsplit(['-', '_']).next().unwrap_or_default();
        format!("steps/{}", part(uid)?)
    } else if let Some(session) = &what.session {
        format!("sessions/{}", part(session)?)
    } else {
        if !what.yes {
            return Err(Misuse("forgetting everything needs --yes".to_owned()).into());
        }
        "data".to_owned()
    };
    let forgotten = client.delete(&path).await?;
    output.result(&forgotten, || {
        let adapters: Vec<_> = forgotten["adapters"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let mut out = format!("{} answers are forgotten.", forgotten["steps"]);
        if !adapters.is_empty() {
            out.push_str(&format!(
                " These adapters had learned from them: {}.",
                adapters.join(", ")
            ));
        }
        out
    });
    Ok(())
}
