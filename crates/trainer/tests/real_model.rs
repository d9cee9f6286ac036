//! One run on the real SmolLM2-135M, when `SPOTTER_TEST_MODEL` names its GGUF file.

use std::path::PathBuf;

use spotter_core::adapter::AdapterVersion;
use spotter_core::id::{StepUid, TrajectoryUid};
use spotter_core::reward::RewardSource;
use spotter_core::train::{Dial, Estimator, StepReward, TrainProgress, TrainRequest, TrainStep};
use spotter_model::{LoadOptions, LoadedModel};
use spotter_trainer::TrainError;
use spotter_trainer::ppo::{Observer, train};
use spotter_trainer::vocabulary::Vocabulary;

struct Quiet;

impl Observer for Quiet {
    fn progress(&mut self, _: TrainProgress) {}

    fn between(&mut self) -> Result<(), TrainError> {
        Ok(())
    }
}

fn step(model: &LoadedModel, question: &str, answer: &str, value: f64) -> TrainStep {
    let trajectory = TrajectoryUid::new();
    TrainStep {
        uid: StepUid::new(),
        prompt_uid: trajectory.as_str().to_owned(),
        trajectory,
        index: 0,
        is_last: true,
        prompt_ids: model.question(question).expect("prompt"),
        response_ids: model.answer(answer).expect("answer"),
        logprobs: vec![],
        adapter: AdapterVersion::BASE,
        // A greedy answer needs no recorded log-probabilities to be on the policy.
        temperature: 0.0,
        top_p: 1.0,
        reward: Some(StepReward {
            value,
            source: RewardSource::User,
            credit: 1.0,
        }),
        correction: None,
    }
}

#[test]
fn one_update_raises_liked_and_lowers_disliked_answers_of_the_real_model() {
    let Some(path) = std::env::var_os("SPOTTER_TEST_MODEL").map(PathBuf::from) else {
        println!("SPOTTER_TEST_MODEL is not set: the real model was not trained");
        return;
    };
    let model = LoadedModel::load(&path, &LoadOptions::default()).expect("the model loads");
    let mut steps = vec![
        step(
            &model,
            "How do I boil an egg?",
            "Eight minutes in boiling water.",
            1.0,
        ),
        step(
            &model,
            "What does DNS do?",
            "It turns names into addresses.",
            1.0,
        ),
        step(
            &model,
            "Why is the sky blue?",
            "Great question! Let me tell you everything!",
            -1.0,
        ),
        step(
            &model,
            "What is gravity?",
            "Wow! What an amazing topic!",
            -1.0,
        ),
    ];
    for step in &mut steps {
        step.logprobs = vec![0.0; step.response_ids.len()];
    }
    steps[3].correction = Some("It is the pull between masses.".into());
    let dir = tempfile::tempdir().expect("directory");
    let request = TrainRequest {
        run: 1,
        checkpoint_dir: dir.path().join("run"),
        output_dir: dir.path().join("v1"),
        version: AdapterVersion(1),
        parent: None,
        parent_state: None,
        live: AdapterVersion::BASE,
        steps,
        replay: vec![],
        held_out: vec![],
        dial: Dial::Normal,
        estimator: Estimator::Auto,
        overrides: serde_json::Map::from_iter([("probe_tokens".into(), 8.into())]),
        seed: 1,
    };
    let outcome = train(&model, &request, &model, &mut Quiet).expect("trains");
    let value = |name: &str| {
        outcome
            .metrics
            .iter()
            .find(|m| m.name == name)
            .map(|m| m.value)
    };
    let (liked, disliked) = (value("liked_change"), value("disliked_change"));
    println!(
        "liked {liked:?}, disliked {disliked:?} nats per token, {:?} tokens/s, {} MiB, {:.1} s",
        value("tokens_per_second"),
        outcome.peak_memory >> 20,
        outcome.seconds,
    );
    assert!(liked.is_some_and(|v| v > 0.0), "{liked:?}");
    assert!(disliked.is_some_and(|v| v < 0.0), "{disliked:?}");
    for change in &outcome.changes {
        println!(
            "  reward {:+}: {:.2} -> {:.2}",
            change.reward, change.before, change.after
        );
    }
}
