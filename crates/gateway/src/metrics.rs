//! Prometheus metrics: what is measured, under which name.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

static HANDLE: OnceLock<Option<PrometheusHandle>> = OnceLock::new();

/// Bucket bounds of times, in seconds.
const SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
];

/// Installs the recorder of this process, once.
pub(crate) fn install() {
    HANDLE.get_or_init(|| {
        let handle = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), SECONDS)
            .and_then(PrometheusBuilder::install_recorder)
            .inspect_err(|error| tracing::warn!(%error, "metrics are off"))
            .ok()?;
        metrics::describe_histogram!(
            "spotter_first_token_seconds",
            "Request to first token, queueing included."
        );
        metrics::describe_histogram!(
            "spotter_inter_token_seconds",
            "Between two pieces of an answer."
        );
        metrics::describe_histogram!("spotter_request_seconds", "Whole requests by surface.");
        metrics::describe_counter!("spotter_requests_total", "Requests by surface and status.");
        metrics::describe_counter!(
            "spotter_prompt_tokens_total",
            "Prompt tokens of answered requests."
        );
        metrics::describe_counter!(
            "spotter_cached_tokens_total",
            "Prompt tokens taken from the prefix cache."
        );
        metrics::describe_counter!("spotter_generated_tokens_total", "Tokens generated.");
        metrics::describe_counter!(
            "spotter_steps_stored_total",
            "Steps handed to the data pool."
        );
        metrics::describe_counter!(
            "spotter_steps_dropped_total",
            "Answers that were not recorded, by reason."
        );
        metrics::describe_counter!(
            "spotter_cancelled_total",
            "Generations that a client gave up."
        );
        metrics::describe_gauge!(
            "spotter_running",
            "Generations in progress, queued ones included."
        );
        Some(handle)
    });
}

/// The metrics as Prometheus reads them.
pub(crate) fn render() -> String {
    HANDLE
        .get()
        .and_then(Option::as_ref)
        .map(PrometheusHandle::render)
        .unwrap_or_default()
}

pub(crate) fn first_token(after: Duration) {
    metrics::histogram!("spotter_first_token_seconds").record(after.as_secs_f64());
}

pub(crate) fn inter_token(gap: Duration) {
    metrics::histogram!("spotter_inter_token_seconds").record(gap.as_secs_f64());
}

pub(crate) fn tokens(prompt: u32, cached: u32, generated: u32) {
    metrics::counter!("spotter_prompt_tokens_total").increment(prompt.into());
    metrics::counter!("spotter_cached_tokens_total").increment(cached.into());
    metrics::counter!("spotter_generated_tokens_total").increment(generated.into());
}

pub(crate) fn step_stored() {
    metrics::counter!("spotter_steps_stored_total").increment(1);
}

pub(crate) fn step_dropped(reason: &str) {
    metrics::counter!("spotter_steps_dropped_total", "reason" => reason.to_owned()).increment(1);
}

pub(crate) fn request(surface: &'static str, status: u16, seconds: f64) {
    metrics::counter!("spotter_requests_total", "surface" => surface, "status" => status.to_string())
        .increment(1);
    metrics::histogram!("spotter_request_seconds", "surface" => surface).record(seconds);
}

/// A generation in progress: counted while it lives, and as cancelled when it is
/// dropped before its end.
pub(crate) struct Running {
    last_sign: Mutex<Instant>,
    done: std::sync::atomic::AtomicBool,
}

impl Running {
    pub(crate) fn begin() -> Self {
        metrics::gauge!("spotter_running").increment(1.0);
        Self {
            last_sign: Mutex::new(Instant::now()),
            done: std::sync::atomic::AtomicBool::new(false),
        }
    }

    /// The generation reached its end.
    pub(crate) fn ended(&self) {
        self.done.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    /// Whether a sign of life is due; asking and being told so counts as one.
    pub(crate) fn heartbeat_due(&self, every: Duration) -> bool {
        let mut last = self
            .last_sign
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let due = last.elapsed() >= every;
        if due {
            *last = Instant::now();
        }
        due
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        metrics::gauge!("spotter_running").decrement(1.0);
        if !self.done.load(std::sync::atomic::Ordering::Relaxed) {
            metrics::counter!("spotter_cancelled_total").increment(1);
        }
    }
}
