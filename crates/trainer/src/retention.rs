//! What the model must not forget: a pull towards the base model on neutral texts.
//!
//! A dozen liked answers at a rate that teaches them also shift everything else the
//! model says. InstructGPT (Ouyang et al. 2022, section 3.5, "PPO-ptx") mixes gradients
//! of the pretraining data into PPO for that reason. Here the mixed term keeps
//! log-probabilities of general texts where the base has them, by the quadratic
//! estimate of the divergence, k2 = ½ (log π − log π_base)² (Schulman 2020,
//! "Approximating KL divergence"), so that the texts themselves are not learned.

use crate::TrainError;
use crate::config::TrainConfig;
use crate::learner::Learner;
use crate::packing::Sequence;
use crate::ppo::Observer;
use crate::vocabulary::Vocabulary;

/// Neutral texts, written for this project; none of them is a probe text.
const TEXTS: &[&str] = &[
    "Bread rises because yeast turns sugar into carbon dioxide, and the dough holds the gas in many small bubbles.",
    "The train to the coast leaves at a quarter past nine and stops at every station on the way.",
    "def total(prices):\n    result = 0\n    for price in prices:\n        result += price\n    return result",
    "A triangle with sides of three, four and five centimetres has a right angle between the two shorter sides.",
    "He put the letter back into its envelope, looked at the clock, and decided to wait until morning.",
    "{\"id\": 17, \"title\": \"Garden chair\", \"tags\": [\"wood\", \"outdoor\"], \"price\": 49.9, \"sold\": false}",
    "Dear Ms Hart, please find the signed contract attached. Do let me know if you need another copy.",
    "Copper conducts electricity well, which is why most household cables have a core of copper wire.",
    "Q: Which planet is closest to the Sun? A: Mercury. Q: And which is the largest? A: Jupiter.",
    "The museum was founded in 1887 and moved to its present building beside the river forty years later.",
    "First wash the rice, then add twice as much water, bring it to the boil, and cover the pot.",
    "If a shop sells six pens for nine pounds, then one pen costs one pound fifty and ten cost fifteen pounds.",
    "SELECT name, SUM(amount) FROM orders WHERE paid = 1 GROUP BY name ORDER BY name;",
    "Swallows fly south in autumn and return in spring, often to the same nest under the same roof.",
    "The minister said on Tuesday that the new bridge would open in June, two months earlier than planned.",
    "Most people who learn a language find reading easier than listening, because a page can be read twice.",
];

/// The neutral texts in tokens, with the base model's log-probabilities.
#[derive(Debug)]
pub(crate) struct Retention {
    texts: Vec<Vec<u32>>,
    base: Vec<Vec<f64>>,
}

impl Retention {
    /// Scores the texts with the adapter off. Empty when the settings leave it out.
    pub(crate) fn new(
        learner: &Learner<'_>,
        vocabulary: &dyn Vocabulary,
        config: &TrainConfig,
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let mut texts = Vec::new();
        if config.retention_weight > 0.0 && config.retention_texts > 0 {
            for text in TEXTS {
                texts.push(vocabulary.text(text)?);
            }
        }
        texts.retain(|ids| ids.len() >= 2);
        let sequences: Vec<Sequence<'_>> = texts.iter().map(|ids| sequence(ids)).collect();
        let base = learner.score(&sequences, false, observer)?.logprobs;
        Ok(Self { texts, base })
    }

    /// Adds the term's gradient for update `step`, which takes the next few texts in
    /// turn. Returns the tokens that went through the model.
    pub(crate) fn accumulate(
        &self,
        learner: &mut Learner<'_>,
        step: u32,
        config: &TrainConfig,
    ) -> Result<usize, TrainError> {
        if self.texts.is_empty() {
            return Ok(0);
        }
        let first = step as usize * config.retention_texts;
        let chosen: Vec<usize> = (first..first + config.retention_texts)
            .map(|i| i % self.texts.len())
            .collect();
        let members: Vec<Sequence<'_>> = chosen.iter().map(|&i| sequence(&self.texts[i])).collect();
        let share = config.retention_weight / chosen.len() as f64;
        learner.accumulate(&members, &mut |new| {
            let pulls = new.iter().zip(&chosen);
            pulls
                .map(|(new, &i)| pull(new, &self.base[i], share))
                .collect()
        })
    }
}

fn sequence(ids: &[u32]) -> Sequence<'_> {
    Sequence {
        prompt: &ids[..1],
        response: &ids[1..],
        temperature: 1.0,
    }
}

/// `∂/∂new` of `weight × mean ½ (new − base)²`.
fn pull(new: &[f64], base: &[f64], weight: f64) -> Vec<f64> {
    let scale = weight / new.len().max(1) as f64;
    new.iter().zip(base).map(|(n, b)| scale * (n - b)).collect()
}

#[cfg(test)]
mod tests {
    use super::{TEXTS, pull};
    use crate::evaluate::PROBE_TEXTS;

    #[test]
    fn the_pull_is_the_derivative_of_half_the_mean_square() {
        let (new, base) = ([-1.0, -2.5, -0.5], [-1.5, -2.0, -0.5]);
        let loss = |new: &[f64]| -> f64 {
            let squares = new.iter().zip(&base).map(|(n, b)| 0.5 * (n - b) * (n - b));
            2.0 * squares.sum::<f64>() / new.len() as f64
        };
        let gradient = pull(&new, &base, 2.0);
        for i in 0..new.len() {
            let (mut up, mut down) = (new, new);
            up[i] += 1e-5;
            down[i] -= 1e-5;
            let slope = (loss(&up) - loss(&down)) / 2e-5;
            assert!((slope - gradient[i]).abs() < 1e-8, "{slope} {gradient:?}");
        }
    }

    #[test]
    fn what_is_retained_is_not_what_is_probed() {
        for text in TEXTS {
            assert!(!PROBE_TEXTS.contains(text), "{text}");
            let shared = |probe: &&str| {
                let words: Vec<&str> = text.split_whitespace().collect();
                words.windows(5).any(|w| probe.contains(&w.join(" ")))
            };
            assert!(!PROBE_TEXTS.iter().any(shared), "{text}");
        }
    }
}
