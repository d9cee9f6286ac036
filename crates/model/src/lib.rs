//! One differentiable transformer for serving and training, with model and adapter files.
//!
//! # Layout
//! - [`config`], [`weights`]: an architecture's numbers; weights as they lie in a file.
//! - [`transformer`]: [`Model`], the ragged batch with its prefix forest, gradients.
//! - [`linear`], `ops`, `attention`: operations with their backward.
//! - `decode`, `lockstep`, `vec_dot`: the same forward for a few rows, as decoding needs it.
//! - [`kv`]: paged keys and values.
//! - [`lora`], [`adapter_file`], [`export`]: adapters in memory, on disk, and in the forms
//!   that other programs read.
//! - [`gguf`], [`folder`], [`tokenizer`], [`template`], [`load`]: model files.
//!
//! The crate knows no HTTP, no database and no scheduling.

pub mod adapter_file;
mod attention;
pub mod config;
mod decode;
mod dequantise;
mod error;
pub mod export;
pub mod folder;
pub mod gguf;
pub mod kv;
pub mod linear;
pub mod load;
mod lockstep;
pub mod lora;
mod ops;
pub mod template;
pub mod tokenizer;
pub mod transformer;
mod vec_dot;
pub mod weights;

pub use error::{ModelError, Result};
pub use kv::KvPool;
pub use load::LoadedModel;
pub use lora::{LoraAdapter, LoraConfig, Target};
pub use ops::LogProbs;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
pub use transformer::{Batch, CacheSlots, Gradients, LoadOptions, Model, Segment};
