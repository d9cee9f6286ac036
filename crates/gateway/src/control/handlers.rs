//! The HTTP side of the control API.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use spotter_core::AdapterVersion;
use spotter_core::code::{Code, Failure};
use spotter_core::glossary;
use spotter_core::id::{SessionUid, StepUid, TrajectoryUid};
use spotter_core::step::StepKind;
use tokio::sync::broadcast::error::RecvError;
use utoipa::OpenApi;

use super::dto::{
    Adapter, AdapterList, ConnectGuide, Doctor, ErrorBody, ExportEstimate, ExportQuery,
    ExportRequest, Exported, Forgotten, Glossary, GlossaryItem, ImportAdapter, ImportModel,
    ImportedData, ImportedModel, KindChange, Metrics, MetricsQuery, ModelList, Outcome, PinRequest,
    PruneResult, RatingChange, Recording, Run, RunList, RunStarted, SessionDetail, SessionPage,
    SessionQuery, SettingList, Status, StepDetail, StepPage, StepQuery, StepSummary, Token,
};
use super::events::{Event, EventBody, coalesce};
use crate::App;
use crate::body::{self, OptionalJson, Query};
use crate::dialect::claw_r1;
use crate::error::{ControlError, invalid};
use crate::feedback_api;

type Answer<T> = Result<Json<T>, ControlError>;

/// How long events are gathered before they are sent: 4 Hz at most.
const GATHER: Duration = Duration::from_millis(250);
/// The longest silence of the event stream.
const ALIVE: Duration = Duration::from_secs(15);
/// Points per metric series unless asked otherwise.
const DEFAULT_POINTS: usize = 400;

fn read<T: DeserializeOwned>(fields: Map<String, Value>) -> Result<T, ControlError> {
    serde_json::from_value(Value::Object(fields))
        .map_err(|error| ControlError(invalid(format!("The body cannot be read: {error}."))))
}

fn found<T>(value: Option<T>, what: &str, id: &str) -> Result<T, ControlError> {
    value.ok_or_else(|| {
        ControlError(Failure::new(
            Code::NotFound,
            format!("There is no {what} '{id}'."),
        ))
    })
}

fn version(text: &str) -> Result<AdapterVersion, ControlError> {
    text.parse()
        .map_err(|error: spotter_core::adapter::ParseVersionError| {
            ControlError(Failure::new(Code::NotFound, error.to_string()))
        })
}

fn done() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// The state of everything.
#[utoipa::path(get, path = "/api/v1/status", responses((status = 200, body = Status)))]
pub(crate) async fn status(State(app): State<Arc<App>>) -> Answer<Status> {
    Ok(Json(app.control.status().await?))
}

/// Recorded answers, newest first.
#[utoipa::path(get, path = "/api/v1/steps", params(StepQuery), responses((status = 200, body = StepPage)))]
pub(crate) async fn steps(
    State(app): State<Arc<App>>,
    Query(query): Query<StepQuery>,
) -> Answer<StepPage> {
    Ok(Json(app.pool.steps(query).await?))
}

/// One recorded answer, complete.
#[utoipa::path(get, path = "/api/v1/steps/{uid}", responses((status = 200, body = StepDetail), (status = 404, body = ErrorBody)))]
pub(crate) async fn step(
    State(app): State<Arc<App>>,
    Path(uid): Path<String>,
) -> Answer<StepDetail> {
    let step = app.pool.step(&StepUid::from(uid.as_str())).await?;
    Ok(Json(found(step, "step", &uid)?))
}

/// Rates an answer.
#[utoipa::path(put, path = "/api/v1/steps/{uid}/rating", request_body = RatingChange, responses((status = 200, body = StepSummary), (status = 404, body = ErrorBody)))]
pub(crate) async fn rate(
    State(app): State<Arc<App>>,
    Path(uid): Path<String>,
    OptionalJson(fields): OptionalJson,
) -> Answer<StepSummary> {
    let change: RatingChange = read(fields)?;
    Ok(Json(
        feedback_api::rate(&app, &StepUid::from(uid), &change).await?,
    ))
}

/// Says whether an answer may be trained.
#[utoipa::path(put, path = "/api/v1/steps/{uid}/kind", request_body = KindChange, responses((status = 200, body = StepSummary), (status = 404, body = ErrorBody)))]
pub(crate) async fn set_kind(
    State(app): State<Arc<App>>,
    Path(uid): Path<String>,
    OptionalJson(fields): OptionalJson,
) -> Answer<StepSummary> {
    let change: KindChange = read(fields)?;
    let kind = match change.kind.as_str() {
        "main" => StepKind::Main,
        "side" => StepKind::Side,
        _ => {
            return Err(ControlError(invalid(
                "'kind' must be \"main\" or \"side\".",
            )));
        }
    };
    let step = app
        .pool
        .set_kind(&StepUid::from(uid.as_str()), kind)
        .await?;
    Ok(Json(found(step, "step", &uid)?))
}

/// Forgets an answer, from everywhere.
#[utoipa::path(delete, path = "/api/v1/steps/{uid}", responses((status = 200, body = Forgotten), (status = 404, body = ErrorBody)))]
pub(crate) async fn forget_step(
    State(app): State<Arc<App>>,
    Path(uid): Path<String>,
) -> Answer<Forgotten> {
    let forgotten = app.pool.forget_step(&StepUid::from(uid.as_str())).await?;
    app.conversations.forget();
    Ok(Json(found(forgotten, "step", &uid)?))
}

/// Conversations, last active first.
#[utoipa::path(get, path = "/api/v1/sessions", params(SessionQuery), responses((status = 200, body = SessionPage)))]
pub(crate) async fn sessions(
    State(app): State<Arc<App>>,
    Query(query): Query<SessionQuery>,
) -> Answer<SessionPage> {
    Ok(Json(app.pool.sessions(query).await?))
}

/// One conversation.
#[utoipa::path(get, path = "/api/v1/sessions/{uid}", responses((status = 200, body = SessionDetail), (status = 404, body = ErrorBody)))]
pub(crate) async fn session(
    State(app): State<Arc<App>>,
    Path(uid): Path<String>,
) -> Answer<SessionDetail> {
    let session = app.pool.session(&SessionUid::from(uid.as_str())).await?;
    Ok(Json(found(session, "conversation", &uid)?))
}

/// Forgets a conversation, from everywhere.
#[utoipa::path(delete, path = "/api/v1/sessions/{uid}", responses((status = 200, body = Forgotten), (status = 404, body = ErrorBody)))]
pub(crate) async fn forget_session(
    State(app): State<Arc<App>>,
    Path(uid): Path<String>,
) -> Answer<Forgotten> {
    let forgotten = app
        .pool
        .forget_session(&SessionUid::from(uid.as_str()))
        .await?;
    app.conversations.forget();
    Ok(Json(found(forgotten, "conversation", &uid)?))
}

/// Forgets everything.
#[utoipa::path(delete, path = "/api/v1/data", responses((status = 200, body = Forgotten)))]
pub(crate) async fn forget_all(State(app): State<Arc<App>>) -> Answer<Forgotten> {
    let forgotten = app.pool.forget_all().await?;
    app.conversations.forget();
    Ok(Json(forgotten))
}

/// Rewards a task attempt.
#[utoipa::path(post, path = "/api/v1/trajectories/{uid}/outcome", request_body = Outcome, responses((status = 200, body = Object), (status = 404, body = ErrorBody)))]
pub(crate) async fn outcome(
    State(app): State<Arc<App>>,
    Path(uid): Path<String>,
    OptionalJson(fields): OptionalJson,
) -> Answer<Value> {
    let value =
        claw_r1::reward(&fields)?.ok_or_else(|| ControlError(invalid("'reward' is missing.")))?;
    let known = app
        .pool
        .outcome(&TrajectoryUid::from(uid.as_str()), claw_r1::outcome(value))
        .await?;
    found(known.then_some(()), "trajectory", &uid)?;
    Ok(done())
}

/// Training runs, newest first.
#[utoipa::path(get, path = "/api/v1/training/runs", responses((status = 200, body = RunList)))]
pub(crate) async fn runs(State(app): State<Arc<App>>) -> Answer<RunList> {
    Ok(Json(RunList {
        items: app.control.runs().await?,
    }))
}

/// Starts a training run.
#[utoipa::path(post, path = "/api/v1/training/runs", responses((status = 202, body = RunStarted), (status = 409, body = ErrorBody), (status = 422, body = ErrorBody)))]
pub(crate) async fn start_run(
    State(app): State<Arc<App>>,
) -> Result<(StatusCode, Json<RunStarted>), ControlError> {
    Ok((StatusCode::ACCEPTED, Json(app.control.start_run().await?)))
}

/// One training run.
#[utoipa::path(get, path = "/api/v1/training/runs/{id}", responses((status = 200, body = Run), (status = 404, body = ErrorBody)))]
pub(crate) async fn run(State(app): State<Arc<App>>, Path(id): Path<String>) -> Answer<Run> {
    Ok(Json(known_run(&app, &id).await?))
}

async fn known_run(app: &App, id: &str) -> Result<Run, ControlError> {
    let run = match id.parse() {
        Ok(number) => app.control.run(number).await?,
        Err(_) => None,
    };
    found(run, "run", id)
}

/// A run's metrics.
#[utoipa::path(get, path = "/api/v1/training/runs/{id}/metrics", params(MetricsQuery), responses((status = 200, body = Metrics), (status = 404, body = ErrorBody)))]
pub(crate) async fn run_metrics(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Query(query): Query<MetricsQuery>,
) -> Answer<Metrics> {
    let run = known_run(&app, &id).await?;
    let points = query.points.unwrap_or(DEFAULT_POINTS).clamp(2, 10_000);
    Ok(Json(Metrics {
        series: app.control.run_metrics(run.id, points).await?,
    }))
}

/// Cancels a run.
#[utoipa::path(post, path = "/api/v1/training/runs/{id}/cancel", responses((status = 200, body = Object), (status = 404, body = ErrorBody)))]
pub(crate) async fn cancel_run(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Answer<Value> {
    let run = known_run(&app, &id).await?;
    app.control.cancel_run(run.id).await?;
    Ok(done())
}

/// Pauses training.
#[utoipa::path(post, path = "/api/v1/training/pause", responses((status = 200, body = Object)))]
pub(crate) async fn pause_training(State(app): State<Arc<App>>) -> Answer<Value> {
    app.control.pause_training().await?;
    Ok(done())
}

/// Resumes training.
#[utoipa::path(post, path = "/api/v1/training/resume", responses((status = 200, body = Object)))]
pub(crate) async fn resume_training(State(app): State<Arc<App>>) -> Answer<Value> {
    app.control.resume_training().await?;
    Ok(done())
}

/// Every training metric in words.
#[utoipa::path(get, path = "/api/v1/training/glossary", responses((status = 200, body = Glossary)))]
pub(crate) async fn glossary() -> Json<Glossary> {
    let items = glossary::GLOSSARY
        .iter()
        .map(|entry| GlossaryItem {
            name: entry.name.to_owned(),
            title: entry.title.to_owned(),
            unit: entry.unit.to_owned(),
            explanation: entry.explanation.to_owned(),
            normal: entry.normal.to_owned(),
        })
        .collect();
    Json(Glossary { items })
}

/// Adapters, newest first.
#[utoipa::path(get, path = "/api/v1/adapters", responses((status = 200, body = AdapterList)))]
pub(crate) async fn adapters(State(app): State<Arc<App>>) -> Answer<AdapterList> {
    Ok(Json(app.control.adapters().await?))
}

/// One adapter.
#[utoipa::path(get, path = "/api/v1/adapters/{version}", responses((status = 200, body = Adapter), (status = 404, body = ErrorBody)))]
pub(crate) async fn adapter(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Answer<Adapter> {
    let adapter = app.control.adapter(version(&name)?).await?;
    Ok(Json(found(adapter, "adapter", &name)?))
}

/// Makes a version live.
#[utoipa::path(post, path = "/api/v1/adapters/{version}/activate", responses((status = 200, body = AdapterList), (status = 404, body = ErrorBody)))]
pub(crate) async fn activate(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Answer<AdapterList> {
    Ok(Json(app.control.activate_adapter(version(&name)?).await?))
}

/// Goes back to the version before.
#[utoipa::path(post, path = "/api/v1/adapters/rollback", responses((status = 200, body = AdapterList), (status = 409, body = ErrorBody)))]
pub(crate) async fn rollback(State(app): State<Arc<App>>) -> Answer<AdapterList> {
    Ok(Json(app.control.rollback_adapter().await?))
}

/// Writes an adapter for other tools.
#[utoipa::path(post, path = "/api/v1/adapters/{version}/export", request_body = ExportRequest, responses((status = 200, body = Exported), (status = 404, body = ErrorBody)))]
pub(crate) async fn export_adapter(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    OptionalJson(fields): OptionalJson,
) -> Answer<Exported> {
    let request: ExportRequest = read(fields)?;
    let exported = app.control.export_adapter(version(&name)?, request).await?;
    Ok(Json(exported))
}

/// How large an export will be.
#[utoipa::path(get, path = "/api/v1/adapters/{version}/export", params(ExportQuery), responses((status = 200, body = ExportEstimate), (status = 404, body = ErrorBody)))]
pub(crate) async fn export_estimate(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Query(query): Query<ExportQuery>,
) -> Answer<ExportEstimate> {
    let version = version(&name)?;
    Ok(Json(
        app.control.export_estimate(version, &query.format).await?,
    ))
}

/// Calls the exports of a version off.
#[utoipa::path(delete, path = "/api/v1/adapters/{version}/export", responses((status = 200, body = Object), (status = 404, body = ErrorBody)))]
pub(crate) async fn cancel_export(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Answer<Value> {
    app.control.cancel_export(version(&name)?).await?;
    Ok(done())
}

/// Takes an adapter made elsewhere.
#[utoipa::path(post, path = "/api/v1/adapters/import", request_body = ImportAdapter, responses((status = 200, body = Adapter), (status = 422, body = ErrorBody)))]
pub(crate) async fn import_adapter(
    State(app): State<Arc<App>>,
    OptionalJson(fields): OptionalJson,
) -> Answer<Adapter> {
    Ok(Json(app.control.import_adapter(read(fields)?).await?))
}

/// Keeps a version from pruning, or lets it be.
#[utoipa::path(put, path = "/api/v1/adapters/{version}/pin", request_body = PinRequest, responses((status = 200, body = Object), (status = 404, body = ErrorBody)))]
pub(crate) async fn pin(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    OptionalJson(fields): OptionalJson,
) -> Answer<Value> {
    let request: PinRequest = read(fields)?;
    app.control
        .pin_adapter(version(&name)?, request.pinned)
        .await?;
    Ok(done())
}

/// Deletes old adapters.
#[utoipa::path(post, path = "/api/v1/adapters/prune", responses((status = 200, body = PruneResult)))]
pub(crate) async fn prune(State(app): State<Arc<App>>) -> Answer<PruneResult> {
    Ok(Json(app.control.prune_adapters().await?))
}

/// Models, and what fits this machine.
#[utoipa::path(get, path = "/api/v1/models", responses((status = 200, body = ModelList)))]
pub(crate) async fn models(State(app): State<Arc<App>>) -> Answer<ModelList> {
    Ok(Json(app.control.models().await?))
}

/// Downloads a model, or goes on with it.
#[utoipa::path(post, path = "/api/v1/models/{name}/pull", responses((status = 202, body = Object), (status = 404, body = ErrorBody)))]
pub(crate) async fn pull_model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<(StatusCode, Json<Value>), ControlError> {
    app.control.pull_model(&name).await?;
    Ok((StatusCode::ACCEPTED, done()))
}

/// Pauses a download.
#[utoipa::path(post, path = "/api/v1/models/{name}/pause", responses((status = 200, body = Object), (status = 404, body = ErrorBody)))]
pub(crate) async fn pause_model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Answer<Value> {
    app.control.pause_model(&name).await?;
    Ok(done())
}

/// Serves a model from now on.
#[utoipa::path(post, path = "/api/v1/models/{name}/activate", responses((status = 200, body = Object), (status = 404, body = ErrorBody)))]
pub(crate) async fn activate_model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Answer<Value> {
    app.control.activate_model(&name).await?;
    Ok(done())
}

/// Adds model files of this machine.
#[utoipa::path(post, path = "/api/v1/models/import", request_body = ImportModel, responses((status = 200, body = ImportedModel), (status = 422, body = ErrorBody)))]
pub(crate) async fn import_model(
    State(app): State<Arc<App>>,
    OptionalJson(fields): OptionalJson,
) -> Answer<ImportedModel> {
    let request: ImportModel = read(fields)?;
    let name = app.control.import_model(&request.path).await?;
    Ok(Json(ImportedModel { name }))
}

/// Removes a model's files.
#[utoipa::path(delete, path = "/api/v1/models/{name}", responses((status = 200, body = Object), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(crate) async fn remove_model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Answer<Value> {
    app.control.remove_model(&name).await?;
    Ok(done())
}

/// Settings.
#[utoipa::path(get, path = "/api/v1/settings", responses((status = 200, body = SettingList)))]
pub(crate) async fn settings(State(app): State<Arc<App>>) -> Answer<SettingList> {
    Ok(Json(SettingList {
        items: app.control.settings().await?,
    }))
}

/// Changes settings: an object of keys and values; all or none.
#[utoipa::path(patch, path = "/api/v1/settings", request_body = Object, responses((status = 200, body = SettingList), (status = 400, body = ErrorBody)))]
pub(crate) async fn change_settings(
    State(app): State<Arc<App>>,
    OptionalJson(changes): OptionalJson,
) -> Answer<SettingList> {
    Ok(Json(SettingList {
        items: app.control.change_settings(changes).await?,
    }))
}

/// Checks of the installation.
#[utoipa::path(get, path = "/api/v1/doctor", responses((status = 200, body = Doctor)))]
pub(crate) async fn doctor(State(app): State<Arc<App>>) -> Answer<Doctor> {
    Ok(Json(Doctor {
        checks: app.control.doctor().await?,
    }))
}

/// The bearer token.
#[utoipa::path(get, path = "/api/v1/token", responses((status = 200, body = Token)))]
pub(crate) async fn token(State(app): State<Arc<App>>) -> Answer<Token> {
    Ok(Json(Token {
        token: app.control.token().await?,
    }))
}

/// Pauses or resumes recording.
#[utoipa::path(post, path = "/api/v1/recording", request_body = Recording, responses((status = 200, body = Recording)))]
pub(crate) async fn recording(
    State(app): State<Arc<App>>,
    OptionalJson(fields): OptionalJson,
) -> Answer<Recording> {
    let request: Recording = read(fields)?;
    app.control.set_recording(request.paused).await?;
    Ok(Json(request))
}

/// How to connect a client.
#[utoipa::path(get, path = "/api/v1/connect/{client}", responses((status = 200, body = ConnectGuide), (status = 404, body = ErrorBody)))]
pub(crate) async fn connect(
    State(app): State<Arc<App>>,
    Path(client): Path<String>,
) -> Answer<ConnectGuide> {
    let guide = app.control.connect_guide(&client).await?;
    Ok(Json(found(guide, "client", &client)?))
}

/// Size of the data.
#[utoipa::path(get, path = "/api/v1/data/stats", responses((status = 200, body = Object)))]
pub(crate) async fn data_stats(State(app): State<Arc<App>>) -> Answer<Value> {
    Ok(Json(app.pool.data_stats().await?))
}

/// All data as JSON lines.
#[utoipa::path(get, path = "/api/v1/data/export", responses((status = 200, body = String, content_type = "application/x-ndjson")))]
pub(crate) async fn export_data(State(app): State<Arc<App>>) -> Result<Response, ControlError> {
    let lines = app.pool.export().await?.map(|line| {
        let mut line = line.map_err(std::io::Error::other)?;
        line.push('\n');
        Ok::<_, std::io::Error>(Bytes::from(line))
    });
    let mut response = Body::from_stream(lines).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(body::NDJSON));
    headers.insert(
        header::CONTENT_DISPOSITION,
        HeaderValue::from_static("attachment; filename=\"spotter.jsonl\""),
    );
    Ok(response)
}

/// Takes exported JSON lines.
#[utoipa::path(post, path = "/api/v1/data/import", request_body(content = String, content_type = "application/x-ndjson"), responses((status = 200, body = ImportedData)))]
pub(crate) async fn import_data(State(app): State<Arc<App>>, lines: Bytes) -> Answer<ImportedData> {
    let lines = String::from_utf8(lines.to_vec())
        .map_err(|_| ControlError(invalid("The body is not UTF-8.")))?;
    let imported = app.pool.import(lines).await?;
    app.conversations.forget();
    Ok(Json(imported))
}

fn sse(events: Vec<Event>) -> String {
    coalesce(events)
        .into_iter()
        .filter_map(|event| {
            let data = serde_json::to_string(&event.body).ok()?;
            Some(format!("id: {}\ndata: {data}\n\n", event.id))
        })
        .collect()
}

/// What happens, as server-sent events; `Last-Event-ID` resumes.
#[utoipa::path(get, path = "/api/v1/events", responses((status = 200, body = EventBody, content_type = "text/event-stream")))]
pub(crate) async fn events(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let last = headers
        .get("last-event-id")
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.parse().ok());
    let (missed, mut follower) = app.events.follow(last);
    let hub = app.events.clone();
    let closing = app.closing.clone();
    let lines = async_stream::stream! {
        // Something at once, so that clients see the stream is open.
        yield ": connected\n\n".to_owned();
        let mut seen = missed.last().map_or(last, |event| Some(event.id));
        if !missed.is_empty() {
            yield sse(missed);
        }
        let mut gathered = Vec::new();
        loop {
            let waiting = async {
                if gathered.is_empty() {
                    tokio::time::timeout(ALIVE, follower.recv()).await
                } else {
                    Ok(follower.recv().await)
                }
            };
            let next = tokio::select! {
                next = waiting => next,
                () = closing.cancelled() => return,
            };
            let Ok(next) = next else {
                yield ": alive\n\n".to_owned();
                continue;
            };
            match next {
                Ok(event) => gathered.push(event),
                Err(RecvError::Lagged(_)) => {
                    // The hub still keeps what the channel dropped.
                    let (missed, again) = hub.follow(seen.or(Some(0)));
                    gathered = missed;
                    follower = again;
                }
                Err(RecvError::Closed) => return,
            }
            tokio::time::sleep(GATHER).await;
            while let Ok(event) = follower.try_recv() {
                gathered.push(event);
            }
            seen = gathered.last().map_or(seen, |event| Some(event.id));
            yield sse(std::mem::take(&mut gathered));
        }
    };
    let body = Body::from_stream(lines.map(|line| Ok::<_, Infallible>(Bytes::from(line))));
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(body::SSE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// This API's description.
pub(crate) async fn openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(super::openapi())
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Spotter control API",
        description = "What the interface and the `spotter` command use. Every request carries the bearer token.",
    ),
    paths(
        status,
        steps,
        step,
        rate,
        set_kind,
        forget_step,
        sessions,
        session,
        forget_session,
        forget_all,
        outcome,
        runs,
        start_run,
        run,
        run_metrics,
        cancel_run,
        pause_training,
        resume_training,
        glossary,
        adapters,
        adapter,
        activate,
        rollback,
        export_adapter,
        export_estimate,
        cancel_export,
        import_adapter,
        pin,
        prune,
        models,
        pull_model,
        pause_model,
        activate_model,
        import_model,
        remove_model,
        settings,
        change_settings,
        doctor,
        token,
        recording,
        connect,
        data_stats,
        export_data,
        import_data,
        events,
    )
)]
pub(super) struct Description;
