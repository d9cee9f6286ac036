//! `content`: text and JSON stored once, addressed by its SHA-256, as long as a step
//! names it.

use rusqlite::{Connection, OptionalExtension, params};
use sha2::{Digest, Sha256};

use crate::blob;
use crate::error::Result;
use crate::writer::Desk;

/// SHA-256 of a text.
pub(crate) fn hash(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

/// Stores a text unless it is there, and returns its row. Nothing holds it yet.
pub(crate) fn put(desk: &Desk, text: &str) -> Result<i64> {
    let hash = hash(text);
    if let Some(id) = desk.recent.borrow().content(&hash) {
        return Ok(id);
    }
    let found: Option<i64> = desk
        .prepare_cached("SELECT id FROM content WHERE hash = ?1")?
        .query_row([hash], |r| r.get(0))
        .optional()?;
    let id = match found {
        Some(id) => id,
        None => {
            desk.prepare_cached("INSERT INTO content (hash, body) VALUES (?1, ?2)")?
                .execute(params![hash, blob::from_text(text)?])?;
            desk.last_insert_rowid()
        }
    };
    desk.recent.borrow_mut().keep_content(hash, id);
    Ok(id)
}

/// Counts one more reference to each of these rows.
pub(crate) fn hold(c: &Connection, ids: impl IntoIterator<Item = i64>) -> Result<()> {
    let mut hold = c.prepare_cached("UPDATE content SET refs = refs + 1 WHERE id = ?1")?;
    for id in ids {
        hold.execute([id])?;
    }
    Ok(())
}

/// Counts one reference less to each of these rows; what nothing refers to is deleted.
pub(crate) fn release(c: &Connection, ids: impl IntoIterator<Item = i64>) -> Result<()> {
    let mut release = c.prepare_cached("UPDATE content SET refs = refs - 1 WHERE id = ?1")?;
    let mut delete = c.prepare_cached("DELETE FROM content WHERE id = ?1 AND refs <= 0")?;
    for id in ids {
        release.execute([id])?;
        delete.execute([id])?;
    }
    Ok(())
}

/// The text of a row.
pub(crate) fn get(c: &Connection, id: i64) -> Result<String> {
    let body: Vec<u8> = c
        .prepare_cached("SELECT body FROM content WHERE id = ?1")?
        .query_row([id], |r| r.get(0))?;
    blob::to_text(&body)
}
