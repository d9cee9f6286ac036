//! The serving engine: continuous batching, prefix cache, sampling, output parsing.
//!
//! # Layout
//! - [`engine`]: the handle; `prepare`: requests to tokens, on a thread of its own.
//! - `scheduler`: the loop that admits, batches, computes, samples and reports; `sequence`:
//!   one answer in the making; `pace`: how much of a prompt fits beside running answers.
//! - [`compute`]: the model as the loop sees it.
//! - [`prefix_cache`]: who uses which key/value block, and which prefixes are reusable.
//! - [`adapters`]: adapter versions, the live one, and turns that stay on theirs.
//! - [`sampler`]: from logits to one token and its log-probabilities.
//! - [`output`]: from text to content, reasoning and tool calls, across any chunk border;
//!   [`dialect`]: how a model family writes calls.
//! - `constraint`: which tokens may follow, so that calls and JSON always parse; `schema`:
//!   what of a client's schema can be enforced.
//!
//! Knows no HTTP and no database. Tokens in, tokens out; text only at the rim.

pub mod adapters;
pub mod compute;
mod constraint;
pub mod dialect;
pub mod engine;
pub mod output;
mod pace;
pub mod prefix_cache;
mod prepare;
pub mod sampler;
mod scheduler;
mod schema;
mod sequence;

pub use compute::{Compute, Computed, Wants};
pub use dialect::Dialect;
pub use engine::{Engine, EngineSettings, EventSink};
