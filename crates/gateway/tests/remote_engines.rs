//! Other servers as engines: translation both ways, what vLLM adds, balancing,
//! affinity and failover.

mod common;

use std::sync::Arc;

use axum::Json;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use common::{Gateway, TOKEN};
use futures::StreamExt;
use serde_json::{Value, json};
use spotter_core::Code;
use spotter_core::chat::{Message, ResponseFormat, Role, Tool, ToolChoice};
use spotter_core::generate::{
    AdapterChoice, Completion, FinishReason, GenerateEvent, GenerateRequest, Prompt, Sampling,
};
use spotter_gateway::engine::Engine;
use spotter_gateway::engine::balanced::BalancedEngine;
use spotter_gateway::engine::remote::{RemoteEngine, Upstream};
use spotter_gateway::engine::scripted::{Reply, ScriptedEngine};

fn request(session: &str) -> GenerateRequest {
    GenerateRequest {
        prompt: Prompt::Chat {
            messages: vec![Message::text(Role::User, "hi")],
            tools: vec![Tool {
                name: "exec".into(),
                description: String::new(),
                parameters: json!({"type": "object"}),
            }],
            template_variables: serde_json::Map::new(),
        },
        tool_choice: ToolChoice::Auto,
        response_format: ResponseFormat::Text,
        sampling: Sampling::default(),
        adapter: AdapterChoice::Current,
        session: session.to_owned(),
        turn: None,
        top_logprobs: None,
        deadline_ms: None,
    }
}

fn remote(url: &str, key: Option<&str>) -> RemoteEngine {
    RemoteEngine::new(Upstream {
        name: "other".into(),
        url: format!("{url}/v1"),
        key: key.map(str::to_owned),
        model: None,
        base_model: None,
    })
    .expect("a client")
}

async fn finish(
    engine: &dyn Engine,
    request: GenerateRequest,
) -> Result<(Vec<u32>, Completion), Code> {
    let mut stream = engine.generate(request).await.map_err(|f| f.code)?;
    let mut prompt = Vec::new();
    let mut arguments = String::new();
    while let Some(event) = stream.next().await {
        match event {
            GenerateEvent::Started { prompt_ids, .. } => prompt = prompt_ids,
            GenerateEvent::Delta { tool_calls, .. } => {
                for call in tool_calls {
                    arguments.push_str(&call.arguments);
                }
            }
            GenerateEvent::Finished { completion } => {
                let joined: String = completion
                    .tool_calls
                    .iter()
                    .map(|c| c.arguments.as_str())
                    .collect();
                assert_eq!(arguments, joined, "fragments join to the compact arguments");
                return Ok((prompt, *completion));
            }
            GenerateEvent::Failed { failure } => return Err(failure.code),
            GenerateEvent::Queued { .. } | GenerateEvent::Prefill { .. } => {}
        }
    }
    panic!("the stream ended without an end");
}

#[tokio::test]
async fn an_openai_compatible_server_is_an_engine() {
    let upstream = Gateway::start().await;
    let engine = remote(&upstream.url, Some(TOKEN));
    assert!(!engine.ready(), "not before it was looked at");
    assert!(engine.probe().await);
    assert_eq!(engine.facts().expect("facts").context_length, 65_536);
    let (_, text) = finish(&engine, request("s")).await.expect("an answer");
    assert_eq!(text.content, "Hello from the script.");
    assert!(
        text.response_ids.is_empty() && text.logprobs.is_empty(),
        "it tells no ids"
    );
    upstream
        .engine
        .push(Reply::call("exec", r#"{"command": "date"}"#));
    let (_, call) = finish(&engine, request("s")).await.expect("an answer");
    assert_eq!(call.finish_reason, FinishReason::ToolCalls);
    assert_eq!(call.tool_calls[0].arguments, r#"{"command":"date"}"#);
    upstream
        .engine
        .push(Reply::failure(Code::ContextLengthExceeded, "x"));
    assert_eq!(
        finish(&engine, request("s")).await,
        Err(Code::ContextLengthExceeded)
    );
    upstream.engine.push(Reply::failure(Code::Busy, "x"));
    assert_eq!(finish(&engine, request("s")).await, Err(Code::Busy));

    let stranger = remote(&upstream.url, Some("wrong"));
    assert!(
        !stranger.probe().await,
        "a wrong key of ours is an engine that is not there"
    );
}

/// As much of vLLM as is needed: its model list, and a stream with ids.
async fn vllm() -> (String, tokio::sync::mpsc::UnboundedReceiver<Value>) {
    let (seen, requests) = tokio::sync::mpsc::unbounded_channel();
    let chat = move |Json(body): Json<Value>| {
        seen.send(body).expect("the test listens");
        async {
            let chunk = |choice: Value, more: Value| {
                let mut chunk = json!({"id": "x", "choices": [choice]});
                for (key, value) in more.as_object().expect("an object") {
                    chunk[key] = value.clone();
                }
                format!("data: {chunk}\n\n")
            };
            let logprob = |token: &str, value: f64| json!({"content": [{"token": token, "logprob": value, "top_logprobs": []}]});
            let text = [
                chunk(json!({"index": 0, "delta": {"role": "assistant", "content": ""}}), json!({"prompt_token_ids": [1, 2, 3]})),
                chunk(json!({"index": 0, "delta": {"content": "Hé"}, "token_ids": [10], "logprobs": logprob("Hé", -0.25)}), json!({})),
                chunk(json!({"index": 0, "delta": {"content": "llo"}, "token_ids": [11], "logprobs": logprob("llo", -0.5)}), json!({})),
                chunk(json!({"index": 0, "delta": {"content": ""}, "token_ids": [2], "logprobs": logprob("</s>", -0.125), "finish_reason": "stop"}), json!({})),
                "data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 3, \"completion_tokens\": 3}}\n\n".to_owned(),
                "data: [DONE]\n\n".to_owned(),
            ]
            .concat();
            ([("content-type", "text/event-stream")], text).into_response()
        }
    };
    let models = || async {
        Json(json!({"data": [{"id": "qwen", "owned_by": "vllm", "max_model_len": 4096}]}))
    };
    let router = axum::Router::new()
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(chat))
        .route("/tokenize", post(|| async { Json(json!({"count": 17})) }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    (url, requests)
}

#[tokio::test]
async fn vllm_gives_ids_and_log_probabilities() {
    let (url, mut requests) = vllm().await;
    let engine = remote(&url, None);
    assert!(engine.probe().await);
    let (prompt, plain) = finish(&engine, request("s")).await.expect("an answer");
    assert_eq!((prompt, plain.content.as_str()), (vec![1, 2, 3], "Héllo"));
    assert_eq!(plain.response_ids, [10, 11, 2]);
    assert_eq!(plain.model_logprobs, [-0.25, -0.5, -0.125]);
    assert_eq!(
        plain.logprobs, plain.model_logprobs,
        "nothing was applied to them"
    );
    let sent = requests.recv().await.expect("a request");
    assert_eq!(
        (sent["model"].as_str(), sent["return_token_ids"].as_bool()),
        (Some("qwen"), Some(true))
    );

    let mut warm = request("s");
    warm.sampling.temperature = 0.7;
    let (_, warm) = finish(&engine, warm).await.expect("an answer");
    assert_eq!(warm.model_logprobs.len(), 3);
    assert!(
        warm.logprobs.is_empty(),
        "those of the sampling distribution are not known"
    );
    assert_eq!(
        engine
            .count_tokens(Prompt::Text("x".into()))
            .await
            .expect("a count"),
        17
    );
}

#[tokio::test]
async fn conversations_stay_and_load_is_spread() {
    let engines: Vec<Arc<ScriptedEngine>> = (0..2).map(|_| Arc::default()).collect();
    let balanced = BalancedEngine::new(
        engines
            .iter()
            .map(|e| Arc::clone(e) as Arc<dyn Engine>)
            .collect(),
    );
    for _ in 0..3 {
        finish(&balanced, request("a")).await.expect("an answer");
    }
    assert_eq!(
        (engines[0].requests().len(), engines[1].requests().len()),
        (3, 0)
    );
    // While one engine works, other conversations go to the other one.
    let mut busy = balanced.generate(request("a")).await.expect("a stream");
    busy.next().await.expect("it began");
    finish(&balanced, request("b")).await.expect("an answer");
    assert_eq!(engines[1].requests().len(), 1);
    drop(busy);
    finish(&balanced, request("b")).await.expect("an answer");
    assert_eq!(
        engines[1].requests().len(),
        2,
        "b stays where its prefix is"
    );
}

#[tokio::test]
async fn failover_ends_with_the_first_token() {
    let engines: Vec<Arc<ScriptedEngine>> = (0..2).map(|_| Arc::default()).collect();
    let balanced = BalancedEngine::new(
        engines
            .iter()
            .map(|e| Arc::clone(e) as Arc<dyn Engine>)
            .collect(),
    );
    engines[0].push(Reply::failure(Code::Unavailable, "gone"));
    assert!(finish(&balanced, request("a")).await.is_ok());
    engines[1].push(Reply {
        failure_after: Some(spotter_core::code::Failure::new(Code::Unavailable, "gone")),
        ..Reply::text("half an")
    });
    assert_eq!(
        finish(&balanced, request("a")).await,
        Err(Code::Unavailable),
        "something was said"
    );
    engines[0].push(Reply::failure(Code::InvalidRequest, "wrong"));
    engines[1].push(Reply::text("not asked"));
    assert_eq!(
        finish(&balanced, request("c")).await,
        Err(Code::InvalidRequest)
    );

    // An engine without the live adapter is the last resort.
    engines[0]
        .live
        .store(2, std::sync::atomic::Ordering::SeqCst);
    let before = engines[1].requests().len();
    for n in 0..4 {
        finish(&balanced, request(&format!("n{n}")))
            .await
            .expect("an answer");
    }
    assert_eq!(engines[1].requests().len(), before);
    engines[0]
        .ready
        .store(false, std::sync::atomic::Ordering::SeqCst);
    finish(&balanced, request("d")).await.expect("an answer");
    assert_eq!(engines[1].requests().len(), before + 1);
    engines[1]
        .ready
        .store(false, std::sync::atomic::Ordering::SeqCst);
    assert!(!balanced.ready());
    assert_eq!(
        finish(&balanced, request("d")).await,
        Err(Code::Unavailable)
    );
}
