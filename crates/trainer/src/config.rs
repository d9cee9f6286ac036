//! Training settings: what a person chose (a dial and raw overrides) and what
//! that resolves to.
//!
//! Raw input is the [`Dial`] and a JSON map of overrides; [`TrainConfig`] is the
//! resolved form, in which every field has a value that was checked. The
//! resolved form is stored with the run. Sources of defaults: PPO = Schulman et
//! al. 2017 and Huang et al. 2022 ("37 implementation details"); LoRA =
//! "LoRA Without Regret" (Schulman et al. 2025); DAPO = Yu et al. 2025; KTO, DPO =
//! their papers and TRL's defaults; "measured" = LOG.md of this project.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use spotter_core::code::{Code, Failure};
use spotter_core::loss::{Clip, Kto};
use spotter_core::train::Dial;

/// How the learning rate moves after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Stays.
    Constant,
    /// Falls linearly to a tenth at the last step.
    Linear,
}

/// Which tokens the gradient goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// `Full` up to `full_scope_max_tokens` per sequence, `Response` above.
    Auto,
    /// All tokens: exact.
    Full,
    /// Response tokens only; the prompt's keys and values are constants.
    Response,
}

/// Every knob of a training run, resolved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    // Adapter.
    /// Rank r of a fresh adapter. Default 16 (LoRA: reinforcement learning needs little rank).
    pub lora_rank: usize,
    /// Scale α of a fresh adapter; its output is scaled by α/r. Default 32 (α = 2r).
    pub lora_alpha: f64,

    // Optimiser.
    /// Peak learning rate of the adapter. From the dial. LoRA wants about ten times the rate of
    /// full fine-tuning; measured.
    pub learning_rate: f64,
    /// Optimiser steps over which the rate rises from a fraction to its peak. Default 2.
    pub warmup_steps: u32,
    /// The rate after the warm-up. Default `linear`; measured.
    pub schedule: Schedule,
    /// AdamW's first-moment decay. Default 0.9.
    pub adam_beta1: f64,
    /// AdamW's second-moment decay. Default 0.98: few steps need a short memory.
    pub adam_beta2: f64,
    /// AdamW's ε. Default 1e-8.
    pub adam_epsilon: f64,
    /// Decoupled weight decay. Default 0.
    pub weight_decay: f64,
    /// Whether the parent's AdamW moments are taken up. Default false: they come from other answers
    /// and, with few steps a run, outweigh the new ones.
    pub keep_moments: bool,
    /// The gradient is scaled down to this norm. Default 1.0 (PPO details, 11, for large models).
    pub max_gradient_norm: f64,
    /// Passes over the batch. From the dial.
    pub epochs: u32,
    /// Answers per optimiser step; a correction pair counts as one. Default 4; measured.
    pub minibatch: usize,

    // Policy gradient.
    /// ε of the ratio below 1. Default 0.2 (PPO).
    pub clip_low: f64,
    /// ε of the ratio above 1. Default 0.28 (DAPO, "clip-higher").
    pub clip_high: f64,
    /// Dual-clip constant c. Default 3.0 (Ye et al. 2020).
    pub dual_clip: f64,
    /// Weight of the policy-gradient loss. Default 1.0.
    pub policy_weight: f64,
    /// Weight of a liked answer's mean negative log-likelihood, beside its policy gradient.
    /// Default 1.0; measured.
    pub liked_nll_weight: f64,
    /// Weight of negative advantages. Default 0.25: pushing an answer down says nothing about what
    /// to say instead, and at full weight a dozen dislikes drive the text to odd words; measured.
    pub disliked_weight: f64,
    /// β of the k3 penalty to the base model. Default 0.02 (OpenClaw-RL's documentation).
    pub kl_coefficient: f64,
    /// Nats per token of mean KL to base on the batch above which the run stops early. From the
    /// dial.
    pub kl_target: f64,
    /// Weight of the pull towards the base model on neutral texts. Default 2.0; measured.
    pub retention_weight: f64,
    /// Neutral texts per optimiser step. Default 2.
    pub retention_texts: usize,
    /// Upper bound of token importance weights. Default 2.0 (verl).
    pub importance_cap: f64,
    /// A sequence whose geometric-mean ratio to its sampler is below this is rejected. Default 0.5.
    pub sequence_ratio_low: f64,
    /// Above this it is rejected, too. Default 2.0.
    pub sequence_ratio_high: f64,
    /// Adapter versions an answer may be old for the policy gradient; older ones go to KTO.
    /// Default 2.
    pub max_staleness: i64,
    /// Decay of the running baseline of rewards. Default 0.9.
    pub baseline_decay: f64,
    /// Bound of an advantage's size for sparse thumbs. Default 2.0.
    pub advantage_limit: f64,

    // Critic.
    /// Discount γ between steps. Default 1 (episodes are short).
    pub gamma: f64,
    /// λ of GAE. Default 0.95 (PPO).
    pub lambda: f64,
    /// ε of the value clip. Default 0.2 (PPO).
    pub value_clip: f64,
    /// Ridge penalty of the value head, relative to the features' mean squared size. Default 1.0.
    pub critic_ridge: f64,
    /// Passes over the batch that fit the critic. Default 5.
    pub critic_passes: u32,
    /// Explained variance from which the critic's advantages are used. Default 0.1.
    pub min_explained_variance: f64,
    /// Steps from which fitting a critic is tried when nothing else is asked for. Default 64.
    pub min_critic_steps: usize,

    // Preferences.
    /// β of KTO. Default 0.1 (TRL).
    pub kto_beta: f64,
    /// Weight of the KTO loss when it joins another estimator. Default 1.0.
    pub kto_weight: f64,
    /// β of DPO. Default 0.1 (TRL).
    pub dpo_beta: f64,
    /// Weight of the preferred answer's mean negative log-likelihood. Default 1.0; measured.
    pub dpo_nll_weight: f64,
    /// Weight of the preference loss when it joins a policy gradient. Default 1.0; measured.
    pub preference_weight: f64,

    /// Most that a run may raise the probe's loss above the base's, as a share; a run that ends
    /// above keeps only as much of its change as fits. Default 0.02.
    pub max_probe_rise: f64,

    // Memory.
    /// Which tokens the gradient goes through. Default `auto`.
    pub grad_scope: Scope,
    /// Sequence length in tokens up to which `auto` means `full`. Default 2048.
    pub full_scope_max_tokens: usize,
    /// Most tokens of a micro-batch; it is halved when memory runs out. Default 2048.
    pub micro_batch_tokens: usize,

    // Evaluation.
    /// Tokens sampled per probe question for entropy and repetition. 0 leaves sampling out.
    /// Default 48.
    pub probe_tokens: usize,
}

impl TrainConfig {
    /// The defaults at a position of the dial.
    pub fn for_dial(dial: Dial) -> Self {
        let (learning_rate, epochs, kl_target) = match dial {
            Dial::Gentle => (3e-4, 4, 1.0),
            Dial::Normal => (1e-3, 6, 3.0),
            Dial::Bold => (1.5e-3, 8, 6.0),
        };
        Self {
            lora_rank: 16,
            lora_alpha: 32.0,
            learning_rate,
            warmup_steps: 2,
            schedule: Schedule::Linear,
            adam_beta1: 0.9,
            adam_beta2: 0.98,
            adam_epsilon: 1e-8,
            weight_decay: 0.0,
            keep_moments: false,
            max_gradient_norm: 1.0,
            epochs,
            minibatch: 4,
            clip_low: 0.2,
            clip_high: 0.28,
            dual_clip: 3.0,
            policy_weight: 1.0,
            liked_nll_weight: 1.0,
            disliked_weight: 0.25,
            kl_coefficient: 0.02,
            kl_target,
            retention_weight: 2.0,
            retention_texts: 2,
            importance_cap: 2.0,
            sequence_ratio_low: 0.5,
            sequence_ratio_high: 2.0,
            max_staleness: 2,
            baseline_decay: 0.9,
            advantage_limit: 2.0,
            gamma: 1.0,
            lambda: 0.95,
            value_clip: 0.2,
            critic_ridge: 1.0,
            critic_passes: 5,
            min_explained_variance: 0.1,
            min_critic_steps: 64,
            kto_beta: 0.1,
            kto_weight: 1.0,
            dpo_beta: 0.1,
            dpo_nll_weight: 1.0,
            preference_weight: 1.0,
            max_probe_rise: 0.02,
            grad_scope: Scope::Auto,
            full_scope_max_tokens: 2048,
            micro_batch_tokens: 2048,
            probe_tokens: 48,
        }
    }

    /// Resolves the dial and the overrides of single settings by name.
    ///
    /// Fails with [`Code::InvalidRequest`], naming the setting, when a name is
    /// unknown, a value has the wrong type, or a value is out of range.
    pub fn resolve(dial: Dial, overrides: &Map<String, Value>) -> Result<Self, Failure> {
        let invalid = |message: String| Failure::new(Code::InvalidRequest, message);
        let defaults = serde_json::to_value(Self::for_dial(dial))
            .map_err(|error| Failure::new(Code::Internal, error.to_string()))?;
        let Value::Object(mut merged) = defaults else {
            return Err(Failure::new(Code::Internal, "the settings are no object"));
        };
        for (name, value) in overrides {
            match merged.get_mut(name) {
                Some(slot) => *slot = value.clone(),
                None => return Err(invalid(format!("There is no training setting '{name}'."))),
            }
            // Checked one at a time, so that the message names the setting.
            serde_json::from_value::<Self>(Value::Object(merged.clone())).map_err(|error| {
                invalid(format!(
                    "The training setting '{name}' cannot be {value}: {error}."
                ))
            })?;
        }
        let config: Self = serde_json::from_value(Value::Object(merged))
            .map_err(|error| invalid(error.to_string()))?;
        config.check().map_err(invalid)?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let positive = [
            ("lora_rank", self.lora_rank as f64),
            ("lora_alpha", self.lora_alpha),
            ("learning_rate", self.learning_rate),
            ("adam_epsilon", self.adam_epsilon),
            ("max_gradient_norm", self.max_gradient_norm),
            ("epochs", f64::from(self.epochs)),
            ("minibatch", self.minibatch as f64),
            ("clip_low", self.clip_low),
            ("clip_high", self.clip_high),
            ("kl_target", self.kl_target),
            ("importance_cap", self.importance_cap),
            ("advantage_limit", self.advantage_limit),
            ("value_clip", self.value_clip),
            ("critic_ridge", self.critic_ridge),
            ("kto_beta", self.kto_beta),
            ("dpo_beta", self.dpo_beta),
            ("micro_batch_tokens", self.micro_batch_tokens as f64),
        ];
        let not_negative = [
            ("weight_decay", self.weight_decay),
            ("policy_weight", self.policy_weight),
            ("liked_nll_weight", self.liked_nll_weight),
            ("disliked_weight", self.disliked_weight),
            ("kl_coefficient", self.kl_coefficient),
            ("retention_weight", self.retention_weight),
            ("kto_weight", self.kto_weight),
            ("dpo_nll_weight", self.dpo_nll_weight),
            ("preference_weight", self.preference_weight),
            ("max_probe_rise", self.max_probe_rise),
            ("sequence_ratio_low", self.sequence_ratio_low),
            ("max_staleness", self.max_staleness as f64),
        ];
        let shares = [
            ("adam_beta1", self.adam_beta1),
            ("adam_beta2", self.adam_beta2),
            ("baseline_decay", self.baseline_decay),
            ("gamma", self.gamma),
            ("lambda", self.lambda),
        ];
        for (name, value) in positive {
            if !(value.is_finite() && value > 0.0) {
                return Err(format!("The training setting '{name}' must be above 0."));
            }
        }
        for (name, value) in not_negative {
            if !(value.is_finite() && value >= 0.0) {
                return Err(format!(
                    "The training setting '{name}' must not be negative."
                ));
            }
        }
        for (name, value) in shares {
            if !(0.0..=1.0).contains(&value) {
                return Err(format!(
                    "The training setting '{name}' must lie between 0 and 1."
                ));
            }
        }
        if self.adam_beta1 >= 1.0 || self.adam_beta2 >= 1.0 {
            return Err("AdamW's decays must be below 1.".into());
        }
        if self.clip_low >= 1.0 {
            return Err("The training setting 'clip_low' must be below 1.".into());
        }
        if self.dual_clip <= 1.0 {
            return Err("The training setting 'dual_clip' must be above 1.".into());
        }
        if self.sequence_ratio_low >= self.sequence_ratio_high {
            return Err("'sequence_ratio_low' must be below 'sequence_ratio_high'.".into());
        }
        Ok(())
    }

    /// The clip of the policy-gradient loss.
    pub fn clip(&self) -> Clip {
        Clip {
            low: self.clip_low,
            high: self.clip_high,
            dual: self.dual_clip,
        }
    }

    /// KTO's settings with weights that balance `liked` against `disliked`
    /// answers, between 1:1 and 4:3 in favour of neither (KTO paper, section 4.2).
    pub fn kto(&self, liked: usize, disliked: usize) -> Kto {
        let (desirable, undesirable) = match (liked, disliked) {
            (0, _) | (_, 0) => (1.0, 1.0),
            (l, d) if l >= d => (1.0, l as f64 / d as f64),
            (l, d) => (d as f64 / l as f64, 1.0),
        };
        // The cap keeps one lonely thumb from outweighing everything else.
        Kto {
            beta: self.kto_beta,
            desirable_weight: f64::min(desirable, 4.0),
            undesirable_weight: f64::min(undesirable, 4.0),
        }
    }

    /// Learning rate at optimiser step `step` (from 0) of `total`.
    pub fn learning_rate_at(&self, step: u32, total: u32) -> f64 {
        if step < self.warmup_steps {
            return self.learning_rate * f64::from(step + 1) / f64::from(self.warmup_steps + 1);
        }
        match self.schedule {
            Schedule::Constant => self.learning_rate,
            Schedule::Linear => {
                let span = f64::from(total.saturating_sub(self.warmup_steps).max(1));
                let done = f64::from(step - self.warmup_steps) / span;
                self.learning_rate * (1.0 - 0.9 * done.min(1.0))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};
    use spotter_core::code::Code;
    use spotter_core::train::Dial;

    use super::TrainConfig;

    fn overrides(value: Value) -> Map<String, Value> {
        value.as_object().cloned().unwrap_or_default()
    }

    #[test]
    fn the_dial_orders_rate_epochs_and_kl() {
        let [gentle, normal, bold] =
            [Dial::Gentle, Dial::Normal, Dial::Bold].map(TrainConfig::for_dial);
        assert!(gentle.learning_rate < normal.learning_rate);
        assert!(normal.learning_rate < bold.learning_rate);
        assert!(gentle.kl_target < normal.kl_target && normal.kl_target < bold.kl_target);
        assert!(gentle.epochs <= normal.epochs && normal.epochs <= bold.epochs);
        for config in [gentle, normal, bold] {
            config.check().expect("the defaults are valid");
        }
    }

    #[test]
    fn an_override_replaces_one_setting() {
        let config = TrainConfig::resolve(Dial::Normal, &overrides(json!({"learning_rate": 1e-5})))
            .expect("valid");
        assert_eq!(config.learning_rate, 1e-5);
        assert_eq!(config.epochs, TrainConfig::for_dial(Dial::Normal).epochs);
    }

    #[test]
    fn a_wrong_override_is_refused_by_name() {
        for wrong in [
            json!({"learing_rate": 1e-5}),
            json!({"epochs": "many"}),
            json!({"epochs": 0}),
            json!({"clip_low": 1.5}),
            json!({"gamma": -0.1}),
        ] {
            let name = wrong.as_object().and_then(|o| o.keys().next().cloned());
            let failure =
                TrainConfig::resolve(Dial::Normal, &overrides(wrong)).expect_err("must be refused");
            assert_eq!(failure.code, Code::InvalidRequest);
            assert!(
                failure.message.contains(&name.unwrap_or_default()),
                "{failure}"
            );
        }
    }

    #[test]
    fn the_rate_warms_up_and_decays() {
        let config = TrainConfig::for_dial(Dial::Normal);
        let rates: Vec<f64> = (0..10).map(|s| config.learning_rate_at(s, 10)).collect();
        assert!(rates[0] < rates[1] && rates[1] < rates[2]);
        assert_eq!(rates[2], config.learning_rate);
        assert!(rates[9] < rates[2] && rates[9] >= 0.1 * config.learning_rate);
    }
}
