//! Hugging Face model folders: `config.json`, safetensors weights, `tokenizer.json`.
//!
//! Every number is checked before it is used: a folder from elsewhere is hostile input.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value as Json;

use crate::config::{Config, RopeScaling};
use crate::error::{ModelError, Result};
use crate::weights::{BlockType, Bytes, WeightSource, WeightView, map_file};

/// Largest JSON file that is read.
const MAX_JSON: u64 = 64 << 20;

/// A folder as `save_pretrained` of the transformers library writes it.
#[derive(Debug)]
pub struct ModelFolder {
    config: Config,
    path: PathBuf,
    tensors: BTreeMap<String, Stored>,
    tied: bool,
}

/// Where a tensor lies.
#[derive(Debug)]
struct Stored {
    map: Arc<Mmap>,
    start: usize,
    len: usize,
    shape: Vec<usize>,
    dtype: Dtype,
}

impl ModelFolder {
    /// Reads the configuration and the headers of the weights; weights stay mapped.
    ///
    /// # Errors
    /// When a file is missing or broken, or the architecture is unknown; the message
    /// names the file.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let json = read_json(&path)?;
        let config = config(&json).map_err(|reason| ModelError::bad(&path, reason))?;
        let mut tensors = BTreeMap::new();
        for file in weight_files(folder)? {
            read_header(&file, &mut tensors)?;
        }
        Ok(Self {
            config,
            path: folder.to_owned(),
            tensors,
            tied: json["tie_word_embeddings"] == Json::Bool(true),
        })
    }

    /// The chat template that lies in the folder, if any.
    ///
    /// # Errors
    /// When a file is there but cannot be read.
    pub fn chat_template(&self) -> Result<Option<String>> {
        let jinja = self.path.join("chat_template.jinja");
        if jinja.exists() {
            let text = std::fs::read_to_string(&jinja).map_err(|e| ModelError::io(&jinja, e))?;
            return Ok(Some(text));
        }
        let path = self.path.join("tokenizer_config.json");
        if !path.exists() {
            return Ok(None);
        }
        let template = read_json(&path)?["chat_template"].take();
        Ok(match template {
            Json::String(text) => Some(text),
            // Several named templates: the default one is for chats.
            Json::Array(named) => named
                .iter()
                .find(|t| t["name"] == "default")
                .and_then(|t| t["template"].as_str())
                .map(str::to_owned),
            _ => None,
        })
    }
}

impl WeightSource for ModelFolder {
    fn config(&self) -> &Config {
        &self.config
    }

    fn tensor(&self, name: &str) -> Result<Option<WeightView>> {
        if self.tied && name == "lm_head.weight" {
            return Ok(None);
        }
        let Some(stored) = self.tensors.get(name) else {
            return Ok(None);
        };
        let bad = |reason: String| ModelError::bad(&self.path, reason);
        let block = match stored.dtype {
            Dtype::F32 => BlockType::F32,
            Dtype::F16 => BlockType::F16,
            Dtype::BF16 => BlockType::BF16,
            other => {
                return Err(bad(format!(
                    "tensor '{name}' is of type {other:?}; F32, F16 and BF16 can be read"
                )));
            }
        };
        let (rows, cols) = match stored.shape[..] {
            [cols] => (1, cols),
            [rows, cols] => (rows, cols),
            _ => {
                return Err(bad(format!(
                    "tensor '{name}' has {} dimensions",
                    stored.shape.len()
                )));
            }
        };
        let expected = block
            .bytes_for(cols)
            .and_then(|row| row.checked_mul(rows))
            .filter(|bytes| *bytes == stored.len);
        if expected.is_none() {
            return Err(bad(format!("tensor '{name}' does not fit its shape")));
        }
        Ok(Some(WeightView {
            rows,
            cols,
            block,
            bytes: Bytes::Mapped {
                map: stored.map.clone(),
                start: stored.start,
                len: stored.len,
            },
            permutation: None,
        }))
    }
}

/// The safetensors files of a folder, in order of name.
///
/// # Errors
/// When there are none, or one that the index names is missing.
pub fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let single = folder.join("model.safetensors");
    let index = folder.join("model.safetensors.index.json");
    if !index.exists() {
        if single.exists() {
            return Ok(vec![single]);
        }
        return Err(ModelError::bad(
            folder,
            "it holds no model.safetensors and no model.safetensors.index.json",
        ));
    }
    let json = read_json(&index)?;
    let names: BTreeSet<&str> = json["weight_map"]
        .as_object()
        .ok_or_else(|| ModelError::bad(&index, "it has no 'weight_map'"))?
        .values()
        .filter_map(Json::as_str)
        .collect();
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        let inside = Path::new(name).components().count() == 1 && !name.starts_with('.');
        let file = folder.join(name);
        if !inside || !file.is_file() {
            return Err(ModelError::bad(
                &index,
                format!("it names '{name}', which is not in the folder"),
            ));
        }
        files.push(file);
    }
    Ok(files)
}

fn read_json(path: &Path) -> Result<Json> {
    let size = std::fs::metadata(path)
        .map_err(|e| ModelError::io(path, e))?
        .len();
    if size > MAX_JSON {
        return Err(ModelError::bad(path, "it is too large to be true"));
    }
    let text = std::fs::read(path).map_err(|e| ModelError::io(path, e))?;
    serde_json::from_slice(&text).map_err(|e| ModelError::bad(path, e.to_string()))
}

fn read_header(path: &Path, tensors: &mut BTreeMap<String, Stored>) -> Result<()> {
    let map = Arc::new(map_file(path)?);
    let (header, metadata) =
        SafeTensors::read_metadata(&map).map_err(|e| ModelError::bad(path, e.to_string()))?;
    // Eight bytes of length, then the header, then the data.
    let data = 8 + header;
    for (name, info) in metadata.tensors() {
        let (from, to) = info.data_offsets;
        if to < from || data.checked_add(to).is_none_or(|end| end > map.len()) {
            return Err(ModelError::bad(
                path,
                format!("tensor '{name}' ends after the end of the file"),
            ));
        }
        tensors.insert(
            name.clone(),
            Stored {
                map: map.clone(),
                start: data + from,
                len: to - from,
                shape: info.shape.clone(),
                dtype: info.dtype,
            },
        );
    }
    Ok(())
}

fn config(json: &Json) -> std::result::Result<Config, String> {
    let kind = json["model_type"]
        .as_str()
        .ok_or("it has no 'model_type'")?;
    let architecture = match kind {
        "llama" | "mistral" => "llama",
        "qwen2" => "qwen2",
        "qwen3" => "qwen3",
        other => {
            return Err(format!(
                "architecture '{other}' is not known (llama, mistral, qwen2, qwen3 are)"
            ));
        }
    };
    let find =
        |key: &str| -> Option<usize> { json[key].as_u64().and_then(|v| usize::try_from(v).ok()) };
    let number = |key: &str| find(key).ok_or_else(|| format!("'{key}' is missing"));
    let real = |value: &Json| value.as_f64().map(|v| v as f32);
    let hidden = number("hidden_size")?;
    let heads = number("num_attention_heads")?.max(1);
    let mut context = number("max_position_embeddings")?;
    if json["use_sliding_window"] != Json::Bool(false) {
        // Within the window, sliding attention is full attention.
        if let Some(window) = find("sliding_window") {
            context = context.min(window.max(1));
        }
    }
    // Newer versions of transformers keep both under `rope_parameters`.
    let rope = [&json["rope_parameters"], &json["rope_scaling"]]
        .into_iter()
        .find(|r| r.is_object())
        .unwrap_or(&Json::Null);
    let theta = real(&json["rope_theta"])
        .or_else(|| real(&rope["rope_theta"]))
        .unwrap_or(10_000.0);
    let factor = |key: &str| real(&rope[key]).ok_or_else(|| format!("rope '{key}' is missing"));
    let rope_kind = rope["rope_type"].as_str().or_else(|| rope["type"].as_str());
    let rope_scaling = match rope_kind {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear {
            factor: factor("factor")?.max(1.0),
        },
        Some("llama3") => RopeScaling::Llama3 {
            factor: factor("factor")?,
            low_freq_factor: factor("low_freq_factor")?,
            high_freq_factor: factor("high_freq_factor")?,
            original_context: factor("original_max_position_embeddings")? as u32,
        },
        Some(other) => return Err(format!("rope scaling '{other}' is not supported")),
    };
    let config = Config {
        architecture: architecture.to_owned(),
        hidden,
        intermediate: number("intermediate_size")?,
        layers: number("num_hidden_layers")?,
        heads,
        kv_heads: find("num_key_value_heads").unwrap_or(heads),
        head_dim: find("head_dim").unwrap_or(hidden / heads),
        vocab: number("vocab_size")?,
        context,
        norm_eps: real(&json["rms_norm_eps"]).unwrap_or(1e-6),
        rope_theta: theta,
        rope_scaling,
    };
    config.check()?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama() -> Json {
        serde_json::json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 512, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        })
    }

    #[test]
    fn rope_is_read_in_the_old_and_the_new_form() {
        let mut old = llama();
        old["rope_theta"] = 5e5.into();
        old["rope_scaling"] = serde_json::json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        });
        let mut new = llama();
        new["rope_parameters"] = old["rope_scaling"].clone();
        new["rope_parameters"]["rope_theta"] = 5e5.into();
        let (old, new) = (config(&old).unwrap(), config(&new).unwrap());
        assert_eq!(old, new);
        assert!(matches!(old.rope_scaling, RopeScaling::Llama3 { .. }));
        assert!((old.rope_theta - 5e5).abs() < 1.0);
    }

    #[test]
    fn what_cannot_be_computed_is_refused() {
        for (key, value, word) in [
            ("model_type", Json::from("gemma3"), "gemma3"),
            ("hidden_size", Json::Null, "hidden_size"),
            ("num_key_value_heads", 3.into(), "key/value heads"),
            ("vocab_size", u64::MAX.into(), "vocabulary"),
            (
                "rope_scaling",
                serde_json::json!({"rope_type": "yarn"}),
                "yarn",
            ),
        ] {
            let mut json = llama();
            json[key] = value;
            let reason = config(&json).unwrap_err();
            assert!(reason.contains(word), "{key}: {reason}");
        }
    }

    #[test]
    fn a_broken_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let open = || ModelFolder::open(folder.path()).unwrap_err().to_string();
        assert!(open().contains("config.json"));
        std::fs::write(folder.path().join("config.json"), llama().to_string()).unwrap();
        assert!(open().contains("no model.safetensors"));
        let weights = folder.path().join("model.safetensors");
        for bytes in [
            b"".as_slice(),
            b"\xff\xff\xff\xff\xff\xff\xff\x7f",
            b"\x02\0\0\0\0\0\0\0{",
        ] {
            std::fs::write(&weights, bytes).unwrap();
            assert!(open().contains("model.safetensors"));
        }
        let index = folder.path().join("model.safetensors.index.json");
        std::fs::write(&index, r#"{"weight_map": {"a": "../escape.safetensors"}}"#).unwrap();
        assert!(open().contains("escape"));
    }
}
