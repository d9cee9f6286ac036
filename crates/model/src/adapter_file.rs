//! Adapters on disk: PEFT's layout (`adapter_config.json` and
//! `adapter_model.safetensors` in one directory), and llama.cpp's GGUF LoRA file.
//!
//! Spotter keeps its own adapters in PEFT's layout. Files from elsewhere are checked
//! before anything of them is used.

mod gguf;
mod names;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use serde_json::{Map, Value, json};
use spotter_core::worker::partial_directory;

use crate::config::Config;
use crate::error::{ModelError, Result};
use crate::lora::{LoraAdapter, LoraConfig, Target};

pub use gguf::{gguf_lora, load_gguf};
pub use names::same_base;

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

/// A directory that appears whole or not at all: it is filled under another name beside
/// its own, and renamed when it is complete. Dropping it before that removes it.
#[derive(Debug)]
pub struct Staged {
    temporary: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl Staged {
    /// Begins a directory.
    ///
    /// # Errors
    /// When it exists already, or its parent cannot be made.
    pub fn new(target: &Path) -> Result<Self> {
        if target.exists() {
            return Err(ModelError::Invalid(format!(
                "{} exists already; nothing was written, choose another directory",
                target.display()
            )));
        }
        let temporary = partial_directory(target);
        if let Some(parent) = target.parent().filter(|p| !p.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent).map_err(|e| ModelError::io(parent, e))?;
        }
        // What a process that was killed has left.
        let _ = std::fs::remove_dir_all(&temporary);
        std::fs::create_dir(&temporary).map_err(|e| ModelError::io(&temporary, e))?;
        Ok(Self {
            temporary,
            target: target.to_owned(),
            committed: false,
        })
    }

    /// Where its files are written.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Gives the directory its name; answers the bytes of its files.
    ///
    /// # Errors
    /// When it cannot be renamed; nothing is left behind then.
    pub fn commit(mut self) -> Result<u64> {
        let io = |e| ModelError::io(&self.target, e);
        let mut bytes = 0;
        for entry in std::fs::read_dir(&self.temporary).map_err(io)? {
            bytes += entry.and_then(|e| e.metadata()).map_err(io)?.len();
        }
        let sync = |directory: &Path| std::fs::File::open(directory).and_then(|d| d.sync_all());
        sync(&self.temporary).map_err(io)?;
        std::fs::rename(&self.temporary, &self.target).map_err(io)?;
        if let Some(parent) = self.target.parent().filter(|p| !p.as_os_str().is_empty()) {
            sync(parent).map_err(io)?;
        }
        self.committed = true;
        Ok(bytes)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.committed {
            let _ = std::fs::remove_dir_all(&self.temporary);
        }
    }
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
    let staged = Staged::new(dir)?;
    write_peft(adapter, base_model, staged.path())?;
    if let Some(card) = card {
        write_atomically(&staged.path().join("README.md"), card.as_bytes())?;
    }
    staged.commit().map(|_| ())
}

/// Writes PEFT's two files into a directory that exists.
pub(crate) fn write_peft(adapter: &LoraAdapter, base_model: &str, dir: &Path) -> Result<()> {
    let config = serde_json::to_vec_pretty(&peft_config(adapter.config(), base_model))
        .map_err(|e| ModelError::Invalid(e.to_string()))?;
    write_atomically(&dir.join(CONFIG), &config)?;
    write_atomically(&dir.join(WEIGHTS), &to_safetensors(&adapter.to_tensors()?)?)
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
                    format!(
                        "tensor '{name}' is stored as {other:?}; F32, F16 and BF16 can be read"
                    ),
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

/// Keys of a PEFT configuration that change what is computed, and what they stand for.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("use_dora", "DoRA's magnitudes"),
    ("use_qalora", "QALoRA's grouping"),
    ("fan_in_fan_out", "transposed weights"),
    ("lora_bias", "a bias on B"),
    ("modules_to_save", "whole modules saved beside the adapter"),
    ("trainable_token_indices", "trained token embeddings"),
    ("target_parameters", "bare parameters"),
    ("rank_pattern", "a rank per module"),
    ("alpha_pattern", "an alpha per module"),
    ("layers_to_transform", "some layers only"),
    ("layer_replication", "repeated layers"),
    ("alora_invocation_tokens", "activation by a phrase"),
];

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
/// not supported (DoRA, biases, per-layer ranks, whole modules saved beside it).
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
    for (key, what) in UNSUPPORTED {
        let value = &json[*key];
        let unset = value.is_null()
            || *value == Value::Bool(false)
            || value.as_object().is_some_and(Map::is_empty)
            || value.as_array().is_some_and(Vec::is_empty);
        if !unset {
            return Err(bad(format!(
                "it uses {key} ({what}), which is not supported"
            )));
        }
    }
    if json["bias"].as_str().is_some_and(|b| b != "none") {
        return Err(bad("it trains biases, which is not supported".into()));
    }
    if let Some(init) = json["init_lora_weights"].as_str()
        && ["pissa", "olora", "corda", "loftq"]
            .iter()
            .any(|changes_base| init.starts_with(changes_base))
    {
        return Err(bad(format!(
            "its initialisation '{init}' changed the base's own weights; convert it to a plain LoRA first"
        )));
    }
    let rank = json["r"]
        .as_u64()
        .filter(|r| (1..=1024).contains(r))
        .ok_or_else(|| bad(format!("rank {} is not usable", json["r"])))?;
    let alpha = json["lora_alpha"]
        .as_f64()
        .filter(|a| a.is_finite() && *a > 0.0)
        .ok_or_else(|| bad(format!("lora_alpha {} is not usable", json["lora_alpha"])))?;
    // rsLoRA divides by the root of the rank; the same scale is written as a plain alpha.
    let alpha = if json["use_rslora"] == Value::Bool(true) {
        alpha * (rank as f64).sqrt()
    } else {
        alpha
    };
    let mut targets = Vec::new();
    match &json["target_modules"] {
        Value::Array(names) => {
            for name in names {
                let path = name.as_str().unwrap_or_default();
                let name = path.rsplit('.').next().unwrap_or_default();
                targets.push(Target::from_name(name).ok_or_else(|| {
                    bad(format!(
                        "target module '{path}' is not known; these are: {}",
                        Target::ALL.map(Target::name).join(", ")
                    ))
                })?);
            }
            targets.sort_unstable();
            targets.dedup();
        }
        // A pattern: the tensors say which modules it met.
        Value::String(_) => {}
        _ => return Err(bad("it names no target modules".into())),
    }
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
    if !path.exists() && dir.join("adapter_model.bin").exists() {
        return Err(ModelError::bad(
            dir,
            "its weights are a Python pickle (adapter_model.bin), which can run code; save it again as safetensors",
        ));
    }
    let mut tensors = BTreeMap::new();
    let mut targets = Vec::new();
    for (name, tensor) in read_safetensors(&path)? {
        let target = target_of(&name).ok_or_else(|| {
            ModelError::bad(
                &path,
                format!("tensor '{name}' is not a LoRA matrix of a layer's linear"),
            )
        })?;
        targets.push(target);
        tensors.insert(name, tensor);
    }
    targets.sort_unstable();
    targets.dedup();
    let config = LoraConfig {
        targets,
        ..facts.config
    };
    assemble(&path, model, config, &tensors)
}

/// The target that a PEFT tensor name belongs to.
fn target_of(name: &str) -> Option<Target> {
    let module = name
        .strip_prefix("base_model.model.model.layers.")?
        .strip_suffix(".weight")?;
    let module = module
        .strip_suffix(".lora_A")
        .or_else(|| module.strip_suffix(".lora_B"))?;
    let (layer, path) = module.split_once('.')?;
    layer.parse::<usize>().ok()?;
    Target::ALL.into_iter().find(|t| t.path() == path)
}

/// Checks rank, targets and shapes against the base.
fn assemble(
    path: &Path,
    model: &Config,
    config: LoraConfig,
    tensors: &BTreeMap<String, Tensor>,
) -> Result<LoraAdapter> {
    LoraAdapter::from_tensors(model, config, tensors).map_err(|e| {
        let reason = match e {
            ModelError::MissingTensor(name) => {
                format!("it has no tensor '{name}'; every layer of this base must be covered alike")
            }
            other => other.to_string(),
        };
        ModelError::bad(path, reason)
    })
}

/// An adapter made elsewhere.
#[derive(Debug)]
pub struct Foreign {
    /// The adapter; it fits the base by shape.
    pub adapter: LoraAdapter,
    /// The base model it names.
    pub base_model: Option<String>,
    /// `PEFT` or `GGUF`.
    pub form: &'static str,
}

/// Reads a PEFT directory or a GGUF LoRA file that was made elsewhere, for this base.
///
/// # Errors
/// When it is malformed, of another architecture, does not fit by rank, target modules
/// or shapes, or holds numbers that are not finite.
pub fn load_foreign(path: &Path, model: &Config) -> Result<Foreign> {
    let foreign = if path.is_dir() {
        let base = read_peft_config(path)?.base_model;
        Foreign {
            adapter: load_peft(path, model)?,
            base_model: Some(base).filter(|b| !b.is_empty()),
            form: "PEFT",
        }
    } else {
        let (adapter, base_model) = load_gguf(path, model)?;
        Foreign {
            adapter,
            base_model,
            form: "GGUF",
        }
    };
    for (name, tensor) in foreign.adapter.to_tensors()? {
        let values = tensor.flatten_all()?.to_vec1::<f32>()?;
        if !values.iter().all(|v| v.is_finite()) {
            return Err(ModelError::bad(
                path,
                format!("tensor '{name}' holds numbers that are not finite"),
            ));
        }
    }
    Ok(foreign)
}
