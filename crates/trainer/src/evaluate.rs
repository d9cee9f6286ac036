//! The gate's evidence: what the parent and the candidate do on data they were
//! not trained on.
//!
//! Evidence only; whether an adapter goes live is decided elsewhere.

use serde::{Deserialize, Serialize};
use spotter_core::advantage::mean;
use spotter_core::train::{Evaluation, TrainRequest};

use crate::TrainError;
use crate::config::TrainConfig;
use crate::learner::{Learner, Sampled};
use crate::packing::Sequence;
use crate::ppo::Observer;
use crate::vocabulary::Vocabulary;

/// Frozen texts for the capability probe, written for this project: what any
/// language model should keep finding likely, whatever taste it has learned.
pub const PROBE_TEXTS: &[&str] = &[
    "The Danube rises in the Black Forest and flows east through ten countries before it reaches the sea.",
    "To add two fractions, bring them to a common denominator and then add the numerators.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 4))",
    "She closed the window because the rain had begun, and then she lit the lamp beside the bed.",
    "Water boils at a lower temperature on a mountain because the air pressure is lower there.",
    "Dear Mr Lane, thank you for your letter of 4 May. I am writing to confirm our meeting on Friday.",
    "{\"name\": \"kettle\", \"price\": 24.5, \"in_stock\": true, \"colours\": [\"red\", \"black\"]}",
    "If all birds have feathers and a robin is a bird, then a robin has feathers.",
    "The committee decided to postpone the vote until every member had read the report.",
    "Mix the flour and the butter, add the milk slowly, and let the dough rest for an hour.",
    "In 1969 two people walked on the Moon while a third waited in orbit above them.",
    "Q: What is twelve times eleven? A: One hundred and thirty-two.",
];

/// Questions whose sampled answers are checked for variety and repetition.
pub const PROBE_QUESTIONS: &[&str] = &[
    "What is a good way to spend a rainy afternoon?",
    "Explain how a bicycle stays upright.",
    "Write two sentences about the sea.",
    "How do I choose a ripe melon?",
];

/// What one adapter does on the held-out answers and the probes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Mean log-probability per token of liked minus disliked held-out answers.
    pub margin: Option<f64>,
    /// Liked and disliked held-out answers.
    pub held_out: (u32, u32),
    /// Mean negative log-probability per token of the probe texts.
    pub probe: f64,
    /// The same with the adapter off.
    pub probe_base: f64,
    /// Mean negative log-probability of the sampled answers' own tokens, in nats: an unbiased
    /// estimate of the policy's entropy.
    pub entropy: f64,
    /// Share of repeated 4-grams in the sampled answers.
    pub repetition: f64,
}

/// Measures the adapter as it is now.
pub fn measure(
    learner: &Learner<'_>,
    request: &TrainRequest,
    config: &TrainConfig,
    vocabulary: &dyn Vocabulary,
    observer: &mut dyn Observer,
) -> Result<Measurement, TrainError> {
    let rated: Vec<(Sequence<'_>, f64)> = request
        .held_out
        .iter()
        .filter(|step| !step.prompt_ids.is_empty() && !step.response_ids.is_empty())
        .filter_map(|step| {
            let reward = step.reward.as_ref()?.value;
            let sequence = Sequence {
                prompt: &step.prompt_ids,
                response: &step.response_ids,
                temperature: 1.0,
            };
            (reward != 0.0).then_some((sequence, reward))
        })
        .collect();
    let held_out: Vec<Sequence<'_>> = rated.iter().map(|(sequence, _)| *sequence).collect();
    let scores = learner.score(&held_out, true, observer)?.logprobs;
    let (mut liked, mut disliked) = (Vec::new(), Vec::new());
    for (logprobs, (_, reward)) in scores.iter().zip(&rated) {
        let side = if *reward > 0.0 {
            &mut liked
        } else {
            &mut disliked
        };
        side.push(mean(logprobs));
    }
    let margin =
        (!liked.is_empty() && !disliked.is_empty()).then(|| mean(&liked) - mean(&disliked));

    let probe = probe(learner, true, vocabulary, observer)?;
    let probe_base = self::probe(learner, false, vocabulary, observer)?;

    let mut answers = Vec::new();
    if config.probe_tokens > 0 {
        observer.between()?;
        answers = sample_answers(learner, vocabulary, config.probe_tokens, request.seed)?;
    }
    let surprises: Vec<f64> = answers
        .iter()
        .flat_map(|(_, logprobs)| logprobs.iter().map(|l| -l))
        .collect();
    let repetitions: Vec<f64> = answers.iter().map(|(ids, _)| repetition(ids)).collect();
    Ok(Measurement {
        margin,
        held_out: (liked.len() as u32, disliked.len() as u32),
        probe,
        probe_base,
        entropy: mean(&surprises),
        repetition: mean(&repetitions),
    })
}

/// Mean negative log-probability per token of the probe texts, with the adapter as it
/// is now or with it off.
pub fn probe(
    learner: &Learner<'_>,
    adapter: bool,
    vocabulary: &dyn Vocabulary,
    observer: &mut dyn Observer,
) -> Result<f64, TrainError> {
    let texts = PROBE_TEXTS
        .iter()
        .map(|text| vocabulary.text(text))
        .collect::<Result<Vec<_>, _>>()?;
    let texts: Vec<Sequence<'_>> = texts
        .iter()
        .filter(|ids| ids.len() >= 2)
        .map(|ids| Sequence {
            prompt: &ids[..1],
            response: &ids[1..],
            temperature: 1.0,
        })
        .collect();
    let scores = learner.score(&texts, adapter, observer)?.logprobs;
    Ok(-mean(&scores.concat()))
}

/// Samples an answer of at most `tokens` tokens to every probe question, at
/// temperature 1; ids and log-probabilities of each.
fn sample_answers(
    learner: &Learner<'_>,
    vocabulary: &dyn Vocabulary,
    tokens: usize,
    seed: u64,
) -> Result<Vec<Sampled>, TrainError> {
    let prompts = PROBE_QUESTIONS
        .iter()
        .map(|question| vocabulary.question(question))
        .collect::<Result<Vec<_>, _>>()?;
    let prompts: Vec<Vec<u32>> = prompts.into_iter().filter(|ids| !ids.is_empty()).collect();
    learner.sample(&prompts, tokens, 1.0, &vocabulary.ends(), seed)
}

/// Puts the parent's and the candidate's measurements side by side.
pub fn compare(parent: &Measurement, candidate: &Measurement, kl_to_base: f64) -> Evaluation {
    Evaluation {
        margin_before: parent.margin,
        margin_after: candidate.margin,
        held_out: candidate.held_out,
        probe_base: candidate.probe_base,
        probe_before: parent.probe,
        probe_after: candidate.probe,
        entropy_before: parent.entropy,
        entropy_after: candidate.entropy,
        repetition_before: parent.repetition,
        repetition_after: candidate.repetition,
        kl_to_base,
    }
}

/// Share of 4-grams that occurred before in the same answer; 0 for short answers.
pub fn repetition(ids: &[u32]) -> f64 {
    let grams: Vec<&[u32]> = ids.windows(4).collect();
    if grams.is_empty() {
        return 0.0;
    }
    let distinct: std::collections::HashSet<&[u32]> = grams.iter().copied().collect();
    1.0 - distinct.len() as f64 / grams.len() as f64
}

#[cfg(test)]
mod tests {
    use super::repetition;

    #[test]
    fn repetition_is_zero_for_fresh_text_and_near_one_for_a_loop() {
        assert_eq!(repetition(&[1, 2, 3, 4, 5, 6]), 0.0);
        assert_eq!(repetition(&[1, 2]), 0.0);
        assert!(repetition(&[7; 40]) > 0.9);
    }
}
