//! The model with its trainable adapter: scoring, sampling, gradient accumulation,
//! updates, and the adapter's files.
//!
//! The only module that touches the model. Losses come in as a function from
//! log-probabilities to upstream gradients.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use spotter_core::advantage::RunningBaseline;
use spotter_core::train::AdapterFiles;
use spotter_model::{
    Batch, CacheSlots, Gradients, KvPool, LoadedModel, LoraAdapter, LoraConfig, Model, ModelError,
    Segment, adapter_file,
};

use crate::TrainError;
use crate::checkpoint::{Checkpoint, sync_directory};
use crate::config::{Scope, TrainConfig};
use crate::critic::Critic;
use crate::optimiser::{AdamW, clip_norm};
use crate::packing::{Packed, Sequence, micro_batches, pack};
use crate::ppo::Observer;

/// Tokens of a long prompt that are computed at once.
const PREFILL_TOKENS: usize = 512;

/// Name of the file in an adapter's state directory.
const STATE_FILE: &str = "state.safetensors";

/// What is kept beside an adapter for the next run, apart from the optimiser's moments.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ParentState {
    /// The value head, once one was fitted.
    pub critic: Option<Critic>,
    /// The running baseline of rewards.
    pub baseline: RunningBaseline,
    /// Optimiser steps over all runs.
    #[serde(default)]
    pub optimiser_steps: u64,
}

/// Teacher-forced scores of sequences.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// One log-probability per response token, at each sequence's temperature.
    pub logprobs: Vec<Vec<f64>>,
    /// Last hidden state (after the final norm) at the last prompt token.
    pub features: Vec<Vec<f32>>,
}

/// A sampled answer: token ids and log-probabilities of the sampling distribution.
pub type Sampled = (Vec<u32>, Vec<f64>);

/// A loss as the learner needs it: from the members' log-probabilities to
/// `∂ loss / ∂ log-probability`.
pub type Upstream<'a> = &'a mut (dyn FnMut(&[Vec<f64>]) -> Vec<Vec<f64>> + Send);

/// A model and the adapter that is being trained.
pub struct Learner<'m> {
    model: &'m Model,
    base_name: String,
    adapter: Arc<LoraAdapter>,
    variables: Vec<Var>,
    names: Vec<String>,
    gradients: Vec<Option<Tensor>>,
    optimiser: AdamW,
    scope: Scope,
    micro_batch_tokens: usize,
    fresh: bool,
    state: ParentState,
}

impl<'m> Learner<'m> {
    /// Starts from the parent's adapter and state, or from a fresh adapter that
    /// changes nothing (its `A` drawn from `seed`).
    pub fn new(
        loaded: &'m LoadedModel,
        parent: Option<&AdapterFiles>,
        parent_state: Option<&Path>,
        seed: u64,
        config: &TrainConfig,
    ) -> Result<Self, TrainError> {
        let model = &loaded.model;
        let adapter = match parent {
            Some(files) => adapter_file::load_peft(&files.dir, model.config())?,
            None => LoraAdapter::init(
                model.config(),
                LoraConfig {
                    rank: config.lora_rank,
                    alpha: config.lora_alpha,
                    ..LoraConfig::default()
                },
                seed,
            )?,
        }
        .trainable()?;
        let (names, variables): (Vec<String>, Vec<Var>) = adapter.vars().iter().cloned().unzip();
        let mut learner = Self {
            model,
            base_name: loaded.name.clone(),
            optimiser: AdamW::new(&variables)?,
            gradients: vec![None; variables.len()],
            adapter: Arc::new(adapter),
            variables,
            names,
            scope: config.grad_scope,
            micro_batch_tokens: config.micro_batch_tokens,
            fresh: parent.is_none(),
            state: ParentState::default(),
        };
        if let Some(dir) = parent_state
            && let Some(kept) =
                Checkpoint::<ParentState>::read(&dir.join(STATE_FILE), &Device::Cpu)?
        {
            learner.state = kept.state;
            if config.keep_moments {
                learner.restore_moments(&kept.tensors, learner.state.optimiser_steps);
            }
        }
        Ok(learner)
    }

    /// Decides the gradient scope for these sequences.
    pub fn choose_scope(&mut self, sequences: &[Sequence<'_>], config: &TrainConfig) {
        if self.scope == Scope::Auto {
            let longest = sequences
                .iter()
                .map(|s| s.prompt.len() + s.response.len())
                .max();
            self.scope = if longest.unwrap_or(0) > config.full_scope_max_tokens {
                Scope::Response
            } else {
                Scope::Full
            };
        }
    }

    /// `full` or `response`.
    pub fn scope_name(&self) -> &'static str {
        match self.scope {
            Scope::Response => "response",
            Scope::Auto | Scope::Full => "full",
        }
    }

    /// What the parent left behind.
    pub fn parent_state(&self) -> ParentState {
        self.state.clone()
    }

    /// Whether the adapter started from nothing, so that parent and base are one.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Most tokens of a micro-batch.
    pub fn micro_batch_tokens(&self) -> usize {
        self.micro_batch_tokens
    }

    /// Scores sequences with the adapter as it is now, or with it off.
    pub fn score(
        &self,
        sequences: &[Sequence<'_>],
        adapter: bool,
        observer: &mut dyn Observer,
    ) -> Result<Scores, TrainError> {
        let mut scores = Scores {
            logprobs: vec![Vec::new(); sequences.len()],
            features: vec![Vec::new(); sequences.len()],
        };
        let adapter = adapter.then(|| self.adapter.clone());
        let units: Vec<Vec<Sequence<'_>>> = sequences.iter().map(|s| vec![*s]).collect();
        for micro in micro_batches(&units, self.micro_batch_tokens) {
            observer.between()?;
            let members: Vec<Sequence<'_>> = micro.iter().map(|&i| sequences[i]).collect();
            let (batch, packed, pool) = self.batch(&members, adapter.as_ref())?;
            let hidden = self.model.forward(&batch, pool.as_ref())?.detach();
            let logprobs = self.targets(&hidden, &packed)?.into_iter().try_fold(
                vec![0.0; packed.targets.len()],
                |mut all, (rows, tensor)| {
                    for (row, value) in rows.iter().zip(tensor.to_vec1::<f32>()?) {
                        all[*row] = f64::from(value);
                    }
                    Ok::<_, TrainError>(all)
                },
            )?;
            for (k, &i) in micro.iter().enumerate() {
                scores.logprobs[i] = logprobs[packed.spans[k].clone()].to_vec();
                scores.features[i] = hidden.get(packed.prompt_rows[k])?.to_vec1()?;
            }
        }
        Ok(scores)
    }

    /// Adds one micro-batch's gradients to what the next update uses. Returns the
    /// tokens that went through the model.
    pub fn accumulate(
        &mut self,
        sequences: &[Sequence<'_>],
        upstream: Upstream<'_>,
    ) -> Result<usize, TrainError> {
        let adapter = self.adapter.clone();
        let (batch, packed, pool) = self.batch(sequences, Some(&adapter))?;
        let (_, gradients, ()) =
            self.model
                .value_and_gradients(&batch, pool.as_ref(), |hidden| {
                    let groups = self.targets(hidden, &packed)?;
                    let mut flat = vec![0.0; packed.targets.len()];
                    for (rows, tensor) in &groups {
                        for (row, value) in rows.iter().zip(tensor.to_vec1::<f32>()?) {
                            flat[*row] = f64::from(value);
                        }
                    }
                    let members: Vec<Vec<f64>> = packed
                        .spans
                        .iter()
                        .map(|span| flat[span.clone()].to_vec())
                        .collect();
                    let slopes = upstream(&members).concat();
                    // Σ slope · log-probability has exactly these slopes as its derivative.
                    let mut total = Tensor::new(0f32, &Device::Cpu)?;
                    for (rows, tensor) in &groups {
                        let own: Vec<f32> = rows.iter().map(|&row| slopes[row] as f32).collect();
                        let own = Tensor::from_vec(own, rows.len(), &Device::Cpu)?;
                        total = (total + (tensor * own)?.sum_all()?)?;
                    }
                    Ok((total, ()))
                })?;
        self.add(gradients)?;
        Ok(batch.len())
    }

    fn add(&mut self, mut gradients: Gradients) -> Result<(), TrainError> {
        for (name, slot) in self.names.iter().zip(&mut self.gradients) {
            let Some(new) = gradients.remove(name) else {
                continue;
            };
            let sum = match slot.take() {
                Some(old) => (old + new)?.detach(),
                None => new.detach(),
            };
            *slot = Some(sum);
        }
        Ok(())
    }

    /// Clips what was accumulated, updates the adapter, and starts afresh. Returns the
    /// gradient's norm before clipping.
    pub fn step(&mut self, learning_rate: f64, config: &TrainConfig) -> Result<f64, TrainError> {
        let norm = clip_norm(&mut self.gradients, config.max_gradient_norm)?;
        if !norm.is_finite() {
            self.gradients.fill(None);
            return Err(TrainError::Diverged);
        }
        self.optimiser
            .step(&self.variables, &self.gradients, learning_rate, config)?;
        self.gradients.fill(None);
        Ok(norm)
    }

    /// A copy of the adapter's values.
    pub fn values(&self) -> Result<Vec<Tensor>, TrainError> {
        let copies = self.variables.iter().map(|v| v.as_tensor().copy());
        Ok(copies.collect::<Result<_, _>>()?)
    }

    /// Moves the adapter to `parent + share × (candidate − parent)`.
    pub fn blend(
        &mut self,
        parent: &Learner<'_>,
        candidate: &[Tensor],
        share: f64,
    ) -> Result<(), TrainError> {
        for ((variable, from), to) in self.variables.iter().zip(&parent.variables).zip(candidate) {
            let value = (from.affine(1.0 - share, 0.0)? + to.affine(share, 0.0)?)?;
            variable.set(&value.detach())?;
        }
        Ok(())
    }

    /// Throws away what was accumulated since the last update.
    pub fn reset(&mut self) {
        self.gradients.fill(None);
    }

    /// Gradients accumulated so far, by PEFT name; for checks.
    pub fn accumulated(&self) -> BTreeMap<String, Tensor> {
        self.names
            .iter()
            .zip(&self.gradients)
            .filter_map(|(name, gradient)| Some((name.clone(), gradient.clone()?)))
            .collect()
    }

    /// Samples a continuation of each prompt at `temperature` (0 is greedy) from the
    /// whole vocabulary, up to `tokens` tokens or one of `ends`, which is included.
    /// Returns ids and log-probabilities of the sampling distribution.
    pub fn sample(
        &self,
        prompts: &[Vec<u32>],
        tokens: usize,
        temperature: f32,
        ends: &[u32],
        seed: u64,
    ) -> Result<Vec<Sampled>, TrainError> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let per_sequence: Vec<usize> = prompts
            .iter()
            .map(|prompt| (prompt.len() + tokens).div_ceil(KvPool::BLOCK_TOKENS))
            .collect();
        let pool = KvPool::new(self.model.config(), per_sequence.iter().sum());
        let mut first = 0;
        let blocks: Vec<Vec<u32>> = per_sequence
            .iter()
            .map(|&count| {
                let own = (first..first + count as u32).collect();
                first += count as u32;
                own
            })
            .collect();
        let mut out: Vec<Sampled> = vec![Default::default(); prompts.len()];
        let mut past = vec![0; prompts.len()];
        let mut active: Vec<usize> = (0..prompts.len())
            .filter(|&i| !prompts[i].is_empty())
            .collect();
        while !active.is_empty() {
            let segments = active
                .iter()
                .map(|&i| Segment {
                    tokens: match out[i].0.last() {
                        Some(&last) => vec![last],
                        None => prompts[i].clone(),
                    },
                    parent: None,
                    cache: Some(CacheSlots {
                        blocks: blocks[i].clone(),
                        past: past[i],
                        write: true,
                    }),
                    adapter: Some(self.adapter.clone()),
                })
                .collect();
            let batch = Batch { segments };
            let hidden = self.model.forward(&batch, Some(&pool))?.detach();
            let last: Vec<u32> = batch
                .rows()
                .iter()
                .map(|rows| rows.end as u32 - 1)
                .collect();
            for (segment, &i) in batch.segments.iter().zip(&active) {
                past[i] += segment.tokens.len();
            }
            let last = Tensor::new(last.as_slice(), &Device::Cpu)?;
            let logits = self.model.logits(&hidden.index_select(&last, 0)?)?;
            for (row, &i) in logits.to_vec2::<f32>()?.iter().zip(&active) {
                let (id, logprob) = draw(row, temperature, rng.random());
                out[i].0.push(id);
                out[i].1.push(logprob);
            }
            active.retain(|&i| {
                let (ids, _) = &out[i];
                ids.len() < tokens && ids.last().is_none_or(|last| !ends.contains(last))
            });
        }
        Ok(out)
    }

    /// Adapter and moments by name, for a checkpoint.
    pub fn state(&self) -> HashMap<String, Tensor> {
        let mut tensors = self.moments();
        for (name, variable) in self.names.iter().zip(&self.variables) {
            tensors.insert(name.clone(), variable.as_tensor().clone());
        }
        tensors
    }

    fn moments(&self) -> HashMap<String, Tensor> {
        let mut tensors = HashMap::new();
        for (i, name) in self.names.iter().enumerate() {
            tensors.insert(format!("first.{name}"), self.optimiser.first[i].clone());
            tensors.insert(format!("second.{name}"), self.optimiser.second[i].clone());
        }
        tensors
    }

    /// Takes up a checkpoint made by [`Self::state`] after `steps` updates of this run.
    pub fn restore(
        &mut self,
        tensors: &HashMap<String, Tensor>,
        steps: u64,
    ) -> Result<(), TrainError> {
        for (name, variable) in self.names.iter().zip(&self.variables) {
            let value = tensors.get(name).ok_or_else(|| {
                std::io::Error::other(format!("the checkpoint has no tensor {name}"))
            })?;
            variable.set(value)?;
        }
        let before = self.optimiser.steps;
        self.restore_moments(tensors, before + steps);
        Ok(())
    }

    /// Takes up moments where names and shapes fit; a parent of another rank starts afresh.
    fn restore_moments(&mut self, tensors: &HashMap<String, Tensor>, steps: u64) {
        let find = |kind: &str| -> Option<Vec<Tensor>> {
            self.names
                .iter()
                .zip(&self.variables)
                .map(|(name, variable)| {
                    let tensor = tensors.get(&format!("{kind}.{name}"))?;
                    (tensor.dims() == variable.dims()).then(|| tensor.clone())
                })
                .collect()
        };
        if let (Some(first), Some(second)) = (find("first"), find("second")) {
            self.optimiser.first = first;
            self.optimiser.second = second;
            self.optimiser.steps = steps;
        }
    }

    /// Writes the adapter as a PEFT directory and, beside it, the state for the next
    /// run. Each appears whole or not at all, the state first.
    pub fn write_output(
        &self,
        output: &AdapterFiles,
        mut state: ParentState,
    ) -> Result<(), TrainError> {
        state.optimiser_steps = self.optimiser.steps;
        let checkpoint = Checkpoint {
            tensors: self.moments(),
            state,
        };
        checkpoint.write(&output.state_dir().join(STATE_FILE))?;
        if output.dir.exists() {
            // A run that was killed after this point is resumed and writes the same again.
            fs::remove_dir_all(&output.dir)?;
        }
        adapter_file::save_peft(&self.adapter, &self.base_name, &output.dir, None)?;
        if let Some(parent) = output.dir.parent() {
            sync_directory(parent)?;
        }
        Ok(())
    }

    /// The batch of packed sequences. With the `response` scope, prompts are computed
    /// once without a graph and enter as cached keys and values.
    fn batch(
        &self,
        sequences: &[Sequence<'_>],
        adapter: Option<&Arc<LoraAdapter>>,
    ) -> Result<(Batch, Packed, Option<KvPool>), TrainError> {
        if self.scope == Scope::Response {
            let (batch, packed, pool) = self.cached_batch(sequences, adapter)?;
            return Ok((batch, packed, Some(pool)));
        }
        let packed = pack(sequences);
        let segments = packed
            .segments
            .iter()
            .map(|segment| Segment {
                tokens: segment.tokens.clone(),
                parent: segment.parent,
                cache: None,
                adapter: adapter.cloned(),
            })
            .collect();
        Ok((Batch { segments }, packed, None))
    }

    /// One root segment per sequence: the last prompt token and the response, behind
    /// the prompt's cached keys and values. A prompt that another one extends shares
    /// its cache.
    fn cached_batch(
        &self,
        sequences: &[Sequence<'_>],
        adapter: Option<&Arc<LoraAdapter>>,
    ) -> Result<(Batch, Packed, KvPool), TrainError> {
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        order.sort_by(|&a, &b| sequences[b].prompt.cmp(sequences[a].prompt));
        // In descending order, a prompt follows directly behind those that extend it.
        let mut owners: Vec<usize> = Vec::new();
        let mut owner_of = vec![0; sequences.len()];
        for &i in &order {
            let extends = owners
                .last()
                .is_some_and(|&o| sequences[o].prompt.starts_with(sequences[i].prompt));
            if !extends {
                owners.push(i);
            }
            owner_of[i] = owners.len() - 1;
        }
        let counts: Vec<usize> = owners
            .iter()
            .map(|&o| sequences[o].prompt.len().div_ceil(KvPool::BLOCK_TOKENS))
            .collect();
        let pool = KvPool::new(self.model.config(), counts.iter().sum());
        let mut first = 0;
        let mut tables: Vec<Vec<u32>> = Vec::new();
        for (&owner, &count) in owners.iter().zip(&counts) {
            let blocks: Vec<u32> = (first..first + count as u32).collect();
            first += count as u32;
            let prompt = sequences[owner].prompt;
            let cached = &prompt[..prompt.len() - 1];
            for (k, chunk) in cached.chunks(PREFILL_TOKENS).enumerate() {
                let segment = Segment {
                    tokens: chunk.to_vec(),
                    parent: None,
                    cache: Some(CacheSlots {
                        blocks: blocks.clone(),
                        past: k * PREFILL_TOKENS,
                        write: true,
                    }),
                    adapter: adapter.cloned(),
                };
                self.model.forward(
                    &Batch {
                        segments: vec![segment],
                    },
                    Some(&pool),
                )?;
            }
            tables.push(blocks);
        }
        let mut packed = Packed::default();
        let mut segments = Vec::new();
        let mut row = 0;
        for (sequence, owner) in sequences.iter().zip(owner_of) {
            let past = sequence.prompt.len() - 1;
            let fed = sequence.response.len().saturating_sub(1);
            let mut tokens = vec![sequence.prompt[past]];
            tokens.extend(&sequence.response[..fed]);
            let from = packed.targets.len();
            packed
                .targets
                .extend(sequence.response.iter().enumerate().map(|(i, &token)| {
                    crate::packing::Target {
                        row: row + i,
                        token,
                        temperature: sequence.temperature,
                    }
                }));
            packed.spans.push(from..packed.targets.len());
            packed.prompt_rows.push(row);
            row += tokens.len();
            segments.push(Segment {
                tokens,
                parent: None,
                cache: Some(CacheSlots {
                    blocks: tables[owner].clone(),
                    past,
                    write: false,
                }),
                adapter: adapter.cloned(),
            });
        }
        Ok((Batch { segments }, packed, pool))
    }

    /// Log-probabilities of the packed targets, in groups of equal temperature: the
    /// targets' indices and one tensor.
    fn targets(
        &self,
        hidden: &Tensor,
        packed: &Packed,
    ) -> Result<Vec<(Vec<usize>, Tensor)>, ModelError> {
        let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (i, target) in packed.targets.iter().enumerate() {
            groups
                .entry(target.temperature.to_bits())
                .or_default()
                .push(i);
        }
        groups
            .into_iter()
            .map(|(temperature, indices)| {
                let rows: Vec<u32> = indices
                    .iter()
                    .map(|&i| packed.targets[i].row as u32)
                    .collect();
                let tokens: Vec<u32> = indices.iter().map(|&i| packed.targets[i].token).collect();
                let rows = Tensor::from_vec(rows, indices.len(), &Device::Cpu)?;
                let rows = hidden.index_select(&rows, 0)?;
                let temperature = f32::from_bits(temperature);
                let out = self.model.logprobs(&rows, &tokens, temperature)?;
                Ok((indices, out.logprobs))
            })
            .collect()
    }
}

/// Draws from softmax(logits / temperature) by a uniform number; the id and its
/// log-probability. Temperature 0 takes the largest, with log-probability 0.
fn draw(logits: &[f32], temperature: f32, uniform: f64) -> (u32, f64) {
    let best = logits
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1))
        .map_or(0, |(i, _)| i);
    if temperature <= 0.0 {
        return (best as u32, 0.0);
    }
    let max = f64::from(logits.get(best).copied().unwrap_or(0.0));
    let scale = f64::from(temperature);
    let weight = |l: f32| ((f64::from(l) - max) / scale).exp();
    let total: f64 = logits.iter().map(|&l| weight(l)).sum();
    let mut left = uniform * total;
    for (i, &logit) in logits.iter().enumerate() {
        left -= weight(logit);
        if left <= 0.0 {
            return (i as u32, weight(logit).ln() - total.ln());
        }
    }
    (best as u32, -total.ln())
}

#[cfg(test)]
mod tests {
    use super::draw;

    #[test]
    fn drawing_follows_the_distribution_and_greedy_takes_the_best() {
        let logits = [0.0f32, 2.0f32.ln(), 1.0f32.ln()];
        assert_eq!(draw(&logits, 0.0, 0.9), (1, 0.0));
        let (id, logprob) = draw(&logits, 1.0, 0.3);
        assert_eq!(id, 1);
        assert!((logprob - 0.5f64.ln()).abs() < 1e-6);
        assert_eq!(draw(&logits, 1.0, 0.1).0, 0);
        assert_eq!(draw(&logits, 1.0, 0.99).0, 2);
    }
}
