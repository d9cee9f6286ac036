//! The control API, `/api/v1`: what the interface and the `spotter` command use.
//!
//! [`Control`] is everything that is not a plain read or write of the data pool;
//! the daemon implements it. [`dto`] holds the JSON of every answer, [`events`]
//! the event stream, `handlers` the HTTP side.

use async_trait::async_trait;
use serde_json::{Map, Value};
use spotter_core::AdapterVersion;
use spotter_core::code::Failure;

use dto::{
    Adapter, AdapterList, Check, ConnectGuide, ExportEstimate, ExportRequest, Exported,
    ImportAdapter, ModelList, PruneResult, Run, RunStarted, Series, Setting, Status,
};

pub mod dto;
pub mod events;
pub(crate) mod handlers;

/// The daemon's decisions and actions. Every method may fail with the [`Failure`]
/// whose code the interface translates.
#[async_trait]
pub trait Control: Send + Sync + 'static {
    /// The state of everything, for the home screen.
    async fn status(&self) -> Result<Status, Failure>;

    /// Starts a training run now. `NotEnoughLabels`, `Conflict` or `NothingToLearn`
    /// when it cannot.
    async fn start_run(&self) -> Result<RunStarted, Failure>;
    /// All runs, newest first.
    async fn runs(&self) -> Result<Vec<Run>, Failure>;
    /// One run; `None` when unknown.
    async fn run(&self, id: i64) -> Result<Option<Run>, Failure>;
    /// A run's metrics, each downsampled to at most `points` points that keep spikes.
    async fn run_metrics(&self, id: i64, points: usize) -> Result<Vec<Series>, Failure>;
    /// Pauses training: the active run checkpoints, and no other starts.
    async fn pause_training(&self) -> Result<(), Failure>;
    /// Continues after a pause.
    async fn resume_training(&self) -> Result<(), Failure>;
    /// Stops a run; its checkpoint is deleted. `NotFound` when it is not active.
    async fn cancel_run(&self, id: i64) -> Result<(), Failure>;

    /// The live version and all adapters, newest first.
    async fn adapters(&self) -> Result<AdapterList, Failure>;
    /// One adapter; `None` when unknown.
    async fn adapter(&self, version: AdapterVersion) -> Result<Option<Adapter>, Failure>;
    /// Makes a version live.
    async fn activate_adapter(&self, version: AdapterVersion) -> Result<AdapterList, Failure>;
    /// Makes the version live that was live before.
    async fn rollback_adapter(&self) -> Result<AdapterList, Failure>;
    /// Writes an adapter in another form; dropping the future calls it off.
    async fn export_adapter(
        &self,
        version: AdapterVersion,
        request: ExportRequest,
    ) -> Result<Exported, Failure>;
    /// How large an export will be.
    async fn export_estimate(
        &self,
        version: AdapterVersion,
        format: &str,
    ) -> Result<ExportEstimate, Failure>;
    /// Calls the exports of a version off; nothing of them stays.
    async fn cancel_export(&self, version: AdapterVersion) -> Result<(), Failure>;
    /// Takes an adapter made elsewhere; it is kept, not made live.
    async fn import_adapter(&self, request: ImportAdapter) -> Result<Adapter, Failure>;
    /// Keeps a version from being pruned, or lets it be.
    async fn pin_adapter(&self, version: AdapterVersion, pinned: bool) -> Result<(), Failure>;
    /// Deletes adapters that are neither live, pinned nor recent.
    async fn prune_adapters(&self) -> Result<PruneResult, Failure>;

    /// The catalogue and what is installed, with what fits this machine.
    async fn models(&self) -> Result<ModelList, Failure>;
    /// Starts or continues a download.
    async fn pull_model(&self, name: &str) -> Result<(), Failure>;
    /// Pauses a download; what was fetched is kept.
    async fn pause_model(&self, name: &str) -> Result<(), Failure>;
    /// Serves this model from now on.
    async fn activate_model(&self, name: &str) -> Result<(), Failure>;
    /// Adds a GGUF file or a folder of safetensors; answers its name.
    async fn import_model(&self, path: &str) -> Result<String, Failure>;
    /// Removes a model's files; `Conflict` while it is active.
    async fn remove_model(&self, name: &str) -> Result<(), Failure>;

    /// Every setting with its value and where the value comes from.
    async fn settings(&self) -> Result<Vec<Setting>, Failure>;
    /// Changes settings by key; all or none.
    async fn change_settings(&self, changes: Map<String, Value>) -> Result<Vec<Setting>, Failure>;
    /// Checks of the installation, in words.
    async fn doctor(&self) -> Result<Vec<Check>, Failure>;
    /// The bearer token, for the connect card.
    async fn token(&self) -> Result<String, Failure>;
    /// Stops or resumes recording.
    async fn set_recording(&self, paused: bool) -> Result<(), Failure>;
    /// Whether calls are recorded now.
    fn recording(&self) -> bool;
    /// How to connect a client (`openclaw`, `claude-code`, …); `None` when unknown.
    async fn connect_guide(&self, client: &str) -> Result<Option<ConnectGuide>, Failure>;
    /// Called once per answered client request, so that the connect card turns green.
    fn request_seen(&self, client: &str);
}

/// This API's OpenAPI description.
pub fn openapi() -> utoipa::openapi::OpenApi {
    use utoipa::OpenApi;
    handlers::Description::openapi()
}
