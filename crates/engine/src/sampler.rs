//! From logits to one token, with the log-probability it was drawn with.
//!
//! Order of operations: bias, penalties, the mask of a grammar, temperature, top-k, top-p, min-p. With
//! temperature 0 the most likely token after bias and penalties is taken and the
//! distribution's log-probability is reported at temperature 1.

use std::collections::HashMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use spotter_core::code::{Code, Failure};
use spotter_core::generate::Sampling;
use toktrie::SimpleVob;

/// Why no token could be drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SamplerError {
    /// The logits are NaN or all infinite.
    #[error("the model produced no usable numbers; the request can be repeated")]
    NotFinite,
    /// Bias, bans and grammar leave nothing over.
    #[error("no token is allowed to follow; the request can be repeated")]
    NothingAllowed,
}

impl From<SamplerError> for Failure {
    fn from(error: SamplerError) -> Self {
        Self::new(Code::Unavailable, error.to_string())
    }
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub id: u32,
    /// ln p under the distribution it was drawn from.
    pub logprob: f32,
    /// ln p under the model itself: temperature 1, nothing applied.
    pub model_logprob: f32,
    /// The model's most likely tokens with their ln p, when asked for.
    pub top: Vec<(u32, f32)>,
}

/// One sequence's sampler.
#[derive(Debug)]
pub struct Sampler {
    settings: Sampling,
    rng: ChaCha8Rng,
    prompt: HashMap<u32, u32>,
    generated: HashMap<u32, u32>,
}

impl Sampler {
    /// A sampler with its own generator, seeded by the settings or at random.
    pub fn new(settings: Sampling, prompt: &[u32]) -> Self {
        let rng = match settings.seed {
            Some(seed) => ChaCha8Rng::seed_from_u64(seed),
            None => ChaCha8Rng::from_os_rng(),
        };
        let mut counts = HashMap::new();
        if settings.repetition_penalty != 1.0 {
            for id in prompt {
                *counts.entry(*id).or_default() += 1;
            }
        }
        Self {
            settings,
            rng,
            prompt: counts,
            generated: HashMap::new(),
        }
    }

    /// Draws the next token. `banned` tokens are never drawn, and none outside `allowed`.
    ///
    /// # Errors
    /// When the logits are no numbers, or nothing may be drawn.
    pub fn sample(
        &mut self,
        logits: &[f32],
        top: u8,
        banned: &[u32],
        allowed: Option<&SimpleVob>,
    ) -> Result<Sampled, SamplerError> {
        let s = &self.settings;
        let log_z = log_sum_exp(logits.iter().copied());
        if !log_z.is_finite() {
            return Err(SamplerError::NotFinite);
        }
        let mut adjusted: Vec<(u32, f32)> = logits
            .iter()
            .enumerate()
            .map(|(id, l)| (id as u32, *l))
            .collect();
        for (id, bias) in &s.logit_bias {
            if let Some(entry) = adjusted.get_mut(*id as usize) {
                entry.1 += bias;
            }
        }
        if s.repetition_penalty != 1.0 {
            for id in self.prompt.keys().chain(self.generated.keys()) {
                if let Some((_, l)) = adjusted.get_mut(*id as usize) {
                    *l = if *l > 0.0 {
                        *l / s.repetition_penalty
                    } else {
                        *l * s.repetition_penalty
                    };
                }
            }
        }
        if s.presence_penalty != 0.0 || s.frequency_penalty != 0.0 {
            for (id, count) in &self.generated {
                if let Some((_, l)) = adjusted.get_mut(*id as usize) {
                    *l -= s.presence_penalty + s.frequency_penalty * *count as f32;
                }
            }
        }
        for id in banned {
            if let Some((_, l)) = adjusted.get_mut(*id as usize) {
                *l = f32::NEG_INFINITY;
            }
        }
        if let Some(allowed) = allowed {
            for (id, l) in &mut adjusted {
                if *id as usize >= allowed.len() || !allowed.is_allowed(*id) {
                    *l = f32::NEG_INFINITY;
                }
            }
        }
        if adjusted.iter().all(|(_, l)| *l == f32::NEG_INFINITY) {
            return Err(SamplerError::NothingAllowed);
        }
        let (id, logprob) = if s.temperature <= 0.0 {
            let best = adjusted
                .iter()
                .copied()
                .max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
                .unwrap_or((0, 0.0));
            (
                best.0,
                best.1 - log_sum_exp(adjusted.iter().map(|(_, l)| *l)),
            )
        } else {
            adjusted.retain(|(_, l)| *l > f32::NEG_INFINITY);
            for (_, l) in &mut adjusted {
                *l /= s.temperature;
            }
            truncate(&mut adjusted, s);
            let log_z = log_sum_exp(adjusted.iter().map(|(_, l)| *l));
            let mut left = self.rng.random::<f64>();
            let mut chosen = adjusted[0];
            for (id, l) in &adjusted {
                chosen = (*id, *l);
                left -= f64::from(*l - log_z).exp();
                if left <= 0.0 {
                    break;
                }
            }
            (chosen.0, chosen.1 - log_z)
        };
        let model_logprob = logits
            .get(id as usize)
            .map_or(f32::NEG_INFINITY, |l| l - log_z);
        let mut alternatives = Vec::new();
        if top > 0 {
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            let n = usize::from(top).min(order.len() - 1);
            let by = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]);
            order.select_nth_unstable_by(n, by);
            order.truncate(usize::from(top));
            order.sort_unstable_by(by);
            alternatives = order
                .into_iter()
                .map(|id| (id, logits[id as usize] - log_z))
                .collect();
        }
        *self.generated.entry(id).or_default() += 1;
        Ok(Sampled {
            id,
            logprob: logprob.min(0.0),
            model_logprob: model_logprob.min(0.0),
            top: alternatives,
        })
    }
}

/// Top-k, then top-p, then min-p, on temperature-scaled logits; sorts only when needed.
fn truncate(tokens: &mut Vec<(u32, f32)>, s: &Sampling) {
    let by = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let k = s.top_k as usize;
    if k > 0 && k < tokens.len() {
        tokens.select_nth_unstable_by(k, by);
        tokens.truncate(k);
    }
    if s.top_p < 1.0 {
        tokens.sort_unstable_by(by);
        let log_z = log_sum_exp(tokens.iter().map(|(_, l)| *l));
        let mut mass = 0.0;
        let keep = tokens
            .iter()
            .position(|(_, l)| {
                mass += f64::from(*l - log_z).exp();
                mass >= f64::from(s.top_p)
            })
            .map_or(tokens.len(), |at| at + 1);
        tokens.truncate(keep);
    }
    if s.min_p > 0.0 {
        let best = tokens
            .iter()
            .map(|(_, l)| *l)
            .fold(f32::NEG_INFINITY, f32::max);
        let floor = best + s.min_p.min(1.0).ln();
        tokens.retain(|(_, l)| *l >= floor);
    }
}

fn log_sum_exp(values: impl Iterator<Item = f32> + Clone) -> f32 {
    let max = values.clone().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = values.map(|v| f64::from(v - max).exp()).sum();
    (f64::from(max) + sum.ln()) as f32
}

#[cfg(test)]
mod tests {
    use spotter_core::generate::Sampling;

    use super::Sampler;

    const LOGITS: [f32; 4] = [2.0, 1.0, 0.0, -1.0];

    fn draw(settings: Sampling) -> super::Sampled {
        Sampler::new(settings, &[])
            .sample(&LOGITS, 2, &[], None)
            .expect("a token")
    }

    #[test]
    fn greedy_takes_the_best_and_reports_the_model() {
        let s = draw(Sampling {
            temperature: 0.0,
            ..Default::default()
        });
        assert_eq!(s.id, 0);
        assert!((s.logprob - s.model_logprob).abs() < 1e-6);
        assert_eq!(s.top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn a_seed_fixes_the_answer() {
        let settings = Sampling {
            seed: Some(9),
            ..Default::default()
        };
        let run = || {
            let mut sampler = Sampler::new(settings.clone(), &[]);
            (0..20)
                .map(|_| sampler.sample(&LOGITS, 0, &[], None).expect("a token").id)
                .collect::<Vec<_>>()
        };
        assert_eq!(run(), run());
    }

    #[test]
    fn frequencies_follow_the_reported_log_probabilities() {
        let settings = Sampling {
            seed: Some(1),
            temperature: 0.7,
            top_k: 3,
            ..Default::default()
        };
        let mut sampler = Sampler::new(settings, &[]);
        let mut counts = [0u32; 4];
        let mut logprobs = [0f32; 4];
        for _ in 0..20_000 {
            let s = sampler.sample(&LOGITS, 0, &[], None).expect("a token");
            counts[s.id as usize] += 1;
            logprobs[s.id as usize] = s.logprob;
        }
        assert_eq!(counts[3], 0, "outside the top three");
        for id in 0..3 {
            let share = f64::from(counts[id]) / 20_000.0;
            assert!(
                (share - f64::from(logprobs[id]).exp()).abs() < 0.015,
                "token {id}: {share}"
            );
        }
    }

    #[test]
    fn nucleus_and_floor_leave_the_likely_tokens() {
        for _ in 0..50 {
            assert_eq!(
                draw(Sampling {
                    top_p: 0.5,
                    ..Default::default()
                })
                .id,
                0
            );
            assert!(
                draw(Sampling {
                    min_p: 0.3,
                    ..Default::default()
                })
                .id < 2
            );
        }
    }

    #[test]
    fn penalties_and_bans_apply() {
        let settings = Sampling {
            temperature: 0.0,
            frequency_penalty: 1.5,
            ..Default::default()
        };
        let mut sampler = Sampler::new(settings, &[]);
        assert_eq!(
            sampler.sample(&LOGITS, 0, &[], None).expect("a token").id,
            0
        );
        assert_eq!(
            sampler.sample(&LOGITS, 0, &[], None).expect("a token").id,
            1,
            "the first is penalised now"
        );
        assert_eq!(
            sampler
                .sample(&LOGITS, 0, &[0, 1], None)
                .expect("a token")
                .id,
            2
        );
    }

    #[test]
    fn useless_numbers_are_an_error() {
        use super::SamplerError;
        let mut sampler = Sampler::new(Sampling::default(), &[]);
        let nan = sampler.sample(&[1.0, f32::NAN], 0, &[], None);
        assert_eq!(nan, Err(SamplerError::NotFinite));
        let banned = sampler.sample(&[1.0, 2.0], 0, &[0, 1], None);
        assert_eq!(banned, Err(SamplerError::NothingAllowed));
    }

    #[test]
    fn a_mask_renormalises_what_is_recorded() {
        let mut allowed = toktrie::SimpleVob::alloc(4);
        allowed.allow_token(1);
        allowed.allow_token(3);
        for temperature in [0.0, 1.0] {
            let settings = Sampling {
                temperature,
                seed: Some(2),
                ..Default::default()
            };
            let mut sampler = Sampler::new(settings, &[]);
            for _ in 0..50 {
                let s = sampler
                    .sample(&LOGITS, 0, &[], Some(&allowed))
                    .expect("a token");
                assert!([1, 3].contains(&s.id));
                // Among the two alone: logits 1 and -1.
                let own = LOGITS[s.id as usize] - (1f32.exp() + (-1f32).exp()).ln();
                assert!((s.logprob - own).abs() < 1e-5, "{s:?}");
                let all: f32 = LOGITS.iter().map(|l| l.exp()).sum();
                let model = LOGITS[s.id as usize] - all.ln();
                assert!((s.model_logprob - model).abs() < 1e-5, "{s:?}");
            }
        }
        let none = toktrie::SimpleVob::alloc(4);
        let refused = Sampler::new(Sampling::default(), &[]).sample(&LOGITS, 0, &[], Some(&none));
        assert_eq!(refused, Err(super::SamplerError::NothingAllowed));
    }
}
