//! Advantage estimation as plain arithmetic on slices.
//!
//! Rewards in, advantages out. Nothing here knows tokens, models or storage; a
//! "step" is one model call, and a trajectory's steps are given in order.
//!
//! | function | estimator | source |
//! | --- | --- | --- |
//! | [`gae`] | generalised advantage estimation over the steps of a trajectory | Schulman et al. 2016, equations 11 to 16 |
//! | [`group_relative`] | GRPO | Shao et al. 2024 (DeepSeekMath), section 4.1; without division: Liu et al. 2025 (Dr. GRPO) |
//! | [`leave_one_out`] | RLOO | Ahmadian et al. 2024, equation 4 |
//! | [`RunningBaseline`] | reward minus a running mean, clipped | Williams 1992, with a baseline that outlives the batch |

/// Added to a standard deviation before dividing by it, as TRL's GRPO does.
const STD_EPSILON: f64 = 1e-4;

/// Advantages and value targets of one trajectory.
#[derive(Clone, Debug, PartialEq)]
pub struct Gae {
    /// One advantage per step.
    pub advantages: Vec<f64>,
    /// One target for the value function per step: advantage plus old value.
    pub returns: Vec<f64>,
}

/// Generalised advantage estimation over the steps of one trajectory.
///
/// `rewards[t]` follows the action of step `t`, `values[t]` is the old value of
/// the state before it. `bootstrap` is the value of the state after the last
/// step: 0 when the trajectory ended there. A missing value counts as 0.
///
/// Computes `δ_t = r_t + γ V_{t+1} − V_t` and `A_t = δ_t + γ λ A_{t+1}`.
pub fn gae(rewards: &[f64], values: &[f64], bootstrap: f64, gamma: f64, lambda: f64) -> Gae {
    let mut advantages = vec![0.0; rewards.len()];
    let (mut next_value, mut next_advantage) = (bootstrap, 0.0);
    for (t, reward) in rewards.iter().enumerate().rev() {
        let value = values.get(t).copied().unwrap_or(0.0);
        let delta = reward + gamma * next_value - value;
        next_advantage = delta + gamma * lambda * next_advantage;
        advantages[t] = next_advantage;
        next_value = value;
    }
    let returns = advantages
        .iter()
        .enumerate()
        .map(|(t, advantage)| advantage + values.get(t).copied().unwrap_or(0.0))
        .collect();
    Gae {
        advantages,
        returns,
    }
}

/// Group-relative advantages of the rollouts of one prompt: reward minus the
/// group's mean, divided by its sample standard deviation when `divide_by_std`.
///
/// A group of one, or of equal rewards, gives zeros.
pub fn group_relative(rewards: &[f64], divide_by_std: bool) -> Vec<f64> {
    let mean = mean(rewards);
    let scale = if divide_by_std {
        1.0 / (sample_std(rewards) + STD_EPSILON)
    } else {
        1.0
    };
    rewards.iter().map(|r| (r - mean) * scale).collect()
}

/// Leave-one-out advantages of the rollouts of one prompt: each reward minus the
/// mean of the others. A group of one gives zero.
pub fn leave_one_out(rewards: &[f64]) -> Vec<f64> {
    let n = rewards.len();
    if n < 2 {
        return vec![0.0; n];
    }
    let sum: f64 = rewards.iter().sum();
    rewards
        .iter()
        .map(|r| r - (sum - r) / (n - 1) as f64)
        .collect()
}

/// An exponential moving average of rewards, the baseline of sparse thumbs.
///
/// It outlives the batch (it is stored with the optimiser), so that an all-👎
/// batch still teaches while an all-👍 stream fades out.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RunningBaseline {
    /// The current baseline, 0 at first.
    pub value: f64,
}

impl RunningBaseline {
    /// Advantages `clip(r − b, ±limit)` of a batch against the baseline as it was
    /// before the batch. Not divided by a standard deviation: with 4 to 16
    /// samples that estimate is mostly noise.
    pub fn advantages(&self, rewards: &[f64], limit: f64) -> Vec<f64> {
        rewards
            .iter()
            .map(|r| (r - self.value).clamp(-limit, limit))
            .collect()
    }

    /// Moves the baseline towards each reward in turn: `b ← decay b + (1 − decay) r`.
    pub fn observe(&mut self, rewards: &[f64], decay: f64) {
        for reward in rewards {
            self.value = decay * self.value + (1.0 - decay) * reward;
        }
    }
}

/// Shifts to mean 0 and scales to sample standard deviation 1 (whitening).
///
/// Used on step-level GAE advantages of at least `min_count` steps; smaller
/// batches, where the deviation is noise, are returned as they are.
pub fn normalise(advantages: &[f64], min_count: usize) -> Vec<f64> {
    if advantages.len() < min_count.max(2) {
        return advantages.to_vec();
    }
    let (mean, std) = (mean(advantages), sample_std(advantages));
    advantages
        .iter()
        .map(|a| (a - mean) / (std + STD_EPSILON))
        .collect()
}

/// How much of the variance of `returns` the `values` explain:
/// `1 − Var(returns − values) / Var(returns)`. `None` when the returns do not
/// vary, because then nothing can be explained.
pub fn explained_variance(values: &[f64], returns: &[f64]) -> Option<f64> {
    let n = values.len().min(returns.len());
    if n < 2 {
        return None;
    }
    let residual: Vec<f64> = (0..n).map(|i| returns[i] - values[i]).collect();
    let total = variance(&returns[..n]);
    (total > 1e-12).then(|| 1.0 - variance(&residual) / total)
}

/// Arithmetic mean; 0 for an empty slice.
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() {
        0.0
    } else {
        values.iter().sum::<f64>() / values.len() as f64
    }
}

/// Standard deviation with Bessel's correction; 0 for fewer than two values.
pub fn sample_std(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let n = values.len() as f64;
    (variance(values) * n / (n - 1.0)).sqrt()
}

fn variance(values: &[f64]) -> f64 {
    let mean = mean(values);
    values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop, prop_assert, proptest};

    use super::{
        RunningBaseline, explained_variance, gae, group_relative, leave_one_out, normalise,
    };

    /// Equation 16 of the paper, term by term.
    fn naive_gae(rewards: &[f64], values: &[f64], gamma: f64, lambda: f64) -> Vec<f64> {
        let n = rewards.len();
        let value = |t: usize| if t < n { values[t] } else { 0.0 };
        (0..n)
            .map(|t| {
                (t..n)
                    .map(|l| {
                        let delta = rewards[l] + gamma * value(l + 1) - value(l);
                        (gamma * lambda).powi((l - t) as i32) * delta
                    })
                    .sum()
            })
            .collect()
    }

    proptest! {
        #[test]
        fn gae_equals_its_definition(
            steps in prop::collection::vec((-1.0f64..1.0, -2.0f64..2.0), 0..20),
            gamma in 0.0f64..=1.0,
            lambda in 0.0f64..=1.0,
        ) {
            let (rewards, values): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
            let got = gae(&rewards, &values, 0.0, gamma, lambda);
            for (a, b) in got.advantages.iter().zip(naive_gae(&rewards, &values, gamma, lambda)) {
                prop_assert!((a - b).abs() < 1e-9);
            }
        }

        #[test]
        fn undiscounted_gae_with_lambda_one_is_return_minus_value(
            steps in prop::collection::vec((-1.0f64..1.0, -2.0f64..2.0), 1..20),
        ) {
            let (rewards, values): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
            let got = gae(&rewards, &values, 0.0, 1.0, 1.0);
            for t in 0..rewards.len() {
                let rest: f64 = rewards[t..].iter().sum();
                prop_assert!((got.returns[t] - rest).abs() < 1e-9);
                prop_assert!((got.advantages[t] - (rest - values[t])).abs() < 1e-9);
            }
        }

        #[test]
        fn leave_one_out_is_the_scaled_group_difference(
            rewards in prop::collection::vec(-1.0f64..1.0, 2..12),
        ) {
            let n = rewards.len() as f64;
            for (a, b) in leave_one_out(&rewards).iter().zip(group_relative(&rewards, false)) {
                prop_assert!((a - b * n / (n - 1.0)).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn an_open_trajectory_is_bootstrapped() {
        let closed = gae(&[0.0], &[0.2], 0.0, 1.0, 0.95);
        let open = gae(&[0.0], &[0.2], 0.7, 1.0, 0.95);
        assert!((closed.advantages[0] + 0.2).abs() < 1e-12);
        assert!((open.advantages[0] - 0.5).abs() < 1e-12);
    }

    #[test]
    fn equal_rewards_and_groups_of_one_give_zero() {
        assert_eq!(group_relative(&[1.0, 1.0, 1.0], true), vec![0.0; 3]);
        assert_eq!(group_relative(&[1.0], true), vec![0.0]);
        assert_eq!(leave_one_out(&[-1.0]), vec![0.0]);
    }

    #[test]
    fn an_all_disliked_batch_teaches_and_an_all_liked_stream_fades() {
        let mut baseline = RunningBaseline::default();
        assert_eq!(baseline.advantages(&[-1.0, -1.0], 2.0), vec![-1.0, -1.0]);
        baseline.observe(&[1.0; 30], 0.9);
        let advantage = baseline.advantages(&[1.0], 2.0)[0];
        assert!(advantage > 0.0 && advantage < 0.05, "{advantage}");
        baseline.value = 1.5;
        assert_eq!(baseline.advantages(&[-1.0], 2.0), vec![-2.0], "clipped");
    }

    #[test]
    fn normalise_leaves_small_batches_alone() {
        assert_eq!(normalise(&[1.0, 3.0], 8), vec![1.0, 3.0]);
        let white = normalise(&[1.0, 2.0, 3.0, 4.0], 4);
        assert!(white.iter().sum::<f64>().abs() < 1e-9);
    }

    #[test]
    fn explained_variance_is_one_for_a_perfect_critic_and_none_without_variance() {
        assert_eq!(explained_variance(&[1.0, 2.0], &[1.0, 2.0]), Some(1.0));
        assert_eq!(explained_variance(&[0.0, 0.0], &[1.0, 2.0]), Some(0.0));
        assert_eq!(explained_variance(&[0.0, 0.5], &[1.0, 1.0]), None);
    }
}
