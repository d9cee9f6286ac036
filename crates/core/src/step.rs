//! The atom of experience: one model call as (state, action, reward).

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::adapter::AdapterVersion;
use crate::generate::{FinishReason, Sampling};
use crate::id::{SessionUid, StepUid, TrajectoryUid};

/// Whether a step may be trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StepKind {
    /// A call that serves the person's own request.
    Main,
    /// Titles, compaction, heartbeats, feedback acknowledgements: never trained.
    Side,
}

/// Which data a trajectory belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Channel {
    /// Trained on.
    #[default]
    Train,
    /// Held out for evaluation.
    Val,
}

/// The life of a trajectory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrajectoryState {
    /// Steps may still come.
    #[default]
    Open,
    /// Its end mark has arrived.
    Complete,
    /// Silent past its deadline.
    Abandoned,
}

/// One model call, complete, as it is handed to the data pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Its id; the client sees it in `x-spotter-step` and in the completion id.
    pub uid: StepUid,
    /// The conversation.
    pub session: SessionUid,
    /// The task attempt.
    pub trajectory: TrajectoryUid,
    /// Attempts at one prompt share this id; unrelated chats never do.
    pub prompt_uid: String,
    /// The user turn inside the session (trace id, or derived).
    pub turn: String,
    /// Position in the trajectory, from 0.
    pub index: u32,
    /// Whether it may be trained.
    pub kind: StepKind,
    /// Why it is main or side, in a few words.
    pub kind_reason: String,
    /// The adapter version that answered.
    pub adapter: AdapterVersion,
    /// The base model's name.
    pub base_model: String,
    /// Prompt token ids. Empty when a remote engine gave none.
    pub prompt_ids: Vec<u32>,
    /// Response token ids. Empty when a remote engine gave none.
    pub response_ids: Vec<u32>,
    /// Log-probabilities of the sampling distribution, one per response id, or empty.
    pub logprobs: Vec<f32>,
    /// The model's own log-probabilities, one per response id, or empty.
    pub model_logprobs: Vec<f32>,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: u32,
    /// Milliseconds to the first token.
    pub first_token_ms: u64,
    /// Milliseconds in total.
    pub total_ms: u64,
    /// The client: user agent or a recognised name.
    pub client: String,
    /// The genuine user text of the turn, without what the client wraps around it.
    pub user_text: String,
    /// The answer's visible text.
    pub answer_text: String,
    /// The request's messages, tools and other fields as JSON
    /// (`{"messages": […], "tools": […], …}`).
    pub request: Value,
    /// The answer as one assistant message in JSON.
    pub response: Value,
    /// Milliseconds since the Unix epoch.
    pub created_at: i64,
}
