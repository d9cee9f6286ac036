//! `step`: model calls. Prompts are a reference to an earlier step and a suffix.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use rusqlite::types::ToSql;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::Value;
use spotter_core::AdapterVersion;
use spotter_core::id::{StepUid, TrajectoryUid};
use spotter_core::step::{Step, StepKind};
use spotter_core::train::{StepReward, TrainStep};

use crate::blob;
use crate::error::{Result, StoreError};
use crate::query::{
    Batch, BatchRequest, Counts, LabelCounts, Page, StepDetail, StepFilter, StepSummary,
};
use crate::recent::Whole;
use crate::redact::{Preview, Redactor};
use crate::search::{self, Query};
use crate::table::{adapter, content, drop_count, reward, session, trajectory};
use crate::writer::Desk;

/// Longest chain of references before a prompt is stored whole again.
const MAX_DEPTH: i64 = 48;
/// The latest steps of a session that are tried as a parent.
const CANDIDATES: i64 = 3;

/// Prompt ids and message rows of a step, reassembled.
struct Assembled {
    prompt: Vec<u32>,
    response: Vec<u32>,
    messages: Vec<u32>,
    depth: i64,
}

fn assemble(c: &Connection, id: i64) -> Result<Assembled> {
    // Walk up to the root, then build downwards.
    let mut chain = Vec::new();
    let mut next = Some(id);
    while let Some(id) = next {
        let row = c
            .prepare_cached(
                "SELECT parent, prompt_prefix, prompt_suffix, messages_prefix, messages_suffix, response_ids, depth
                 FROM step WHERE id = ?1",
            )?
            .query_row([id], |r| {
                Ok((
                    r.get::<_, Option<i64>>(0)?,
                    r.get::<_, i64>(1)? as usize,
                    r.get::<_, Vec<u8>>(2)?,
                    r.get::<_, i64>(3)? as usize,
                    r.get::<_, Vec<u8>>(4)?,
                    r.get::<_, Vec<u8>>(5)?,
                    r.get::<_, i64>(6)?,
                ))
            })?;
        next = row.0;
        chain.push(row);
        if chain.len() as i64 > MAX_DEPTH + 1 {
            return Err(StoreError::Damaged(
                "a chain of prompts does not end".into(),
            ));
        }
    }
    let mut out = Assembled {
        prompt: Vec::new(),
        response: Vec::new(),
        messages: Vec::new(),
        depth: 0,
    };
    for (_, prefix, suffix, messages_prefix, messages_suffix, response, depth) in
        chain.into_iter().rev()
    {
        out.prompt.append(&mut out.response);
        if prefix > out.prompt.len() || messages_prefix > out.messages.len() {
            return Err(StoreError::Damaged(
                "a prompt refers to more than its parent has".into(),
            ));
        }
        out.prompt.truncate(prefix);
        out.prompt.extend(blob::to_ids(&suffix)?);
        out.messages.truncate(messages_prefix);
        out.messages.extend(blob::to_ids(&messages_suffix)?);
        out.response = blob::to_ids(&response)?;
        out.depth = depth;
    }
    Ok(out)
}

/// Splits a request into its messages and the rest.
fn split(request: &Value) -> (Vec<Value>, Value) {
    let mut rest = request.clone();
    let messages = match rest.get_mut("messages").map(Value::take) {
        Some(Value::Array(messages)) => messages,
        Some(other) => {
            rest["messages"] = other;
            Vec::new()
        }
        None => Vec::new(),
    };
    (messages, rest)
}

/// The step's prompt and response as the writer remembers them, or read back.
fn whole(desk: &Desk, id: i64) -> Result<Rc<Whole>> {
    if let Some(known) = desk.recent.borrow().whole(id) {
        return Ok(known);
    }
    let mut read = assemble(desk, id)?;
    read.prompt.append(&mut read.response);
    let whole = Rc::new(Whole {
        ids: read.prompt,
        messages: read.messages,
        depth: read.depth,
    });
    desk.recent.borrow_mut().keep(id, whole.clone());
    Ok(whole)
}

/// Stores a step, its session and its trajectory. A step that is there already is left
/// alone. False when it was.
pub(crate) fn insert(desk: &Desk, step: &Step) -> Result<bool> {
    let known: bool = desk
        .prepare_cached("SELECT EXISTS (SELECT 1 FROM step WHERE uid = ?1)")?
        .query_row([step.uid.as_str()], |r| r.get(0))?;
    if known {
        return Ok(false);
    }
    let turn = session::touch(desk, step)?;
    trajectory::touch(desk, step)?;
    let (messages, rest) = split(&step.request);
    let message_rows = messages
        .iter()
        .map(|m| {
            let row = content::put(desk, &m.to_string())?;
            u32::try_from(row).map_err(|e| StoreError::Invalid(e.to_string()))
        })
        .collect::<Result<Vec<u32>>>()?;
    let request = content::put(desk, &rest.to_string())?;

    // The earlier step of this session with the longest common beginning.
    let candidates = desk
        .prepare_cached("SELECT id FROM step WHERE session = ?1 ORDER BY id DESC LIMIT ?2")?
        .query_map(params![step.session.as_str(), CANDIDATES], |r| r.get(0))?
        .collect::<rusqlite::Result<Vec<i64>>>()?;
    let (mut parent, mut prefix, mut messages_prefix, mut depth) = (None, 0, 0, 0);
    for id in candidates {
        let earlier = whole(desk, id)?;
        let common = blob::common_prefix(&earlier.ids, &step.prompt_ids);
        let common_messages = blob::common_prefix(&earlier.messages, &message_rows);
        if (common, common_messages) > (prefix, messages_prefix) {
            (parent, prefix, messages_prefix, depth) =
                (Some(id), common, common_messages, earlier.depth + 1);
        }
    }
    if depth > MAX_DEPTH {
        (parent, prefix, messages_prefix, depth) = (None, 0, 0, 0);
    }
    content::hold(
        desk,
        message_rows[messages_prefix..]
            .iter()
            .map(|id| i64::from(*id))
            .chain([request]),
    )?;
    let kind = match step.kind {
        StepKind::Main => "main",
        StepKind::Side => "side",
    };
    let text = |e: serde_json::Error| StoreError::Invalid(e.to_string());
    let finish = serde_json::to_value(step.finish_reason).map_err(text)?;
    desk.prepare_cached(
        "INSERT INTO step (uid, session, trajectory, prompt_uid, turn, idx, kind, kind_reason, adapter, base_model,
             parent, depth, prompt_prefix, prompt_suffix, messages_prefix, messages_suffix, response_ids, logprobs,
             model_logprobs, prompt_tokens, response_tokens, cached_tokens, sampling, finish_reason, first_token_ms,
             total_ms, client, user_text, answer_text, answer_hash, request, response, created_at,
             turn_no, short_terms)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22,
             ?23, ?24, ?25, ?26, ?27, ?28, ?29, ?30, ?31, ?32, ?33, ?34, ?35)",
    )?
    .execute(params![
        step.uid.as_str(),
        step.session.as_str(),
        step.trajectory.as_str(),
        step.prompt_uid,
        step.turn,
        step.index,
        kind,
        step.kind_reason,
        step.adapter.0,
        step.base_model,
        parent,
        depth,
        prefix as i64,
        blob::from_ids(&step.prompt_ids[prefix..])?,
        messages_prefix as i64,
        blob::from_ids(&message_rows[messages_prefix..])?,
        blob::from_ids(&step.response_ids)?,
        blob::from_floats(&step.logprobs)?,
        blob::from_floats(&step.model_logprobs)?,
        step.prompt_ids.len() as i64,
        step.response_ids.len() as i64,
        step.cached_tokens,
        serde_json::to_string(&step.sampling).map_err(text)?,
        finish.as_str().unwrap_or_default(),
        step.first_token_ms as i64,
        step.total_ms as i64,
        step.client,
        step.user_text,
        step.answer_text,
        content::hash(&step.answer_text),
        request,
        step.response.to_string(),
        step.created_at,
        turn,
        search::short_terms([step.user_text.as_str(), step.answer_text.as_str()]),
    ])?;
    let id = desk.last_insert_rowid();
    let mut ids = step.prompt_ids.clone();
    ids.extend(&step.response_ids);
    desk.recent.borrow_mut().keep(
        id,
        Rc::new(Whole {
            ids,
            messages: message_rows,
            depth,
        }),
    );
    Ok(true)
}

const SUMMARY: &str = "step.uid, step.session, step.trajectory, step.turn, step.kind, step.kind_reason, step.adapter,
    step.client, step.user_text, step.answer_text, step.rating, step.reward, step.correction, step.learning, step.run,
    step.drop_reason, step.finish_reason, step.prompt_tokens, step.response_tokens, step.created_at,
    (SELECT reasons FROM reward WHERE reward.step = step.uid AND source = 'user' ORDER BY id DESC LIMIT 1),
    (SELECT note FROM reward WHERE reward.step = step.uid AND source = 'user' ORDER BY id DESC LIMIT 1),
    step.id, (SELECT max(run) FROM run_step WHERE run_step.step = step.uid AND outcome = 'used'), step.turn_no";

fn summary(r: &Row<'_>) -> rusqlite::Result<(i64, StepSummary)> {
    let kind: String = r.get(4)?;
    let learning: String = r.get(13)?;
    let reward: Option<f64> = r.get(11)?;
    let rating: Option<String> = r.get(10)?;
    let reasons = r
        .get::<_, Option<String>>(20)?
        .filter(|_| rating.is_some())
        .and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default();
    Ok((
        r.get(22)?,
        StepSummary {
            uid: r.get(0)?,
            session: r.get(1)?,
            trajectory: r.get(2)?,
            turn: r.get(3)?,
            turn_number: r.get(24)?,
            in_next_lesson: kind == "main" && learning == "fresh" && reward.is_some(),
            kind,
            kind_reason: r.get(5)?,
            adapter: AdapterVersion(r.get(6)?),
            client: r.get(7)?,
            user_text: r.get(8)?,
            answer_text: r.get(9)?,
            note: r.get::<_, Option<String>>(21)?.filter(|_| rating.is_some()),
            rating,
            reward,
            reasons,
            correction: r.get(12)?,
            used_in_run: r.get(23)?,
            dropped_reason: r.get(15)?,
            finish_reason: r.get(16)?,
            prompt_tokens: r.get(17)?,
            response_tokens: r.get(18)?,
            created_at: r.get(19)?,
        },
    ))
}

/// A page of steps, newest first.
pub(crate) fn page(c: &Connection, filter: &StepFilter) -> Result<Page<StepSummary>> {
    let limit = if filter.limit == 0 {
        50
    } else {
        filter.limit.min(500)
    };
    let mut conditions: Vec<&str> = Vec::new();
    let mut order = "step.id".to_owned();
    let mut values: Vec<Box<dyn ToSql>> = Vec::new();
    let mut add = |condition: &'static str, value: Box<dyn ToSql>| {
        conditions.push(condition);
        values.push(value);
    };
    if let Some(session) = &filter.session {
        add("step.session = ?", Box::new(session.clone()));
    }
    if let Some(rating) = &filter.rating {
        add("step.rating = ?", Box::new(rating.clone()));
    }
    if let Some(kind) = filter.kind {
        let kind = if kind == StepKind::Main {
            "main"
        } else {
            "side"
        };
        add("step.kind = ?", Box::new(kind));
    }
    let query = Query::parse(filter.q.as_deref());
    let mut from = "step".to_owned();
    match (query, filter.q.as_deref()) {
        // One conversation is small; walking every match of a common word is not.
        (Some(_), Some(q)) if filter.session.is_some() => add(
            "(step.user_text || char(10) || step.answer_text) LIKE ? ESCAPE '\\'",
            Box::new(search::like(q)),
        ),
        (Some(query), _) => {
            let (index, text) = query.parts();
            // From the index's newest match backwards, as far as the page needs.
            from = format!("{index} CROSS JOIN step ON step.id = {index}.rowid");
            order = format!("{index}.rowid");
            add(
                if index == "step_text" {
                    "step_text MATCH ?"
                } else {
                    "step_short MATCH ?"
                },
                Box::new(text),
            );
        }
        _ => {}
    }
    if let Some(cursor) = &filter.cursor {
        let before: i64 = cursor
            .parse()
            .map_err(|_| StoreError::Invalid(format!("'{cursor}' is not a cursor of this list")))?;
        add(
            match order.as_str() {
                "step_text.rowid" => "step_text.rowid < ?",
                "step_short.rowid" => "step_short.rowid < ?",
                _ => "step.id < ?",
            },
            Box::new(before),
        );
    }
    if filter.unrated {
        conditions.push("step.rating IS NULL AND step.kind = 'main'");
    }
    let filter_sql = if conditions.is_empty() {
        "1".to_owned()
    } else {
        conditions.join(" AND ")
    };
    values.push(Box::new(limit as i64 + 1));
    let sql =
        format!("SELECT {SUMMARY} FROM {from} WHERE {filter_sql} ORDER BY {order} DESC LIMIT ?");
    let mut rows = c
        .prepare_cached(&sql)?
        .query_map(rusqlite::params_from_iter(values.iter()), summary)?
        .collect::<rusqlite::Result<Vec<_>>>()?;
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next_cursor = rows.last().filter(|_| more).map(|(id, _)| id.to_string());
    Ok(Page {
        items: rows.into_iter().map(|(_, s)| s).collect(),
        next_cursor,
    })
}

fn missing(uid: &str) -> StoreError {
    StoreError::NotFound {
        kind: "step",
        id: uid.to_owned(),
    }
}

/// One step as a list shows it, with its row.
pub(crate) fn summary_of(c: &Connection, uid: &StepUid) -> Result<(i64, StepSummary)> {
    c.prepare_cached(&format!("SELECT {SUMMARY} FROM step WHERE step.uid = ?1"))?
        .query_row([uid.as_str()], summary)
        .optional()?
        .ok_or_else(|| missing(uid.as_str()))
}

/// One step, complete.
pub(crate) fn detail(c: &Connection, uid: &StepUid) -> Result<StepDetail> {
    let (id, summary) = summary_of(c, uid)?;
    let assembled = assemble(c, id)?;
    let row = c
        .prepare_cached(
            "SELECT base_model, logprobs, model_logprobs, request, response, sampling, cached_tokens, first_token_ms, total_ms
             FROM step WHERE id = ?1",
        )?
        .query_row([id], |r| {
            Ok((
                r.get::<_, String>(0)?,
                r.get::<_, Vec<u8>>(1)?,
                r.get::<_, Vec<u8>>(2)?,
                r.get::<_, i64>(3)?,
                r.get::<_, String>(4)?,
                r.get::<_, String>(5)?,
                r.get::<_, u32>(6)?,
                r.get::<_, i64>(7)? as u64,
                r.get::<_, i64>(8)? as u64,
            ))
        })?;
    let parse = |text: &str| {
        serde_json::from_str::<Value>(text).map_err(|e| StoreError::Damaged(e.to_string()))
    };
    let messages = assembled
        .messages
        .iter()
        .map(|m| parse(&content::get(c, i64::from(*m))?))
        .collect::<Result<Vec<_>>>()?;
    let mut request = parse(&content::get(c, row.3)?)?;
    if request.is_object() && request.get("messages").is_none_or(Value::is_null) {
        request["messages"] = Value::Array(messages);
    }
    Ok(StepDetail {
        summary,
        base_model: row.0,
        prompt_ids: assembled.prompt,
        response_ids: assembled.response,
        logprobs: blob::to_floats(&row.1)?,
        model_logprobs: blob::to_floats(&row.2)?,
        request,
        response: parse(&row.4)?,
        sampling: parse(&row.5)?,
        cached_tokens: row.6,
        first_token_ms: row.7,
        total_ms: row.8,
        rewards: reward::of_step(c, uid.as_str())?,
    })
}

/// The newest step with this value in `column`, main steps first.
pub(crate) fn newest(c: &Connection, column: &'static str, value: &str) -> Result<StepUid> {
    for kind in ["AND kind = 'main'", ""] {
        let sql =
            format!("SELECT uid FROM step WHERE {column} = ?1 {kind} ORDER BY id DESC LIMIT 1");
        let found: Option<String> = c
            .prepare_cached(&sql)?
            .query_row([value], |r| r.get(0))
            .optional()?;
        if let Some(uid) = found {
            return Ok(StepUid::from(uid));
        }
    }
    Err(missing(value))
}

/// The sampled ids of an answer with exactly this text.
pub(crate) fn answer_ids(c: &Connection, session: &str, answer: &str) -> Result<Option<Vec<u32>>> {
    let blob: Option<Vec<u8>> = c
        .prepare_cached(
            "SELECT response_ids FROM step WHERE session = ?1 AND answer_hash = ?2 AND response_tokens > 0
             ORDER BY id DESC LIMIT 1",
        )?
        .query_row(params![session, content::hash(answer)], |r| r.get(0))
        .optional()?;
    blob.map(|b| blob::to_ids(&b)).transpose()
}

/// Overrides the kind.
pub(crate) fn set_kind(c: &Connection, uid: &StepUid, kind: StepKind) -> Result<()> {
    let (kind, reason) = match kind {
        StepKind::Main => ("main", "you said so"),
        StepKind::Side => ("side", "you said so"),
    };
    let changed = c.execute(
        "UPDATE step SET kind = ?2, kind_reason = ?3, kind_by_user = 1 WHERE uid = ?1",
        params![uid.as_str(), kind, reason],
    )?;
    if changed == 0 {
        Err(missing(uid.as_str()))
    } else {
        Ok(())
    }
}

/// Totals.
pub(crate) fn counts(c: &Connection) -> Result<Counts> {
    let n = |r: &Row<'_>, i| r.get::<_, i64>(i).map(|n| n.max(0) as u64);
    Ok(c.prepare_cached(
        "SELECT steps, unrated, up, down, (SELECT count(*) FROM session) FROM tally",
    )?
    .query_row([], |r| {
        let (up, down) = (n(r, 2)?, n(r, 3)?);
        Ok(Counts {
            steps: n(r, 0)?,
            unrated: n(r, 1)?,
            rated: up + down,
            up,
            down,
            sessions: n(r, 4)?,
        })
    })?)
}

/// Steps that a run may claim: rated, trainable, of the training channel, and not of a
/// prompt group that still waits for attempts.
const CLAIMABLE: &str = "FROM step CROSS JOIN trajectory ON trajectory.uid = step.trajectory
         LEFT JOIN prompt_group ON prompt_group.uid = trajectory.prompt_uid
     WHERE step.learning = 'fresh' AND step.reward IS NOT NULL AND step.kind = 'main' AND step.response_tokens > 0
         AND trajectory.channel = 'train' AND coalesce(prompt_group.ready, 1) = 1";

/// Rated, unconsumed, trainable steps.
pub(crate) fn fresh_labels(c: &Connection) -> Result<LabelCounts> {
    Ok(c.prepare_cached(&format!(
        "SELECT count(*), coalesce(sum(step.reward < 0), 0), coalesce(sum(step.correction IS NOT NULL), 0) {CLAIMABLE}"
    ))?
    .query_row([], |r| {
        Ok(LabelCounts {
            labels: r.get::<_, i64>(0)? as u64,
            negative: r.get::<_, i64>(1)? as u64,
            corrections: r.get::<_, i64>(2)? as u64,
        })
    })?)
}

/// One row as the trainer sees it; `credit` scales a reward that belongs to a later step.
fn train_step(c: &Connection, id: i64, borrowed: Option<&StepReward>) -> Result<TrainStep> {
    let assembled = assemble(c, id)?;
    let row = c
        .prepare_cached(
            "SELECT uid, trajectory, prompt_uid, idx, adapter, sampling, reward, reward_source, correction, logprobs,
                 NOT EXISTS (SELECT 1 FROM step AS later WHERE later.trajectory = step.trajectory AND later.idx > step.idx)
             FROM step WHERE id = ?1",
        )?
        .query_row([id], |r| {
            Ok((
                r.get::<_, String>(0)?,
                r.get::<_, String>(1)?,
                r.get::<_, String>(2)?,
                r.get::<_, u32>(3)?,
                r.get::<_, u32>(4)?,
                r.get::<_, String>(5)?,
                r.get::<_, Option<f64>>(6)?,
                r.get::<_, Option<String>>(7)?,
                r.get::<_, Option<String>>(8)?,
                r.get::<_, Vec<u8>>(9)?,
                r.get::<_, bool>(10)?,
            ))
        })?;
    let sampling: spotter_core::generate::Sampling =
        serde_json::from_str(&row.5).map_err(|e| StoreError::Damaged(e.to_string()))?;
    let own = match (row.6, row.7) {
        (Some(value), Some(source)) => Some(StepReward {
            value,
            source: source.parse().map_err(StoreError::Damaged)?,
            credit: 1.0,
        }),
        _ => None,
    };
    let reward = own.or_else(|| {
        borrowed.map(|r| StepReward {
            credit: 0.5,
            ..r.clone()
        })
    });
    Ok(TrainStep {
        uid: StepUid::from(row.0),
        trajectory: TrajectoryUid::from(row.1),
        prompt_uid: row.2,
        index: row.3,
        is_last: row.10,
        prompt_ids: assembled.prompt,
        response_ids: assembled.response,
        logprobs: blob::to_floats(&row.9)?,
        adapter: AdapterVersion(row.4),
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        reward,
        correction: row.8,
    })
}

fn ids(c: &Connection, sql: &str, values: &[&dyn ToSql]) -> Result<Vec<i64>> {
    Ok(c.prepare_cached(sql)?
        .query_map(values, |r| r.get(0))?
        .collect::<rusqlite::Result<_>>()?)
}

/// Claims fresh rated steps for a run.
pub(crate) fn claim(c: &Connection, wanted: &BatchRequest) -> Result<Batch> {
    let oldest = wanted.oldest_adapter.map_or(0, |v| v.0);
    let mut rated = ids(
        c,
        &format!("SELECT step.id {CLAIMABLE} AND step.adapter >= ?1 ORDER BY step.id LIMIT ?2"),
        &[&oldest, &(wanted.most as i64)],
    )?;
    // A group that a client announced is learned from whole, or not at all yet.
    let groups: BTreeSet<String> = rated
        .iter()
        .map(|id| {
            Ok(c.prepare_cached(
                "SELECT prompt_group.uid FROM step JOIN trajectory ON trajectory.uid = step.trajectory
                     JOIN prompt_group ON prompt_group.uid = trajectory.prompt_uid WHERE step.id = ?1",
            )?
            .query_row([id], |r| r.get::<_, String>(0))
            .optional()?)
        })
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect();
    for group in groups {
        rated.extend(ids(
            c,
            "SELECT step.id FROM trajectory CROSS JOIN step ON step.trajectory = trajectory.uid
             WHERE trajectory.prompt_uid = ?1 AND trajectory.channel = 'train' AND step.learning = 'fresh'
                 AND step.reward IS NOT NULL AND step.kind = 'main' AND step.response_tokens > 0 AND step.adapter >= ?2",
            &[&group, &oldest],
        )?);
    }
    rated.sort_unstable();
    rated.dedup();
    let stale = if oldest == 0 {
        0
    } else {
        c.prepare_cached(&format!(
            "SELECT count(*) {CLAIMABLE} AND step.adapter < ?1"
        ))?
        .query_row([oldest], |r| r.get::<_, i64>(0))? as u64
    };
    let run = wanted.run;
    let mut seen: BTreeSet<i64> = rated.iter().copied().collect();
    let mut steps = Vec::new();
    for id in rated {
        let step = train_step(c, id, None)?;
        // A thumb belongs to the turn's last answer; its earlier calls get half.
        let earlier = ids(
            c,
            "SELECT earlier.id FROM step AS rated JOIN step AS earlier
                 ON earlier.session = rated.session AND earlier.turn = rated.turn AND earlier.id < rated.id
             WHERE rated.id = ?1 AND earlier.kind = 'main' AND earlier.reward IS NULL AND earlier.learning = 'fresh'
                 AND earlier.response_tokens > 0 ORDER BY earlier.id",
            &[&id],
        )?;
        for id in earlier {
            if seen.insert(id) {
                steps.push((id, train_step(c, id, step.reward.as_ref())?));
            }
        }
        steps.push((id, step));
    }
    let mut claim =
        c.prepare_cached("UPDATE step SET learning = 'claimed', run = ?2 WHERE id = ?1")?;
    for (id, _) in &steps {
        claim.execute(params![id, run])?;
    }
    Ok(Batch {
        steps: steps.into_iter().map(|(_, s)| s).collect(),
        stale,
    })
}

/// Rated steps of the validation channel, newest first.
pub(crate) fn held_out(c: &Connection, most: usize) -> Result<Vec<TrainStep>> {
    ids(
        c,
        "SELECT step.id FROM trajectory CROSS JOIN step ON step.trajectory = trajectory.uid
         WHERE trajectory.channel = 'val' AND step.reward IS NOT NULL AND step.kind = 'main' AND step.response_tokens > 0
         ORDER BY step.id DESC LIMIT ?1",
        &[&(most as i64)],
    )?
    .into_iter()
    .map(|id| train_step(c, id, None))
    .collect()
}

/// Gives a run's claimed steps back.
pub(crate) fn release(c: &Connection, run: i64) -> Result<()> {
    c.execute(
        "UPDATE step SET learning = 'fresh', run = NULL WHERE learning = 'claimed' AND run = ?1",
        [run],
    )?;
    Ok(())
}

/// Gives back what a dead process had claimed.
pub(crate) fn release_orphans(c: &Connection) -> Result<()> {
    c.execute(
        "UPDATE step SET learning = 'fresh', run = NULL WHERE learning = 'claimed'",
        [],
    )?;
    Ok(())
}

/// Records what a run did with its steps; what it does not mention is free again.
pub(crate) fn consume(
    c: &Connection,
    run: i64,
    used: &[StepUid],
    dropped: &[(StepUid, String)],
    now: i64,
) -> Result<()> {
    let mut set = c.prepare_cached(
        "UPDATE step SET learning = ?2, run = ?3, drop_reason = ?4 WHERE uid = ?1",
    )?;
    let mut link = c.prepare_cached(
        "INSERT OR REPLACE INTO run_step (run, step, outcome, reason) SELECT ?1, uid, ?3, ?4 FROM step WHERE uid = ?2",
    )?;
    for uid in used {
        set.execute(params![uid.as_str(), "used", run, None::<String>])?;
        link.execute(params![run, uid.as_str(), "used", None::<String>])?;
    }
    for (uid, reason) in dropped {
        // A step that earlier runs used and this one skipped keeps its state.
        if used.contains(uid) {
            continue;
        }
        c.prepare_cached(
            "UPDATE step SET learning = 'dropped', drop_reason = ?3 WHERE uid = ?1 AND learning = 'claimed' AND run = ?2",
        )?
        .execute(params![uid.as_str(), run, reason])?;
        drop_count::add(c, reason, 1, now)?;
        link.execute(params![run, uid.as_str(), "dropped", reason])?;
    }
    release(c, run)
}

/// Rated steps that earlier runs used, newest first.
pub(crate) fn replay(c: &Connection, most: usize) -> Result<Vec<TrainStep>> {
    ids(
        c,
        "SELECT id FROM step WHERE learning = 'used' AND reward IS NOT NULL AND kind = 'main' ORDER BY id DESC LIMIT ?1",
        &[&(most as i64)],
    )?
    .into_iter()
    .map(|id| train_step(c, id, None))
    .collect()
}

/// Deletes steps; later prompts that referred to them are stored whole first, and
/// conversations and attempts that are empty then go too. Returns the adapters that
/// learned from them.
pub(crate) fn forget(desk: &Desk, uids: &[String]) -> Result<Vec<AdapterVersion>> {
    let mut touched = BTreeSet::new();
    let mut going = BTreeMap::new();
    for uid in uids {
        let id: i64 = desk
            .prepare_cached("SELECT id FROM step WHERE uid = ?1")?
            .query_row([uid], |r| r.get(0))
            .optional()?
            .ok_or_else(|| missing(uid))?;
        going.insert(id, uid);
        let versions = desk
            .prepare_cached(
                "WITH used AS (SELECT run FROM run_step WHERE step = ?1 AND outcome = 'used')
                 SELECT version FROM adapter WHERE run IN used
                 UNION SELECT version FROM run WHERE id IN used AND version IS NOT NULL",
            )?
            .query_map([uid], |r| r.get::<_, u32>(0))?
            .collect::<rusqlite::Result<Vec<_>>>()?;
        touched.extend(versions.into_iter().map(AdapterVersion));
    }
    delete(desk, going.keys().copied().collect())?;
    adapter::with_descendants(desk, touched)
}

/// Deletes these rows and what only they needed.
pub(crate) fn delete(desk: &Desk, going: BTreeSet<i64>) -> Result<()> {
    desk.recent.borrow_mut().clear();
    let (mut sessions, mut trajectories) = (BTreeSet::new(), BTreeSet::new());
    for id in &going {
        for child in ids(desk, "SELECT id FROM step WHERE parent = ?1", &[id])? {
            if going.contains(&child) {
                continue;
            }
            let whole = assemble(desk, child)?;
            let suffix: Vec<u8> = desk
                .prepare_cached("SELECT messages_suffix FROM step WHERE id = ?1")?
                .query_row([child], |r| r.get(0))?;
            content::hold(desk, whole.messages.iter().map(|id| i64::from(*id)))?;
            content::release(desk, blob::to_ids(&suffix)?.into_iter().map(i64::from))?;
            desk.prepare_cached(
                "UPDATE step SET parent = NULL, depth = 0, prompt_prefix = 0, prompt_suffix = ?2, messages_prefix = 0,
                     messages_suffix = ?3 WHERE id = ?1",
            )?
            .execute(params![
                child,
                blob::from_ids(&whole.prompt)?,
                blob::from_ids(&whole.messages)?
            ])?;
        }
    }
    // Children before their parents.
    for id in going.iter().rev() {
        let (suffix, request, session, trajectory) = desk
            .prepare_cached(
                "SELECT messages_suffix, request, session, trajectory FROM step WHERE id = ?1",
            )?
            .query_row([id], |r| {
                Ok((
                    r.get::<_, Vec<u8>>(0)?,
                    r.get::<_, i64>(1)?,
                    r.get::<_, String>(2)?,
                    r.get::<_, String>(3)?,
                ))
            })?;
        desk.prepare_cached("DELETE FROM step WHERE id = ?1")?
            .execute([id])?;
        let held = blob::to_ids(&suffix)?.into_iter().map(i64::from);
        content::release(desk, held.chain([request]))?;
        sessions.insert(session);
        trajectories.insert(trajectory);
    }
    for uid in trajectories {
        trajectory::tidy(desk, &uid)?;
    }
    for uid in sessions {
        session::tidy(desk, &uid)?;
    }
    Ok(())
}

/// Deletes every interaction.
pub(crate) fn forget_all(c: &Connection) -> Result<()> {
    c.execute_batch(
        "BEGIN IMMEDIATE;
         UPDATE step SET parent = NULL;
         DELETE FROM run_step; DELETE FROM reward; DELETE FROM step; DELETE FROM trajectory; DELETE FROM session;
         DELETE FROM content; DELETE FROM prompt_group;
         INSERT INTO step_text (step_text) VALUES ('rebuild');
         INSERT INTO step_short (step_short) VALUES ('rebuild');
         COMMIT;",
    )?;
    Ok(())
}

/// What the second schema needs of the steps of the first.
pub(crate) fn backfill(c: &Connection) -> Result<()> {
    let mut holds: BTreeMap<i64, i64> = BTreeMap::new();
    for id in ids(c, "SELECT id FROM step ORDER BY id", &[])? {
        let (suffix, request, user, answer) = c
            .prepare_cached(
                "SELECT messages_suffix, request, user_text, answer_text FROM step WHERE id = ?1",
            )?
            .query_row([id], |r| {
                Ok((
                    r.get::<_, Vec<u8>>(0)?,
                    r.get::<_, i64>(1)?,
                    r.get::<_, String>(2)?,
                    r.get::<_, String>(3)?,
                ))
            })?;
        for held in blob::to_ids(&suffix)?
            .into_iter()
            .map(i64::from)
            .chain([request])
        {
            *holds.entry(held).or_default() += 1;
        }
        c.prepare_cached("UPDATE step SET short_terms = ?2 WHERE id = ?1")?
            .execute(params![
                id,
                search::short_terms([user.as_str(), answer.as_str()])
            ])?;
    }
    for (id, refs) in holds {
        c.prepare_cached("UPDATE content SET refs = ?2 WHERE id = ?1")?
            .execute([id, refs])?;
    }
    c.execute_batch(
        "DELETE FROM content WHERE refs = 0; INSERT INTO step_short (step_short) VALUES ('rebuild');",
    )?;
    Ok(())
}

/// A step as it was handed over.
pub(crate) fn stored(c: &Connection, uid: &StepUid) -> Result<Step> {
    let d = detail(c, uid)?;
    let (prompt_uid, index): (String, u32) = c
        .prepare_cached("SELECT prompt_uid, idx FROM step WHERE uid = ?1")?
        .query_row([uid.as_str()], |r| Ok((r.get(0)?, r.get(1)?)))?;
    let damaged = |e: serde_json::Error| StoreError::Damaged(e.to_string());
    let s = d.summary;
    Ok(Step {
        uid: uid.clone(),
        session: s.session.into(),
        trajectory: s.trajectory.into(),
        prompt_uid,
        turn: s.turn,
        index,
        kind: if s.kind == "main" {
            StepKind::Main
        } else {
            StepKind::Side
        },
        kind_reason: s.kind_reason,
        adapter: s.adapter,
        base_model: d.base_model,
        prompt_ids: d.prompt_ids,
        response_ids: d.response_ids,
        logprobs: d.logprobs,
        model_logprobs: d.model_logprobs,
        sampling: serde_json::from_value(d.sampling).map_err(damaged)?,
        finish_reason: serde_json::from_value(Value::String(s.finish_reason)).map_err(damaged)?,
        cached_tokens: d.cached_tokens,
        first_token_ms: d.first_token_ms,
        total_ms: d.total_ms,
        client: s.client,
        user_text: s.user_text,
        answer_text: s.answer_text,
        request: d.request,
        response: d.response,
        created_at: s.created_at,
    })
}

/// What redaction would do to the newest steps.
pub(crate) fn preview(c: &Connection, redactor: &Redactor, most: usize) -> Result<Vec<Preview>> {
    let rows = c
        .prepare_cached(
            "SELECT uid, user_text, answer_text, response FROM step ORDER BY id DESC LIMIT ?1",
        )?
        .query_map([most as i64], |r| {
            Ok((
                r.get::<_, String>(0)?,
                r.get::<_, String>(1)?,
                r.get::<_, String>(2)?,
                r.get::<_, String>(3)?,
            ))
        })?
        .collect::<rusqlite::Result<Vec<_>>>()?;
    Ok(rows
        .iter()
        .filter_map(|(uid, user, answer, response)| {
            redactor.preview(uid, &[user, answer, response])
        })
        .collect())
}

/// Makes the steps that these adapters learned from fresh again. Returns how many.
pub(crate) fn requeue(c: &Connection, adapters: &[AdapterVersion]) -> Result<u64> {
    let mut n = 0;
    for version in adapters {
        n += c
            .prepare_cached(
                "UPDATE step SET learning = 'fresh', run = NULL WHERE learning = 'used' AND reward IS NOT NULL
                     AND uid IN (SELECT step FROM run_step WHERE outcome = 'used' AND run IN (
                         SELECT run FROM adapter WHERE version = ?1 UNION SELECT id FROM run WHERE version = ?1))",
            )?
            .execute([version.0])?;
    }
    Ok(n as u64)
}
