//! The JSON-lines protocol between the daemon and its workers.
//!
//! One JSON object per line, UTF-8, `\n` at the end; the daemon writes
//! [`Command`]s to the worker's standard input, the worker writes [`Report`]s to
//! its standard output. Standard error carries the worker's log. A closed pipe
//! is death on either side. JSON escapes newlines, so a line is a message.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::adapter::AdapterVersion;
use crate::code::Failure;
use crate::generate::{GenerateEvent, GenerateRequest, Prompt};
use crate::train::{AdapterFiles, ScoreItem, TrainProgress, TrainRequest, TrainResult};

/// Version of this protocol; a worker with another one is refused.
pub const PROTOCOL: u32 = 1;

/// What a worker is for. One worker may hold both roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerRole {
    /// Answers requests.
    Serve,
    /// Trains adapters.
    Train,
}

/// Where a directory is filled before it gets its name: beside it, so that renaming it is
/// one step. The daemon removes what a worker that died has left there.
pub fn partial_directory(target: &Path) -> PathBuf {
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    target.with_file_name(name)
}

/// Settings a worker starts with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerSettings {
    /// GGUF file or Hugging Face folder of the base model.
    pub model: PathBuf,
    /// Compute threads; `None` uses all cores when serving, and leaves one when training.
    pub threads: Option<usize>,
    /// Context window in tokens; `None` uses the model's own.
    pub context_length: Option<u32>,
    /// Bytes of key/value cache, prefix cache included; `None` chooses by free memory.
    pub cache_bytes: Option<u64>,
    /// Most sequences decoded at once.
    pub max_batch: u32,
    /// Most requests waiting; more are refused as busy.
    pub max_queue: u32,
    /// Compute device: `auto`, `cpu`, `cuda`, `cuda:N`.
    pub device: String,
}

/// Daemon to worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// First message: load the model. Answered by `Ready` or `LoadFailed`.
    Start {
        /// The protocol version the daemon speaks.
        protocol: u32,
        /// Settings.
        settings: Box<WorkerSettings>,
    },
    /// Serve: answer this; every `Report::Generate` carries the id.
    Generate {
        /// Chosen by the daemon, unique while the worker lives.
        id: u64,
        /// The request.
        request: Box<GenerateRequest>,
    },
    /// Serve: stop this generation within one step, or this export before its next row;
    /// answered by `Failed` or `Exported` with `Cancelled`.
    Cancel {
        /// The generation or export.
        id: u64,
    },
    /// Serve: how many tokens this prompt has. Answered by `TokenCount`.
    CountTokens {
        /// Echoed.
        id: u64,
        /// The prompt.
        prompt: Box<Prompt>,
    },
    /// Serve: make an adapter available without making it live. Answered by `AdapterLoaded`.
    LoadAdapter {
        /// Echoed.
        id: u64,
        /// The adapter.
        adapter: AdapterFiles,
    },
    /// Serve: compare-and-swap of the live version. Answered by `Swapped`.
    Swap {
        /// Echoed.
        id: u64,
        /// The version that must be live now; `None` swaps whatever is live.
        expected: Option<AdapterVersion>,
        /// The version to make live; it must be loaded, or `BASE`.
        to: AdapterVersion,
    },
    /// Serve: forget a version once its last sequence has ended.
    UnloadAdapter {
        /// The version.
        version: AdapterVersion,
    },
    /// Either role: teacher-forced log-probabilities. Answered by `Scores`.
    Score {
        /// Echoed.
        id: u64,
        /// The adapter, which must be loaded in a serving worker; a training worker
        /// loads it from here.
        adapter: Option<AdapterFiles>,
        /// What to score.
        items: Vec<ScoreItem>,
    },
    /// Train: run this. `TrainProgress` follows, then one `TrainEnded`.
    Train {
        /// The run.
        request: Box<TrainRequest>,
    },
    /// Train: checkpoint and release memory; `ResumeTraining` continues.
    PauseTraining,
    /// Train: continue.
    ResumeTraining,
    /// Train: stop the run; its checkpoint is deleted.
    CancelTraining,
    /// Train: whether requests are being served now; the trainer yields between
    /// micro-batches while they are.
    Serving {
        /// True while requests run.
        active: bool,
    },
    /// Export an adapter. Answered by `ExportProgress`* and `Exported`.
    Export {
        /// Echoed.
        id: u64,
        /// The adapter.
        adapter: AdapterFiles,
        /// `peft`, `gguf-lora`, `merged-safetensors`, `merged-gguf`, `ollama`.
        format: String,
        /// Directory to create; left untouched when the export fails.
        out: PathBuf,
        /// Facts for the model card as JSON (lineage, counts, metrics); never conversation text.
        card: serde_json::Value,
    },
    /// Check an adapter made elsewhere and copy it to `out` as PEFT. Answered by `Imported`.
    Import {
        /// Echoed.
        id: u64,
        /// PEFT directory or GGUF LoRA file.
        source: PathBuf,
        /// Directory to create.
        out: PathBuf,
        /// Accept an adapter whose base-model name differs.
        force: bool,
    },
    /// Finish what runs (within the grace period), then exit 0.
    Shutdown {
        /// Milliseconds before what still runs is cancelled.
        grace_ms: u64,
    },
}

/// Facts about the loaded model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelFacts {
    /// Its name, from the file's metadata or the file name.
    pub name: String,
    /// Architecture, such as `llama`.
    pub architecture: String,
    /// SHA-256 of the weights file(s), hexadecimal.
    pub fingerprint: String,
    /// Parameters.
    pub parameters: u64,
    /// Context window in tokens.
    pub context_length: u32,
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Block type of most weights, such as `Q4_1`.
    pub quantisation: String,
    /// Whether the chat template knows tools by itself.
    pub template_has_tools: bool,
    /// The compute device in words, and why when it is not the one asked for.
    pub device: String,
    /// Seconds from `Start` to `Ready`.
    pub load_seconds: f64,
}

/// What `spotter-worker --inspect PATH` prints: whether a model can be used at all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Inspection {
    /// It loads; these are its facts.
    Model(Box<ModelFacts>),
    /// It does not, and why.
    Failure(Failure),
}

/// A serving worker's counters, sent with `Heartbeat`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServeCounters {
    /// Sequences being answered.
    pub running: u32,
    /// Requests waiting.
    pub queued: u32,
    /// Bytes of key/value cache in use.
    pub cache_used: u64,
    /// Bytes of key/value cache reserved.
    pub cache_total: u64,
    /// Prompt tokens seen since start.
    pub prompt_tokens: u64,
    /// Prompt tokens reused from the prefix cache since start.
    pub cached_tokens: u64,
    /// Tokens generated since start.
    pub generated_tokens: u64,
}

/// Worker to daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub enum Report {
    /// The model is loaded.
    Ready {
        /// The protocol version the worker speaks.
        protocol: u32,
        /// The roles it holds.
        roles: Vec<WorkerRole>,
        /// The model.
        model: Box<ModelFacts>,
    },
    /// The model cannot be used; the worker waits for another `Start` or `Shutdown`.
    LoadFailed {
        /// Why.
        failure: Failure,
    },
    /// Progress of a generation.
    Generate {
        /// The generation.
        id: u64,
        /// What happened.
        event: GenerateEvent,
    },
    /// Answer to `CountTokens`.
    TokenCount {
        /// Echoed.
        id: u64,
        /// The count, or why there is none.
        result: Result<u32, Failure>,
    },
    /// Answer to `LoadAdapter`.
    AdapterLoaded {
        /// Echoed.
        id: u64,
        /// The version, or why not.
        result: Result<AdapterVersion, Failure>,
    },
    /// Answer to `Swap`.
    Swapped {
        /// Echoed.
        id: u64,
        /// The version live now, or why the swap was refused.
        result: Result<AdapterVersion, Failure>,
    },
    /// Answer to `Score`: per item, one natural log-probability per response token.
    Scores {
        /// Echoed.
        id: u64,
        /// The scores.
        result: Result<Vec<Vec<f32>>, Failure>,
    },
    /// Progress of a run.
    TrainProgress {
        /// The progress.
        progress: Box<TrainProgress>,
    },
    /// The run is paused (its state is on disk) or runs again.
    TrainPaused {
        /// The run.
        run: i64,
        /// True when paused.
        paused: bool,
    },
    /// A run ended.
    TrainEnded {
        /// The run.
        run: i64,
        /// How.
        result: TrainResult,
    },
    /// Progress of an export.
    ExportProgress {
        /// Echoed.
        id: u64,
        /// 0 to 1.
        fraction: f64,
    },
    /// Answer to `Export`: bytes written.
    Exported {
        /// Echoed.
        id: u64,
        /// Bytes, or why not.
        result: Result<u64, Failure>,
    },
    /// Answer to `Import`.
    Imported {
        /// Echoed.
        id: u64,
        /// Facts about the adapter as JSON (rank, alpha, target modules), or why not.
        result: Result<serde_json::Value, Failure>,
    },
    /// Sent every second.
    Heartbeat {
        /// Resident memory in bytes.
        resident: u64,
        /// Serving counters, from a serving worker.
        #[serde(default)]
        serve: Option<ServeCounters>,
    },
}

#[cfg(test)]
mod tests {
    use super::{Command, Report};
    use crate::adapter::AdapterVersion;
    use crate::code::{Code, Failure};

    #[test]
    fn messages_are_single_lines_and_round_trip() {
        let command = Command::Swap {
            id: 7,
            expected: None,
            to: AdapterVersion(2),
        };
        let line = serde_json::to_string(&command).expect("serialises");
        assert!(!line.contains('\n'));
        assert_eq!(
            serde_json::from_str::<Command>(&line).expect("parses"),
            command
        );

        let report = Report::Swapped {
            id: 7,
            result: Err(Failure::new(Code::Conflict, "v1 is live,\nnot v0")),
        };
        let line = serde_json::to_string(&report).expect("serialises");
        assert!(!line.contains('\n'));
        assert_eq!(
            serde_json::from_str::<Report>(&line).expect("parses"),
            report
        );
    }
}
