//! The batch of a run between selection and loss: its sequences, their credit,
//! and the examples that contribute gradient.
//!
//! Arithmetic and bookkeeping only; the model is called elsewhere.

use std::collections::{BTreeMap, HashMap, HashSet};

use spotter_core::advantage::{RunningBaseline, mean, normalise, sample_std};
use spotter_core::id::StepUid;
use spotter_core::loss::{geometric_mean_ratio, importance_weights};
use spotter_core::reward::RewardSource;
use spotter_core::train::{Estimator, Metric, StepChange, TrainRequest, TrainStep};

use crate::config::TrainConfig;
use crate::critic::{Critic, Episode};
use crate::estimator::{self, KtoItem, Selection};
use crate::metrics::{metric, weighted_k3};
use crate::packing::Sequence;

/// Steps from which step-level advantages are whitened.
const MIN_STEPS_TO_NORMALISE: usize = 64;

/// What the trainer computes before the first update, per sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prepared {
    /// Log-probabilities of the parent, π_old.
    pub old: Vec<Vec<f64>>,
    /// Log-probabilities of the base model.
    pub reference: Vec<Vec<f64>>,
    /// Last hidden state at the last prompt token, under the parent.
    pub features: Vec<Vec<f32>>,
}

/// Where the sequences of a selection lie.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// The sequence of each step of the policy gradient and of KTO.
    pub by_step: HashMap<usize, usize>,
    /// The first pair's chosen answer; its rejected one follows, then the next pair.
    pub pairs_from: usize,
}

/// All sequences of a selection: rated answers, then chosen and rejected answers in turn.
pub fn sequences<'a>(
    steps: &'a [TrainStep],
    selection: &'a Selection,
) -> (Vec<Sequence<'a>>, Layout) {
    let mut layout = Layout::default();
    let mut sequences = Vec::new();
    let rated = selection.policy.iter().map(|item| item.step);
    for step in rated.chain(selection.kto.iter().map(|item| item.step)) {
        layout.by_step.insert(step, sequences.len());
        sequences.push(Sequence {
            prompt: &steps[step].prompt_ids,
            response: &steps[step].response_ids,
            // A greedy answer counts as sampled at temperature 1.
            temperature: match steps[step].temperature {
                t if t > 0.0 => t,
                _ => 1.0,
            },
        });
    }
    layout.pairs_from = sequences.len();
    for pair in &selection.pairs {
        for response in [&pair.chosen_ids, &pair.rejected_ids] {
            sequences.push(Sequence {
                prompt: &pair.prompt_ids,
                response,
                temperature: 1.0,
            });
        }
    }
    (sequences, layout)
}

/// Advantages of the policy answers, and the critic behind them.
#[derive(Clone, Debug, PartialEq)]
pub struct Credit {
    /// The estimator that was used in the end.
    pub estimator: Estimator,
    /// Why, in one sentence.
    pub reason: String,
    /// One per policy answer.
    pub advantages: Vec<f64>,
    /// The critic to keep, if one was fitted or inherited.
    pub critic: Option<Critic>,
    /// Out-of-sample explained variance, if a critic was fitted.
    pub explained_variance: Option<f64>,
    /// Value loss, if a critic was fitted.
    pub value_loss: Option<f64>,
}

/// Computes advantages; for PPO, fits the critic and falls back to the running
/// baseline (or to prompt groups, where there are some) while it explains too little.
pub fn credit(
    steps: &[TrainStep],
    selection: &Selection,
    layout: &Layout,
    prepared: &Prepared,
    baseline: RunningBaseline,
    inherited: Option<Critic>,
    config: &TrainConfig,
) -> Credit {
    let policy = &selection.policy;
    let mut credit = Credit {
        estimator: selection.estimator,
        reason: selection.reason.clone(),
        advantages: Vec::new(),
        critic: inherited,
        explained_variance: None,
        value_loss: None,
    };
    if selection.estimator == Estimator::Ppo && !policy.is_empty() {
        let mut members: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (i, item) in policy.iter().enumerate() {
            let trajectory = steps[item.step].trajectory.as_str();
            members.entry(trajectory).or_default().push(i);
        }
        for items in members.values_mut() {
            items.sort_by_key(|&i| steps[policy[i].step].index);
        }
        let episodes: Vec<Episode> = members
            .values()
            .map(|items| Episode {
                features: items
                    .iter()
                    .map(|&i| prepared.features[layout.by_step[&policy[i].step]].clone())
                    .collect(),
                rewards: items
                    .iter()
                    .map(|&i| own_reward(&steps[policy[i].step]))
                    .collect(),
            })
            .collect();
        let size = episodes
            .first()
            .and_then(|episode| episode.features.first())
            .map_or(0, Vec::len);
        let critic = credit
            .critic
            .take()
            .filter(|critic| critic.weights.len() == size)
            .unwrap_or_else(|| Critic::new(size));
        let fit = critic.fit(&episodes, config);
        credit.critic = Some(fit.critic);
        credit.explained_variance = fit.explained_variance;
        credit.value_loss = Some(fit.value_loss);
        if fit
            .explained_variance
            .is_some_and(|ev| ev >= config.min_explained_variance)
        {
            let mut advantages = vec![0.0; policy.len()];
            for (items, values) in members.values().zip(&fit.advantages) {
                for (&i, &value) in items.iter().zip(values) {
                    advantages[i] = value;
                }
            }
            credit.advantages = normalise(&advantages, MIN_STEPS_TO_NORMALISE);
            return credit;
        }
        let explained = fit.explained_variance.map_or_else(
            || "the rewards do not vary".to_owned(),
            |ev| format!("it explains {:.2} of the variance", ev.max(-9.99)),
        );
        credit.estimator = if estimator::has_groups(steps, policy) {
            Estimator::Rloo
        } else {
            Estimator::Binary
        };
        credit.reason = format!(
            "{} The critic is not used yet ({explained}, {:.2} is needed), so {} took its place.",
            credit.reason,
            config.min_explained_variance,
            match credit.estimator {
                Estimator::Rloo => "the other attempts at each prompt",
                _ => "the running baseline",
            },
        );
    }
    credit.advantages = estimator::advantages(credit.estimator, steps, policy, baseline, config);
    credit
}

/// The reward a step itself received, as GAE counts it. Partial credit is left
/// out: it stands for what GAE does by itself.
fn own_reward(step: &TrainStep) -> f64 {
    step.reward
        .as_ref()
        .filter(|reward| reward.credit >= 1.0)
        .map_or(0.0, |reward| reward.value * reward.source.weight())
}

/// One unit of gradient. Sequences are indices into the run's sequences.
#[derive(Clone, Debug, PartialEq)]
pub enum Example {
    /// An answer for the policy gradient.
    Policy {
        /// The answer.
        sequence: usize,
        /// Its advantage.
        advantage: f64,
        /// Importance weights of its tokens.
        weights: Vec<f64>,
        /// Weight of its likelihood, above 0 for a liked answer.
        likelihood: f64,
    },
    /// An answer for KTO.
    Kto {
        /// The answer.
        sequence: usize,
        /// Liked or disliked.
        liked: bool,
        /// How much it counts.
        weight: f64,
    },
    /// A preferred and a rejected answer.
    Pair {
        /// The preferred answer.
        chosen: usize,
        /// The rejected answer.
        rejected: usize,
    },
}

impl Example {
    /// The example's sequences.
    pub fn members(&self) -> Vec<usize> {
        match self {
            Self::Policy { sequence, .. } | Self::Kto { sequence, .. } => vec![*sequence],
            Self::Pair { chosen, rejected } => vec![*chosen, *rejected],
        }
    }
}

/// The examples of a run, with what was used and what was dropped.
#[derive(Clone, Debug, Default)]
pub struct Examples {
    /// What contributes gradient.
    pub examples: Vec<Example>,
    /// Steps behind them.
    pub used: Vec<StepUid>,
    /// How many of them are not replayed.
    pub fresh: usize,
    /// Steps left out, each with its reason; replayed ones are not listed.
    pub dropped: Vec<(StepUid, String)>,
    /// Mean importance weight over the policy answers' tokens.
    pub importance_weight: Option<f64>,
    /// Mean difference between recorded and recomputed log-probabilities, for
    /// answers of the parent itself.
    pub logprob_gap: Option<f64>,
}

/// Forms the examples: weighs and rejects policy answers that are off the policy,
/// moves rejected answers of a person to KTO, and leaves out what teaches nothing.
pub fn examples(
    request: &TrainRequest,
    steps: &[TrainStep],
    selection: &Selection,
    layout: &Layout,
    credit: &Credit,
    prepared: &Prepared,
    config: &TrainConfig,
) -> Examples {
    let mut out = Examples {
        dropped: selection.dropped.clone(),
        ..Examples::default()
    };
    let (mut weights_seen, mut gaps) = (Vec::new(), Vec::new());
    let parent = request.parent.as_ref().map_or(0, |parent| parent.version.0);
    let mut kto = selection.kto.clone();
    for (item, &advantage) in selection.policy.iter().zip(&credit.advantages) {
        let step = &steps[item.step];
        let sequence = layout.by_step[&item.step];
        let old = &prepared.old[sequence];
        let behaviour: Vec<f64> = step.logprobs.iter().map(|&l| f64::from(l)).collect();
        let greedy = step.temperature <= 0.0;
        if !greedy {
            let ratio = geometric_mean_ratio(old, &behaviour);
            if !(config.sequence_ratio_low..=config.sequence_ratio_high).contains(&ratio) {
                let personal = step
                    .reward
                    .as_ref()
                    .is_some_and(|reward| reward.source == RewardSource::User);
                if personal && item.reward != 0.0 {
                    kto.push(KtoItem {
                        step: item.step,
                        liked: item.reward > 0.0,
                        weight: item.weight,
                    });
                } else {
                    out.dropped.push((
                        step.uid.clone(),
                        format!(
                            "It is too far off the current policy (mean ratio {ratio:.2}, allowed {} to {}).",
                            config.sequence_ratio_low, config.sequence_ratio_high
                        ),
                    ));
                }
                continue;
            }
            if step.adapter.0 == parent {
                let gap = old.iter().zip(&behaviour).map(|(o, b)| (o - b).abs());
                gaps.extend(gap);
            }
        }
        if advantage == 0.0 {
            out.dropped.push((
                step.uid.clone(),
                "Its reward is what was expected, so it teaches nothing.".into(),
            ));
            continue;
        }
        let weights = if greedy {
            Vec::new()
        } else {
            importance_weights(old, &behaviour, config.importance_cap)
        };
        weights_seen.extend_from_slice(&weights);
        out.used.push(step.uid.clone());
        out.examples.push(Example::Policy {
            sequence,
            advantage: if advantage < 0.0 {
                advantage * config.disliked_weight
            } else {
                advantage
            },
            weights,
            likelihood: if item.reward > 0.0 && advantage > 0.0 {
                config.liked_nll_weight * item.weight
            } else {
                0.0
            },
        });
    }
    for item in kto {
        out.used.push(steps[item.step].uid.clone());
        out.examples.push(Example::Kto {
            sequence: layout.by_step[&item.step],
            liked: item.liked,
            weight: item.weight,
        });
    }
    for (i, pair) in selection.pairs.iter().enumerate() {
        out.used.push(pair.uid.clone());
        out.used.extend(selection.chosen[i].clone());
        out.examples.push(Example::Pair {
            chosen: layout.pairs_from + 2 * i,
            rejected: layout.pairs_from + 2 * i + 1,
        });
    }
    let mut seen = HashSet::new();
    out.used.retain(|uid| seen.insert(uid.clone()));
    let own: HashSet<&StepUid> = request.steps.iter().map(|step| &step.uid).collect();
    out.dropped.retain(|(uid, _)| own.contains(uid));
    out.fresh = out.used.iter().filter(|uid| own.contains(uid)).count();
    out.importance_weight = (!weights_seen.is_empty()).then(|| mean(&weights_seen));
    out.logprob_gap = (!gaps.is_empty()).then(|| mean(&gaps));
    out
}

/// Metrics of the batch as a whole, which no update changes.
pub fn batch_metrics(
    selection: &Selection,
    credit: &Credit,
    examples: &Examples,
    sequences: &[Sequence<'_>],
    baseline: RunningBaseline,
    steps: &[TrainStep],
) -> Vec<Metric> {
    let rewards: Vec<f64> = steps
        .iter()
        .filter_map(|step| step.reward.as_ref().map(|reward| reward.value))
        .collect();
    let lengths: Vec<f64> = sequences.iter().map(|s| s.response.len() as f64).collect();
    let mut out = vec![
        metric("reward_mean", mean(&rewards)),
        metric("baseline", baseline.value),
        metric("response_length", mean(&lengths)),
        metric("samples_used", examples.used.len() as f64),
        metric("samples_dropped", examples.dropped.len() as f64),
        metric("pairs_used", selection.pairs.len() as f64),
    ];
    if !credit.advantages.is_empty() {
        out.push(metric("advantage_mean", mean(&credit.advantages)));
        out.push(metric("advantage_std", sample_std(&credit.advantages)));
    }
    let optional = [
        ("explained_variance", credit.explained_variance),
        ("value_loss", credit.value_loss),
        ("importance_weight", examples.importance_weight),
        ("logprob_gap", examples.logprob_gap),
    ];
    out.extend(
        optional
            .into_iter()
            .filter_map(|(name, value)| value.map(|value| metric(name, value))),
    );
    out
}

/// How each used answer's mean log-probability changed, per step.
pub fn changes(
    steps: &[TrainStep],
    selection: &Selection,
    layout: &Layout,
    prepared: &Prepared,
    after: &[Vec<f64>],
) -> Vec<StepChange> {
    let mut out = Vec::new();
    let rated = selection
        .policy
        .iter()
        .map(|item| (item.step, item.reward))
        .chain(
            selection
                .kto
                .iter()
                .map(|item| (item.step, if item.liked { 1.0 } else { -1.0 })),
        );
    for (step, reward) in rated {
        let sequence = layout.by_step[&step];
        out.push(StepChange {
            uid: steps[step].uid.clone(),
            reward,
            before: mean(&prepared.old[sequence]),
            after: mean(&after[sequence]),
        });
    }
    for (i, pair) in selection.pairs.iter().enumerate() {
        let chosen = layout.pairs_from + 2 * i;
        let mut add = |uid: &StepUid, reward: f64, sequence: usize| {
            if out.iter().all(|change| change.uid != *uid) {
                out.push(StepChange {
                    uid: uid.clone(),
                    reward,
                    before: mean(&prepared.old[sequence]),
                    after: mean(&after[sequence]),
                });
            }
        };
        add(&pair.uid, -1.0, chosen + 1);
        if let Some(uid) = &selection.chosen[i] {
            add(uid, 1.0, chosen);
        }
    }
    out
}

/// `liked_change` and `disliked_change`: mean over liked answers and corrections, and
/// over disliked and rejected answers.
pub fn change_metrics(
    changes: &[StepChange],
    selection: &Selection,
    layout: &Layout,
    prepared: &Prepared,
    after: &[Vec<f64>],
) -> Vec<Metric> {
    let side = |liked: bool| -> Vec<f64> {
        changes
            .iter()
            .filter(|change| change.reward != 0.0 && (change.reward > 0.0) == liked)
            .map(|change| change.after - change.before)
            .collect()
    };
    let (mut liked, disliked) = (side(true), side(false));
    let corrections = (0..selection.pairs.len()).filter(|&i| selection.chosen[i].is_none());
    for i in corrections {
        let chosen = layout.pairs_from + 2 * i;
        liked.push(mean(&after[chosen]) - mean(&prepared.old[chosen]));
    }
    let mut out = Vec::new();
    if !liked.is_empty() {
        out.push(metric("liked_change", mean(&liked)));
    }
    if !disliked.is_empty() {
        out.push(metric("disliked_change", mean(&disliked)));
    }
    out
}

/// Mean KL to the base per token over the rated answers, or over the rejected ones
/// when there are only pairs. Rejected answers are left out otherwise: a replayed one
/// was sampled long before the parent, and its estimate says nothing about what the
/// model does now.
pub fn sampled_kl(layout: &Layout, prepared: &Prepared, after: &[Vec<f64>]) -> f64 {
    let (mut sum, mut tokens) = (0.0, 0);
    for (i, new) in after.iter().enumerate() {
        let rejected = i >= layout.pairs_from && !(i - layout.pairs_from).is_multiple_of(2);
        if i < layout.pairs_from || (layout.pairs_from == 0 && rejected) {
            sum += weighted_k3(new, &prepared.old[i], &prepared.reference[i]);
            tokens += new.len();
        }
    }
    if tokens == 0 {
        0.0
    } else {
        sum / tokens as f64
    }
}

#[cfg(test)]
mod tests {
    use spotter_core::advantage::RunningBaseline;
    use spotter_core::reward::RewardSource;
    use spotter_core::train::{Dial, Estimator, TrainRequest};

    use super::{Credit, Example, Examples, Prepared, credit, examples, sequences};
    use crate::config::TrainConfig;
    use crate::estimator::select;
    use crate::estimator::tests::{request, step};

    /// Runs selection, credit and examples with `old` as every answer's log-probability.
    fn prepare(
        request: &TrainRequest,
        old: f64,
        feature: impl Fn(usize) -> f32,
    ) -> (Credit, Examples) {
        let config = TrainConfig::for_dial(Dial::Normal);
        let selection = select(request, &request.steps, &config, &|text| {
            Ok(vec![text.len() as u32, 2])
        })
        .expect("selects");
        let (sequences, layout) = sequences(&request.steps, &selection);
        let logprobs: Vec<Vec<f64>> = sequences
            .iter()
            .map(|s| vec![old; s.response.len()])
            .collect();
        let prepared = Prepared {
            old: logprobs.clone(),
            reference: logprobs,
            features: (0..sequences.len())
                .map(|i| vec![feature(i), 1.0])
                .collect(),
        };
        let baseline = RunningBaseline::default();
        let credit = credit(
            &request.steps,
            &selection,
            &layout,
            &prepared,
            baseline,
            None,
            &config,
        );
        let examples = examples(
            request,
            &request.steps,
            &selection,
            &layout,
            &credit,
            &prepared,
            &config,
        );
        (credit, examples)
    }

    fn steps(n: usize) -> Vec<spotter_core::train::TrainStep> {
        (0..n as u32)
            .map(|i| step(&[i, 1], &[2, 3], Some(if i % 3 == 0 { 1.0 } else { -1.0 })))
            .collect()
    }

    #[test]
    fn ppo_uses_its_critic_when_it_explains_the_rewards() {
        let request = request(steps(70), Estimator::Auto);
        let (credit, _) = prepare(&request, -1.0, |i| if i % 3 == 0 { 1.0 } else { -1.0 });
        assert_eq!(credit.estimator, Estimator::Ppo);
        assert!(credit.explained_variance.is_some_and(|ev| ev > 0.5));
        assert!(credit.critic.is_some());
    }

    #[test]
    fn ppo_falls_back_and_says_so_while_its_critic_explains_nothing() {
        let request = request(steps(70), Estimator::Ppo);
        let (credit, _) = prepare(&request, -1.0, |_| 0.5);
        assert_eq!(credit.estimator, Estimator::Binary);
        assert!(
            credit.reason.contains("running baseline"),
            "{}",
            credit.reason
        );
        assert!(
            credit.critic.is_some(),
            "it is kept and improves with more data"
        );
    }

    #[test]
    fn answers_far_off_the_policy_go_to_kto_or_are_dropped_with_a_reason() {
        let mut steps = steps(2);
        if let Some(reward) = &mut steps[1].reward {
            reward.source = RewardSource::Rule;
        }
        let request = request(steps, Estimator::Binary);
        let (_, examples) = prepare(&request, -4.0, |_| 0.0);
        assert!(matches!(
            examples.examples[..],
            [Example::Kto { liked: true, .. }]
        ));
        assert!(examples.dropped[0].1.contains("off the current policy"));
    }

    #[test]
    fn an_on_policy_answer_has_weight_one_and_no_gap() {
        let request = request(steps(2), Estimator::Binary);
        let (_, examples) = prepare(&request, -1.0, |_| 0.0);
        assert_eq!(examples.importance_weight, Some(1.0));
        assert_eq!(examples.logprob_gap, Some(0.0));
        assert_eq!(examples.used.len(), 2);
    }

    #[test]
    fn a_greedy_answer_counts_as_sampled_at_temperature_one() {
        let mut steps = steps(1);
        steps[0].temperature = 0.0;
        steps[0].logprobs = vec![0.0, 0.0];
        let request = request(steps, Estimator::Binary);
        let (_, examples) = prepare(&request, -3.0, |_| 0.0);
        assert!(matches!(
            &examples.examples[..],
            [Example::Policy { weights, .. }] if weights.is_empty()
        ));
    }
}
