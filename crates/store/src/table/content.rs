//! `content`: text and JSON stored once, addressed by its SHA-256.

use rusqlite::{Connection, OptionalExtension, params};
use sha2::{Digest, Sha256};

use crate::blob;
use crate::error::Result;

/// SHA-256 of a text.
pub(crate) fn hash(text: &str) -> Vec<u8> {
    Sha256::digest(text.as_bytes()).to_vec()
}

/// Stores a text unless it is there, and returns its row.
pub(crate) fn put(c: &Connection, text: &str) -> Result<i64> {
    let hash = hash(text);
    let found: Option<i64> = c
        .prepare_cached("SELECT id FROM content WHERE hash = ?1")?
        .query_row([&hash], |r| r.get(0))
        .optional()?;
    if let Some(id) = found {
        return Ok(id);
    }
    c.prepare_cached("INSERT INTO content (hash, body) VALUES (?1, ?2)")?
        .execute(params![hash, blob::from_text(text)?])?;
    Ok(c.last_insert_rowid())
}

/// The text of a row.
pub(crate) fn get(c: &Connection, id: i64) -> Result<String> {
    let body: Vec<u8> = c
        .prepare_cached("SELECT body FROM content WHERE id = ?1")?
        .query_row([id], |r| r.get(0))?;
    blob::to_text(&body)
}
