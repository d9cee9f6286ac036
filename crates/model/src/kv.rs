//! Paged keys and values: preallocated, in blocks of tokens, shared by reference count.
//!
//! The pool only owns memory and moves rows; who may use which block is the engine's
//! business. A block's keys lie row by row (`[block_tokens, kv_heads · head_dim]`), so
//! neighbouring blocks form one run and need no gathering.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use candle_core::Tensor;

use crate::config::Config;
use crate::error::{ModelError, Result};

/// Keys and values of one layer: `[slots, kv_heads · head_dim]` each.
#[derive(Debug)]
pub(crate) struct LayerCache {
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

/// Memory for the keys and values of `blocks` blocks.
#[derive(Debug)]
pub struct KvPool {
    pub(crate) layers: Vec<Arc<RwLock<LayerCache>>>,
    width: usize,
    block_tokens: usize,
    blocks: usize,
}

impl KvPool {
    /// Tokens per block.
    pub const BLOCK_TOKENS: usize = 32;

    /// Bytes that a pool of this many blocks takes.
    pub fn bytes_for(config: &Config, blocks: usize) -> u64 {
        let row = (config.kv_heads * config.head_dim * size_of::<f32>()) as u64;
        2 * row * Self::BLOCK_TOKENS as u64 * config.layers as u64 * blocks as u64
    }

    /// Reserves the memory. The operating system backs pages when they are first used.
    pub fn new(config: &Config, blocks: usize) -> Self {
        let width = config.kv_heads * config.head_dim;
        let len = blocks * Self::BLOCK_TOKENS * width;
        let layers = (0..config.layers)
            .map(|_| {
                Arc::new(RwLock::new(LayerCache {
                    k: vec![0.0; len],
                    v: vec![0.0; len],
                }))
            })
            .collect();
        Self {
            layers,
            width,
            block_tokens: Self::BLOCK_TOKENS,
            blocks,
        }
    }

    /// Blocks in the pool.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The slot runs of tokens `range` of a sequence whose blocks are `table`.
    pub(crate) fn runs(&self, table: &[u32], range: Range<usize>) -> Result<Vec<Range<usize>>> {
        let size = self.block_tokens;
        if range.end > table.len() * size {
            return Err(ModelError::Invalid(format!(
                "{} tokens do not fit {} cache blocks of {size}",
                range.end,
                table.len()
            )));
        }
        let mut runs: Vec<Range<usize>> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let block = table[at / size] as usize;
            if block >= self.blocks {
                return Err(ModelError::Invalid(format!(
                    "cache block {block} does not exist"
                )));
            }
            let end = range.end.min((at / size + 1) * size);
            let start = block * size + at % size;
            let run = start..start + (end - at);
            match runs.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => runs.push(run),
            }
            at = end;
        }
        Ok(runs)
    }

    /// Stores rows `rows` of `k` and `v` (`[N, kv_heads · head_dim]`) in these slots.
    pub(crate) fn write(
        &self,
        layer: usize,
        k: &Tensor,
        v: &Tensor,
        writes: &[(Range<usize>, Vec<Range<usize>>)],
    ) -> Result<()> {
        if writes.is_empty() {
            return Ok(());
        }
        let (k, v) = (
            k.flatten_all()?.to_vec1::<f32>()?,
            v.flatten_all()?.to_vec1::<f32>()?,
        );
        let mut cache = self.layers[layer]
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let width = self.width;
        for (rows, runs) in writes {
            let mut row = rows.start;
            for run in runs {
                let from = row * width..(row + run.len()) * width;
                cache.k[run.start * width..run.end * width].copy_from_slice(&k[from.clone()]);
                cache.v[run.start * width..run.end * width].copy_from_slice(&v[from]);
                row += run.len();
            }
        }
        Ok(())
    }

    /// Copies a block, for a sequence that leaves a shared, partly filled one.
    ///
    /// # Panics
    /// When a block does not exist.
    pub fn copy_block(&self, from: u32, to: u32) {
        let size = self.block_tokens * self.width;
        let (from, to) = (from as usize * size, to as usize * size);
        for layer in &self.layers {
            let mut cache = layer.write().unwrap_or_else(PoisonError::into_inner);
            cache.k.copy_within(from..from + size, to);
            cache.v.copy_within(from..from + size, to);
        }
    }
}
