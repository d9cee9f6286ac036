//! Adapters on disk, in PEFT's layout: `adapter_config.json` and
//! `adapter_model.safetensors` in one directory.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use candle_core::{Device, Tensor};
use serde_json::{Value, json};

use crate::config::Config;
use crate::error::{ModelError, Result};
use crate::lora::{LoraAdapter, LoraConfig, Target};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Largest configuration file that is read.
const MAX_CONFIG: u64 = 1 << 20;

/// Writes bytes so that a reader sees either the old file or the whole new one:
/// temporary file, fsync, rename.
///
/// # Errors
/// When writing fails; the old file is then untouched.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = path.with_extension("partial");
    let write = || -> std::io::Result<()> {
        let mut file = std::fs::File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        if let Some(parent) = path.parent() {
            std::fs::File::open(parent)?.sync_all()?;
        }
        Ok(())
    };
    write().map_err(|e| {
        let _ = std::fs::remove_file(&temporary);
        ModelError::io(path, e)
    })
}

/// Writes a PEFT directory. It appears whole or not at all. `card` becomes its README.md.
///
/// # Errors
/// When the directory exists already or writing fails; nothing is left behind then.
pub fn save_peft(
    adapter: &LoraAdapter,
    base_model: &str,
    dir: &Path,
    card: Option<&str>,
) -> Result<()> {
    if dir.exists() {
        return Err(ModelError::Invalid(format!(
            "{} exists already; nothing was written, choose another directory",
            dir.display()
        )));
    }
    let parent = dir
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(|e| ModelError::io(parent, e))?;
    let mut name = dir.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let temporary = parent.join(name);
    let _ = std::fs::remove_dir_all(&temporary);
    let write = || -> Result<()> {
        std::fs::create_dir(&temporary).map_err(|e| ModelError::io(&temporary, e))?;
        let config = serde_json::to_vec_pretty(&peft_config(adapter.config(), base_model))
            .map_err(|e| ModelError::Invalid(e.to_string()))?;
        write_atomically(&temporary.join(CONFIG), &config)?;
        write_atomically(
            &temporary.join(WEIGHTS),
            &to_safetensors(&adapter.to_tensors()?)?,
        )?;
        if let Some(card) = card {
            write_atomically(&temporary.join("README.md"), card.as_bytes())?;
        }
        std::fs::rename(&temporary, dir).map_err(|e| ModelError::io(dir, e))
    };
    write().inspect_err(|_| {
        let _ = std::fs::remove_dir_all(&temporary);
    })
}

/// The bytes of a safetensors file with these f32 tensors.
///
/// # Errors
/// When a tensor is not f32.
pub fn to_safetensors(tensors: &BTreeMap<String, Tensor>) -> Result<Vec<u8>> {
    let mut raw = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let values = tensor.flatten_all()?.to_vec1::<f32>()?;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        raw.push((name, tensor.dims().to_vec(), bytes));
    }
    let mut views = Vec::with_capacity(raw.len());
    for (name, shape, bytes) in &raw {
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes)
                .map_err(|e| ModelError::Invalid(e.to_string()))?;
        views.push((name.as_str(), view));
    }
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(views, Some(metadata)).map_err(|e| ModelError::Invalid(e.to_string()))
}

/// Reads a safetensors file of f32, f16 or bf16 tensors into memory.
///
/// # Errors
/// When the file is missing, malformed or of another dtype.
pub fn read_safetensors(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let bytes = std::fs::read(path).map_err(|e| ModelError::io(path, e))?;
    let file = safetensors::SafeTensors::deserialize(&bytes)
        .map_err(|e| ModelError::bad(path, e.to_string()))?;
    let mut tensors = BTreeMap::new();
    for (name, view) in file.tensors() {
        let data = view.data();
        let values: Vec<f32> = match view.dtype() {
            safetensors::Dtype::F32 => data
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            safetensors::Dtype::F16 => data
                .chunks_exact(2)
                .map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            safetensors::Dtype::BF16 => data
                .chunks_exact(2)
                .map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            other => {
                return Err(ModelError::bad(
                    path,
                    format!("tensor '{name}' is {other:?}"),
                ));
            }
        };
        tensors.insert(name, Tensor::from_vec(values, view.shape(), &Device::Cpu)?);
    }
    Ok(tensors)
}

fn peft_config(config: &LoraConfig, base_model: &str) -> Value {
    let targets: Vec<&str> = config.targets.iter().map(|t| t.name()).collect();
    json!({
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    })
}

/// What an adapter directory says about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct PeftFacts {
    /// Rank, scale and targets.
    pub config: LoraConfig,
    /// The base model it names.
    pub base_model: String,
}

/// Reads a PEFT directory's configuration.
///
/// # Errors
/// When it is missing, not LoRA, or uses something that changes the computation and is
/// not supported (DoRA, rsLoRA, biases, per-layer ranks).
pub fn read_peft_config(dir: &Path) -> Result<PeftFacts> {
    let path = dir.join(CONFIG);
    let size = std::fs::metadata(&path)
        .map_err(|e| ModelError::io(&path, e))?
        .len();
    if size > MAX_CONFIG {
        return Err(ModelError::bad(&path, format!("it is {size} bytes long")));
    }
    let text = std::fs::read_to_string(&path).map_err(|e| ModelError::io(&path, e))?;
    let json: Value =
        serde_json::from_str(&text).map_err(|e| ModelError::bad(&path, e.to_string()))?;
    let bad = |reason: String| ModelError::bad(&path, reason);
    if json["peft_type"] != "LORA" {
        return Err(bad(format!("it is {}, not LORA", json["peft_type"])));
    }
    for key in ["use_dora", "use_rslora", "fan_in_fan_out"] {
        if json[key] == Value::Bool(true) {
            return Err(bad(format!("it uses {key}, which is not supported")));
        }
    }
    if json["bias"].as_str().is_some_and(|b| b != "none") {
        return Err(bad("it trains biases, which is not supported".into()));
    }
    for key in ["rank_pattern", "alpha_pattern"] {
        if json[key].as_object().is_some_and(|m| !m.is_empty()) {
            return Err(bad(format!("it has a {key}, which is not supported")));
        }
    }
    let rank = json["r"]
        .as_u64()
        .filter(|r| (1..=1024).contains(r))
        .ok_or_else(|| bad(format!("rank {} is not usable", json["r"])))?;
    let alpha = json["lora_alpha"]
        .as_f64()
        .filter(|a| a.is_finite() && *a > 0.0)
        .ok_or_else(|| bad(format!("lora_alpha {} is not usable", json["lora_alpha"])))?;
    let mut targets = Vec::new();
    for name in json["target_modules"]
        .as_array()
        .ok_or_else(|| bad("it names no target modules".into()))?
    {
        let name = name.as_str().unwrap_or_default();
        targets.push(
            Target::from_name(name)
                .ok_or_else(|| bad(format!("target module '{name}' is not known")))?,
        );
    }
    targets.sort_unstable();
    targets.dedup();
    Ok(PeftFacts {
        config: LoraConfig {
            rank: rank as usize,
            alpha,
            targets,
        },
        base_model: json["base_model_name_or_path"]
            .as_str()
            .unwrap_or_default()
            .to_owned(),
    })
}

/// Reads a PEFT directory for this base.
///
/// # Errors
/// When a file is missing or malformed, or rank, target modules or shapes do not fit.
pub fn load_peft(dir: &Path, model: &Config) -> Result<LoraAdapter> {
    let facts = read_peft_config(dir)?;
    let path = dir.join(WEIGHTS);
    let tensors = read_safetensors(&path)?;
    LoraAdapter::from_tensors(model, facts.config, &tensors)
        .map_err(|e| ModelError::bad(&path, e.to_string()))
}
