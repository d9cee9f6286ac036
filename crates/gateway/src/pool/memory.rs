//! A data pool in memory, for tests and measurements. Nothing survives the process.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use serde_json::{Value, json};
use spotter_core::chat::Message;
use spotter_core::code::{Code, Failure};
use spotter_core::id::{SessionUid, StepUid, TrajectoryUid};
use spotter_core::reward::{Reward, RewardSource};
use spotter_core::step::{Step, StepKind};

use super::{LastStep, OpenTrajectory, Pool, RecordedAnswer, WantedAnswer};
use crate::answer::{finish_name, kind_name, message_key};
use crate::control::dto::{
    Forgotten, ImportError, ImportedData, Rating, RewardRow, SessionDetail, SessionPage,
    SessionQuery, SessionSummary, StepDetail, StepPage, StepQuery, StepSummary, StoredMessage,
};
use crate::user_text::is_transient;

#[derive(Default)]
struct Tables {
    /// In order of arrival.
    steps: Vec<Step>,
    rewards: HashMap<StepUid, Vec<Reward>>,
    trajectories: HashMap<TrajectoryUid, (OpenTrajectory, bool)>,
    outcomes: HashMap<TrajectoryUid, Vec<Reward>>,
}

/// The pool.
#[derive(Default)]
pub struct MemoryPool {
    tables: Mutex<Tables>,
}

impl MemoryPool {
    fn with<T>(&self, read: impl FnOnce(&mut Tables) -> T) -> T {
        read(&mut self.tables.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Every step, in order of arrival.
    pub fn all_steps(&self) -> Vec<Step> {
        self.with(|tables| tables.steps.clone())
    }

    /// Rewards of a trajectory, and whether it is complete.
    pub fn trajectory(&self, uid: &TrajectoryUid) -> Option<(OpenTrajectory, bool, Vec<Reward>)> {
        self.with(|tables| {
            let (open, complete) = tables.trajectories.get(uid)?.clone();
            let outcomes = tables.outcomes.get(uid).cloned().unwrap_or_default();
            Some((open, complete, outcomes))
        })
    }
}

impl Tables {
    fn find(&self, uid: &StepUid) -> Option<&Step> {
        self.steps.iter().find(|step| step.uid == *uid)
    }

    fn rows(&self, uid: &StepUid) -> &[Reward] {
        self.rewards.get(uid).map_or(&[], Vec::as_slice)
    }

    fn turn_number(&self, step: &Step) -> u32 {
        let mut turns: Vec<&str> = Vec::new();
        for other in self.steps.iter().filter(|s| s.session == step.session) {
            if !turns.contains(&other.turn.as_str()) {
                turns.push(&other.turn);
            }
            if other.uid == step.uid {
                break;
            }
        }
        turns
            .iter()
            .position(|turn| *turn == step.turn)
            .and_then(|at| u32::try_from(at + 1).ok())
            .unwrap_or(1)
    }

    fn summary(&self, step: &Step) -> StepSummary {
        let rows = self.rows(&step.uid);
        let user = rows.iter().rev().find(|r| r.source == RewardSource::User);
        let rating = user.and_then(|r| r.value).map(|value| {
            if value > 0.0 {
                Rating::Up
            } else {
                Rating::Down
            }
        });
        let counts = rows
            .iter()
            .filter(|r| r.value.is_some())
            .max_by_key(|r| r.source.precedence())
            .and_then(|r| r.value);
        let reward = match user {
            Some(Reward {
                value: Some(value), ..
            }) => Some(*value),
            Some(_) => None,
            None => counts,
        };
        StepSummary {
            uid: step.uid.to_string(),
            session: step.session.to_string(),
            trajectory: step.trajectory.to_string(),
            turn: self.turn_number(step),
            kind: kind_name(step.kind).to_owned(),
            kind_reason: step.kind_reason.clone(),
            adapter: step.adapter.to_string(),
            client: step.client.clone(),
            user_text: step.user_text.clone(),
            answer_text: step.answer_text.clone(),
            rating,
            reward,
            reasons: user.map(|r| r.reasons.clone()).unwrap_or_default(),
            note: user.and_then(|r| r.note.clone()),
            correction: user.and_then(|r| r.correction.clone()),
            used_in_run: None,
            dropped_reason: None,
            in_next_lesson: rating.is_some() && step.kind == StepKind::Main,
            finish_reason: finish_name(step.finish_reason).to_owned(),
            prompt_tokens: length(step.prompt_ids.len()),
            response_tokens: length(step.response_ids.len()),
            created_at: step.created_at,
        }
    }

    fn session_summary(&self, session: &SessionUid) -> Option<SessionSummary> {
        let steps: Vec<&Step> = self
            .steps
            .iter()
            .filter(|s| s.session == *session)
            .collect();
        let (first, last) = (steps.first()?, steps.last()?);
        Some(SessionSummary {
            uid: session.to_string(),
            title: first.user_text.chars().take(80).collect(),
            client: last.client.clone(),
            steps: steps.len() as u64,
            rated: steps
                .iter()
                .filter(|s| self.summary(s).rating.is_some())
                .count() as u64,
            last_at: last.created_at,
        })
    }

    fn forget(&mut self, gone: impl Fn(&Step) -> bool) -> Forgotten {
        let before = self.steps.len();
        self.steps.retain(|step| !gone(step));
        let kept = &self.steps;
        self.rewards
            .retain(|uid, _| kept.iter().any(|s| s.uid == *uid));
        Forgotten {
            steps: (before - self.steps.len()) as u64,
            adapters: Vec::new(),
        }
    }

    fn last(&self, wanted: impl Fn(&Step) -> bool) -> Option<LastStep> {
        let step = self
            .steps
            .iter()
            .rev()
            .find(|s| s.kind == StepKind::Main && wanted(s))?;
        Some(LastStep {
            uid: step.uid.clone(),
            trajectory: step.trajectory.clone(),
            index: step.index,
            turn: step.turn.clone(),
            user_text: step.user_text.clone(),
            messages: kept_messages(&step.request),
        })
    }
}

fn length(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn stored_messages(request: &Value) -> Vec<StoredMessage> {
    request
        .get("messages")
        .cloned()
        .and_then(|messages| serde_json::from_value(messages).ok())
        .unwrap_or_default()
}

/// How many of a stored request's messages the client keeps in its history.
pub fn kept_messages(request: &Value) -> usize {
    request
        .get("messages")
        .and_then(Value::as_array)
        .map_or(0, |messages| {
            messages
                .iter()
                .filter_map(|m| serde_json::from_value::<Message>(m.clone()).ok())
                .filter(|m| !is_transient(m))
                .count()
        })
}

/// A page of `items`, whose cursor is the position of the next one.
fn page<T>(
    items: impl Iterator<Item = T>,
    cursor: Option<&str>,
    limit: Option<usize>,
) -> (Vec<T>, Option<String>) {
    let start = cursor.and_then(|c| c.parse().ok()).unwrap_or(0);
    let limit = limit.unwrap_or(50).clamp(1, 500);
    let mut items: Vec<T> = items.skip(start).take(limit + 1).collect();
    let more = items.len() > limit;
    items.truncate(limit);
    (items, more.then(|| (start + limit).to_string()))
}

fn contains(text: &str, wanted: Option<&str>) -> bool {
    wanted.is_none_or(|wanted| text.to_lowercase().contains(&wanted.to_lowercase()))
}

#[async_trait]
impl Pool for MemoryPool {
    async fn append(&self, step: Step) -> Result<(), Failure> {
        self.with(|tables| {
            let open = OpenTrajectory {
                uid: step.trajectory.clone(),
                prompt_uid: step.prompt_uid.clone(),
                channel: spotter_core::step::Channel::Train,
                metadata: Value::Null,
            };
            tables
                .trajectories
                .entry(step.trajectory.clone())
                .or_insert((open, false));
            tables.steps.push(step);
        });
        Ok(())
    }

    async fn open_trajectory(&self, trajectory: OpenTrajectory) -> Result<(), Failure> {
        self.with(|tables| {
            tables
                .trajectories
                .insert(trajectory.uid.clone(), (trajectory, false));
        });
        Ok(())
    }

    async fn complete_trajectory(&self, uid: &TrajectoryUid) -> Result<bool, Failure> {
        Ok(self.with(|tables| match tables.trajectories.get_mut(uid) {
            Some((_, complete)) => {
                *complete = true;
                true
            }
            None => false,
        }))
    }

    async fn outcome(&self, uid: &TrajectoryUid, reward: Reward) -> Result<bool, Failure> {
        Ok(self.with(|tables| {
            let known = tables.trajectories.contains_key(uid);
            if known {
                tables.outcomes.entry(uid.clone()).or_default().push(reward);
            }
            known
        }))
    }

    async fn last_step(&self, session: &SessionUid) -> Result<Option<LastStep>, Failure> {
        Ok(self.with(|tables| tables.last(|s| s.session == *session)))
    }

    async fn last_step_of_turn(&self, turn: &str) -> Result<Option<StepUid>, Failure> {
        Ok(self.with(|tables| tables.last(|s| s.turn == turn).map(|l| l.uid)))
    }

    async fn recorded_answers(
        &self,
        session: &SessionUid,
        wanted: &[WantedAnswer],
    ) -> Result<Vec<RecordedAnswer>, Failure> {
        Ok(self.with(|tables| {
            let mut found: Vec<RecordedAnswer> = Vec::new();
            let answers = tables
                .steps
                .iter()
                .rev()
                .filter(|s| s.session == *session && !s.response_ids.is_empty());
            for step in answers {
                let Ok(message) = serde_json::from_value::<Message>(step.response.clone()) else {
                    continue;
                };
                let key = message_key(&message.content, &message.tool_calls);
                if wanted.iter().any(|w| w.key == key) && !found.iter().any(|f| f.key == key) {
                    found.push(RecordedAnswer {
                        key,
                        ids: step.response_ids.clone(),
                    });
                }
            }
            found
        }))
    }

    async fn steps(&self, query: StepQuery) -> Result<StepPage, Failure> {
        Ok(self.with(|tables| {
            let wanted = tables
                .steps
                .iter()
                .rev()
                .filter(|s| {
                    query
                        .session
                        .as_ref()
                        .is_none_or(|id| s.session.as_str() == id)
                })
                .filter(|s| {
                    contains(&s.user_text, query.q.as_deref())
                        || contains(&s.answer_text, query.q.as_deref())
                })
                .map(|s| tables.summary(s))
                .filter(|s| !query.unrated || (s.rating.is_none() && s.kind == "main"));
            let (items, next_cursor) = page(wanted, query.cursor.as_deref(), query.limit);
            StepPage { items, next_cursor }
        }))
    }

    async fn step(&self, uid: &StepUid) -> Result<Option<StepDetail>, Failure> {
        Ok(self.with(|tables| {
            let step = tables.find(uid)?;
            Some(StepDetail {
                summary: tables.summary(step),
                messages: stored_messages(&step.request),
                response: serde_json::from_value(step.response.clone()).unwrap_or_default(),
                sampling: json!(step.sampling),
                logprobs: step.logprobs.clone(),
                model_logprobs: step.model_logprobs.clone(),
                rewards: tables
                    .rows(uid)
                    .iter()
                    .map(|r| RewardRow {
                        value: r.value,
                        source: r.source.as_str().to_owned(),
                        reasons: r.reasons.clone(),
                        note: r.note.clone(),
                        correction: r.correction.clone(),
                        created_at: r.created_at,
                    })
                    .collect(),
                prompt_ids: step.prompt_ids.clone(),
                response_ids: step.response_ids.clone(),
            })
        }))
    }

    async fn rate(&self, uid: &StepUid, reward: Reward) -> Result<Option<StepSummary>, Failure> {
        Ok(self.with(|tables| {
            tables.find(uid)?;
            tables.rewards.entry(uid.clone()).or_default().push(reward);
            tables.find(uid).map(|step| tables.summary(step))
        }))
    }

    async fn set_kind(
        &self,
        uid: &StepUid,
        kind: StepKind,
    ) -> Result<Option<StepSummary>, Failure> {
        Ok(self.with(|tables| {
            let step = tables.steps.iter_mut().find(|s| s.uid == *uid)?;
            step.kind = kind;
            "a person says so".clone_into(&mut step.kind_reason);
            tables.find(uid).map(|step| tables.summary(step))
        }))
    }

    async fn sessions(&self, query: SessionQuery) -> Result<SessionPage, Failure> {
        Ok(self.with(|tables| {
            let mut order: Vec<&SessionUid> = Vec::new();
            for step in tables.steps.iter().rev() {
                let fits = contains(&step.user_text, query.q.as_deref())
                    || contains(&step.answer_text, query.q.as_deref());
                if fits && !order.contains(&&step.session) {
                    order.push(&step.session);
                }
            }
            let summaries = order.into_iter().filter_map(|s| tables.session_summary(s));
            let (items, next_cursor) = page(summaries, query.cursor.as_deref(), query.limit);
            SessionPage { items, next_cursor }
        }))
    }

    async fn session(&self, uid: &SessionUid) -> Result<Option<SessionDetail>, Failure> {
        Ok(self.with(|tables| {
            let summary = tables.session_summary(uid)?;
            Some(SessionDetail {
                uid: summary.uid,
                title: summary.title,
                client: summary.client,
                rated: summary.rated,
                last_at: summary.last_at,
                steps: tables
                    .steps
                    .iter()
                    .filter(|s| s.session == *uid)
                    .map(|s| tables.summary(s))
                    .collect(),
            })
        }))
    }

    async fn forget_step(&self, uid: &StepUid) -> Result<Option<Forgotten>, Failure> {
        let forgotten = self.with(|tables| tables.forget(|s| s.uid == *uid));
        Ok((forgotten.steps > 0).then_some(forgotten))
    }

    async fn forget_session(&self, uid: &SessionUid) -> Result<Option<Forgotten>, Failure> {
        let forgotten = self.with(|tables| tables.forget(|s| s.session == *uid));
        Ok((forgotten.steps > 0).then_some(forgotten))
    }

    async fn forget_all(&self) -> Result<Forgotten, Failure> {
        Ok(self.with(|tables| tables.forget(|_| true)))
    }

    async fn data_stats(&self) -> Result<Value, Failure> {
        Ok(self.with(|tables| json!({"steps": tables.steps.len()})))
    }

    async fn export(&self) -> Result<BoxStream<'static, Result<String, Failure>>, Failure> {
        let lines: Vec<Result<String, Failure>> = self
            .all_steps()
            .iter()
            .map(|step| {
                serde_json::to_string(step)
                    .map_err(|error| Failure::new(Code::Internal, error.to_string()))
            })
            .collect();
        Ok(stream::iter(lines).boxed())
    }

    async fn import(&self, lines: String) -> Result<ImportedData, Failure> {
        let mut result = ImportedData::default();
        for (at, line) in lines
            .lines()
            .enumerate()
            .filter(|(_, l)| !l.trim().is_empty())
        {
            match serde_json::from_str::<Step>(line) {
                Ok(step) => {
                    self.append(step).await?;
                    result.imported += 1;
                }
                Err(error) => result.errors.push(ImportError {
                    line: at as u64 + 1,
                    message: error.to_string(),
                }),
            }
        }
        Ok(result)
    }
}
