//! Adapters in the forms that other programs read.
//!
//! Every form is one directory that appears whole or not at all, with a model card.
//! Merged weights are written row by row, so that a model larger than the memory can be
//! exported. The critic and the optimiser are no part of any form.

mod card;
mod merged;

use std::path::Path;

use serde_json::Value as Json;

use crate::adapter_file::{Staged, gguf_lora, write_atomically, write_peft};
use crate::error::{ModelError, Result};
use crate::load::LoadedModel;
use crate::lora::LoraAdapter;

/// A form in which an adapter leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// PEFT's directory.
    Peft,
    /// One LoRA file for llama.cpp.
    GgufLora,
    /// A Hugging Face folder of the base with the adapter merged in.
    MergedSafetensors,
    /// The base's GGUF file with the adapter merged in, in the base's block types.
    MergedGguf,
    /// A Modelfile for Ollama, with the LoRA file beside it.
    Ollama,
}

impl Format {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Peft,
        Self::GgufLora,
        Self::MergedSafetensors,
        Self::MergedGguf,
        Self::Ollama,
    ];

    /// Its name on the command line and in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Peft => "peft",
            Self::GgufLora => "gguf-lora",
            Self::MergedSafetensors => "merged-safetensors",
            Self::MergedGguf => "merged-gguf",
            Self::Ollama => "ollama",
        }
    }

    /// By its name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }
}

/// Told the share done, 0 to 1; answers whether to go on.
pub type Progress<'a> = dyn FnMut(f64) -> bool + 'a;

/// What an export is made of.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The base model, loaded.
    pub base: &'a LoadedModel,
    /// Its GGUF file or folder.
    pub base_path: &'a Path,
    /// The adapter.
    pub adapter: &'a LoraAdapter,
    /// The name of the adapter, such as `v3`.
    pub name: &'a str,
    /// Facts for the model card; never conversation text.
    pub facts: &'a Json,
}

/// Writes an adapter in a form into a new directory; answers the bytes written.
///
/// # Errors
/// When the directory exists, the base has not the form that is asked for, writing fails,
/// or `progress` says stop ([`ModelError::Cancelled`]). Nothing is left behind then.
pub fn export(
    source: Source<'_>,
    format: Format,
    out: &Path,
    progress: &mut Progress<'_>,
) -> Result<u64> {
    let staged = Staged::new(out)?;
    let dir = staged.path();
    let Source { base, adapter, .. } = source;
    let mut notes = Vec::new();
    if !progress(0.0) {
        return Err(ModelError::Cancelled);
    }
    match format {
        Format::Peft => write_peft(adapter, &base.name, dir)?,
        Format::GgufLora => write_lora(source, dir)?,
        Format::MergedSafetensors => merged::safetensors(source, dir, progress)?,
        Format::MergedGguf => notes.extend(merged::gguf(source, dir, progress)?),
        Format::Ollama => {
            write_lora(source, dir)?;
            let modelfile = modelfile(source)?;
            write_atomically(&dir.join("Modelfile"), modelfile.as_bytes())?;
        }
    }
    let card = card::text(source, format, &notes);
    write_atomically(&dir.join("README.md"), card.as_bytes())?;
    if !progress(1.0) {
        return Err(ModelError::Cancelled);
    }
    staged.commit()
}

fn write_lora(source: Source<'_>, dir: &Path) -> Result<()> {
    let writer = gguf_lora(
        source.adapter,
        source.base.model.config(),
        source.name,
        &source.base.name,
    )?;
    let mut bytes = Vec::new();
    writer
        .write(&mut bytes)
        .map_err(|e| ModelError::io(dir, e))?;
    write_atomically(&dir.join(card::LORA_FILE), &bytes)
}

fn modelfile(source: Source<'_>) -> Result<String> {
    let base =
        std::path::absolute(source.base_path).map_err(|e| ModelError::io(source.base_path, e))?;
    let base = base
        .to_str()
        .filter(|path| !path.contains(['\n', '\r']))
        .ok_or_else(|| {
            ModelError::Invalid(format!(
                "a Modelfile cannot name the base's path {}",
                base.display()
            ))
        })?;
    Ok(format!(
        "# {} for {}. Make it known with: ollama create NAME -f Modelfile\nFROM {base}\nADAPTER ./{}\n",
        source.name,
        source.base.name,
        card::LORA_FILE
    ))
}
