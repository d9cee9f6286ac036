//! How many prompt tokens a turn may take beside running answers.
//!
//! A turn that only answers takes a while; a chunk of a prompt may make it longer by a
//! fixed share of that and no more, so that a long prompt is never felt in a running
//! stream. Both costs are measured as the loop runs.

use std::time::Duration;

/// Prompt tokens per turn when nobody is being answered.
const ALONE: usize = 512;
/// Fewest prompt tokens per turn.
const LEAST: usize = 8;
/// Prompt tokens per turn beside answers until something has been measured.
const UNMEASURED: usize = 32;
/// How much longer than an answering turn a turn with a chunk may be.
const SHARE: f64 = 0.7;
/// Weight of the newest measurement.
const NEWEST: f64 = 0.2;

/// Measured costs of a turn, in seconds.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    answering: Option<f64>,
    per_token: Option<f64>,
}

fn blend(old: Option<f64>, new: f64) -> Option<f64> {
    Some(old.map_or(new, |old| old + NEWEST * (new - old)))
}

impl Pace {
    /// Prompt tokens for the next turn beside this many answers.
    pub(crate) fn chunk(&self, answers: usize) -> usize {
        if answers == 0 {
            return ALONE;
        }
        match (self.answering, self.per_token) {
            (Some(turn), Some(token)) if token > 0.0 => {
                ((SHARE * turn / token) as usize).clamp(LEAST, ALONE)
            }
            _ => UNMEASURED,
        }
    }

    /// Takes in what a turn took.
    pub(crate) fn observe(&mut self, answers: usize, prompt_tokens: usize, took: Duration) {
        let took = took.as_secs_f64();
        match (answers, prompt_tokens) {
            (0, 0) => {}
            (_, 0) => self.answering = blend(self.answering, took),
            (0, tokens) => {
                // A turn of prompts alone is a lower bound for what a token costs beside answers.
                if self.per_token.is_none() {
                    self.per_token = Some(took / tokens as f64);
                }
            }
            (_, tokens) => {
                let beside = took - self.answering.unwrap_or(0.0);
                if beside > 0.0 {
                    self.per_token = blend(self.per_token, beside / tokens as f64);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{ALONE, LEAST, Pace, SHARE};

    #[test]
    fn a_chunk_lengthens_a_turn_by_its_share() {
        let mut pace = Pace::default();
        assert_eq!(pace.chunk(0), ALONE);
        pace.observe(4, 0, Duration::from_millis(20));
        pace.observe(4, 10, Duration::from_millis(30));
        let added = pace.chunk(4) as f64 * 1e-3;
        assert!(added <= SHARE * 20e-3 + 1e-9, "{added} seconds");
        assert!(added > 0.9 * SHARE * 20e-3 - 1e-3, "{added} seconds");
    }

    #[test]
    fn a_prompt_always_advances() {
        let mut pace = Pace::default();
        pace.observe(1, 0, Duration::from_micros(10));
        pace.observe(1, 10, Duration::from_secs(1));
        assert_eq!(pace.chunk(1), LEAST);
    }
}
