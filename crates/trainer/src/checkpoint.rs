//! Checkpoints of a run: one safetensors file, replaced atomically.
//!
//! A checkpoint holds everything that an update changes (adapter, moments,
//! critic) and the position in the run as JSON metadata. Randomness needs no
//! state: every shuffle is derived from the seed and the epoch. Writing goes to
//! a temporary file, which is flushed to disk and then renamed over the old
//! one, so that a kill at any moment leaves a whole checkpoint or none.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::TrainError;

const STATE_KEY: &str = "state";

/// Named tensors and a state.
#[derive(Debug, Default)]
pub struct Checkpoint<S> {
    /// Tensors by name, in order of name when written.
    pub tensors: HashMap<String, Tensor>,
    /// Everything that is no tensor.
    pub state: S,
}

impl<S: Serialize + DeserializeOwned> Checkpoint<S> {
    /// Writes to `path`, atomically and durably.
    pub fn write(&self, path: &Path) -> Result<(), TrainError> {
        let mut entries = Vec::with_capacity(self.tensors.len());
        for (name, tensor) in &self.tensors {
            let (dtype, bytes) = match tensor.dtype() {
                DType::F64 => (
                    Dtype::F64,
                    tensor
                        .flatten_all()?
                        .to_vec1::<f64>()?
                        .iter()
                        .flat_map(|v| v.to_le_bytes())
                        .collect::<Vec<u8>>(),
                ),
                _ => (
                    Dtype::F32,
                    tensor
                        .to_dtype(DType::F32)?
                        .flatten_all()?
                        .to_vec1::<f32>()?
                        .iter()
                        .flat_map(|v| v.to_le_bytes())
                        .collect(),
                ),
            };
            entries.push((name.clone(), dtype, tensor.dims().to_vec(), bytes));
        }
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        let views = entries
            .iter()
            .map(|(name, dtype, shape, bytes)| {
                TensorView::new(*dtype, shape.clone(), bytes).map(|view| (name.as_str(), view))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let state = serde_json::to_string(&self.state).map_err(std::io::Error::other)?;
        let metadata = HashMap::from([(STATE_KEY.to_owned(), state)]);
        let bytes = safetensors::serialize(views, Some(metadata))?;
        write_atomically(path, &bytes)?;
        Ok(())
    }

    /// Reads `path` to `device`; `None` when there is no such file.
    pub fn read(path: &Path, device: &Device) -> Result<Option<Self>, TrainError> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let (_, header) = SafeTensors::read_metadata(&bytes)?;
        let state = header
            .metadata()
            .as_ref()
            .and_then(|metadata| metadata.get(STATE_KEY))
            .ok_or_else(|| std::io::Error::other(format!("{} has no state", path.display())))?;
        let state = serde_json::from_str(state).map_err(std::io::Error::other)?;
        let mut tensors = HashMap::new();
        for (name, view) in SafeTensors::deserialize(&bytes)?.tensors() {
            let tensor = match view.dtype() {
                Dtype::F64 => {
                    let values: Vec<f64> = chunks(view.data()).map(f64::from_le_bytes).collect();
                    Tensor::from_vec(values, view.shape(), device)?
                }
                _ => {
                    let values: Vec<f32> = chunks(view.data()).map(f32::from_le_bytes).collect();
                    Tensor::from_vec(values, view.shape(), device)?
                }
            };
            tensors.insert(name, tensor);
        }
        Ok(Some(Self { tensors, state }))
    }
}

fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.chunks_exact(N).map(|chunk| {
        let mut array = [0; N];
        array.copy_from_slice(chunk);
        array
    })
}

/// Writes a file beside `path`, flushes it to disk and renames it over `path`.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let temporary = path.with_extension("partial");
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&temporary, path)?;
    sync_directory(directory)
}

/// Flushes a directory's entries to disk, where the platform can.
pub fn sync_directory(directory: &Path) -> std::io::Result<()> {
    if cfg!(unix) {
        File::open(directory)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use candle_core::{Device, Tensor};

    use super::Checkpoint;

    #[test]
    fn a_checkpoint_reads_back_bit_for_bit() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("run.safetensors");
        assert!(
            Checkpoint::<u32>::read(&path, &Device::Cpu)
                .expect("no file is no error")
                .is_none()
        );
        let single = Tensor::new(&[0.1f32, -3.7e-20], &Device::Cpu).expect("tensor");
        let double = Tensor::new(&[[1.0f64 / 3.0]], &Device::Cpu).expect("tensor");
        let checkpoint = Checkpoint {
            tensors: HashMap::from([("a".into(), single), ("b".into(), double)]),
            state: 7u32,
        };
        checkpoint.write(&path).expect("written");
        checkpoint.write(&path).expect("overwritten");
        let read = Checkpoint::<u32>::read(&path, &Device::Cpu)
            .expect("readable")
            .expect("there");
        assert_eq!(read.state, 7);
        assert_eq!(
            read.tensors["a"].to_vec1::<f32>().expect("a"),
            [0.1, -3.7e-20]
        );
        assert_eq!(
            read.tensors["b"].to_vec2::<f64>().expect("b"),
            [[1.0 / 3.0]]
        );
        assert!(!path.with_extension("partial").exists());
    }

    #[test]
    fn a_truncated_checkpoint_is_an_error_and_not_a_fresh_start() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("run.safetensors");
        std::fs::write(&path, b"\x10\0\0\0\0\0\0\0{\"a\"").expect("written");
        assert!(Checkpoint::<u32>::read(&path, &Device::Cpu).is_err());
    }
}
