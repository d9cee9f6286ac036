//! The control API: every path of its contract, its errors, its events and its
//! committed description.

mod common;

use std::time::Duration;

use common::{Gateway, TOKEN};
use futures::StreamExt;
use serde_json::{Value, json};
use spotter_gateway::control::events::EventBody;
use spotter_gateway::engine::scripted::{Reply, ScriptedEngine};
use spotter_gateway::routes::{ROUTES, Surface};

async fn one_step(gateway: &Gateway, text: &str) -> String {
    let (headers, _) = gateway
        .chat(
            json!({"model": "spotter", "messages": [{"role": "user", "content": text}]}),
            &[],
        )
        .await;
    headers["x-spotter-step"].to_str().expect("text").to_owned()
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value
        .as_object()
        .expect("an object")
        .keys()
        .map(String::as_str)
        .collect();
    keys.sort_unstable();
    keys
}

#[tokio::test]
async fn steps_are_listed_searched_and_shown() {
    let gateway = Gateway::start().await;
    let mut uids = Vec::new();
    for text in ["apples", "pears", "plums"] {
        uids.push(one_step(&gateway, text).await);
    }
    let page = gateway.get("/api/v1/steps?limit=2").await;
    assert_eq!(page["items"].as_array().map(Vec::len), Some(2));
    assert_eq!(page["items"][0]["uid"], uids[2].as_str(), "newest first");
    let cursor = page["next_cursor"].as_str().expect("a cursor");
    let rest = gateway
        .get(&format!("/api/v1/steps?limit=2&cursor={cursor}"))
        .await;
    assert_eq!(rest["items"][0]["uid"], uids[0].as_str());
    assert!(rest["next_cursor"].is_null());
    let found = gateway.get("/api/v1/steps?q=PEAR").await;
    assert_eq!(found["items"].as_array().map(Vec::len), Some(1));

    let uid = &uids[1];
    let (status, rated) = gateway
        .send(
            "PUT",
            &format!("/api/v1/steps/{uid}/rating"),
            Some(json!({"rating": "down", "reasons": ["too long"], "note": "n", "correction": "Short."})),
        )
        .await;
    assert_eq!(status, 200);
    assert_eq!(
        (rated["rating"].as_str(), rated["reward"].as_f64()),
        (Some("down"), Some(-1.0))
    );
    let unrated = gateway.get("/api/v1/steps?unrated=true").await;
    assert_eq!(unrated["items"].as_array().map(Vec::len), Some(2));

    let detail = gateway.get(&format!("/api/v1/steps/{uid}")).await;
    for key in [
        "uid",
        "session",
        "trajectory",
        "turn",
        "kind",
        "kind_reason",
        "adapter",
        "client",
        "user_text",
        "answer_text",
        "rating",
        "reasons",
        "note",
        "correction",
        "in_next_lesson",
        "finish_reason",
        "prompt_tokens",
        "response_tokens",
        "created_at",
        "messages",
        "response",
        "sampling",
        "logprobs",
        "model_logprobs",
        "rewards",
        "prompt_ids",
        "response_ids",
    ] {
        assert!(
            detail.get(key).is_some(),
            "{key} is missing: {:?}",
            keys(&detail)
        );
    }
    assert_eq!(
        detail["messages"][0],
        json!({"role": "user", "content": "pears"})
    );
    assert_eq!(detail["response"]["content"], "Hello from the script.");
    assert_eq!(
        detail["logprobs"].as_array().map(Vec::len),
        detail["response_ids"].as_array().map(Vec::len)
    );

    let session = detail["session"].as_str().expect("a session");
    let one = gateway.get(&format!("/api/v1/sessions/{session}")).await;
    assert_eq!(one["steps"][0]["uid"], uid.as_str());
    let sessions = gateway.get("/api/v1/sessions").await;
    assert_eq!(sessions["items"].as_array().map(Vec::len), Some(3));
    assert_eq!(
        keys(&sessions["items"][0]),
        ["client", "last_at", "rated", "steps", "title", "uid"]
    );

    let (status, gone) = gateway
        .send("DELETE", &format!("/api/v1/steps/{uid}"), None)
        .await;
    assert_eq!((status, gone["steps"].as_u64()), (200, Some(1)));
    let (status, error) = gateway
        .send("GET", &format!("/api/v1/steps/{uid}"), None)
        .await;
    assert_eq!(
        (status, error["error"]["code"].as_str()),
        (404, Some("not_found"))
    );
    let (status, gone) = gateway.send("DELETE", "/api/v1/data", None).await;
    assert_eq!((status, gone["steps"].as_u64()), (200, Some(2)));
}

#[tokio::test]
async fn what_the_daemon_decides_is_passed_through() {
    let gateway = Gateway::start().await;
    assert_eq!(gateway.get("/api/v1/status").await["recording"], true);
    let (status, run) = gateway
        .send("POST", "/api/v1/training/runs", Some(json!({})))
        .await;
    assert_eq!((status, run), (202, json!({"id": 1})));
    gateway
        .control
        .refuse_runs
        .store(true, std::sync::atomic::Ordering::SeqCst);
    let (status, refused) = gateway.send("POST", "/api/v1/training/runs", None).await;
    assert_eq!(
        (status, refused["error"]["code"].as_str()),
        (422, Some("not_enough_labels"))
    );
    assert_eq!(
        gateway.get("/api/v1/training/runs").await["items"][0]["state"],
        "promoted"
    );
    assert_eq!(
        gateway.get("/api/v1/training/runs/1").await["version"],
        "v1"
    );
    for path in [
        "/api/v1/training/runs/9",
        "/api/v1/training/runs/x",
        "/api/v1/adapters/v9",
        "/api/v1/adapters/latest",
        "/api/v1/connect/nobody",
    ] {
        let (status, error) = gateway.send("GET", path, None).await;
        assert_eq!(
            (status, error["error"]["code"].as_str()),
            (404, Some("not_found")),
            "{path}"
        );
    }
    let metrics = gateway
        .get("/api/v1/training/runs/1/metrics?points=2")
        .await;
    assert_eq!(
        metrics["series"][0]["points"],
        json!([[0.0, 0.5], [1.0, 0.5]])
    );
    let glossary = gateway.get("/api/v1/training/glossary").await;
    assert_eq!(
        keys(&glossary["items"][0]),
        ["explanation", "name", "normal", "title", "unit"]
    );
    assert_eq!(gateway.get("/api/v1/adapters").await["live"], "base");
    gateway
        .post("/api/v1/adapters/v1/activate", json!({}))
        .await;
    gateway.post("/api/v1/adapters/rollback", json!({})).await;
    let exported = gateway
        .post(
            "/api/v1/adapters/1/export",
            json!({"format": "peft", "out": "exports/x"}),
        )
        .await;
    assert_eq!(exported, json!({"path": "exports/x", "bytes": 7}));
    let (status, _) = gateway
        .send(
            "PUT",
            "/api/v1/adapters/v1/pin",
            Some(json!({"pinned": true})),
        )
        .await;
    assert_eq!(status, 200);
    let (status, settings) = gateway
        .send("PATCH", "/api/v1/settings", Some(json!({"port": 1})))
        .await;
    assert_eq!(
        (status, settings["items"][0]["value"].as_u64()),
        (200, Some(1))
    );
    assert_eq!(gateway.get("/api/v1/token").await["token"], TOKEN);
    assert_eq!(
        gateway.get("/api/v1/doctor").await["checks"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );

    gateway
        .post("/api/v1/recording", json!({"paused": true}))
        .await;
    one_step(&gateway, "not recorded").await;
    assert!(gateway.pool.all_steps().is_empty());
    gateway
        .post("/api/v1/recording", json!({"paused": false}))
        .await;

    let uid = one_step(&gateway, "recorded").await;
    let step = gateway.pool.all_steps().remove(0);
    let (status, _) = gateway
        .send(
            "POST",
            &format!("/api/v1/trajectories/{}/outcome", step.trajectory),
            Some(json!({"reward": 0.5})),
        )
        .await;
    assert_eq!(status, 200);
    for (path, body, expected) in [
        (
            "/api/v1/trajectories/unknown/outcome",
            json!({"reward": 1}),
            404,
        ),
        (
            "/api/v1/trajectories/unknown/outcome",
            json!({"reward": 7}),
            400,
        ),
        ("/api/v1/trajectories/unknown/outcome", json!({}), 400),
    ] {
        let (status, _) = gateway.send("POST", path, Some(body)).await;
        assert_eq!(status, expected);
    }

    let lines = gateway
        .request("GET", "/api/v1/data/export")
        .send()
        .await
        .expect("an answer")
        .text()
        .await
        .expect("a body");
    assert!(lines.contains(&uid));
    let other = Gateway::start().await;
    let imported: Value = other
        .request("POST", "/api/v1/data/import")
        .body(format!("{lines}not json\n"))
        .send()
        .await
        .expect("an answer")
        .json()
        .await
        .expect("JSON");
    assert_eq!(
        (
            imported["imported"].as_u64(),
            imported["errors"][0]["line"].as_u64()
        ),
        (Some(1), Some(2))
    );
}

#[tokio::test]
async fn events_are_numbered_and_resumed() {
    let gateway = Gateway::start().await;
    let read = |last: Option<&'static str>, wanted: usize| {
        let mut request = gateway.request("GET", "/api/v1/events");
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        async move {
            let mut stream = request.send().await.expect("an answer").bytes_stream();
            let mut text = String::new();
            while text.matches("\ndata: ").count() < wanted {
                let bytes = tokio::time::timeout(Duration::from_secs(5), stream.next())
                    .await
                    .unwrap_or_else(|_| panic!("{wanted} events, got {text}"))
                    .expect("more")
                    .expect("bytes");
                text.push_str(std::str::from_utf8(&bytes).expect("UTF-8"));
            }
            text
        }
    };
    let follower = tokio::spawn(read(None, 2));
    tokio::time::sleep(Duration::from_millis(200)).await;
    let uid = one_step(&gateway, "hi").await;
    gateway
        .post("/v1/feedback", json!({"id": uid, "rating": "up"}))
        .await;
    let text = follower.await.expect("events");
    assert!(text.contains("id: 1\ndata: {\"type\":\"step\""), "{text}");
    assert!(text.contains("id: 2\ndata: {\"type\":\"rating\""), "{text}");
    gateway.events.publish(EventBody::Alert {
        level: "info".into(),
        code: "test".into(),
        message: String::new(),
    });
    let resumed = read(Some("1"), 2).await;
    assert!(
        !resumed.contains("id: 1\n") && resumed.contains("id: 2\n") && resumed.contains("id: 3\n")
    );
}

#[tokio::test]
async fn a_shutdown_ends_event_streams_and_lets_answers_end() {
    let mut gateway = Gateway::start().await;
    let mut events = gateway
        .request("GET", "/api/v1/events")
        .send()
        .await
        .expect("an answer")
        .bytes_stream();
    events.next().await.expect("it is open").expect("bytes");
    gateway.engine.push(Reply {
        per_token: Duration::from_millis(300),
        ..Reply::text("one two three")
    });
    let body =
        json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]});
    let answer = gateway
        .request("POST", "/v1/chat/completions")
        .json(&body)
        .send()
        .await
        .expect("headers");
    let answer = tokio::spawn(answer.text());
    tokio::time::timeout(Duration::from_secs(10), gateway.stop())
        .await
        .expect("an open event stream does not hold the server");
    let text = answer.await.expect("no panic").expect("the whole answer");
    assert!(text.contains("three") && text.ends_with("data: [DONE]\n\n"));
    assert_eq!(gateway.pool.all_steps().len(), 1);
}

#[tokio::test]
async fn health_metrics_and_the_interface_are_served() {
    let ui = tempfile::tempdir().expect("a directory");
    std::fs::write(ui.path().join("index.html"), "<title>Spotter</title>").expect("written");
    std::fs::write(ui.path().join("app.js"), "1").expect("written");
    let gateway = Gateway::with(
        ScriptedEngine::default(),
        Some(TOKEN),
        Some(ui.path().into()),
    )
    .await;
    let plain = reqwest::Client::new();
    for path in ["/", "/review", "/?token=x"] {
        let response = plain
            .get(format!("{}{path}", gateway.url))
            .send()
            .await
            .expect("an answer");
        assert_eq!(response.status().as_u16(), 200, "{path}");
        let policy = response.headers()["content-security-policy"]
            .to_str()
            .expect("text");
        assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'self'"));
        assert!(response.text().await.expect("a body").contains("Spotter"));
    }
    for (path, expected) in [
        ("/app.js", 200),
        ("/missing.js", 404),
        ("/v1/nothing", 401),
        ("/api/nothing", 401),
        ("/../Cargo.toml", 404),
    ] {
        let response = plain
            .get(format!("{}{path}", gateway.url))
            .send()
            .await
            .expect("an answer");
        assert_eq!(response.status().as_u16(), expected, "{path}");
    }
    let (status, body) = gateway.send("GET", "/v1/nothing", None).await;
    assert_eq!(
        (status, body["error"]["code"].as_str()),
        (404, Some("not_found"))
    );

    one_step(&gateway, "hi").await;
    let metrics = plain
        .get(format!("{}/metrics", gateway.url))
        .send()
        .await
        .expect("an answer")
        .text()
        .await
        .expect("a body");
    for name in [
        "spotter_requests_total",
        "spotter_first_token_seconds_bucket",
        "spotter_steps_stored_total",
        "spotter_cached_tokens_total",
    ] {
        assert!(metrics.contains(name), "{name}");
    }
    let ready = plain
        .get(format!("{}/readyz", gateway.url))
        .send()
        .await
        .expect("an answer");
    assert_eq!(ready.status().as_u16(), 200);
    gateway
        .engine
        .ready
        .store(false, std::sync::atomic::Ordering::SeqCst);
    let ready = plain
        .get(format!("{}/readyz", gateway.url))
        .send()
        .await
        .expect("an answer");
    assert_eq!(ready.status().as_u16(), 503);
    let alive = plain
        .get(format!("{}/healthz", gateway.url))
        .send()
        .await
        .expect("an answer");
    assert_eq!(alive.status().as_u16(), 200);
}

/// The committed description is what the code says; `SPOTTER_UPDATE=1` rewrites it.
#[test]
fn the_openapi_description_is_current() {
    let path = format!("{}/openapi.json", env!("CARGO_MANIFEST_DIR"));
    let mut current =
        serde_json::to_string_pretty(&spotter_gateway::control::openapi()).expect("JSON");
    current.push('\n');
    if std::env::var_os("SPOTTER_UPDATE").is_some() {
        std::fs::write(&path, &current).expect("written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == current,
        "openapi.json is stale; run the tests with SPOTTER_UPDATE=1 and commit it"
    );
    let description: Value = serde_json::from_str(&current).expect("JSON");
    for route in ROUTES.iter().filter(|r| r.surface == Surface::Control) {
        if route.path.ends_with("openapi.json") || route.path.ends_with("endpoints") {
            continue;
        }
        let method = route.method.to_lowercase();
        assert!(
            description["paths"][route.path][method.as_str()].is_object(),
            "{} {} is not described",
            route.method,
            route.path
        );
    }
}
