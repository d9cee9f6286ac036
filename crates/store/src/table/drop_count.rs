//! `drop_count`: how often something was not kept or not learned from, and why.

use rusqlite::{Connection, params};

use crate::error::Result;

/// Counts `n` more for a reason.
pub(crate) fn add(c: &Connection, reason: &str, n: u64, at: i64) -> Result<()> {
    if n > 0 {
        c.prepare_cached(
            "INSERT INTO drop_count (reason, n, last_at) VALUES (?1, ?2, ?3)
             ON CONFLICT (reason) DO UPDATE SET n = n + excluded.n, last_at = excluded.last_at",
        )?
        .execute(params![reason, n as i64, at])?;
    }
    Ok(())
}

/// Every reason with its count, most frequent first.
pub(crate) fn list(c: &Connection) -> Result<Vec<(String, u64)>> {
    Ok(
        c.prepare_cached("SELECT reason, n FROM drop_count ORDER BY n DESC, reason")?
            .query_map([], |r| Ok((r.get(0)?, r.get::<_, i64>(1)? as u64)))?
            .collect::<rusqlite::Result<_>>()?,
    )
}
