//! The base with an adapter merged into its weights: W + α / r · B A, row by row.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value as Json, json};

use super::card::MERGED_FILE;
use super::{Progress, Source};
use crate::adapter_file::write_atomically;
use crate::config::{Config, RopeScaling};
use crate::dequantise::{axpy, quantise_row, row_to_f32};
use crate::error::{ModelError, Result};
use crate::folder::ModelFolder;
use crate::gguf::{Gguf, GgufModel, TensorEntry, Value, aligned, gguf_name, head};
use crate::lora::Target;
use crate::weights::{BlockType, WeightSource, WeightView};

/// Rows between two looks at whether to go on.
const ROWS: usize = 64;
/// Files of a base folder that go along with merged weights, where they are there.
const COMPANIONS: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
];

/// What an adapter adds to one weight.
struct Delta {
    a: Vec<f32>,
    b: Vec<f32>,
    rank: usize,
    scale: f32,
}

impl Delta {
    /// `None` where the adapter changes nothing.
    fn of(source: Source<'_>, name: &str) -> Result<Option<Self>> {
        let Some((layer, target)) = linear(name) else {
            return Ok(None);
        };
        let Some(pair) = source.adapter.pair(layer, target) else {
            return Ok(None);
        };
        let config = source.adapter.config();
        let delta = Self {
            a: pair.a.flatten_all()?.to_vec1()?,
            b: pair.b.flatten_all()?.to_vec1()?,
            rank: config.rank,
            scale: config.scale(),
        };
        Ok(delta.b.iter().any(|b| *b != 0.0).then_some(delta))
    }

    /// Adds its row to a row of the weight.
    fn add(&self, row: usize, out: &mut [f32]) {
        let cols = out.len();
        for k in 0..self.rank {
            let b = self.scale * self.b[row * self.rank + k];
            axpy(b, &self.a[k * cols..(k + 1) * cols], out);
        }
    }
}

/// Layer and target of a Hugging Face weight name.
fn linear(name: &str) -> Option<(usize, Target)> {
    let (layer, path) = name
        .strip_prefix("model.layers.")?
        .strip_suffix(".weight")?
        .split_once('.')?;
    let target = Target::ALL.into_iter().find(|t| t.path() == path)?;
    Some((layer.parse().ok()?, target))
}

/// Every Hugging Face name that a model of this architecture may have.
fn names(config: &Config) -> Vec<String> {
    let mut names = vec!["model.embed_tokens.weight".to_owned()];
    for layer in 0..config.layers {
        let mut add = |rest: &str| names.push(format!("model.layers.{layer}.{rest}"));
        add("input_layernorm.weight");
        add("post_attention_layernorm.weight");
        add("self_attn.q_norm.weight");
        add("self_attn.k_norm.weight");
        for target in Target::ALL {
            add(&format!("{}.weight", target.path()));
            add(&format!("{}.bias", target.path()));
        }
    }
    names.push("model.norm.weight".to_owned());
    names.push("lm_head.weight".to_owned());
    names
}

/// A file that is written while a person may change their mind.
struct Output<'a, 'p> {
    path: &'a Path,
    file: BufWriter<File>,
    done: u64,
    total: u64,
    progress: &'a mut Progress<'p>,
}

impl<'a, 'p> Output<'a, 'p> {
    fn create(path: &'a Path, total: u64, progress: &'a mut Progress<'p>) -> Result<Self> {
        let file = File::create(path).map_err(|e| ModelError::io(path, e))?;
        Ok(Self {
            path,
            file: BufWriter::with_capacity(1 << 20, file),
            done: 0,
            total: total.max(1),
            progress,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file
            .write_all(bytes)
            .map_err(|e| ModelError::io(self.path, e))?;
        self.done += bytes.len() as u64;
        // The last hundredth is the flush and the rename.
        let share = (self.done as f64 / self.total as f64).min(1.0) * 0.99;
        if (self.progress)(share) {
            Ok(())
        } else {
            Err(ModelError::Cancelled)
        }
    }

    fn finish(self) -> Result<()> {
        let io = |e| ModelError::io(self.path, e);
        let file = self.file.into_inner().map_err(|e| io(e.into_error()))?;
        file.sync_all().map_err(io)
    }
}

/// Writes a GGUF file with the base's metadata and block types. Answers what a reader of
/// the model card should know.
pub(super) fn gguf(
    source: Source<'_>,
    dir: &Path,
    progress: &mut Progress<'_>,
) -> Result<Vec<String>> {
    if source.base_path.is_dir() {
        return Err(ModelError::Invalid(
            "the base is a Hugging Face folder, which has no GGUF block types; export merged-safetensors and convert that, or gguf-lora".into(),
        ));
    }
    let base = GgufModel::new(Gguf::open(source.base_path)?)?;
    let mut metadata = base.file.metadata().clone();
    // The file is written with the default alignment, and it is not what was calibrated.
    metadata.retain(|key, _| key != "general.alignment" && !key.starts_with("quantize.imatrix."));
    let name = format!("{} {}", source.base.name, source.name);
    metadata.insert("general.name".into(), Value::String(name));

    let tensors = base.file.tensors();
    let hf: std::collections::BTreeMap<String, String> = names(base.config())
        .into_iter()
        .filter_map(|hf| Some((gguf_name(&hf)?, hf)))
        .collect();
    let entries: Vec<TensorEntry<'_>> = tensors
        .iter()
        .map(|(name, info)| TensorEntry {
            name,
            dims: &info.dims,
            block: info.block,
            bytes: info.bytes(),
        })
        .collect();
    let head = head(
        metadata
            .iter()
            .map(|(k, v)| (k.as_str(), v))
            .collect::<Vec<_>>()
            .into_iter(),
        &entries,
    );
    let total = head.len() + entries.iter().map(|e| aligned(e.bytes)).sum::<usize>();
    let path = dir.join(MERGED_FILE);
    let mut out = Output::create(&path, total as u64, progress)?;
    out.write(&head)?;
    let (mut change, mut error) = (0f64, 0f64);
    for entry in &entries {
        let stored = base
            .file
            .view(entry.name)
            .ok_or_else(|| ModelError::MissingTensor(entry.name.to_owned()))?;
        let delta = match hf.get(entry.name) {
            Some(name) => Delta::of(source, name)?.zip(base.tensor(name)?),
            None => None,
        };
        if let Some((delta, view)) = delta {
            let logical = logical_rows(&view);
            let row_bytes = view.row_bytes();
            let (mut row, mut back) = (vec![0f32; view.cols], vec![0f32; view.cols]);
            let mut bytes = Vec::with_capacity(ROWS * row_bytes);
            for chunk in logical.chunks(ROWS) {
                bytes.resize(chunk.len() * row_bytes, 0);
                for (at, bytes) in chunk.iter().zip(bytes.chunks_exact_mut(row_bytes)) {
                    row_to_f32(view.block, view.row(*at), &mut row);
                    back.copy_from_slice(&row);
                    delta.add(*at, &mut row);
                    change += squared_distance(&row, &back);
                    quantise_row(view.block, &row, bytes);
                    row_to_f32(view.block, bytes, &mut back);
                    error += squared_distance(&row, &back);
                }
                out.write(&bytes)?;
            }
        } else {
            for chunk in stored.bytes.as_ref().chunks(1 << 20) {
                out.write(chunk)?;
            }
        }
        out.write(&vec![0u8; aligned(entry.bytes) - entry.bytes])?;
    }
    out.finish()?;
    if change == 0.0 || error == 0.0 {
        return Ok(Vec::new());
    }
    Ok(vec![format!(
        "Requantising to the base's block types moves the merged weights by {:.2} times as much as the adapter does (root mean square). Where this is much above one, the adapter beside the base (`gguf-lora`, `ollama`) is the exact form.",
        (error / change).sqrt()
    )])
}

fn squared_distance(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| f64::from(a - b) * f64::from(a - b))
        .sum()
}

/// The logical row of every stored row.
fn logical_rows(view: &WeightView) -> Vec<usize> {
    let mut logical: Vec<usize> = (0..view.rows).collect();
    if let Some(permutation) = &view.permutation {
        for (row, stored) in permutation.iter().enumerate() {
            logical[*stored as usize] = row;
        }
    }
    logical
}

/// Writes a Hugging Face folder in the base's dtype; a quantised base becomes F16, in
/// which its block scales are stored.
pub(super) fn safetensors(
    source: Source<'_>,
    dir: &Path,
    progress: &mut Progress<'_>,
) -> Result<()> {
    let from_folder = source.base_path.is_dir();
    let base: Box<dyn WeightSource> = if from_folder {
        Box::new(ModelFolder::open(source.base_path)?)
    } else {
        Box::new(GgufModel::new(Gguf::open(source.base_path)?)?)
    };
    let config = source.base.model.config();
    let (block, dtype, torch) = match source.base.quantisation.as_str() {
        "F32" => (BlockType::F32, "F32", "float32"),
        "BF16" => (BlockType::BF16, "BF16", "bfloat16"),
        _ => (BlockType::F16, "F16", "float16"),
    };
    let mut tensors = Vec::new();
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut offset = 0;
    for name in names(config) {
        let Some(view) = base.tensor(&name)? else {
            continue;
        };
        let shape = if view.rows == 1 {
            vec![view.cols]
        } else {
            vec![view.rows, view.cols]
        };
        let bytes = view.rows * view.cols * block.block_bytes();
        let entry =
            json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + bytes]});
        header.insert(name.clone(), entry);
        offset += bytes;
        tensors.push((name, view));
    }
    let mut header = Json::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let path = dir.join("model.safetensors");
    let total = (8 + header.len() + offset) as u64;
    let mut out = Output::create(&path, total, progress)?;
    out.write(&(header.len() as u64).to_le_bytes())?;
    out.write(&header)?;
    for (name, view) in &tensors {
        let delta = Delta::of(source, name)?;
        let row_bytes = view.cols * block.block_bytes();
        let mut row = vec![0f32; view.cols];
        let mut bytes = Vec::with_capacity(ROWS * row_bytes);
        for first in (0..view.rows).step_by(ROWS) {
            let rows = first..(first + ROWS).min(view.rows);
            bytes.resize(rows.len() * row_bytes, 0);
            for (at, bytes) in rows.zip(bytes.chunks_exact_mut(row_bytes)) {
                row_to_f32(view.block, view.row(at), &mut row);
                if let Some(delta) = &delta {
                    delta.add(at, &mut row);
                }
                if block == BlockType::F16 && row.iter().any(|v| v.abs() > 65_504.0) {
                    return Err(ModelError::Invalid(format!(
                        "{name} holds values that do not fit into F16"
                    )));
                }
                quantise_row(block, &row, bytes);
            }
            out.write(&bytes)?;
        }
    }
    out.finish()?;
    if from_folder {
        for name in COMPANIONS {
            let from = source.base_path.join(name);
            if from.is_file() {
                let bytes = std::fs::read(&from).map_err(|e| ModelError::io(&from, e))?;
                write_atomically(&dir.join(name), &bytes)?;
            }
        }
        return Ok(());
    }
    let has = |name: &str| tensors.iter().any(|(n, _)| n == name);
    let file = Gguf::open(source.base_path)?;
    let ids = |key: &str| file.metadata().get(key).and_then(Value::as_u64);
    let json_file = |name: &str, json: &Json| {
        let text =
            serde_json::to_vec_pretty(json).map_err(|e| ModelError::Invalid(e.to_string()))?;
        write_atomically(&dir.join(name), &text)
    };
    let bos = ids("tokenizer.ggml.bos_token_id");
    let eos = ids("tokenizer.ggml.eos_token_id");
    let pad = ids("tokenizer.ggml.padding_token_id").or(eos);
    let mut json = hf_config(config, torch, has("lm_head.weight"), |part| {
        has(&format!("model.layers.0.{part}.bias"))
    });
    json["bos_token_id"] = json!(bos);
    json["eos_token_id"] = json!(eos);
    json_file("config.json", &json)?;
    let generation = json!({
        "bos_token_id": bos,
        "eos_token_id": source.base.tokenizer.end_of_turn(),
        "pad_token_id": pad,
    });
    json_file("generation_config.json", &generation)?;
    tokenizer_files(source, [bos, eos, pad], &json_file)
}

/// `config.json` of the transformers library.
fn hf_config(
    config: &Config,
    torch: &str,
    own_head: bool,
    has_bias: impl Fn(&str) -> bool,
) -> Json {
    let class = match config.architecture.as_str() {
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        _ => "LlamaForCausalLM",
    };
    let scaling = match config.rope_scaling {
        RopeScaling::None => Json::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_context,
        }),
    };
    json!({
        "architectures": [class],
        "model_type": config.architecture,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": has_bias("self_attn.q_proj"),
        "mlp_bias": has_bias("mlp.up_proj"),
        "tie_word_embeddings": !own_head,
        "use_cache": true,
        "torch_dtype": torch,
    })
}

/// `tokenizer.json`, `tokenizer_config.json` and the chat template.
fn tokenizer_files(
    source: Source<'_>,
    [bos, eos, pad]: [Option<u64>; 3],
    json_file: &dyn Fn(&str, &Json) -> Result<()>,
) -> Result<()> {
    let tokenizer = &source.base.tokenizer;
    let text = |id: Option<u64>| {
        let id = u32::try_from(id?).ok()?;
        Some(String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned())
    };
    let mut json: Json = serde_json::from_str(&tokenizer.to_json()?)
        .map_err(|e| ModelError::Tokenizer(e.to_string()))?;
    if let (Some(id), Some(token)) = (tokenizer.bos(), text(bos)) {
        // Prompts begin with this token by themselves.
        let begin = json!({"SpecialToken": {"id": token, "type_id": 0}});
        let sequence = |id: &str, kind: u32| json!({"Sequence": {"id": id, "type_id": kind}});
        json["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [begin, sequence("A", 0)],
            "pair": [begin, sequence("A", 0), sequence("B", 1)],
            "special_tokens": {token.as_str(): {"id": token, "ids": [id], "tokens": [token]}},
        });
    }
    json_file("tokenizer.json", &json)?;
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text(bos),
        "eos_token": text(eos),
        "pad_token": text(pad),
        "model_max_length": source.base.model.config().context,
        "clean_up_tokenization_spaces": false,
        "chat_template": source.base.template.source(),
    });
    json_file("tokenizer_config.json", &config)
}
