//! The serving engine: continuous batching, prefix cache, sampling, output parsing.
//!
//! # Layout
//! - [`engine`]: the loop that admits, batches, computes, samples and reports.
//! - [`prefix_cache`]: who uses which key/value block, and which prefixes are reusable.
//! - [`adapters`]: adapter versions, the live one, and turns that stay on theirs.
//! - [`sampler`]: from logits to one token and its log-probabilities.
//! - [`output`]: from text to content, reasoning and tool calls, across any chunk border.
//!
//! Knows no HTTP and no database. Tokens in, tokens out; text only at the rim.

pub mod adapters;
pub mod engine;
pub mod output;
pub mod prefix_cache;
pub mod sampler;

pub use engine::{Engine, EngineSettings, EventSink};
