//! `step`: model calls. Prompts are a reference to an earlier step and a suffix.

use std::collections::BTreeSet;

use rusqlite::types::ToSql;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::{Value, json};
use spotter_core::AdapterVersion;
use spotter_core::id::{StepUid, TrajectoryUid};
use spotter_core::step::{Step, StepKind};
use spotter_core::train::{StepReward, TrainStep};

use crate::blob;
use crate::error::{Result, StoreError};
use crate::query::{Counts, LabelCounts, Page, StepDetail, StepFilter, StepSummary};
use crate::table::{content, reward, session, trajectory};

/// Longest chain of references before a prompt is stored whole again.
const MAX_DEPTH: i64 = 48;
/// Earlier steps of a session that are tried as a parent.
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

/// Stores a step, its session and its trajectory. A step that is there already is left alone.
pub(crate) fn insert(c: &Connection, step: &Step) -> Result<()> {
    session::touch(c, step)?;
    trajectory::touch(c, step)?;
    let (messages, rest) = split(&step.request);
    let message_rows = messages
        .iter()
        .map(|m| Ok(content::put(c, &m.to_string())? as u32))
        .collect::<Result<Vec<u32>>>()?;
    let request = content::put(c, &rest.to_string())?;

    // The earlier step of this session with the longest common beginning.
    let candidates = c
        .prepare_cached(
            "SELECT id FROM step WHERE session = ?1 AND depth < ?2 ORDER BY id DESC LIMIT ?3",
        )?
        .query_map(params![step.session.as_str(), MAX_DEPTH, CANDIDATES], |r| {
            r.get(0)
        })?
        .collect::<rusqlite::Result<Vec<i64>>>()?;
    let (mut parent, mut prefix, mut messages_prefix, mut depth) = (None, 0, 0, 0);
    for id in candidates {
        let mut earlier = assemble(c, id)?;
        earlier.prompt.append(&mut earlier.response);
        let common = blob::common_prefix(&earlier.prompt, &step.prompt_ids);
        let common_messages = blob::common_prefix(&earlier.messages, &message_rows);
        if (common, common_messages) > (prefix, messages_prefix) {
            (parent, prefix, messages_prefix, depth) =
                (Some(id), common, common_messages, earlier.depth + 1);
        }
    }
    let kind = match step.kind {
        StepKind::Main => "main",
        StepKind::Side => "side",
    };
    let text = |e: serde_json::Error| StoreError::Invalid(e.to_string());
    let finish = serde_json::to_value(step.finish_reason).map_err(text)?;
    c.prepare_cached(
        "INSERT INTO step (uid, session, trajectory, prompt_uid, turn, idx, kind, kind_reason, adapter, base_model,
             parent, depth, prompt_prefix, prompt_suffix, messages_prefix, messages_suffix, response_ids, logprobs,
             model_logprobs, prompt_tokens, response_tokens, cached_tokens, sampling, finish_reason, first_token_ms,
             total_ms, client, user_text, answer_text, answer_hash, request, response, created_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22,
             ?23, ?24, ?25, ?26, ?27, ?28, ?29, ?30, ?31, ?32, ?33)
         ON CONFLICT (uid) DO NOTHING",
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
        step.created_at
    ])?;
    Ok(())
}

/// What a full-text query matches: the text as one phrase, or a LIKE pattern when it is
/// too short for trigrams (two Chinese characters, say).
pub(crate) fn search_term(q: &str) -> String {
    if q.chars().count() >= 3 {
        format!("\"{}\"", q.replace('"', "\"\""))
    } else {
        format!("%{q}%")
    }
}

const SUMMARY: &str = "step.uid, step.session, step.trajectory, step.turn, step.kind, step.kind_reason, step.adapter,
    step.client, step.user_text, step.answer_text, step.rating, step.reward, step.correction, step.learning, step.run,
    step.drop_reason, step.finish_reason, step.prompt_tokens, step.response_tokens, step.created_at,
    (SELECT reasons FROM reward WHERE reward.step = step.uid AND source = 'user' ORDER BY id DESC LIMIT 1),
    (SELECT note FROM reward WHERE reward.step = step.uid AND source = 'user' ORDER BY id DESC LIMIT 1),
    step.id, (SELECT max(run) FROM run_step WHERE run_step.step = step.uid AND outcome = 'used')";

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
    let mut values: Vec<Box<dyn ToSql>> = Vec::new();
    let mut add = |condition: &'static str, value: Box<dyn ToSql>| {
        conditions.push(condition);
        values.push(value);
    };
    if let Some(cursor) = &filter.cursor {
        let before: i64 = cursor
            .parse()
            .map_err(|_| StoreError::Invalid(format!("'{cursor}' is not a cursor of this list")))?;
        add("step.id < ?", Box::new(before));
    }
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
    if let Some(q) = filter.q.as_deref().map(str::trim).filter(|q| !q.is_empty()) {
        let term = search_term(q);
        if q.chars().count() >= 3 {
            add(
                "step.id IN (SELECT rowid FROM step_text WHERE step_text MATCH ?)",
                Box::new(term),
            );
        } else {
            add(
                "step.user_text || char(10) || step.answer_text LIKE ?",
                Box::new(term),
            );
        }
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
        format!("SELECT {SUMMARY} FROM step WHERE {filter_sql} ORDER BY step.id DESC LIMIT ?");
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

/// One step, complete.
pub(crate) fn detail(c: &Connection, uid: &StepUid) -> Result<StepDetail> {
    let (id, summary) = c
        .prepare_cached(&format!("SELECT {SUMMARY} FROM step WHERE step.uid = ?1"))?
        .query_row([uid.as_str()], summary)
        .optional()?
        .ok_or_else(|| missing(uid.as_str()))?;
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
    let sql = format!(
        "SELECT uid FROM step WHERE {column} = ?1 ORDER BY kind = 'main' DESC, id DESC LIMIT 1"
    );
    c.prepare_cached(&sql)?
        .query_row([value], |r| r.get::<_, String>(0))
        .optional()?
        .map(StepUid::from)
        .ok_or_else(|| missing(value))
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
    let one = |sql: &str| -> Result<u64> {
        Ok(c.prepare_cached(sql)?
            .query_row([], |r| r.get::<_, i64>(0))? as u64)
    };
    let (up, down) = (
        one("SELECT count(*) FROM step WHERE rating = 'up'")?,
        one("SELECT count(*) FROM step WHERE rating = 'down'")?,
    );
    Ok(Counts {
        steps: one("SELECT count(*) FROM step")?,
        unrated: one("SELECT count(*) FROM step WHERE rating IS NULL AND kind = 'main'")?,
        rated: up + down,
        up,
        down,
        sessions: one("SELECT count(*) FROM session")?,
    })
}

/// Rated, unconsumed, trainable steps.
pub(crate) fn fresh_labels(c: &Connection) -> Result<LabelCounts> {
    Ok(c.prepare_cached(
        "SELECT count(*), coalesce(sum(reward < 0), 0), coalesce(sum(correction IS NOT NULL), 0) FROM step
         WHERE learning = 'fresh' AND reward IS NOT NULL AND kind = 'main'",
    )?
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
pub(crate) fn claim(c: &Connection, run: i64, most: usize) -> Result<Vec<TrainStep>> {
    let rated = ids(
        c,
        "SELECT id FROM step WHERE learning = 'fresh' AND reward IS NOT NULL AND kind = 'main' AND response_tokens > 0
         ORDER BY id LIMIT ?1",
        &[&(most as i64)],
    )?;
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
    Ok(steps.into_iter().map(|(_, s)| s).collect())
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

/// Deletes steps; later prompts that referred to them are stored whole first. Returns the
/// adapters that learned from them.
pub(crate) fn forget(c: &Connection, uids: &[String]) -> Result<Vec<AdapterVersion>> {
    let mut touched = BTreeSet::new();
    for uid in uids {
        let id: i64 = c
            .prepare_cached("SELECT id FROM step WHERE uid = ?1")?
            .query_row([uid], |r| r.get(0))
            .optional()?
            .ok_or_else(|| missing(uid))?;
        let versions = c
            .prepare_cached(
                "SELECT run.version FROM run_step JOIN run ON run.id = run_step.run
                 WHERE run_step.step = ?1 AND outcome = 'used' AND run.version IS NOT NULL",
            )?
            .query_map([uid], |r| r.get::<_, u32>(0))?
            .collect::<rusqlite::Result<Vec<_>>>()?;
        touched.extend(versions.into_iter().map(AdapterVersion));
        for child in ids(c, "SELECT id FROM step WHERE parent = ?1", &[&id])? {
            let whole = assemble(c, child)?;
            c.execute(
                "UPDATE step SET parent = NULL, prompt_prefix = 0, prompt_suffix = ?2, messages_prefix = 0,
                     messages_suffix = ?3 WHERE id = ?1",
                params![child, blob::from_ids(&whole.prompt)?, blob::from_ids(&whole.messages)?],
            )?;
        }
        c.execute("DELETE FROM step WHERE id = ?1", [id])?;
    }
    forget_unreferenced(c)?;
    Ok(touched.into_iter().collect())
}

/// Deletes content that no step refers to any more.
fn forget_unreferenced(c: &Connection) -> Result<()> {
    let mut referenced: BTreeSet<i64> = ids(c, "SELECT DISTINCT request FROM step", &[])?
        .into_iter()
        .collect();
    let blobs = c
        .prepare("SELECT messages_suffix FROM step")?
        .query_map([], |r| r.get::<_, Vec<u8>>(0))?
        .collect::<rusqlite::Result<Vec<_>>>()?;
    for blob in blobs {
        referenced.extend(blob::to_ids(&blob)?.into_iter().map(i64::from));
    }
    for id in ids(c, "SELECT id FROM content", &[])? {
        if !referenced.contains(&id) {
            c.prepare_cached("DELETE FROM content WHERE id = ?1")?
                .execute([id])?;
        }
    }
    Ok(())
}

/// Deletes every interaction.
pub(crate) fn forget_all(c: &Connection) -> Result<()> {
    c.execute_batch(
        "BEGIN IMMEDIATE;
         UPDATE step SET parent = NULL;
         DELETE FROM run_step; DELETE FROM reward; DELETE FROM step; DELETE FROM trajectory; DELETE FROM session;
         DELETE FROM content;
         INSERT INTO step_text (step_text) VALUES ('rebuild');
         COMMIT;",
    )?;
    Ok(())
}

/// Every step as one line of JSON, oldest first.
pub(crate) fn export(c: &Connection, each: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
    for id in ids(c, "SELECT id FROM step ORDER BY id", &[])? {
        let uid: String = c
            .prepare_cached("SELECT uid FROM step WHERE id = ?1")?
            .query_row([id], |r| r.get(0))?;
        let d = detail(c, &StepUid::from(uid))?;
        let s = &d.summary;
        let line = json!({
            "uid": s.uid, "session": s.session, "trajectory": s.trajectory, "turn": s.turn, "kind": s.kind,
            "kind_reason": s.kind_reason, "adapter": s.adapter, "base_model": d.base_model, "client": s.client,
            "user_text": s.user_text, "answer_text": s.answer_text, "request": d.request, "response": d.response,
            "sampling": d.sampling, "prompt_ids": d.prompt_ids, "response_ids": d.response_ids,
            "logprobs": d.logprobs, "model_logprobs": d.model_logprobs, "finish_reason": s.finish_reason,
            "cached_tokens": d.cached_tokens, "first_token_ms": d.first_token_ms, "total_ms": d.total_ms,
            "created_at": s.created_at, "rewards": d.rewards, "reward": s.reward, "correction": s.correction,
        });
        each(&line.to_string())?;
    }
    Ok(())
}
