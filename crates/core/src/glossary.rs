//! Every training metric in words: the tooltips of the charts.
//!
//! A metric is reported only under a name of this table (a test of the trainer
//! holds it to that), so that no number is shown without its meaning.

use serde::Serialize;

/// What one metric means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Term {
    /// Name in metric rows and in the API.
    pub name: &'static str,
    /// Title of its chart.
    pub title: &'static str,
    /// Unit, empty for plain ratios.
    pub unit: &'static str,
    /// What it measures, in one or two sentences.
    pub explanation: &'static str,
    /// What is normal, and what a deviation tells.
    pub normal: &'static str,
}

/// The glossary, in the order in which charts are shown.
pub const GLOSSARY: &[Term] = &[
    Term {
        name: "reward_mean",
        title: "Reward",
        unit: "",
        explanation: "Mean reward of the answers in this update, from −1 (disliked) to 1 (liked).",
        normal: "Rises from run to run when the model learns what you like.",
    },
    Term {
        name: "policy_loss",
        title: "Policy loss",
        unit: "",
        explanation: "The clipped policy-gradient loss: reward-weighted change of the answers' probabilities.",
        normal: "Near 0 at first and then slightly negative; its size means little by itself.",
    },
    Term {
        name: "preference_loss",
        title: "Preference loss",
        unit: "nats",
        explanation: "Loss on pairs of a preferred and a rejected answer (your corrections), likelihood of the preferred one included.",
        normal: "Falls within a run. Flat means the corrections are not being learned.",
    },
    Term {
        name: "preference_margin",
        title: "Preference margin",
        unit: "nats",
        explanation: "How much further the model has moved towards the preferred answer than towards the rejected one, against the base model.",
        normal: "Starts near 0 and grows.",
    },
    Term {
        name: "kto_loss",
        title: "KTO loss",
        unit: "",
        explanation: "Loss of liked and disliked answers that cannot be importance-weighted.",
        normal: "Starts at 0.5 and falls.",
    },
    Term {
        name: "value_loss",
        title: "Value loss",
        unit: "",
        explanation: "Squared error of the critic's prediction of the reward still to come.",
        normal: "Falls over several runs.",
    },
    Term {
        name: "explained_variance",
        title: "Explained variance",
        unit: "",
        explanation: "Share of the variation in rewards that the critic predicts. Below 0.1 its advice is not used.",
        normal: "From 0 towards 1. Negative means that the critic is worse than guessing the mean.",
    },
    Term {
        name: "advantage_mean",
        title: "Advantage",
        unit: "",
        explanation: "How much better than expected the answers were, on average.",
        normal: "Near 0. Clearly negative means that most answers disappointed.",
    },
    Term {
        name: "advantage_std",
        title: "Advantage spread",
        unit: "",
        explanation: "Standard deviation of the advantages. At 0 there is nothing to tell answers apart by.",
        normal: "0.3 to 1.5.",
    },
    Term {
        name: "baseline",
        title: "Baseline",
        unit: "",
        explanation: "The running mean of rewards that a new reward is compared with.",
        normal: "Follows your share of thumbs up, between −1 and 1.",
    },
    Term {
        name: "kl_to_base",
        title: "KL to base",
        unit: "nats/token",
        explanation: "How far the trained answers have drifted from the model without adapter (k3 estimate).",
        normal: "Below the run's target. A sudden rise comes before repetitive or broken text.",
    },
    Term {
        name: "approx_kl",
        title: "KL of this update",
        unit: "nats/token",
        explanation: "How far this run has moved from where it started.",
        normal: "Between 0 and 0.05 per run for policy gradients.",
    },
    Term {
        name: "clip_fraction",
        title: "Clip fraction",
        unit: "",
        explanation: "Share of tokens whose change was large enough to be cut off by the clip.",
        normal: "0 at the first step and below 0.3 later. Higher means that the learning rate is too large.",
    },
    Term {
        name: "ratio",
        title: "Ratio",
        unit: "",
        explanation: "Mean probability ratio of the new to the old model over the answers' tokens.",
        normal: "Floats around 1.0.",
    },
    Term {
        name: "change_kept",
        title: "Change kept",
        unit: "",
        explanation: "Share of what the lesson changed that was kept; the rest was taken back because it cost general ability.",
        normal: "1.0. Lower means that the lesson had to be scaled down.",
    },
    Term {
        name: "importance_weight",
        title: "Importance weight",
        unit: "",
        explanation: "Mean correction for the difference between the model that answered and the model that is trained.",
        normal: "Around 1.0. Lower means that the answers came from a stale or a cut distribution.",
    },
    Term {
        name: "logprob_gap",
        title: "Serve/train gap",
        unit: "nats/token",
        explanation: "Mean absolute difference between the log-probabilities recorded when answering and those recomputed for training, for answers of the adapter that is trained.",
        normal: "Below 0.001 on CPU and below 0.005 on a GPU. Sampling below top-p 1 adds a constant.",
    },
    Term {
        name: "entropy",
        title: "Entropy",
        unit: "nats/token",
        explanation: "Mean surprise of the answers' own tokens, an estimate of how varied the model still is.",
        normal: "0.3 to 2. A collapse towards 0 means that one answer has taken over.",
    },
    Term {
        name: "gradient_norm",
        title: "Gradient norm",
        unit: "",
        explanation: "Length of the gradient before it is cut to the maximum.",
        normal: "0.1 to 10. Zero means that nothing is learned; spikes point to odd samples.",
    },
    Term {
        name: "learning_rate",
        title: "Learning rate",
        unit: "",
        explanation: "Step size of the optimiser at this step.",
        normal: "Warms up over a few steps and then stays or decays.",
    },
    Term {
        name: "response_length",
        title: "Answer length",
        unit: "tokens",
        explanation: "Mean length of the answers in this update.",
        normal: "Whatever you like; a steady drift that you did not ask for is a warning.",
    },
    Term {
        name: "liked_change",
        title: "Liked answers",
        unit: "nats/token",
        explanation: "Change in the mean log-probability of the liked answers (and of your corrections) over the run.",
        normal: "Above 0.",
    },
    Term {
        name: "disliked_change",
        title: "Disliked answers",
        unit: "nats/token",
        explanation: "Change in the mean log-probability of the disliked answers over the run.",
        normal: "Below the change of the liked answers, usually below 0.",
    },
    Term {
        name: "samples_used",
        title: "Answers used",
        unit: "answers",
        explanation: "Answers that contributed to this run.",
        normal: "All that were claimed, apart from the dropped ones.",
    },
    Term {
        name: "samples_dropped",
        title: "Answers dropped",
        unit: "answers",
        explanation: "Answers that were looked at and left out; each has its reason.",
        normal: "0 to a few.",
    },
    Term {
        name: "pairs_used",
        title: "Corrections used",
        unit: "pairs",
        explanation: "Pairs of a preferred and a rejected answer in this run.",
        normal: "One per correction, or more when an answer was retried.",
    },
    Term {
        name: "tokens_per_second",
        title: "Training speed",
        unit: "tokens/s",
        explanation: "Tokens that went forward and backward per second.",
        normal: "Depends on the machine; falls while requests are being answered.",
    },
    Term {
        name: "peak_memory",
        title: "Peak memory",
        unit: "bytes",
        explanation: "Largest resident memory of the training worker so far.",
        normal: "Close to the estimate shown before the run.",
    },
];

/// The glossary's entry for a metric.
pub fn term(name: &str) -> Option<&'static Term> {
    GLOSSARY.iter().find(|term| term.name == name)
}

#[cfg(test)]
mod tests {
    use super::{GLOSSARY, term};

    #[test]
    fn names_are_unique_and_every_entry_is_complete() {
        let mut names: Vec<_> = GLOSSARY.iter().map(|term| term.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), GLOSSARY.len(), "a name occurs twice");
        for entry in GLOSSARY {
            assert!(
                entry.explanation.ends_with('.') && entry.normal.ends_with('.'),
                "{}",
                entry.name
            );
        }
        assert_eq!(term("kl_to_base").map(|term| term.unit), Some("nats/token"));
    }
}
