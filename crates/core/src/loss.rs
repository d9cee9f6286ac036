//! Losses and their gradients as plain arithmetic on slices.
//!
//! Each function takes per-token (or per-sequence) log-probabilities and returns
//! the loss together with its exact derivative with respect to them. The tensor
//! graph of the trainer therefore ends at the log-probabilities: what these
//! functions return is fed back as the upstream gradient, and every branch can
//! be tested without a model, against PyTorch and TRL
//! (`tests/python/loss_fixtures.py`) and against finite differences.
//!
//! All log-probabilities are natural. `new` is the policy being trained, `old`
//! the same policy before this update (recomputed by the trainer), `behaviour`
//! the distribution that sampled the tokens, `reference` the base model.

/// Where the ratio of the clipped surrogate is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    /// ε below 1: the ratio is cut at `1 − low`.
    pub low: f64,
    /// ε above 1: the ratio is cut at `1 + high`.
    pub high: f64,
    /// Dual clip c > 1: for negative advantages the loss is at most `c |A|`.
    pub dual: f64,
}

/// The clipped policy-gradient loss of one sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyLoss {
    /// Mean over the sequence's tokens.
    pub loss: f64,
    /// `∂ loss / ∂ new`, one per token.
    pub gradient: Vec<f64>,
    /// Tokens where a clip was active.
    pub clipped: usize,
    /// Sum of the ratios, for their mean.
    pub ratio_sum: f64,
    /// Sum of `(ratio − 1) − ln ratio`, an estimate of KL(old ‖ new).
    pub approx_kl_sum: f64,
}

/// Clipped surrogate objective with dual clip, mean over the tokens of one
/// sequence (then to be averaged over sequences, so that a long answer does not
/// outweigh a short one).
///
/// PPO (Schulman et al. 2017, equation 7) with asymmetric ε (DAPO, Yu et al.
/// 2025, section 3.1) and dual clip (Ye et al. 2020, equation 3):
/// `L = −w min(ρA, clip(ρ, 1−ε_low, 1+ε_high) A)`, and for `A < 0` at most `−w c A`.
/// `weights` are detached importance weights, see [`importance_weights`]; empty
/// means 1. Slices of different lengths are cut to the shortest.
pub fn clipped_policy_gradient(
    new: &[f64],
    old: &[f64],
    advantage: f64,
    weights: &[f64],
    clip: Clip,
) -> PolicyLoss {
    let n = new.len().min(old.len());
    let mut out = PolicyLoss {
        gradient: vec![0.0; new.len()],
        ..PolicyLoss::default()
    };
    if n == 0 {
        return out;
    }
    for t in 0..n {
        let weight = weights.get(t).copied().unwrap_or(1.0);
        // Past e^20 the ratio only overflows; TRL and verl clamp it likewise.
        let log_ratio = (new[t] - old[t]).clamp(-20.0, 20.0);
        let ratio = log_ratio.exp();
        let plain = -ratio * advantage;
        let cut = -ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantage;
        let bound = -clip.dual * advantage;
        let mut loss = plain.max(cut);
        let mut active = plain >= cut;
        if advantage < 0.0 && loss > bound {
            loss = bound;
            active = false;
        }
        if active {
            out.gradient[t] = weight * plain / n as f64;
        } else {
            out.clipped += 1;
        }
        out.loss += weight * loss / n as f64;
        out.ratio_sum += ratio;
        out.approx_kl_sum += ratio - 1.0 - log_ratio;
    }
    out
}

/// A value and its derivative with respect to each log-probability given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Differentiated {
    /// The value.
    pub value: f64,
    /// One derivative per element of the first slice given.
    pub gradient: Vec<f64>,
}

/// k3 estimate of KL(new ‖ reference), mean over the tokens of one sequence:
/// `e^d − d − 1` with `d = reference − new` (Schulman 2020, "Approximating KL
/// divergence"). Never negative; its derivative is `1 − e^d`.
///
/// `d` is cut at ±10, so that one impossible token cannot make the loss overflow.
pub fn k3(new: &[f64], reference: &[f64]) -> Differentiated {
    let n = new.len().min(reference.len());
    let mut out = Differentiated {
        value: 0.0,
        gradient: vec![0.0; new.len()],
    };
    for t in 0..n {
        let raw = reference[t] - new[t];
        let d = raw.clamp(-10.0, 10.0);
        out.value += (d.exp() - d - 1.0) / n as f64;
        if raw == d {
            out.gradient[t] = (1.0 - d.exp()) / n as f64;
        }
    }
    out
}

/// Truncated importance weights `min(e^(old − behaviour), cap)` per token.
///
/// They correct for the difference between what sampled the tokens (an older
/// adapter, a nucleus, another kernel) and the policy the ratio starts from, with
/// bounded variance (Ionides 2008; Yao et al. 2025 for rollout engines). Both
/// must be at the sampling temperature.
pub fn importance_weights(old: &[f64], behaviour: &[f64], cap: f64) -> Vec<f64> {
    old.iter()
        .zip(behaviour)
        .map(|(o, b)| (o - b).clamp(-20.0, 20.0).exp().min(cap))
        .collect()
}

/// Geometric mean over tokens of `e^(new − behaviour)`: how far a whole sequence
/// is off the policy, independent of its length (GSPO, Zheng et al. 2025,
/// equation 7). 1 for an empty sequence.
pub fn geometric_mean_ratio(new: &[f64], behaviour: &[f64]) -> f64 {
    let n = new.len().min(behaviour.len());
    if n == 0 {
        return 1.0;
    }
    let sum: f64 = new.iter().zip(behaviour).map(|(a, b)| a - b).sum();
    (sum / n as f64).exp()
}

/// Squared error of a value with value clipping: `½ max((v−R)², (clip(v, v_old±ε)−R)²)`
/// (PPO reference implementation; Huang et al. 2022, detail 9). Returns the loss
/// and its derivative with respect to `value`.
pub fn clipped_value(value: f64, old_value: f64, target: f64, clip: f64) -> (f64, f64) {
    let cut = value.clamp(old_value - clip, old_value + clip);
    let (plain, bounded) = ((value - target).powi(2), (cut - target).powi(2));
    if plain >= bounded {
        (0.5 * plain, value - target)
    } else {
        // Where the clipped error is the larger one, the value is outside the clip
        // range, and there the derivative is zero.
        (0.5 * bounded, 0.0)
    }
}

/// Weights and strength of the KTO loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kto {
    /// β: how strongly the policy is held to the reference.
    pub beta: f64,
    /// Weight of a liked answer.
    pub desirable_weight: f64,
    /// Weight of a disliked answer.
    pub undesirable_weight: f64,
}

/// Kahneman-Tversky optimisation of one answer (Ethayarajh et al. 2024, equations 7 and 8):
/// `w (1 − σ(β (h − z₀)))` for a liked and `w (1 − σ(β (z₀ − h)))` for a disliked
/// one, with `h = Σ new − Σ reference`. `kl` is z₀, the policy's KL to the
/// reference, estimated on mismatched pairs and not differentiated.
///
/// Returns the loss and its derivative with respect to each of `new`.
pub fn kto(new: &[f64], reference: &[f64], liked: bool, kl: f64, kto: Kto) -> Differentiated {
    let log_ratio = new.iter().sum::<f64>() - reference.iter().sum::<f64>();
    let (weight, sign) = if liked {
        (kto.desirable_weight, 1.0)
    } else {
        (kto.undesirable_weight, -1.0)
    };
    let s = sigmoid(sign * kto.beta * (log_ratio - kl));
    Differentiated {
        value: weight * (1.0 - s),
        gradient: vec![-weight * sign * kto.beta * s * (1.0 - s); new.len()],
    }
}

/// z₀ of [`kto`]: the mean log-ratio of mismatched prompt and answer pairs, at least 0.
pub fn kto_reference_point(mismatched_log_ratios: &[f64]) -> f64 {
    crate::advantage::mean(mismatched_log_ratios).max(0.0)
}

/// DPO with a share of likelihood, for one pair.
#[derive(Clone, Debug, PartialEq)]
pub struct PreferenceLoss {
    /// The loss.
    pub loss: f64,
    /// Implicit reward margin `β ((Σ new − Σ ref)_chosen − (…)_rejected)`.
    pub margin: f64,
    /// `∂ loss / ∂ new` of the chosen answer's tokens.
    pub chosen: Vec<f64>,
    /// `∂ loss / ∂ new` of the rejected answer's tokens.
    pub rejected: Vec<f64>,
}

/// Direct preference optimisation (Rafailov et al. 2023, equation 7) plus
/// `nll_weight` times the mean negative log-likelihood of the chosen answer
/// (Pang et al. 2024, equation 1), which keeps the chosen answer likely instead
/// of only likelier than the rejected one.
pub fn dpo(
    chosen: (&[f64], &[f64]),
    rejected: (&[f64], &[f64]),
    beta: f64,
    nll_weight: f64,
) -> PreferenceLoss {
    let difference = |(new, reference): (&[f64], &[f64])| {
        new.iter().sum::<f64>() - reference.iter().sum::<f64>()
    };
    let margin = beta * (difference(chosen) - difference(rejected));
    let slope = beta * sigmoid(-margin);
    let length = chosen.0.len().max(1) as f64;
    let nll = -chosen.0.iter().sum::<f64>() / length;
    PreferenceLoss {
        loss: softplus(-margin) + nll_weight * nll,
        margin,
        chosen: vec![-slope - nll_weight / length; chosen.0.len()],
        rejected: vec![slope; rejected.0.len()],
    }
}

/// `1 / (1 + e^−x)`.
pub fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let e = x.exp();
        e / (1.0 + e)
    }
}

/// `ln(1 + e^x)` without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, any, prop, prop_assert, proptest};

    use super::{
        Clip, Kto, clipped_policy_gradient, clipped_value, dpo, geometric_mean_ratio,
        importance_weights, k3, kto, kto_reference_point,
    };

    const CLIP: Clip = Clip {
        low: 0.2,
        high: 0.28,
        dual: 3.0,
    };

    fn pairs() -> impl Strategy<Value = (Vec<f64>, Vec<f64>)> {
        prop::collection::vec((-4.0f64..0.0, -4.0f64..0.0), 1..8)
            .prop_map(|pairs| pairs.into_iter().unzip())
    }

    /// Central difference of `f` in coordinate `i`, and whether `f` has a kink there.
    fn slope(x: &[f64], i: usize, f: impl Fn(&[f64]) -> f64) -> (f64, bool) {
        let h = 1e-5;
        let at = |d: f64| {
            let mut moved = x.to_vec();
            moved[i] += d;
            f(&moved)
        };
        let (left, right) = ((at(0.0) - at(-h)) / h, (at(h) - at(0.0)) / h);
        (
            (left + right) / 2.0,
            (left - right).abs() > 1e-3 * (1.0 + left.abs()),
        )
    }

    proptest! {
        #[test]
        fn policy_gradient_is_the_slope_of_its_loss(
            (new, old) in pairs(), advantage in -2.0f64..2.0,
        ) {
            let weights: Vec<f64> = (0..new.len()).map(|t| 0.5 + 0.2 * t as f64).collect();
            let f = |x: &[f64]| clipped_policy_gradient(x, &old, advantage, &weights, CLIP).loss;
            let got = clipped_policy_gradient(&new, &old, advantage, &weights, CLIP);
            for i in 0..new.len() {
                let (want, kink) = slope(&new, i, f);
                prop_assert!(kink || (got.gradient[i] - want).abs() < 1e-4 * (1.0 + want.abs()));
            }
        }

        #[test]
        fn k3_is_never_negative_and_its_gradient_is_its_slope((new, reference) in pairs()) {
            let got = k3(&new, &reference);
            prop_assert!(got.value >= 0.0);
            for i in 0..new.len() {
                let (want, _) = slope(&new, i, |x| k3(x, &reference).value);
                prop_assert!((got.gradient[i] - want).abs() < 1e-4 * (1.0 + want.abs()));
            }
        }

        #[test]
        fn preference_gradients_are_slopes(
            (chosen, chosen_ref) in pairs(), (rejected, rejected_ref) in pairs(),
            liked in any::<bool>(),
        ) {
            let got = dpo((&chosen, &chosen_ref), (&rejected, &rejected_ref), 0.1, 0.3);
            for i in 0..chosen.len() {
                let (want, _) = slope(&chosen, i, |x| {
                    dpo((x, &chosen_ref), (&rejected, &rejected_ref), 0.1, 0.3).loss
                });
                prop_assert!((got.chosen[i] - want).abs() < 1e-6);
            }
            for i in 0..rejected.len() {
                let (want, _) = slope(&rejected, i, |x| {
                    dpo((&chosen, &chosen_ref), (x, &rejected_ref), 0.1, 0.3).loss
                });
                prop_assert!((got.rejected[i] - want).abs() < 1e-6);
            }
            let settings = Kto { beta: 0.1, desirable_weight: 1.0, undesirable_weight: 1.3 };
            let one = kto(&chosen, &chosen_ref, liked, 0.4, settings);
            for i in 0..chosen.len() {
                let (want, _) = slope(&chosen, i, |x| kto(x, &chosen_ref, liked, 0.4, settings).value);
                prop_assert!((one.gradient[i] - want).abs() < 1e-6);
            }
        }

        #[test]
        fn value_gradient_is_its_slope(
            value in -2.0f64..2.0, old in -2.0f64..2.0, target in -2.0f64..2.0,
        ) {
            let (_, got) = clipped_value(value, old, target, 0.2);
            let (want, kink) = slope(&[value], 0, |x| clipped_value(x[0], old, target, 0.2).0);
            prop_assert!(kink || (got - want).abs() < 1e-4);
        }
    }

    #[test]
    fn the_dual_clip_bounds_the_loss_of_a_disliked_token_that_became_likely() {
        let got = clipped_policy_gradient(&[0.0], &[-5.0], -1.0, &[], CLIP);
        assert_eq!((got.loss, got.gradient[0], got.clipped), (3.0, 0.0, 1));
    }

    #[test]
    fn a_clipped_token_has_no_gradient_but_one_that_can_improve_has() {
        let up = clipped_policy_gradient(&[-1.0], &[-2.0], 1.0, &[], CLIP);
        assert_eq!(
            (up.gradient[0], up.clipped),
            (0.0, 1),
            "already moved far up"
        );
        let down = clipped_policy_gradient(&[-2.0], &[-1.0], 1.0, &[], CLIP);
        assert!(
            down.gradient[0] < 0.0 && down.clipped == 0,
            "must come back up"
        );
    }

    #[test]
    fn importance_weights_are_truncated_and_empty_sequences_are_on_policy() {
        let weights = importance_weights(&[-1.0, -1.0], &[-1.5, -4.0], 2.0);
        assert!((weights[0] - 0.5f64.exp()).abs() < 1e-12);
        assert_eq!(weights[1], 2.0);
        assert_eq!(geometric_mean_ratio(&[], &[]), 1.0);
        assert!((geometric_mean_ratio(&[-1.0, -2.0], &[-2.0, -3.0]) - 1f64.exp()).abs() < 1e-12);
    }

    #[test]
    fn the_reference_point_is_never_negative() {
        assert_eq!(kto_reference_point(&[-3.0, 1.0]), 0.0);
        assert_eq!(kto_reference_point(&[1.0, 3.0]), 2.0);
    }
}
