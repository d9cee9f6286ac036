//! LoRA adapters in memory (Hu et al. 2021, arXiv:2106.09685).
//!
//! Rows are in Hugging Face order; names are those PEFT writes.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::{ModelError, Result};

/// A linear layer that can carry a LoRA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Target {
    #[serde(rename = "q_proj")]
    Q,
    #[serde(rename = "k_proj")]
    K,
    #[serde(rename = "v_proj")]
    V,
    #[serde(rename = "o_proj")]
    O,
    #[serde(rename = "gate_proj")]
    Gate,
    #[serde(rename = "up_proj")]
    Up,
    #[serde(rename = "down_proj")]
    Down,
}

impl Target {
    /// All seven, in the order in which a layer uses them.
    pub const ALL: [Self; 7] = [
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// The name PEFT uses in `target_modules`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q => "q_proj",
            Self::K => "k_proj",
            Self::V => "v_proj",
            Self::O => "o_proj",
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }

    /// From PEFT's name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.name() == name)
    }

    /// The path of the layer below `model.layers.N.`.
    pub fn path(self) -> &'static str {
        match self {
            Self::Q => "self_attn.q_proj",
            Self::K => "self_attn.k_proj",
            Self::V => "self_attn.v_proj",
            Self::O => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    /// Output and input width in this architecture.
    pub fn shape(self, config: &Config) -> (usize, usize) {
        let (q, kv) = (
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        );
        match self {
            Self::Q => (q, config.hidden),
            Self::K | Self::V => (kv, config.hidden),
            Self::O => (config.hidden, q),
            Self::Gate | Self::Up => (config.intermediate, config.hidden),
            Self::Down => (config.hidden, config.intermediate),
        }
    }
}

/// Size and place of an adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Rank r of the update.
    pub rank: usize,
    /// α; the update is scaled by α / r.
    pub alpha: f64,
    /// Which linears carry an update.
    pub targets: Vec<Target>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            targets: Target::ALL.to_vec(),
        }
    }
}

impl LoraConfig {
    /// α / r.
    pub fn scale(&self) -> f32 {
        (self.alpha / self.rank as f64) as f32
    }

    /// Trainable values of an adapter for this architecture.
    pub fn parameters(&self, config: &Config) -> usize {
        let per_layer: usize = self
            .targets
            .iter()
            .map(|t| t.shape(config))
            .map(|(out, input)| self.rank * (out + input))
            .sum();
        per_layer * config.layers
    }
}

/// One layer's update: `A` `[r, in]`, `B` `[out, r]`.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) a: Tensor,
    pub(crate) b: Tensor,
}

/// An adapter: one pair per layer and target.
#[derive(Clone, Debug)]
pub struct LoraAdapter {
    config: LoraConfig,
    pairs: Vec<[Option<Pair>; 7]>,
    vars: Vec<(String, Var)>,
}

/// PEFT's name of a tensor, without the `base_model.model.` prefix's optional parts:
/// `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
pub fn tensor_name(layer: usize, target: Target, matrix: char) -> String {
    format!(
        "base_model.model.model.layers.{layer}.{}.lora_{matrix}.weight",
        target.path()
    )
}

impl LoraAdapter {
    /// A fresh adapter that changes nothing: `A` uniform in ±1/√in (PEFT's Kaiming
    /// initialisation with a = √5), `B` zero. Deterministic in `seed`.
    ///
    /// # Errors
    /// When memory cannot be had.
    pub fn init(model: &Config, config: LoraConfig, seed: u64) -> Result<Self> {
        let mut state = seed;
        let mut uniform = || {
            // SplitMix64 (Steele et al. 2014).
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let mut tensors = BTreeMap::new();
        for layer in 0..model.layers {
            for target in &config.targets {
                let (out, input) = target.shape(model);
                let bound = 1.0 / (input as f32).sqrt();
                let a: Vec<f32> = (0..config.rank * input)
                    .map(|_| uniform() * bound)
                    .collect();
                let a = Tensor::from_vec(a, (config.rank, input), &Device::Cpu)?;
                let b = Tensor::zeros((out, config.rank), DType::F32, &Device::Cpu)?;
                tensors.insert(tensor_name(layer, *target, 'A'), a);
                tensors.insert(tensor_name(layer, *target, 'B'), b);
            }
        }
        Self::from_tensors(model, config, &tensors)
    }

    /// From tensors by PEFT name.
    ///
    /// # Errors
    /// When one is missing, unknown, or of another shape than the architecture needs.
    pub fn from_tensors(
        model: &Config,
        config: LoraConfig,
        tensors: &BTreeMap<String, Tensor>,
    ) -> Result<Self> {
        let mut pairs = Vec::with_capacity(model.layers);
        let mut used = 0;
        for layer in 0..model.layers {
            let mut row: [Option<Pair>; 7] = Default::default();
            for target in &config.targets {
                let (out, input) = target.shape(model);
                let mut take = |matrix: char, shape: (usize, usize)| -> Result<Tensor> {
                    let name = tensor_name(layer, *target, matrix);
                    let tensor = tensors
                        .get(&name)
                        .ok_or_else(|| ModelError::MissingTensor(name.clone()))?;
                    if tensor.dims2()? != shape {
                        return Err(ModelError::Invalid(format!(
                            "{name} has shape {:?}, but this base needs {shape:?}",
                            tensor.dims()
                        )));
                    }
                    used += 1;
                    Ok(tensor.to_dtype(DType::F32)?.contiguous()?)
                };
                let a = take('A', (config.rank, input))?;
                let b = take('B', (out, config.rank))?;
                row[*target as usize] = Some(Pair { a, b });
            }
            pairs.push(row);
        }
        if used != tensors.len() {
            return Err(ModelError::Invalid(format!(
                "the adapter has {} tensors, of which {used} belong to this base",
                tensors.len()
            )));
        }
        Ok(Self {
            config,
            pairs,
            vars: Vec::new(),
        })
    }

    /// The same values as trainable variables.
    ///
    /// # Errors
    /// When memory cannot be had.
    pub fn trainable(&self) -> Result<Self> {
        let mut vars = Vec::new();
        let mut pairs = Vec::with_capacity(self.pairs.len());
        for (layer, row) in self.pairs.iter().enumerate() {
            let mut new: [Option<Pair>; 7] = Default::default();
            for target in Target::ALL {
                if let Some(pair) = &row[target as usize] {
                    let a = Var::from_tensor(&pair.a)?;
                    let b = Var::from_tensor(&pair.b)?;
                    new[target as usize] = Some(Pair {
                        a: a.as_tensor().clone(),
                        b: b.as_tensor().clone(),
                    });
                    vars.push((tensor_name(layer, target, 'A'), a));
                    vars.push((tensor_name(layer, target, 'B'), b));
                }
            }
            pairs.push(new);
        }
        Ok(Self {
            config: self.config.clone(),
            pairs,
            vars,
        })
    }

    /// Rank, scale and targets.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The variables of a trainable adapter, by PEFT name, in a fixed order; empty
    /// otherwise.
    pub fn vars(&self) -> &[(String, Var)] {
        &self.vars
    }

    /// Copies of all values by PEFT name, detached from any graph.
    ///
    /// # Errors
    /// When memory cannot be had.
    pub fn to_tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        for (layer, row) in self.pairs.iter().enumerate() {
            for target in Target::ALL {
                if let Some(pair) = &row[target as usize] {
                    tensors.insert(tensor_name(layer, target, 'A'), pair.a.copy()?.detach());
                    tensors.insert(tensor_name(layer, target, 'B'), pair.b.copy()?.detach());
                }
            }
        }
        Ok(tensors)
    }

    /// Bytes of the values in memory.
    pub fn bytes(&self) -> u64 {
        self.pairs
            .iter()
            .flatten()
            .flatten()
            .map(|p| 4 * (p.a.elem_count() + p.b.elem_count()) as u64)
            .sum()
    }

    pub(crate) fn pair(&self, layer: usize, target: Target) -> Option<&Pair> {
        self.pairs[layer][target as usize].as_ref()
    }
}
