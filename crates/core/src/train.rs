//! What a training run is given, and what it reports.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::adapter::AdapterVersion;
use crate::code::Failure;
use crate::id::{StepUid, TrajectoryUid};
use crate::reward::RewardSource;

/// How fast the model may change; resolves into learning rate, KL target and epochs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dial {
    /// Small, careful updates.
    Gentle,
    /// The default.
    #[default]
    Normal,
    /// Large updates, for clear preferences.
    Bold,
}

/// Which advantage or preference estimator a run uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Estimator {
    /// Chosen per batch by what the data allows.
    #[default]
    Auto,
    /// Value head and step-level GAE.
    Ppo,
    /// Reward minus a running baseline, for sparse thumbs.
    Binary,
    /// Group-relative advantages.
    Grpo,
    /// Leave-one-out advantages.
    Rloo,
    /// Kahneman-Tversky optimisation, for rated data without usable log-probabilities.
    Kto,
    /// Direct preference optimisation plus NLL on the chosen answer.
    Dpo,
}

/// A reward as it counts for one step, precedence and turn credit applied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepReward {
    /// In [-1, 1].
    pub value: f64,
    /// The winning source.
    pub source: RewardSource,
    /// Credit in (0, 1]: 1 for the final answer of a turn, 0.5 for its earlier tool steps.
    pub credit: f64,
}

/// One step as the trainer sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainStep {
    /// The step.
    pub uid: StepUid,
    /// Its trajectory.
    pub trajectory: TrajectoryUid,
    /// Its prompt group; a group has several trajectories only when a client made it so.
    pub prompt_uid: String,
    /// Position in the trajectory.
    pub index: u32,
    /// Whether the trajectory ends here.
    pub is_last: bool,
    /// Prompt token ids.
    pub prompt_ids: Vec<u32>,
    /// Response token ids.
    pub response_ids: Vec<u32>,
    /// Log-probabilities of the sampling distribution, or empty.
    pub logprobs: Vec<f32>,
    /// The version that sampled it.
    pub adapter: AdapterVersion,
    /// Temperature it was sampled with (0 = greedy).
    pub temperature: f32,
    /// Nucleus mass it was sampled with.
    pub top_p: f32,
    /// Its reward, if it has one.
    pub reward: Option<StepReward>,
    /// What the answer should have been, if the person said so.
    pub correction: Option<String>,
}

/// A preferred and a rejected answer to one prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PreferencePair {
    /// The step the rejected answer belongs to.
    pub uid: StepUid,
    /// Prompt token ids.
    pub prompt_ids: Vec<u32>,
    /// Preferred answer, end-of-turn token included.
    pub chosen_ids: Vec<u32>,
    /// Rejected answer.
    pub rejected_ids: Vec<u32>,
}

/// An adapter on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdapterFiles {
    /// Its version.
    pub version: AdapterVersion,
    /// PEFT directory.
    pub dir: PathBuf,
}

impl AdapterFiles {
    /// Where the critic and optimiser state of this adapter is kept: a directory
    /// beside the adapter's, never inside it, because the adapter's is exported.
    pub fn state_dir(&self) -> PathBuf {
        let mut name = self.dir.file_name().unwrap_or_default().to_owned();
        name.push(".state");
        self.dir.with_file_name(name)
    }
}

/// A training run, complete: nothing else is read but the model and the parent adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainRequest {
    /// The run's number.
    pub run: i64,
    /// Directory for checkpoints of this run; a run found there is resumed.
    pub checkpoint_dir: PathBuf,
    /// Where the finished adapter goes (created by the worker, atomically).
    pub output_dir: PathBuf,
    /// The version the finished adapter will have.
    pub version: AdapterVersion,
    /// The adapter to start from; `None` starts a fresh one on the base.
    pub parent: Option<AdapterFiles>,
    /// Directory of optimiser and critic state of the parent, if kept
    /// ([`AdapterFiles::state_dir`]).
    pub parent_state: Option<PathBuf>,
    /// The version live when the batch was claimed (for staleness).
    pub live: AdapterVersion,
    /// The batch.
    pub steps: Vec<TrainStep>,
    /// Rated steps that earlier runs learned from, newest first, offered again so that
    /// they are not forgotten: above all liked answers and corrections. Some 64 are plenty.
    /// A forgotten step must not be here.
    #[serde(default)]
    pub replay: Vec<TrainStep>,
    /// Rated steps kept out of training, for the gate.
    pub held_out: Vec<TrainStep>,
    /// The dial.
    pub dial: Dial,
    /// The estimator, or `Auto`.
    pub estimator: Estimator,
    /// Overrides of single training settings by name, as JSON (see the trainer's
    /// `TrainConfig`).
    #[serde(default)]
    pub overrides: serde_json::Map<String, serde_json::Value>,
    /// Seed of everything random in the run.
    pub seed: u64,
}

/// One named value at one optimiser step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// A name of the glossary, such as `policy_loss`.
    pub name: String,
    /// Its value.
    pub value: f64,
}

/// Progress of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainProgress {
    /// The run.
    pub run: i64,
    /// What is being done, in one or two words (`loading`, `reference`, `updating`, `evaluating`).
    pub phase: String,
    /// Optimiser steps done.
    pub step: u32,
    /// Optimiser steps planned.
    pub total_steps: u32,
    /// Share of the whole run that is done, 0 to 1.
    pub fraction: f64,
    /// Values at this step; may be empty.
    pub metrics: Vec<Metric>,
}

/// How one training step's answer changed, measured after the update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepChange {
    /// The step.
    pub uid: StepUid,
    /// Its reward's value.
    pub reward: f64,
    /// Mean log-probability per token before the run.
    pub before: f64,
    /// Mean log-probability per token after the run.
    pub after: f64,
}

/// A finished run, before the gate decides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainOutcome {
    /// The run.
    pub run: i64,
    /// The new adapter.
    pub adapter: AdapterFiles,
    /// The estimator that was used.
    pub estimator: Estimator,
    /// Why that one, in one sentence.
    pub estimator_reason: String,
    /// `full` or `response`.
    pub grad_scope: String,
    /// Steps that contributed gradient.
    pub used: Vec<StepUid>,
    /// Steps that did not, each with its reason.
    pub dropped: Vec<(StepUid, String)>,
    /// What the update did to the training steps.
    pub changes: Vec<StepChange>,
    /// Summary metrics of the run.
    pub metrics: Vec<Metric>,
    /// The gate's evidence.
    pub evaluation: Evaluation,
    /// The resolved configuration as JSON.
    pub config: serde_json::Value,
    /// Wall-clock seconds, pauses excluded.
    pub seconds: f64,
    /// Peak resident memory of the worker in bytes.
    pub peak_memory: u64,
}

/// What the candidate does on data it was not trained on, next to its parent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean log-probability (per token) of liked minus disliked held-out answers, parent.
    pub margin_before: Option<f64>,
    /// The same under the candidate.
    pub margin_after: Option<f64>,
    /// Held-out steps behind the margin: liked, disliked.
    pub held_out: (u32, u32),
    /// Mean negative log-probability per token on the frozen capability texts, base model.
    pub probe_base: f64,
    /// The same under the parent.
    pub probe_before: f64,
    /// The same under the candidate.
    pub probe_after: f64,
    /// Mean token entropy (nats) of sampled probe answers, parent.
    pub entropy_before: f64,
    /// The same under the candidate.
    pub entropy_after: f64,
    /// Share of repeated 4-grams in sampled probe answers, parent.
    pub repetition_before: f64,
    /// The same under the candidate.
    pub repetition_after: f64,
    /// Mean KL (k3, nats per token) of the candidate to the base on the training batch.
    pub kl_to_base: f64,
}

/// Teacher-forced log-probabilities asked of a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoreItem {
    /// Prompt token ids.
    pub prompt_ids: Vec<u32>,
    /// Response token ids.
    pub response_ids: Vec<u32>,
}

/// How a run ended in the worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TrainResult {
    /// An adapter was made.
    Done {
        /// The outcome.
        outcome: Box<TrainOutcome>,
    },
    /// Nothing was made; the code says whether that is a failure.
    Failed {
        /// Why.
        failure: Failure,
        /// Steps that were looked at and dropped, each with its reason.
        dropped: Vec<(StepUid, String)>,
    },
}
