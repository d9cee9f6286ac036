//! What real clients need, point by point; each test is named after its point of
//! the list in `research/clients.md`, section D.

mod common;

use std::time::Duration;

use common::{Gateway, TOKEN, chat_stream, events, recorded};
use futures::StreamExt;
use serde_json::{Value, json};
use spotter_core::Code;
use spotter_core::chat::{ResponseFormat, Role};
use spotter_core::code::Failure;
use spotter_core::generate::Prompt;
use spotter_core::step::StepKind;
use spotter_gateway::engine::scripted::Reply;

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn ask(text: &str) -> Value {
    json!({"model": "spotter", "messages": [user(text)]})
}

fn messages_of(gateway: &Gateway, at: usize) -> Vec<spotter_core::chat::Message> {
    match &gateway.engine.requests()[at].prompt {
        Prompt::Chat { messages, .. } => messages.clone(),
        other => panic!("a chat was expected, not {other:?}"),
    }
}

#[tokio::test]
async fn d01_unknown_keys_and_headers_never_refuse_a_request() {
    let gateway = Gateway::start().await;
    let mut body = recorded("openclaw-first-turn").body;
    assert!(body.to_string().len() > 55_000, "a body of the real size");
    body["gateway_hint"] = json!({"x": [1, 2]});
    body["store"] = json!(true);
    body["service_tier"] = json!("auto");
    body["prediction"] = json!(null);
    let events = gateway.stream("/v1/chat/completions", body).await;
    assert_eq!(chat_stream(&events).content, "Hello from the script.");
}

#[tokio::test]
async fn d02_a_stream_ends_with_reason_then_usage_then_done() {
    let gateway = Gateway::start().await;
    for (reply, reason) in [
        (Reply::text("x"), "stop"),
        (Reply::call("f", "{}"), "tool_calls"),
        (
            Reply {
                cut: true,
                ..Reply::text("x")
            },
            "length",
        ),
    ] {
        gateway.engine.push(reply.clone());
        gateway.engine.push(reply);
        let mut body = ask("hi");
        body["stream"] = json!(true);
        let plain = chat_stream(&gateway.stream("/v1/chat/completions", body.clone()).await);
        assert_eq!(plain.finish_reason, reason);
        assert!(plain.usage.is_none(), "nobody asked for the usage");
        body["stream_options"] = json!({"include_usage": true});
        let asked = chat_stream(&gateway.stream("/v1/chat/completions", body).await);
        let usage = asked.usage.expect("usage");
        assert!(usage["prompt_tokens"].as_u64() > Some(0));
        assert_eq!(
            usage["total_tokens"].as_u64(),
            Some(
                usage["prompt_tokens"].as_u64().expect("n")
                    + usage["completion_tokens"].as_u64().expect("n")
            )
        );
    }
}

#[tokio::test]
async fn d03_tool_calls_are_structured_and_leave_no_text() {
    let gateway = Gateway::start().await;
    gateway.engine.push(Reply {
        tool_calls: vec![
            ("exec".into(), r#"{"command":"date"}"#.into()),
            ("read".into(), r#"{"path":"notes/x"}"#.into()),
        ],
        ..Reply::default()
    });
    let mut body = recorded("openclaw-first-turn").body;
    body["stream"] = json!(true);
    let stream = chat_stream(&gateway.stream("/v1/chat/completions", body).await);
    assert_eq!(stream.content, "");
    assert_eq!(stream.finish_reason, "tool_calls");
    assert_eq!(stream.tool_calls.len(), 2);
    for (id, _, arguments) in &stream.tool_calls {
        serde_json::from_str::<Value>(arguments).expect("the fragments join to JSON");
        assert!(!id.is_empty());
    }
}

#[tokio::test]
async fn d04_the_turn_does_not_hang_on_the_last_role() {
    let gateway = Gateway::start().await;
    for name in ["openclaw-call-3", "openclaw-many-tool-rounds"] {
        let request = recorded(name);
        let last = request.body["messages"]
            .as_array()
            .expect("messages")
            .last()
            .expect("one");
        assert_eq!(last["role"], "user", "the fixture's transient message");
        assert_eq!(
            request.send(&gateway, Some(false)).await.status().as_u16(),
            200
        );
        let step = gateway.pool.all_steps().pop().expect("a step");
        assert_eq!(step.user_text, "Please run a command", "{name}");
        assert_eq!(step.kind, StepKind::Main);
        assert!(
            step.kind_reason.contains("after a tool"),
            "{}",
            step.kind_reason
        );
    }
    // String, parts and null are content in every role.
    let body = json!({"model": "m", "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null},
        {"role": "tool", "content": [{"type": "text", "text": "t"}], "tool_call_id": "x_1"},
        {"role": "user", "content": "c"},
        {"role": "user"},
    ]});
    gateway.post("/v1/chat/completions", body).await;
    let seen = messages_of(&gateway, 2);
    let texts: Vec<_> = seen.iter().map(|m| m.content.as_str()).collect();
    assert_eq!(texts, ["s", "a\nb", "", "t", "c", ""]);
}

#[tokio::test]
async fn d05_long_prompts_and_both_limit_names_are_taken() {
    let gateway = Gateway::start().await;
    for (key, limit) in [("max_tokens", 427), ("max_completion_tokens", 8192)] {
        let mut body = ask(&"word ".repeat(30_000));
        body[key] = json!(limit);
        gateway.post("/v1/chat/completions", body).await;
        let request = gateway.engine.requests().pop().expect("a request");
        assert_eq!(request.sampling.max_tokens, Some(limit));
    }
}

#[tokio::test]
async fn d06_signs_of_life_are_data_while_the_prompt_is_read() {
    let gateway = Gateway::start().await;
    gateway.engine.push(Reply {
        prefill: Duration::from_millis(11_500),
        ..Reply::text("late")
    });
    let mut body = ask("hi");
    body["stream"] = json!(true);
    let response = gateway
        .request("POST", "/v1/chat/completions")
        .json(&body)
        .send()
        .await
        .expect("an answer");
    let mut stream = response.bytes_stream();
    let mut last = tokio::time::Instant::now();
    let mut text = String::new();
    while let Some(bytes) = stream.next().await {
        let bytes = bytes.expect("bytes");
        assert!(
            last.elapsed() < Duration::from_secs(8),
            "a silence of {:?}",
            last.elapsed()
        );
        last = tokio::time::Instant::now();
        text.push_str(std::str::from_utf8(&bytes).expect("UTF-8"));
    }
    let stream = chat_stream(&events(&text));
    assert_eq!(stream.content, "late");
    assert!(
        stream.empty_chunks_before_text >= 3,
        "{}",
        stream.empty_chunks_before_text
    );
}

#[tokio::test]
async fn d06_headers_do_not_wait_for_a_full_queue() {
    let gateway = Gateway::start().await;
    gateway.engine.push(Reply {
        queue: Duration::from_secs(6),
        ..Reply::text("late")
    });
    let mut body = ask("hi");
    body["stream"] = json!(true);
    let begun = tokio::time::Instant::now();
    let response = gateway
        .request("POST", "/v1/chat/completions")
        .json(&body)
        .send()
        .await
        .expect("headers");
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!(response.headers()["x-spotter-adapter"], "base");
    let stream = chat_stream(&events(&response.text().await.expect("a body")));
    assert_eq!(stream.content, "late");
}

#[tokio::test]
async fn d07_overflow_has_openais_wording() {
    let gateway = Gateway::start().await;
    gateway
        .engine
        .push(Reply::failure(Code::ContextLengthExceeded, "too long"));
    let (status, body) = gateway
        .send("POST", "/v1/chat/completions", Some(ask("hi")))
        .await;
    assert_eq!(status, 400);
    assert_eq!(body["error"]["code"], "context_length_exceeded");
    let message = body["error"]["message"].as_str().expect("a message");
    let shape = regex::Regex::new(
        r"^This model's maximum context length is 65536 tokens\. However, your messages resulted in \d+ tokens\.$",
    )
    .expect("a pattern");
    assert!(shape.is_match(message), "{message}");
}

#[tokio::test]
async fn d07_what_cannot_fit_is_refused_without_being_counted() {
    let gateway = Gateway::start().await;
    let long = ask(&"x ".repeat(6 * 1024 * 1024));
    let (status, body) = gateway
        .send("POST", "/v1/chat/completions", Some(long))
        .await;
    assert_eq!(status, 400);
    assert_eq!(body["error"]["code"], "context_length_exceeded");
    let message = body["error"]["message"].as_str().expect("a message");
    assert!(message.starts_with("This model's maximum context length is 65536 tokens."));
    assert!(
        gateway.engine.requests().is_empty(),
        "the engine never saw it"
    );
}

#[tokio::test]
async fn d08_status_codes_mean_what_clients_take_them_for() {
    let gateway = Gateway::start().await;
    let plain = reqwest::Client::new();
    let url = format!("{}/v1/chat/completions", gateway.url);
    let wrong = plain
        .post(&url)
        .bearer_auth("wrong")
        .json(&ask("hi"))
        .send()
        .await
        .expect("an answer");
    assert_eq!(wrong.status().as_u16(), 401);
    let body: Value = wrong.json().await.expect("JSON");
    assert_eq!(body["error"]["code"], "unauthorized");
    let by_key = plain
        .post(&url)
        .header("x-api-key", TOKEN)
        .json(&ask("hi"))
        .send()
        .await
        .expect("an answer");
    assert_eq!(by_key.status().as_u16(), 200);

    for (code, expected) in [(Code::Busy, 429), (Code::Unavailable, 503)] {
        gateway.engine.push(Reply::failure(code, "later"));
        let response = gateway
            .request("POST", "/v1/chat/completions")
            .json(&ask("hi"))
            .send()
            .await
            .expect("an answer");
        assert_eq!(response.status().as_u16(), expected);
        assert!(response.headers().contains_key("retry-after"));
    }
    let (status, body) = gateway
        .send(
            "POST",
            "/v1/chat/completions",
            Some(json!({"model": "spotter:v9", "messages": [user("hi")]})),
        )
        .await;
    assert_eq!(
        (status, body["error"]["code"].as_str()),
        (404, Some("model_not_found"))
    );
}

#[tokio::test]
async fn d09_a_disconnect_cancels_and_records_nothing() {
    let gateway = Gateway::start().await;
    for reply in [
        Reply {
            prefill: Duration::from_secs(30),
            ..Reply::text("never")
        },
        Reply {
            per_token: Duration::from_secs(30),
            ..Reply::text("never at all")
        },
    ] {
        let before = gateway.engine.cancelled();
        gateway.engine.push(reply);
        let mut body = ask("hi");
        body["stream"] = json!(true);
        let response = gateway
            .request("POST", "/v1/chat/completions")
            .json(&body)
            .send()
            .await
            .expect("headers");
        let mut stream = response.bytes_stream();
        stream
            .next()
            .await
            .expect("the first chunk")
            .expect("bytes");
        drop(stream);
        tokio::time::timeout(Duration::from_secs(10), async {
            while gateway.engine.cancelled() == before {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
        .expect("the generation is cancelled");
    }
    assert!(gateway.pool.all_steps().is_empty());
}

#[tokio::test]
async fn d10_tool_call_ids_survive_rewriting() {
    let gateway = Gateway::start().await;
    gateway.engine.push(Reply::call("exec", "{}"));
    let mut body = recorded("openclaw-first-turn").body;
    body["stream"] = json!(false);
    let answer = gateway.post("/v1/chat/completions", body).await;
    let id = answer["choices"][0]["message"]["tool_calls"][0]["id"]
        .as_str()
        .expect("an id")
        .to_owned();
    assert!(
        id.len() <= 40 && id.chars().all(|c| c.is_ascii_alphanumeric()),
        "{id}"
    );
    // Ids that a client invented are compared without their other characters.
    let ollama = recorded("openclaw-ollama-tool-result");
    assert_eq!(ollama.send(&gateway, None).await.status().as_u16(), 200);
    let messages = messages_of(&gateway, 1);
    let call = messages
        .iter()
        .find(|m| !m.tool_calls.is_empty())
        .expect("a call");
    let result = messages
        .iter()
        .find(|m| m.role == Role::Tool)
        .expect("a result");
    assert_eq!(Some(&call.tool_calls[0].id), result.tool_call_id.as_ref());
}

#[tokio::test]
async fn d11_arguments_are_compact_in_and_out() {
    let gateway = Gateway::start().await;
    gateway
        .engine
        .push(Reply::call("f", r#"{"a": 1, "b": [1, 2]}"#));
    let answer = gateway.post("/v1/chat/completions", ask("hi")).await;
    let arguments = &answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
    assert_eq!(arguments, r#"{"a":1,"b":[1,2]}"#);
    recorded("crewai-tool-result").send(&gateway, None).await;
    let messages = messages_of(&gateway, 1);
    let call = messages
        .iter()
        .find(|m| !m.tool_calls.is_empty())
        .expect("a call");
    assert_eq!(call.tool_calls[0].arguments, r#"{"city":"Zurich"}"#);
}

#[tokio::test]
async fn d12_history_keeps_the_ids_that_were_sampled() {
    let gateway = Gateway::start().await;
    gateway.engine.push(Reply::text("Answer one."));
    gateway
        .engine
        .push(Reply::call("exec", r#"{"command": "date"}"#));
    let mut body = json!({"model": "m", "prompt_cache_key": "s:0", "messages": [user("one")]});
    let first = gateway.post("/v1/chat/completions", body.clone()).await;
    assert!(first["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0));
    body["messages"] =
        json!([user("one"), {"role": "assistant", "content": "Answer one. "}, user("two")]);
    gateway.post("/v1/chat/completions", body.clone()).await;
    body["messages"] = json!([user("one"), {"role": "assistant", "content": "Answer one."}, user("two"),
        {"role": "assistant", "content": null, "tool_calls": [{"id": "rewritten", "type": "function",
            "function": {"name": "exec", "arguments": "{ \"command\" : \"date\" }"}}]},
        {"role": "tool", "tool_call_id": "rewritten", "content": "now"}]);
    gateway.post("/v1/chat/completions", body.clone()).await;
    let steps = gateway.pool.all_steps();
    let messages = messages_of(&gateway, 2);
    assert_eq!(messages[1].token_ids.as_ref(), Some(&steps[0].response_ids));
    assert_eq!(messages[3].token_ids.as_ref(), Some(&steps[1].response_ids));
    // Another conversation's answers are not mixed in.
    body["prompt_cache_key"] = json!("other:0");
    gateway.post("/v1/chat/completions", body).await;
    assert!(
        messages_of(&gateway, 3)
            .iter()
            .all(|m| m.token_ids.is_none())
    );
}

#[tokio::test]
async fn d13_system_messages_end_up_as_one_at_the_front() {
    let gateway = Gateway::start().await;
    for name in [
        "openclaw-compat-developer-role",
        "claude-code-first",
        "claude-code-b",
    ] {
        assert_eq!(
            recorded(name).send(&gateway, None).await.status().as_u16(),
            200
        );
        let messages = messages_of(&gateway, gateway.engine.requests().len() - 1);
        let systems = messages.iter().filter(|m| m.role == Role::System).count();
        assert_eq!((messages[0].role, systems), (Role::System, 1), "{name}");
        assert!(
            !messages[0].content.contains("x-anthropic-billing-header"),
            "{name}"
        );
    }
    // The environment block is a list in one call and a string in the next.
    let first = messages_of(&gateway, 1);
    let second = messages_of(&gateway, 2);
    assert!(
        second[0].content.contains("# Instruction") && first[0].content.contains("# Instruction")
    );
}

#[tokio::test]
async fn d14_reasoning_is_apart_and_an_empty_answer_is_asked_again() {
    let gateway = Gateway::start().await;
    let thinking = Reply {
        reasoning: "hmm".into(),
        ..Reply::text("Visible.")
    };
    gateway.engine.push(thinking.clone());
    gateway.engine.push(thinking);
    let mut body = ask("hi");
    let whole = gateway.post("/v1/chat/completions", body.clone()).await;
    assert_eq!(whole["choices"][0]["message"]["content"], "Visible.");
    assert_eq!(whole["choices"][0]["message"]["reasoning_content"], "hmm");
    body["stream"] = json!(true);
    let stream = chat_stream(&gateway.stream("/v1/chat/completions", body.clone()).await);
    assert_eq!(
        (stream.content.as_str(), stream.reasoning.as_str()),
        ("Visible.", "hmm")
    );

    let before = gateway.engine.requests().len();
    gateway.engine.push(Reply {
        reasoning: "only thoughts".into(),
        ..Reply::default()
    });
    gateway.engine.push(Reply::text("Now."));
    let stream = chat_stream(&gateway.stream("/v1/chat/completions", body).await);
    assert_eq!(stream.content, "Now.");
    assert_eq!(gateway.engine.requests().len(), before + 2);
    assert_eq!(
        gateway.pool.all_steps().len(),
        3,
        "the empty answer is not kept"
    );
}

#[tokio::test]
async fn d15_sessions_and_turns_are_told_apart() {
    let gateway = Gateway::start().await;
    for name in [
        "openclaw-first-turn",
        "openclaw-call-2",
        "openclaw-call-3",
        "openclaw-compat-developer-role",
    ] {
        recorded(name).send(&gateway, Some(false)).await;
    }
    let steps = gateway.pool.all_steps();
    assert_eq!(
        steps[0].session, steps[1].session,
        "one Runtime line, one session"
    );
    assert_eq!(steps[1].session, steps[2].session);
    assert_ne!(steps[2].session, steps[3].session);
    assert_eq!(
        steps[1].turn, "5be9397bac496ffafd61ca17c3d069a3",
        "the trace id"
    );
    assert_eq!(
        (&steps[1].turn, &steps[1].trajectory),
        (&steps[2].turn, &steps[2].trajectory)
    );
    assert_eq!(
        (steps[1].index, steps[2].index),
        (0, 1),
        "a tool round of the same attempt"
    );
    assert_ne!(steps[0].turn, steps[1].turn);
    assert_ne!(steps[0].trajectory, steps[1].trajectory);
    assert_eq!(steps[0].client, "openclaw");

    // Claude Code's header; the second call is the same conversation.
    for name in ["claude-code-first", "claude-code-b", "claude-code-c"] {
        recorded(name).send(&gateway, Some(false)).await;
    }
    let steps = gateway.pool.all_steps();
    assert_eq!(steps[4].client, "claude-code");
    assert_ne!(steps[5].session, steps[6].session);
    // nanobot's affinity, with the tool result as last message.
    for name in ["nanobot-first", "nanobot-tool-result"] {
        recorded(name).send(&gateway, Some(false)).await;
    }
    let steps = gateway.pool.all_steps();
    assert_eq!(steps[7].session, steps[8].session);
    assert_eq!(
        (steps[7].turn.clone(), steps[8].index),
        (steps[8].turn.clone(), 1)
    );
}

#[tokio::test]
async fn d15_a_rewritten_retry_joins_its_turn() {
    let gateway = Gateway::start().await;
    let runtime = "\n\nRuntime: agent=main | session=agent:main:main | sessionId=retry-1 | host=h";
    let first = json!({"model": "m", "messages": [user(&format!("[Tue 2026-12-01 05:14 UTC] Say hello{runtime}"))]});
    let trace = |n: u8| format!("00-{}-f216ca351e8ae722-01", format!("{n:02x}").repeat(16));
    let (_, answer) = gateway.chat(first, &[("traceparent", &trace(1))]).await;
    assert!(answer["id"].is_string());
    let again = json!({"model": "m", "messages": [user(&format!(
        "[Queued user message from a previous active turn; preserved as context only]\n[Tue 2026-12-01 05:14 UTC] Say hello{runtime}\n\nContinue the current task from the existing transcript and finish it."))]});
    gateway.chat(again, &[("traceparent", &trace(2))]).await;
    let steps = gateway.pool.all_steps();
    assert_eq!(steps[0].session, steps[1].session);
    assert_eq!(
        steps[0].turn, steps[1].turn,
        "the retry joins the original turn"
    );
    assert_eq!(steps[1].user_text, "Say hello");
    assert_ne!(
        steps[0].trajectory, steps[1].trajectory,
        "as another attempt"
    );
    // The same words once more, without the wrapper, are a new turn.
    let anew = json!({"model": "m", "messages": [user(&format!("Say hello{runtime}"))]});
    gateway.chat(anew, &[("traceparent", &trace(3))]).await;
    assert_ne!(gateway.pool.all_steps()[2].turn, steps[0].turn);
}

#[tokio::test]
async fn d16_only_genuine_words_are_kept_and_side_calls_are_marked() {
    let gateway = Gateway::start().await;
    recorded("openclaw-first-turn")
        .send(&gateway, None)
        .await
        .text()
        .await
        .expect("the end");
    gateway
        .post(
            "/v1/chat/completions",
            ask("[OpenClaw heartbeat poll] status?"),
        )
        .await;
    gateway
        .post(
            "/v1/chat/completions",
            json!({"model": "m", "messages": [
                {"role": "system", "content": "Generate a concise title for the conversation."}, user("hello")]}),
        )
        .await;
    let steps = gateway.pool.all_steps();
    assert_eq!(
        (steps[0].user_text.as_str(), steps[0].kind),
        ("And write", StepKind::Main)
    );
    for step in &steps[1..] {
        assert_eq!(step.kind, StepKind::Side, "{}", step.kind_reason);
    }
    assert_eq!(steps[2].kind_reason, "title of the conversation");
    // The user can override it.
    let uid = &steps[2].uid;
    let (status, step) = gateway
        .send(
            "PUT",
            &format!("/api/v1/steps/{uid}/kind"),
            Some(json!({"kind": "main"})),
        )
        .await;
    assert_eq!((status, step["kind"].as_str()), (200, Some("main")));
}

#[tokio::test]
async fn d17_feedback_joins_by_completion_id_trace_id_and_session() {
    let gateway = Gateway::start().await;
    let trace = "00-5be9397bac496ffafd61ca17c3d069a3-52476c384e1930bf-01";
    let mut body = ask("hi");
    body["prompt_cache_key"] = json!("session-1:0");
    let (headers, answer) = gateway.chat(body, &[("traceparent", trace)]).await;
    let step = headers["x-spotter-step"].to_str().expect("text").to_owned();
    let id = answer["id"].as_str().expect("an id");
    assert_eq!(id, format!("chatcmpl-{step}"));
    for (key, value) in [
        ("id", id.to_owned()),
        ("response_id", id.to_owned()),
        ("id", step.clone()),
        (
            "trace_id",
            trace.split('-').nth(1).expect("an id").to_owned(),
        ),
        ("session", "session-1".to_owned()),
    ] {
        for rating in ["up", "down"] {
            let answer = gateway
                .post(
                    "/v1/feedback",
                    json!({key: value, "rating": rating, "comment": "why"}),
                )
                .await;
            assert_eq!(
                (answer["step"].as_str(), answer["rating"].as_str()),
                (Some(step.as_str()), Some(rating)),
                "{key}"
            );
            let detail = gateway.get(&format!("/api/v1/steps/{step}")).await;
            assert_eq!(
                (detail["rating"].as_str(), detail["note"].as_str()),
                (Some(rating), Some("why"))
            );
        }
    }
    gateway
        .post("/v1/feedback", json!({"id": id, "rating": null}))
        .await;
    let detail = gateway.get(&format!("/api/v1/steps/{step}")).await;
    assert!(detail["rating"].is_null(), "withdrawn");
    assert_eq!(
        detail["rewards"].as_array().map(Vec::len),
        Some(11),
        "nothing is overwritten"
    );
    for (body, expected) in [
        (json!({"id": "chatcmpl-unknown", "rating": "up"}), 404),
        (json!({"trace_id": "0".repeat(32), "rating": "up"}), 404),
        (json!({"id": id, "rating": "great"}), 400),
        (json!({"rating": "up"}), 400),
        (json!({"id": id}), 400),
    ] {
        let (status, answer) = gateway.send("POST", "/v1/feedback", Some(body)).await;
        assert_eq!(status, expected, "{answer}");
    }
}

#[tokio::test]
async fn d17_feedback_typed_into_the_chat_rates_the_answer_before() {
    let gateway = Gateway::start().await;
    let mut history = vec![user("What is the capital of Switzerland?")];
    let answer = gateway
        .post(
            "/v1/chat/completions",
            json!({"model": "m", "messages": history}),
        )
        .await;
    let rated = answer["id"]
        .as_str()
        .expect("an id")
        .trim_start_matches("chatcmpl-")
        .to_owned();
    let text = answer["choices"][0]["message"]["content"].clone();
    history.push(json!({"role": "assistant", "content": text}));
    history.push(user("/bad the answer should be Bern."));
    let asked = gateway.engine.requests().len();
    let reply = gateway
        .post(
            "/v1/chat/completions",
            json!({"model": "m", "messages": history}),
        )
        .await;
    assert_eq!(gateway.engine.requests().len(), asked, "no model is asked");
    let acknowledgement = reply["choices"][0]["message"]["content"].clone();
    assert!(
        !acknowledgement.as_str().expect("text").contains('\n'),
        "one line"
    );
    let detail = gateway.get(&format!("/api/v1/steps/{rated}")).await;
    assert_eq!(detail["rating"], "down");
    assert_eq!(detail["correction"], "Bern.");
    let steps = gateway.pool.all_steps();
    assert_eq!(steps[1].kind, StepKind::Side);
    assert_eq!(steps[0].session, steps[1].session);

    // The exchange is no part of the conversation afterwards.
    history.push(json!({"role": "assistant", "content": acknowledgement}));
    history.push(user("And of France?"));
    gateway
        .post(
            "/v1/chat/completions",
            json!({"model": "m", "messages": history}),
        )
        .await;
    let texts: Vec<_> = messages_of(&gateway, asked)
        .into_iter()
        .map(|m| m.content)
        .collect();
    assert_eq!(texts.len(), 3, "{texts:?}");
    assert_eq!(texts[2], "And of France?");

    // A thumb with nothing before it is an ordinary message.
    gateway.post("/v1/chat/completions", ask("👍")).await;
    assert_eq!(gateway.engine.requests().len(), asked + 2);
}

#[tokio::test]
async fn d17_a_reaction_reported_by_a_channel_counts_once() {
    let gateway = Gateway::start().await;
    let mut history = vec![user("hi")];
    let body =
        |history: &[Value]| json!({"model": "m", "prompt_cache_key": "r:0", "messages": history});
    let answer = gateway.post("/v1/chat/completions", body(&history)).await;
    let rated = answer["id"]
        .as_str()
        .expect("an id")
        .trim_start_matches("chatcmpl-")
        .to_owned();
    history.push(json!({"role": "assistant", "content": "Hello from the script."}));
    history.push(user(
        "Telegram reaction added: 👍 by Alice (@alice) on msg 42\nWhat time is it?",
    ));
    gateway.engine.push(Reply::call("exec", "{}"));
    gateway.post("/v1/chat/completions", body(&history)).await;
    history.push(json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "exec", "arguments": "{}"}}]}));
    history.push(json!({"role": "tool", "tool_call_id": "c", "content": "noon"}));
    gateway.post("/v1/chat/completions", body(&history)).await;
    let detail = gateway.get(&format!("/api/v1/steps/{rated}")).await;
    assert_eq!(detail["rating"], "up");
    assert_eq!(detail["rewards"].as_array().map(Vec::len), Some(1));
    assert_eq!(gateway.pool.all_steps()[1].user_text, "What time is it?");
}

#[tokio::test]
async fn d18_anthropic_messages_have_their_event_order() {
    let gateway = Gateway::start().await;
    gateway.engine.push(Reply {
        reasoning: "hmm".into(),
        content: "I will look.".into(),
        tool_calls: vec![("Bash".into(), r#"{"command":"date"}"#.into())],
        ..Reply::default()
    });
    let mut request = recorded("claude-code-first");
    assert!(request.path.ends_with("?beta=true"));
    request.body["thinking"] = json!({"type": "enabled", "budget_tokens": 1000});
    let text = request
        .send(&gateway, Some(true))
        .await
        .text()
        .await
        .expect("a body");
    let events = events(&text);
    let mut order: Vec<String> = events.iter().filter_map(|e| e.name.clone()).collect();
    order.dedup();
    assert_eq!(
        order,
        [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    let starts: Vec<Value> = events
        .iter()
        .filter(|e| e.name.as_deref() == Some("content_block_start"))
        .map(common::SseEvent::json)
        .collect();
    let kinds: Vec<_> = starts
        .iter()
        .map(|s| s["content_block"]["type"].as_str().expect("a type"))
        .collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use"]);
    let indexes: Vec<_> = starts.iter().map(|s| s["index"].as_u64()).collect();
    assert_eq!(indexes, [Some(0), Some(1), Some(2)]);
    let json: String = events
        .iter()
        .filter_map(|e| {
            e.json()["delta"]["partial_json"]
                .as_str()
                .map(str::to_owned)
        })
        .collect();
    assert_eq!(json, r#"{"command":"date"}"#);
    assert_eq!(
        gateway.engine.requests()[0].sampling.max_tokens,
        Some(128_000),
        "clamped by the engine, not refused"
    );

    let hello = gateway
        .request("HEAD", "/api/hello")
        .send()
        .await
        .expect("an answer");
    assert_eq!(hello.status().as_u16(), 200);
    let count = gateway
        .post(
            "/v1/messages/count_tokens",
            json!({"model": "c", "messages": [user("hi")]}),
        )
        .await;
    assert!(count["input_tokens"].as_u64() > Some(0));
    let plain = reqwest::Client::new().post(format!("{}/v1/messages", gateway.url));
    let refused = plain
        .json(&json!({"messages": []}))
        .send()
        .await
        .expect("an answer");
    assert_eq!(refused.status().as_u16(), 401);
    let body: Value = refused.json().await.expect("JSON");
    assert_eq!(
        (body["type"].as_str(), body["error"]["type"].as_str()),
        (Some("error"), Some("authentication_error"))
    );
}

#[tokio::test]
async fn d19_model_names_are_listed_and_echoed() {
    let gateway = Gateway::start().await;
    gateway
        .engine
        .live
        .store(2, std::sync::atomic::Ordering::SeqCst);
    let list = gateway.get("/v1/models").await;
    let names: Vec<_> = list["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|m| m["id"].as_str().expect("an id").to_owned())
        .collect();
    assert_eq!(
        names,
        ["spotter", "spotter:base", "spotter:v1", "spotter:v2"]
    );
    assert_eq!(list["data"][0]["context_length"], 65_536);
    assert_eq!(
        gateway.get("/v1/models/spotter:v1").await["id"],
        "spotter:v1"
    );
    for (name, adapter) in [
        ("gpt-5", "v2"),
        ("gw/org/mock-model", "v2"),
        ("spotter:v1", "v1"),
        ("spotter:base", "base"),
    ] {
        let (headers, answer) = gateway
            .chat(json!({"model": name, "messages": [user("hi")]}), &[])
            .await;
        assert_eq!(answer["model"], name);
        assert_eq!(headers["x-spotter-adapter"], adapter, "{name}");
    }
}

#[tokio::test]
async fn d20_odd_tool_schemas_are_passed_on() {
    let gateway = Gateway::start().await;
    let parameters = json!({"type": "object", "additionalProperties": true, "$defs": {"x": {"type": "string"}},
        "properties": {"a": {"type": "string", "pattern": "\\S+", "maxLength": 65536},
                       "b": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}}});
    for strict in [json!(true), json!(false), Value::Null] {
        let mut body = ask("hi");
        body["tools"] = json!([{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]);
        gateway.post("/v1/chat/completions", body).await;
    }
    match &gateway.engine.requests()[0].prompt {
        Prompt::Chat { tools, .. } => assert_eq!(tools[0].parameters, parameters),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn d21_structured_output_and_choices() {
    let gateway = Gateway::start().await;
    recorded("openai-python-json-schema")
        .send(&gateway, None)
        .await;
    assert!(matches!(
        &gateway.engine.requests()[0].response_format,
        ResponseFormat::JsonSchema(schema) if schema["required"] == json!(["name", "age"])
    ));
    let mut body = ask("hi");
    body["response_format"] = json!({"type": "json_object"});
    body["n"] = json!(3);
    body["seed"] = json!(5);
    body["logprobs"] = json!(true);
    let answer = gateway.post("/v1/chat/completions", body).await;
    let choices = answer["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 3);
    assert_eq!(choices[2]["index"], 2);
    assert!(
        !choices[0]["logprobs"]["content"]
            .as_array()
            .expect("a list")
            .is_empty()
    );
    let requests = gateway.engine.requests();
    assert_eq!(requests[1].response_format, ResponseFormat::JsonObject);
    let mut seeds: Vec<_> = requests[1..]
        .iter()
        .map(|r| r.sampling.seed.expect("a seed"))
        .collect();
    seeds.sort_unstable();
    assert_eq!(seeds, [5, 6, 7], "each choice has its own seed");
    let steps = gateway.pool.all_steps();
    assert_eq!(
        steps[1].prompt_uid, steps[2].prompt_uid,
        "choices of one prompt are one group"
    );
    assert_ne!(steps[1].trajectory, steps[2].trajectory);
}

#[tokio::test]
async fn d22_responses_have_their_event_sequence() {
    let gateway = Gateway::start().await;
    gateway.engine.push(Reply {
        content: "Looking.".into(),
        tool_calls: vec![("exec".into(), r#"{"command":"date"}"#.into())],
        ..Reply::default()
    });
    let text = recorded("openclaw-responses-first")
        .send(&gateway, Some(true))
        .await
        .text()
        .await
        .expect("a body");
    let events = events(&text);
    let mut order: Vec<_> = events
        .iter()
        .map(|e| e.name.clone().expect("a name"))
        .collect();
    for (at, event) in events.iter().enumerate() {
        let body = event.json();
        assert_eq!(body["type"].as_str(), event.name.as_deref());
        assert_eq!(body["sequence_number"].as_u64(), Some(at as u64));
    }
    order.dedup();
    assert_eq!(
        order,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let done = events
        .iter()
        .find(|e| e.name.as_deref() == Some("response.function_call_arguments.done"))
        .expect("done")
        .json();
    assert_eq!(done["arguments"], r#"{"command":"date"}"#);
    let last = events.last().expect("events").json();
    assert_eq!(last["response"]["output"][1]["type"], "function_call");
    assert!(last["response"]["usage"]["input_tokens"].as_u64() > Some(0));

    // A conversation is continued by id.
    let first = gateway
        .post("/v1/responses", json!({"model": "m", "input": "one"}))
        .await;
    gateway
        .post(
            "/v1/responses",
            json!({"model": "m", "input": "two", "previous_response_id": first["id"]}),
        )
        .await;
    let texts: Vec<_> = messages_of(&gateway, 2)
        .into_iter()
        .map(|m| m.content)
        .collect();
    assert_eq!(texts, ["one", "Hello from the script.", "two"]);
}

#[tokio::test]
async fn d23_embeddings_are_refused_in_words() {
    let gateway = Gateway::start().await;
    let response = recorded("openai-python-embeddings")
        .send(&gateway, None)
        .await;
    assert_eq!(response.status().as_u16(), 501);
    let body: Value = response.json().await.expect("JSON");
    assert!(
        body["error"]["message"]
            .as_str()
            .expect("words")
            .contains("no embeddings")
    );
}

#[tokio::test]
async fn d24_a_responses_body_on_the_chat_route_gets_chat_chunks() {
    let gateway = Gateway::start().await;
    let body = json!({"model": "m", "stream": true, "input": [user("hi")],
        "tools": [{"type": "function", "name": "a", "parameters": {"type": "object"}},
                  {"name": "b", "input_schema": {"type": "object"}}]});
    let stream = chat_stream(&gateway.stream("/v1/chat/completions", body).await);
    assert_eq!(stream.content, "Hello from the script.");
    match &gateway.engine.requests()[0].prompt {
        Prompt::Chat { tools, .. } => assert_eq!(tools.len(), 2),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn d25_ollama_chats_in_lines() {
    let gateway = Gateway::start().await;
    let text = gateway
        .request("POST", "/api/chat")
        .json(&json!({"model": "spotter", "messages": [user("hi")], "options": {"num_predict": 9, "temperature": 0}}))
        .send()
        .await
        .expect("an answer")
        .text()
        .await
        .expect("a body");
    let lines: Vec<Value> = text
        .lines()
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect();
    let content: String = lines
        .iter()
        .filter_map(|l| l["message"]["content"].as_str())
        .collect();
    assert_eq!(content, "Hello from the script.");
    assert!(lines.last().expect("a line")["prompt_eval_count"].as_u64() > Some(0));
    let sampling = &gateway.engine.requests()[0].sampling;
    assert_eq!((sampling.max_tokens, sampling.temperature), (Some(9), 0.0));
    assert_eq!(
        gateway.get("/api/tags").await["models"][0]["name"],
        "spotter:latest"
    );
    let shown = gateway.post("/api/show", json!({"model": "spotter"})).await;
    assert_eq!(shown["model_info"]["none.context_length"], 65_536);
}

#[tokio::test]
async fn d26_an_error_after_the_first_byte_is_in_the_stream() {
    let gateway = Gateway::start().await;
    let broken = Reply {
        failure_after: Some(Failure::new(Code::Internal, "secret detail /home/x")),
        ..Reply::text("half an")
    };
    for _ in 0..3 {
        gateway.engine.push(broken.clone());
    }
    let mut body = ask("hi");
    body["stream"] = json!(true);
    let chat = gateway.stream("/v1/chat/completions", body.clone()).await;
    let last = chat.last().expect("an event").json();
    assert_eq!(last["error"]["type"], "server_error");
    assert!(!last.to_string().contains("secret"), "no internal detail");
    let messages = gateway.stream("/v1/messages", body).await;
    assert_eq!(
        messages.last().expect("an event").name.as_deref(),
        Some("error")
    );
    let responses = gateway
        .stream(
            "/v1/responses",
            json!({"model": "m", "input": "hi", "stream": true}),
        )
        .await;
    assert_eq!(
        responses.last().expect("an event").name.as_deref(),
        Some("response.failed")
    );
    assert!(
        gateway.pool.all_steps().is_empty(),
        "nothing is recorded as complete"
    );
}

#[tokio::test]
async fn d27_large_and_chunked_bodies_are_taken() {
    let gateway = Gateway::start().await;
    let url = format!("data:image/png;base64,{}", "A".repeat(9 * 1024 * 1024));
    let image = json!([{"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": url}}]);
    gateway
        .post(
            "/v1/chat/completions",
            json!({"model": "spotter", "messages": [{"role": "user", "content": image}]}),
        )
        .await;
    let parts = serde_json::to_vec(&ask("in pieces")).expect("JSON");
    let pieces: Vec<Result<Vec<u8>, std::io::Error>> =
        parts.chunks(7).map(|c| Ok(c.to_vec())).collect();
    let response = gateway
        .request("POST", "/v1/chat/completions")
        .body(reqwest::Body::wrap_stream(futures::stream::iter(pieces)))
        .send()
        .await
        .expect("an answer");
    assert_eq!(response.status().as_u16(), 200);
    let (status, body) = gateway
        .send(
            "POST",
            "/v1/chat/completions",
            Some(ask(&"x".repeat(33 * 1024 * 1024))),
        )
        .await;
    assert_eq!(status, 413);
    assert!(
        body["error"]["message"]
            .as_str()
            .expect("words")
            .contains("32 MB")
    );
}

#[tokio::test]
async fn refusals_have_the_dialects_form_and_say_what_is_wrong() {
    let gateway = Gateway::start().await;
    // A wrong method.
    let (status, body) = gateway
        .send("GET", "/v1/chat/completions", Some(json!({})))
        .await;
    assert_eq!(status, 405);
    assert!(
        body["error"]["message"]
            .as_str()
            .is_some_and(|m| m.contains("GET")),
        "{body}"
    );
    let (status, body) = gateway
        .send("DELETE", "/v1/messages", Some(json!({})))
        .await;
    assert_eq!(
        (status, body["type"].as_str()),
        (405, Some("error")),
        "{body}"
    );
    // A query that cannot be read.
    let (status, body) = gateway
        .send("GET", "/api/v1/steps?limit=-1", Some(json!({})))
        .await;
    assert_eq!(
        (status, body["error"]["code"].as_str()),
        (400, Some("invalid_request")),
        "{body}"
    );
    // Roles that nobody knows, and a limit that means nothing.
    let wizard = json!({"model": "spotter", "messages": [{"role": "wizard", "content": "x"}]});
    let (status, body) = gateway
        .send("POST", "/v1/chat/completions", Some(wizard))
        .await;
    assert_eq!(status, 400);
    assert!(
        body["error"]["message"]
            .as_str()
            .is_some_and(|m| m.contains("role")),
        "{body}"
    );
    let mut negative = ask("hi");
    negative["max_tokens"] = json!(-5);
    let (status, _) = gateway
        .send("POST", "/v1/chat/completions", Some(negative))
        .await;
    assert_eq!(status, 400);
    let (status, _) = gateway
        .send(
            "POST",
            "/v1/messages/count_tokens",
            Some(json!({"messages": []})),
        )
        .await;
    assert_eq!(status, 400);
    // The template's own variables cannot be replaced from outside.
    let mut variables = ask("hi");
    variables["chat_template_kwargs"] = json!({"messages": "x", "enable_thinking": true});
    let (status, _) = gateway
        .send("POST", "/v1/chat/completions", Some(variables))
        .await;
    assert_eq!(status, 200);
    let last = gateway.engine.requests().pop().expect("a request");
    let spotter_core::generate::Prompt::Chat {
        template_variables, ..
    } = last.prompt
    else {
        panic!("a chat was expected");
    };
    assert_eq!(
        Value::Object(template_variables),
        json!({"enable_thinking": true})
    );
}

#[tokio::test]
async fn an_explanation_over_several_lines_stays_inside() {
    let gateway = Gateway::start().await;
    gateway.engine.push(Reply::failure(
        Code::InvalidRequest,
        "the chat template cannot be rendered: x is undefined\n----\n  1 | {{ x }}",
    ));
    let (status, body) = gateway
        .send("POST", "/v1/chat/completions", Some(ask("hi")))
        .await;
    assert_eq!(status, 400);
    assert_eq!(
        body["error"]["message"],
        "the chat template cannot be rendered: x is undefined"
    );
}
