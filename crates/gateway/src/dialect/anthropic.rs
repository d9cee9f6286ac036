//! `POST /v1/messages` and `/v1/messages/count_tokens` (Anthropic Messages).

use std::sync::Arc;

use axum::Json as JsonAnswer;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde_json::{Map, Value, json};
use spotter_core::chat::{Message, Role, ToolCall};
use spotter_core::code::Failure;
use spotter_core::generate::FinishReason;

use crate::App;
use crate::answer::{self, Answer, Finished, Piece};
use crate::body::{Json, SSE, event, stream};
use crate::call::{self, Call, call_id, content_text, normalise, text};
use crate::error::{self, Form, invalid};

/// Claude Code's billing block; it differs per conversation and would break the
/// prefix cache.
const BILLING: &str = "x-anthropic-billing-header:";

fn read(body: &Map<String, Value>) -> Result<Call, Failure> {
    let mut call = Call::new(body, &["messages", "tools", "system"]);
    let system = system_text(body.get("system"));
    if !system.is_empty() {
        call.messages.push(Message::text(Role::System, system));
    }
    let messages = body
        .get("messages")
        .and_then(Value::as_array)
        .ok_or_else(|| invalid("'messages' is missing or not a list."))?;
    for message in messages {
        read_message(message, &mut call.messages);
    }
    call.tools = call::tools(body.get("tools"));
    call.tool_choice = call::tool_choice(body.get("tool_choice"));
    let format = body
        .get("output_format")
        .or_else(|| body.get("output_config").and_then(|c| c.get("format")));
    call.response_format = call::response_format(format);
    call.sampling = call::sampling(body, &["max_tokens"])?;
    if text(body.get("thinking").and_then(|t| t.get("type"))) == Some("disabled") {
        call.template_variables
            .insert("enable_thinking".to_owned(), Value::Bool(false));
    }
    call.hints.metadata_session = body
        .get("metadata")
        .and_then(|m| text(m.get("user_id")))
        .and_then(metadata_session);
    Ok(call)
}

/// The session inside `metadata.user_id`: a JSON object with `session_id`, or the
/// older `user_…_session_<uuid>`.
fn metadata_session(user: &str) -> Option<String> {
    if let Ok(Value::Object(fields)) = serde_json::from_str::<Value>(user) {
        return text(fields.get("session_id"))
            .filter(|id| !id.is_empty())
            .map(str::to_owned);
    }
    user.split_once("_session_")
        .map(|(_, id)| id.to_owned())
        .filter(|id| !id.is_empty())
}

fn system_text(system: Option<&Value>) -> String {
    let blocks = match system {
        Some(Value::Array(blocks)) => blocks.iter().map(|b| content_text(Some(b))).collect(),
        other => vec![content_text(other)],
    };
    let kept: Vec<String> = blocks
        .into_iter()
        .filter(|block| !block.is_empty() && !block.trim_start().starts_with(BILLING))
        .collect();
    kept.join("\n\n")
}

/// Reads one message, which may become several: tool results stand on their own.
fn read_message(value: &Value, messages: &mut Vec<Message>) {
    let role = match text(value.get("role")) {
        Some("assistant") => Role::Assistant,
        Some("system" | "developer") => Role::System,
        _ => Role::User,
    };
    let Some(blocks) = value.get("content").and_then(Value::as_array) else {
        messages.push(Message::text(role, content_text(value.get("content"))));
        return;
    };
    let mut message = Message::text(role, "");
    let mut texts: Vec<String> = Vec::new();
    let mut thoughts: Vec<&str> = Vec::new();
    for block in blocks {
        match text(block.get("type")) {
            Some("thinking") => thoughts.extend(text(block.get("thinking"))),
            Some("redacted_thinking") => {}
            Some("tool_use" | "server_tool_use") => message.tool_calls.push(ToolCall {
                id: call_id(text(block.get("id")).unwrap_or_default()),
                name: text(block.get("name")).unwrap_or_default().to_owned(),
                arguments: block
                    .get("input")
                    .filter(|input| !input.is_null())
                    .map_or_else(|| "{}".to_owned(), Value::to_string),
            }),
            Some("tool_result") => {
                let mut result = Message::text(Role::Tool, content_text(block.get("content")));
                result.tool_call_id = text(block.get("tool_use_id")).map(call_id);
                messages.push(result);
            }
            _ => {
                let words = content_text(Some(block));
                if !words.is_empty() {
                    texts.push(words);
                }
            }
        }
    }
    message.content = texts.join("\n");
    message.reasoning = (!thoughts.is_empty()).then(|| thoughts.join("\n"));
    if !message.content.is_empty() || !message.tool_calls.is_empty() || message.reasoning.is_some()
    {
        messages.push(message);
    }
}

/// Whether the client wants to see the reasoning.
fn wants_thinking(body: &Map<String, Value>) -> bool {
    let thinking = body.get("thinking");
    let kind = text(thinking.and_then(|t| t.get("type")));
    let display = text(thinking.and_then(|t| t.get("display")));
    matches!(kind, Some("enabled" | "adaptive")) && display != Some("omitted")
}

fn stop_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "end_turn",
        FinishReason::Length => "max_tokens",
        FinishReason::ToolCalls => "tool_use",
    }
}

fn usage(prompt: u32, cached: u32, output: u32) -> Value {
    json!({
        "input_tokens": prompt.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    })
}

/// `POST /v1/messages`.
pub(crate) async fn messages(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Json(body): Json,
) -> Response {
    let result = async {
        let call = read(&body)?;
        let (model, stream) = (call.model.clone(), call.stream);
        let thinking = wants_thinking(&body);
        let mut answers = answer::begin(&app, call, &headers).await?;
        let answer = answers.remove(0);
        if stream {
            Ok(streamed(answer, model, thinking))
        } else {
            whole(answer, &model, thinking).await
        }
    };
    result
        .await
        .unwrap_or_else(|failure: Failure| error::response(Form::Anthropic, &failure))
}

/// `POST /v1/messages/count_tokens`.
pub(crate) async fn count_tokens(State(app): State<Arc<App>>, Json(body): Json) -> Response {
    let result = async {
        let mut call = read(&body)?;
        if call.messages.is_empty() {
            return Err(invalid("'messages' is empty."));
        }
        call.messages = normalise(std::mem::take(&mut call.messages));
        let count = app.engine.count_tokens(call.prompt()).await?;
        Ok(JsonAnswer(json!({"input_tokens": count})).into_response())
    };
    result
        .await
        .unwrap_or_else(|failure: Failure| error::response(Form::Anthropic, &failure))
}

/// `HEAD /api/hello`, which Claude Code sends before its first request.
pub(crate) async fn hello() -> StatusCode {
    StatusCode::OK
}

fn message_json(id: &str, model: &str, content: Value, stop: Value, usage: Value) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": null,
        "usage": usage,
    })
}

async fn whole(answer: Answer, model: &str, thinking: bool) -> Result<Response, Failure> {
    let (step, trajectory, finished, _) = answer.finish().await?;
    let completion = &finished.completion;
    let mut content = Vec::new();
    if let Some(reasoning) = completion
        .reasoning
        .as_ref()
        .filter(|r| thinking && !r.is_empty())
    {
        content.push(json!({"type": "thinking", "thinking": reasoning, "signature": ""}));
    }
    if !completion.content.is_empty() {
        content.push(json!({"type": "text", "text": completion.content}));
    }
    for call in &completion.tool_calls {
        let input: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
        content.push(json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input}));
    }
    let body = message_json(
        &format!("msg_{step}"),
        model,
        Value::Array(content),
        json!(stop_reason(completion.finish_reason)),
        usage(
            finished.prompt_tokens,
            finished.cached_tokens,
            finished.response_tokens(),
        ),
    );
    let headers = answer::headers(&step, &trajectory, finished.adapter);
    Ok((headers, JsonAnswer(body)).into_response())
}

/// Which content block is open.
#[derive(Clone, Copy, PartialEq)]
enum Block {
    Thinking,
    Text,
    ToolUse,
}

/// Writes content blocks in order: at most one is open, each has its index.
#[derive(Default)]
struct Blocks {
    open: Option<Block>,
    next: u32,
    lines: String,
}

impl Blocks {
    fn push(&mut self, name: &str, value: &Value) {
        self.lines.push_str(&event(name, value));
    }

    fn close(&mut self) {
        let Some(block) = self.open.take() else {
            return;
        };
        let index = self.next - 1;
        if block == Block::Thinking {
            self.push(
                "content_block_delta",
                &json!({"type": "content_block_delta", "index": index,
                        "delta": {"type": "signature_delta", "signature": ""}}),
            );
        }
        self.push(
            "content_block_stop",
            &json!({"type": "content_block_stop", "index": index}),
        );
    }

    fn begin(&mut self, block: Block, content: &Value) {
        self.close();
        let index = self.next;
        self.push(
            "content_block_start",
            &json!({"type": "content_block_start", "index": index, "content_block": content}),
        );
        self.open = Some(block);
        self.next += 1;
    }

    fn delta(&mut self, delta: &Value) {
        let index = self.next.saturating_sub(1);
        self.push(
            "content_block_delta",
            &json!({"type": "content_block_delta", "index": index, "delta": delta}),
        );
    }

    fn thinking(&mut self, text: &str) {
        if self.open != Some(Block::Thinking) {
            self.begin(
                Block::Thinking,
                &json!({"type": "thinking", "thinking": "", "signature": ""}),
            );
        }
        self.delta(&json!({"type": "thinking_delta", "thinking": text}));
    }

    fn text(&mut self, text: &str) {
        if self.open != Some(Block::Text) {
            self.begin(Block::Text, &json!({"type": "text", "text": ""}));
        }
        self.delta(&json!({"type": "text_delta", "text": text}));
    }

    fn tool(&mut self, id: Option<&str>, name: Option<&str>, arguments: &str) {
        if let Some(name) = name {
            self.begin(
                Block::ToolUse,
                &json!({"type": "tool_use", "id": id.unwrap_or_default(), "name": name, "input": {}}),
            );
        }
        if self.open == Some(Block::ToolUse) && !arguments.is_empty() {
            self.delta(&json!({"type": "input_json_delta", "partial_json": arguments}));
        }
    }

    fn take(&mut self) -> String {
        std::mem::take(&mut self.lines)
    }
}

fn ending(finished: &Finished) -> String {
    let mut lines = event(
        "message_delta",
        &json!({
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason(finished.completion.finish_reason),
                      "stop_sequence": null},
            "usage": usage(finished.prompt_tokens, finished.cached_tokens, finished.response_tokens()),
        }),
    );
    lines.push_str(&event("message_stop", &json!({"type": "message_stop"})));
    lines
}

fn streamed(answer: Answer, model: String, thinking: bool) -> Response {
    let headers = answer::headers(&answer.step, &answer.trajectory, answer.adapter);
    let message = message_json(
        &format!("msg_{}", answer.step),
        &model,
        json!([]),
        Value::Null,
        usage(answer.prompt_tokens, answer.cached_tokens, 0),
    );
    let mut pieces = answer.pieces;
    let lines = async_stream::stream! {
        let ping = || event("ping", &json!({"type": "ping"}));
        yield event("message_start", &json!({"type": "message_start", "message": message}));
        yield ping();
        let mut blocks = Blocks::default();
        while let Some(piece) = pieces.next().await {
            match piece {
                Piece::Waiting => yield ping(),
                Piece::Delta { content, reasoning, tool_calls, .. } => {
                    if thinking && !reasoning.is_empty() {
                        blocks.thinking(&reasoning);
                    }
                    if !content.is_empty() {
                        blocks.text(&content);
                    }
                    for call in &tool_calls {
                        blocks.tool(call.id.as_deref(), call.name.as_deref(), &call.arguments);
                    }
                    let lines = blocks.take();
                    if !lines.is_empty() {
                        yield lines;
                    }
                }
                Piece::Finished(finished) => {
                    blocks.close();
                    yield blocks.take();
                    yield ending(&finished);
                    return;
                }
                Piece::Failed(failure) => {
                    yield event("error", &error::body(Form::Anthropic, &failure));
                    return;
                }
            }
        }
    };
    stream(SSE, headers, lines)
}

#[cfg(test)]
mod tests {
    use super::metadata_session;

    #[test]
    fn the_session_is_found_in_both_forms_of_user_id() {
        assert_eq!(
            metadata_session(r#"{"device_id":"x","session_id":"abc"}"#).as_deref(),
            Some("abc")
        );
        assert_eq!(
            metadata_session("user_1_account__session_abc").as_deref(),
            Some("abc")
        );
        assert_eq!(metadata_session("someone"), None);
    }
}
