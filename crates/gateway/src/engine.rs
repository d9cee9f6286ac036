//! What the gateway needs of whatever answers requests.
//!
//! The daemon implements [`Engine`] over its serving worker; tests use a scripted
//! one. This module knows neither HTTP nor tensors.

use std::pin::Pin;

use async_trait::async_trait;
use futures::Stream;
use spotter_core::AdapterVersion;
use spotter_core::code::Failure;
use spotter_core::generate::{GenerateEvent, GenerateRequest, Prompt};
use spotter_core::worker::ModelFacts;

pub mod balanced;
pub mod remote;
pub mod scripted;

/// The events of one generation, in the order that [`GenerateEvent`] documents.
/// Dropping the stream cancels the generation, also during prefill.
pub type EventStream = Pin<Box<dyn Stream<Item = GenerateEvent> + Send>>;

/// The adapter versions an engine can answer with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adapters {
    /// The version that answers when a request names none.
    pub live: AdapterVersion,
    /// Every version that a request may name, `BASE` included.
    pub loaded: Vec<AdapterVersion>,
}

/// A serving engine.
#[async_trait]
pub trait Engine: Send + Sync + 'static {
    /// Begins a generation.
    ///
    /// # Errors
    /// `Busy` when the queue is full, `Unavailable` while no model is loaded,
    /// `ContextLengthExceeded` and `ModelNotFound` where they are known at once.
    /// What is found out later arrives as `GenerateEvent::Failed`.
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream, Failure>;

    /// How many tokens the prompt has once it is rendered.
    ///
    /// # Errors
    /// `Unavailable` while no model is loaded.
    async fn count_tokens(&self, prompt: Prompt) -> Result<u32, Failure>;

    /// The loaded model, or `None` while there is none.
    fn facts(&self) -> Option<ModelFacts>;

    /// The live version and all versions that requests may name.
    fn adapters(&self) -> Adapters;

    /// Whether a request would be answered now.
    fn ready(&self) -> bool;
}
