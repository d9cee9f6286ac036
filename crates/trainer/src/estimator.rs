//! What each step of the batch is used for: which estimator, which answers go to
//! the policy gradient, to KTO, into preference pairs, and which are left out.
//!
//! Pure bookkeeping on [`TrainStep`]s; no model. Every step ends in exactly one
//! of four places, and a step that is left out has its reason.

use std::collections::{BTreeMap, HashMap, HashSet};

use spotter_core::advantage::{RunningBaseline, group_relative, leave_one_out};
use spotter_core::code::Failure;
use spotter_core::id::StepUid;
use spotter_core::reward::RewardSource;
use spotter_core::train::{Estimator, PreferencePair, TrainRequest, TrainStep};

use crate::config::TrainConfig;

/// Most pairs one rated answer takes part in.
const MAX_PAIRS_PER_ANSWER: usize = 2;

/// An answer for the policy gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyItem {
    /// Index into the run's steps.
    pub step: usize,
    /// The reward that reaches it: its own, or its trajectory's outcome.
    pub reward: f64,
    /// How much it counts: source weight times credit.
    pub weight: f64,
}

/// An answer for KTO.
#[derive(Clone, Debug, PartialEq)]
pub struct KtoItem {
    /// Index into the run's steps.
    pub step: usize,
    /// Liked or disliked.
    pub liked: bool,
    /// How much it counts.
    pub weight: f64,
}

/// What the batch is used for.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// The estimator of the policy gradient, or `Kto` or `Dpo` when there is none.
    pub estimator: Estimator,
    /// Why, in one sentence.
    pub reason: String,
    /// Answers for the policy gradient.
    pub policy: Vec<PolicyItem>,
    /// Answers for KTO.
    pub kto: Vec<KtoItem>,
    /// Preferred and rejected answers.
    pub pairs: Vec<PreferencePair>,
    /// The rated step that is each pair's preferred answer; none for a correction.
    pub chosen: Vec<Option<StepUid>>,
    /// Steps left out, each with its reason.
    pub dropped: Vec<(StepUid, String)>,
}

/// Turns the text of a correction into an answer's token ids, end of turn included.
pub type EncodeAnswer<'a> = &'a dyn Fn(&str) -> Result<Vec<u32>, Failure>;

/// The steps of a run: the request's own, then those replayed for what they still
/// teach, which are corrections, liked answers, and disliked ones whose prompt has a
/// liked answer, too.
pub fn steps_of(request: &TrainRequest) -> Vec<TrainStep> {
    let own: HashSet<&StepUid> = request.steps.iter().map(|step| &step.uid).collect();
    let liked = |step: &TrainStep| step.reward.as_ref().is_some_and(|r| r.value > 0.0);
    let answered: HashSet<&[u32]> = request
        .steps
        .iter()
        .chain(&request.replay)
        .filter(|step| liked(step))
        .map(|step| step.prompt_ids.as_slice())
        .collect();
    let teaches = |step: &TrainStep| {
        step.correction.is_some()
            || liked(step)
            || (personal(step) && answered.contains(step.prompt_ids.as_slice()))
    };
    let replayed = request
        .replay
        .iter()
        .filter(|step| !own.contains(&step.uid) && teaches(step));
    request.steps.iter().chain(replayed).cloned().collect()
}

/// Whether a person rated it.
fn personal(step: &TrainStep) -> bool {
    step.reward
        .as_ref()
        .is_some_and(|reward| reward.source == RewardSource::User)
}

/// Sorts the steps of a run by what they are good for, and chooses the estimator.
pub fn select(
    request: &TrainRequest,
    steps: &[TrainStep],
    config: &TrainConfig,
    encode: EncodeAnswer<'_>,
) -> Result<Selection, Failure> {
    let (mut policy, mut kto, mut pairs, mut dropped) = (vec![], vec![], vec![], vec![]);
    let outcomes = trajectory_outcomes(steps);
    for (index, step) in steps.iter().enumerate() {
        if step.prompt_ids.is_empty() {
            dropped.push((step.uid.clone(), "It has no prompt tokens.".into()));
            continue;
        }
        if let Some(correction) = step.correction.as_deref().filter(|c| !c.trim().is_empty()) {
            let chosen_ids = encode(correction.trim())?;
            if chosen_ids != step.response_ids && !chosen_ids.is_empty() {
                pairs.push(PreferencePair {
                    uid: step.uid.clone(),
                    prompt_ids: step.prompt_ids.clone(),
                    chosen_ids,
                    rejected_ids: step.response_ids.clone(),
                });
                continue;
            }
        }
        if step.response_ids.is_empty() {
            dropped.push((step.uid.clone(), "It has no answer tokens.".into()));
            continue;
        }
        let (reward, weight) = match (&step.reward, outcomes.get(step.trajectory.as_str())) {
            (Some(own), _) => (own.value, own.source.weight() * own.credit),
            (None, Some(&outcome)) => outcome,
            (None, None) => {
                dropped.push((step.uid.clone(), "It has no rating.".into()));
                continue;
            }
        };
        let age = i64::from(request.live.0) - i64::from(step.adapter.0);
        let usable = step.logprobs.len() == step.response_ids.len();
        if usable && age <= config.max_staleness && request.estimator != Estimator::Kto {
            policy.push(PolicyItem {
                step: index,
                reward,
                weight,
            });
        } else if reward != 0.0 {
            kto.push(KtoItem {
                step: index,
                liked: reward > 0.0,
                weight: weight * reward.abs().min(1.0),
            });
        } else {
            dropped.push((
                step.uid.clone(),
                "Its reward is 0, and it is too old for the policy gradient.".into(),
            ));
        }
    }

    // A disliked answer and its liked retry say more together than apart.
    let mut chosen = vec![None; pairs.len()];
    if request.estimator == Estimator::Auto {
        let sizes = group_sizes(steps, &policy);
        let alone = |step: usize| {
            personal(&steps[step])
                && sizes
                    .get(&steps[step].prompt_uid)
                    .is_none_or(|&size| size < 2)
        };
        let own: Vec<PolicyItem> = policy.iter().filter(|p| alone(p.step)).cloned().collect();
        let old: Vec<KtoItem> = kto.iter().filter(|k| alone(k.step)).cloned().collect();
        let used = pair_up(steps, &own, &old, &mut pairs, &mut chosen);
        policy.retain(|item| !used.contains(&item.step));
        kto.retain(|item| !used.contains(&item.step));
    }

    let trajectories = group_sizes(steps, &policy);
    let grouped = |item: &PolicyItem| trajectories[&steps[item.step].prompt_uid] >= 2;
    let in_groups = policy.iter().filter(|item| grouped(item)).count();
    let (estimator, reason) = match request.estimator {
        Estimator::Auto => choose(config, policy.len(), in_groups, kto.len(), pairs.len()),
        other => (other, format!("{} was asked for.", name(other))),
    };
    match estimator {
        Estimator::Dpo => {
            let used = pair_up(steps, &policy, &kto, &mut pairs, &mut chosen);
            let rated = policy
                .iter()
                .map(|p| p.step)
                .chain(kto.iter().map(|k| k.step));
            for step in rated.filter(|step| !used.contains(step)) {
                dropped.push((
                    steps[step].uid.clone(),
                    "It has no counterpart to form a pair with.".into(),
                ));
            }
            policy.clear();
            kto.clear();
        }
        Estimator::Grpo | Estimator::Rloo if request.estimator != Estimator::Auto => {
            policy.retain(|item| {
                let keep = grouped(item);
                if !keep {
                    dropped.push((
                        steps[item.step].uid.clone(),
                        "Its prompt has only one attempt, so there is no group.".into(),
                    ));
                }
                keep
            });
        }
        _ => {}
    }
    Ok(Selection {
        estimator,
        reason,
        policy,
        kto,
        pairs,
        chosen,
        dropped,
    })
}

/// The estimator's name in sentences.
pub fn name(estimator: Estimator) -> &'static str {
    match estimator {
        Estimator::Auto => "The automatic choice",
        Estimator::Ppo => "PPO",
        Estimator::Binary => "The thumbs estimator",
        Estimator::Grpo => "GRPO",
        Estimator::Rloo => "RLOO",
        Estimator::Kto => "KTO",
        Estimator::Dpo => "DPO",
    }
}

fn choose(
    config: &TrainConfig,
    policy: usize,
    in_groups: usize,
    kto: usize,
    pairs: usize,
) -> (Estimator, String) {
    if policy == 0 && kto == 0 && pairs > 0 {
        (
            Estimator::Dpo,
            format!(
                "All rated answers form preference pairs ({pairs}), by a correction or a liked retry."
            ),
        )
    } else if policy == 0 && kto > 0 {
        (
            Estimator::Kto,
            format!("None of the {kto} rated answers has log-probabilities of a recent adapter."),
        )
    } else if policy >= config.min_critic_steps {
        (
            Estimator::Ppo,
            format!("{policy} rated steps are enough to fit a critic."),
        )
    } else if in_groups * 2 > policy {
        (
            Estimator::Rloo,
            format!("{in_groups} of {policy} rated steps belong to repeated attempts at a prompt."),
        )
    } else {
        (
            Estimator::Binary,
            format!(
                "{policy} rated answers to different prompts are too few for a critic ({} are needed).",
                config.min_critic_steps
            ),
        )
    }
}

/// The outcome of each trajectory whose last step carries one: value and weight.
fn trajectory_outcomes(steps: &[TrainStep]) -> HashMap<&str, (f64, f64)> {
    steps
        .iter()
        .filter(|step| step.is_last)
        .filter_map(|step| {
            let reward = step.reward.as_ref()?;
            matches!(reward.source, RewardSource::Outcome | RewardSource::Rule).then(|| {
                (
                    step.trajectory.as_str(),
                    (reward.value, reward.source.weight()),
                )
            })
        })
        .collect()
}

/// Whether most of the policy's steps belong to prompts with several trajectories.
pub fn has_groups(steps: &[TrainStep], policy: &[PolicyItem]) -> bool {
    let sizes = group_sizes(steps, policy);
    let grouped = policy
        .iter()
        .filter(|item| sizes[&steps[item.step].prompt_uid] >= 2);
    grouped.count() * 2 > policy.len()
}

/// Number of trajectories of each prompt.
fn group_sizes(steps: &[TrainStep], policy: &[PolicyItem]) -> HashMap<String, usize> {
    let mut members: HashMap<String, Vec<&str>> = HashMap::new();
    for item in policy {
        let step = &steps[item.step];
        let group = members.entry(step.prompt_uid.clone()).or_default();
        if !group.contains(&step.trajectory.as_str()) {
            group.push(step.trajectory.as_str());
        }
    }
    members.into_iter().map(|(k, v)| (k, v.len())).collect()
}

/// Forms pairs of liked and disliked answers to one and the same prompt. Returns
/// the steps that take part.
fn pair_up(
    steps: &[TrainStep],
    policy: &[PolicyItem],
    kto: &[KtoItem],
    pairs: &mut Vec<PreferencePair>,
    chosen_uids: &mut Vec<Option<StepUid>>,
) -> Vec<usize> {
    let mut by_prompt: BTreeMap<&[u32], (Vec<usize>, Vec<usize>)> = BTreeMap::new();
    let rated = policy.iter().map(|p| (p.step, p.reward)).chain(
        kto.iter()
            .map(|k| (k.step, if k.liked { 1.0 } else { -1.0 })),
    );
    for (step, reward) in rated {
        let (liked, disliked) = by_prompt.entry(&steps[step].prompt_ids).or_default();
        if reward > 0.0 {
            liked.push(step);
        } else if reward < 0.0 {
            disliked.push(step);
        }
    }
    let mut used = Vec::new();
    for (liked, disliked) in by_prompt.values() {
        if liked.is_empty() || disliked.is_empty() {
            continue;
        }
        let rounds = (liked.len().max(disliked.len()))
            .min(MAX_PAIRS_PER_ANSWER * liked.len().min(disliked.len()));
        for i in 0..rounds {
            let (chosen, rejected) = (liked[i % liked.len()], disliked[i % disliked.len()]);
            pairs.push(PreferencePair {
                uid: steps[rejected].uid.clone(),
                prompt_ids: steps[rejected].prompt_ids.clone(),
                chosen_ids: steps[chosen].response_ids.clone(),
                rejected_ids: steps[rejected].response_ids.clone(),
            });
            chosen_uids.push(Some(steps[chosen].uid.clone()));
            used.extend([chosen, rejected]);
        }
    }
    used
}

/// Advantages that need no critic, one per item of `policy`.
///
/// `Grpo` and `Rloo` compare the trajectories of one prompt; an item without a
/// group, and every item of the other estimators, is compared with the running
/// baseline.
pub fn advantages(
    estimator: Estimator,
    steps: &[TrainStep],
    policy: &[PolicyItem],
    baseline: RunningBaseline,
    config: &TrainConfig,
) -> Vec<f64> {
    let rewards: Vec<f64> = policy.iter().map(|item| item.reward).collect();
    let mut out = baseline.advantages(&rewards, config.advantage_limit);
    if matches!(estimator, Estimator::Grpo | Estimator::Rloo) {
        let mut groups: BTreeMap<&str, BTreeMap<&str, Vec<usize>>> = BTreeMap::new();
        for (i, item) in policy.iter().enumerate() {
            let step = &steps[item.step];
            groups
                .entry(&step.prompt_uid)
                .or_default()
                .entry(step.trajectory.as_str())
                .or_default()
                .push(i);
        }
        for trajectories in groups.values().filter(|t| t.len() >= 2) {
            let scores: Vec<f64> = trajectories
                .values()
                .map(|items| score(steps, policy, items))
                .collect();
            let relative = match estimator {
                Estimator::Grpo => group_relative(&scores, true),
                _ => leave_one_out(&scores),
            };
            for (items, advantage) in trajectories.values().zip(relative) {
                for &i in items {
                    out[i] = advantage;
                }
            }
        }
    }
    out.iter()
        .zip(policy)
        .map(|(advantage, item)| advantage * item.weight)
        .collect()
}

/// Reward of a trajectory: the mean of its rewards with full credit, or of all when none has it.
fn score(steps: &[TrainStep], policy: &[PolicyItem], items: &[usize]) -> f64 {
    let own = |full: bool| -> Vec<f64> {
        items
            .iter()
            .filter(|&&i| {
                let reward = steps[policy[i].step].reward.as_ref();
                !full || reward.is_some_and(|r| r.credit >= 1.0)
            })
            .map(|&i| policy[i].reward)
            .collect()
    };
    let full = own(true);
    if full.is_empty() {
        spotter_core::advantage::mean(&own(false))
    } else {
        spotter_core::advantage::mean(&full)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use spotter_core::adapter::AdapterVersion;
    use spotter_core::advantage::RunningBaseline;
    use spotter_core::id::TrajectoryUid;
    use spotter_core::reward::RewardSource;
    use spotter_core::train::{Dial, Estimator, StepReward, TrainRequest, TrainStep};

    use super::{advantages, select};
    use crate::config::TrainConfig;

    pub(crate) fn step(prompt: &[u32], response: &[u32], reward: Option<f64>) -> TrainStep {
        let trajectory = TrajectoryUid::new();
        TrainStep {
            uid: spotter_core::id::StepUid::new(),
            prompt_uid: trajectory.as_str().to_owned(),
            trajectory,
            index: 0,
            is_last: true,
            prompt_ids: prompt.to_vec(),
            response_ids: response.to_vec(),
            logprobs: vec![-1.0; response.len()],
            adapter: AdapterVersion::BASE,
            temperature: 1.0,
            top_p: 1.0,
            reward: reward.map(|value| StepReward {
                value,
                source: RewardSource::User,
                credit: 1.0,
            }),
            correction: None,
        }
    }

    pub(crate) fn request(steps: Vec<TrainStep>, estimator: Estimator) -> TrainRequest {
        TrainRequest {
            run: 1,
            checkpoint_dir: "unused".into(),
            output_dir: "unused".into(),
            version: AdapterVersion(1),
            parent: None,
            parent_state: None,
            live: AdapterVersion::BASE,
            steps,
            replay: vec![],
            held_out: vec![],
            dial: Dial::Normal,
            estimator,
            overrides: serde_json::Map::new(),
            seed: 1,
        }
    }

    fn chosen(request: &TrainRequest) -> super::Selection {
        let config = TrainConfig::for_dial(Dial::Normal);
        select(request, &request.steps, &config, &|text| {
            Ok(vec![text.len() as u32, 2])
        })
        .expect("selects")
    }

    #[test]
    fn thumbs_on_different_prompts_use_the_running_baseline() {
        let request = request(
            vec![step(&[1], &[2], Some(1.0)), step(&[2], &[3], Some(-1.0))],
            Estimator::Auto,
        );
        let selection = chosen(&request);
        assert_eq!(selection.estimator, Estimator::Binary);
        assert_eq!(selection.policy.len(), 2);
        let got = advantages(
            selection.estimator,
            &request.steps,
            &selection.policy,
            RunningBaseline { value: 0.5 },
            &TrainConfig::for_dial(Dial::Normal),
        );
        assert_eq!(got, [0.5, -1.5]);
    }

    #[test]
    fn a_correction_becomes_a_pair_and_an_unrated_step_is_dropped_with_a_reason() {
        let mut corrected = step(&[1], &[9, 9], Some(-1.0));
        corrected.correction = Some(" better ".into());
        let request = request(vec![corrected, step(&[1], &[2], None)], Estimator::Auto);
        let selection = chosen(&request);
        assert_eq!(selection.estimator, Estimator::Dpo);
        assert_eq!(selection.pairs[0].chosen_ids, [6, 2]);
        assert_eq!(selection.pairs[0].rejected_ids, [9, 9]);
        assert_eq!(selection.dropped[0].1, "It has no rating.");
    }

    #[test]
    fn stale_answers_and_answers_without_logprobs_go_to_kto() {
        let mut remote = step(&[1], &[2], Some(1.0));
        remote.logprobs.clear();
        let mut request = request(vec![remote, step(&[2], &[3], Some(-1.0))], Estimator::Auto);
        request.live = AdapterVersion(9);
        let selection = chosen(&request);
        assert_eq!(selection.estimator, Estimator::Kto);
        assert_eq!(selection.kto.len(), 2);
        assert!(selection.kto[0].liked && !selection.kto[1].liked);
    }

    #[test]
    fn attempts_at_one_prompt_are_compared_with_each_other() {
        let mut steps = vec![
            step(&[1], &[2], Some(1.0)),
            step(&[1], &[3], Some(-1.0)),
            step(&[1], &[4], Some(-1.0)),
        ];
        for step in &mut steps {
            step.prompt_uid = "same".into();
        }
        let request = request(steps, Estimator::Auto);
        let selection = chosen(&request);
        assert_eq!(selection.estimator, Estimator::Rloo);
        let got = advantages(
            Estimator::Rloo,
            &request.steps,
            &selection.policy,
            RunningBaseline::default(),
            &TrainConfig::for_dial(Dial::Normal),
        );
        assert_eq!(got, [2.0, -1.0, -1.0]);
    }

    #[test]
    fn a_trajectorys_outcome_reaches_its_earlier_steps() {
        let mut first = step(&[1], &[2], None);
        let mut last = step(&[1, 2, 5], &[3], Some(1.0));
        first.is_last = false;
        last.trajectory = first.trajectory.clone();
        last.index = 1;
        if let Some(reward) = &mut last.reward {
            reward.source = RewardSource::Outcome;
        }
        let selection = chosen(&request(vec![first, last], Estimator::Binary));
        assert_eq!(selection.policy.len(), 2);
        assert_eq!(selection.policy[0].reward, 1.0);
    }

    #[test]
    fn replayed_steps_are_those_that_still_teach_and_come_last() {
        let mut with_replay = request(vec![step(&[1], &[2], Some(-1.0))], Estimator::Auto);
        with_replay.replay = vec![
            step(&[2], &[3], Some(1.0)),
            step(&[3], &[4], Some(-1.0)),
            with_replay.steps[0].clone(),
        ];
        let steps = super::steps_of(&with_replay);
        assert_eq!(steps.len(), 2);
        assert_eq!(steps[1].uid, with_replay.replay[0].uid);
    }

    #[test]
    fn a_disliked_answer_and_its_liked_retry_become_a_pair_and_stay_one_in_replay() {
        let (down, up) = (step(&[1], &[3], Some(-1.0)), step(&[1], &[2], Some(1.0)));
        let (liked, other) = (up.uid.clone(), step(&[7], &[4], Some(-1.0)));
        let mut request = request(vec![down, up, other.clone()], Estimator::Auto);
        let selection = chosen(&request);
        assert_eq!(selection.pairs[0].chosen_ids, [2]);
        assert_eq!(selection.pairs[0].rejected_ids, [3]);
        assert_eq!(selection.chosen, [Some(liked)]);
        assert_eq!(selection.policy.len(), 1, "only the answer without a retry");

        request.replay = std::mem::replace(&mut request.steps, vec![other]);
        request.replay.pop();
        assert_eq!(super::steps_of(&request).len(), 3);
    }

    #[test]
    fn dpo_pairs_liked_with_disliked_answers_to_one_prompt() {
        let request = request(
            vec![
                step(&[1], &[2], Some(1.0)),
                step(&[1], &[3], Some(-1.0)),
                step(&[8], &[4], Some(-1.0)),
            ],
            Estimator::Dpo,
        );
        let selection = chosen(&request);
        assert_eq!(selection.pairs.len(), 1);
        assert_eq!(selection.pairs[0].chosen_ids, [2]);
        assert_eq!(selection.dropped.len(), 1);
    }
}
