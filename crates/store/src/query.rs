//! What callers ask for, and what they get.

use serde::Serialize;
use serde_json::Value;
use spotter_core::AdapterVersion;
use spotter_core::id::{StepUid, TrajectoryUid};
use spotter_core::reward::Reward;
use spotter_core::step::StepKind;
use spotter_core::train::TrainStep;

/// A page of rows and where the next one begins.
#[derive(Clone, Debug, PartialEq)]
pub struct Page<T> {
    /// The rows.
    pub items: Vec<T>,
    /// Pass it to get the next page; `None` on the last one.
    pub next_cursor: Option<String>,
}

/// Which steps to list.
#[derive(Clone, Debug, Default)]
pub struct StepFilter {
    /// Only main steps without a user's vote.
    pub unrated: bool,
    /// Only this vote: `up` or `down`.
    pub rating: Option<String>,
    /// Only this session.
    pub session: Option<String>,
    /// Only this kind.
    pub kind: Option<StepKind>,
    /// Only steps whose user or answer text contains this.
    pub q: Option<String>,
    /// Where the page begins.
    pub cursor: Option<String>,
    /// Most rows; 0 means 50.
    pub limit: usize,
}

/// One row of a list of steps.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct StepSummary {
    pub uid: String,
    pub session: String,
    pub trajectory: String,
    pub turn: String,
    /// The turn's place in its conversation, from 1.
    pub turn_number: u32,
    pub kind: String,
    pub kind_reason: String,
    pub adapter: AdapterVersion,
    pub client: String,
    pub user_text: String,
    pub answer_text: String,
    /// The user's vote.
    pub rating: Option<String>,
    /// The effective reward.
    pub reward: Option<f64>,
    pub reasons: Vec<String>,
    pub note: Option<String>,
    pub correction: Option<String>,
    /// The last run that learned from it.
    pub used_in_run: Option<i64>,
    pub dropped_reason: Option<String>,
    /// Rated, fresh and trainable.
    pub in_next_lesson: bool,
    pub finish_reason: String,
    pub prompt_tokens: u32,
    pub response_tokens: u32,
    /// Milliseconds since the Unix epoch.
    pub created_at: i64,
}

/// A step with everything that is stored of it.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct StepDetail {
    pub summary: StepSummary,
    pub base_model: String,
    pub prompt_ids: Vec<u32>,
    pub response_ids: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub model_logprobs: Vec<f32>,
    /// The request as it was stored, messages included.
    pub request: Value,
    pub response: Value,
    pub sampling: Value,
    pub cached_tokens: u32,
    pub first_token_ms: u64,
    pub total_ms: u64,
    /// All reward rows, oldest first.
    pub rewards: Vec<Reward>,
}

/// What a reward is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RewardTarget {
    /// One step.
    Step(StepUid),
    /// A trajectory; it counts for the last step.
    Trajectory(TrajectoryUid),
}

/// One conversation in a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct SessionSummary {
    pub uid: String,
    pub title: String,
    pub client: String,
    pub steps: u64,
    pub rated: u64,
    /// Milliseconds since the Unix epoch.
    pub last_at: i64,
}

/// Totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counts {
    pub steps: u64,
    pub unrated: u64,
    pub rated: u64,
    pub up: u64,
    pub down: u64,
    pub sessions: u64,
}

/// What a run asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchRequest {
    /// The run.
    pub run: i64,
    /// Most rated steps; a group that a client announced comes whole all the same.
    pub most: usize,
    /// Leave steps that an older version sampled.
    pub oldest_adapter: Option<AdapterVersion>,
}

/// What a run may learn from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The claimed steps, oldest first.
    pub steps: Vec<TrainStep>,
    /// Rated steps that were left because an older version sampled them.
    pub stale: u64,
}

/// What was forgotten.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// Steps that are gone.
    pub steps: u64,
    /// Adapters that learned from them, or were trained from one that did.
    pub adapters: Vec<AdapterVersion>,
    /// The newest ancestor of the live adapter that did not, when the live one did.
    pub clean: Option<AdapterVersion>,
}

/// Rated, unconsumed, trainable steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LabelCounts {
    /// All of them.
    pub labels: u64,
    /// Those with a negative reward.
    pub negative: u64,
    /// Those with a correction.
    pub corrections: u64,
}

/// The life of an adapter version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AdapterState {
    /// Trained, not judged yet.
    Candidate,
    /// Answers requests.
    Live,
    /// Was live, or may be.
    Kept,
    /// The gate refused it.
    Rejected,
    /// Came from elsewhere.
    Imported,
}

impl AdapterState {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Candidate => "candidate",
            Self::Live => "live",
            Self::Kept => "kept",
            Self::Rejected => "rejected",
            Self::Imported => "imported",
        }
    }

    pub(crate) fn parse(text: &str) -> Self {
        match text {
            "candidate" => Self::Candidate,
            "live" => Self::Live,
            "rejected" => Self::Rejected,
            "imported" => Self::Imported,
            _ => Self::Kept,
        }
    }
}

/// An adapter version and its lineage.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterRow {
    /// The version.
    pub version: AdapterVersion,
    /// What it was trained from.
    pub parent: Option<AdapterVersion>,
    /// Its life.
    pub state: AdapterState,
    /// The run that made it.
    pub run: Option<i64>,
    /// Its PEFT directory.
    pub dir: String,
    /// The base model's name.
    pub base_model: String,
    /// Steps it learned from in that run.
    pub steps_used: u32,
    /// Bytes on disk.
    pub size_bytes: u64,
    /// Summary metrics.
    pub metrics: Value,
    /// The gate's verdict.
    pub verdict: Option<Value>,
    /// Never pruned.
    pub pinned: bool,
    /// Milliseconds since the Unix epoch.
    pub created_at: i64,
}

/// A metric's name and its values by optimiser step.
pub type Series = (String, Vec<(u32, f64)>);

/// A training run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunRow {
    /// Its number.
    pub id: i64,
    /// `queued`, `training`, `checking`, `paused`, `promoted`, `rejected`, `failed`, `cancelled`.
    pub state: String,
    /// The version it starts from.
    pub parent: AdapterVersion,
    /// The version it made.
    pub version: Option<AdapterVersion>,
    /// Everything else the API shows, as JSON.
    pub detail: Value,
    /// Milliseconds since the Unix epoch.
    pub started_at: i64,
    /// Milliseconds since the Unix epoch.
    pub ended_at: Option<i64>,
}
