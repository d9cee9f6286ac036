//! A model file with everything that belongs to it.

use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{ModelError, Result};
use crate::folder::{ModelFolder, weight_files};
use crate::gguf::{Gguf, GgufModel, Value};
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;
use crate::transformer::{LoadOptions, Model};
use crate::weights::WeightSource;

/// A base model, its tokeniser and its chat template.
#[derive(Debug)]
pub struct LoadedModel {
    /// The transformer.
    pub model: Model,
    /// The tokeniser.
    pub tokenizer: Tokenizer,
    /// The chat template.
    pub template: ChatTemplate,
    /// Its name, from the metadata or the file name.
    pub name: String,
    /// Block type of most weights.
    pub quantisation: String,
}

impl LoadedModel {
    /// Loads a GGUF file or a Hugging Face folder. The weights stay in the map.
    ///
    /// # Errors
    /// When a file is missing, truncated, or of an unknown architecture; the message
    /// says which.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Self> {
        if path.is_dir() {
            Self::load_folder(path, options)
        } else {
            Self::load_gguf(path, options)
        }
    }

    fn load_gguf(path: &Path, options: &LoadOptions) -> Result<Self> {
        let source = GgufModel::new(Gguf::open(path)?)?;
        let tokenizer = Tokenizer::from_gguf(&source.file)?;
        let meta = source.file.metadata();
        let template = meta.get("tokenizer.chat_template").and_then(Value::as_str);
        let template = ChatTemplate::new(template, &tokenizer)?;
        let name = meta
            .get("general.name")
            .and_then(Value::as_str)
            .filter(|n| !n.trim().is_empty())
            .map(str::to_owned);
        Self::assemble(path, &source, name, tokenizer, template, options)
    }

    fn load_folder(path: &Path, options: &LoadOptions) -> Result<Self> {
        let source = ModelFolder::open(path)?;
        let tokenizer = Tokenizer::from_folder(path)?;
        let template = ChatTemplate::new(source.chat_template()?.as_deref(), &tokenizer)?;
        Self::assemble(path, &source, None, tokenizer, template, options)
    }

    fn assemble(
        path: &Path,
        source: &dyn WeightSource,
        name: Option<String>,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        options: &LoadOptions,
    ) -> Result<Self> {
        let model = Model::from_source(source, options).map_err(|e| match e {
            ModelError::MissingTensor(_) | ModelError::Invalid(_) => {
                ModelError::bad(path, e.to_string())
            }
            other => other,
        })?;
        let quantisation = source
            .tensor("model.layers.0.mlp.up_proj.weight")?
            .map(|v| v.block.name().to_owned())
            .unwrap_or_default();
        let stem = || {
            path.file_stem()
                .map(|s| s.to_string_lossy().into_owned())
                .unwrap_or_default()
        };
        Ok(Self {
            model,
            tokenizer,
            template,
            name: name.unwrap_or_else(stem),
            quantisation,
        })
    }
}

/// SHA-256 of a model's weights, hexadecimal: of the GGUF file, or of a folder's
/// safetensors files one after the other.
///
/// # Errors
/// When a file cannot be read.
pub fn fingerprint(path: &Path) -> Result<String> {
    let files = if path.is_dir() {
        weight_files(path)?
    } else {
        vec![path.to_owned()]
    };
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    for path in &files {
        let mut file = std::fs::File::open(path).map_err(|e| ModelError::io(path, e))?;
        loop {
            match file
                .read(&mut buffer)
                .map_err(|e| ModelError::io(path, e))?
            {
                0 => break,
                n => hasher.update(&buffer[..n]),
            }
        }
    }
    Ok(hasher
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect())
}
