//! The Claw-R1 handshake: task attempts that a black-box agent announces, works
//! on through ordinary chat calls, and completes with or without a reward.
//!
//! Departures from Claw-R1, on purpose: prompt group `1`, which its
//! `init_trajectory` gives to every attempt, is not a group here (unrelated chats
//! would share a baseline); over-long prompts are refused instead of cut; and
//! `compute_reward` is refused, because there is no reward model.

use std::sync::Arc;

use axum::Json as JsonAnswer;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use spotter_core::chat::{Message, Role};
use spotter_core::code::{Code, Failure};
use spotter_core::generate::{FinishReason, Prompt, Sampling};
use spotter_core::id::{SessionUid, StepUid, TrajectoryUid};
use spotter_core::reward::{Reward, RewardSource};
use spotter_core::step::{Channel, Step, StepKind};

use crate::App;
use crate::answer::{self, now_ms};
use crate::body::{Json, OptionalJson};
use crate::call::{self, Ask, Call, text};
use crate::dialect::{openai_chat, openai_completions};
use crate::error::{self, Form, invalid};
use crate::pool::OpenTrajectory;
use crate::session::PathTrajectory;

fn fail(failure: &Failure) -> Response {
    error::response(Form::OpenAi, failure)
}

fn ok() -> Response {
    JsonAnswer(json!({"status": "ok"})).into_response()
}

/// The prompt group of an attempt; `1` is Claw-R1's placeholder for none.
fn group(trajectory: &str, prompt: &str) -> String {
    if prompt == "1" {
        trajectory.to_owned()
    } else {
        prompt.to_owned()
    }
}

fn channel(body: &Map<String, Value>) -> Channel {
    match text(body.get("channel")) {
        Some("val") => Channel::Val,
        _ => Channel::Train,
    }
}

/// `POST /init_trajectory`.
pub(crate) async fn init(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let uid = TrajectoryUid::new();
    let opened = app
        .pool
        .open_trajectory(OpenTrajectory {
            uid: uid.clone(),
            prompt_uid: uid.to_string(),
            channel: Channel::Train,
            metadata: Value::Null,
        })
        .await;
    if let Err(failure) = opened {
        return fail(&failure);
    }
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok())
        .map_or_else(|| app.guard.address.to_string(), str::to_owned);
    JsonAnswer(json!({
        "trajectory_uid": uid.as_str(),
        "base_url": format!("http://{host}/{uid}/1/v1"),
    }))
    .into_response()
}

/// `POST /{trajectory}/{prompt}/v1/register_trajectory`.
pub(crate) async fn register(
    State(app): State<Arc<App>>,
    Path((trajectory, prompt)): Path<(String, String)>,
    OptionalJson(body): OptionalJson,
) -> Response {
    let opened = app
        .pool
        .open_trajectory(OpenTrajectory {
            prompt_uid: group(&trajectory, &prompt),
            uid: TrajectoryUid::from(trajectory),
            channel: channel(&body),
            metadata: body.get("metadata").cloned().unwrap_or(Value::Null),
        })
        .await;
    match opened {
        Ok(()) => ok(),
        Err(failure) => fail(&failure),
    }
}

/// `POST /{trajectory}/{prompt}/v1/chat/completions`.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Path((trajectory, prompt)): Path<(String, String)>,
    headers: HeaderMap,
    Json(body): Json,
) -> Response {
    let path = PathTrajectory {
        prompt: group(&trajectory, &prompt),
        trajectory,
    };
    openai_chat::respond(&app, &headers, &body, Some(path)).await
}

/// A reward in [-1, 1], or none.
pub(crate) fn reward(body: &Map<String, Value>) -> Result<Option<f64>, Failure> {
    match body.get("reward") {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64() {
            Some(reward) if (-1.0..=1.0).contains(&reward) => Ok(Some(reward)),
            _ => Err(invalid("'reward' must be a number between -1 and 1.")),
        },
    }
}

/// An outcome as a reward row.
pub(crate) fn outcome(value: f64) -> Reward {
    Reward {
        value: Some(value),
        source: RewardSource::Outcome,
        reasons: Vec::new(),
        note: None,
        correction: None,
        created_at: now_ms(),
    }
}

async fn complete(
    app: &App,
    trajectory: &str,
    body: &Map<String, Value>,
) -> Result<Response, Failure> {
    let uid = TrajectoryUid::from(trajectory);
    let unknown = || {
        Failure::new(
            Code::NotFound,
            format!("The trajectory '{trajectory}' is not known."),
        )
    };
    if let Some(value) = reward(body)?
        && !app.pool.outcome(&uid, outcome(value)).await?
    {
        return Err(unknown());
    }
    if !app.pool.complete_trajectory(&uid).await? {
        return Err(unknown());
    }
    Ok(ok())
}

/// `POST /{trajectory}/{prompt}/v1/complete_trajectory`.
pub(crate) async fn complete_in_path(
    State(app): State<Arc<App>>,
    Path((trajectory, _prompt)): Path<(String, String)>,
    OptionalJson(body): OptionalJson,
) -> Response {
    complete(&app, &trajectory, &body)
        .await
        .unwrap_or_else(|failure| fail(&failure))
}

/// `POST /complete_trajectory/{trajectory}`.
pub(crate) async fn complete_by_uid(
    State(app): State<Arc<App>>,
    Path(trajectory): Path<String>,
    OptionalJson(body): OptionalJson,
) -> Response {
    complete(&app, &trajectory, &body)
        .await
        .unwrap_or_else(|failure| fail(&failure))
}

/// One step made elsewhere.
#[derive(Deserialize)]
struct Submitted {
    #[serde(default)]
    prompt_ids: Vec<u32>,
    #[serde(default)]
    response_ids: Vec<u32>,
    reward: Option<f64>,
    rollout_log_probs: Option<Vec<f32>>,
    trajectory_uid: String,
    prompt_uid: Option<String>,
    #[serde(default)]
    step_index: u32,
    policy_version: Option<u32>,
    #[serde(default)]
    is_last: bool,
    #[serde(default)]
    metadata: Value,
}

/// The channel of submitted steps.
#[derive(Deserialize)]
pub(crate) struct ChannelQuery {
    channel: Option<String>,
}

async fn submit(app: &App, body: &Map<String, Value>, channel: Channel) -> Result<usize, Failure> {
    let steps = body.get("steps").cloned().unwrap_or(Value::Null);
    let steps: Vec<Submitted> = serde_json::from_value(steps)
        .map_err(|error| invalid(format!("'steps' cannot be read: {error}.")))?;
    let accepted = steps.len();
    for step in steps {
        if step.reward.is_some_and(|r| !(-1.0..=1.0).contains(&r)) {
            return Err(invalid("'reward' must be a number between -1 and 1."));
        }
        let trajectory = TrajectoryUid::from(step.trajectory_uid.clone());
        let prompt_uid = group(
            &step.trajectory_uid,
            step.prompt_uid.as_deref().unwrap_or("1"),
        );
        if step.step_index == 0 {
            app.pool
                .open_trajectory(OpenTrajectory {
                    uid: trajectory.clone(),
                    prompt_uid: prompt_uid.clone(),
                    channel,
                    metadata: step.metadata.clone(),
                })
                .await?;
        }
        let uid = StepUid::new();
        let logprobs = step
            .rollout_log_probs
            .filter(|l| l.len() == step.response_ids.len())
            .unwrap_or_default();
        app.pool
            .append(Step {
                uid: uid.clone(),
                session: SessionUid::from(step.trajectory_uid.clone()),
                trajectory: trajectory.clone(),
                prompt_uid,
                turn: step.trajectory_uid,
                index: step.step_index,
                kind: StepKind::Main,
                kind_reason: "submitted by a client".to_owned(),
                adapter: spotter_core::AdapterVersion(step.policy_version.unwrap_or(0)),
                base_model: app.engine.facts().map(|f| f.name).unwrap_or_default(),
                prompt_ids: step.prompt_ids,
                response_ids: step.response_ids,
                logprobs,
                model_logprobs: Vec::new(),
                sampling: Sampling::default(),
                finish_reason: FinishReason::Stop,
                cached_tokens: 0,
                first_token_ms: 0,
                total_ms: 0,
                client: "claw-r1".to_owned(),
                user_text: String::new(),
                answer_text: String::new(),
                request: json!({"messages": [], "tools": [], "metadata": step.metadata}),
                response: json!({"role": "assistant", "content": ""}),
                created_at: now_ms(),
            })
            .await?;
        if let Some(value) = step.reward {
            app.pool.rate(&uid, outcome(value)).await?;
        }
        if step.is_last {
            app.pool.complete_trajectory(&trajectory).await?;
        }
    }
    Ok(accepted)
}

/// `POST /submit_steps?channel=train`.
pub(crate) async fn submit_steps(
    State(app): State<Arc<App>>,
    Query(query): Query<ChannelQuery>,
    Json(body): Json,
) -> Response {
    let channel = match query.channel.as_deref() {
        Some("val") => Channel::Val,
        _ => Channel::Train,
    };
    match submit(&app, &body, channel).await {
        Ok(accepted) => JsonAnswer(json!({"accepted": accepted})).into_response(),
        Err(failure) => fail(&failure),
    }
}

/// `POST /generate`: token ids in, token ids out.
pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Json(body): Json,
) -> Response {
    let result = async {
        let parameters = body
            .get("sampling_params")
            .and_then(Value::as_object)
            .cloned()
            .unwrap_or_default();
        let mut call = Call::new(&parameters, &[]);
        call.stream = false;
        let prompt = openai_completions::prompt(body.get("prompt_ids"))
            .map_err(|_| invalid("'prompt_ids' must be a list of token ids."))?;
        if !matches!(prompt, Prompt::Tokens(_)) {
            return Err(invalid("'prompt_ids' must be a list of token ids."));
        }
        call.ask = Ask::Raw(prompt);
        call.messages = vec![Message::text(Role::User, "")];
        call.sampling = call::sampling(&parameters, &["max_tokens"])?;
        let wants_logprobs = !matches!(
            parameters.get("logprobs"),
            None | Some(Value::Null | Value::Bool(false))
        );
        let mut answers = answer::begin(&app, call, &headers).await?;
        let (step, trajectory, finished, _) = answers.remove(0).finish().await?;
        let completion = &finished.completion;
        let stop = match completion.finish_reason {
            FinishReason::Length => "length",
            FinishReason::Stop | FinishReason::ToolCalls => "stop",
        };
        let mut answer = json!({"token_ids": completion.response_ids, "stop_reason": stop});
        if wants_logprobs {
            answer["log_probs"] = json!(completion.logprobs);
        }
        let headers = answer::headers(&step, &trajectory, finished.adapter);
        Ok((headers, JsonAnswer(answer)).into_response())
    };
    result
        .await
        .unwrap_or_else(|failure: Failure| fail(&failure))
}

/// `POST /compute_reward`: refused in words, there is no reward model.
pub(crate) async fn compute_reward() -> Response {
    let mut response = fail(&invalid(
        "Spotter has no reward model; send the reward with complete_trajectory or submit_steps.",
    ));
    *response.status_mut() = StatusCode::NOT_IMPLEMENTED;
    response
}

/// `GET /ready`.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Response {
    if app.engine.ready() {
        JsonAnswer(json!({"status": "ready"})).into_response()
    } else {
        fail(&Failure::new(Code::Unavailable, "No model is ready yet."))
    }
}
