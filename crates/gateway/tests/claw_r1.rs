//! The Claw-R1 handshake: an agent written for Claw-R1's black-box flow runs with
//! only the address changed.

mod common;

use common::Gateway;
use serde_json::{Value, json};
use spotter_core::id::TrajectoryUid;
use spotter_core::step::Channel;
use spotter_gateway::engine::scripted::{Reply, ScriptedEngine};

/// One attempt as the black-box flow makes it: two chat calls with a tool between.
async fn attempt(gateway: &Gateway, prompt: &str, reward: Option<f64>) -> String {
    let init = gateway.post("/init_trajectory", Value::Null).await;
    let uid = init["trajectory_uid"].as_str().expect("an id").to_owned();
    let base = init["base_url"].as_str().expect("an address");
    assert_eq!(base, format!("{}/{uid}/1/v1", gateway.url));
    let path = base
        .trim_start_matches(gateway.url.as_str())
        .replace("/1/v1", &format!("/{prompt}/v1"));
    let ok = gateway
        .post(
            &format!("{path}/register_trajectory"),
            json!({"channel": "val", "metadata": {"policy_version": 0}}),
        )
        .await;
    assert_eq!(ok, json!({"status": "ok"}));
    let mut messages = vec![json!({"role": "user", "content": "What is 2 + 2?"})];
    let tools = json!([{"type": "function", "function": {"name": "check_answer", "parameters": {"type": "object"}}}]);
    for round in 0..3 {
        let (headers, answer) = {
            let response = gateway
                .request("POST", &format!("{path}/chat/completions"))
                .json(&json!({"model": "policy", "messages": messages, "tools": tools, "max_tokens": 64}))
                .send()
                .await
                .expect("an answer");
            assert_eq!(response.status().as_u16(), 200);
            (
                response.headers().clone(),
                response.json::<Value>().await.expect("JSON"),
            )
        };
        assert_eq!(headers["x-spotter-trajectory"], uid.as_str());
        let message = answer["choices"][0]["message"].clone();
        let calls = message["tool_calls"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        messages.push(message);
        let Some(call) = calls.first() else {
            assert_eq!(round, 1);
            break;
        };
        messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "correct"}));
    }
    let body = reward.map_or(
        json!({}),
        |reward| json!({"reward": reward, "channel": "val"}),
    );
    gateway
        .post(&format!("{path}/complete_trajectory"), body)
        .await;
    uid
}

fn agent_engine() -> ScriptedEngine {
    ScriptedEngine::new(|request| match &request.prompt {
        spotter_core::generate::Prompt::Chat { messages, .. } if messages.len() == 1 => {
            Reply::call("check_answer", r#"{"answer":"4"}"#)
        }
        _ => Reply::text("The answer is 4."),
    })
}

#[tokio::test]
async fn several_attempts_at_one_prompt_run_at_once() {
    let gateway = Gateway::over(agent_engine()).await;
    let rewards = [Some(1.0), Some(-1.0), Some(0.0), None];
    let uids = futures::future::join_all(
        rewards
            .iter()
            .map(|reward| attempt(&gateway, "prompt7", *reward)),
    )
    .await;
    for (uid, reward) in uids.iter().zip(rewards) {
        let (open, complete, outcomes) = gateway
            .pool
            .trajectory(&TrajectoryUid::from(uid.as_str()))
            .expect("known");
        assert_eq!(
            (open.prompt_uid.as_str(), open.channel, complete),
            ("prompt7", Channel::Val, true)
        );
        assert_eq!(outcomes.first().and_then(|r| r.value), reward);
        let steps: Vec<_> = gateway
            .pool
            .all_steps()
            .into_iter()
            .filter(|s| s.trajectory.as_str() == uid)
            .collect();
        let indexes: Vec<_> = steps.iter().map(|s| s.index).collect();
        assert_eq!(indexes, [0, 1]);
        assert!(steps.iter().all(|s| s.prompt_uid == "prompt7"));
    }
}

#[tokio::test]
async fn unrelated_attempts_share_no_group() {
    let gateway = Gateway::over(agent_engine()).await;
    let (a, b) = (
        attempt(&gateway, "1", None).await,
        attempt(&gateway, "1", None).await,
    );
    let group = |uid: &str| {
        let known = gateway.pool.trajectory(&TrajectoryUid::from(uid));
        known.expect("known").0.prompt_uid
    };
    assert_ne!(group(&a), group(&b));
}

#[tokio::test]
async fn the_other_endpoints_answer() {
    let gateway = Gateway::start().await;
    let uid = gateway.post("/init_trajectory", Value::Null).await["trajectory_uid"].clone();
    let uid = uid.as_str().expect("an id");
    gateway
        .post(&format!("/complete_trajectory/{uid}"), json!({"reward": 1}))
        .await;
    for (path, body, expected) in [
        ("/complete_trajectory/unknown", json!({}), 404),
        (
            "/compute_reward",
            json!({"prompt_ids": [1], "response_ids": [2]}),
            501,
        ),
        ("/generate", json!({"prompt_ids": "text"}), 400),
        (
            "/submit_steps",
            json!({"steps": [{"no": "trajectory"}]}),
            400,
        ),
    ] {
        let (status, answer) = gateway.send("POST", path, Some(body)).await;
        assert_eq!(status, expected, "{path}: {answer}");
    }
    let generated = gateway
        .post("/generate", json!({"prompt_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "logprobs": true}}))
        .await;
    assert_eq!(
        generated["token_ids"].as_array().map(Vec::len),
        generated["log_probs"].as_array().map(Vec::len)
    );
    assert_eq!(generated["stop_reason"], "stop");
    let accepted = gateway
        .post(
            "/submit_steps?channel=val",
            json!({"steps": [
                {"prompt_ids": [1], "response_ids": [2, 3], "rollout_log_probs": [-0.1, -0.2],
                 "trajectory_uid": "t1", "prompt_uid": "p1", "step_index": 0, "policy_version": 0},
                {"prompt_ids": [1, 2], "response_ids": [4], "trajectory_uid": "t1", "prompt_uid": "p1",
                 "step_index": 1, "reward": 0.5, "is_last": true}]}),
        )
        .await;
    assert_eq!(accepted, json!({"accepted": 2}));
    let (open, complete, _) = gateway
        .pool
        .trajectory(&TrajectoryUid::from("t1"))
        .expect("known");
    assert_eq!((open.channel, complete), (Channel::Val, true));
    let ready = gateway.get("/ready").await;
    assert_eq!(ready["status"], "ready");
}
