//! `session`: one agent conversation.

use std::collections::BTreeSet;

use rusqlite::{Connection, OptionalExtension, Row, params};
use spotter_core::AdapterVersion;
use spotter_core::id::SessionUid;
use spotter_core::step::Step;

use crate::error::{Result, StoreError};
use crate::query::{Page, SessionSummary};
use crate::search::Query;
use crate::writer::Desk;

/// Longest title in characters.
const TITLE: usize = 80;
/// Matching steps whose sessions a search lists.
const MATCHES: usize = 2000;

/// Creates or touches the session of a step, and returns the number of the step's turn.
/// Its title is the first step's user text.
pub(crate) fn touch(c: &Connection, step: &Step) -> Result<i64> {
    let title: String = step.user_text.trim().chars().take(TITLE).collect();
    c.prepare_cached(
        "INSERT INTO session (uid, client, title, created_at, last_at) VALUES (?1, ?2, ?3, ?4, ?4)
         ON CONFLICT (uid) DO UPDATE SET last_at = max(last_at, excluded.last_at),
             title = CASE WHEN title = '' THEN excluded.title ELSE title END",
    )?
    .execute(params![
        step.session.as_str(),
        step.client,
        title,
        step.created_at
    ])?;
    let known: Option<i64> = c
        .prepare_cached("SELECT turn_no FROM step WHERE session = ?1 AND turn = ?2 LIMIT 1")?
        .query_row(params![step.session.as_str(), step.turn], |r| r.get(0))
        .optional()?;
    match known {
        Some(number) => Ok(number),
        None => Ok(c
            .prepare_cached("UPDATE session SET turns = turns + 1 WHERE uid = ?1 RETURNING turns")?
            .query_row([step.session.as_str()], |r| r.get(0))?),
    }
}

/// After steps were deleted: an empty session goes, and the title of another one is again
/// the text of a step that is there.
pub(crate) fn tidy(c: &Connection, uid: &str) -> Result<()> {
    let first: Option<String> = c
        .prepare_cached("SELECT user_text FROM step WHERE session = ?1 ORDER BY id LIMIT 1")?
        .query_row([uid], |r| r.get(0))
        .optional()?;
    match first {
        Some(text) => {
            let title: String = text.trim().chars().take(TITLE).collect();
            c.prepare_cached("UPDATE session SET title = ?2 WHERE uid = ?1")?
                .execute(params![uid, title])?;
        }
        None => {
            c.prepare_cached(
                "DELETE FROM session WHERE uid = ?1
                     AND NOT EXISTS (SELECT 1 FROM trajectory WHERE trajectory.session = session.uid)",
            )?
            .execute([uid])?;
        }
    }
    Ok(())
}

/// Creates a session that has no step yet.
pub(crate) fn create(c: &Connection, uid: &SessionUid, client: &str, at: i64) -> Result<()> {
    c.prepare_cached(
        "INSERT INTO session (uid, client, title, created_at, last_at) VALUES (?1, ?2, '', ?3, ?3)
         ON CONFLICT (uid) DO NOTHING",
    )?
    .execute(params![uid.as_str(), client, at])?;
    Ok(())
}

const COLUMNS: &str = "uid, title, client,
    (SELECT count(*) FROM step WHERE step.session = session.uid),
    (SELECT count(*) FROM step WHERE step.session = session.uid AND rating IS NOT NULL), last_at";

fn row(r: &Row<'_>) -> rusqlite::Result<SessionSummary> {
    Ok(SessionSummary {
        uid: r.get(0)?,
        title: r.get(1)?,
        client: r.get(2)?,
        steps: r.get::<_, i64>(3)? as u64,
        rated: r.get::<_, i64>(4)? as u64,
        last_at: r.get(5)?,
    })
}

/// Sessions, newest first; with `q`, those in whose newest matching steps it is found.
pub(crate) fn page(
    c: &Connection,
    q: Option<&str>,
    cursor: Option<&str>,
    limit: usize,
) -> Result<Page<SessionSummary>> {
    let limit = if limit == 0 { 50 } else { limit.min(500) };
    let (at, uid) = match cursor.and_then(|c| c.split_once('.')) {
        Some((at, uid)) => (at.parse().unwrap_or(i64::MAX), uid.to_owned()),
        None => (i64::MAX, "~".to_owned()),
    };
    // A search looks at the newest matches; a word that is everywhere has too many.
    let found = match Query::parse(q) {
        Some(query) => {
            let (index, text) = query.parts();
            let sessions = c
                .prepare_cached(&format!(
                    "SELECT step.session FROM {index} CROSS JOIN step ON step.id = {index}.rowid
                     WHERE {index} MATCH ?1 ORDER BY {index}.rowid DESC LIMIT {MATCHES}"
                ))?
                .query_map([text], |r| r.get::<_, String>(0))?
                .collect::<rusqlite::Result<BTreeSet<_>>>()?;
            Some(serde_json::to_string(&sessions).unwrap_or_else(|_| "[]".into()))
        }
        None => None,
    };
    let sql = format!(
        "SELECT {COLUMNS} FROM session WHERE (last_at, uid) < (?1, ?2) {}
         ORDER BY last_at DESC, uid DESC LIMIT ?3",
        if found.is_some() {
            "AND uid IN (SELECT value FROM json_each(?4))"
        } else {
            "AND ?4 IS NULL"
        }
    );
    let mut items = c
        .prepare_cached(&sql)?
        .query_map(params![at, uid, limit as i64 + 1, found], row)?
        .collect::<rusqlite::Result<Vec<_>>>()?;
    let more = items.len() > limit;
    items.truncate(limit);
    let next_cursor = items
        .last()
        .filter(|_| more)
        .map(|s| format!("{}.{}", s.last_at, s.uid));
    Ok(Page { items, next_cursor })
}

/// One session.
pub(crate) fn get(c: &Connection, uid: &str) -> Result<SessionSummary> {
    c.prepare_cached(&format!("SELECT {COLUMNS} FROM session WHERE uid = ?1"))?
        .query_row([uid], row)
        .optional()?
        .ok_or_else(|| StoreError::NotFound {
            kind: "session",
            id: uid.to_owned(),
        })
}

/// Deletes a session with its steps; returns how many there were and the adapters that
/// learned from them.
pub(crate) fn forget(desk: &Desk, uid: &SessionUid) -> Result<(u64, Vec<AdapterVersion>)> {
    get(desk, uid.as_str())?;
    let steps = desk
        .prepare_cached("SELECT uid FROM step WHERE session = ?1")?
        .query_map([uid.as_str()], |r| r.get(0))?
        .collect::<rusqlite::Result<Vec<String>>>()?;
    let touched = super::step::forget(desk, &steps)?;
    desk.execute("DELETE FROM trajectory WHERE session = ?1", [uid.as_str()])?;
    desk.execute("DELETE FROM session WHERE uid = ?1", [uid.as_str()])?;
    Ok((steps.len() as u64, touched))
}
