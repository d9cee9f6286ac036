//! `POST /v1/feedback`: a rating by completion id, trace id or conversation.

use std::sync::Arc;

use axum::Json as JsonAnswer;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use spotter_core::Code;
use spotter_core::code::Failure;
use spotter_core::id::{SessionUid, StepUid};

use crate::App;
use crate::answer::user_reward;
use crate::body::Json;
use crate::call::text;
use crate::control::dto::{Rating, RatingChange, StepSummary};
use crate::control::events::EventBody;
use crate::dialect::responses::step_of;
use crate::error::{self, Form, invalid};
use crate::session;

fn first<'a>(body: &'a Map<String, Value>, keys: &[&str]) -> Option<&'a str> {
    keys.iter()
        .find_map(|key| text(body.get(*key)))
        .filter(|value| !value.is_empty())
}

/// Reads a rating. A correction without a rating dislikes the answer it corrects.
fn change(body: &Map<String, Value>) -> Result<RatingChange, Failure> {
    let correction = first(body, &["correction"]).map(str::to_owned);
    let rating = match body.get("rating") {
        Some(Value::Null) => None,
        Some(Value::String(word)) => match word.as_str() {
            "up" | "good" | "👍" => Some(Rating::Up),
            "down" | "bad" | "👎" => Some(Rating::Down),
            _ => return Err(invalid("'rating' must be \"up\", \"down\" or null.")),
        },
        None if correction.is_some() => Some(Rating::Down),
        _ => return Err(invalid("'rating' must be \"up\", \"down\" or null.")),
    };
    let reasons = match body.get("reasons") {
        Some(Value::Array(list)) => list
            .iter()
            .filter_map(|r| r.as_str().map(str::to_owned))
            .collect(),
        _ => Vec::new(),
    };
    Ok(RatingChange {
        rating,
        reasons,
        note: first(body, &["note", "comment"]).map(str::to_owned),
        correction,
    })
}

async fn find(app: &App, body: &Map<String, Value>) -> Result<StepUid, Failure> {
    let unknown = |what: &str, id: &str| {
        Failure::new(
            Code::NotFound,
            format!("No recorded answer has the {what} '{id}'."),
        )
    };
    if let Some(id) = first(body, &["id", "response_id", "completion_id", "step"]) {
        return Ok(step_of(id));
    }
    if let Some(trace) = first(body, &["trace_id"]) {
        // A whole `traceparent` is taken too.
        let trace = trace
            .split('-')
            .find(|part| part.len() == 32)
            .unwrap_or(trace);
        return app
            .pool
            .last_step_of_turn(&trace.to_ascii_lowercase())
            .await?
            .ok_or_else(|| unknown("trace id", trace));
    }
    if let Some(key) = first(body, &["session", "session_id"]) {
        for session in [
            SessionUid::from(key),
            session::digest(session::without_slot(key)),
        ] {
            if let Some(last) = app.pool.last_step(&session).await? {
                return Ok(last.uid);
            }
        }
        return Err(unknown("session", key));
    }
    Err(invalid("One of 'id', 'trace_id' and 'session' is needed."))
}

/// Rates a step and tells everyone who follows the events.
pub(crate) async fn rate(
    app: &App,
    uid: &StepUid,
    change: &RatingChange,
) -> Result<StepSummary, Failure> {
    let step = app
        .pool
        .rate(uid, user_reward(change))
        .await?
        .ok_or_else(|| {
            Failure::new(
                Code::NotFound,
                format!("No recorded answer has the id '{uid}'."),
            )
        })?;
    app.events.publish(EventBody::Rating {
        step: Box::new(step.clone()),
    });
    Ok(step)
}

/// `POST /v1/feedback`.
pub(crate) async fn feedback(State(app): State<Arc<App>>, Json(body): Json) -> Response {
    let result = async {
        let change = change(&body)?;
        let uid = find(&app, &body).await?;
        let step = rate(&app, &uid, &change).await?;
        Ok(JsonAnswer(json!({
            "status": "ok",
            "step": step.uid,
            "rating": step.rating,
            "correction": step.correction,
        }))
        .into_response())
    };
    result
        .await
        .unwrap_or_else(|failure: Failure| error::response(Form::OpenAi, &failure))
}
