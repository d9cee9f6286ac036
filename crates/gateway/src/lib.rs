//! The HTTP edge of Spotter: OpenAI, Anthropic, Ollama and Claw-R1 dialects,
//! feedback, and the control API.
//!
//! This crate knows no tensors and starts no workers. It asks an [`engine::Engine`]
//! for answers, a [`pool::Pool`] to keep them, and a [`control::Control`] for
//! everything the daemon decides.
//!
//! # Layout
//! - [`engine`]: what the gateway needs of whatever answers requests.
//! - [`pool`]: what the gateway needs of the data pool.
//! - [`control`]: the control API, its JSON and its events.
//! - [`routes`]: the one table of routes.
//! - [`guard`]: token, `Host` and `Origin`.
//! - `call`: the one internal form of a request.
//! - `answer`: from a call to an answer: place, generate, record, hand on.
//! - `session`, `turn`, `user_text`: whose call it is, and where it stands.
//! - `feedback`, `feedback_api`: ratings typed into the chat and sent to the API.
//! - `dialect`: one file per wire dialect.
//! - `body`, `error`, `metrics`: bodies, failures and figures.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

mod answer;
mod body;
mod call;
pub mod control;
mod dialect;
pub mod engine;
mod error;
mod feedback;
mod feedback_api;
pub mod guard;
mod metrics;
pub mod pool;
pub mod routes;
mod session;
mod turn;
mod user_text;

/// The default port.
pub const DEFAULT_PORT: u16 = 8100;
/// The largest request body in bytes: long sessions with images reach 8 MB.
pub const BODY_LIMIT: usize = 32 * 1024 * 1024;

/// How long answers in flight may take to end after a shutdown was asked for.
pub const GRACE: Duration = Duration::from_secs(30);

/// What the gateway serves with.
pub struct App {
    /// Keeps interactions.
    pub pool: Arc<dyn pool::Pool>,
    /// Answers requests.
    pub engine: Arc<dyn engine::Engine>,
    /// Everything the daemon decides.
    pub control: Arc<dyn control::Control>,
    /// What happened; the daemon publishes here too.
    pub events: control::events::EventHub,
    /// Token, `Host` and `Origin`.
    pub guard: guard::Guard,
    /// Directory of the built interface; `None` serves none.
    pub ui_dir: Option<PathBuf>,
    conversations: turn::Conversations,
    /// Ends the streams that would otherwise never end.
    closing: CancellationToken,
}

impl App {
    /// An app over its parts.
    pub fn new(
        pool: Arc<dyn pool::Pool>,
        engine: Arc<dyn engine::Engine>,
        control: Arc<dyn control::Control>,
        events: control::events::EventHub,
        guard: guard::Guard,
        ui_dir: Option<PathBuf>,
    ) -> Self {
        Self {
            pool,
            engine,
            control,
            events,
            guard,
            ui_dir,
            conversations: turn::Conversations::default(),
            closing: CancellationToken::new(),
        }
    }
}

/// The router, for callers that bring their own server.
pub fn router(app: Arc<App>) -> axum::Router {
    metrics::install();
    routes::router(app)
}

/// Serves until `shutdown` completes, then lets answers in flight end within [`GRACE`].
///
/// # Errors
/// Errors of the listener.
pub async fn run(
    listener: TcpListener,
    app: Arc<App>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let closing = app.closing.clone();
    let router = router(app);
    let listener = axum::serve::ListenerExt::tap_io(listener, |stream| {
        // Tokens are small; without this each would wait for the one before to be acknowledged.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY could not be set");
        }
    });
    let shutdown = {
        let closing = closing.clone();
        async move {
            shutdown.await;
            closing.cancel();
        }
    };
    let serving = axum::serve(listener, router).with_graceful_shutdown(shutdown);
    tokio::select! {
        ended = serving.into_future() => ended,
        () = async {
            closing.cancelled().await;
            tokio::time::sleep(GRACE).await;
        } => {
            tracing::warn!("answers still in flight after the grace period were cut off");
            Ok(())
        }
    }
}
