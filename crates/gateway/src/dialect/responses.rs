//! `POST /v1/responses` (OpenAI Responses).

use std::sync::Arc;

use axum::Json as JsonAnswer;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde_json::{Map, Value, json};
use spotter_core::Code;
use spotter_core::chat::{Message, Role, ToolCall};
use spotter_core::code::Failure;
use spotter_core::generate::FinishReason;
use spotter_core::id::StepUid;

use crate::App;
use crate::answer::{self, Answer, Finished, Piece};
use crate::body::{Json, SSE, event, stream};
use crate::call::{self, Call, call_id, chat_message, compact, content_text, text};
use crate::error::{self, Form, invalid};

/// Reads a Responses request; `previous_response_id` is the handler's to resolve.
pub(crate) fn read(body: &Map<String, Value>) -> Result<Call, Failure> {
    let mut call = Call::new(body, &["input", "tools", "instructions"]);
    if let Some(instructions) = text(body.get("instructions")).filter(|i| !i.is_empty()) {
        call.messages
            .push(Message::text(Role::System, instructions));
    }
    match body.get("input") {
        Some(Value::String(text)) => call.messages.push(Message::text(Role::User, text.clone())),
        Some(Value::Array(items)) => {
            for item in items {
                read_item(item, &mut call.messages);
            }
        }
        _ => return Err(invalid("'input' is missing; it must be a text or a list.")),
    }
    call.tools = call::tools(body.get("tools"));
    call.tool_choice = call::tool_choice(body.get("tool_choice"));
    call.response_format = call::response_format(body.get("text").and_then(|t| t.get("format")));
    call.sampling = call::sampling(
        body,
        &["max_output_tokens", "max_completion_tokens", "max_tokens"],
    )?;
    call.include_usage = body
        .get("stream_options")
        .and_then(|o| o.get("include_usage"))
        .and_then(Value::as_bool)
        .unwrap_or(false);
    call.hints.cache_key = text(body.get("prompt_cache_key")).map(str::to_owned);
    call.hints.user = text(body.get("user")).map(str::to_owned);
    match text(body.get("reasoning").and_then(|r| r.get("effort"))) {
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

fn read_item(item: &Value, messages: &mut Vec<Message>) {
    match text(item.get("type")) {
        Some("function_call" | "custom_tool_call") => {
            let arguments = text(item.get("arguments"))
                .or_else(|| text(item.get("input")))
                .unwrap_or("{}");
            let call = ToolCall {
                id: call_id(
                    text(item.get("call_id"))
                        .or_else(|| text(item.get("id")))
                        .unwrap_or_default(),
                ),
                name: text(item.get("name")).unwrap_or_default().to_owned(),
                arguments: compact(arguments),
            };
            match messages.last_mut().filter(|m| m.role == Role::Assistant) {
                Some(message) => message.tool_calls.push(call),
                None => messages.push(Message {
                    tool_calls: vec![call],
                    ..Message::text(Role::Assistant, "")
                }),
            }
        }
        Some("function_call_output" | "custom_tool_call_output") => {
            let mut result = Message::text(Role::Tool, content_text(item.get("output")));
            result.tool_call_id = text(item.get("call_id")).map(call_id);
            messages.push(result);
        }
        Some("message") | None => messages.extend(chat_message(item)),
        // Reasoning and references to stored items carry nothing the template needs.
        Some(_) => {}
    }
}

/// The step behind an id that a client received, whatever its prefix.
pub(crate) fn step_of(id: &str) -> StepUid {
    StepUid::from(id.rsplit(['-', '_']).next().unwrap_or(id))
}

/// Puts the conversation of `previous_response_id` in front of the new input.
async fn continue_from(app: &App, previous: &str, call: &mut Call) -> Result<(), Failure> {
    let step = app.pool.step(&step_of(previous)).await?.ok_or_else(|| {
        Failure::new(
            Code::NotFound,
            format!("The response '{previous}' is not known; send the conversation in 'input'."),
        )
    })?;
    let mut messages: Vec<Message> = Vec::new();
    for stored in step.messages.into_iter().chain([step.response]) {
        let value = serde_json::to_value(stored).unwrap_or(Value::Null);
        messages.extend(serde_json::from_value::<Message>(value));
    }
    // New instructions replace the old ones.
    if call
        .messages
        .first()
        .is_some_and(|m| m.role == Role::System)
    {
        messages.retain(|m| m.role != Role::System);
        messages.insert(0, call.messages.remove(0));
    }
    messages.append(&mut call.messages);
    call.messages = messages;
    if call.hints.cache_key.is_none() {
        call.hints.user.get_or_insert(step.summary.session);
    }
    Ok(())
}

/// `POST /v1/responses`.
pub(crate) async fn responses(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Json(body): Json,
) -> Response {
    let result = async {
        let mut call = read(&body)?;
        if let Some(previous) = text(body.get("previous_response_id")) {
            continue_from(&app, previous, &mut call).await?;
        }
        let stream = call.stream;
        let mut answers = answer::begin(&app, call, &headers).await?;
        let answer = answers.remove(0);
        let frame = Frame::new(&body, &answer);
        if stream {
            Ok(streamed(answer, frame))
        } else {
            whole(answer, &frame).await
        }
    };
    result
        .await
        .unwrap_or_else(|failure: Failure| error::response(Form::OpenAi, &failure))
}

/// What every form of one response object shares.
struct Frame {
    fields: Map<String, Value>,
    uid: String,
}

impl Frame {
    fn new(body: &Map<String, Value>, answer: &Answer) -> Self {
        let or = |key: &str, default: Value| body.get(key).cloned().unwrap_or(default);
        let fields = json!({
            "id": format!("resp_{}", answer.step),
            "object": "response",
            "created_at": answer.created,
            "status": "in_progress",
            "background": false,
            "error": null,
            "incomplete_details": null,
            "instructions": or("instructions", Value::Null),
            "max_output_tokens": or("max_output_tokens", Value::Null),
            "metadata": or("metadata", json!({})),
            "model": or("model", json!("spotter")),
            "output": [],
            "parallel_tool_calls": or("parallel_tool_calls", json!(true)),
            "previous_response_id": or("previous_response_id", Value::Null),
            "reasoning": or("reasoning", json!({"effort": null, "summary": null})),
            "store": or("store", json!(true)),
            "temperature": or("temperature", json!(1.0)),
            "text": or("text", json!({"format": {"type": "text"}})),
            "tool_choice": or("tool_choice", json!("auto")),
            "tools": or("tools", json!([])),
            "top_p": or("top_p", json!(1.0)),
            "truncation": or("truncation", json!("disabled")),
            "usage": null,
            "user": or("user", Value::Null),
        });
        let fields = match fields {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        Self {
            fields,
            uid: answer.step.to_string(),
        }
    }

    fn begun(&self) -> Value {
        Value::Object(self.fields.clone())
    }

    fn complete(&self, finished: &Finished, output: Vec<Value>) -> Value {
        let mut response = self.begun();
        let cut = finished.completion.finish_reason == FinishReason::Length;
        response["status"] = json!(if cut { "incomplete" } else { "completed" });
        if cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response["output"] = Value::Array(output);
        let (input, generated) = (finished.prompt_tokens, finished.response_tokens());
        response["usage"] = json!({
            "input_tokens": input,
            "input_tokens_details": {"cached_tokens": finished.cached_tokens},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input.saturating_add(generated),
        });
        response
    }

    fn message(&self, status: &str, text: Option<&str>) -> Value {
        let content: Vec<Value> = text.map(text_part).into_iter().collect();
        json!({"id": format!("msg_{}", self.uid), "type": "message", "status": status,
               "role": "assistant", "content": content})
    }

    fn reasoning(&self, text: &str) -> Value {
        let content = if text.is_empty() {
            json!([])
        } else {
            json!([{"type": "reasoning_text", "text": text}])
        };
        json!({"id": format!("rs_{}", self.uid), "type": "reasoning", "summary": [],
               "content": content})
    }

    fn function_call(
        &self,
        at: usize,
        id: &str,
        name: &str,
        arguments: &str,
        status: &str,
    ) -> Value {
        json!({"id": format!("fc_{}{at}", self.uid), "type": "function_call", "status": status,
               "call_id": id, "name": name, "arguments": arguments})
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

async fn whole(answer: Answer, frame: &Frame) -> Result<Response, Failure> {
    let (step, trajectory, finished, _) = answer.finish().await?;
    let completion = &finished.completion;
    let mut output = Vec::new();
    if let Some(reasoning) = completion.reasoning.as_ref().filter(|r| !r.is_empty()) {
        output.push(frame.reasoning(reasoning));
    }
    if !completion.content.is_empty() || completion.tool_calls.is_empty() {
        output.push(frame.message("completed", Some(&completion.content)));
    }
    for (at, call) in completion.tool_calls.iter().enumerate() {
        output.push(frame.function_call(at, &call.id, &call.name, &call.arguments, "completed"));
    }
    let headers = answer::headers(&step, &trajectory, finished.adapter);
    Ok((headers, JsonAnswer(frame.complete(&finished, output))).into_response())
}

/// The output item that is being written.
enum Open {
    Reasoning {
        text: String,
    },
    Message {
        text: String,
    },
    Call {
        at: usize,
        id: String,
        name: String,
        arguments: String,
    },
}

/// Writes events in order, numbered; at most one output item is open.
struct Writer {
    frame: Frame,
    sequence: u64,
    output: Vec<Value>,
    open: Option<Open>,
    calls: usize,
    lines: String,
}

impl Writer {
    fn push(&mut self, kind: &str, mut value: Value) {
        value["type"] = json!(kind);
        value["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        self.lines.push_str(&event(kind, &value));
    }

    fn take(&mut self) -> String {
        std::mem::take(&mut self.lines)
    }

    fn added(&mut self, item: &Value) {
        let index = self.output.len();
        self.push(
            "response.output_item.added",
            json!({"output_index": index, "item": item}),
        );
    }

    fn close(&mut self) {
        let index = self.output.len();
        let uid = self.frame.uid.clone();
        let item = match self.open.take() {
            None => return,
            Some(Open::Reasoning { text }) => {
                self.push(
                    "response.reasoning_text.done",
                    json!({"item_id": format!("rs_{uid}"), "output_index": index,
                           "content_index": 0, "text": text}),
                );
                self.frame.reasoning(&text)
            }
            Some(Open::Message { text }) => {
                let item_id = format!("msg_{uid}");
                self.push(
                    "response.output_text.done",
                    json!({"item_id": item_id, "output_index": index, "content_index": 0,
                           "text": text, "logprobs": []}),
                );
                self.push(
                    "response.content_part.done",
                    json!({"item_id": item_id, "output_index": index, "content_index": 0,
                           "part": text_part(&text)}),
                );
                self.frame.message("completed", Some(&text))
            }
            Some(Open::Call {
                at,
                id,
                name,
                arguments,
            }) => {
                let arguments = compact(&arguments);
                self.push(
                    "response.function_call_arguments.done",
                    json!({"item_id": format!("fc_{uid}{at}"), "output_index": index,
                           "name": name, "arguments": arguments}),
                );
                self.frame
                    .function_call(at, &id, &name, &arguments, "completed")
            }
        };
        self.push(
            "response.output_item.done",
            json!({"output_index": index, "item": item}),
        );
        self.output.push(item);
    }

    fn reasoning(&mut self, delta: &str) {
        if !matches!(self.open, Some(Open::Reasoning { .. })) {
            self.close();
            let item = self.frame.reasoning("");
            self.added(&item);
            self.open = Some(Open::Reasoning {
                text: String::new(),
            });
        }
        if let Some(Open::Reasoning { text }) = self.open.as_mut() {
            text.push_str(delta);
        }
        let (uid, index) = (self.frame.uid.clone(), self.output.len());
        self.push(
            "response.reasoning_text.delta",
            json!({"item_id": format!("rs_{uid}"), "output_index": index, "content_index": 0,
                   "delta": delta}),
        );
    }

    fn text(&mut self, delta: &str) {
        let (item_id, index) = (format!("msg_{}", self.frame.uid), self.output.len());
        if !matches!(self.open, Some(Open::Message { .. })) {
            self.close();
            let index = self.output.len();
            let item = self.frame.message("in_progress", None);
            self.added(&item);
            self.push(
                "response.content_part.added",
                json!({"item_id": item_id, "output_index": index, "content_index": 0,
                       "part": text_part("")}),
            );
            self.open = Some(Open::Message {
                text: String::new(),
            });
        }
        let index = index.max(self.output.len());
        if let Some(Open::Message { text }) = self.open.as_mut() {
            text.push_str(delta);
        }
        if !delta.is_empty() {
            self.push(
                "response.output_text.delta",
                json!({"item_id": item_id, "output_index": index, "content_index": 0,
                       "delta": delta, "logprobs": []}),
            );
        }
    }

    fn call(&mut self, id: Option<&str>, name: Option<&str>, delta: &str) {
        if let Some(name) = name {
            self.close();
            let (at, id) = (self.calls, id.unwrap_or_default().to_owned());
            self.calls += 1;
            let item = self.frame.function_call(at, &id, name, "", "in_progress");
            self.added(&item);
            self.open = Some(Open::Call {
                at,
                id,
                name: name.to_owned(),
                arguments: String::new(),
            });
        }
        let Some(Open::Call { at, arguments, .. }) = self.open.as_mut() else {
            return;
        };
        if delta.is_empty() {
            return;
        }
        arguments.push_str(delta);
        let item_id = format!("fc_{}{at}", self.frame.uid);
        let index = self.output.len();
        self.push(
            "response.function_call_arguments.delta",
            json!({"item_id": item_id, "output_index": index, "delta": delta}),
        );
    }
}

fn streamed(answer: Answer, frame: Frame) -> Response {
    let headers = answer::headers(&answer.step, &answer.trajectory, answer.adapter);
    let mut pieces = answer.pieces;
    let mut writer = Writer {
        frame,
        sequence: 0,
        output: Vec::new(),
        open: None,
        calls: 0,
        lines: String::new(),
    };
    let lines = async_stream::stream! {
        let begun = writer.frame.begun();
        writer.push("response.created", json!({"response": begun}));
        writer.push("response.in_progress", json!({"response": begun}));
        yield writer.take();
        while let Some(piece) = pieces.next().await {
            match piece {
                Piece::Waiting => writer.push("response.in_progress", json!({"response": begun})),
                Piece::Delta { content, reasoning, tool_calls, .. } => {
                    if !reasoning.is_empty() {
                        writer.reasoning(&reasoning);
                    }
                    if !content.is_empty() {
                        writer.text(&content);
                    }
                    for call in &tool_calls {
                        writer.call(call.id.as_deref(), call.name.as_deref(), &call.arguments);
                    }
                }
                Piece::Finished(finished) => {
                    writer.close();
                    if writer.output.is_empty() {
                        // An empty answer is still one message.
                        writer.text("");
                        writer.close();
                    }
                    let output = writer.output.clone();
                    let response = writer.frame.complete(&finished, output);
                    let kind = if finished.completion.finish_reason == FinishReason::Length {
                        "response.incomplete"
                    } else {
                        "response.completed"
                    };
                    writer.push(kind, json!({"response": response}));
                    yield writer.take();
                    return;
                }
                Piece::Failed(failure) => {
                    let mut response = writer.frame.begun();
                    let error = error::body(Form::OpenAi, &failure);
                    response["status"] = json!("failed");
                    response["error"] = json!({"code": failure.code.as_str(),
                                               "message": error["error"]["message"]});
                    writer.push("response.failed", json!({"response": response}));
                    yield writer.take();
                    return;
                }
            }
            let lines = writer.take();
            if !lines.is_empty() {
                yield lines;
            }
        }
    };
    stream(SSE, headers, lines)
}
