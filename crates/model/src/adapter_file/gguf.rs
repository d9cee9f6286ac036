//! LoRA adapters as one GGUF file, as llama.cpp reads and its `convert_lora_to_gguf.py`
//! writes them: two tensors per linear, `blk.N.attn_q.weight.lora_a` and `.lora_b`.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};

use super::assemble;
use crate::config::Config;
use crate::error::{ModelError, Result};
use crate::gguf::{Gguf, GgufWriter, Value, gguf_name, rope_permutation};
use crate::lora::{LoraAdapter, LoraConfig, Target, tensor_name};
use crate::weights::BlockType;

/// Largest rank that is read.
const MAX_RANK: usize = 1024;

/// GGUF's name of the linear that an adapter changes.
fn weight_name(layer: usize, target: Target) -> Option<String> {
    gguf_name(&format!("model.layers.{layer}.{}.weight", target.path()))
}

/// `permutation[i]` is the stored row of logical row `i`, where the file's order of a
/// linear's output rows differs from Hugging Face's.
fn output_order(target: Target, model: &Config) -> Option<Vec<u32>> {
    let heads = match target {
        Target::Q => model.heads,
        Target::K => model.kv_heads,
        _ => return None,
    };
    // Only the llama conversion permutes rows.
    (model.architecture == "llama").then(|| rope_permutation(heads, model.head_dim))
}

/// An adapter as the content of a GGUF file, in f32.
///
/// # Errors
/// When the adapter does not fit the architecture.
pub fn gguf_lora(
    adapter: &LoraAdapter,
    model: &Config,
    name: &str,
    base_model: &str,
) -> Result<GgufWriter> {
    let mut writer = GgufWriter::default();
    let text = |value: &str| Value::String(value.to_owned());
    writer.metadata("general.architecture", text(&model.architecture));
    writer.metadata("general.type", text("adapter"));
    writer.metadata("general.name", text(name));
    writer.metadata("general.base_model.count", Value::U32(1));
    writer.metadata("general.base_model.0.name", text(base_model));
    writer.metadata("general.file_type", Value::U32(0));
    writer.metadata("general.quantization_version", Value::U32(2));
    writer.metadata("adapter.type", text("lora"));
    writer.metadata(
        "adapter.lora.alpha",
        Value::F32(adapter.config().alpha as f32),
    );
    let rank = adapter.config().rank;
    for layer in 0..model.layers {
        for target in Target::ALL {
            let Some(pair) = adapter.pair(layer, target) else {
                continue;
            };
            let name = weight_name(layer, target)
                .ok_or_else(|| ModelError::Invalid("a linear has no name in GGUF".into()))?;
            let (out, input) = target.shape(model);
            let a = pair.a.flatten_all()?.to_vec1::<f32>()?;
            let mut b = pair.b.flatten_all()?.to_vec1::<f32>()?;
            if let Some(order) = output_order(target, model) {
                let logical = b.clone();
                for (row, stored) in order.into_iter().enumerate() {
                    let to = stored as usize * rank;
                    b[to..to + rank].copy_from_slice(&logical[row * rank..(row + 1) * rank]);
                }
            }
            let a_name = format!("{name}.lora_a");
            writer.tensor(&a_name, &[input, rank], BlockType::F32, &a)?;
            writer.tensor(&format!("{name}.lora_b"), &[rank, out], BlockType::F32, &b)?;
        }
    }
    Ok(writer)
}

/// Reads a GGUF LoRA file for this base, with the name of the base it was made for.
///
/// # Errors
/// When it is malformed, not a LoRA, of another architecture, or does not fit.
pub fn load_gguf(path: &Path, model: &Config) -> Result<(LoraAdapter, Option<String>)> {
    let file = Gguf::open(path)?;
    let bad = |reason: String| ModelError::bad(path, reason);
    let meta = file.metadata();
    let text = |key: &str| meta.get(key).and_then(Value::as_str);
    if text("general.type") != Some("adapter") {
        return Err(bad("it is a model, not an adapter".into()));
    }
    if text("adapter.type") != Some("lora") {
        return Err(bad(format!(
            "it is an adapter of type '{}', not a LoRA",
            text("adapter.type").unwrap_or("unknown")
        )));
    }
    let architecture = text("general.architecture").unwrap_or("unknown");
    if architecture != model.architecture {
        return Err(bad(format!(
            "it was made for architecture '{architecture}', and this base is '{}'",
            model.architecture
        )));
    }
    if meta
        .get("adapter.alora.invocation_tokens")
        .is_some_and(|v| v.as_array().is_some_and(|a| !a.is_empty()))
    {
        return Err(bad(
            "it is activated by a phrase, which is not supported".into()
        ));
    }
    let mut tensors = BTreeMap::new();
    let mut targets = Vec::new();
    let mut ranks = Vec::new();
    let mut known = 0;
    for layer in 0..model.layers {
        for target in Target::ALL {
            let Some(name) = weight_name(layer, target) else {
                continue;
            };
            let a = file.view(&format!("{name}.lora_a"));
            let b = file.view(&format!("{name}.lora_b"));
            let (a, b) = match (a, b) {
                (Some(a), Some(b)) => (a, b),
                (None, None) => continue,
                _ => return Err(bad(format!("'{name}' has only one of its two matrices"))),
            };
            known += 2;
            let rank = a.rows;
            if rank == 0 || rank > MAX_RANK {
                return Err(bad(format!("rank {rank} is not usable")));
            }
            ranks.push(rank);
            targets.push(target);
            let a_values = Tensor::from_vec(a.to_f32(), (a.rows, a.cols), &Device::Cpu)?;
            let mut b_values = b.to_f32();
            if let Some(order) = output_order(target, model)
                && order.len() == b.rows
            {
                let stored = b_values.clone();
                for (row, at) in order.into_iter().enumerate() {
                    let from = at as usize * b.cols;
                    b_values[row * b.cols..(row + 1) * b.cols]
                        .copy_from_slice(&stored[from..from + b.cols]);
                }
            }
            let b_values = Tensor::from_vec(b_values, (b.rows, b.cols), &Device::Cpu)?;
            tensors.insert(tensor_name(layer, target, 'A'), a_values);
            tensors.insert(tensor_name(layer, target, 'B'), b_values);
        }
    }
    if known != file.tensors().len() {
        let ours = |name: &str| {
            name.rsplit_once(".lora_").is_some_and(|(weight, _)| {
                (0..model.layers)
                    .flat_map(|l| Target::ALL.map(|t| weight_name(l, t)))
                    .flatten()
                    .any(|known| known == weight)
            })
        };
        let stranger = file.tensors().keys().find(|name| !ours(name));
        return Err(bad(format!(
            "tensor '{}' does not belong to a linear of this base's {} layers",
            stranger.map_or("", String::as_str),
            model.layers
        )));
    }
    let Some(&rank) = ranks.first() else {
        return Err(bad("it holds no LoRA matrices".into()));
    };
    if let Some(other) = ranks.iter().find(|r| **r != rank) {
        return Err(bad(format!(
            "its ranks differ ({rank} and {other}), which is not supported"
        )));
    }
    targets.sort_unstable();
    targets.dedup();
    let alpha = match meta.get("adapter.lora.alpha").and_then(Value::as_f32) {
        // llama.cpp takes a missing or zero alpha as "do not scale".
        None | Some(0.0) => rank as f64,
        Some(alpha) if alpha.is_finite() && alpha > 0.0 => f64::from(alpha),
        Some(alpha) => return Err(bad(format!("alpha {alpha} is not usable"))),
    };
    let config = LoraConfig {
        rank,
        alpha,
        targets,
    };
    let base = text("general.base_model.0.name").map(str::to_owned);
    Ok((assemble(path, model, config, &tensors)?, base))
}
