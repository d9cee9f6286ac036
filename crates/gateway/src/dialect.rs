//! The wire dialects, one file each: a translation into [`crate::call::Call`] and
//! out of [`crate::answer::Piece`]s. A dialect owns no state.

pub(crate) mod anthropic;
pub(crate) mod claw_r1;
pub(crate) mod embeddings;
pub(crate) mod models;
pub(crate) mod ollama;
pub(crate) mod openai_chat;
pub(crate) mod openai_completions;
pub(crate) mod responses;
