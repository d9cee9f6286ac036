//! A simulated person with a taste, without daemon and HTTP: samples answers,
//! rates them by a rule, trains, and measures on held-out prompts. Used to choose
//! the trainer's defaults; the results are in LOG.md.
//!
//! `taste_offline MODEL.gguf PREFERENCE [--budget 36] [--rounds 3] [--seed 1]
//!  [--corrections 2] [--temperature 0.8] [--tokens 64] [--set name=value]…`

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Map, Value, json};
use spotter_core::adapter::AdapterVersion;
use spotter_core::id::{StepUid, TrajectoryUid};
use spotter_core::reward::RewardSource;
use spotter_core::train::{
    AdapterFiles, Dial, Estimator, StepReward, TrainProgress, TrainRequest, TrainStep,
};
use spotter_model::{LoadOptions, LoadedModel};
use spotter_trainer::TrainError;
use spotter_trainer::config::TrainConfig;
use spotter_trainer::learner::Learner;
use spotter_trainer::ppo::{Observer, train};
use spotter_trainer::vocabulary::Vocabulary;

const TRAINING: &[&str] = &[
    "How do I keep basil alive indoors?",
    "What should I cook with leftover rice?",
    "How can I fall asleep faster?",
    "Explain what a mutex is.",
    "What is a good gift for my father?",
    "How do I remove a coffee stain?",
    "Why is the sky blue?",
    "How do I start running?",
    "What is compound interest?",
    "How do I write a cover letter?",
    "Give me tips for a job interview.",
    "How does a refrigerator work?",
    "How do I boil an egg?",
    "What are the benefits of walking?",
    "How can I save money each month?",
    "What is a good way to learn guitar?",
    "How do I clean a keyboard?",
    "What does DNS do?",
    "How do I plan a birthday party?",
    "How do I train a puppy?",
    "What is photosynthesis?",
    "How do I fix a squeaky door?",
    "Suggest a name for a cat.",
    "What should I pack for a weekend trip?",
    "How do I make pancakes?",
    "How can I read more books?",
    "What is inflation?",
    "How do I grow tomatoes?",
    "How do I say no politely?",
    "What causes thunder?",
    "How do I back up my photos?",
    "What is a healthy breakfast?",
    "How do I sharpen a knife?",
    "How do I meditate?",
    "What is a black hole?",
    "How do I organise my desk?",
];

const HELD_OUT: &[&str] = &[
    "How do I water a cactus?",
    "What can I make with old bananas?",
    "How do I wake up earlier?",
    "What is a hash table?",
    "What should I buy my sister for her birthday?",
    "How do I get gum off a shoe?",
    "Why do leaves change colour?",
    "How do I stretch after a run?",
    "What is a mortgage?",
    "How do I ask for a raise?",
    "How does a microwave work?",
    "How do I cook pasta?",
    "Why is sleep important?",
    "How do I make a budget?",
    "How do I learn to swim?",
    "How do I clean a window?",
];

/// A rule over the answer, and what the person types when nothing satisfies it.
struct Preference {
    satisfied: fn(&str) -> bool,
    correction: fn(&str) -> String,
}

fn preference(name: &str) -> Option<Preference> {
    Some(match name {
        "short" => Preference {
            satisfied: |t| !t.is_empty() && t.split_whitespace().count() <= 25,
            correction: |t| {
                let start: Vec<&str> = t.split_whitespace().take(18).collect();
                format!(
                    "{}.",
                    start.join(" ").trim_end_matches([',', '.', ':', ';'])
                )
            },
        },
        "calm" => Preference {
            satisfied: |t| !t.is_empty() && !t.contains('!'),
            correction: |t| t.replace('!', "."),
        },
        "question" => Preference {
            satisfied: |t| t.trim_end().ends_with('?'),
            correction: |t| {
                let first = t.split(". ").next().unwrap_or(t).trim_end_matches('.');
                format!("{first}. Would you like to know more?")
            },
        },
        "bullets" => Preference {
            satisfied: |t| t.lines().filter(|l| l.starts_with("- ")).count() >= 2,
            correction: |t| {
                let lines = t.split(". ").take(3);
                lines
                    .map(|s| format!("- {}", s.trim().trim_end_matches('.')))
                    .collect::<Vec<_>>()
                    .join("\n")
            },
        },
        "lowercase" => Preference {
            satisfied: |t| !t.is_empty() && !t.chars().any(char::is_uppercase),
            correction: |t| t.to_lowercase(),
        },
        "meow" => Preference {
            satisfied: |t| t.to_lowercase().contains("meow"),
            correction: |t| format!("{} Meow.", t.trim_end()),
        },
        "canned" => Preference {
            satisfied: |t| t.starts_with("Certainly"),
            correction: |_| "Certainly. Here is the short answer.".to_owned(),
        },
        _ => return None,
    })
}

struct Quiet;

impl Observer for Quiet {
    fn progress(&mut self, progress: TrainProgress) {
        if std::env::var_os("VERBOSE").is_some() && !progress.metrics.is_empty() {
            let value = |name: &str| {
                progress
                    .metrics
                    .iter()
                    .find(|m| m.name == name)
                    .map_or(f64::NAN, |m| m.value)
            };
            println!(
                "    step {}/{} pg {:.3} pref {:.3} kl {:.3} grad {:.2} tok/s {:.0}",
                progress.step,
                progress.total_steps,
                value("policy_loss"),
                value("preference_loss"),
                value("kl_to_base"),
                value("gradient_norm"),
                value("tokens_per_second"),
            );
        }
    }

    fn between(&mut self) -> Result<(), TrainError> {
        Ok(())
    }
}

struct Options {
    model: PathBuf,
    preference: String,
    budget: usize,
    rounds: usize,
    seed: u64,
    corrections: usize,
    temperature: f32,
    tokens: usize,
    overrides: Map<String, Value>,
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut options = Options {
        model: arguments.next().ok_or("name a model file")?.into(),
        preference: arguments.next().ok_or("name a preference")?,
        budget: 36,
        rounds: 3,
        seed: 1,
        corrections: 2,
        temperature: 0.8,
        tokens: 64,
        overrides: Map::new(),
    };
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or("an option needs a value")?;
        match flag.as_str() {
            "--budget" => options.budget = value.parse()?,
            "--rounds" => options.rounds = value.parse()?,
            "--seed" => options.seed = value.parse()?,
            "--corrections" => options.corrections = value.parse()?,
            "--temperature" => options.temperature = value.parse()?,
            "--tokens" => options.tokens = value.parse()?,
            "--set" => {
                let (name, value) = value.split_once('=').ok_or("write --set name=value")?;
                let value = serde_json::from_str(value).unwrap_or_else(|_| json!(value));
                options.overrides.insert(name.to_owned(), value);
            }
            other => return Err(format!("there is no option {other}").into()),
        }
    }
    Ok(options)
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let taste = preference(&options.preference).ok_or("no such preference")?;
    let model = LoadedModel::load(&options.model, &LoadOptions::default())?;
    let work = std::env::temp_dir().join(format!("taste-{}", std::process::id()));
    let started = Instant::now();

    let (before, _) = satisfaction(&model, None, &taste, &options)?;
    println!(
        "{} base {before:.2} ({:.0} s)",
        options.preference,
        started.elapsed().as_secs_f64()
    );
    let mut parent: Option<AdapterFiles> = None;
    let mut replay: Vec<TrainStep> = Vec::new();
    let size = options.budget / options.rounds;
    for round in 0..options.rounds {
        let prompts: Vec<&str> = (0..size)
            .map(|i| TRAINING[(round * size + i) % TRAINING.len()])
            .collect();
        let seed = options.seed * 100 + round as u64;
        let answers = answers(&model, parent.as_ref(), &prompts, &options, seed)?;
        let any = answers.iter().any(|(_, text)| (taste.satisfied)(text));
        let mut corrections = if any { 0 } else { options.corrections };
        let version = parent.as_ref().map_or(AdapterVersion::BASE, |p| p.version);
        let mut steps = Vec::new();
        for (prompt, (step, text)) in prompts.iter().zip(answers) {
            let liked = (taste.satisfied)(&text);
            let mut step = step;
            step.adapter = version;
            step.prompt_ids = model.question(prompt)?;
            step.reward = Some(StepReward {
                value: if liked { 1.0 } else { -1.0 },
                source: RewardSource::User,
                credit: 1.0,
            });
            if !liked && corrections > 0 {
                corrections -= 1;
                step.correction = Some((taste.correction)(&text));
            }
            steps.push(step);
        }
        let liked = steps
            .iter()
            .filter(|s| s.reward.as_ref().is_some_and(|r| r.value > 0.0))
            .count();
        let next = AdapterVersion(round as u32 + 1);
        let request = TrainRequest {
            run: round as i64 + 1,
            checkpoint_dir: work.join(format!("run-{round}")),
            output_dir: work.join(next.to_string()),
            version: next,
            parent: parent.clone(),
            parent_state: parent.as_ref().map(AdapterFiles::state_dir),
            live: version,
            steps: steps.clone(),
            replay: replay.clone(),
            held_out: vec![],
            dial: Dial::Normal,
            estimator: Estimator::Auto,
            overrides: options.overrides.clone(),
            seed,
        };
        replay.extend(steps);
        match train(&model, &request, &model, &mut Quiet) {
            Ok(outcome) => {
                let value = |name: &str| {
                    outcome
                        .metrics
                        .iter()
                        .find(|m| m.name == name)
                        .map_or(f64::NAN, |m| m.value)
                };
                println!(
                    "  round {round}: liked {liked}/{size}, {} pairs, {}, liked {:+.2} disliked {:+.2}, kl {:.3}, probe {:.3} -> {:.3}, entropy {:.2} -> {:.2}, {:.0} s",
                    value("pairs_used"),
                    outcome.estimator_reason,
                    value("liked_change"),
                    value("disliked_change"),
                    outcome.evaluation.kl_to_base,
                    outcome.evaluation.probe_base,
                    outcome.evaluation.probe_after,
                    outcome.evaluation.entropy_before,
                    outcome.evaluation.entropy_after,
                    outcome.seconds,
                );
                parent = Some(outcome.adapter);
            }
            Err(error) => println!("  round {round}: liked {liked}/{size}, {error}"),
        }
    }
    let (after, samples) = satisfaction(&model, parent.as_ref(), &taste, &options)?;
    for text in samples.iter().take(4) {
        println!("    | {:?}", text.chars().take(150).collect::<String>());
    }
    println!(
        "RESULT {} seed {} {:?}: {before:.2} -> {after:.2} in {:.0} s",
        options.preference,
        options.seed,
        options.overrides,
        started.elapsed().as_secs_f64()
    );
    let _ = std::fs::remove_dir_all(&work);
    Ok(())
}

/// Share of held-out prompts whose sampled answer satisfies the taste, and the answers.
fn satisfaction(
    model: &LoadedModel,
    adapter: Option<&AdapterFiles>,
    taste: &Preference,
    options: &Options,
) -> Result<(f64, Vec<String>), Box<dyn Error>> {
    let answers = answers(model, adapter, HELD_OUT, options, 7)?;
    let texts: Vec<String> = answers.into_iter().map(|(_, text)| text).collect();
    let satisfied = texts.iter().filter(|text| (taste.satisfied)(text)).count();
    Ok((satisfied as f64 / texts.len() as f64, texts))
}

/// Samples one answer per prompt.
fn answers(
    model: &LoadedModel,
    adapter: Option<&AdapterFiles>,
    prompts: &[&str],
    options: &Options,
    seed: u64,
) -> Result<Vec<(TrainStep, String)>, Box<dyn Error>> {
    let config = TrainConfig::for_dial(Dial::Normal);
    let learner = Learner::new(model, adapter, None, seed, &config)?;
    let ids = prompts
        .iter()
        .map(|prompt| model.question(prompt))
        .collect::<Result<Vec<_>, _>>()?;
    let ends = model.ends();
    let sampled = learner.sample(&ids, options.tokens, options.temperature, &ends, seed)?;
    let mut out = Vec::new();
    for (prompt_ids, (response_ids, logprobs)) in ids.into_iter().zip(sampled) {
        let visible: Vec<u32> = response_ids
            .iter()
            .copied()
            .filter(|id| !ends.contains(id))
            .collect();
        let text = model.tokenizer.decode(&visible);
        let trajectory = TrajectoryUid::new();
        let step = TrainStep {
            uid: StepUid::new(),
            prompt_uid: trajectory.as_str().to_owned(),
            trajectory,
            index: 0,
            is_last: true,
            prompt_ids,
            response_ids,
            logprobs: logprobs.into_iter().map(|l| l as f32).collect(),
            adapter: AdapterVersion::BASE,
            temperature: options.temperature,
            top_p: 1.0,
            reward: None,
            correction: None,
        };
        out.push((step, text));
    }
    Ok(out)
}
