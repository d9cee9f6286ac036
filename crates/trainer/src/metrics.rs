//! Sums over the tokens and examples of one update, turned into the metrics of the glossary.

use spotter_core::loss::{PolicyLoss, PreferenceLoss};
use spotter_core::train::Metric;

/// Sums over one update.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Tokens fed to the model.
    pub tokens: usize,
    policy_losses: Vec<f64>,
    kto_losses: Vec<f64>,
    preference_losses: Vec<f64>,
    margins: Vec<f64>,
    policy_tokens: usize,
    clipped: usize,
    ratio: f64,
    approx_kl: f64,
    sampled_tokens: usize,
    kl: f64,
    surprise: f64,
}

impl Tally {
    /// Counts one answer of the policy gradient.
    pub fn policy(&mut self, loss: &PolicyLoss, new: &[f64], old: &[f64], reference: &[f64]) {
        self.policy_losses.push(loss.loss);
        self.policy_tokens += new.len();
        self.clipped += loss.clipped;
        self.ratio += loss.ratio_sum;
        self.approx_kl += loss.approx_kl_sum;
        self.sampled(new, old, reference);
    }

    /// Counts one answer of KTO.
    pub fn kto(&mut self, loss: f64, new: &[f64], old: &[f64], reference: &[f64]) {
        self.kto_losses.push(loss);
        self.sampled(new, old, reference);
    }

    /// Counts one pair.
    pub fn pair(&mut self, loss: &PreferenceLoss) {
        self.preference_losses.push(loss.loss);
        self.margins.push(loss.margin);
    }

    fn sampled(&mut self, new: &[f64], old: &[f64], reference: &[f64]) {
        self.sampled_tokens += new.len();
        self.kl += weighted_k3(new, old, reference);
        self.surprise -= new.iter().sum::<f64>();
    }

    /// Mean KL to the base per token, if any sampled answer was seen.
    pub fn kl_to_base(&self) -> Option<f64> {
        (self.sampled_tokens > 0).then(|| self.kl / self.sampled_tokens as f64)
    }

    /// The metrics of an update that took `seconds`.
    pub fn metrics(&self, seconds: f64) -> Vec<Metric> {
        let mut out = Vec::new();
        let mut mean_of = |name: &str, values: &[f64]| {
            if !values.is_empty() {
                out.push(metric(name, spotter_core::advantage::mean(values)));
            }
        };
        mean_of("policy_loss", &self.policy_losses);
        mean_of("kto_loss", &self.kto_losses);
        mean_of("preference_loss", &self.preference_losses);
        mean_of("preference_margin", &self.margins);
        if self.policy_tokens > 0 {
            let n = self.policy_tokens as f64;
            out.push(metric("clip_fraction", self.clipped as f64 / n));
            out.push(metric("ratio", self.ratio / n));
            out.push(metric("approx_kl", self.approx_kl / n));
        }
        if let Some(kl) = self.kl_to_base() {
            out.push(metric("kl_to_base", kl));
            out.push(metric(
                "entropy",
                self.surprise / self.sampled_tokens as f64,
            ));
        }
        if seconds > 0.0 {
            out.push(metric("tokens_per_second", self.tokens as f64 / seconds));
        }
        out
    }
}

/// Largest weight of one token in [`weighted_k3`].
const MAX_WEIGHT: f64 = 2.0;

/// Sum over tokens of the k3 estimate of KL(new ‖ reference), each weighted by
/// `new / old`, at most [`MAX_WEIGHT`].
///
/// The tokens were sampled from `old`. Without the weight, a token that the
/// update has made unlikely would count `reference / new` times, although the new
/// policy never says it; without the bound, one that it has made likely would
/// count a thousand times.
pub fn weighted_k3(new: &[f64], old: &[f64], reference: &[f64]) -> f64 {
    new.iter()
        .zip(old)
        .zip(reference)
        .map(|((n, o), r)| {
            let d = (r - n).clamp(-20.0, 20.0);
            (n - o).clamp(-20.0, 20.0).exp().min(MAX_WEIGHT) * (d.exp() - d - 1.0)
        })
        .sum()
}

/// A metric by its name in the glossary.
pub fn metric(name: &str, value: f64) -> Metric {
    debug_assert!(
        spotter_core::glossary::term(name).is_some(),
        "'{name}' is not in the glossary"
    );
    Metric {
        name: name.to_owned(),
        value,
    }
}

/// Largest resident memory of this process in bytes; 0 where the platform does not tell.
pub fn peak_memory() -> u64 {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| {
            let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        })
        .map_or(0, |kibibytes| kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use spotter_core::loss::{Clip, clipped_policy_gradient};

    use super::{Tally, weighted_k3};

    #[test]
    fn an_unmoved_policy_has_ratio_one_and_no_kl() {
        let logprobs = [-1.0, -2.0];
        let clip = Clip {
            low: 0.2,
            high: 0.28,
            dual: 3.0,
        };
        let mut tally = Tally::default();
        let loss = clipped_policy_gradient(&logprobs, &logprobs, 1.0, &[], clip);
        tally.policy(&loss, &logprobs, &logprobs, &logprobs);
        let metrics = tally.metrics(1.0);
        let value = |name: &str| metrics.iter().find(|m| m.name == name).map(|m| m.value);
        assert_eq!(value("ratio"), Some(1.0));
        assert_eq!(value("kl_to_base"), Some(0.0));
        assert_eq!(value("entropy"), Some(1.5));
        assert_eq!(value("policy_loss"), Some(-1.0));
        assert_eq!(value("kto_loss"), None, "nothing of that kind was seen");
    }

    #[test]
    fn a_token_that_became_impossible_does_not_dominate_the_kl() {
        let kl = weighted_k3(&[-15.0], &[-1.0], &[-1.0]);
        assert!((kl - 1.0).abs() < 1e-3, "{kl}");
        let kl = weighted_k3(&[-0.1], &[-9.1], &[-9.1]);
        assert!(kl < 20.0, "nor does one that became certain: {kl}");
    }
}
