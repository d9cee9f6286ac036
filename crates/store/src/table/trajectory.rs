//! `trajectory` and `prompt_group`: task attempts, and attempts at one prompt.

use rusqlite::{Connection, OptionalExtension, params};
use serde_json::Value;
use spotter_core::id::{SessionUid, TrajectoryUid};
use spotter_core::step::{Channel, Step, TrajectoryState};

use crate::error::{Result, StoreError};
use crate::table::drop_count;

/// Why an attempt without an end mark does not count as complete.
const SILENT: &str = "the attempt was silent past its deadline";

fn channel_text(channel: Channel) -> &'static str {
    match channel {
        Channel::Train => "train",
        Channel::Val => "val",
    }
}

pub(crate) fn channel_of(text: &str) -> Channel {
    match text {
        "val" => Channel::Val,
        _ => Channel::Train,
    }
}

fn state_text(state: TrajectoryState) -> &'static str {
    match state {
        TrajectoryState::Open => "open",
        TrajectoryState::Complete => "complete",
        TrajectoryState::Abandoned => "abandoned",
    }
}

pub(crate) fn state_of(text: &str) -> TrajectoryState {
    match text {
        "complete" => TrajectoryState::Complete,
        "abandoned" => TrajectoryState::Abandoned,
        _ => TrajectoryState::Open,
    }
}

/// How many attempts at its prompt a client announces, in the metadata it sends.
fn expected(metadata: Option<&Value>) -> i64 {
    ["group_size", "n"]
        .iter()
        .find_map(|key| metadata?.get(key)?.as_i64())
        .map_or(1, |n| n.clamp(1, 10_000))
}

/// Opens a trajectory, or updates what a client registers about it.
pub(crate) fn open(
    c: &Connection,
    uid: &TrajectoryUid,
    prompt_uid: &str,
    session: &SessionUid,
    channel: Channel,
    metadata: Option<&Value>,
    at: i64,
) -> Result<()> {
    super::session::create(c, session, "claw-r1", at)?;
    let before: Option<String> = c
        .prepare_cached("SELECT prompt_uid FROM trajectory WHERE uid = ?1")?
        .query_row([uid.as_str()], |r| r.get(0))
        .optional()?;
    c.prepare_cached(
        "INSERT INTO trajectory (uid, session, prompt_uid, channel, state, metadata, created_at, last_at, announced)
         VALUES (?1, ?2, ?3, ?4, 'open', ?5, ?6, ?6, 1)
         ON CONFLICT (uid) DO UPDATE SET prompt_uid = excluded.prompt_uid, channel = excluded.channel,
             metadata = coalesce(excluded.metadata, metadata), last_at = excluded.last_at, announced = 1",
    )?
    .execute(params![
        uid.as_str(),
        session.as_str(),
        prompt_uid,
        channel_text(channel),
        metadata.map(Value::to_string),
        at
    ])?;
    if let Some(before) = before.filter(|b| b != prompt_uid) {
        weigh(c, &before, 1, at)?;
    }
    weigh(c, prompt_uid, expected(metadata), at)
}

/// Creates or touches the trajectory of a step.
pub(crate) fn touch(c: &Connection, step: &Step) -> Result<()> {
    c.prepare_cached(
        "INSERT INTO trajectory (uid, session, prompt_uid, channel, state, created_at, last_at)
         VALUES (?1, ?2, ?3, 'train', 'open', ?4, ?4)
         ON CONFLICT (uid) DO UPDATE SET last_at = max(last_at, excluded.last_at)",
    )?
    .execute(params![
        step.trajectory.as_str(),
        step.session.as_str(),
        step.prompt_uid,
        step.created_at
    ])?;
    Ok(())
}

/// Gives an imported step's trajectory what the line said of it.
pub(crate) fn restore(
    c: &Connection,
    step: &Step,
    channel: Channel,
    state: TrajectoryState,
    expected: Option<i64>,
    metadata: Option<&Value>,
    at: i64,
) -> Result<()> {
    c.prepare_cached(
        "UPDATE trajectory SET channel = ?2, state = ?3, announced = announced OR ?4, metadata = coalesce(?5, metadata)
         WHERE uid = ?1",
    )?
    .execute(params![
        step.trajectory.as_str(),
        channel_text(channel),
        state_text(state),
        expected.is_some(),
        metadata.map(Value::to_string),
    ])?;
    match expected {
        Some(n) => weigh(c, &step.prompt_uid, n.clamp(1, 10_000), at),
        None => Ok(()),
    }
}

/// Marks the end.
pub(crate) fn end(
    c: &Connection,
    uid: &TrajectoryUid,
    state: TrajectoryState,
    at: i64,
) -> Result<()> {
    let group: Option<(String, bool)> = c
        .prepare_cached(
            "UPDATE trajectory SET state = ?2, last_at = ?3 WHERE uid = ?1 RETURNING prompt_uid, announced",
        )?
        .query_row(params![uid.as_str(), state_text(state), at], |r| {
            Ok((r.get(0)?, r.get(1)?))
        })
        .optional()?;
    match group {
        Some((group, true)) => weigh(c, &group, 1, at),
        Some((_, false)) => Ok(()),
        None => Err(StoreError::NotFound {
            kind: "trajectory",
            id: uid.to_string(),
        }),
    }
}

/// Decides whether a group is ready: every expected attempt has ended. An attempt that
/// nobody grouped with others waits for nothing.
fn weigh(c: &Connection, group: &str, expected: i64, at: i64) -> Result<()> {
    let (announced, open): (i64, i64) = c
        .prepare_cached(
            "SELECT count(*), count(*) FILTER (WHERE state = 'open') FROM trajectory
             WHERE prompt_uid = ?1 AND announced = 1",
        )?
        .query_row([group], |r| Ok((r.get(0)?, r.get(1)?)))?;
    if announced == 0 {
        c.prepare_cached("DELETE FROM prompt_group WHERE uid = ?1")?
            .execute([group])?;
        return Ok(());
    }
    c.prepare_cached(
        "INSERT INTO prompt_group (uid, expected, last_at) VALUES (?1, ?2, ?3)
         ON CONFLICT (uid) DO UPDATE SET expected = max(expected, excluded.expected), last_at = max(last_at, excluded.last_at)",
    )?
    .execute(params![group, expected, at])?;
    c.prepare_cached(
        "UPDATE prompt_group SET ready = (?2 = 0 AND ?3 >= expected) OR max(?3, expected) = 1 WHERE uid = ?1",
    )?
    .execute(params![group, open, announced])?;
    Ok(())
}

/// Abandons announced attempts that were silent since `before`, and readies groups whose
/// missing attempts never came. Returns how many attempts were abandoned.
pub(crate) fn abandon(c: &Connection, before: i64, at: i64) -> Result<u64> {
    let silent: Vec<(String, String)> = c
        .prepare_cached(
            "SELECT uid, prompt_uid FROM trajectory WHERE state = 'open' AND announced = 1 AND last_at < ?1 LIMIT 1000",
        )?
        .query_map([before], |r| Ok((r.get(0)?, r.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    for (uid, group) in &silent {
        c.prepare_cached("UPDATE trajectory SET state = 'abandoned' WHERE uid = ?1")?
            .execute([uid])?;
        weigh(c, group, 1, 0)?;
    }
    drop_count::add(c, SILENT, silent.len() as u64, at)?;
    c.prepare_cached(
        "UPDATE prompt_group SET ready = 1 WHERE ready = 0 AND last_at < ?1 AND NOT EXISTS (
             SELECT 1 FROM trajectory WHERE trajectory.prompt_uid = prompt_group.uid AND announced = 1 AND state = 'open')",
    )?
    .execute([before])?;
    Ok(silent.len() as u64)
}

/// After steps were deleted: an attempt without steps goes, unless it is under way.
pub(crate) fn tidy(c: &Connection, uid: &str) -> Result<()> {
    let group: Option<String> = c
        .prepare_cached(
            "DELETE FROM trajectory WHERE uid = ?1 AND NOT (announced = 1 AND state = 'open')
                 AND NOT EXISTS (SELECT 1 FROM step WHERE step.trajectory = trajectory.uid) RETURNING prompt_uid",
        )?
        .query_row([uid], |r| r.get(0))
        .optional()?;
    group.map_or(Ok(()), |group| {
        c.prepare_cached(
            "DELETE FROM prompt_group WHERE uid = ?1 AND NOT EXISTS (
                 SELECT 1 FROM trajectory WHERE trajectory.prompt_uid = prompt_group.uid)",
        )?
        .execute([group])?;
        Ok(())
    })
}

/// Steps of a trajectory.
pub(crate) fn len(c: &Connection, uid: &TrajectoryUid) -> Result<u32> {
    Ok(
        c.prepare_cached("SELECT count(*) FROM step WHERE trajectory = ?1")?
            .query_row([uid.as_str()], |r| r.get::<_, i64>(0))? as u32,
    )
}
