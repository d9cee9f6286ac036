//! What the gateway needs of the data pool.
//!
//! Kept as a trait so that the edge is tested without a database; it owns no SQL.

use async_trait::async_trait;
use futures::stream::BoxStream;
use serde_json::Value;
use spotter_core::code::Failure;
use spotter_core::id::{SessionUid, StepUid, TrajectoryUid};
use spotter_core::reward::Reward;
use spotter_core::step::{Channel, Step, StepKind};

use crate::control::dto::{
    Forgotten, ImportedData, SessionDetail, SessionPage, SessionQuery, StepDetail, StepPage,
    StepQuery, StepSummary,
};

pub mod memory;
pub mod sqlite;

/// A task attempt announced by a client.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenTrajectory {
    /// Its id.
    pub uid: TrajectoryUid,
    /// Attempts at one prompt share this.
    pub prompt_uid: String,
    /// Trained on, or held out.
    pub channel: Channel,
    /// What the client said about it.
    pub metadata: Value,
}

/// Where the last step of a conversation or a turn stands.
#[derive(Clone, Debug, PartialEq)]
pub struct LastStep {
    /// The step.
    pub uid: StepUid,
    /// Its trajectory.
    pub trajectory: TrajectoryUid,
    /// Its position there.
    pub index: u32,
    /// Its turn key.
    pub turn: String,
    /// The genuine user text of its turn.
    pub user_text: String,
    /// How many messages its request had.
    pub messages: usize,
}

/// An assistant message of a request, which may have been generated here.
#[derive(Clone, Debug, PartialEq)]
pub struct WantedAnswer {
    /// [`answer_key`] of its text and tool calls.
    pub key: String,
    /// Its text.
    pub content: String,
    /// Whether it calls tools.
    pub calls_tools: bool,
}

/// An assistant message that was generated here, found again in a request.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedAnswer {
    /// [`answer_key`] of its text and tool calls.
    pub key: String,
    /// The sampled token ids, end-of-turn token included.
    pub ids: Vec<u32>,
}

/// The data pool as the edge sees it. Unknown ids are `None`, never an error.
#[async_trait]
pub trait Pool: Send + Sync + 'static {
    /// Hands a step to the writer. When this returns, the step may be acknowledged
    /// to the client; it is on disk within 50 ms.
    async fn append(&self, step: Step) -> Result<(), Failure>;

    /// Announces a task attempt.
    async fn open_trajectory(&self, trajectory: OpenTrajectory) -> Result<(), Failure>;
    /// Marks a task attempt as complete. False when it is unknown.
    async fn complete_trajectory(&self, uid: &TrajectoryUid) -> Result<bool, Failure>;
    /// Adds a reward for a whole task attempt. False when it is unknown.
    async fn outcome(&self, uid: &TrajectoryUid, reward: Reward) -> Result<bool, Failure>;

    /// The last main step of a conversation.
    async fn last_step(&self, session: &SessionUid) -> Result<Option<LastStep>, Failure>;
    /// The last main step of a turn, by trace id or derived turn key.
    async fn last_step_of_turn(&self, turn: &str) -> Result<Option<StepUid>, Failure>;
    /// The recorded answers of a conversation among these; what is not found is left out.
    async fn recorded_answers(
        &self,
        session: &SessionUid,
        wanted: &[WantedAnswer],
    ) -> Result<Vec<RecordedAnswer>, Failure>;

    /// A page of steps, newest first.
    async fn steps(&self, query: StepQuery) -> Result<StepPage, Failure>;
    /// One step, complete.
    async fn step(&self, uid: &StepUid) -> Result<Option<StepDetail>, Failure>;
    /// Appends a reward row to a step and answers the step as it is then.
    async fn rate(&self, uid: &StepUid, reward: Reward) -> Result<Option<StepSummary>, Failure>;
    /// Overrides a step's kind.
    async fn set_kind(&self, uid: &StepUid, kind: StepKind)
    -> Result<Option<StepSummary>, Failure>;

    /// A page of conversations, last active first.
    async fn sessions(&self, query: SessionQuery) -> Result<SessionPage, Failure>;
    /// One conversation with its steps.
    async fn session(&self, uid: &SessionUid) -> Result<Option<SessionDetail>, Failure>;

    /// Forgets a step, from everywhere.
    async fn forget_step(&self, uid: &StepUid) -> Result<Option<Forgotten>, Failure>;
    /// Forgets a conversation, from everywhere.
    async fn forget_session(&self, uid: &SessionUid) -> Result<Option<Forgotten>, Failure>;
    /// Forgets everything.
    async fn forget_all(&self) -> Result<Forgotten, Failure>;

    /// Counts, sizes and limits as JSON.
    async fn data_stats(&self) -> Result<Value, Failure>;
    /// Every step as JSON lines.
    async fn export(&self) -> Result<BoxStream<'static, Result<String, Failure>>, Failure>;
    /// Takes exported JSON lines; a bad line is reported and skipped.
    async fn import(&self, lines: String) -> Result<ImportedData, Failure>;
}

/// The key under which an assistant message is found again although clients
/// rewrite it: whitespace at the ends and tool-call ids do not count.
///
/// `calls` yields name and arguments of each tool call; arguments that are JSON
/// are compared in compact form.
pub fn answer_key<'a>(content: &str, calls: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    hash.update(content.trim().as_bytes());
    for (name, arguments) in calls {
        hash.update([0]);
        hash.update(name.as_bytes());
        hash.update([0]);
        let compact = serde_json::from_str::<Value>(arguments)
            .map_or_else(|_| arguments.to_owned(), |value| value.to_string());
        hash.update(compact.as_bytes());
    }
    hex(&hash.finalize()[..16])
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
