//! A simulated user with a preference, who rates answers until the model shares it.
//!
//! Uses only Spotter's public HTTP interface: `/v1/chat/completions`,
//! `/v1/feedback` and `/api/v1/training/runs`. The person asks everyday questions,
//! gives 👍 to an answer that satisfies their rule and 👎 to one that does not. Where
//! none of four answers satisfies it and the rule says what the person would have
//! liked to read, they type that as a correction of each; where it does not say, they ask
//! again a few times and give 👍 to the first answer they like. Satisfaction is measured
//! on held-out questions before and after.

mod client;
mod rule;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use futures::{StreamExt, TryStreamExt};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use client::{Answer, Client};
use rule::Rule;

/// Ratings between two training runs.
const ROUND: usize = 12;
/// Fewest ratings of a lesson: so few are not left over at the end.
const LEAST: usize = 8;
/// Answers a person reads together. Where none of them is liked, they type what they
/// would have liked to read instead of each, if their rule tells.
const READ: usize = 4;
/// How often a person asks again who likes none of the answers they read together and
/// cannot say what they would rather read.
const RETRIES: u64 = 3;
/// Questions that are asked at the same time.
const CONCURRENT: usize = 4;
/// Sampling temperature of rated answers: enough variety to find what is liked.
const EXPLORE: f32 = 1.0;
/// Sampling temperature of measured answers: what a person would see.
const MEASURE: f32 = 0.7;

/// Teaches a running Spotter a preference and measures how well it took.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Address of the running `spotter serve`.
    #[arg(long, default_value = "http://127.0.0.1:8100")]
    url: String,
    /// Its bearer token.
    #[arg(long, env = "SPOTTER_TOKEN", hide_env_values = true)]
    token: String,
    /// A preference that ships with the example.
    #[arg(long, required_unless_present = "rule", conflicts_with = "rule")]
    preference: Option<String>,
    /// A rule file (JSON; see the README beside this example).
    #[arg(long)]
    rule: Option<PathBuf>,
    /// Most answers to rate.
    #[arg(long, default_value_t = 36)]
    budget: usize,
    /// Seed of the questions' order and of sampling.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print only the report, as one line of JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Deserialize)]
struct Prompts {
    training: Vec<String>,
    held_out: Vec<String>,
}

/// The last line of the output.
#[derive(Debug, Serialize)]
struct Report {
    preference: String,
    satisfaction_before: f64,
    satisfaction_after: f64,
    rated: usize,
    corrections: usize,
    updates: usize,
    rejected: usize,
    probe_before: Option<f64>,
    probe_after: Option<f64>,
    entropy_before: Option<f64>,
    entropy_after: Option<f64>,
    words_before: f64,
    words_after: f64,
    seconds: f64,
}

/// Answers to questions, each with the seed of its sampling, in the questions' order.
async fn ask_all<'a>(
    client: &Client,
    questions: impl Iterator<Item = (&'a str, u64)>,
    temperature: f32,
) -> Result<Vec<Answer>> {
    futures::stream::iter(questions)
        .map(|(question, seed)| client.ask(question, temperature, seed))
        .buffered(CONCURRENT)
        .try_collect()
        .await
}

/// Share of held-out questions answered to the person's liking, and mean words.
async fn satisfaction(
    client: &Client,
    rule: &Rule,
    prompts: &[String],
    seed: u64,
) -> Result<(f64, f64)> {
    let questions = prompts
        .iter()
        .enumerate()
        .map(|(i, prompt)| (prompt.as_str(), seed.wrapping_add(i as u64)));
    let (mut liked, mut words) = (0, 0);
    for answer in ask_all(client, questions, MEASURE).await? {
        liked += usize::from(rule.satisfied_by(&answer.text));
        words += answer.text.split_whitespace().count();
    }
    let n = prompts.len() as f64;
    Ok((liked as f64 / n, words as f64 / n))
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let rule = match (&arguments.preference, &arguments.rule) {
        (Some(name), _) => Rule::built_in(name)?,
        (None, Some(path)) => Rule::parse(
            &std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?,
        )?,
        (None, None) => unreachable!("clap requires one of the two"),
    };
    let prompts: Prompts = serde_json::from_str(include_str!("../prompts.json"))?;
    let say = |line: String| {
        if !arguments.json {
            println!("{line}");
        }
    };
    let client = Client::new(&arguments.url, &arguments.token);
    let started = Instant::now();
    // Held-out answers use seeds that no rated answer uses.
    let held_out_seed = arguments.seed.wrapping_mul(1_000_003).wrapping_add(1 << 40);

    let (before, words_before) =
        satisfaction(&client, &rule, &prompts.held_out, held_out_seed).await?;
    say(format!(
        "'{}' before: {:.0} % of held-out answers",
        rule.name,
        before * 100.0
    ));

    let mut order: Vec<&String> = prompts.training.iter().collect();
    order.shuffle(&mut ChaCha8Rng::seed_from_u64(arguments.seed));
    let mut questions = order.iter().cycle();
    let mut report = Report {
        preference: rule.name.clone(),
        satisfaction_before: before,
        satisfaction_after: before,
        rated: 0,
        corrections: 0,
        updates: 0,
        rejected: 0,
        probe_before: None,
        probe_after: None,
        entropy_before: None,
        entropy_after: None,
        words_before,
        words_after: words_before,
        seconds: 0.0,
    };

    while report.rated < arguments.budget {
        let left = arguments.budget - report.rated;
        let size = if left < ROUND + LEAST { left } else { ROUND };
        let mut asked = Vec::with_capacity(size);
        for i in 0..size {
            let question = questions.next().context("there are no questions")?;
            let seed = arguments
                .seed
                .wrapping_mul(10_007)
                .wrapping_add((report.rated + i) as u64);
            asked.push((question.as_str(), seed));
        }
        let answers = ask_all(&client, asked.iter().copied(), EXPLORE).await?;
        let (mut liked, mut rated) = (0, size);
        for (read, asked) in answers.chunks(READ).zip(asked.chunks(READ)) {
            let good: Vec<bool> = read.iter().map(|a| rule.satisfied_by(&a.text)).collect();
            let any = good.contains(&true);
            for (answer, good) in read.iter().zip(good) {
                let correction = (!any).then(|| rule.correct(&answer.text)).flatten();
                liked += usize::from(good);
                report.corrections += usize::from(correction.is_some());
                client.rate(&answer.id, good, correction.as_deref()).await?;
            }
            if any || rule.can_correct() {
                continue;
            }
            let mut open = asked.to_vec();
            for retry in 1..=RETRIES {
                let again: Vec<(&str, u64)> = open
                    .iter()
                    .map(|&(question, seed)| (question, seed.wrapping_add(retry << 32)))
                    .collect();
                let mut still_open = Vec::new();
                let retries = ask_all(&client, again.into_iter(), EXPLORE).await?;
                for (answer, question) in retries.iter().zip(open) {
                    if !rule.satisfied_by(&answer.text) {
                        still_open.push(question);
                    } else if report.rated + rated < arguments.budget {
                        client.rate(&answer.id, true, None).await?;
                        liked += 1;
                        rated += 1;
                    }
                }
                open = still_open;
            }
        }
        report.rated += rated;
        say(format!("rated {rated} answers, {liked} liked; training"));
        match client.train().await {
            Ok(run) => {
                let evaluation = &run["verdict"]["evaluation"];
                let number = |name: &str| evaluation[name].as_f64();
                report.probe_before = report.probe_before.or_else(|| number("probe_base"));
                report.entropy_before = report.entropy_before.or_else(|| number("entropy_before"));
                if run["state"] == "promoted" {
                    report.updates += 1;
                    report.probe_after = number("probe_after");
                    report.entropy_after = number("entropy_after");
                    say(format!("run {} went live as {}", run["id"], run["version"]));
                } else {
                    report.rejected += 1;
                    say(format!(
                        "run {} ended {}: {}",
                        run["id"], run["state"], run["verdict"]["reasons"]
                    ));
                }
            }
            // Too few labels left for another lesson is an end, not a failure.
            Err(error) => say(format!("no run: {error}")),
        }
    }

    let (after, words_after) =
        satisfaction(&client, &rule, &prompts.held_out, held_out_seed).await?;
    report.satisfaction_after = after;
    report.words_after = words_after;
    report.seconds = started.elapsed().as_secs_f64();
    say(format!(
        "'{}' after: {:.0} % of held-out answers",
        rule.name,
        after * 100.0
    ));
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}
