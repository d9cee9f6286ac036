//! Every estimator learns, on the tiny model, in seconds: a token bandit, and a
//! two-step task whose reward comes only at the end.

use std::path::Path;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use spotter_core::adapter::AdapterVersion;
use spotter_core::code::{Code, Failure};
use spotter_core::id::{StepUid, TrajectoryUid};
use spotter_core::reward::RewardSource;
use spotter_core::train::{
    AdapterFiles, Dial, Estimator, StepReward, TrainOutcome, TrainProgress, TrainRequest, TrainStep,
};
use spotter_model::{LoadOptions, LoadedModel};
use spotter_trainer::TrainError;
use spotter_trainer::config::TrainConfig;
use spotter_trainer::learner::Learner;
use spotter_trainer::packing::Sequence;
use spotter_trainer::ppo::{Observer, train};
use spotter_trainer::vocabulary::Vocabulary;

/// Answers the bandit may give; the third is the liked one.
const ARMS: [u32; 6] = [40, 41, 42, 43, 44, 45];
const LIKED: usize = 2;

fn tiny() -> LoadedModel {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny/tiny.gguf");
    let options = LoadOptions {
        threads: Some(2),
        ..LoadOptions::default()
    };
    LoadedModel::load(&path, &options).expect("the tiny model loads")
}

/// Token ids stand for themselves: "7 8" is [7, 8].
struct Ids;

impl Vocabulary for Ids {
    fn answer(&self, text: &str) -> Result<Vec<u32>, Failure> {
        self.text(text)
    }

    fn text(&self, text: &str) -> Result<Vec<u32>, Failure> {
        Ok(text.split(' ').filter_map(|id| id.parse().ok()).collect())
    }

    fn question(&self, _: &str) -> Result<Vec<u32>, Failure> {
        Ok(vec![5, 6])
    }

    fn ends(&self) -> Vec<u32> {
        vec![2]
    }
}

/// Collects progress, and ends the run after some micro-batches when asked to.
#[derive(Default)]
struct Watch {
    progress: Vec<TrainProgress>,
    calls: usize,
    pause_after: Option<usize>,
}

impl Observer for Watch {
    fn progress(&mut self, progress: TrainProgress) {
        self.progress.push(progress);
    }

    fn between(&mut self) -> Result<(), TrainError> {
        self.calls += 1;
        match self.pause_after {
            Some(after) if self.calls > after => Err(TrainError::Paused),
            _ => Ok(()),
        }
    }
}

fn overrides() -> Map<String, Value> {
    let settings = json!({
        "learning_rate": 0.02, "epochs": 3, "minibatch": 8, "kl_coefficient": 0.0,
        "kl_target": 100.0, "liked_nll_weight": 0.0, "disliked_weight": 1.0,
        "probe_tokens": 0, "lora_rank": 4,
    });
    settings.as_object().cloned().unwrap_or_default()
}

/// Log-probabilities of the arms, given a prompt.
fn arms(model: &LoadedModel, adapter: Option<&AdapterFiles>, prompt: &[u32]) -> Vec<f64> {
    let config = TrainConfig::resolve(Dial::Normal, &overrides()).expect("valid");
    let learner = Learner::new(model, adapter, None, 1, &config).expect("learner");
    let sequences: Vec<Sequence<'_>> = ARMS
        .iter()
        .map(|arm| Sequence {
            prompt,
            response: std::slice::from_ref(arm),
            temperature: 1.0,
        })
        .collect();
    let scores = learner
        .score(&sequences, true, &mut Watch::default())
        .expect("scores");
    scores.logprobs.iter().map(|row| row[0]).collect()
}

/// The liked arm's probability among the arms.
fn share(logprobs: &[f64]) -> f64 {
    logprobs[LIKED].exp() / logprobs.iter().map(|l| l.exp()).sum::<f64>()
}

/// Samples an arm.
fn draw(logprobs: &[f64], rng: &mut ChaCha8Rng) -> usize {
    let total: f64 = logprobs.iter().map(|l| l.exp()).sum();
    let mut left = rng.random::<f64>() * total;
    for (i, l) in logprobs.iter().enumerate() {
        left -= l.exp();
        if left <= 0.0 {
            return i;
        }
    }
    0
}

fn step(prompt: &[u32], response: &[u32], logprob: f64, adapter: AdapterVersion) -> TrainStep {
    let trajectory = TrajectoryUid::new();
    TrainStep {
        uid: StepUid::new(),
        prompt_uid: trajectory.as_str().to_owned(),
        trajectory,
        index: 0,
        is_last: true,
        prompt_ids: prompt.to_vec(),
        response_ids: response.to_vec(),
        logprobs: vec![logprob as f32; response.len()],
        adapter,
        temperature: 1.0,
        top_p: 1.0,
        reward: None,
        correction: None,
    }
}

fn rated(mut step: TrainStep, value: f64, source: RewardSource) -> TrainStep {
    step.reward = Some(StepReward {
        value,
        source,
        credit: 1.0,
    });
    step
}

fn request(
    dir: &Path,
    round: u32,
    parent: Option<AdapterFiles>,
    steps: Vec<TrainStep>,
) -> TrainRequest {
    let version = AdapterVersion(round + 1);
    TrainRequest {
        run: i64::from(round),
        checkpoint_dir: dir.join(format!("run-{round}")),
        output_dir: dir.join(version.to_string()),
        version,
        parent_state: parent.as_ref().map(AdapterFiles::state_dir),
        live: parent.as_ref().map_or(AdapterVersion::BASE, |p| p.version),
        parent,
        steps,
        replay: vec![],
        held_out: vec![],
        dial: Dial::Normal,
        estimator: Estimator::Auto,
        overrides: overrides(),
        seed: 11 + u64::from(round),
    }
}

/// Rounds of a bandit; the liked arm's share before and after, and the last outcome.
fn bandit(estimator: Estimator, rounds: u32) -> (f64, f64, TrainOutcome) {
    let (model, dir) = (tiny(), tempfile::tempdir().expect("directory"));
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let prompt = [10, 11, 12];
    let before = share(&arms(&model, None, &prompt));
    let (mut parent, mut last) = (None::<AdapterFiles>, None);
    for round in 0..rounds {
        let logprobs = arms(&model, parent.as_ref(), &prompt);
        let version = parent.as_ref().map_or(AdapterVersion::BASE, |p| p.version);
        let steps = (0..24)
            .map(|i| {
                // Every arm is tried, so that each batch has liked and disliked answers.
                let arm = if i < ARMS.len() {
                    i
                } else {
                    draw(&logprobs, &mut rng)
                };
                let mut step = step(&prompt, &ARMS[arm..=arm], logprobs[arm], version);
                step.prompt_uid = "bandit".into();
                let value = if arm == LIKED { 1.0 } else { -1.0 };
                rated(step, value, RewardSource::Outcome)
            })
            .collect();
        let mut request = request(dir.path(), round, parent.clone(), steps);
        request.estimator = estimator;
        if estimator == Estimator::Ppo {
            // One prompt has nothing to explain; the critic is used nevertheless.
            let anything = json!(-1e9);
            request
                .overrides
                .insert("min_explained_variance".into(), anything);
        }
        let outcome = train(&model, &request, &Ids, &mut Watch::default()).expect("trains");
        parent = Some(outcome.adapter.clone());
        last = Some(outcome);
    }
    let after = share(&arms(&model, parent.as_ref(), &prompt));
    (before, after, last.expect("at least one round"))
}

#[track_caller]
fn assert_solved(estimator: Estimator) {
    let (before, after, outcome) = bandit(estimator, 5);
    println!("{estimator:?}: {before:.3} -> {after:.3}");
    assert!(before < 0.5, "the task is not solved from the start");
    assert!(after > 0.9, "{estimator:?} reached only {after:.3}");
    assert_eq!(outcome.estimator, estimator, "{}", outcome.estimator_reason);
}

#[test]
fn ppo_solves_the_bandit() {
    assert_solved(Estimator::Ppo);
}

#[test]
fn the_running_baseline_solves_the_bandit() {
    assert_solved(Estimator::Binary);
}

#[test]
fn grpo_solves_the_bandit() {
    assert_solved(Estimator::Grpo);
}

#[test]
fn rloo_solves_the_bandit() {
    assert_solved(Estimator::Rloo);
}

#[test]
fn kto_solves_the_bandit() {
    assert_solved(Estimator::Kto);
}

#[test]
fn dpo_solves_the_bandit() {
    assert_solved(Estimator::Dpo);
}

/// Two steps: the first answer decides the reward, which comes after the second.
/// The liked first answer's share before and after.
fn two_steps(estimator: Estimator, rounds: u32) -> (f64, f64) {
    let (model, dir) = (tiny(), tempfile::tempdir().expect("directory"));
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    let first = [10, 11, 12];
    let before = share(&arms(&model, None, &first));
    let mut parent = None::<AdapterFiles>;
    for round in 0..rounds {
        let version = parent.as_ref().map_or(AdapterVersion::BASE, |p| p.version);
        let opening = arms(&model, parent.as_ref(), &first);
        let closing: Vec<Vec<f64>> = ARMS
            .iter()
            .map(|arm| arms(&model, parent.as_ref(), &[10, 11, 12, *arm, 13]))
            .collect();
        let mut steps = Vec::new();
        for i in 0..24 {
            let a = if i < ARMS.len() {
                i
            } else {
                draw(&opening, &mut rng)
            };
            let b = draw(&closing[a], &mut rng);
            let second = [10, 11, 12, ARMS[a], 13];
            let mut start = step(&first, &ARMS[a..=a], opening[a], version);
            start.is_last = false;
            start.prompt_uid = "two".into();
            let mut end = step(&second, &ARMS[b..=b], closing[a][b], version);
            end.trajectory = start.trajectory.clone();
            end.prompt_uid = "two".into();
            end.index = 1;
            steps.push(start);
            let value = if a == LIKED { 1.0 } else { -1.0 };
            steps.push(rated(end, value, RewardSource::Outcome));
        }
        let mut request = request(dir.path(), round, parent.clone(), steps);
        request.estimator = estimator;
        let outcome = train(&model, &request, &Ids, &mut Watch::default()).expect("trains");
        parent = Some(outcome.adapter);
    }
    (before, share(&arms(&model, parent.as_ref(), &first)))
}

#[test]
fn credit_reaches_the_first_of_two_steps() {
    for estimator in [
        Estimator::Ppo,
        Estimator::Grpo,
        Estimator::Rloo,
        Estimator::Binary,
    ] {
        let (before, after) = two_steps(estimator, 5);
        println!("{estimator:?}: {before:.3} -> {after:.3}");
        assert!(
            before < 0.5 && after > 0.8,
            "{estimator:?}: {before:.3} -> {after:.3}"
        );
    }
}

fn thumbs() -> Vec<TrainStep> {
    (0..10u32)
        .map(|i| {
            let step = step(&[10, 11, i], &[40 + i, 50, 51], -6.0, AdapterVersion::BASE);
            let value = if i % 2 == 0 { 1.0 } else { -1.0 };
            rated(step, value, RewardSource::User)
        })
        .collect()
}

#[test]
fn one_run_raises_liked_and_corrected_and_lowers_disliked_answers() {
    let (model, dir) = (tiny(), tempfile::tempdir().expect("directory"));
    let mut steps = thumbs();
    steps[1].correction = Some("60 61 2".into());
    let mut request = request(dir.path(), 0, None, steps);
    request.held_out = thumbs();
    let mut watch = Watch::default();
    let outcome = train(&model, &request, &Ids, &mut watch).expect("trains");
    let value = |name: &str| {
        outcome
            .metrics
            .iter()
            .find(|m| m.name == name)
            .map(|m| m.value)
    };
    assert!(
        value("liked_change").is_some_and(|v| v > 0.0),
        "{outcome:?}"
    );
    assert!(
        value("disliked_change").is_some_and(|v| v < 0.0),
        "{outcome:?}"
    );
    assert_eq!(value("pairs_used"), Some(1.0));
    assert_eq!(outcome.used.len(), 10);
    assert!(outcome.evaluation.margin_after > outcome.evaluation.margin_before);
    assert_eq!(outcome.evaluation.held_out, (5, 5));
    assert!(
        outcome
            .adapter
            .dir
            .join("adapter_model.safetensors")
            .exists()
    );
    assert!(
        outcome
            .adapter
            .state_dir()
            .join("state.safetensors")
            .exists()
    );
    let fractions: Vec<f64> = watch.progress.iter().map(|p| p.fraction).collect();
    assert!(
        fractions.windows(2).all(|w| w[0] <= w[1]),
        "progress only grows: {fractions:?}"
    );
    for metric in watch.progress.iter().flat_map(|p| &p.metrics) {
        assert!(metric.value.is_finite(), "{metric:?}");
    }
}

/// Every text is the beginning of a disliked answer, so that a lesson makes it less likely.
struct Sentences;

impl Vocabulary for Sentences {
    fn answer(&self, text: &str) -> Result<Vec<u32>, Failure> {
        Ids.answer(text)
    }

    fn text(&self, _: &str) -> Result<Vec<u32>, Failure> {
        Ok(vec![11, 3, 43])
    }

    fn question(&self, text: &str) -> Result<Vec<u32>, Failure> {
        Ids.question(text)
    }

    fn ends(&self) -> Vec<u32> {
        Ids.ends()
    }
}

#[test]
fn a_run_that_costs_ability_keeps_only_as_much_change_as_fits() {
    let model = tiny();
    let run = |most: f64| {
        let dir = tempfile::tempdir().expect("directory");
        let mut request = request(dir.path(), 0, None, thumbs());
        for (name, value) in [("max_probe_rise", most), ("retention_weight", 0.0)] {
            request.overrides.insert(name.into(), json!(value));
        }
        let outcome = train(&model, &request, &Sentences, &mut Watch::default()).expect("trains");
        let kept = outcome.metrics.iter().find(|m| m.name == "change_kept");
        let evaluation = outcome.evaluation;
        let rise = evaluation.probe_after / evaluation.probe_base - 1.0;
        (kept.expect("reported").value, rise)
    };
    let (kept, rise) = run(1e6);
    assert_eq!(kept, 1.0);
    assert!(
        rise > 0.0,
        "the lesson costs nothing, so this shows nothing"
    );
    let (kept, smaller) = run(rise / 2.0);
    assert!(kept < 1.0, "{kept}");
    assert!(smaller <= rise / 2.0 + 1e-9, "{smaller} after {rise}");
}

#[test]
fn a_liked_retry_is_raised_over_the_answer_it_replaces() {
    let (model, dir) = (tiny(), tempfile::tempdir().expect("directory"));
    let mut steps = thumbs();
    // The second answer is to the first one's question.
    steps[1].prompt_ids = steps[0].prompt_ids.clone();
    let liked = steps[0].uid.clone();
    let request = request(dir.path(), 0, None, steps);
    let outcome = train(&model, &request, &Ids, &mut Watch::default()).expect("trains");
    let pairs = outcome.metrics.iter().find(|m| m.name == "pairs_used");
    assert_eq!(pairs.map(|m| m.value), Some(1.0));
    assert!(outcome.used.contains(&liked), "both answers are used up");
    assert_eq!(outcome.used.len(), 10);
    let change = outcome.changes.iter().find(|c| c.uid == liked);
    assert!(change.is_some_and(|c| c.reward > 0.0 && c.after > c.before));
}

#[test]
fn a_run_that_is_interrupted_anywhere_ends_bit_for_bit_the_same() {
    let model = tiny();
    let run = |pauses: &[usize]| {
        let dir = tempfile::tempdir().expect("directory");
        let mut steps = thumbs();
        steps[1].correction = Some("60 61 2".into());
        for step in &mut steps[6..] {
            step.logprobs.clear(); // These go to KTO, whose reference point is state, too.
        }
        let request = request(dir.path(), 0, None, steps);
        for &pause in pauses {
            let mut watch = Watch {
                pause_after: Some(pause),
                ..Watch::default()
            };
            let ended = train(&model, &request, &Ids, &mut watch);
            assert!(
                matches!(ended, Err(TrainError::Paused)),
                "{pause}: {ended:?}"
            );
        }
        let outcome = train(&model, &request, &Ids, &mut Watch::default()).expect("finishes");
        std::fs::read(outcome.adapter.dir.join("adapter_model.safetensors")).expect("adapter")
    };
    let whole = run(&[]);
    assert!(whole == run(&[1, 6, 3, 3]), "interrupted early and often");
    assert!(whole == run(&[9]), "interrupted in the middle");
}

#[test]
fn a_run_that_would_change_nothing_says_so() {
    let (model, dir) = (tiny(), tempfile::tempdir().expect("directory"));
    let steps = thumbs()
        .into_iter()
        .enumerate()
        .map(|(i, step)| {
            let mut step = rated(step, 1.0, RewardSource::Outcome);
            step.prompt_uid = format!("group {}", i / 5);
            step
        })
        .collect();
    let mut request = request(dir.path(), 0, None, steps);
    request.estimator = Estimator::Grpo;
    let wide = json!(1e9); // The recorded log-probabilities are made up.
    request.overrides.insert("sequence_ratio_high".into(), wide);
    let ended = train(&model, &request, &Ids, &mut Watch::default());
    let Err(TrainError::NothingToLearn { failure, dropped }) = ended else {
        panic!("equal rewards teach nothing, but: {ended:?}");
    };
    assert_eq!(failure.code, Code::NothingToLearn);
    assert_eq!(dropped.len(), 10, "each with its reason");
    assert!(!request.output_dir.exists());
}

#[test]
fn packed_and_unpacked_gradients_agree_and_response_scope_is_close() {
    let model = tiny();
    let prompt: Vec<u32> = (0..60).map(|i| (i * 7) % 200 + 3).collect();
    let longer: Vec<u32> = prompt.iter().copied().chain([40, 41, 9]).collect();
    let sequences = [
        (&prompt[..], vec![40, 41]),
        (&prompt[..], vec![40, 44, 45]),
        (&longer[..], vec![46, 2]),
    ];
    let sequences: Vec<Sequence<'_>> = sequences
        .iter()
        .map(|(prompt, response)| Sequence {
            prompt,
            response,
            temperature: 0.8,
        })
        .collect();
    let gradients = |scope: &str, together: bool| -> Vec<f32> {
        let mut settings = overrides();
        settings.insert("grad_scope".into(), json!(scope));
        let config = TrainConfig::resolve(Dial::Normal, &settings).expect("valid");
        let mut learner = Learner::new(&model, None, None, 1, &config).expect("learner");
        let mut upstream = |members: &[Vec<f64>]| -> Vec<Vec<f64>> {
            let slope = |l: &f64| -1.0 + 0.1 * l;
            members
                .iter()
                .map(|m| m.iter().map(slope).collect())
                .collect()
        };
        if together {
            learner
                .accumulate(&sequences, &mut upstream)
                .expect("gradients");
        } else {
            for sequence in &sequences {
                learner
                    .accumulate(&[*sequence], &mut upstream)
                    .expect("gradients");
            }
        }
        learner
            .accumulated()
            .values()
            .flat_map(|g| {
                g.flatten_all()
                    .and_then(|g| g.to_vec1::<f32>())
                    .expect("values")
            })
            .collect()
    };
    let (packed, unpacked) = (gradients("full", true), gradients("full", false));
    let scale = unpacked.iter().fold(0f32, |m, g| m.max(g.abs()));
    assert!(scale > 0.0, "there is a gradient");
    for (a, b) in packed.iter().zip(&unpacked) {
        assert!((a - b).abs() <= 1e-5 * scale.max(1.0), "{a} is not {b}");
    }
    let response = gradients("response", true);
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(x, y)| f64::from(*x) * f64::from(*y))
            .sum()
    };
    let norms = (dot(&response, &response) * dot(&packed, &packed)).sqrt();
    let cosine = dot(&response, &packed) / norms;
    println!("cosine of the response-scope gradient to the full one: {cosine:.3}");
    assert!(cosine > 0.7, "{cosine}");
}
