//! The data pool over the store's SQLite file. Owns no SQL; it only translates.

use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use serde_json::{Value, json};
use spotter_core::chat::{Message, ToolCall};
use spotter_core::code::{Code, Failure};
use spotter_core::id::{SessionUid, StepUid, TrajectoryUid};
use spotter_core::reward::Reward;
use spotter_core::step::{Step, StepKind, TrajectoryState};
use spotter_store::{RewardTarget, Store, StoreError};
use tokio_stream::wrappers::ReceiverStream;

use super::memory::kept_messages;
use super::{LastStep, OpenTrajectory, Pool, RecordedAnswer, WantedAnswer};
use crate::control::dto::{
    Forgotten, ImportError, ImportedData, MessageToolCall, Rating, RewardRow, SessionDetail,
    SessionPage, SessionQuery, SessionSummary, StepDetail, StepPage, StepQuery, StepSummary,
    StoredMessage,
};

/// A step is on disk this long after it was handed over, at the latest.
const WRITE_DELAY: Duration = Duration::from_millis(60);
/// Steps read at once when a whole conversation is read.
const PAGE: usize = 500;

/// The pool.
#[derive(Clone)]
pub struct SqlitePool(Store);

impl SqlitePool {
    /// The pool over an open store.
    pub fn new(store: Store) -> Self {
        Self(store)
    }

    /// Runs a query on a blocking thread.
    async fn run<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, Failure> {
        let store = self.0.clone();
        tokio::task::spawn_blocking(move || query(&store))
            .await
            .map_err(|error| Failure::new(Code::Internal, error.to_string()))?
            .map_err(failure)
    }

    /// As [`Self::run`]; what is not there is `None`, once a step that was just handed
    /// over has had the time to reach the disk.
    async fn find<T: Send + 'static>(
        &self,
        query: impl Fn(&Store) -> Result<T, StoreError> + Clone + Send + 'static,
    ) -> Result<Option<T>, Failure> {
        match optional(self.run(query.clone()).await)? {
            Some(found) => Ok(Some(found)),
            None => {
                tokio::time::sleep(WRITE_DELAY).await;
                optional(self.run(query).await)
            }
        }
    }

    async fn summary(&self, uid: &StepUid) -> Result<Option<StepSummary>, Failure> {
        let uid = uid.clone();
        self.find(move |store| Ok(step_summary(store.summary(&uid)?)))
            .await
    }
}

fn optional<T>(result: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(failure) if failure.code == Code::NotFound => Ok(None),
        Err(failure) => Err(failure),
    }
}

fn failure(error: StoreError) -> Failure {
    let code = match &error {
        StoreError::NotFound { .. } => Code::NotFound,
        StoreError::Invalid(_) => Code::InvalidRequest,
        StoreError::Full => Code::Busy,
        _ if error.is_disk_full() => Code::DiskFull,
        _ => Code::Internal,
    };
    Failure::new(code, error.to_string())
}

/// A conversation's steps, oldest first.
fn conversation(
    store: &Store,
    session: &str,
) -> Result<Vec<spotter_store::StepSummary>, StoreError> {
    let mut filter = spotter_store::StepFilter {
        session: Some(session.to_owned()),
        limit: PAGE,
        ..Default::default()
    };
    let mut steps = Vec::new();
    loop {
        let page = store.steps(&filter)?;
        steps.extend(page.items);
        filter.cursor = page.next_cursor;
        if filter.cursor.is_none() {
            break;
        }
    }
    steps.reverse();
    Ok(steps)
}

fn step_summary(step: spotter_store::StepSummary) -> StepSummary {
    StepSummary {
        turn: step.turn_number,
        uid: step.uid,
        session: step.session,
        trajectory: step.trajectory,
        kind: step.kind,
        kind_reason: step.kind_reason,
        adapter: step.adapter.to_string(),
        client: step.client,
        user_text: step.user_text,
        answer_text: step.answer_text,
        rating: match step.rating.as_deref() {
            Some("up") => Some(Rating::Up),
            Some("down") => Some(Rating::Down),
            _ => None,
        },
        reward: step.reward,
        reasons: step.reasons,
        note: step.note,
        correction: step.correction,
        used_in_run: step.used_in_run,
        dropped_reason: step.dropped_reason,
        in_next_lesson: step.in_next_lesson,
        finish_reason: step.finish_reason,
        prompt_tokens: step.prompt_tokens,
        response_tokens: step.response_tokens,
        created_at: step.created_at,
    }
}

fn tool_call(call: ToolCall) -> MessageToolCall {
    MessageToolCall {
        id: call.id,
        name: call.name,
        arguments: call.arguments,
    }
}

fn stored_message(value: Value) -> StoredMessage {
    let Ok(message) = serde_json::from_value::<Message>(value) else {
        return StoredMessage::default();
    };
    StoredMessage {
        role: message.role.as_str().to_owned(),
        content: message.content,
        reasoning: message.reasoning,
        tool_calls: message.tool_calls.into_iter().map(tool_call).collect(),
        tool_call_id: message.tool_call_id,
        name: message.name,
    }
}

fn reward_row(reward: Reward) -> RewardRow {
    RewardRow {
        value: reward.value,
        source: reward.source.as_str().to_owned(),
        reasons: reward.reasons,
        note: reward.note,
        correction: reward.correction,
        created_at: reward.created_at,
    }
}

fn session_summary(session: spotter_store::SessionSummary) -> SessionSummary {
    SessionSummary {
        uid: session.uid,
        title: session.title,
        client: session.client,
        steps: session.steps,
        rated: session.rated,
        last_at: session.last_at,
    }
}

fn forgotten(gone: spotter_store::Forgotten) -> Forgotten {
    Forgotten {
        steps: gone.steps,
        adapters: gone.adapters.iter().map(ToString::to_string).collect(),
    }
}

#[async_trait]
impl Pool for SqlitePool {
    async fn append(&self, step: Step) -> Result<(), Failure> {
        self.0.append_step(step).map_err(failure)
    }

    async fn open_trajectory(&self, trajectory: OpenTrajectory) -> Result<(), Failure> {
        self.run(move |store| {
            let session = SessionUid::from(trajectory.uid.as_str());
            store.open_trajectory(
                trajectory.uid,
                trajectory.prompt_uid,
                session,
                trajectory.channel,
                Some(trajectory.metadata).filter(|m| !m.is_null()),
            )
        })
        .await
    }

    async fn complete_trajectory(&self, uid: &TrajectoryUid) -> Result<bool, Failure> {
        let uid = uid.clone();
        let ended = self
            .run(move |store| store.end_trajectory(uid, TrajectoryState::Complete))
            .await;
        Ok(optional(ended)?.is_some())
    }

    async fn outcome(&self, uid: &TrajectoryUid, reward: Reward) -> Result<bool, Failure> {
        let target = RewardTarget::Trajectory(uid.clone());
        let added = self
            .run(move |store| store.add_reward(target, reward))
            .await;
        Ok(optional(added)?.is_some())
    }

    async fn last_step(&self, session: &SessionUid) -> Result<Option<LastStep>, Failure> {
        let session = session.clone();
        let found = self.run(move |store| {
            let step = store.step(&store.step_of_session(session.as_str())?)?;
            let trajectory = TrajectoryUid::from(step.summary.trajectory);
            let index = store.trajectory_len(&trajectory)?.saturating_sub(1);
            Ok((step.summary.kind == "main").then(|| LastStep {
                uid: StepUid::from(step.summary.uid),
                trajectory,
                index,
                turn: step.summary.turn,
                user_text: step.summary.user_text,
                messages: kept_messages(&step.request),
            }))
        });
        Ok(optional(found.await)?.flatten())
    }

    async fn last_step_of_turn(&self, turn: &str) -> Result<Option<StepUid>, Failure> {
        let turn = turn.to_owned();
        self.find(move |store| store.step_of_turn(&turn)).await
    }

    async fn recorded_answers(
        &self,
        session: &SessionUid,
        wanted: &[WantedAnswer],
    ) -> Result<Vec<RecordedAnswer>, Failure> {
        let session = session.clone();
        // The store finds answers by their text, so one that calls tools is not among them.
        let wanted: Vec<WantedAnswer> = wanted
            .iter()
            .filter(|w| !w.calls_tools && !w.content.is_empty())
            .cloned()
            .collect();
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        self.run(move |store| {
            let mut found = Vec::new();
            for answer in wanted {
                if let Some(ids) = store.answer_ids(session.as_str(), &answer.content)? {
                    found.push(RecordedAnswer {
                        key: answer.key,
                        ids,
                    });
                }
            }
            Ok(found)
        })
        .await
    }

    async fn steps(&self, query: StepQuery) -> Result<StepPage, Failure> {
        self.run(move |store| {
            let page = store.steps(&spotter_store::StepFilter {
                unrated: query.unrated,
                session: query.session,
                q: query.q,
                cursor: query.cursor,
                limit: query.limit.unwrap_or(0),
                ..Default::default()
            })?;
            Ok(StepPage {
                items: page.items.into_iter().map(step_summary).collect(),
                next_cursor: page.next_cursor,
            })
        })
        .await
    }

    async fn step(&self, uid: &StepUid) -> Result<Option<StepDetail>, Failure> {
        let uid = uid.clone();
        self.find(move |store| {
            let mut step = store.step(&uid)?;
            let messages = match step.request.get_mut("messages").map(Value::take) {
                Some(Value::Array(messages)) => messages.into_iter().map(stored_message).collect(),
                _ => Vec::new(),
            };
            Ok(StepDetail {
                summary: step_summary(step.summary),
                messages,
                response: stored_message(step.response),
                sampling: step.sampling,
                logprobs: step.logprobs,
                model_logprobs: step.model_logprobs,
                rewards: step.rewards.into_iter().map(reward_row).collect(),
                prompt_ids: step.prompt_ids,
                response_ids: step.response_ids,
            })
        })
        .await
    }

    async fn rate(&self, uid: &StepUid, reward: Reward) -> Result<Option<StepSummary>, Failure> {
        // The writer works in order, so a step that was just handed over is there first.
        let target = RewardTarget::Step(uid.clone());
        let added = self
            .run(move |store| store.add_reward(target, reward))
            .await;
        match optional(added)? {
            Some(()) => self.summary(uid).await,
            None => Ok(None),
        }
    }

    async fn set_kind(
        &self,
        uid: &StepUid,
        kind: StepKind,
    ) -> Result<Option<StepSummary>, Failure> {
        let target = uid.clone();
        let changed = self.run(move |store| store.set_kind(target, kind)).await;
        match optional(changed)? {
            Some(()) => self.summary(uid).await,
            None => Ok(None),
        }
    }

    async fn sessions(&self, query: SessionQuery) -> Result<SessionPage, Failure> {
        self.run(move |store| {
            let (q, cursor) = (query.q.as_deref(), query.cursor.as_deref());
            let page = store.sessions(q, cursor, query.limit.unwrap_or(0))?;
            Ok(SessionPage {
                items: page.items.into_iter().map(session_summary).collect(),
                next_cursor: page.next_cursor,
            })
        })
        .await
    }

    async fn session(&self, uid: &SessionUid) -> Result<Option<SessionDetail>, Failure> {
        let uid = uid.clone();
        self.find(move |store| {
            let session = store.session(uid.as_str())?;
            let steps = conversation(store, uid.as_str())?;
            Ok(SessionDetail {
                uid: session.uid,
                title: session.title,
                client: session.client,
                rated: session.rated,
                last_at: session.last_at,
                steps: steps.into_iter().map(step_summary).collect(),
            })
        })
        .await
    }

    async fn forget_step(&self, uid: &StepUid) -> Result<Option<Forgotten>, Failure> {
        let uid = uid.clone();
        let gone = self.run(move |store| Ok(forgotten(store.forget_step(uid)?)));
        optional(gone.await)
    }

    async fn forget_session(&self, uid: &SessionUid) -> Result<Option<Forgotten>, Failure> {
        let uid = uid.clone();
        let gone = self.run(move |store| Ok(forgotten(store.forget_session(uid)?)));
        optional(gone.await)
    }

    async fn forget_all(&self) -> Result<Forgotten, Failure> {
        self.run(|store| Ok(forgotten(store.forget_everything()?)))
            .await
    }

    async fn data_stats(&self) -> Result<Value, Failure> {
        self.run(|store| {
            let counts = store.counts()?;
            let bytes = std::fs::metadata(store.path()).map_or(0, |file| file.len());
            let health = store.health();
            let dropped: serde_json::Map<String, Value> = store
                .drop_counts()?
                .into_iter()
                .map(|(reason, n)| (reason, json!(n)))
                .collect();
            Ok(json!({
                "steps": counts.steps, "unrated": counts.unrated, "rated": counts.rated,
                "up": counts.up, "down": counts.down, "sessions": counts.sessions,
                "file_bytes": bytes, "used_bytes": store.used_bytes()?, "dropped": dropped,
                "queued": health.queued, "queue_capacity": health.capacity,
                "stopped": health.stopped, "lost": health.lost,
            }))
        })
        .await
    }

    async fn export(&self) -> Result<BoxStream<'static, Result<String, Failure>>, Failure> {
        let (sender, lines) = tokio::sync::mpsc::channel(64);
        let store = self.0.clone();
        tokio::task::spawn_blocking(move || {
            let end = store.export(|line| {
                sender
                    .blocking_send(Ok(line.to_owned()))
                    .map_err(|_| StoreError::Closed)
            });
            match end {
                // A client that went away needs no error.
                Ok(()) | Err(StoreError::Closed) => {}
                Err(error) => {
                    let _ = sender.blocking_send(Err(failure(error)));
                }
            }
        });
        Ok(ReceiverStream::new(lines).boxed())
    }

    async fn import(&self, lines: String) -> Result<ImportedData, Failure> {
        self.run(move |store| {
            let taken = store.import(lines.lines().map(str::to_owned))?;
            Ok(ImportedData {
                imported: taken.imported,
                errors: taken
                    .errors
                    .into_iter()
                    .map(|(line, message)| ImportError { line, message })
                    .collect(),
            })
        })
        .await
    }
}
