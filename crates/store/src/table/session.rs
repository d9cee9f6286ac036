//! `session`: one agent conversation.

use rusqlite::{Connection, OptionalExtension, Row, params};
use spotter_core::AdapterVersion;
use spotter_core::id::SessionUid;
use spotter_core::step::Step;

use crate::error::{Result, StoreError};
use crate::query::{Page, SessionSummary};

/// Longest title in characters.
const TITLE: usize = 80;

/// Creates or touches the session of a step. Its title is the first main step's user text.
pub(crate) fn touch(c: &Connection, step: &Step) -> Result<()> {
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

/// Sessions, newest first. `q` searches titles and, through the full-text index, texts.
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
    let q = q.map(str::trim).filter(|q| !q.is_empty());
    let sql = format!(
        "SELECT {COLUMNS} FROM session
         WHERE (last_at, uid) < (?1, ?2) {} ORDER BY last_at DESC, uid DESC LIMIT ?3",
        match q {
            Some(q) if q.chars().count() >= 3 =>
                "AND uid IN (SELECT session FROM step WHERE id IN (SELECT rowid FROM step_text WHERE step_text MATCH ?4))",
            Some(_) =>
                "AND uid IN (SELECT session FROM step WHERE user_text LIKE ?4 OR answer_text LIKE ?4)",
            None => "AND ?4 IS NULL",
        }
    );
    let term = q.map(super::step::search_term);
    let mut items = c
        .prepare_cached(&sql)?
        .query_map(params![at, uid, limit as i64 + 1, term], row)?
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

/// Deletes a session with its steps; returns the adapters that learned from them.
pub(crate) fn forget(c: &Connection, uid: &SessionUid) -> Result<Vec<AdapterVersion>> {
    get(c, uid.as_str())?;
    let steps = c
        .prepare_cached("SELECT uid FROM step WHERE session = ?1")?
        .query_map([uid.as_str()], |r| r.get(0))?
        .collect::<rusqlite::Result<Vec<String>>>()?;
    let touched = super::step::forget(c, &steps)?;
    c.execute("DELETE FROM trajectory WHERE session = ?1", [uid.as_str()])?;
    c.execute("DELETE FROM session WHERE uid = ?1", [uid.as_str()])?;
    Ok(touched)
}
