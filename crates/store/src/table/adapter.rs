//! `adapter`: versions and their lineage.

use std::collections::BTreeSet;

use rusqlite::{Connection, Row, params};
use serde_json::Value;
use spotter_core::AdapterVersion;

use crate::error::{Result, StoreError};
use crate::query::{AdapterRow, AdapterState};

pub(crate) fn put(c: &Connection, a: &AdapterRow) -> Result<()> {
    c.execute(
        "INSERT OR REPLACE INTO adapter
             (version, parent, state, run, dir, base_model, steps_used, size_bytes, metrics, verdict, pinned, created_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
        params![
            a.version.0,
            a.parent.map(|v| v.0),
            a.state.as_str(),
            a.run,
            a.dir,
            a.base_model,
            a.steps_used,
            a.size_bytes as i64,
            a.metrics.to_string(),
            a.verdict.as_ref().map(Value::to_string),
            a.pinned,
            a.created_at
        ],
    )?;
    Ok(())
}

fn row(r: &Row<'_>) -> rusqlite::Result<AdapterRow> {
    let json = |text: String| serde_json::from_str(&text).unwrap_or(Value::Null);
    Ok(AdapterRow {
        version: AdapterVersion(r.get(0)?),
        parent: r.get::<_, Option<u32>>(1)?.map(AdapterVersion),
        state: AdapterState::parse(&r.get::<_, String>(2)?),
        run: r.get(3)?,
        dir: r.get(4)?,
        base_model: r.get(5)?,
        steps_used: r.get(6)?,
        size_bytes: r.get::<_, i64>(7)? as u64,
        metrics: json(r.get(8)?),
        verdict: r.get::<_, Option<String>>(9)?.map(json),
        pinned: r.get(10)?,
        created_at: r.get(11)?,
    })
}

pub(crate) fn list(c: &Connection) -> Result<Vec<AdapterRow>> {
    Ok(c.prepare_cached(
        "SELECT version, parent, state, run, dir, base_model, steps_used, size_bytes, metrics, verdict, pinned, created_at
         FROM adapter ORDER BY version",
    )?
    .query_map([], row)?
    .collect::<rusqlite::Result<_>>()?)
}

/// Every version that learned from a step that is still there, and what came of them.
pub(crate) fn that_learned(c: &Connection) -> Result<Vec<AdapterVersion>> {
    let versions = c
        .prepare_cached(
            "WITH used AS (SELECT DISTINCT run FROM run_step WHERE outcome = 'used')
             SELECT version FROM adapter WHERE run IN used
             UNION SELECT version FROM run WHERE id IN used AND version IS NOT NULL",
        )?
        .query_map([], |r| r.get(0).map(AdapterVersion))?
        .collect::<rusqlite::Result<BTreeSet<_>>>()?;
    with_descendants(c, versions)
}

/// These versions and every one that was trained from one of them.
pub(crate) fn with_descendants(
    c: &Connection,
    mut versions: BTreeSet<AdapterVersion>,
) -> Result<Vec<AdapterVersion>> {
    if versions.is_empty() {
        return Ok(Vec::new());
    }
    // A parent always has the lower number, and the list is in that order.
    for row in list(c)? {
        if row.parent.is_some_and(|p| versions.contains(&p)) {
            versions.insert(row.version);
        }
    }
    Ok(versions.into_iter().collect())
}

/// The newest ancestor of the live adapter that is not among these, or the base.
pub(crate) fn clean_ancestor(c: &Connection, touched: &[AdapterVersion]) -> Result<AdapterVersion> {
    let rows = list(c)?;
    let mut at = rows
        .iter()
        .find(|a| a.state == AdapterState::Live)
        .map_or(AdapterVersion::BASE, |a| a.version);
    while touched.contains(&at) {
        at = rows
            .iter()
            .find(|a| a.version == at)
            .and_then(|a| a.parent)
            .filter(|parent| *parent < at)
            .unwrap_or(AdapterVersion::BASE);
    }
    Ok(at)
}

/// At most one version is live; none means the base is.
pub(crate) fn set_live(c: &Connection, version: AdapterVersion) -> Result<()> {
    c.execute("UPDATE adapter SET state = 'kept' WHERE state = 'live'", [])?;
    if version.is_base() {
        return Ok(());
    }
    let changed = c.execute(
        "UPDATE adapter SET state = 'live' WHERE version = ?1",
        [version.0],
    )?;
    if changed == 0 {
        return Err(StoreError::NotFound {
            kind: "adapter",
            id: version.to_string(),
        });
    }
    Ok(())
}

pub(crate) fn approval(c: &Connection) -> Result<Vec<(AdapterVersion, u64, u64)>> {
    Ok(c.prepare_cached(
        "SELECT adapter, sum(rating = 'up'), sum(rating = 'down') FROM step
         WHERE rating IS NOT NULL AND kind = 'main' GROUP BY adapter ORDER BY adapter",
    )?
    .query_map([], |r| {
        Ok((
            AdapterVersion(r.get(0)?),
            r.get::<_, i64>(1)? as u64,
            r.get::<_, i64>(2)? as u64,
        ))
    })?
    .collect::<rusqlite::Result<_>>()?)
}
