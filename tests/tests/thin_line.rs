//! The whole path through public interfaces only, on the real model: an answer is
//! served, logged, rated, learned from, served better, and the adapter exported.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use spotter_tests::{Daemon, binary, repository};

const MODEL: &str = "smollm2-135m-instruct";

const QUESTIONS: &[&str] = &[
    "How do I boil an egg?",
    "What is a good gift for a teacher?",
    "Why is the sky blue?",
    "How do I make tea?",
    "What is recycling?",
    "How can I fall asleep faster?",
    "What is jazz?",
    "How do I keep bananas fresh?",
    "What is a comet?",
    "How do I say no politely?",
];

fn ask(question: &str, seed: u64) -> Value {
    json!({
        "model": "spotter",
        "stream": true,
        "stream_options": {"include_usage": true},
        "messages": [{"role": "user", "content": question}],
        "temperature": 0.9,
        "seed": seed,
        "max_tokens": 24,
    })
}

/// Mean of what `changes` reports for liked and disliked answers.
fn mean(items: &[Value], liked: bool, field: &str) -> f64 {
    let values: Vec<f64> = items
        .iter()
        .filter(|c| (c["reward"].as_f64().unwrap_or(0.0) > 0.0) == liked)
        .filter_map(|c| c[field].as_f64())
        .collect();
    values.iter().sum::<f64>() / values.len() as f64
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_served_logged_rated_learned_from_and_served_better() -> Result<()> {
    let model = std::env::var("SPOTTER_TEST_MODEL").unwrap_or_else(|_| MODEL.to_owned());
    let daemon = Daemon::start(&model).await?;

    // Ten questions are answered by the base model; each step is in the pool.
    let mut steps = Vec::new();
    for (i, question) in QUESTIONS.iter().enumerate() {
        let answer = daemon.stream_chat(&ask(question, i as u64)).await?;
        ensure!(
            answer.adapter == "base",
            "the first answers come from the base model"
        );
        ensure!(
            !answer.content.is_empty(),
            "'{question}' got an empty answer"
        );
        let last = answer.chunks.last().context("no chunks")?;
        ensure!(
            last["usage"]["completion_tokens"].as_u64() > Some(0),
            "usage comes last: {last}"
        );
        let id = answer.chunks[0]["id"].as_str().context("no id")?.to_owned();
        ensure!(
            id == format!("chatcmpl-{}", answer.step),
            "the completion id names the step"
        );
        steps.push((answer.step, id, answer.content));
    }
    for (uid, _, content) in &steps {
        let step = daemon.get(&format!("/api/v1/steps/{uid}")).await?;
        let ids = step["response_ids"].as_array().context("response_ids")?;
        let logprobs = step["logprobs"].as_array().context("logprobs")?;
        ensure!(
            !ids.is_empty() && ids.len() == logprobs.len(),
            "one log-probability per token"
        );
        ensure!(
            logprobs
                .iter()
                .all(|l| l.as_f64().is_some_and(|l| l <= 1e-6)),
            "log-probabilities"
        );
        ensure!(
            !step["prompt_ids"]
                .as_array()
                .context("prompt_ids")?
                .is_empty(),
            "prompt ids"
        );
        ensure!(
            step["adapter"] == "base" && step["kind"] == "main",
            "adapter and kind: {step}"
        );
        ensure!(
            step["answer_text"].as_str() == Some(content.as_str()),
            "the text is stored"
        );
    }
    ensure!(
        daemon
            .request(reqwest::Method::GET, "/api/v1/steps/nosuchstep")
            .send()
            .await?
            .status()
            == 404,
        "an unknown step is not found"
    );
    let review = daemon.get("/api/v1/steps?unrated=true&limit=50").await?;
    ensure!(
        review["items"].as_array().map(Vec::len) == Some(steps.len()),
        "all wait for review"
    );

    // Too few labels: a run is refused with the reason and exit code 1.
    let (code, output) = daemon.cli(&["train", "now", "--json"]).await?;
    ensure!(
        code == 1,
        "training without labels exits 1, not {code}: {output}"
    );

    // The three ways to rate.
    for (i, (uid, completion, _)) in steps.iter().enumerate() {
        let rating = if i % 2 == 0 { "up" } else { "down" };
        match i % 3 {
            0 => drop(
                daemon
                    .post("/v1/feedback", &json!({"id": completion, "rating": rating}))
                    .await?,
            ),
            1 => {
                let path = format!("/api/v1/steps/{uid}/rating");
                drop(daemon.put(&path, &json!({"rating": rating})).await?);
            }
            _ => {
                let (code, output) = daemon.cli(&["rate", uid, rating]).await?;
                ensure!(code == 0, "spotter rate: {output}");
            }
        }
    }
    for (i, (uid, _, _)) in steps.iter().enumerate() {
        let step = daemon.get(&format!("/api/v1/steps/{uid}")).await?;
        ensure!(
            step["rating"] == if i % 2 == 0 { "up" } else { "down" },
            "rating {i}: {step}"
        );
    }

    // A real update; liked answers become likelier, disliked ones less likely.
    let (code, output) = daemon.cli(&["train", "now", "--json"]).await?;
    ensure!(code == 0, "spotter train now exits {code}: {output}");
    let run: Value = serde_json::from_str(output.trim().lines().last().unwrap_or_default())?;
    ensure!(run["state"] == "promoted", "the run went live: {run}");
    ensure!(
        run["steps_used"].as_u64() > Some(0),
        "steps were used: {run}"
    );
    let changes = run["changes"]["items"].as_array().context("changes")?;
    let liked = mean(changes, true, "after") - mean(changes, true, "before");
    let disliked = mean(changes, false, "after") - mean(changes, false, "before");
    println!("log-probability per token: liked {liked:+.4}, disliked {disliked:+.4}");
    ensure!(
        liked > disliked,
        "liked {liked:+.5} must gain on disliked {disliked:+.5}"
    );

    // The next answer comes from the new version, without a restart.
    let answer = daemon
        .stream_chat(&ask("How do I water a cactus?", 99))
        .await?;
    ensure!(
        answer.adapter == "v1",
        "the next answer carries {}",
        answer.adapter
    );
    let step = daemon
        .get(&format!("/api/v1/steps/{}", answer.step))
        .await?;
    ensure!(step["adapter"] == "v1", "and so does its step");

    // The adapter leaves as PEFT files.
    let out = daemon.data_dir.join("peft-export");
    let out_text = out.to_string_lossy().into_owned();
    let (code, output) = daemon
        .cli(&[
            "adapter", "export", "1", "--format", "peft", "--out", &out_text,
        ])
        .await?;
    ensure!(code == 0, "export: {output}");
    ensure!(
        out.join("adapter_config.json").exists() && out.join("adapter_model.safetensors").exists()
    );
    if let Ok(python) = std::env::var("SPOTTER_TEST_PYTHON") {
        let gguf = std::env::var("SPOTTER_TEST_MODEL").context("SPOTTER_TEST_MODEL")?;
        let status = Command::new(python)
            .arg(repository().join("tests/python/load_peft.py"))
            .args([&gguf, &out_text])
            .status()?;
        ensure!(status.success(), "PEFT does not load the export");
    } else {
        println!("SPOTTER_TEST_PYTHON is not set: PEFT itself was not asked to load the export");
    }

    // Back to the base and forth again, without a restart.
    daemon.post("/api/v1/adapters/rollback", &json!({})).await?;
    let answer = daemon.stream_chat(&ask("What is tea?", 5)).await?;
    ensure!(
        answer.adapter == "base",
        "after a rollback the base answers"
    );
    daemon
        .post("/api/v1/adapters/v1/activate", &json!({}))
        .await?;
    let answer = daemon.stream_chat(&ask("What is tea?", 5)).await?;
    ensure!(answer.adapter == "v1", "after activation v1 answers");

    daemon.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn state_survives_a_restart() -> Result<()> {
    let data = tempfile::tempdir()?;
    let daemon = Daemon::start_in("tiny", data.path()).await?;
    let answer = daemon.stream_chat(&ask("Hello", 1)).await?;
    daemon
        .put(
            &format!("/api/v1/steps/{}/rating", answer.step),
            &json!({"rating": "down"}),
        )
        .await?;
    daemon.stop().await?;

    let daemon = Daemon::start_in("tiny", data.path()).await?;
    let step = daemon
        .get(&format!("/api/v1/steps/{}", answer.step))
        .await?;
    ensure!(step["rating"] == "down", "the rating survived: {step}");
    daemon.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_token_is_refused_in_each_dialect() -> Result<()> {
    let daemon = Daemon::start("tiny").await?;
    let http = reqwest::Client::new();
    for (path, pointer) in [
        ("/v1/chat/completions", "/error/message"),
        ("/v1/messages", "/error/message"),
        ("/api/v1/training/runs", "/error/code"),
    ] {
        let response = http
            .post(format!("{}{path}", daemon.url))
            .bearer_auth("wrong")
            .json(&ask("Hello", 1))
            .send()
            .await?;
        ensure!(
            response.status() == 401,
            "{path} answers {}",
            response.status()
        );
        let body: Value = response.json().await?;
        ensure!(
            body.pointer(pointer).is_some(),
            "{path} has its own error form: {body}"
        );
    }
    daemon.stop().await
}

/// What `spotter` says when it refuses `arguments` with exit code 1.
async fn refusal(arguments: &[&str], data_dir: &Path) -> Result<String> {
    let output = tokio::process::Command::new(binary("spotter")?)
        .args(arguments)
        .arg("--data-dir")
        .arg(data_dir)
        .env("SPOTTER_TOKEN", "t")
        .output()
        .await?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    let code = output.status.code();
    ensure!(code == Some(1), "exit code {code:?}: {said}");
    Ok(said)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_daemon_on_one_directory_is_refused() -> Result<()> {
    let daemon = Daemon::start("tiny").await?;
    let message = refusal(
        &["serve", "--port", "0", "--model", "tiny"],
        &daemon.data_dir,
    )
    .await?;
    ensure!(
        message.contains(&daemon.pid().context("pid")?.to_string()),
        "the message names the process that holds the directory: {message}"
    );
    daemon.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_port_is_reported_with_the_next_free_one() -> Result<()> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port().to_string();
    let data = tempfile::tempdir()?;
    let message = refusal(&["serve", "--model", "tiny", "--port", &port], data.path()).await?;
    ensure!(
        message.contains(&port),
        "the message names the port: {message}"
    );
    ensure!(message.contains("--port"), "and says what to do: {message}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_model_file_is_named() -> Result<()> {
    let data = tempfile::tempdir()?;
    let broken = data.path().join("broken.gguf");
    std::fs::write(
        &broken,
        b"GGUF\x03\x00\x00\x00 and then nothing that makes sense",
    )?;
    for file in ["broken.gguf", "absent.gguf"] {
        let path = data.path().join(file);
        let path = path.to_str().context("a readable path")?;
        let message = refusal(&["model", "import", path], &data.path().join("data")).await?;
        ensure!(
            message.contains(file),
            "the message names the file: {message}"
        );
    }
    Ok(())
}
