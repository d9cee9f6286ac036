//! `setting`: what the person chose.

use rusqlite::{Connection, OptionalExtension, params};

use crate::error::Result;

pub(crate) fn get(c: &Connection, key: &str) -> Result<Option<String>> {
    Ok(
        c.prepare_cached("SELECT value FROM setting WHERE key = ?1")?
            .query_row([key], |r| r.get(0))
            .optional()?,
    )
}

pub(crate) fn set(c: &Connection, key: &str, value: Option<&str>) -> Result<()> {
    match value {
        Some(value) => c.execute(
            "INSERT OR REPLACE INTO setting (key, value) VALUES (?1, ?2)",
            params![key, value],
        )?,
        None => c.execute("DELETE FROM setting WHERE key = ?1", [key])?,
    };
    Ok(())
}
