//! The pool as JSON lines: one line per step, oldest first. `docs/data-format.md`
//! describes the fields. What is read back is written the same again.

use rusqlite::Connection;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use spotter_core::id::{StepUid, TrajectoryUid};
use spotter_core::reward::Reward;
use spotter_core::step::{Channel, Step, TrajectoryState};

use crate::error::{Result, StoreError};
use crate::query::RewardTarget;
use crate::redact::Redactor;
use crate::table::{reward, step, trajectory};
use crate::writer::Desk;

/// Lines taken in one transaction.
pub(crate) const CHUNK: usize = 200;
/// Lines read at once.
const PAGE: i64 = 100;

/// One line.
#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(flatten)]
    step: Step,
    #[serde(default)]
    rewards: Vec<Reward>,
    /// What the rewards come to, for readers other than this one.
    #[serde(skip_deserializing)]
    reward: Option<f64>,
    /// The person's correction that counts, likewise.
    #[serde(skip_deserializing)]
    correction: Option<String>,
    #[serde(default)]
    attempt: Attempt,
}

/// What is known of the step's trajectory.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Attempt {
    channel: Channel,
    state: TrajectoryState,
    /// Announced by a client, with how many attempts at its prompt there will be.
    #[serde(skip_serializing_if = "Option::is_none")]
    expected: Option<i64>,
    #[serde(skip_serializing_if = "Value::is_null")]
    metadata: Value,
    /// Rewards of the attempt as a whole; on its last line only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rewards: Vec<Reward>,
}

/// What an import took.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// Steps that are new.
    pub imported: u64,
    /// Steps that were there already; they keep their own ratings.
    pub known: u64,
    /// Number (from 1) of every line that could not be taken, and why.
    pub errors: Vec<(u64, String)>,
}

/// The lines of the steps after this row, and the last row of them; none at the end.
pub(crate) fn page(c: &Connection, after: i64) -> Result<Option<(Vec<String>, i64)>> {
    let rows: Vec<(i64, String)> = c
        .prepare_cached("SELECT id, uid FROM step WHERE id > ?1 ORDER BY id LIMIT ?2")?
        .query_map([after, PAGE], |r| Ok((r.get(0)?, r.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let Some(last) = rows.last().map(|(id, _)| *id) else {
        return Ok(None);
    };
    let lines = rows.iter().map(|(_, uid)| line(c, uid));
    Ok(Some((lines.collect::<Result<_>>()?, last)))
}

fn line(c: &Connection, uid: &str) -> Result<String> {
    let stored = step::stored(c, &StepUid::from(uid))?;
    let last: bool = c
        .prepare_cached(
            "SELECT NOT EXISTS (SELECT 1 FROM step AS later JOIN step ON later.trajectory = step.trajectory
                 WHERE step.uid = ?1 AND later.id > step.id)",
        )?
        .query_row([uid], |r| r.get(0))?;
    let (channel, state, expected, metadata) = c
        .prepare_cached(
            "SELECT channel, state, CASE WHEN announced THEN coalesce(expected, 1) END, metadata
             FROM trajectory LEFT JOIN prompt_group ON prompt_group.uid = trajectory.prompt_uid
             WHERE trajectory.uid = ?1",
        )?
        .query_row([stored.trajectory.as_str()], |r| {
            Ok((
                r.get::<_, String>(0)?,
                r.get::<_, String>(1)?,
                r.get::<_, Option<i64>>(2)?,
                r.get::<_, Option<String>>(3)?,
            ))
        })?;
    let damaged = |e: serde_json::Error| StoreError::Damaged(e.to_string());
    let (_, summary) = step::summary_of(c, &stored.uid)?;
    let line = Line {
        reward: summary.reward,
        correction: summary.correction,
        rewards: reward::own(c, &RewardTarget::Step(stored.uid.clone()))?,
        attempt: Attempt {
            channel: trajectory::channel_of(&channel),
            state: trajectory::state_of(&state),
            expected,
            metadata: metadata
                .map(|text| serde_json::from_str(&text))
                .transpose()
                .map_err(damaged)?
                .unwrap_or_default(),
            rewards: if last {
                reward::own(c, &RewardTarget::Trajectory(stored.trajectory.clone()))?
            } else {
                Vec::new()
            },
        },
        step: stored,
    };
    serde_json::to_string(&line).map_err(damaged)
}

/// Takes these numbered lines.
pub(crate) fn import(
    desk: &Desk,
    lines: &[(u64, String)],
    redactor: &Redactor,
    now: i64,
) -> Result<Imported> {
    let mut result = Imported::default();
    for (number, text) in lines {
        desk.execute_batch("SAVEPOINT line")?;
        match take(desk, text, redactor, now) {
            Ok(true) => result.imported += 1,
            Ok(false) => result.known += 1,
            Err(error) if error.is_disk_full() => return Err(error),
            Err(error) => {
                desk.execute_batch("ROLLBACK TO line")?;
                desk.recent.borrow_mut().clear();
                result.errors.push((*number, error.to_string()));
            }
        }
        desk.execute_batch("RELEASE line")?;
    }
    Ok(result)
}

fn take(desk: &Desk, text: &str, redactor: &Redactor, now: i64) -> Result<bool> {
    let invalid = |e: serde_json::Error| StoreError::Invalid(e.to_string());
    let mut fields: serde_json::Map<String, Value> = serde_json::from_str(text).map_err(invalid)?;
    let trajectory = fields
        .get("trajectory")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned();
    // Exports of the first version named neither; the order of lines is the order of steps.
    if !fields.contains_key("index") {
        let next = trajectory::len(desk, &TrajectoryUid::from(trajectory.as_str()))?;
        fields.insert("index".into(), next.into());
    }
    if !fields.contains_key("prompt_uid") {
        fields.insert("prompt_uid".into(), trajectory.into());
    }
    let mut line: Line = serde_json::from_value(Value::Object(fields)).map_err(invalid)?;
    check(&line.step)?;
    redactor.step(&mut line.step);
    if !step::insert(desk, &line.step)? {
        return Ok(false);
    }
    let (attempt, uid) = (line.attempt, line.step.trajectory.clone());
    trajectory::restore(
        desk,
        &line.step,
        attempt.channel,
        attempt.state,
        attempt.expected,
        Some(&attempt.metadata).filter(|m| !m.is_null()),
        now,
    )?;
    for mut given in line.rewards {
        redactor.reward(&mut given);
        reward::add(desk, &RewardTarget::Step(line.step.uid.clone()), &given)?;
    }
    for mut given in attempt.rewards {
        redactor.reward(&mut given);
        reward::add(desk, &RewardTarget::Trajectory(uid.clone()), &given)?;
    }
    Ok(true)
}

/// What the types do not say.
fn check(step: &Step) -> Result<()> {
    let ids = [
        ("uid", step.uid.as_str()),
        ("session", step.session.as_str()),
        ("trajectory", step.trajectory.as_str()),
        ("prompt_uid", step.prompt_uid.as_str()),
    ];
    for (name, id) in ids {
        if id.is_empty() || id.len() > 256 || id.chars().any(char::is_control) {
            return Err(StoreError::Invalid(format!("'{name}' is not an id")));
        }
    }
    let n = step.response_ids.len();
    for (name, values) in [
        ("logprobs", &step.logprobs),
        ("model_logprobs", &step.model_logprobs),
    ] {
        if !values.is_empty() && values.len() != n {
            return Err(StoreError::Invalid(format!(
                "'{name}' has {} values for {n} response ids",
                values.len()
            )));
        }
    }
    Ok(())
}
