//! `trajectory`: one task attempt.

use rusqlite::{Connection, params};
use serde_json::Value;
use spotter_core::id::{SessionUid, TrajectoryUid};
use spotter_core::step::{Channel, Step, TrajectoryState};

use crate::error::{Result, StoreError};

fn channel_text(channel: Channel) -> &'static str {
    match channel {
        Channel::Train => "train",
        Channel::Val => "val",
    }
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
    c.prepare_cached(
        "INSERT INTO trajectory (uid, session, prompt_uid, channel, state, metadata, created_at, last_at)
         VALUES (?1, ?2, ?3, ?4, 'open', ?5, ?6, ?6)
         ON CONFLICT (uid) DO UPDATE SET prompt_uid = excluded.prompt_uid, channel = excluded.channel,
             metadata = coalesce(excluded.metadata, metadata), last_at = excluded.last_at",
    )?
    .execute(params![
        uid.as_str(),
        session.as_str(),
        prompt_uid,
        channel_text(channel),
        metadata.map(Value::to_string),
        at
    ])?;
    Ok(())
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

/// Marks the end.
pub(crate) fn end(
    c: &Connection,
    uid: &TrajectoryUid,
    state: TrajectoryState,
    at: i64,
) -> Result<()> {
    let state = match state {
        TrajectoryState::Open => "open",
        TrajectoryState::Complete => "complete",
        TrajectoryState::Abandoned => "abandoned",
    };
    let changed = c.execute(
        "UPDATE trajectory SET state = ?2, last_at = ?3 WHERE uid = ?1",
        params![uid.as_str(), state, at],
    )?;
    if changed == 0 {
        return Err(StoreError::NotFound {
            kind: "trajectory",
            id: uid.to_string(),
        });
    }
    Ok(())
}

/// Steps of a trajectory.
pub(crate) fn len(c: &Connection, uid: &TrajectoryUid) -> Result<u32> {
    Ok(
        c.prepare_cached("SELECT count(*) FROM step WHERE trajectory = ?1")?
            .query_row([uid.as_str()], |r| r.get::<_, i64>(0))? as u32,
    )
}
