//! `GET /v1/models`: what a client may name.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use spotter_core::Code;
use spotter_core::code::Failure;

use crate::App;
use crate::error::{self, Form};

fn entries(app: &App) -> Vec<Value> {
    let facts = app.engine.facts();
    let context = facts.as_ref().map(|f| f.context_length);
    let base = facts.map(|f| f.name).unwrap_or_default();
    let adapters = app.engine.adapters();
    let mut names = vec![("spotter".to_owned(), adapters.live.to_string())];
    names.push(("spotter:base".to_owned(), "base".to_owned()));
    for version in adapters.loaded.iter().filter(|v| !v.is_base()) {
        names.push((format!("spotter:{version}"), version.to_string()));
    }
    names
        .into_iter()
        .map(|(id, adapter)| {
            json!({
                "id": id,
                "object": "model",
                "created": 0,
                "owned_by": "spotter",
                "root": base,
                "adapter": adapter,
                // The names that vLLM, llama.cpp and LM Studio clients read.
                "max_model_len": context,
                "context_length": context,
                // Anthropic's form of the same entry.
                "type": "model",
                "display_name": id,
            })
        })
        .collect()
}

/// `GET /v1/models`.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": entries(&app), "has_more": false}))
}

/// `GET /v1/models/{name}`, also for names with slashes.
pub(crate) async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> Response {
    let entry = entries(&app)
        .into_iter()
        .find(|entry| entry["id"].as_str() == Some(name.as_str()));
    match entry {
        Some(entry) => Json(entry).into_response(),
        None => error::response(
            Form::OpenAi,
            &Failure::new(
                Code::ModelNotFound,
                format!("The model '{name}' does not exist; GET /v1/models lists those that do."),
            ),
        ),
    }
}
