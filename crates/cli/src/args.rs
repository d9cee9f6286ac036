//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

/// Trains the model behind your own agent.
#[derive(Debug, Parser)]
#[command(name = "spotter", version, disable_help_subcommand = true)]
pub(crate) struct Args {
    /// Print results as JSON.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// The data directory; SPOTTER_DATA_DIR, else the user's own, when absent.
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Address of the daemon to talk to; the one of the data directory when absent.
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) url: Option<String>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start the gateway; agents and the interface connect to it.
    Serve(Serve),
    /// List, download, import and remove models.
    #[command(subcommand)]
    Model(Model),
    /// Connect a client, or print the lines that do.
    Connect(Connect),
    /// Rate an answer.
    Rate(Rate),
    /// Start, pause and follow training.
    #[command(subcommand)]
    Train(Train),
    /// List, switch, export and import adapters.
    #[command(subcommand)]
    Adapter(Adapter),
    /// Look at, export, import and forget recorded data.
    #[command(subcommand)]
    Data(Data),
    /// Check the installation.
    Doctor,
    /// Print the version.
    Version,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Serve {
    /// Address to listen on [default: 127.0.0.1].
    #[arg(long)]
    pub(crate) host: Option<String>,
    /// Port to listen on; 0 takes a free one [default: 8100].
    #[arg(long)]
    pub(crate) port: Option<u16>,
    /// Catalogue name, GGUF file or folder of the base model.
    #[arg(long, value_name = "NAME|PATH")]
    pub(crate) model: Option<String>,
    /// Answer without a token; on this machine's own address only.
    #[arg(long)]
    pub(crate) no_auth: bool,
    /// What computes: auto, cpu, cuda or cuda:N [default: auto].
    #[arg(long)]
    pub(crate) device: Option<String>,
    /// Context window in tokens [default: the model's own].
    #[arg(long, value_name = "TOKENS")]
    pub(crate) context_length: Option<u32>,
    /// When to train: always, idle, schedule or manual [default: idle].
    #[arg(long)]
    pub(crate) schedule: Option<Policy>,
    /// Open the interface in a browser.
    #[arg(long)]
    pub(crate) open: bool,
    /// Print address and token as one line of JSON once it listens.
    #[arg(long)]
    pub(crate) print_connection: bool,
    /// Folder of the built interface.
    #[arg(long, value_name = "DIR")]
    pub(crate) ui_dir: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Policy {
    Always,
    Idle,
    Schedule,
    Manual,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Model {
    /// List known and installed models.
    List,
    /// Download a model of the catalogue.
    Pull {
        /// Its name.
        name: String,
    },
    /// Take in a GGUF file or a Hugging Face folder.
    Import {
        /// The file or folder.
        path: PathBuf,
    },
    /// Remove a model's files.
    Remove {
        /// Its name.
        name: String,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Connect {
    /// openclaw, claude-code, nanobot, openai, anthropic or ollama.
    pub(crate) client: String,
    /// Show what would change and change nothing (openclaw).
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Take Spotter out of the client's configuration again (openclaw).
    #[arg(long)]
    pub(crate) undo: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Rate {
    /// The answer's id, with or without `chatcmpl-`.
    pub(crate) id: String,
    /// The thumb; `none` withdraws it.
    pub(crate) rating: Thumb,
    /// Why, as a tag; may be repeated.
    #[arg(long)]
    pub(crate) reason: Vec<String>,
    /// Why, in words.
    #[arg(long)]
    pub(crate) note: Option<String>,
    /// What the answer should have been.
    #[arg(long)]
    pub(crate) correction: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Thumb {
    Up,
    Down,
    None,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Train {
    /// Start a run and wait for its end.
    Now {
        /// Return once it has started.
        #[arg(long)]
        detach: bool,
    },
    /// Pause training; the active run keeps its place.
    Pause,
    /// Continue after a pause.
    Resume,
    /// Say what training does, or why it does not run now.
    Status,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Adapter {
    /// List the adapters, newest first.
    List,
    /// Show one adapter.
    Show {
        /// Its version, such as v3.
        version: String,
    },
    /// Make a version live; `base` is the model without an adapter.
    Activate {
        /// Its version, such as v3.
        version: String,
    },
    /// Make the version live that was live before.
    Rollback,
    /// Write an adapter for other tools.
    Export {
        /// Its version, such as v3.
        version: String,
        /// In which form.
        #[arg(long, default_value = "peft")]
        format: Format,
        /// Directory to create.
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Take in a PEFT directory or a GGUF LoRA file.
    Import {
        /// The directory or file.
        path: PathBuf,
        /// Accept one whose base-model name differs.
        #[arg(long)]
        force: bool,
    },
    /// Delete adapters that are neither live, pinned nor recent.
    Prune,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Format {
    Peft,
    GgufLora,
    MergedSafetensors,
    MergedGguf,
    Ollama,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Data {
    /// Say how much is recorded.
    Stats,
    /// Write everything as JSON lines, or the rated answers for other trainers.
    Export {
        /// jsonl is everything, in Spotter's own form; trl-kto and trl-dpo are JSON lines
        /// for TRL; verl is a parquet file.
        #[arg(long, default_value = "jsonl")]
        format: DataFormat,
        /// File to write; standard output when absent.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Take in exported JSON lines.
    Import {
        /// The file; `-` is standard input.
        file: PathBuf,
    },
    /// Forget an answer, a conversation or everything, backups included.
    Forget(Forget),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DataFormat {
    Jsonl,
    TrlKto,
    TrlDpo,
    Verl,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false, args = ["step", "session", "all"])]
pub(crate) struct Forget {
    /// Forget this answer.
    #[arg(long, value_name = "ID")]
    pub(crate) step: Option<String>,
    /// Forget this conversation.
    #[arg(long, value_name = "ID")]
    pub(crate) session: Option<String>,
    /// Forget everything; needs --yes.
    #[arg(long)]
    pub(crate) all: bool,
    /// Do not ask.
    #[arg(long)]
    pub(crate) yes: bool,
}
