//! GGUF files (format versions 2 and 3), read from a map and written.
//!
//! The format is ggml's (`docs/gguf.md`): header, key/value metadata, tensor table,
//! aligned data. A file is hostile input: every count, length and offset is checked
//! against what the file holds before anything is allocated or sliced.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::config::{Config, RopeScaling};
use crate::error::{ModelError, Result};
use crate::weights::{BlockType, Bytes, WeightSource, WeightView, map_file};

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Nesting of metadata arrays beyond which a file is refused.
const MAX_DEPTH: u32 = 4;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Vec<Value>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// As a non-negative integer, whatever its width.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::U64(v) => Some(v),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// As a number.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Self::F32(v) => Some(v),
            Self::F64(v) => Some(v as f32),
            _ => self.as_u64().map(|v| v as f32),
        }
    }

    /// As text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(v) => Some(v),
            _ => None,
        }
    }

    /// As an array.
    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Self::Array(v) => Some(v),
            _ => None,
        }
    }

    fn kind(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => 9,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::U8(v) => out.push(*v),
            Self::I8(v) => out.extend(v.to_le_bytes()),
            Self::U16(v) => out.extend(v.to_le_bytes()),
            Self::I16(v) => out.extend(v.to_le_bytes()),
            Self::U32(v) => out.extend(v.to_le_bytes()),
            Self::I32(v) => out.extend(v.to_le_bytes()),
            Self::F32(v) => out.extend(v.to_le_bytes()),
            Self::Bool(v) => out.push(u8::from(*v)),
            Self::String(v) => write_string(v, out),
            Self::Array(v) => {
                out.extend(v.first().map_or(4, Self::kind).to_le_bytes());
                out.extend((v.len() as u64).to_le_bytes());
                v.iter().for_each(|v| v.write(out));
            }
            Self::U64(v) => out.extend(v.to_le_bytes()),
            Self::I64(v) => out.extend(v.to_le_bytes()),
            Self::F64(v) => out.extend(v.to_le_bytes()),
        }
    }
}

fn write_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A tensor's entry in the table.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Lengths, fastest-varying first: `[cols, rows]` for a matrix.
    pub dims: Vec<usize>,
    /// How the numbers are stored.
    pub block: BlockType,
    /// First byte in the file.
    start: usize,
    /// Number of bytes.
    len: usize,
}

impl TensorInfo {
    /// Bytes of its data.
    pub fn bytes(&self) -> usize {
        self.len
    }
}

/// A mapped GGUF file.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    map: Arc<Mmap>,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorInfo>,
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

type Parsed<T> = std::result::Result<T, String>;

impl<'a> Cursor<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, len: usize, what: &str) -> Parsed<&'a [u8]> {
        if len > self.left() {
            return Err(format!("it ends in the middle of {what}"));
        }
        let bytes = &self.bytes[self.at..self.at + len];
        self.at += len;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Parsed<[u8; N]> {
        self.take(N, what)?
            .try_into()
            .map_err(|_| format!("{what} is malformed"))
    }

    fn u32(&mut self, what: &str) -> Parsed<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Parsed<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of things that take at least `least` bytes each.
    fn count(&mut self, least: usize, what: &str) -> Parsed<usize> {
        let count = self.u64(what)?;
        match usize::try_from(count) {
            Ok(n)
                if n.checked_mul(least)
                    .is_some_and(|bytes| bytes <= self.left()) =>
            {
                Ok(n)
            }
            _ => Err(format!(
                "it claims {count} {what}, more than it has room for"
            )),
        }
    }

    fn string(&mut self, what: &str) -> Parsed<String> {
        let len = self.count(1, what)?;
        String::from_utf8(self.take(len, what)?.to_vec())
            .map_err(|_| format!("{what} is not UTF-8"))
    }

    fn value(&mut self, kind: u32, depth: u32, key: &str) -> Parsed<Value> {
        Ok(match kind {
            0 => Value::U8(self.array::<1>(key)?[0]),
            1 => Value::I8(i8::from_le_bytes(self.array(key)?)),
            2 => Value::U16(u16::from_le_bytes(self.array(key)?)),
            3 => Value::I16(i16::from_le_bytes(self.array(key)?)),
            4 => Value::U32(self.u32(key)?),
            5 => Value::I32(i32::from_le_bytes(self.array(key)?)),
            6 => Value::F32(f32::from_le_bytes(self.array(key)?)),
            7 => Value::Bool(self.array::<1>(key)?[0] != 0),
            8 => Value::String(self.string(key)?),
            9 => {
                if depth == MAX_DEPTH {
                    return Err(format!("'{key}' is nested too deeply"));
                }
                let kind = self.u32(key)?;
                let least = match kind {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    4..=6 => 4,
                    8 | 10..=12 => 8,
                    9 => 12,
                    other => return Err(format!("'{key}' has unknown value type {other}")),
                };
                let count = self.count(least, "array entries")?;
                let mut values = Vec::new();
                for _ in 0..count {
                    values.push(self.value(kind, depth + 1, key)?);
                }
                Value::Array(values)
            }
            10 => Value::U64(self.u64(key)?),
            11 => Value::I64(i64::from_le_bytes(self.array(key)?)),
            12 => Value::F64(f64::from_le_bytes(self.array(key)?)),
            other => return Err(format!("'{key}' has unknown value type {other}")),
        })
    }
}

impl Gguf {
    /// Maps and checks a file.
    ///
    /// # Errors
    /// When it cannot be read, is not GGUF, is truncated, or holds something unknown;
    /// the message names what.
    pub fn open(path: &Path) -> Result<Self> {
        let map = map_file(path)?;
        let (metadata, tensors) = parse(&map).map_err(|reason| ModelError::bad(path, reason))?;
        Ok(Self {
            path: path.to_owned(),
            map: Arc::new(map),
            metadata,
            tensors,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Metadata by key.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// The tensor table by GGUF name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// A tensor by its GGUF name, rows as stored.
    pub fn view(&self, name: &str) -> Option<WeightView> {
        let info = self.tensors.get(name)?;
        let cols = info.dims.first().copied().unwrap_or(1);
        let rows = info.dims.iter().skip(1).product();
        let bytes = Bytes::Mapped {
            map: self.map.clone(),
            start: info.start,
            len: info.len,
        };
        Some(WeightView {
            rows,
            cols,
            block: info.block,
            bytes,
            permutation: None,
        })
    }
}

type Tables = (BTreeMap<String, Value>, BTreeMap<String, TensorInfo>);

/// Parses the tables of a file's bytes.
pub(crate) fn parse(bytes: &[u8]) -> Parsed<Tables> {
    let mut c = Cursor { bytes, at: 0 };
    if c.take(4, "the header").ok() != Some(MAGIC.as_slice()) {
        return Err("it does not begin as a GGUF file does".into());
    }
    let version = c.u32("the header")?;
    if !(2..=3).contains(&version) {
        return Err(format!("GGUF version {version} is not known (2 and 3 are)"));
    }
    let tensor_count = c.count(24, "tensors")?;
    let metadata_count = c.count(13, "metadata entries")?;
    let mut metadata = BTreeMap::new();
    for _ in 0..metadata_count {
        let key = c.string("a metadata key")?;
        let kind = c.u32(&key)?;
        let value = c.value(kind, 0, &key)?;
        metadata.insert(key, value);
    }
    let mut entries = Vec::new();
    for _ in 0..tensor_count {
        let name = c.string("a tensor name")?;
        let rank = c.u32(&name)?;
        if rank == 0 || rank > 4 {
            return Err(format!("tensor '{name}' has {rank} dimensions"));
        }
        let mut dims = Vec::with_capacity(4);
        for _ in 0..rank {
            let dim = c.u64(&name)?;
            dims.push(usize::try_from(dim).map_err(|_| format!("tensor '{name}' is too large"))?);
        }
        let number = c.u32(&name)?;
        let block = BlockType::from_gguf(number)
            .ok_or_else(|| format!("tensor '{name}' has unsupported block type {number}"))?;
        let offset = c.u64(&name)?;
        entries.push((name, dims, block, offset));
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(value) => value
            .as_u64()
            .filter(|a| a.is_power_of_two() && *a <= 1 << 20)
            .ok_or("its alignment is not a power of two")?,
    };
    let data = (c.at as u64).next_multiple_of(alignment);
    let mut tensors = BTreeMap::new();
    for (name, dims, block, offset) in entries {
        let sized = || -> Option<(usize, usize)> {
            let rows = dims
                .iter()
                .skip(1)
                .try_fold(1usize, |a, d| a.checked_mul(*d))?;
            let len = block.bytes_for(dims[0])?.checked_mul(rows)?;
            let start = usize::try_from(data.checked_add(offset)?).ok()?;
            Some((start, len))
        };
        let (start, len) =
            sized().ok_or_else(|| format!("tensor '{name}' has an impossible size"))?;
        if start.checked_add(len).is_none_or(|end| end > bytes.len()) {
            return Err(format!(
                "it is truncated: tensor '{name}' lies beyond its end"
            ));
        }
        tensors.insert(
            name,
            TensorInfo {
                dims,
                block,
                start,
                len,
            },
        );
    }
    Ok((metadata, tensors))
}

/// GGUF's name for a Hugging Face tensor name.
pub fn gguf_name(hf: &str) -> Option<String> {
    match hf {
        "model.embed_tokens.weight" => return Some("token_embd.weight".into()),
        "model.norm.weight" => return Some("output_norm.weight".into()),
        "lm_head.weight" => return Some("output.weight".into()),
        _ => {}
    }
    let (layer, rest) = hf.strip_prefix("model.layers.")?.split_once('.')?;
    let (path, kind) = rest.rsplit_once('.')?;
    let name = match path {
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        _ => return None,
    };
    Some(format!("blk.{layer}.{name}.{kind}"))
}

/// `permutation[i]` is the row of GGUF's interleaved-rope order that holds Hugging Face
/// row `i`: within a head, row `2 j` is channel `j`, row `2 j + 1` is channel `j + d/2`.
pub fn rope_permutation(heads: usize, head_dim: usize) -> Vec<u32> {
    let half = head_dim / 2;
    (0..heads * head_dim)
        .map(|i| {
            let (head, j) = (i / head_dim, i % head_dim);
            (head * head_dim + if j < half { 2 * j } else { 2 * (j - half) + 1 }) as u32
        })
        .collect()
}

/// A GGUF file as a base model.
#[derive(Debug)]
pub struct GgufModel {
    /// The file.
    pub file: Gguf,
    config: Config,
}

impl GgufModel {
    /// Reads the architecture from the metadata.
    ///
    /// # Errors
    /// When the architecture is unknown or its numbers are missing or impossible.
    pub fn new(file: Gguf) -> Result<Self> {
        let config = config(&file).map_err(|reason| ModelError::bad(file.path(), reason))?;
        Ok(Self { file, config })
    }
}

fn config(file: &Gguf) -> Parsed<Config> {
    let meta = file.metadata();
    if meta.get("general.type").and_then(Value::as_str) == Some("adapter") {
        return Err("it is an adapter, not a model".into());
    }
    let architecture = meta
        .get("general.architecture")
        .and_then(Value::as_str)
        .ok_or("it does not name its architecture")?
        .to_owned();
    if !matches!(architecture.as_str(), "llama" | "qwen2" | "qwen3") {
        return Err(format!(
            "architecture '{architecture}' is not known (llama, qwen2, qwen3 are)"
        ));
    }
    let find = |key: &str| meta.get(&format!("{architecture}.{key}"));
    let number = |key: &str| -> Parsed<usize> {
        find(key)
            .and_then(Value::as_u64)
            .and_then(|v| usize::try_from(v).ok())
            .ok_or_else(|| format!("'{architecture}.{key}' is missing"))
    };
    if number("expert_count").is_ok_and(|n| n > 0) {
        return Err("it is a mixture of experts, which is not supported".into());
    }
    let hidden = number("embedding_length")?;
    let heads = number("attention.head_count")?.max(1);
    let embedding = file
        .tensors()
        .get("token_embd.weight")
        .ok_or("it has no token embedding")?;
    let rope_scaling = match find("rope.scaling.type").and_then(Value::as_str) {
        Some("linear") => RopeScaling::Linear {
            factor: find("rope.scaling.factor")
                .and_then(Value::as_f32)
                .unwrap_or(1.0)
                .max(1.0),
        },
        Some("none") | None => RopeScaling::None,
        Some(other) => return Err(format!("rope scaling '{other}' is not supported")),
    };
    let config = Config {
        hidden,
        intermediate: number("feed_forward_length")?,
        layers: number("block_count")?,
        heads,
        kv_heads: number("attention.head_count_kv").unwrap_or(heads),
        head_dim: number("attention.key_length").unwrap_or(hidden / heads),
        vocab: embedding.dims.get(1).copied().unwrap_or(0),
        context: number("context_length")?,
        norm_eps: find("attention.layer_norm_rms_epsilon")
            .and_then(Value::as_f32)
            .unwrap_or(1e-5),
        rope_theta: find("rope.freq_base")
            .and_then(Value::as_f32)
            .unwrap_or(10_000.0),
        rope_scaling,
        architecture,
    };
    config.check()?;
    if file.tensors().contains_key("rope_freqs.weight") && config.rope_scaling == RopeScaling::None
    {
        // Llama 3.1 and later store the stretched frequencies as divisors.
        let mut config = config;
        config.rope_scaling = RopeScaling::Llama3 {
            factor: if config.layers == 16 || config.layers == 28 {
                32.0
            } else {
                8.0
            },
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        return Ok(config);
    }
    Ok(config)
}

impl WeightSource for GgufModel {
    fn config(&self) -> &Config {
        &self.config
    }

    fn tensor(&self, name: &str) -> Result<Option<WeightView>> {
        let Some(mut view) = gguf_name(name).and_then(|n| self.file.view(&n)) else {
            return Ok(None);
        };
        let c = &self.config;
        // Only the llama conversion permutes rows; Qwen's keeps Hugging Face order.
        if c.architecture == "llama" {
            let heads = if name.contains("self_attn.q_proj") {
                Some(c.heads)
            } else if name.contains("self_attn.k_proj") {
                Some(c.kv_heads)
            } else {
                None
            };
            if let Some(heads) = heads {
                if view.rows * view.cols == heads * c.head_dim && view.rows == 1 {
                    // A bias: one row of values, permuted when read.
                    let values = view.to_f32();
                    let bytes: Vec<u8> = rope_permutation(heads, c.head_dim)
                        .into_iter()
                        .flat_map(|i| values[i as usize].to_le_bytes())
                        .collect();
                    view.block = BlockType::F32;
                    view.bytes = Bytes::Owned(bytes.into());
                } else if view.rows == heads * c.head_dim {
                    view.permutation = Some(rope_permutation(heads, c.head_dim).into());
                }
            }
        }
        Ok(Some(view))
    }
}

/// An entry of a tensor table that is about to be written.
pub(crate) struct TensorEntry<'a> {
    pub(crate) name: &'a str,
    pub(crate) dims: &'a [usize],
    pub(crate) block: BlockType,
    pub(crate) bytes: usize,
}

/// Bytes that a tensor of `bytes` takes in a file, padding included.
pub(crate) fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(DEFAULT_ALIGNMENT as usize)
}

/// Everything of a file before its data (version 3). The tensors' data follows in the
/// same order, each padded to [`aligned`].
pub(crate) fn head<'a>(
    metadata: impl ExactSizeIterator<Item = (&'a str, &'a Value)>,
    tensors: &[TensorEntry<'_>],
) -> Vec<u8> {
    let mut head = Vec::new();
    head.extend(MAGIC);
    head.extend(3u32.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        write_string(key, &mut head);
        head.extend(value.kind().to_le_bytes());
        value.write(&mut head);
    }
    let mut offset = 0;
    for tensor in tensors {
        write_string(tensor.name, &mut head);
        head.extend((tensor.dims.len() as u32).to_le_bytes());
        for dim in tensor.dims {
            head.extend((*dim as u64).to_le_bytes());
        }
        head.extend(tensor.block.gguf().to_le_bytes());
        head.extend((offset as u64).to_le_bytes());
        offset += aligned(tensor.bytes);
    }
    head.resize(aligned(head.len()), 0);
    head
}

/// Assembles a GGUF file (version 3).
#[derive(Debug, Default)]
pub struct GgufWriter {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<usize>, BlockType, Vec<u8>)>,
}

impl GgufWriter {
    /// Adds a metadata entry.
    pub fn metadata(&mut self, key: &str, value: Value) {
        self.metadata.push((key.to_owned(), value));
    }

    /// Adds a tensor. `dims` is fastest-varying first; `values` are quantised row by row.
    ///
    /// # Errors
    /// When the values do not fill whole blocks.
    pub fn tensor(
        &mut self,
        name: &str,
        dims: &[usize],
        block: BlockType,
        values: &[f32],
    ) -> Result<()> {
        let cols = dims.first().copied().unwrap_or(0);
        let misfit =
            || ModelError::Invalid(format!("{name}: {dims:?} does not fit {}", block.name()));
        let row_bytes = block
            .bytes_for(cols)
            .filter(|b| *b > 0)
            .ok_or_else(misfit)?;
        if dims.iter().product::<usize>() != values.len() {
            return Err(misfit());
        }
        let mut bytes = vec![0u8; values.len() / cols * row_bytes];
        for (bytes, values) in bytes
            .chunks_exact_mut(row_bytes)
            .zip(values.chunks_exact(cols))
        {
            crate::dequantise::quantise_row(block, values, bytes);
        }
        self.tensors
            .push((name.to_owned(), dims.to_vec(), block, bytes));
        Ok(())
    }

    /// Writes the file: header, tables, aligned data.
    ///
    /// # Errors
    /// When writing fails.
    pub fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let metadata = self
            .metadata
            .iter()
            .map(|(key, value)| (key.as_str(), value));
        let entries: Vec<TensorEntry<'_>> = self
            .tensors
            .iter()
            .map(|(name, dims, block, bytes)| TensorEntry {
                name,
                dims,
                block: *block,
                bytes: bytes.len(),
            })
            .collect();
        let head = head(metadata, &entries);
        out.write_all(&head)?;
        for (_, _, _, bytes) in &self.tensors {
            out.write_all(bytes)?;
            out.write_all(&vec![0u8; aligned(bytes.len()) - bytes.len()])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{GgufWriter, Value, parse, rope_permutation};
    use crate::weights::BlockType;

    fn sample() -> Vec<u8> {
        let mut writer = GgufWriter::default();
        writer.metadata("general.architecture", Value::String("llama".into()));
        writer.metadata("list", Value::Array(vec![Value::U32(1), Value::U32(2)]));
        writer
            .tensor("a", &[32, 2], BlockType::Q4_0, &[0.5; 64])
            .expect("fits");
        writer
            .tensor("b", &[3], BlockType::F32, &[1.0, 2.0, 3.0])
            .expect("fits");
        let mut bytes = Vec::new();
        writer.write(&mut bytes).expect("writes");
        bytes
    }

    #[test]
    fn what_is_written_is_read() {
        let (metadata, tensors) = parse(&sample()).expect("parses");
        assert_eq!(metadata["general.architecture"].as_str(), Some("llama"));
        assert_eq!(metadata["list"].as_array().map(<[_]>::len), Some(2));
        assert_eq!(tensors["a"].dims, [32, 2]);
        assert_eq!(tensors["b"].block, BlockType::F32);
    }

    #[test]
    fn every_truncation_is_an_error() {
        let bytes = sample();
        // The last tensor's padding may be missing; its data may not.
        for len in 0..bytes.len() - 32 {
            assert!(
                parse(&bytes[..len]).is_err(),
                "{len} of {} bytes parsed",
                bytes.len()
            );
        }
    }

    #[test]
    fn the_rope_permutation_is_a_permutation() {
        let mut p = rope_permutation(3, 8);
        assert_eq!(&p[..8], [0, 2, 4, 6, 1, 3, 5, 7]);
        p.sort_unstable();
        assert_eq!(p, (0..24).collect::<Vec<u32>>());
    }

    proptest! {
        #[test]
        fn mutated_files_never_panic(at in 0usize..400, value: u8, at2 in 0usize..400, value2: u8) {
            let mut bytes = sample();
            let n = bytes.len();
            bytes[at % n] = value;
            bytes[at2 % n] = value2;
            let _ = parse(&bytes);
        }

        #[test]
        fn random_bytes_never_panic(tail in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut bytes = b"GGUF\x03\0\0\0".to_vec();
            bytes.extend(tail);
            let _ = parse(&bytes);
        }
    }
}
