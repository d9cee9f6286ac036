//! The value head: a linear function of the last hidden state at the last prompt
//! token, one value per step.
//!
//! Departures from PPO for language models, and why:
//! - One value per step (model call), not per token: a person rates answers.
//! - The features are frozen: the critic never moves the adapter, so a bad critic
//!   cannot hurt the policy except through advantages, and those are used only
//!   when the critic explains the returns.
//! - The values used for advantages come from heads that have not seen the step's
//!   own trajectory (cross-fitting), so explained variance is measured out of
//!   sample; with dozens of steps and hundreds of features, in-sample it would
//!   always be near 1.
//! - Each pass solves a ridge regression on the value-clipped residuals instead of
//!   taking gradient steps: exact, without a learning rate, and it does not
//!   overfit (Adam on the same loss explained −0.2 of a variance of which ridge
//!   explains 0.5).

use serde::{Deserialize, Serialize};
use spotter_core::advantage::{explained_variance, gae};
use spotter_core::loss::clipped_value;

use crate::config::TrainConfig;

/// Parts of the batch that are left out in turn.
const FOLDS: usize = 4;

/// A linear value head, zero at first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Critic {
    /// One weight per feature.
    pub weights: Vec<f32>,
    /// The constant term.
    pub bias: f32,
}

/// A trajectory for the critic: its steps in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Episode {
    /// Features of each step: the last hidden state at the last prompt token.
    pub features: Vec<Vec<f32>>,
    /// Reward that followed each step.
    pub rewards: Vec<f64>,
}

/// What fitting a critic to a batch gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The head fitted to all episodes, to be kept.
    pub critic: Critic,
    /// Out-of-sample values, per episode and step.
    pub values: Vec<Vec<f64>>,
    /// Advantages by GAE from those values, per episode and step.
    pub advantages: Vec<Vec<f64>>,
    /// Out-of-sample explained variance of the returns; `None` when the returns do not vary.
    pub explained_variance: Option<f64>,
    /// Mean clipped value loss of the kept head in its last pass.
    pub value_loss: f64,
}

impl Critic {
    /// A head that predicts 0.
    pub fn new(features: usize) -> Self {
        Self {
            weights: vec![0.0; features],
            bias: 0.0,
        }
    }

    /// The predicted return of a step with these features.
    pub fn value(&self, features: &[f32]) -> f64 {
        let dot: f64 = self
            .weights
            .iter()
            .zip(features)
            .map(|(w, x)| f64::from(*w) * f64::from(*x))
            .sum();
        dot + f64::from(self.bias)
    }

    /// Fits copies of this head to the episodes and computes advantages.
    pub fn fit(&self, episodes: &[Episode], config: &TrainConfig) -> Fit {
        let mut values = vec![Vec::new(); episodes.len()];
        let folds = FOLDS.min(episodes.len()).max(1);
        for fold in 0..folds {
            let others: Vec<&Episode> = (0..episodes.len())
                .filter(|i| i % folds != fold)
                .map(|i| &episodes[i])
                .collect();
            let mut head = self.clone();
            head.train(&others, config);
            for (i, episode) in episodes
                .iter()
                .enumerate()
                .filter(|(i, _)| i % folds == fold)
            {
                values[i] = episode.features.iter().map(|x| head.value(x)).collect();
            }
        }
        let (mut advantages, mut flat_values, mut flat_returns) = (vec![], vec![], vec![]);
        for (episode, values) in episodes.iter().zip(&values) {
            let out = gae(&episode.rewards, values, 0.0, config.gamma, config.lambda);
            advantages.push(out.advantages);
            flat_values.extend_from_slice(values);
            // What is explained is the observed return, not the λ-return, which
            // contains the values themselves.
            flat_returns.extend(observed_returns(&episode.rewards, config.gamma));
        }
        let mut critic = self.clone();
        let value_loss = critic.train(&episodes.iter().collect::<Vec<_>>(), config);
        Fit {
            critic,
            values,
            advantages,
            explained_variance: explained_variance(&flat_values, &flat_returns),
            value_loss,
        }
    }

    /// Ridge passes on the clipped residuals; returns the clipped value loss before the last.
    fn train(&mut self, episodes: &[&Episode], config: &TrainConfig) -> f64 {
        let (mut features, mut targets) = (Vec::new(), Vec::new());
        for episode in episodes {
            features.extend(episode.features.iter().map(Vec::as_slice));
            targets.extend(observed_returns(&episode.rewards, config.gamma));
        }
        let count = targets.len();
        if count == 0 {
            return 0.0;
        }
        let mut means = vec![0.0; self.weights.len()];
        for row in &features {
            for (mean, x) in means.iter_mut().zip(*row) {
                *mean += f64::from(*x) / count as f64;
            }
        }
        let centred: Vec<Vec<f64>> = features
            .iter()
            .map(|row| {
                row.iter()
                    .zip(&means)
                    .map(|(x, m)| f64::from(*x) - m)
                    .collect()
            })
            .collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        let mut gram: Vec<Vec<f64>> = centred
            .iter()
            .map(|a| centred.iter().map(|b| dot(a, b)).collect())
            .collect();
        let trace: f64 = (0..count).map(|i| gram[i][i]).sum();
        let ridge = config.critic_ridge * trace / count as f64 + 1e-9;
        for (i, row) in gram.iter_mut().enumerate() {
            row[i] += ridge;
        }
        let factor = cholesky(gram);
        let mut loss = 0.0;
        for _ in 0..config.critic_passes {
            let values: Vec<f64> = features.iter().map(|x| self.value(x)).collect();
            // The clipped value loss moves a value by at most the clip per pass.
            let residuals: Vec<f64> = values
                .iter()
                .zip(&targets)
                .map(|(v, r)| (r - v).clamp(-config.value_clip, config.value_clip))
                .collect();
            let mean = spotter_core::advantage::mean(&residuals);
            let dual = solve(&factor, residuals.iter().map(|r| r - mean).collect());
            let mut shift = mean;
            for (i, weight) in self.weights.iter_mut().enumerate() {
                let update: f64 = centred.iter().zip(&dual).map(|(row, a)| row[i] * a).sum();
                shift -= update * means[i];
                *weight += update as f32;
            }
            self.bias += shift as f32;
            loss = features
                .iter()
                .zip(values.iter().zip(&targets))
                .map(|(x, (v, r))| clipped_value(self.value(x), *v, *r, config.value_clip).0)
                .sum::<f64>()
                / count as f64;
        }
        loss
    }
}

/// Lower Cholesky factor of a symmetric positive definite matrix.
fn cholesky(mut matrix: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    for i in 0..matrix.len() {
        for j in 0..=i {
            let sum: f64 = (0..j).map(|k| matrix[i][k] * matrix[j][k]).sum();
            matrix[i][j] = if i == j {
                (matrix[i][i] - sum).max(1e-12).sqrt()
            } else {
                (matrix[i][j] - sum) / matrix[j][j]
            };
        }
    }
    matrix
}

/// Solves `L Lᵀ x = b` for a lower factor `L`.
fn solve(factor: &[Vec<f64>], mut b: Vec<f64>) -> Vec<f64> {
    for i in 0..b.len() {
        let sum: f64 = (0..i).map(|k| factor[i][k] * b[k]).sum();
        b[i] = (b[i] - sum) / factor[i][i];
    }
    for i in (0..b.len()).rev() {
        let sum: f64 = (i + 1..b.len()).map(|k| factor[k][i] * b[k]).sum();
        b[i] = (b[i] - sum) / factor[i][i];
    }
    b
}

/// Discounted sum of the rewards from each step on.
fn observed_returns(rewards: &[f64], gamma: f64) -> Vec<f64> {
    gae(rewards, &vec![0.0; rewards.len()], 0.0, gamma, 1.0).advantages
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;
    use spotter_core::train::Dial;

    use super::{Critic, Episode};
    use crate::config::TrainConfig;

    fn episodes(noise_only: bool) -> Vec<Episode> {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        (0..80)
            .map(|_| {
                let features: Vec<f32> = (0..32).map(|_| rng.random_range(-1.0..1.0)).collect();
                let signal = if noise_only {
                    rng.random_range(-1.0f32..1.0)
                } else {
                    features[3]
                };
                Episode {
                    features: vec![features],
                    rewards: vec![f64::from(signal.signum())],
                }
            })
            .collect()
    }

    #[test]
    fn a_predictable_reward_is_explained_and_noise_is_not() {
        let config = TrainConfig::for_dial(Dial::Normal);
        let fit = Critic::new(32).fit(&episodes(false), &config);
        let explained = fit.explained_variance;
        assert!(explained.is_some_and(|ev| ev > 0.3), "{explained:?}");
        let fit = Critic::new(32).fit(&episodes(true), &config);
        let explained = fit.explained_variance;
        assert!(explained.is_some_and(|ev| ev < 0.1), "{explained:?}");
    }

    #[test]
    fn a_fresh_critic_predicts_zero_and_equal_returns_explain_nothing() {
        let critic = Critic::new(4);
        assert_eq!(critic.value(&[1.0, 2.0, 3.0, 4.0]), 0.0);
        let same = vec![
            Episode {
                features: vec![vec![1.0; 4]],
                rewards: vec![1.0],
            };
            8
        ];
        let fit = critic.fit(&same, &TrainConfig::for_dial(Dial::Normal));
        assert_eq!(fit.explained_variance, None);
    }
}
