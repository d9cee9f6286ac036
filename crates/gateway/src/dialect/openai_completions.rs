//! `POST /v1/completions` (OpenAI text completion).

use std::sync::Arc;

use axum::Json as JsonAnswer;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde_json::{Map, Value, json};
use spotter_core::chat::{Message, Role};
use spotter_core::code::Failure;
use spotter_core::generate::Prompt;

use crate::App;
use crate::answer::{self, Answer, Piece, finish_name};
use crate::body::{Json, SSE, data, stream};
use crate::call::{self, Ask, Call, text};
use crate::dialect::openai_chat::interleave;
use crate::error::{self, Form, invalid};

/// Reads a prompt: text, token ids, or a list with one of them.
pub(crate) fn prompt(value: Option<&Value>) -> Result<Prompt, Failure> {
    let wrong =
        || invalid("'prompt' must be a text or a list of token ids; one prompt per request.");
    match value {
        Some(Value::String(text)) => Ok(Prompt::Text(text.clone())),
        Some(Value::Array(list)) if list.iter().all(Value::is_u64) && !list.is_empty() => list
            .iter()
            .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
            .collect::<Option<Vec<u32>>>()
            .map(Prompt::Tokens)
            .ok_or_else(wrong),
        Some(Value::Array(list)) if list.len() == 1 => prompt(list.first()),
        _ => Err(wrong()),
    }
}

fn read(body: &Map<String, Value>) -> Result<Call, Failure> {
    let mut call = Call::new(body, &["prompt"]);
    let prompt = prompt(body.get("prompt"))?;
    let words = match &prompt {
        Prompt::Text(text) => text.clone(),
        _ => String::new(),
    };
    call.messages = vec![Message::text(Role::User, words)];
    call.ask = Ask::Raw(prompt);
    call.sampling = call::sampling(body, &["max_tokens", "max_completion_tokens"])?;
    if call.sampling.max_tokens.is_none() {
        // OpenAI's default for this endpoint.
        call.sampling.max_tokens = Some(16);
    }
    call.n = call::choices(body)?;
    call.top_logprobs = body
        .get("logprobs")
        .and_then(Value::as_u64)
        .map(|top| u8::try_from(top.min(20)).unwrap_or(20));
    call.hints.user = text(body.get("user")).map(str::to_owned);
    call.include_usage = body
        .get("stream_options")
        .and_then(|o| o.get("include_usage"))
        .and_then(Value::as_bool)
        .unwrap_or(false);
    Ok(call)
}

/// `POST /v1/completions`.
pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Json(body): Json,
) -> Response {
    let result = async {
        let call = read(&body)?;
        let (model, stream, usage) = (call.model.clone(), call.stream, call.include_usage);
        let answers = answer::begin(&app, call, &headers).await?;
        if stream {
            Ok(streamed(answers, model, usage))
        } else {
            whole(answers, &model).await
        }
    };
    result
        .await
        .unwrap_or_else(|failure: Failure| error::response(Form::OpenAi, &failure))
}

async fn whole(answers: Vec<Answer>, model: &str) -> Result<Response, Failure> {
    let created = answers.first().map_or(0, |a| a.created);
    let finished = futures::future::try_join_all(answers.into_iter().map(Answer::finish)).await?;
    let mut generated = 0;
    let choices: Vec<Value> = finished
        .iter()
        .enumerate()
        .map(|(index, (_, _, answer, tokens))| {
            generated += answer.response_tokens();
            let logprobs = if tokens.is_empty() {
                Value::Null
            } else {
                json!({
                    "tokens": tokens.iter().map(|t| &t.text).collect::<Vec<_>>(),
                    "token_logprobs": tokens.iter().map(|t| t.logprob).collect::<Vec<_>>(),
                    "top_logprobs": tokens.iter().map(|t| t.top.iter()
                        .map(|(_, text, logprob)| (text.clone(), json!(logprob)))
                        .collect::<Map<_, _>>()).collect::<Vec<_>>(),
                    "text_offset": [],
                })
            };
            json!({"index": index, "text": answer.completion.content, "logprobs": logprobs,
                   "finish_reason": finish_name(answer.completion.finish_reason)})
        })
        .collect();
    let Some((step, trajectory, first, _)) = finished.first() else {
        return Err(invalid("no choice was asked for."));
    };
    let body = json!({
        "id": format!("cmpl-{step}"),
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": first.prompt_tokens, "completion_tokens": generated,
                  "total_tokens": first.prompt_tokens + generated,
                  "prompt_tokens_details": {"cached_tokens": first.cached_tokens}},
    });
    let headers = answer::headers(step, trajectory, first.adapter);
    Ok((headers, JsonAnswer(body)).into_response())
}

fn streamed(answers: Vec<Answer>, model: String, include_usage: bool) -> Response {
    let Some(first) = answers.first() else {
        return error::response(Form::OpenAi, &invalid("no choice was asked for."));
    };
    let headers = answer::headers(&first.step, &first.trajectory, first.adapter);
    let (id, created) = (format!("cmpl-{}", first.step), first.created);
    let mut left = answers.len();
    let chunk = move |choices: Value| {
        json!({"id": id, "object": "text_completion", "created": created, "model": model,
               "choices": choices})
    };
    let lines = async_stream::stream! {
        let (mut prompt, mut generated) = (0, 0);
        let mut pieces = std::pin::pin!(interleave(answers));
        while let Some((index, piece)) = pieces.next().await {
            match piece {
                Piece::Waiting => {
                    yield data(&chunk(json!([{"index": index, "text": "", "logprobs": null, "finish_reason": null}])));
                }
                Piece::Delta { content, .. } => {
                    if !content.is_empty() {
                        yield data(&chunk(json!([{"index": index, "text": content, "logprobs": null, "finish_reason": null}])));
                    }
                }
                Piece::Finished(finished) => {
                    prompt = finished.prompt_tokens;
                    generated += finished.response_tokens();
                    let reason = finish_name(finished.completion.finish_reason);
                    yield data(&chunk(json!([{"index": index, "text": "", "logprobs": null, "finish_reason": reason}])));
                    left -= 1;
                    if left == 0 {
                        break;
                    }
                }
                Piece::Failed(failure) => {
                    yield data(&error::body(Form::OpenAi, &failure));
                    return;
                }
            }
        }
        if include_usage {
            let mut last = chunk(json!([]));
            last["usage"] = json!({"prompt_tokens": prompt, "completion_tokens": generated,
                                   "total_tokens": prompt + generated});
            yield data(&last);
        }
        yield "data: [DONE]\n\n".to_owned();
    };
    stream(SSE, headers, lines)
}
