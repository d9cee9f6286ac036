//! Shared vocabulary of Spotter: ids, steps, rewards, adapter versions, chat
//! messages, the worker protocol, and advantages and losses as plain arithmetic.
//!
//! This crate performs no I/O, starts no tasks and knows no tensors, database or
//! HTTP. Everything that crosses a process border is defined here once.
//!
//! # Layout
//! - [`id`]: typed unique ids.
//! - [`chat`]: messages, tools and tool calls, independent of any wire dialect.
//! - [`generate`]: what the gateway asks of a serving engine, and what comes back.
//! - [`step`]: the atom of experience: one model call.
//! - [`reward`]: scalar feedback and its precedence.
//! - [`adapter`]: adapter versions.
//! - [`train`]: what a training run is given, and what it reports.
//! - [`worker`]: the JSON-lines protocol between the daemon and its workers.
//! - [`advantage`]: advantage estimation on slices.
//! - [`loss`]: losses and their gradients on slices.
//! - [`glossary`]: every training metric in words.
//! - [`code`]: the error codes that cross the edge.

pub mod adapter;
pub mod advantage;
pub mod chat;
pub mod code;
pub mod generate;
pub mod glossary;
pub mod id;
pub mod loss;
pub mod reward;
pub mod step;
pub mod train;
pub mod worker;

pub use adapter::AdapterVersion;
pub use code::Code;
