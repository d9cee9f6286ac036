//! `run`: training runs.

use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::Value;
use spotter_core::AdapterVersion;

use crate::error::{Result, StoreError};
use crate::query::RunRow;

pub(crate) fn insert(
    c: &Connection,
    state: &str,
    parent: AdapterVersion,
    detail: &Value,
    at: i64,
) -> Result<i64> {
    c.execute(
        "INSERT INTO run (state, parent, detail, started_at) VALUES (?1, ?2, ?3, ?4)",
        params![state, parent.0, detail.to_string(), at],
    )?;
    Ok(c.last_insert_rowid())
}

pub(crate) fn update(c: &Connection, row: &RunRow) -> Result<()> {
    let changed = c.execute(
        "UPDATE run SET state = ?2, version = ?3, detail = ?4, ended_at = ?5 WHERE id = ?1",
        params![
            row.id,
            row.state,
            row.version.map(|v| v.0),
            row.detail.to_string(),
            row.ended_at
        ],
    )?;
    if changed == 0 {
        Err(not_found(row.id))
    } else {
        Ok(())
    }
}

fn not_found(id: i64) -> StoreError {
    StoreError::NotFound {
        kind: "run",
        id: id.to_string(),
    }
}

fn row(r: &Row<'_>) -> rusqlite::Result<RunRow> {
    Ok(RunRow {
        id: r.get(0)?,
        state: r.get(1)?,
        parent: AdapterVersion(r.get(2)?),
        version: r.get::<_, Option<u32>>(3)?.map(AdapterVersion),
        detail: serde_json::from_str(&r.get::<_, String>(4)?).unwrap_or(Value::Null),
        started_at: r.get(5)?,
        ended_at: r.get(6)?,
    })
}

const COLUMNS: &str = "id, state, parent, version, detail, started_at, ended_at";

pub(crate) fn get(c: &Connection, id: i64) -> Result<RunRow> {
    c.prepare_cached(&format!("SELECT {COLUMNS} FROM run WHERE id = ?1"))?
        .query_row([id], row)
        .optional()?
        .ok_or_else(|| not_found(id))
}

pub(crate) fn list(c: &Connection, most: usize) -> Result<Vec<RunRow>> {
    Ok(c.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM run ORDER BY id DESC LIMIT ?1"
    ))?
    .query_map([most as i64], row)?
    .collect::<rusqlite::Result<_>>()?)
}

/// A run that was under way when the last process died has failed.
pub(crate) fn fail_orphans(c: &Connection, at: i64) -> Result<()> {
    c.execute(
        "UPDATE run SET state = 'failed', ended_at = ?1,
             detail = json_set(detail, '$.error', 'Spotter ended while this run was under way; its steps are free again')
         WHERE ended_at IS NULL",
        [at],
    )?;
    Ok(())
}
