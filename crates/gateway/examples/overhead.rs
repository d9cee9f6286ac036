//! What the gateway adds to a request: the same scripted answer taken from the
//! engine directly and through HTTP, with guard, session inference, recording and
//! streaming. Prints one JSON object per row; run it with `--release`.
//!
//! ```sh
//! cargo run --release -p spotter-gateway --example overhead -- [requests] [per_second]
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use serde_json::json;
use spotter_core::chat::{Message, Role};
use spotter_core::generate::{GenerateRequest, Prompt, Sampling};
use spotter_gateway::App;
use spotter_gateway::control::events::EventHub;
use spotter_gateway::engine::Engine;
use spotter_gateway::engine::scripted::{Reply, ScriptedEngine};
use spotter_gateway::guard::Guard;
use spotter_gateway::pool::memory::MemoryPool;

#[path = "../tests/common/mod.rs"]
mod common;

fn reply() -> Reply {
    Reply::text(&"word ".repeat(32))
}

fn percentile(sorted: &[Duration], share: f64) -> f64 {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )]
    let at = ((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len()) - 1;
    sorted[at].as_secs_f64() * 1000.0
}

fn row(name: &str, mut times: Vec<Duration>) -> Result<()> {
    ensure!(!times.is_empty(), "nothing was measured");
    times.sort_unstable();
    println!(
        "{}",
        json!({"what": name, "unit": "ms", "n": times.len(), "p50": percentile(&times, 0.5),
               "p95": percentile(&times, 0.95), "p99": percentile(&times, 0.99),
               "max": percentile(&times, 1.0)})
    );
    Ok(())
}

/// A conversation of OpenClaw's size, different in each request.
fn prompt(number: usize) -> (serde_json::Value, GenerateRequest) {
    let system = "You are a helpful agent. ".repeat(2000);
    let user = format!("Request {number}");
    let body = json!({"model": "spotter", "stream": true, "messages": [
        {"role": "system", "content": system}, {"role": "user", "content": user}]});
    let request = GenerateRequest {
        prompt: Prompt::Chat {
            messages: vec![
                Message::text(Role::System, system),
                Message::text(Role::User, user),
            ],
            tools: Vec::new(),
            template_variables: serde_json::Map::new(),
        },
        tool_choice: spotter_core::chat::ToolChoice::Auto,
        response_format: spotter_core::chat::ResponseFormat::Text,
        sampling: Sampling::default(),
        adapter: spotter_core::generate::AdapterChoice::Current,
        session: String::new(),
        turn: None,
        top_logprobs: None,
        deadline_ms: None,
    };
    (body, request)
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let requests: usize = arguments.next().map_or(Ok(1000), |n| n.parse())?;
    let per_second: u32 = arguments.next().map_or(Ok(50), |n| n.parse())?;

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let engine = Arc::new(ScriptedEngine::new(|_| reply()));
    let pool = Arc::new(MemoryPool::default());
    let app = App::new(
        Arc::clone(&pool) as _,
        Arc::clone(&engine) as _,
        Arc::new(common::StubControl::default()),
        EventHub::default(),
        Guard::new(address, Some(common::TOKEN), &[])?,
        None,
    );
    tokio::spawn(spotter_gateway::run(
        listener,
        Arc::new(app),
        std::future::pending(),
    ));
    let url = format!("http://{address}/v1/chat/completions");
    let http = reqwest::Client::new();

    let send = |number: usize, url: &str| {
        let (http, url) = (http.clone(), url.to_owned());
        async move {
            let (body, _) = prompt(number);
            let body = serde_json::to_vec(&body)?;
            let begun = Instant::now();
            let response = http
                .post(&url)
                .bearer_auth(common::TOKEN)
                .body(body)
                .send()
                .await?
                .error_for_status()?;
            let mut stream = response.bytes_stream();
            let mut first = None;
            let mut done = false;
            while let Some(bytes) = stream.next().await {
                let bytes = bytes?;
                first.get_or_insert_with(|| begun.elapsed());
                done |= bytes.windows(6).any(|w| w == b"[DONE]");
            }
            ensure!(done, "a stream was cut");
            Ok((first.context("an empty answer")?, begun.elapsed()))
        }
    };

    // What HTTP itself costs: the same bytes in and as many events out of a handler that
    // does nothing else.
    let bare = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let bare_url = format!("http://{}/", bare.local_addr()?);
    let handler = |_body: axum::body::Bytes| async {
        let events = futures::stream::iter((0..33).map(|n| {
            let end = if n == 32 {
                "[DONE]"
            } else {
                "{\"choices\":[]}"
            };
            Ok::<_, std::convert::Infallible>(format!("data: {end}\n\n"))
        }));
        axum::body::Body::from_stream(events)
    };
    let router = axum::Router::new().route("/", axum::routing::post(handler));
    tokio::spawn(async move { axum::serve(bare, router).await });

    for number in 0..50 {
        send(number, &url).await?;
        send(number, &bare_url).await?;
    }
    let mut direct = Vec::new();
    let (mut first, mut whole) = (Vec::new(), Vec::new());
    let (mut bare_first, mut bare_whole) = (Vec::new(), Vec::new());
    let mut tick = tokio::time::interval(Duration::from_secs(1) / per_second);
    for number in 0..requests {
        tick.tick().await;
        let (_, request) = prompt(number);
        let begun = Instant::now();
        let mut events = engine.generate(request).await?;
        while events.next().await.is_some() {}
        direct.push(begun.elapsed());
        let (to_first, to_end) = send(number, &bare_url).await?;
        bare_first.push(to_first);
        bare_whole.push(to_end);
        let (to_first, to_end) = send(number, &url).await?;
        first.push(to_first);
        whole.push(to_end);
    }
    row("engine directly", direct)?;
    row("bare HTTP handler, first chunk", bare_first)?;
    row("bare HTTP handler, whole answer", bare_whole)?;
    row("through the gateway, first chunk", first)?;
    row("through the gateway, whole answer of 32 pieces", whole)?;

    let before = pool.all_steps().len();
    let begun = Instant::now();
    let streams = futures::future::join_all((0..200).map(|n| send(100_000 + n, &url))).await;
    let lost = streams.iter().filter(|s| s.is_err()).count();
    println!(
        "{}",
        json!({"what": "200 streams at once", "lost": lost,
               "recorded": pool.all_steps().len() - before, "unit": "ms",
               "all": begun.elapsed().as_secs_f64() * 1000.0})
    );
    ensure!(lost == 0, "{lost} streams were lost");
    Ok(())
}
