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

pub mod control;
pub mod engine;
pub mod pool;
