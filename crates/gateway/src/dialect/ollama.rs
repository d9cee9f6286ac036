//! `POST /api/chat`, `GET /api/tags`, `POST /api/show` (Ollama, as far as chat
//! clients need it).

use std::sync::Arc;

use axum::Json as JsonAnswer;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde_json::{Map, Value, json};
use spotter_core::chat::ResponseFormat;
use spotter_core::code::Failure;
use spotter_core::generate::Completion;

use crate::App;
use crate::answer::{self, Answer, Finished, Piece, finish_name, now_ms};
use crate::body::{Json, NDJSON, stream};
use crate::call::{self, Call, chat_message};
use crate::error::{self, Form, invalid};

fn read(body: &Map<String, Value>) -> Result<Call, Failure> {
    let mut call = Call::new(body, &["messages", "tools"]);
    // Unlike everywhere else, streaming is Ollama's default.
    call.stream = body.get("stream").and_then(Value::as_bool).unwrap_or(true);
    let messages = body
        .get("messages")
        .and_then(Value::as_array)
        .ok_or_else(|| invalid("'messages' is missing or not a list."))?;
    call.messages = messages.iter().filter_map(chat_message).collect();
    call.tools = call::tools(body.get("tools"));
    let mut options = body
        .get("options")
        .and_then(Value::as_object)
        .cloned()
        .unwrap_or_default();
    if let Some(penalty) = options.get("repeat_penalty").cloned() {
        options.insert("repetition_penalty".to_owned(), penalty);
    }
    call.sampling = call::sampling(&options, &["num_predict"])?;
    call.response_format = match body.get("format") {
        Some(Value::String(word)) if word == "json" => ResponseFormat::JsonObject,
        Some(schema @ Value::Object(_)) => ResponseFormat::JsonSchema(schema.clone()),
        _ => ResponseFormat::Text,
    };
    if let Some(think) = body.get("think").and_then(Value::as_bool) {
        call.template_variables
            .insert("enable_thinking".to_owned(), Value::Bool(think));
    }
    Ok(call)
}

/// `POST /api/chat`.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Json(body): Json,
) -> Response {
    let result = async {
        let call = read(&body)?;
        let (model, stream) = (call.model.clone(), call.stream);
        let mut answers = answer::begin(&app, call, &headers).await?;
        let answer = answers.remove(0);
        if stream {
            Ok(streamed(answer, model))
        } else {
            whole(answer, &model).await
        }
    };
    result
        .await
        .unwrap_or_else(|failure: Failure| error::response(Form::Ollama, &failure))
}

fn tool_calls(completion: &Completion) -> Value {
    completion
        .tool_calls
        .iter()
        .enumerate()
        .map(|(index, call)| {
            let arguments: Value =
                serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
            json!({"id": call.id,
                   "function": {"index": index, "name": call.name, "arguments": arguments}})
        })
        .collect()
}

fn line(model: &str, message: Value) -> Value {
    json!({"model": model, "created_at": rfc3339(now_ms()), "message": message, "done": false})
}

fn with_end(mut line: Value, finished: &Finished) -> Value {
    let completion = &finished.completion;
    let nanoseconds = |ms: u64| ms.saturating_mul(1_000_000);
    line["done"] = json!(true);
    line["done_reason"] = json!(match finish_name(completion.finish_reason) {
        "length" => "length",
        _ => "stop",
    });
    line["total_duration"] = json!(nanoseconds(completion.total_ms));
    line["load_duration"] = json!(0);
    line["prompt_eval_count"] = json!(finished.prompt_tokens);
    line["prompt_eval_duration"] = json!(nanoseconds(completion.first_token_ms));
    line["eval_count"] = json!(finished.response_tokens());
    line["eval_duration"] = json!(nanoseconds(
        completion
            .total_ms
            .saturating_sub(completion.first_token_ms)
    ));
    line
}

async fn whole(answer: Answer, model: &str) -> Result<Response, Failure> {
    let (step, trajectory, finished, _) = answer.finish().await?;
    let completion = &finished.completion;
    let mut message = json!({"role": "assistant", "content": completion.content});
    if let Some(reasoning) = completion.reasoning.as_ref().filter(|r| !r.is_empty()) {
        message["thinking"] = json!(reasoning);
    }
    if !completion.tool_calls.is_empty() {
        message["tool_calls"] = tool_calls(completion);
    }
    let headers = answer::headers(&step, &trajectory, finished.adapter);
    let body = with_end(line(model, message), &finished);
    Ok((headers, JsonAnswer(body)).into_response())
}

fn streamed(answer: Answer, model: String) -> Response {
    let headers = answer::headers(&answer.step, &answer.trajectory, answer.adapter);
    let mut pieces = answer.pieces;
    let lines = async_stream::stream! {
        let empty = || json!({"role": "assistant", "content": ""});
        while let Some(piece) = pieces.next().await {
            match piece {
                Piece::Waiting => yield format!("{}\n", line(&model, empty())),
                Piece::Delta { content, reasoning, .. } => {
                    // Calls are sent whole, at the end: Ollama's arguments are objects.
                    if content.is_empty() && reasoning.is_empty() {
                        continue;
                    }
                    let mut message = json!({"role": "assistant", "content": content});
                    if !reasoning.is_empty() {
                        message["thinking"] = json!(reasoning);
                    }
                    yield format!("{}\n", line(&model, message));
                }
                Piece::Finished(finished) => {
                    if !finished.completion.tool_calls.is_empty() {
                        let mut message = empty();
                        message["tool_calls"] = tool_calls(&finished.completion);
                        yield format!("{}\n", line(&model, message));
                    }
                    yield format!("{}\n", with_end(line(&model, empty()), &finished));
                    return;
                }
                Piece::Failed(failure) => {
                    yield format!("{}\n", error::body(Form::Ollama, &failure));
                    return;
                }
            }
        }
    };
    stream(NDJSON, headers, lines)
}

fn details(app: &App) -> Value {
    let facts = app.engine.facts();
    let family = facts
        .as_ref()
        .map(|f| f.architecture.clone())
        .unwrap_or_default();
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": facts.as_ref().map(|f| format!("{}M", f.parameters / 1_000_000)),
        "quantization_level": facts.as_ref().map(|f| f.quantisation.clone()),
    })
}

/// `GET /api/tags`.
pub(crate) async fn tags(State(app): State<Arc<App>>) -> JsonAnswer<Value> {
    let digest = app
        .engine
        .facts()
        .map(|f| f.fingerprint)
        .unwrap_or_default();
    let details = details(&app);
    let adapters = app.engine.adapters();
    let fixed = adapters
        .loaded
        .iter()
        .filter(|v| !v.is_base())
        .map(|v| format!("spotter:{v}"));
    let names = ["spotter:latest".to_owned(), "spotter:base".to_owned()]
        .into_iter()
        .chain(fixed);
    let models: Vec<Value> = names
        .map(|name| {
            json!({"name": name, "model": name, "modified_at": rfc3339(0), "size": 0,
                   "digest": digest, "details": details})
        })
        .collect();
    JsonAnswer(json!({"models": models}))
}

/// `POST /api/show`.
pub(crate) async fn show(State(app): State<Arc<App>>) -> JsonAnswer<Value> {
    let facts = app.engine.facts();
    let mut info = Map::new();
    if let Some(facts) = &facts {
        info.insert("general.architecture".to_owned(), json!(facts.architecture));
        info.insert(
            "general.parameter_count".to_owned(),
            json!(facts.parameters),
        );
        info.insert(
            format!("{}.context_length", facts.architecture),
            json!(facts.context_length),
        );
    }
    JsonAnswer(json!({
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": details(&app),
        "model_info": info,
        "capabilities": ["completion", "tools"],
    }))
}

/// A time as RFC 3339 in UTC (civil date from days: Howard Hinnant's algorithm).
fn rfc3339(ms: i64) -> String {
    let (days, rest) = (ms.div_euclid(86_400_000), ms.rem_euclid(86_400_000));
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 {
        month_index + 3
    } else {
        month_index - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hours, minutes) = (rest / 3_600_000, rest / 60_000 % 60);
    let (seconds, milliseconds) = (rest / 1000 % 60, rest % 1000);
    format!("{year:04}-{month:02}-{day:02}T{hours:02}:{minutes:02}:{seconds:02}.{milliseconds:03}Z")
}

#[cfg(test)]
mod tests {
    use super::rfc3339;

    #[test]
    fn times_are_rfc_3339() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(951_782_400_123), "2000-02-29T00:00:00.123Z");
        assert_eq!(rfc3339(1_796_083_200_000), "2026-12-01T00:00:00.000Z");
    }
}
