//! The JSON of the control API. Times are milliseconds since the Unix epoch,
//! versions are text (`base`, `v1`, …), absent optional fields are left out.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// The state of everything.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Spotter's version.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// Whether calls are recorded.
    pub recording: bool,
    /// The base model.
    pub model: ModelStatus,
    /// The serving worker.
    pub worker: WorkerStatus,
    /// The adapter.
    pub adapter: AdapterStatus,
    /// Training, and why it is not running now.
    pub training: TrainingStatus,
    /// Counts over the data pool.
    pub counts: Counts,
    /// How a client connects.
    pub connect: ConnectStatus,
    /// When and how boldly it trains.
    pub policy: PolicyStatus,
    /// Disk space.
    pub disk: DiskStatus,
}

/// The base model as served.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct ModelStatus {
    /// Its name; empty when there is none.
    pub name: String,
    /// Context window in tokens.
    pub context_length: u32,
    /// `loading`, `ready`, `failed` or `none`.
    pub state: String,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The serving worker process.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct WorkerStatus {
    /// `running`, `starting`, `restarting` or `stopped`.
    pub state: String,
    /// Its process id.
    pub pid: Option<u32>,
    /// Restarts since the daemon started.
    pub restarts: u32,
    /// What ended it last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_crash: Option<String>,
}

/// The live adapter.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct AdapterStatus {
    /// `base`, `v1`, ….
    pub live: String,
    /// The version that is being checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub candidate: Option<String>,
}

/// Training in one sentence and its numbers.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct TrainingStatus {
    /// `collecting`, `waiting`, `training`, `checking`, `paused` or `off`.
    pub state: String,
    /// One sentence: why it is not training now, or what it does.
    pub reason: String,
    /// Rated answers no run has used yet.
    pub fresh_labels: u32,
    /// How many are needed for the next run.
    pub needed_labels: u32,
    /// The active run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_id: Option<i64>,
    /// Its share done, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<f64>,
    /// Seconds left.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<f64>,
}

/// Counts over the data pool.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Counts {
    /// All steps.
    pub steps: u64,
    /// Main steps without a rating.
    pub unrated: u64,
    /// Steps with a rating.
    pub rated: u64,
    /// Liked.
    pub up: u64,
    /// Disliked.
    pub down: u64,
    /// Conversations.
    pub sessions: u64,
}

/// How a client connects.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct ConnectStatus {
    /// The address without a path (Anthropic and Ollama clients).
    pub base_url: String,
    /// The address with `/v1` (OpenAI clients).
    pub openai_url: String,
    /// The token's first letters, or empty when none is needed.
    pub token_hint: String,
    /// When the first client request was answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_request_at: Option<i64>,
}

/// The training policy.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct PolicyStatus {
    /// `always`, `idle`, `schedule` or `manual`.
    pub schedule: String,
    /// `gentle`, `normal` or `bold`.
    pub dial: String,
}

/// Disk space of the data directory.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct DiskStatus {
    /// Free bytes.
    pub free_bytes: u64,
    /// True when recording stopped because the disk is full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recording_stopped: Option<bool>,
}

/// A thumb.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Rating {
    /// Liked: reward 1.
    Up,
    /// Disliked: reward -1.
    Down,
}

impl Rating {
    /// The reward's value.
    pub fn value(self) -> f64 {
        match self {
            Self::Up => 1.0,
            Self::Down => -1.0,
        }
    }
}

/// One model call as lists show it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StepSummary {
    /// Its id, the one in `x-spotter-step`.
    pub uid: String,
    /// The conversation.
    pub session: String,
    /// The task attempt.
    pub trajectory: String,
    /// Number of the user turn inside the conversation, from 1.
    pub turn: u32,
    /// `main` or `side`.
    pub kind: String,
    /// Why it is main or side.
    pub kind_reason: String,
    /// The version that answered.
    pub adapter: String,
    /// The client.
    pub client: String,
    /// The genuine user text.
    pub user_text: String,
    /// The answer's visible text.
    pub answer_text: String,
    /// The person's thumb.
    #[schema(required)]
    pub rating: Option<Rating>,
    /// The reward that counts, precedence applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
    /// Reason tags of the person's rating.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// The person's note.
    #[schema(required)]
    pub note: Option<String>,
    /// What the answer should have been.
    #[schema(required)]
    pub correction: Option<String>,
    /// The run that learned from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_in_run: Option<i64>,
    /// Why a run left it out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped_reason: Option<String>,
    /// Whether the next run will be offered it.
    pub in_next_lesson: bool,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: String,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Answer length in tokens.
    pub response_tokens: u32,
    /// When it was answered.
    pub created_at: i64,
}

/// A tool call inside a message.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct MessageToolCall {
    /// The call's id.
    pub id: String,
    /// The function's name.
    pub name: String,
    /// Compact JSON.
    pub arguments: String,
}

/// One message of a stored conversation.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct StoredMessage {
    /// Who speaks.
    #[serde(default)]
    pub role: String,
    /// The text.
    #[serde(default)]
    pub content: String,
    /// The model's reasoning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Tool calls of an assistant message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<MessageToolCall>,
    /// The call a tool message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The speaker's or tool's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// One reward row.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RewardRow {
    /// In [-1, 1]; null withdraws the earlier value of this source.
    #[schema(required)]
    pub value: Option<f64>,
    /// `user`, `outcome`, `rule`, `judge` or `implicit`.
    pub source: String,
    /// Reason tags.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// A note.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// What the answer should have been.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correction: Option<String>,
    /// When it was given.
    pub created_at: i64,
}

/// One model call, complete.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StepDetail {
    /// What lists show.
    #[serde(flatten)]
    pub summary: StepSummary,
    /// The request's messages.
    pub messages: Vec<StoredMessage>,
    /// The answer.
    pub response: StoredMessage,
    /// Sampling parameters.
    #[schema(value_type = Object)]
    pub sampling: Value,
    /// Log-probabilities of the sampling distribution, one per response id.
    pub logprobs: Vec<f32>,
    /// The model's own log-probabilities, one per response id.
    pub model_logprobs: Vec<f32>,
    /// Every reward row, oldest first.
    pub rewards: Vec<RewardRow>,
    /// Prompt token ids.
    pub prompt_ids: Vec<u32>,
    /// Response token ids.
    pub response_ids: Vec<u32>,
}

/// Which steps to list, newest first.
#[derive(Clone, Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default)]
pub struct StepQuery {
    /// Main steps without a rating only.
    #[serde(deserialize_with = "flag")]
    pub unrated: bool,
    /// Of this conversation only.
    pub session: Option<String>,
    /// Steps whose user or answer text contains this.
    pub q: Option<String>,
    /// Continue after this mark.
    pub cursor: Option<String>,
    /// At most this many (50 by default, at most 500).
    pub limit: Option<usize>,
}

/// Which conversations to list, last active first.
#[derive(Clone, Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default)]
pub struct SessionQuery {
    /// Conversations that contain this text.
    pub q: Option<String>,
    /// Continue after this mark.
    pub cursor: Option<String>,
    /// At most this many (50 by default, at most 500).
    pub limit: Option<usize>,
}

/// Reads `true`, `1` and the bare key as true; everything else is false.
fn flag<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    Ok(matches!(text.as_deref(), Some("true" | "1" | "")))
}

/// A page of steps.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct StepPage {
    /// The steps.
    pub items: Vec<StepSummary>,
    /// Where the next page begins; null at the end.
    #[schema(required)]
    pub next_cursor: Option<String>,
}

/// One conversation as lists show it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct SessionSummary {
    /// Its id.
    pub uid: String,
    /// The first user text, shortened.
    pub title: String,
    /// The client.
    pub client: String,
    /// How many steps it has.
    pub steps: u64,
    /// How many of them are rated.
    pub rated: u64,
    /// When its last step was answered.
    pub last_at: i64,
}

/// A page of conversations.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct SessionPage {
    /// The conversations.
    pub items: Vec<SessionSummary>,
    /// Where the next page begins; null at the end.
    #[schema(required)]
    pub next_cursor: Option<String>,
}

/// One conversation with its steps, oldest first.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct SessionDetail {
    /// Its id.
    pub uid: String,
    /// The first user text, shortened.
    pub title: String,
    /// The client.
    pub client: String,
    /// How many of its steps are rated.
    pub rated: u64,
    /// When its last step was answered.
    pub last_at: i64,
    /// Its steps.
    pub steps: Vec<StepSummary>,
}

/// A change of a step's rating.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RatingChange {
    /// The thumb; null withdraws it.
    pub rating: Option<Rating>,
    /// Reason tags.
    pub reasons: Vec<String>,
    /// A note.
    pub note: Option<String>,
    /// What the answer should have been.
    pub correction: Option<String>,
}

/// A change of a step's kind.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct KindChange {
    /// `main` or `side`.
    pub kind: String,
}

/// The outcome of a task attempt.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Outcome {
    /// In [-1, 1].
    pub reward: f64,
}

/// What forgetting removed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Forgotten {
    /// How many steps are gone.
    pub steps: u64,
    /// Adapters that had learned from them.
    pub adapters: Vec<String>,
}

/// A run was accepted.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RunStarted {
    /// Its number.
    pub id: i64,
}

/// Why steps were left out of a run.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Dropped {
    /// The reason in words.
    pub reason: String,
    /// How many steps.
    pub count: u32,
}

/// What a run did to the probability of what it learned from: mean
/// log-probability per token before and after.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Changes {
    /// Liked answers, before.
    pub liked_before: Option<f64>,
    /// Liked answers, after.
    pub liked_after: Option<f64>,
    /// Disliked answers, before.
    pub disliked_before: Option<f64>,
    /// Disliked answers, after.
    pub disliked_after: Option<f64>,
    /// Per step: `{uid, reward, before, after}`.
    #[schema(value_type = Vec<Object>)]
    pub items: Vec<Value>,
}

/// The gate's decision.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Verdict {
    /// Whether the candidate went live.
    pub promoted: bool,
    /// Why, in sentences.
    pub reasons: Vec<String>,
    /// The evidence.
    #[schema(value_type = Object)]
    pub evaluation: Value,
}

/// One training run.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Run {
    /// Its number.
    pub id: i64,
    /// `queued`, `training`, `checking`, `promoted`, `rejected`, `failed`, `cancelled` or `paused`.
    pub state: String,
    /// The version it started from.
    pub parent: String,
    /// The version it made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// When it started.
    pub started_at: i64,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<i64>,
    /// Share done, 0 to 1.
    pub progress: f64,
    /// Seconds left.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<f64>,
    /// What it is doing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// The estimator.
    pub estimator: String,
    /// Why that one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimator_reason: Option<String>,
    /// `full` or `response`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_scope: Option<String>,
    /// `gentle`, `normal` or `bold`.
    pub dial: String,
    /// The resolved configuration.
    #[schema(value_type = Object)]
    pub config: Value,
    /// Steps that contributed.
    pub steps_used: u32,
    /// Steps that did not, by reason.
    pub steps_dropped: Vec<Dropped>,
    /// What it did to what it learned from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes: Option<Changes>,
    /// The gate's decision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Runs, newest first.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct RunList {
    /// The runs.
    pub items: Vec<Run>,
}

/// How many points a metric series may have.
#[derive(Clone, Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default)]
pub struct MetricsQuery {
    /// Most points per series (400 by default).
    pub points: Option<usize>,
}

/// One metric over a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Series {
    /// A name of the glossary.
    pub name: String,
    /// `[step, value]` pairs.
    #[schema(value_type = Vec<Vec<f64>>)]
    pub points: Vec<(f64, f64)>,
}

/// All metrics of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Metrics {
    /// One series per metric.
    pub series: Vec<Series>,
}

/// One training metric in words.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct GlossaryItem {
    /// Its name in series.
    pub name: String,
    /// Its name for people.
    pub title: String,
    /// Its unit.
    pub unit: String,
    /// What it is.
    pub explanation: String,
    /// What is normal.
    pub normal: String,
}

/// The glossary.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Glossary {
    /// The entries.
    pub items: Vec<GlossaryItem>,
}

/// Ratings an adapter's own answers received.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Approval {
    /// Liked.
    pub up: u64,
    /// Disliked.
    pub down: u64,
}

/// One adapter version.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Adapter {
    /// `v1`, `v2`, ….
    pub version: String,
    /// The version it was trained from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// `live`, `kept`, `rejected`, `candidate` or `imported`.
    pub state: String,
    /// The run that made it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_id: Option<i64>,
    /// When it was made.
    pub created_at: i64,
    /// How many steps it learned from.
    pub steps_used: u32,
    /// Summary metrics by name.
    #[schema(value_type = Object)]
    pub metrics: Map<String, Value>,
    /// The gate's decision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// Ratings its answers received.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approval: Option<Approval>,
    /// Whether it is kept from pruning.
    pub pinned: bool,
    /// Size of its files.
    pub size_bytes: u64,
}

/// All adapters.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct AdapterList {
    /// The live version.
    pub live: String,
    /// The adapters, newest first.
    pub items: Vec<Adapter>,
}

/// An export.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ExportRequest {
    /// `peft`, `gguf-lora`, `merged-safetensors`, `merged-gguf` or `ollama`.
    #[serde(default = "ExportRequest::default_format")]
    pub format: String,
    /// Directory to create; chosen by Spotter when absent.
    #[serde(default)]
    pub out: Option<String>,
}

impl ExportRequest {
    fn default_format() -> String {
        "peft".to_owned()
    }
}

impl Default for ExportRequest {
    fn default() -> Self {
        Self {
            format: Self::default_format(),
            out: None,
        }
    }
}

/// What an export wrote.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Exported {
    /// Where it is.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

/// Which export to estimate.
#[derive(Clone, Debug, Deserialize, utoipa::IntoParams)]
pub struct ExportQuery {
    /// `peft`, `gguf-lora`, `merged-safetensors`, `merged-gguf` or `ollama`.
    pub format: String,
}

/// How large an export will be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ExportEstimate {
    /// About this many bytes.
    pub bytes: u64,
    /// Bytes that are free where Spotter writes when no folder is given.
    pub free_bytes: u64,
}

/// An import of an adapter made elsewhere.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ImportAdapter {
    /// PEFT directory or GGUF LoRA file on this machine.
    pub path: String,
    /// Accept one whose base-model name differs.
    #[serde(default)]
    pub force: bool,
}

/// Pins or unpins an adapter.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct PinRequest {
    /// Whether it is kept from pruning.
    pub pinned: bool,
}

/// What pruning removed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct PruneResult {
    /// The versions that are gone.
    pub removed: Vec<String>,
    /// Bytes set free.
    pub freed_bytes: u64,
}

/// A download's progress.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct DownloadProgress {
    /// Bytes on disk.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
    /// Current speed.
    pub bytes_per_s: f64,
    /// Seconds left.
    pub eta_s: Option<f64>,
}

/// Whether a model fits this machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Fits {
    /// For serving: `fits`, `tight` or `no`.
    pub serve: String,
    /// For training: `fits`, `tight` or `no`.
    pub train: String,
    /// The sum behind it, in words.
    pub formula: String,
}

/// One model of the catalogue or of the user.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Model {
    /// Its name in commands.
    pub name: String,
    /// Its name for people.
    pub title: String,
    /// Where it comes from.
    pub source: String,
    /// Its licence.
    pub licence: String,
    /// Size of its files.
    pub size_bytes: u64,
    /// Context window in tokens.
    pub context_length: u32,
    /// Parameters.
    pub parameters: u64,
    /// `available`, `downloading`, `paused`, `verifying`, `installed`, `failed` or `active`.
    pub state: String,
    /// The download's progress.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<DownloadProgress>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether it fits.
    pub fits: Fits,
}

/// All models and the machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct ModelList {
    /// The models.
    pub items: Vec<Model>,
    /// GPU, cores, memory and disk as found.
    #[schema(value_type = Object)]
    pub hardware: Value,
}

/// An import of model files that are on this machine.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ImportModel {
    /// GGUF file or folder.
    pub path: String,
}

/// A model was taken in.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ImportedModel {
    /// Its name in commands.
    pub name: String,
}

/// One setting.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Setting {
    /// Its key.
    pub key: String,
    /// Its value now.
    #[schema(value_type = Object)]
    pub value: Value,
    /// Its default.
    #[schema(value_type = Object)]
    pub default: Value,
    /// `default`, `database`, `environment` or `command line`.
    pub source: String,
    /// Whether a change needs a restart.
    pub restart_required: bool,
    /// Its name for people.
    pub title: String,
    /// What it does.
    pub description: String,
    /// `text`, `number`, `switch`, `choice`, `secret`, ….
    pub kind: String,
    /// The choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub options: Option<Vec<String>>,
}

/// All settings.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct SettingList {
    /// The settings.
    pub items: Vec<Setting>,
}

/// One check of the installation.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// Whether it is well.
    pub ok: bool,
    /// `info`, `warn` or `error`.
    pub level: String,
    /// What was found.
    pub message: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Check {
    /// A check that warns when it is not well; advice is given only then.
    pub fn new(name: &str, ok: bool, message: String, advice: Option<&str>) -> Self {
        Self {
            name: name.to_owned(),
            ok,
            level: if ok { "info" } else { "warn" }.to_owned(),
            message,
            advice: advice.filter(|_| !ok).map(str::to_owned),
        }
    }
}

/// All checks.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Doctor {
    /// The checks.
    pub checks: Vec<Check>,
}

/// The bearer token.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Token {
    /// The token.
    pub token: String,
}

/// Pauses or resumes recording.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Recording {
    /// True stops recording.
    pub paused: bool,
}

/// How to connect a client.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct ConnectGuide {
    /// The configuration to add.
    #[schema(value_type = Object)]
    pub snippet: Value,
    /// The commands that do the same.
    pub commands: Vec<String>,
}

/// A line of an import that was not taken.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ImportError {
    /// Its number, from 1.
    pub line: u64,
    /// Why.
    pub message: String,
}

/// What an import of data took.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct ImportedData {
    /// Steps taken.
    pub imported: u64,
    /// Lines that were not.
    pub errors: Vec<ImportError>,
}

/// An error of the control API.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// Code and message of an error.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ErrorDetail {
    /// A code the interface translates.
    pub code: String,
    /// What happened, what was kept, what to do.
    pub message: String,
}
