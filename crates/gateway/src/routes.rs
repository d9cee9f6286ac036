//! The one table of routes. It feeds the router, the page of endpoints and the
//! start banner, so none of them can drift from the others.

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, head, patch, post, put};
use spotter_core::Code;
use spotter_core::code::Failure;
use tower::ServiceExt;
use tower_http::services::{ServeDir, ServeFile};

use crate::control::handlers as control;
use crate::dialect::{
    anthropic, claw_r1, embeddings, models, ollama, openai_chat, openai_completions, responses,
};
use crate::error::{self, Form};
use crate::{App, feedback_api, guard, metrics};

/// Which group of clients a route is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surface {
    /// OpenAI clients.
    OpenAi,
    /// Anthropic clients.
    Anthropic,
    /// Ollama clients.
    Ollama,
    /// Claw-R1 agents.
    ClawR1,
    /// Ratings.
    Feedback,
    /// Spotter's own interface and command.
    Control,
    /// Health and metrics.
    Operations,
}

impl Surface {
    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenAi => "OpenAI",
            Self::Anthropic => "Anthropic",
            Self::Ollama => "Ollama",
            Self::ClawR1 => "Claw-R1",
            Self::Feedback => "Feedback",
            Self::Control => "Control",
            Self::Operations => "Operations",
        }
    }
}

type Handler = fn() -> MethodRouter<Arc<App>>;

/// One route.
pub struct Route {
    /// The HTTP method.
    pub method: &'static str,
    /// The path, with parameters in braces.
    pub path: &'static str,
    /// Whose it is.
    pub surface: Surface,
    /// What it does, in a few words.
    pub summary: &'static str,
    handler: Handler,
}

const fn route(
    method: &'static str,
    path: &'static str,
    surface: Surface,
    summary: &'static str,
    handler: Handler,
) -> Route {
    Route {
        method,
        path,
        surface,
        summary,
        handler,
    }
}

use Surface::{Anthropic, ClawR1, Control, Feedback, Ollama, OpenAi, Operations};

/// Every route.
#[rustfmt::skip]
pub const ROUTES: &[Route] = &[
    route("POST", "/v1/chat/completions", OpenAi, "Chat, streamed or whole", || post(openai_chat::chat)),
    route("POST", "/v1/responses", OpenAi, "Responses, streamed or whole", || post(responses::responses)),
    route("POST", "/v1/completions", OpenAi, "Text completion", || post(openai_completions::completions)),
    route("POST", "/v1/embeddings", OpenAi, "Refused in words: there are no embeddings", || post(embeddings::embeddings)),
    route("GET", "/v1/models", OpenAi, "Model names that requests may use", || get(models::list)),
    route("GET", "/v1/models/{*name}", OpenAi, "One model name", || get(models::one)),

    route("POST", "/v1/messages", Anthropic, "Messages, streamed or whole", || post(anthropic::messages)),
    route("POST", "/v1/messages/count_tokens", Anthropic, "Tokens of a prompt", || post(anthropic::count_tokens)),
    route("HEAD", "/api/hello", Anthropic, "Reachability check of Claude Code", || head(anthropic::hello).get(anthropic::hello)),

    route("POST", "/api/chat", Ollama, "Chat, streamed by default", || post(ollama::chat)),
    route("GET", "/api/tags", Ollama, "Model names", || get(ollama::tags)),
    route("POST", "/api/show", Ollama, "The model's facts", || post(ollama::show)),

    route("POST", "/init_trajectory", ClawR1, "Announce a task attempt and get its address", || post(claw_r1::init)),
    route("POST", "/{trajectory}/{prompt}/v1/register_trajectory", ClawR1, "Name its channel and prompt group", || post(claw_r1::register)),
    route("POST", "/{trajectory}/{prompt}/v1/chat/completions", ClawR1, "Chat inside the attempt", || post(claw_r1::chat)),
    route("POST", "/{trajectory}/{prompt}/v1/complete_trajectory", ClawR1, "End the attempt, with or without a reward", || post(claw_r1::complete_in_path)),
    route("POST", "/complete_trajectory/{trajectory}", ClawR1, "End the attempt, by its id", || post(claw_r1::complete_by_uid)),
    route("POST", "/submit_steps", ClawR1, "Hand in steps made elsewhere", || post(claw_r1::submit_steps)),
    route("POST", "/generate", ClawR1, "Token ids in, token ids out", || post(claw_r1::generate)),
    route("POST", "/compute_reward", ClawR1, "Refused in words: there is no reward model", || post(claw_r1::compute_reward)),
    route("GET", "/ready", ClawR1, "Whether a request would be answered", || get(claw_r1::ready)),

    route("POST", "/v1/feedback", Feedback, "Rate an answer by completion id, trace id or session", || post(feedback_api::feedback)),

    route("GET", "/api/v1/status", Control, "The state of everything", || get(control::status)),
    route("GET", "/api/v1/events", Control, "What happens, as server-sent events", || get(control::events)),
    route("GET", "/api/v1/openapi.json", Control, "This API's description", || get(control::openapi)),
    route("GET", "/api/v1/steps", Control, "Recorded answers, newest first", || get(control::steps)),
    route("GET", "/api/v1/steps/{uid}", Control, "One recorded answer, complete", || get(control::step)),
    route("DELETE", "/api/v1/steps/{uid}", Control, "Forget an answer", || delete(control::forget_step)),
    route("PUT", "/api/v1/steps/{uid}/rating", Control, "Rate an answer", || put(control::rate)),
    route("PUT", "/api/v1/steps/{uid}/kind", Control, "Say whether an answer may be trained", || put(control::set_kind)),
    route("GET", "/api/v1/sessions", Control, "Conversations, last active first", || get(control::sessions)),
    route("GET", "/api/v1/sessions/{uid}", Control, "One conversation", || get(control::session)),
    route("DELETE", "/api/v1/sessions/{uid}", Control, "Forget a conversation", || delete(control::forget_session)),
    route("POST", "/api/v1/trajectories/{uid}/outcome", Control, "Reward a task attempt", || post(control::outcome)),
    route("GET", "/api/v1/training/runs", Control, "Training runs, newest first", || get(control::runs)),
    route("POST", "/api/v1/training/runs", Control, "Start a training run", || post(control::start_run)),
    route("GET", "/api/v1/training/runs/{id}", Control, "One training run", || get(control::run)),
    route("GET", "/api/v1/training/runs/{id}/metrics", Control, "A run's metrics", || get(control::run_metrics)),
    route("POST", "/api/v1/training/runs/{id}/cancel", Control, "Cancel a run", || post(control::cancel_run)),
    route("POST", "/api/v1/training/pause", Control, "Pause training", || post(control::pause_training)),
    route("POST", "/api/v1/training/resume", Control, "Resume training", || post(control::resume_training)),
    route("GET", "/api/v1/training/glossary", Control, "Every training metric in words", || get(control::glossary)),
    route("GET", "/api/v1/adapters", Control, "Adapters, newest first", || get(control::adapters)),
    route("POST", "/api/v1/adapters/rollback", Control, "Go back to the version before", || post(control::rollback)),
    route("POST", "/api/v1/adapters/import", Control, "Take an adapter made elsewhere", || post(control::import_adapter)),
    route("POST", "/api/v1/adapters/prune", Control, "Delete old adapters", || post(control::prune)),
    route("GET", "/api/v1/adapters/{version}", Control, "One adapter", || get(control::adapter)),
    route("POST", "/api/v1/adapters/{version}/activate", Control, "Make a version live", || post(control::activate)),
    route("GET", "/api/v1/adapters/{version}/export", Control, "How large an export will be", || get(control::export_estimate)),
    route("POST", "/api/v1/adapters/{version}/export", Control, "Write an adapter for other tools", || post(control::export_adapter)),
    route("DELETE", "/api/v1/adapters/{version}/export", Control, "Call an export off", || delete(control::cancel_export)),
    route("PUT", "/api/v1/adapters/{version}/pin", Control, "Keep a version from pruning", || put(control::pin)),
    route("GET", "/api/v1/models", Control, "Models and what fits this machine", || get(control::models)),
    route("POST", "/api/v1/models/import", Control, "Add model files of this machine", || post(control::import_model)),
    route("POST", "/api/v1/models/{name}/pull", Control, "Download a model", || post(control::pull_model)),
    route("POST", "/api/v1/models/{name}/pause", Control, "Pause a download", || post(control::pause_model)),
    route("POST", "/api/v1/models/{name}/activate", Control, "Serve a model", || post(control::activate_model)),
    route("DELETE", "/api/v1/models/{name}", Control, "Remove a model", || delete(control::remove_model)),
    route("GET", "/api/v1/settings", Control, "Settings", || get(control::settings)),
    route("PATCH", "/api/v1/settings", Control, "Change settings", || patch(control::change_settings)),
    route("GET", "/api/v1/doctor", Control, "Checks of the installation", || get(control::doctor)),
    route("GET", "/api/v1/token", Control, "The bearer token", || get(control::token)),
    route("POST", "/api/v1/recording", Control, "Pause or resume recording", || post(control::recording)),
    route("GET", "/api/v1/connect/{client}", Control, "How to connect a client", || get(control::connect)),
    route("GET", "/api/v1/data/stats", Control, "Size of the data", || get(control::data_stats)),
    route("GET", "/api/v1/data/export", Control, "All data as JSON lines", || get(control::export_data)),
    route("POST", "/api/v1/data/import", Control, "Take exported JSON lines", || post(control::import_data)),
    route("DELETE", "/api/v1/data", Control, "Forget everything", || delete(control::forget_all)),
    route("GET", "/api/v1/endpoints", Control, "This table as a page", || get(endpoints)),

    route("GET", "/healthz", Operations, "Whether the gateway lives", || get(healthz)),
    route("GET", "/readyz", Operations, "Whether a completion would be served", || get(readyz)),
    route("GET", "/metrics", Operations, "Prometheus metrics", || get(prometheus)),
];

/// The router over [`ROUTES`], with the guard in front and the interface behind.
pub(crate) fn router(app: Arc<App>) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        router = router.route(route.path, (route.handler)());
    }
    router
        .fallback(interface)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(crate::BODY_LIMIT))
        .layer(middleware::from_fn(measure))
        .layer(middleware::from_fn_with_state(
            Arc::clone(&app),
            guard::guard,
        ))
        .with_state(app)
}

/// A known path asked in a way it does not answer; axum adds what it does.
async fn wrong_method(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let failure = Failure::new(
        Code::InvalidRequest,
        format!("{path} does not answer {method}."),
    );
    let mut response = error::response(Form::of_path(path), &failure);
    *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    response
}

/// The surface of a request's path, for metrics.
fn surface_of(path: Option<&str>) -> &'static str {
    path.and_then(|path| ROUTES.iter().find(|route| route.path == path))
        .map_or("interface", |route| route.surface.name())
}

async fn measure(request: Request, next: Next) -> Response {
    let matched = request.extensions().get::<MatchedPath>();
    let surface = surface_of(matched.map(MatchedPath::as_str));
    let begun = std::time::Instant::now();
    let response = next.run(request).await;
    metrics::request(
        surface,
        response.status().as_u16(),
        begun.elapsed().as_secs_f64(),
    );
    response
}

async fn healthz() -> &'static str {
    "ok"
}

async fn readyz(State(app): State<Arc<App>>) -> Response {
    if app.engine.ready() {
        "ready".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "no model is ready yet").into_response()
    }
}

async fn prometheus() -> Response {
    let format = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, format)], metrics::render()).into_response()
}

async fn endpoints() -> Html<String> {
    use std::fmt::Write;
    let mut page = String::from(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Endpoints of Spotter</title><h1>Endpoints</h1><table>",
    );
    for route in ROUTES {
        // Writing to a string cannot fail.
        let _ = write!(
            page,
            "<tr><td>{}</td><td><code>{}</code></td><td>{}</td><td>{}</td></tr>",
            route.method,
            route.path,
            route.surface.name(),
            route.summary
        );
    }
    page.push_str("</table></html>");
    Html(page)
}

/// What the interface's pages may load: their own files, and nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Files of the interface; unknown paths without a dot are its own routes.
async fn interface(State(app): State<Arc<App>>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    let dir = app
        .ui_dir
        .as_ref()
        .filter(|_| reads && !path.starts_with("/v1/") && !path.starts_with("/api/"));
    let Some(dir) = dir else {
        return error::response(
            Form::of_path(&path),
            &Failure::new(
                Code::NotFound,
                format!("There is nothing at {path}; GET /api/v1/endpoints lists what there is."),
            ),
        );
    };
    let is_page = !path.rsplit('/').next().unwrap_or_default().contains('.');
    let files = ServeDir::new(dir);
    let served = if is_page {
        let index = ServeFile::new(dir.join("index.html"));
        files
            .fallback(index)
            .oneshot(request)
            .await
            .map(IntoResponse::into_response)
    } else {
        files
            .oneshot(request)
            .await
            .map(IntoResponse::into_response)
    };
    let mut response = match served {
        Ok(response) => response,
        Err(never) => match never {},
    };
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(POLICY),
    );
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    headers.insert(
        header::REFERRER_POLICY,
        HeaderValue::from_static("no-referrer"),
    );
    if is_page {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    }
    response
}
