//! The gate: whether a candidate may go live. A pure function of its evaluation.

use spotter_core::train::Evaluation;

/// Limits of the gate.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most that the capability probe's loss may rise above the base's, as a share.
    pub probe_rise: f64,
    /// Least share of the parent's entropy that must remain.
    pub entropy_left: f64,
    /// Most that the share of repeated 4-grams may rise.
    pub repetition_rise: f64,
    /// Most that the held-out margin may fall, nats per token.
    pub margin_fall: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            probe_rise: 0.02,
            entropy_left: 0.3,
            repetition_rise: 0.15,
            margin_fall: 0.02,
        }
    }
}

/// The gate's decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Whether the candidate may go live.
    pub promoted: bool,
    /// Why, in sentences; never empty.
    pub reasons: Vec<String>,
}

/// Judges a candidate. A number that is not finite rejects.
pub fn judge(e: &Evaluation, limits: Limits) -> Decision {
    let mut against = Vec::new();
    let mut notes = Vec::new();
    let finite = [
        e.probe_base,
        e.probe_before,
        e.probe_after,
        e.entropy_after,
        e.repetition_after,
        e.kl_to_base,
    ];
    if finite.iter().any(|v| !v.is_finite()) {
        against.push("Its evaluation gave numbers that are not finite.".to_owned());
    }
    if e.probe_base > 0.0 {
        let rise = e.probe_after / e.probe_base - 1.0;
        let text = format!(
            "General ability: the probe's loss is {:+.1} % against the base",
            rise * 100.0
        );
        if rise > limits.probe_rise {
            against.push(format!(
                "{text}, more than the {:.0} % allowed.",
                limits.probe_rise * 100.0
            ));
        } else {
            notes.push(format!("{text}."));
        }
    }
    match (e.margin_before, e.margin_after) {
        (Some(before), Some(after)) => {
            let text = format!(
                "On {} held-out answers, liked minus disliked goes from {before:.3} to {after:.3} nats per token",
                e.held_out.0 + e.held_out.1
            );
            if after < before - limits.margin_fall {
                against.push(format!("{text}: it separates them worse."));
            } else {
                notes.push(format!("{text}."));
            }
        }
        _ => notes.push(
            "There are too few rated answers yet to hold some out for a comparison.".to_owned(),
        ),
    }
    if e.entropy_before > 0.0 && e.entropy_after < e.entropy_before * limits.entropy_left {
        against.push(format!(
            "Its answers have collapsed: their entropy fell from {:.2} to {:.2} nats per token.",
            e.entropy_before, e.entropy_after
        ));
    }
    if e.repetition_after > e.repetition_before + limits.repetition_rise {
        against.push(format!(
            "It repeats itself: the share of repeated phrases rose from {:.0} % to {:.0} %.",
            e.repetition_before * 100.0,
            e.repetition_after * 100.0
        ));
    }
    let promoted = against.is_empty();
    against.extend(notes);
    Decision {
        promoted,
        reasons: against,
    }
}

#[cfg(test)]
mod tests {
    use spotter_core::train::Evaluation;

    use super::{Limits, judge};

    fn good() -> Evaluation {
        Evaluation {
            margin_before: Some(0.1),
            margin_after: Some(0.3),
            held_out: (3, 3),
            probe_base: 3.0,
            probe_before: 3.0,
            probe_after: 3.02,
            entropy_before: 2.0,
            entropy_after: 1.8,
            repetition_before: 0.05,
            repetition_after: 0.06,
            kl_to_base: 0.1,
        }
    }

    #[test]
    fn a_better_candidate_goes_live() {
        let decision = judge(&good(), Limits::default());
        assert!(decision.promoted, "{:?}", decision.reasons);
    }

    #[test]
    fn each_fault_alone_rejects() {
        let faults: [fn(&mut Evaluation); 5] = [
            |e| e.probe_after = 3.3,
            |e| e.margin_after = Some(-0.2),
            |e| e.entropy_after = 0.2,
            |e| e.repetition_after = 0.6,
            |e| e.kl_to_base = f64::NAN,
        ];
        for (i, fault) in faults.into_iter().enumerate() {
            let mut e = good();
            fault(&mut e);
            assert!(!judge(&e, Limits::default()).promoted, "fault {i} passed");
        }
    }

    #[test]
    fn without_held_out_answers_the_rest_decides_and_it_is_said() {
        let mut e = good();
        e.margin_after = None;
        let decision = judge(&e, Limits::default());
        assert!(decision.promoted);
        assert!(decision.reasons.iter().any(|r| r.contains("too few")));
    }
}
