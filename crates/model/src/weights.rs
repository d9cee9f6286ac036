//! Weights as they lie in a file: typed views of mapped bytes.
//!
//! A view never owns a copy. It may carry a row permutation, so that a consumer
//! sees Hugging Face row order however the file stores its rows.

use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use crate::config::Config;
use crate::error::{ModelError, Result};

/// How the numbers of a tensor are stored, after GGUF's type numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum BlockType {
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// bfloat16.
    BF16,
    /// 4 bit, one scale per 32.
    Q4_0,
    /// 4 bit, scale and minimum per 32.
    Q4_1,
    /// 5 bit, one scale per 32.
    Q5_0,
    /// 5 bit, scale and minimum per 32.
    Q5_1,
    /// 8 bit, one scale per 32.
    Q8_0,
    /// 4 bit, super-blocks of 256.
    Q4_K,
    /// 5 bit, super-blocks of 256.
    Q5_K,
    /// 6 bit, super-blocks of 256.
    Q6_K,
}

impl BlockType {
    /// From GGUF's number.
    pub fn from_gguf(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4_K,
            13 => Self::Q5_K,
            14 => Self::Q6_K,
            30 => Self::BF16,
            _ => return None,
        })
    }

    /// GGUF's number.
    pub fn gguf(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4_K => 12,
            Self::Q5_K => 13,
            Self::Q6_K => 14,
            Self::BF16 => 30,
        }
    }

    /// Values in one block.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// Bytes of `len` values, or `None` when they do not fill whole blocks or overflow.
    pub fn bytes_for(self, len: usize) -> Option<usize> {
        if !len.is_multiple_of(self.block_len()) {
            return None;
        }
        (len / self.block_len()).checked_mul(self.block_bytes())
    }

    /// The name people know.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }
}

/// Maps a file for reading.
///
/// # Errors
/// When it cannot be opened or mapped.
#[allow(unsafe_code)]
pub(crate) fn map_file(path: &Path) -> Result<Mmap> {
    let file = std::fs::File::open(path).map_err(|e| ModelError::io(path, e))?;
    // SAFETY: the map is read-only. Should another process truncate the file while it
    // is mapped, access faults; that is inherent to serving weights without a copy.
    unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io(path, e))
}

/// Bytes that are mapped from a file or owned.
#[derive(Clone, Debug)]
pub enum Bytes {
    /// A range of a mapped file.
    Mapped {
        /// The file.
        map: Arc<Mmap>,
        /// First byte.
        start: usize,
        /// Number of bytes; the range lies inside the map.
        len: usize,
    },
    /// Bytes in memory.
    Owned(Arc<[u8]>),
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Mapped { map, start, len } => &map[*start..*start + *len],
            Self::Owned(bytes) => bytes,
        }
    }
}

/// A matrix or vector in its file's own form: `rows` × `cols`, row-major.
#[derive(Clone, Debug)]
pub struct WeightView {
    /// Rows (1 for a vector).
    pub rows: usize,
    /// Values per row.
    pub cols: usize,
    /// How they are stored.
    pub block: BlockType,
    /// `rows * block.bytes_for(cols)` bytes.
    pub bytes: Bytes,
    /// `permutation[i]` is the stored row that holds logical row `i`.
    pub permutation: Option<Arc<[u32]>>,
}

impl WeightView {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.cols / self.block.block_len() * self.block.block_bytes()
    }

    /// The stored bytes of logical row `row`.
    ///
    /// # Panics
    /// When `row` is not below `rows`.
    pub fn row(&self, row: usize) -> &[u8] {
        let stored = self.permutation.as_ref().map_or(row, |p| p[row] as usize);
        let size = self.row_bytes();
        &self.bytes.as_ref()[stored * size..(stored + 1) * size]
    }

    /// All values as f32, logical row order: `[rows * cols]`.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0f32; self.rows * self.cols];
        for (row, chunk) in out.chunks_mut(self.cols).enumerate() {
            crate::dequantise::row_to_f32(self.block, self.row(row), chunk);
        }
        out
    }
}

/// A model file, GGUF or safetensors, seen through Hugging Face tensor names.
pub trait WeightSource {
    /// The architecture's numbers.
    fn config(&self) -> &Config;

    /// The tensor of this name (`model.layers.0.self_attn.q_proj.weight`, …), if present.
    ///
    /// # Errors
    /// When its bytes do not fit its shape.
    fn tensor(&self, name: &str) -> Result<Option<WeightView>>;
}
