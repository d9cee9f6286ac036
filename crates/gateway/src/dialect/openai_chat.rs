//! `POST /v1/chat/completions` (OpenAI chat).
//!
//! A stream begins with an empty delta at once and repeats it while nothing
//! happens (clients count data, not comments, as a sign of life), and ends with
//! the finish reason, the usage when asked for, and `[DONE]`, in this order.

use std::sync::Arc;

use axum::Json as JsonAnswer;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use serde_json::{Map, Value, json};
use spotter_core::chat::ToolCall;
use spotter_core::code::Failure;
use spotter_core::generate::{TokenLogprob, ToolCallDelta};
use spotter_core::id::StepUid;

use crate::App;
use crate::answer::{self, Answer, Finished, Piece, finish_name};
use crate::body::{Json, SSE, data, stream};
use crate::call::{self, Call, chat_message, text};
use crate::dialect::responses;
use crate::error::{self, Form, invalid};
use crate::session::PathTrajectory;

/// Reads a chat request.
///
/// A body with `input` instead of `messages` (Cursor sends Responses bodies here)
/// is read as such and still answered in chat form.
pub(crate) fn read(body: &Map<String, Value>) -> Result<Call, Failure> {
    if !body.contains_key("messages") && body.contains_key("input") {
        return responses::read(body);
    }
    let mut call = Call::new(body, &["messages", "tools", "functions"]);
    let messages = body
        .get("messages")
        .and_then(Value::as_array)
        .ok_or_else(|| invalid("'messages' is missing or not a list."))?;
    call.messages = messages.iter().filter_map(chat_message).collect();
    if call.messages.is_empty() && !messages.is_empty() {
        return Err(invalid(
            "No entry of 'messages' has a role of system, developer, user, assistant or tool.",
        ));
    }
    call.tools = call::tools(body.get("tools").or_else(|| body.get("functions")));
    call.tool_choice = call::tool_choice(body.get("tool_choice"));
    call.response_format = call::response_format(body.get("response_format"));
    call.sampling = call::sampling(body, &["max_completion_tokens", "max_tokens"])?;
    call.n = call::choices(body)?;
    call.include_usage = body
        .get("stream_options")
        .and_then(|o| o.get("include_usage"))
        .and_then(Value::as_bool)
        .unwrap_or(false);
    call.hints.cache_key = text(body.get("prompt_cache_key")).map(str::to_owned);
    call.hints.user = text(body.get("user")).map(str::to_owned);
    if body.get("logprobs").and_then(Value::as_bool) == Some(true) {
        let top = body
            .get("top_logprobs")
            .and_then(Value::as_u64)
            .unwrap_or(0);
        call.top_logprobs = Some(u8::try_from(top.min(20)).unwrap_or(20));
    }
    if let Some(Value::Object(variables)) = body.get("chat_template_kwargs") {
        call.template_variables.clone_from(variables);
        // What the template is given by the conversation itself is not theirs to replace.
        for own in [
            "messages",
            "tools",
            "bos_token",
            "eos_token",
            "add_generation_prompt",
        ] {
            call.template_variables.remove(own);
        }
    }
    match text(body.get("reasoning_effort")) {
        Some("none" | "minimal") => {
            call.template_variables
                .insert("enable_thinking".to_owned(), Value::Bool(false));
        }
        Some(_) => {
            call.template_variables
                .insert("enable_thinking".to_owned(), Value::Bool(true));
        }
        None => {}
    }
    Ok(call)
}

/// `POST /v1/chat/completions`.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Json(body): Json,
) -> Response {
    respond(&app, &headers, &body, None).await
}

/// Answers a chat request, of a task attempt when the URL names one.
pub(crate) async fn respond(
    app: &Arc<App>,
    headers: &HeaderMap,
    body: &Map<String, Value>,
    trajectory: Option<PathTrajectory>,
) -> Response {
    let result = async {
        let mut call = read(body)?;
        call.hints.trajectory = trajectory;
        let (model, stream, usage) = (call.model.clone(), call.stream, call.include_usage);
        let logprobs = call.top_logprobs.is_some();
        let answers = answer::begin(app, call, headers).await?;
        if stream {
            Ok(streamed(answers, model, usage, logprobs))
        } else {
            whole(answers, &model, logprobs).await
        }
    };
    result
        .await
        .unwrap_or_else(|failure: Failure| error::response(Form::OpenAi, &failure))
}

/// The completion id that the client receives and rates.
pub(crate) fn completion_id(step: &StepUid) -> String {
    format!("chatcmpl-{step}")
}

/// Tool calls of a whole answer.
pub(crate) fn tool_calls_json(calls: &[ToolCall]) -> Value {
    calls
        .iter()
        .map(|call| {
            json!({"id": call.id, "type": "function",
                   "function": {"name": call.name, "arguments": call.arguments}})
        })
        .collect()
}

fn logprobs_json(tokens: &[TokenLogprob]) -> Value {
    let content: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let top: Vec<Value> = token
                .top
                .iter()
                .map(|(_, text, logprob)| {
                    json!({"token": text, "logprob": logprob, "bytes": text.as_bytes()})
                })
                .collect();
            json!({"token": token.text, "logprob": token.logprob,
                   "bytes": token.text.as_bytes(), "top_logprobs": top})
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// `usage` over all choices; the prompt counts once.
fn usage_json(prompt: u32, cached: u32, completion: u32) -> Value {
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt.saturating_add(completion),
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    })
}

async fn whole(answers: Vec<Answer>, model: &str, logprobs: bool) -> Result<Response, Failure> {
    let created = answers.first().map_or(0, |a| a.created);
    let finished = futures::future::try_join_all(answers.into_iter().map(Answer::finish)).await?;
    let mut choices = Vec::with_capacity(finished.len());
    let mut completion_tokens = 0;
    for (index, (_, _, answer, tokens)) in finished.iter().enumerate() {
        let completion = &answer.completion;
        completion_tokens += answer.response_tokens();
        let content = if completion.content.is_empty() && !completion.tool_calls.is_empty() {
            Value::Null
        } else {
            json!(completion.content)
        };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if let Some(reasoning) = completion.reasoning.as_ref().filter(|r| !r.is_empty()) {
            message["reasoning_content"] = json!(reasoning);
        }
        if !completion.tool_calls.is_empty() {
            message["tool_calls"] = tool_calls_json(&completion.tool_calls);
        }
        choices.push(json!({
            "index": index,
            "message": message,
            "logprobs": if logprobs { logprobs_json(tokens) } else { Value::Null },
            "finish_reason": finish_name(completion.finish_reason),
        }));
    }
    let Some((step, trajectory, first, _)) = finished.first() else {
        return Err(invalid("no choice was asked for."));
    };
    let headers = answer::headers(step, trajectory, first.adapter);
    let body = json!({
        "id": completion_id(step),
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage_json(first.prompt_tokens, first.cached_tokens, completion_tokens),
        "system_fingerprint": format!("spotter-{}", first.adapter),
    });
    Ok((headers, JsonAnswer(body)).into_response())
}

/// Interleaves the pieces of several choices, each with its index.
pub(crate) fn interleave(answers: Vec<Answer>) -> impl Stream<Item = (usize, Piece)> + Send {
    futures::stream::select_all(
        answers
            .into_iter()
            .enumerate()
            .map(|(index, answer)| answer.pieces.map(move |piece| (index, piece)).boxed()),
    )
}

fn tool_call_deltas(deltas: &[ToolCallDelta]) -> Value {
    deltas
        .iter()
        .map(|delta| {
            let mut function = Map::new();
            if let Some(name) = &delta.name {
                function.insert("name".to_owned(), json!(name));
            }
            function.insert("arguments".to_owned(), json!(delta.arguments));
            let mut entry = Map::new();
            entry.insert("index".to_owned(), json!(delta.index));
            if let Some(id) = &delta.id {
                entry.insert("id".to_owned(), json!(id));
                entry.insert("type".to_owned(), json!("function"));
            }
            entry.insert("function".to_owned(), Value::Object(function));
            Value::Object(entry)
        })
        .collect()
}

fn streamed(answers: Vec<Answer>, model: String, include_usage: bool, logprobs: bool) -> Response {
    let count = answers.len();
    let Some(first) = answers.first() else {
        return error::response(Form::OpenAi, &invalid("no choice was asked for."));
    };
    let headers = answer::headers(&first.step, &first.trajectory, first.adapter);
    let id = completion_id(&first.step);
    let fingerprint = format!("spotter-{}", first.adapter);
    let created = first.created;
    let chunk = move |choices: Value, usage: Option<Value>| {
        let mut chunk = json!({
            "id": id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
            "choices": choices,
        });
        if let Some(usage) = usage {
            chunk["usage"] = usage;
        }
        data(&chunk)
    };
    let delta = |index: usize, delta: Value| json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]);
    let lines = async_stream::stream! {
        let empty = || json!({"role": "assistant", "content": ""});
        for index in 0..count {
            yield chunk(delta(index, empty()), None);
        }
        let mut ends: Vec<Option<Box<Finished>>> = (0..count).map(|_| None).collect();
        let mut left = count;
        let mut pieces = std::pin::pin!(interleave(answers));
        while let Some((index, piece)) = pieces.next().await {
            match piece {
                Piece::Waiting => yield chunk(delta(index, empty()), None),
                Piece::Delta { content, reasoning, tool_calls, logprobs: tokens } => {
                    let mut fields = Map::new();
                    if !reasoning.is_empty() {
                        fields.insert("reasoning_content".to_owned(), json!(reasoning));
                    }
                    if !content.is_empty() {
                        fields.insert("content".to_owned(), json!(content));
                    }
                    if !tool_calls.is_empty() {
                        fields.insert("tool_calls".to_owned(), tool_call_deltas(&tool_calls));
                    }
                    if fields.is_empty() && tokens.is_empty() {
                        continue;
                    }
                    let mut choices = delta(index, Value::Object(fields));
                    if logprobs && !tokens.is_empty() {
                        choices[0]["logprobs"] = logprobs_json(&tokens);
                    }
                    yield chunk(choices, None);
                }
                Piece::Finished(finished) => {
                    let reason = finish_name(finished.completion.finish_reason);
                    yield chunk(json!([{"index": index, "delta": {}, "logprobs": null,
                                        "finish_reason": reason}]), None);
                    ends[index] = Some(finished);
                    left -= 1;
                    if left == 0 {
                        break;
                    }
                }
                Piece::Failed(failure) => {
                    // The status is sent already; the error goes in band and ends the stream.
                    yield data(&error::body(Form::OpenAi, &failure));
                    return;
                }
            }
        }
        if include_usage {
            let (mut prompt, mut cached, mut completion) = (0, 0, 0);
            for finished in ends.iter().flatten() {
                prompt = finished.prompt_tokens;
                cached = cached.max(finished.cached_tokens);
                completion += finished.response_tokens();
            }
            yield chunk(json!([]), Some(usage_json(prompt, cached, completion)));
        }
        yield "data: [DONE]\n\n".to_owned();
    };
    stream(SSE, headers, lines)
}
