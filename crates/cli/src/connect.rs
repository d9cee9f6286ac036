//! `spotter connect`: OpenClaw's configuration is edited, with a backup; for other
//! clients the exact lines are printed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use spotter_daemon::connect::{self, CLIENTS};
use spotter_daemon::data_dir::DataDir;
use spotter_daemon::settings::{self, RawSettings};
use spotter_daemon::{catalog, secrets};

use crate::Misuse;
use crate::args::Connect;
use crate::client::Client;
use crate::output::{Output, text};

/// The context window told to clients while no daemon knows the model's.
const CONTEXT: u32 = 8192;

/// What a client must be told.
struct Target {
    url: String,
    token: String,
    context_length: u32,
}

pub(crate) async fn run(
    command: &Connect,
    data_dir: &DataDir,
    client: impl Fn() -> Result<Client>,
    output: Output,
) -> Result<()> {
    let name = command.client.as_str();
    if !CLIENTS.contains(&name) {
        return Err(Misuse(format!(
            "'{name}' is not known; known clients are {}",
            CLIENTS.join(", ")
        ))
        .into());
    }
    let edits = name == "openclaw";
    if command.undo && !edits {
        return Err(Misuse(format!(
            "{name} was not configured by Spotter: nothing to undo"
        ))
        .into());
    }
    if edits && command.undo {
        let path = openclaw_file()?;
        let token = secrets::find_token(data_dir, |key| std::env::var(key).ok())?;
        let token = token.map_or_else(String::new, |(token, _)| token);
        return undo(&path, &token, command.dry_run, output);
    }
    let target = target(data_dir, client).await?;
    if edits {
        return openclaw(&openclaw_file()?, &target, command.dry_run, output);
    }
    let guide = connect::guide(name, &target.url, &target.token, target.context_length)
        .with_context(|| format!("'{name}' is not known"))?;
    output.result(&json!(guide), || {
        format!(
            "{}\n\n{}",
            serde_json::to_string_pretty(&guide.snippet).unwrap_or_default(),
            guide.commands.join("\n")
        )
    });
    Ok(())
}

/// The running daemon's address and context window, or what the next one will have.
async fn target(data_dir: &DataDir, client: impl Fn() -> Result<Client>) -> Result<Target> {
    let env = |key: &str| std::env::var(key).ok();
    if let Ok(client) = client()
        && let Ok(status) = client.get("status").await
    {
        let context = status["model"]["context_length"].as_u64().unwrap_or(0);
        let open = text(&status["connect"], "token_hint").is_empty();
        let token = match secrets::find_token(data_dir, env)? {
            Some((token, _)) if !open => token,
            _ => String::new(),
        };
        return Ok(Target {
            url: client.url().to_owned(),
            token,
            context_length: u32::try_from(context)
                .ok()
                .filter(|&c| c > 0)
                .unwrap_or(CONTEXT),
        });
    }
    let settings = settings::resolve(&RawSettings::default(), env, |_| None)?;
    let entry = catalog::resolve(&settings.model, data_dir)?.entry;
    Ok(Target {
        url: format!("http://{}:{}", settings.host, settings.port),
        token: if settings.no_auth {
            String::new()
        } else {
            secrets::load_token(data_dir, env)?.0
        },
        context_length: match settings.context_length {
            0 => entry.map_or(CONTEXT, |entry| entry.context_length),
            chosen => chosen,
        },
    })
}

fn openclaw_file() -> Result<PathBuf> {
    let set = |key: &str| std::env::var_os(key).filter(|value| !value.is_empty());
    let path = match set("OPENCLAW_CONFIG_PATH") {
        Some(path) => PathBuf::from(path),
        None => {
            let home = set("HOME").or_else(|| set("USERPROFILE"));
            let home =
                home.context("HOME is not set; set OPENCLAW_CONFIG_PATH to OpenClaw's file")?;
            Path::new(&home).join(".openclaw/openclaw.json")
        }
    };
    // A file that is a link to elsewhere is edited where it lies.
    Ok(path.canonicalize().unwrap_or(path))
}

fn backup_of(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".before-spotter");
    path.with_file_name(name)
}

fn read(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn openclaw(path: &Path, target: &Target, dry_run: bool, output: Output) -> Result<()> {
    let before = read(path)?.unwrap_or_default();
    let after =
        connect::openclaw_connect(&before, &target.url, &target.token, target.context_length)
            .with_context(|| format!("{} is left as it is", path.display()))?;
    let edit = Edit {
        path,
        backup: backup_of(path),
        before,
        after,
        dry_run,
    };
    // The backup of the first connection is the one that undoing needs.
    let fresh = connect::openclaw_disconnect(&edit.before, None)? == edit.before;
    if edit.writes() {
        if fresh {
            write(&edit.backup, &edit.before)?;
        }
        write(path, &edit.after)?;
    }
    edit.tell(
        &target.token,
        " `spotter connect openclaw --undo` takes it back.",
        output,
    );
    Ok(())
}

fn undo(path: &Path, token: &str, dry_run: bool, output: Output) -> Result<()> {
    let before = read(path)?.with_context(|| format!("{} does not exist", path.display()))?;
    let backup = backup_of(path);
    let after = connect::openclaw_disconnect(&before, read(&backup)?.as_deref())
        .with_context(|| format!("{} is left as it is", path.display()))?;
    let edit = Edit {
        path,
        backup,
        before,
        after,
        dry_run,
    };
    if edit.writes() {
        if edit.after.is_empty() {
            // There was none before.
            fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
        } else {
            write(path, &edit.after)?;
        }
    }
    edit.tell(token, "", output);
    Ok(())
}

/// A change of a client's file.
struct Edit<'a> {
    path: &'a Path,
    backup: PathBuf,
    before: String,
    after: String,
    dry_run: bool,
}

impl Edit<'_> {
    fn writes(&self) -> bool {
        self.before != self.after && !self.dry_run
    }

    fn tell(&self, token: &str, advice: &str, output: Output) {
        let mut diff = connect::diff(&self.before, &self.after);
        if !token.is_empty() {
            diff = diff.replace(token, "(the token)");
        }
        let path = self.path.display();
        let json = json!({
            "path": self.path,
            "backup": self.backup.exists().then_some(&self.backup),
            "changed": self.writes(),
            "dry_run": self.dry_run,
            "diff": diff,
        });
        output.result(&json, || {
            if self.writes() {
                format!("{diff}{path} is changed.{advice}")
            } else if self.before == self.after {
                format!("{path} needs no change.")
            } else {
                format!("{diff}{path} would change so.")
            }
        });
    }
}

/// Replaces a file as a whole, keeping its permissions; a new one is its owner's only.
fn write(path: &Path, text: &str) -> Result<()> {
    let write = || -> io::Result<()> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".spotter-new");
        let fresh = path.with_file_name(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let mut options = fs::OpenOptions::new();
        options.create(true).truncate(true).write(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(&fresh)?;
        io::Write::write_all(&mut file, text.as_bytes())?;
        file.sync_all()?;
        if let Ok(metadata) = fs::metadata(path) {
            fs::set_permissions(&fresh, metadata.permissions())?;
        }
        fs::rename(&fresh, path)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
