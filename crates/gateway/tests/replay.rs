//! Every recorded request of a real client is answered, streamed and not.

mod common;

use common::{Gateway, all_recorded, chat_stream, events};
use serde_json::Value;
use spotter_gateway::engine::scripted::{Reply, ScriptedEngine};

#[tokio::test]
async fn all_recorded_requests_are_answered_in_both_ways() {
    let recorded = all_recorded();
    assert_eq!(recorded.len(), 31, "fixtures");
    for reply in [
        Reply::text("A plain answer."),
        Reply::call("exec", r#"{"command": "date"}"#),
    ] {
        let calls = reply.content.is_empty();
        let gateway = Gateway::over(ScriptedEngine::new(move |_| reply.clone())).await;
        for request in &recorded {
            for stream in [true, false] {
                let what = format!("{} stream={stream} calls={calls}", request.name);
                let response = request.send(&gateway, Some(stream)).await;
                let status = response.status().as_u16();
                let headers = response.headers().clone();
                let text = response.text().await.expect("a body");
                let path = request.path.split('?').next().expect("a path");
                if path == "/v1/embeddings" {
                    assert_eq!(status, 501, "{what}");
                    assert!(text.contains("\"error\""), "{what}");
                    continue;
                }
                assert_eq!(status, 200, "{what}: {text}");
                if path.ends_with("count_tokens") {
                    let body: Value = serde_json::from_str(&text).expect("JSON");
                    assert!(body["input_tokens"].as_u64() > Some(0), "{what}");
                    continue;
                }
                for name in [
                    "x-spotter-step",
                    "x-spotter-trajectory",
                    "x-spotter-adapter",
                ] {
                    assert!(headers.contains_key(name), "{what}: {name}");
                }
                let step = headers["x-spotter-step"].to_str().expect("text");
                assert!(
                    text.contains(step) || path == "/api/chat",
                    "{what}: the id is the step's"
                );
                match (path, stream) {
                    ("/v1/chat/completions", true) => {
                        let stream = chat_stream(&events(&text));
                        assert_eq!(stream.model, request.body["model"], "{what}");
                        check(&what, calls, &stream.finish_reason, "stop", "tool_calls");
                        if calls {
                            assert_eq!(stream.tool_calls[0].1, "exec", "{what}");
                            assert_eq!(stream.tool_calls[0].2, r#"{"command": "date"}"#, "{what}");
                        } else {
                            assert_eq!(stream.content, "A plain answer.", "{what}");
                        }
                    }
                    ("/v1/chat/completions", false) => {
                        let body: Value = serde_json::from_str(&text).expect("JSON");
                        let choice = &body["choices"][0];
                        let reason = choice["finish_reason"].as_str().expect("a reason");
                        check(&what, calls, reason, "stop", "tool_calls");
                        if calls {
                            assert!(choice["message"]["content"].is_null(), "{what}");
                        } else {
                            assert!(choice["message"].get("tool_calls").is_none(), "{what}");
                        }
                    }
                    ("/v1/messages", true) => {
                        let events = events(&text);
                        let names: Vec<_> =
                            events.iter().filter_map(|e| e.name.as_deref()).collect();
                        assert_eq!(names.first(), Some(&"message_start"), "{what}");
                        assert_eq!(names.last(), Some(&"message_stop"), "{what}");
                        let delta = events
                            .iter()
                            .find(|e| e.name.as_deref() == Some("message_delta"))
                            .expect("a message_delta")
                            .json();
                        let reason = delta["delta"]["stop_reason"].as_str().expect("a reason");
                        check(&what, calls, reason, "end_turn", "tool_use");
                    }
                    ("/v1/messages", false) => {
                        let body: Value = serde_json::from_str(&text).expect("JSON");
                        let reason = body["stop_reason"].as_str().expect("a reason");
                        check(&what, calls, reason, "end_turn", "tool_use");
                    }
                    ("/v1/responses", true) => {
                        let events = events(&text);
                        assert_eq!(
                            events[0].name.as_deref(),
                            Some("response.created"),
                            "{what}"
                        );
                        let last = events.last().expect("events");
                        assert_eq!(last.name.as_deref(), Some("response.completed"), "{what}");
                        let kind = last.json()["response"]["output"][0]["type"].clone();
                        check(
                            &what,
                            calls,
                            kind.as_str().expect("a type"),
                            "message",
                            "function_call",
                        );
                    }
                    ("/v1/responses", false) => {
                        let body: Value = serde_json::from_str(&text).expect("JSON");
                        assert_eq!(body["status"], "completed", "{what}");
                        let kind = body["output"][0]["type"].as_str().expect("a type");
                        check(&what, calls, kind, "message", "function_call");
                    }
                    ("/api/chat", stream) => {
                        let lines: Vec<Value> = text
                            .lines()
                            .map(|line| serde_json::from_str(line).expect("a JSON line"))
                            .collect();
                        assert_eq!(stream, lines.len() > 1, "{what}");
                        assert_eq!(lines.last().expect("a line")["done"], true, "{what}");
                        let called = lines.iter().any(|l| {
                            l["message"]["tool_calls"][0]["function"]["arguments"].is_object()
                        });
                        assert_eq!(called, calls, "{what}: arguments are an object");
                    }
                    other => panic!("{what}: unexpected {other:?}"),
                }
            }
        }
        // The newest step of each request is stored, with the person's words.
        let steps = gateway.pool.all_steps();
        assert_eq!(steps.len(), (31 - 2) * 2);
        for step in &steps {
            assert!(!step.user_text.contains("Runtime:"), "{}", step.user_text);
            assert!(
                !step.user_text.contains("INTERNAL_CONTEXT"),
                "{}",
                step.user_text
            );
            assert!(
                !step.user_text.contains("<system-reminder>"),
                "{}",
                step.user_text
            );
            assert!(!step.user_text.starts_with("[Tue"), "{}", step.user_text);
            assert!(!step.user_text.is_empty(), "{}", step.client);
        }
    }
}

fn check(what: &str, calls: bool, found: &str, plain: &str, calling: &str) {
    assert_eq!(found, if calls { calling } else { plain }, "{what}");
}
