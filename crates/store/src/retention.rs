//! How much is kept. What a lesson has used and what nobody rated goes first; what is
//! rated and not used yet is never deleted.

use std::collections::BTreeSet;

use rusqlite::{Connection, params};

use crate::error::Result;
use crate::table::{drop_count, step};
use crate::writer::Desk;

/// The limits; 0 means none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Days that a step is kept.
    pub days: u32,
    /// Bytes that the pool may use.
    pub bytes: u64,
    /// Steps that are kept.
    pub steps: u64,
}

/// What maintenance did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Maintained {
    /// Steps deleted because of a limit.
    pub removed: u64,
    /// Attempts that were silent past their deadline.
    pub abandoned: u64,
    /// A limit is exceeded still, by steps that are rated and not learned from yet.
    pub over_limit: bool,
}

/// Steps deleted in one transaction.
const BATCH: u64 = 200;
const DAY_MS: i64 = 86_400_000;
/// What may go.
const DELETABLE: &str = "learning <> 'claimed' AND NOT (learning = 'fresh' AND reward IS NOT NULL)";

const TOO_OLD: &str = "older than the days to keep";
const TOO_MANY: &str = "more than the answers to keep";
const TOO_LARGE: &str = "more than the megabytes to keep";

/// Bytes of pages in use.
pub(crate) fn used_bytes(c: &Connection) -> Result<u64> {
    let n = |name: &str| -> Result<i64> { Ok(c.pragma_query_value(None, name, |r| r.get(0))?) };
    let pages = n("page_count")? - n("freelist_count")?;
    Ok((pages.max(0) * n("page_size")?).max(0) as u64)
}

/// One round: deletes up to a batch of steps. Returns how many went, and whether a limit
/// is exceeded although nothing more may go.
pub(crate) fn round(desk: &Desk, limits: &Retention, now: i64) -> Result<(u64, bool)> {
    let mut over = false;
    if limits.days > 0 {
        let cutoff = now - i64::from(limits.days) * DAY_MS;
        let old = ids(
            desk,
            &format!(
                "SELECT id FROM step WHERE created_at < ?1 AND {DELETABLE} ORDER BY created_at LIMIT ?2"
            ),
            cutoff,
            BATCH,
        )?;
        if !old.is_empty() {
            return Ok((remove(desk, old, TOO_OLD, now)?, false));
        }
        over |= desk
            .prepare_cached("SELECT EXISTS (SELECT 1 FROM step WHERE created_at < ?1)")?
            .query_row([cutoff], |r| r.get::<_, bool>(0))?;
    }
    let steps = step::counts(desk)?.steps;
    let mut wanted = Vec::new();
    if limits.steps > 0 && steps > limits.steps {
        wanted.push((steps - limits.steps, TOO_MANY));
    }
    if limits.bytes > 0 && steps > 0 {
        let used = used_bytes(desk)?;
        if used > limits.bytes {
            let each = (used / steps).max(1);
            wanted.push(((used - limits.bytes).div_ceil(each), TOO_LARGE));
        }
    }
    for (excess, reason) in wanted {
        let most = excess.min(BATCH);
        let mut going = ids(
            desk,
            "SELECT id FROM step WHERE id > ?1 AND reward IS NULL AND learning <> 'claimed' ORDER BY id LIMIT ?2",
            0,
            most,
        )?;
        let missing = most - going.len() as u64;
        if missing > 0 {
            going.extend(ids(
                desk,
                "SELECT id FROM step WHERE id > ?1 AND reward IS NOT NULL AND learning IN ('used', 'dropped')
                 ORDER BY id LIMIT ?2",
                0,
                missing,
            )?);
        }
        if !going.is_empty() {
            return Ok((remove(desk, going, reason, now)?, false));
        }
        over = true;
    }
    Ok((0, over))
}

fn ids(c: &Connection, sql: &str, first: i64, most: u64) -> Result<BTreeSet<i64>> {
    Ok(c.prepare_cached(sql)?
        .query_map(params![first, most as i64], |r| r.get(0))?
        .collect::<rusqlite::Result<_>>()?)
}

fn remove(desk: &Desk, going: BTreeSet<i64>, reason: &str, now: i64) -> Result<u64> {
    let n = going.len() as u64;
    step::delete(desk, going)?;
    drop_count::add(desk, reason, n, now)?;
    Ok(n)
}
