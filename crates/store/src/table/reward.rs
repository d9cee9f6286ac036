//! `reward`: append-only feedback, and the effective reward of a step.

use rusqlite::{Connection, OptionalExtension, params};
use spotter_core::reward::{Reward, RewardSource};

use crate::error::{Result, StoreError};
use crate::query::RewardTarget;

/// Adds a row and brings the affected step up to date.
pub(crate) fn add(c: &Connection, target: &RewardTarget, reward: &Reward) -> Result<()> {
    if let Some(value) = reward.value
        && !(-1.0..=1.0).contains(&value)
    {
        return Err(StoreError::Invalid(format!(
            "a reward of {value} is outside [-1, 1]; nothing was stored"
        )));
    }
    let (step, trajectory) = match target {
        RewardTarget::Step(uid) => {
            exists(c, "step", uid.as_str())?;
            (Some(uid.as_str()), None)
        }
        RewardTarget::Trajectory(uid) => {
            exists(c, "trajectory", uid.as_str())?;
            (None, Some(uid.as_str()))
        }
    };
    c.prepare_cached(
        "INSERT INTO reward (step, trajectory, value, source, reasons, note, correction, created_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?
    .execute(params![
        step,
        trajectory,
        reward.value,
        reward.source.as_str(),
        serde_json::to_string(&reward.reasons).unwrap_or_else(|_| "[]".into()),
        reward.note,
        reward.correction,
        reward.created_at
    ])?;
    let affected = match target {
        RewardTarget::Step(uid) => Some(uid.to_string()),
        RewardTarget::Trajectory(uid) => last_step(c, uid.as_str())?,
    };
    affected.map_or(Ok(()), |uid| refresh(c, &uid))
}

fn exists(c: &Connection, kind: &'static str, uid: &str) -> Result<()> {
    let found: bool = c.query_row(
        &format!("SELECT EXISTS (SELECT 1 FROM {kind} WHERE uid = ?1)"),
        [uid],
        |r| r.get(0),
    )?;
    if found {
        Ok(())
    } else {
        Err(StoreError::NotFound {
            kind,
            id: uid.to_owned(),
        })
    }
}

fn last_step(c: &Connection, trajectory: &str) -> Result<Option<String>> {
    Ok(c.prepare_cached("SELECT uid FROM step WHERE trajectory = ?1 AND kind = 'main' ORDER BY idx DESC, id DESC LIMIT 1")?
        .query_row([trajectory], |r| r.get(0))
        .optional()?)
}

/// All rows that count for a step, oldest first: its own, and its trajectory's when it is
/// the last one.
pub(crate) fn of_step(c: &Connection, uid: &str) -> Result<Vec<Reward>> {
    let trajectory: Option<String> = c
        .prepare_cached("SELECT trajectory FROM step WHERE uid = ?1")?
        .query_row([uid], |r| r.get(0))
        .optional()?;
    let of_trajectory = match trajectory {
        Some(t) if last_step(c, &t)?.as_deref() == Some(uid) => Some(t),
        _ => None,
    };
    rows(c, Some(uid), of_trajectory.as_deref())
}

/// The rows given to exactly this target, oldest first.
pub(crate) fn own(c: &Connection, target: &RewardTarget) -> Result<Vec<Reward>> {
    match target {
        RewardTarget::Step(uid) => rows(c, Some(uid.as_str()), None),
        RewardTarget::Trajectory(uid) => rows(c, None, Some(uid.as_str())),
    }
}

fn rows(c: &Connection, step: Option<&str>, trajectory: Option<&str>) -> Result<Vec<Reward>> {
    let rows = c
        .prepare_cached(
            "SELECT value, source, reasons, note, correction, created_at FROM reward
             WHERE step = ?1 OR trajectory = ?2 ORDER BY id",
        )?
        .query_map(params![step, trajectory], |r| {
            Ok((
                r.get::<_, Option<f64>>(0)?,
                r.get::<_, String>(1)?,
                r.get::<_, String>(2)?,
                r.get(3)?,
                r.get(4)?,
                r.get(5)?,
            ))
        })?
        .collect::<rusqlite::Result<Vec<_>>>()?;
    rows.into_iter()
        .map(|(value, source, reasons, note, correction, created_at)| {
            Ok(Reward {
                value,
                source: source.parse().map_err(StoreError::Damaged)?,
                reasons: serde_json::from_str(&reasons)
                    .map_err(|e| StoreError::Damaged(e.to_string()))?,
                note,
                correction,
                created_at,
            })
        })
        .collect()
}

/// The row that decides: the newest of every source, then the highest precedence.
pub(crate) fn effective(rows: &[Reward]) -> Option<&Reward> {
    let newest = |source: RewardSource| {
        rows.iter()
            .rev()
            .find(|r| r.source == source)
            .filter(|r| r.value.is_some())
    };
    [
        RewardSource::User,
        RewardSource::Outcome,
        RewardSource::Rule,
        RewardSource::Judge,
        RewardSource::Implicit,
    ]
    .into_iter()
    .filter_map(newest)
    .max_by(|a, b| {
        a.source
            .precedence()
            .cmp(&b.source.precedence())
            .then(a.created_at.cmp(&b.created_at))
    })
}

/// Writes the effective reward into the step's row. A changed vote makes a step that was
/// not trained yet, or was dropped, fresh again.
pub(crate) fn refresh(c: &Connection, uid: &str) -> Result<()> {
    let rows = of_step(c, uid)?;
    let decides = effective(&rows);
    let user = rows.iter().rev().find(|r| r.source == RewardSource::User);
    let rating = user
        .and_then(|r| r.value)
        .map(|v| if v >= 0.0 { "up" } else { "down" });
    let correction = user
        .filter(|r| r.value.is_some())
        .and_then(|r| r.correction.as_deref());
    c.prepare_cached(
        "UPDATE step SET rating = ?2, reward = ?3, reward_source = ?4, correction = ?5,
             drop_reason = CASE WHEN learning = 'dropped' THEN NULL ELSE drop_reason END,
             learning = CASE WHEN learning = 'dropped' OR (learning = 'used' AND reward IS NOT ?3) THEN 'fresh' ELSE learning END
         WHERE uid = ?1",
    )?
    .execute(params![uid, rating, decides.and_then(|r| r.value), decides.map(|r| r.source.as_str()), correction])?;
    Ok(())
}
