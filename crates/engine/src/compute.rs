//! What the loop computes with: a model and its key/value memory, or a script in tests.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use spotter_model::{Batch, ChatTemplate, KvPool, LoadedModel, ModelError, Tokenizer};

/// What is asked of one computed batch.
#[derive(Clone, Debug, Default)]
pub struct Wants {
    /// Rows of the batch whose next-token logits are needed.
    pub logits: Vec<u32>,
    /// Rows of the batch, and for each row the token whose log-probability is needed.
    pub logprobs: Vec<(Range<usize>, Vec<u32>)>,
}

/// The answer to [`Wants`], in its order.
#[derive(Clone, Debug, Default)]
pub struct Computed {
    /// One row of the vocabulary's width for each wanted row.
    pub logits: Vec<Vec<f32>>,
    /// One list for each wanted range.
    pub logprobs: Vec<Vec<f32>>,
}

/// Text, tokens and numbers of one model. The scheduler knows nothing else of it.
pub trait Compute: Send + Sync {
    /// Text to tokens and back.
    fn tokenizer(&self) -> &Tokenizer;

    /// Conversations to text.
    fn template(&self) -> &ChatTemplate;

    /// Width of a row of logits.
    fn vocab(&self) -> usize;

    /// Bytes of keys and values that one block of tokens takes.
    fn block_bytes(&self) -> u64;

    /// Computes a batch. Writing only the slots that the batch names, it may be repeated
    /// after an error.
    ///
    /// # Errors
    /// When the batch is malformed or the device fails.
    fn run(&self, batch: &Batch, wants: &Wants) -> Result<Computed, ModelError>;
}

/// A loaded model with preallocated key/value memory.
pub(crate) struct ModelCompute {
    model: Arc<LoadedModel>,
    pool: KvPool,
}

impl ModelCompute {
    pub(crate) fn new(model: Arc<LoadedModel>, blocks: usize) -> Self {
        let pool = KvPool::new(model.model.config(), blocks);
        Self { model, pool }
    }
}

impl Compute for ModelCompute {
    fn tokenizer(&self) -> &Tokenizer {
        &self.model.tokenizer
    }

    fn template(&self) -> &ChatTemplate {
        &self.model.template
    }

    fn vocab(&self) -> usize {
        self.model.model.config().vocab
    }

    fn block_bytes(&self) -> u64 {
        KvPool::bytes_for(self.model.model.config(), 1)
    }

    fn run(&self, batch: &Batch, wants: &Wants) -> Result<Computed, ModelError> {
        let model = &self.model.model;
        let hidden = model.forward(batch, Some(&self.pool))?;
        let mut out = Computed::default();
        if !wants.logits.is_empty() {
            let rows = Tensor::from_slice(&wants.logits, wants.logits.len(), hidden.device())?;
            let rows = hidden.index_select(&rows, 0)?;
            out.logits = model.logits(&rows)?.to_vec2()?;
        }
        for (rows, targets) in &wants.logprobs {
            let rows = hidden.narrow(0, rows.start, rows.len())?;
            let scored = model.logprobs(&rows, targets, 1.0)?;
            out.logprobs.push(scored.logprobs.to_vec1()?);
        }
        Ok(out)
    }
}
