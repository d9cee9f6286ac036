//! What the tests of the pool share.
#![allow(dead_code)]

use serde_json::json;
use spotter_core::AdapterVersion;
use spotter_core::generate::{FinishReason, Sampling};
use spotter_core::id::{SessionUid, StepUid, TrajectoryUid};
use spotter_core::reward::{Reward, RewardSource};
use spotter_core::step::{Step, StepKind};
use spotter_store::{RewardTarget, Store};

pub(crate) fn step(
    session: &str,
    turn: &str,
    index: u32,
    prompt_ids: Vec<u32>,
    response_ids: Vec<u32>,
) -> Step {
    let n = response_ids.len();
    Step {
        uid: StepUid::new(),
        session: SessionUid::from(session),
        trajectory: TrajectoryUid::from(session),
        prompt_uid: session.to_owned(),
        turn: turn.to_owned(),
        index,
        kind: StepKind::Main,
        kind_reason: "a person's message".into(),
        adapter: AdapterVersion::BASE,
        base_model: "tiny".into(),
        prompt_ids,
        response_ids,
        logprobs: (0..n).map(|i| -(i as f32) / 3.0).collect(),
        model_logprobs: vec![-0.5; n],
        sampling: Sampling {
            temperature: 0.7,
            top_p: 0.9,
            ..Default::default()
        },
        finish_reason: FinishReason::Stop,
        cached_tokens: 0,
        first_token_ms: 5,
        total_ms: 9,
        client: "test".into(),
        user_text: "how do I boil an egg".into(),
        answer_text: format!("in water {index} 鸡蛋要煮熟"),
        request: json!({"model": "spotter", "messages": [{"role": "user", "content": format!("{session} {index}")}]}),
        response: json!({"role": "assistant", "content": "in water"}),
        created_at: 1000 + i64::from(index),
    }
}

pub(crate) fn vote(value: Option<f64>) -> Reward {
    Reward {
        value,
        source: RewardSource::User,
        reasons: vec![],
        note: None,
        correction: None,
        created_at: 1,
    }
}

pub(crate) fn open() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().expect("directory");
    let store = Store::open(dir.path()).expect("opens");
    (dir, store)
}

/// Stores a step and rates it.
pub(crate) fn rated(store: &Store, step: Step, value: f64) -> StepUid {
    let uid = step.uid.clone();
    store.append_step_durably(step).expect("stored");
    store
        .add_reward(RewardTarget::Step(uid.clone()), vote(Some(value)))
        .expect("rated");
    uid
}

/// The whole pool as JSON lines.
pub(crate) fn exported(store: &Store) -> Vec<String> {
    let mut lines = Vec::new();
    store
        .export(|line| {
            lines.push(line.to_owned());
            Ok(())
        })
        .expect("exported");
    lines
}
