//! The pool through its public interface.

mod common;

use common::{open, step, vote};
use proptest::prelude::*;
use serde_json::json;
use spotter_core::AdapterVersion;
use spotter_core::id::StepUid;
use spotter_core::reward::{Reward, RewardSource};
use spotter_core::step::{Step, StepKind};
use spotter_store::{RewardTarget, StepFilter, Store, StoreError};

fn items(store: &Store, filter: StepFilter) -> Vec<String> {
    store
        .steps(&filter)
        .expect("page")
        .items
        .into_iter()
        .map(|s| s.uid)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn steps_of_random_conversations_load_as_they_were_stored(
        seeds in proptest::collection::vec((0usize..4, 0usize..30, proptest::collection::vec(0u32..70_000, 0..20)), 1..40)
    ) {
        let (_dir, store) = open();
        let mut stored: Vec<Step> = Vec::new();
        for (i, (branch, cut, tail)) in seeds.into_iter().enumerate() {
            // Continue, cut short or branch from an earlier step of the session.
            let mut prompt = stored.len().checked_sub(1 + branch).map(|j| {
                let s = &stored[j];
                [s.prompt_ids.clone(), s.response_ids.clone()].concat()
            }).unwrap_or_default();
            let keep = prompt.len().saturating_sub(cut);
            prompt.truncate(keep);
            prompt.extend(&tail);
            let response = tail.iter().map(|t| t ^ 1).collect();
            let mut s = step("s", "t", i as u32, prompt, response);
            let mut messages: Vec<_> = stored.last().map(|s| s.request["messages"].as_array().cloned().unwrap_or_default()).unwrap_or_default();
            messages.truncate(cut);
            messages.push(json!({"role": "user", "content": format!("m{i}")}));
            s.request["messages"] = json!(messages);
            store.append_step(s.clone())?;
            stored.push(s);
        }
        store.set_setting("barrier", None)?;
        for s in &stored {
            let d = store.step(&s.uid)?;
            prop_assert_eq!(&d.prompt_ids, &s.prompt_ids);
            prop_assert_eq!(&d.response_ids, &s.response_ids);
            prop_assert_eq!(&d.logprobs, &s.logprobs);
            prop_assert_eq!(&d.request, &s.request);
        }
        // Forgetting one leaves the others exact.
        let victim = &stored[stored.len() / 2];
        store.forget_step(victim.uid.clone())?;
        for s in stored.iter().filter(|s| s.uid != victim.uid) {
            prop_assert_eq!(&store.step(&s.uid)?.prompt_ids, &s.prompt_ids);
            prop_assert_eq!(&store.step(&s.uid)?.request, &s.request);
        }
    }
}

#[test]
fn votes_follow_precedence_and_can_be_withdrawn() {
    let (_dir, store) = open();
    let s = step("s", "t", 0, vec![1], vec![2]);
    store.append_step_durably(s.clone()).expect("stored");
    let target = || RewardTarget::Step(s.uid.clone());
    let state = || {
        let d = store.step(&s.uid).expect("step");
        (d.summary.rating.clone(), d.summary.reward)
    };
    let judge = Reward {
        source: RewardSource::Judge,
        ..vote(Some(-1.0))
    };
    store.add_reward(target(), judge.clone()).expect("judge");
    assert_eq!(state(), (None, Some(-1.0)));
    store.add_reward(target(), vote(Some(1.0))).expect("up");
    store.add_reward(target(), judge).expect("judge");
    assert_eq!(
        state(),
        (Some("up".into()), Some(1.0)),
        "no automatic source overrides a person"
    );
    store.add_reward(target(), vote(None)).expect("withdrawn");
    assert_eq!(state(), (None, Some(-1.0)));
    assert_eq!(
        store.step(&s.uid).expect("step").rewards.len(),
        4,
        "nothing was overwritten"
    );
    assert!(matches!(
        store.add_reward(target(), vote(Some(2.0))),
        Err(StoreError::Invalid(_))
    ));
    let nobody = RewardTarget::Step(StepUid::from("nobody"));
    assert!(matches!(
        store.add_reward(nobody, vote(Some(1.0))),
        Err(StoreError::NotFound { .. })
    ));
}

#[test]
fn a_batch_is_claimed_once_and_given_back_once() {
    let (dir, store) = open();
    for i in 0..4 {
        let s = step("s", if i < 2 { "a" } else { "b" }, i, vec![1, i], vec![7]);
        store.append_step(s.clone()).expect("stored");
        if i == 1 || i == 3 {
            let correction = (i == 3).then(|| "better".to_owned());
            let value = Some(if i == 1 { 1.0 } else { -1.0 });
            store
                .add_reward(
                    RewardTarget::Step(s.uid),
                    Reward {
                        correction,
                        ..vote(value)
                    },
                )
                .expect("rated");
        }
    }
    let labels = store.fresh_labels().expect("labels");
    assert_eq!(
        (labels.labels, labels.negative, labels.corrections),
        (2, 1, 1)
    );
    let batch = store.claim_batch(5, 10).expect("claimed");
    let credit: Vec<(u32, f64, f64)> = batch
        .iter()
        .map(|s| {
            (
                s.index,
                s.reward.as_ref().expect("reward").value,
                s.reward.as_ref().expect("reward").credit,
            )
        })
        .collect();
    assert_eq!(
        credit,
        [(0, 1.0, 0.5), (1, 1.0, 1.0), (2, -1.0, 0.5), (3, -1.0, 1.0)]
    );
    assert_eq!(batch[3].correction.as_deref(), Some("better"));
    assert!(batch[3].is_last && !batch[0].is_last);
    assert!(store.claim_batch(6, 10).expect("nothing left").is_empty());

    // The process dies: the steps are free again.
    drop(store);
    let store = Store::open(dir.path()).expect("opens again");
    let batch = store.claim_batch(7, 10).expect("claimed again");
    assert_eq!(batch.len(), 4);
    let used = vec![batch[1].uid.clone()];
    let dropped = vec![(batch[3].uid.clone(), "too old".to_owned())];
    let run = store
        .insert_run("training", AdapterVersion::BASE, json!({}))
        .expect("run");
    store.release_batch(7).expect("released");
    store.claim_batch(run, 10).expect("claimed");
    store.consume_batch(run, used, dropped).expect("consumed");
    let d = store.step(&batch[1].uid).expect("used step").summary;
    assert_eq!((d.used_in_run, d.in_next_lesson), (Some(run), false));
    let d = store.step(&batch[3].uid).expect("dropped step").summary;
    assert_eq!(d.dropped_reason.as_deref(), Some("too old"));
    assert_eq!(store.replay(10).expect("replay").len(), 1);
    assert_eq!(store.fresh_labels().expect("labels").labels, 0);
    // A changed mind makes it fresh again.
    store
        .add_reward(RewardTarget::Step(batch[1].uid.clone()), vote(Some(-1.0)))
        .expect("rated again");
    assert_eq!(store.fresh_labels().expect("labels").labels, 1);
}

#[test]
fn lists_are_paged_filtered_and_searched() {
    let (_dir, store) = open();
    for i in 0..7 {
        let mut s = step(
            if i % 2 == 0 { "even" } else { "odd" },
            "t",
            i,
            vec![i],
            vec![1],
        );
        if i == 6 {
            s.kind = StepKind::Side;
        }
        store.append_step(s).expect("stored");
    }
    store.set_setting("barrier", None).expect("flushed");
    let first = store
        .steps(&StepFilter {
            limit: 3,
            ..Default::default()
        })
        .expect("page");
    assert_eq!(first.items.len(), 3);
    let cursor = first.next_cursor.expect("more");
    let second = items(
        &store,
        StepFilter {
            limit: 10,
            cursor: Some(cursor),
            ..Default::default()
        },
    );
    assert_eq!(second.len(), 4);
    assert_eq!(
        items(
            &store,
            StepFilter {
                unrated: true,
                ..Default::default()
            }
        )
        .len(),
        6
    );
    assert_eq!(
        items(
            &store,
            StepFilter {
                session: Some("odd".into()),
                ..Default::default()
            }
        )
        .len(),
        3
    );
    let search = |q: &str| {
        items(
            &store,
            StepFilter {
                q: Some(q.into()),
                ..Default::default()
            },
        )
        .len()
    };
    assert_eq!(search("boil an"), 7);
    assert_eq!(search("煮熟"), 7, "two Chinese characters");
    assert_eq!(search("鸡蛋要煮"), 7);
    assert_eq!(search("\"quoted"), 0, "quotes are text");
    let sessions = store.sessions(None, None, 1).expect("sessions");
    assert_eq!(
        (sessions.items.len(), sessions.next_cursor.is_some()),
        (1, true)
    );
    assert_eq!(
        store
            .sessions(Some("boil"), None, 9)
            .expect("found")
            .items
            .len(),
        2
    );
    assert!(
        store
            .steps(&StepFilter {
                cursor: Some("x".into()),
                ..Default::default()
            })
            .is_err()
    );
}

#[test]
fn forgetting_everything_leaves_no_text_in_the_file() {
    let (dir, store) = open();
    let mut s = step("s", "t", 0, vec![1], vec![2]);
    s.user_text = "a very private sentence".into();
    s.request = json!({"messages": [{"role": "user", "content": "a very private sentence"}]});
    store.append_step_durably(s).expect("stored");
    store.forget_everything().expect("forgotten");
    assert_eq!(store.counts().expect("counts").steps, 0);
    for entry in std::fs::read_dir(dir.path()).expect("directory") {
        let path = entry.expect("entry").path();
        if path.is_file() {
            let bytes = std::fs::read(&path).expect("file");
            let found = bytes.windows(12).any(|w| w == b"very private");
            assert!(!found, "{} still holds the text", path.display());
        }
    }
}

#[test]
fn adapters_runs_and_settings_are_kept() {
    use spotter_store::{AdapterRow, AdapterState};
    let (_dir, store) = open();
    let row = |version: u32| AdapterRow {
        version: AdapterVersion(version),
        parent: Some(AdapterVersion(version - 1)),
        state: AdapterState::Kept,
        run: None,
        dir: "d".into(),
        base_model: "tiny".into(),
        steps_used: 3,
        size_bytes: 10,
        metrics: json!({}),
        verdict: None,
        pinned: false,
        created_at: 1,
    };
    store.put_adapter(row(1)).expect("put");
    store.put_adapter(row(2)).expect("put");
    store.set_live(AdapterVersion(1)).expect("live");
    store.set_live(AdapterVersion(2)).expect("live");
    let states: Vec<_> = store
        .adapters()
        .expect("list")
        .into_iter()
        .map(|a| a.state)
        .collect();
    assert_eq!(states, [AdapterState::Kept, AdapterState::Live]);
    assert!(store.set_live(AdapterVersion(9)).is_err());
    let run = store
        .insert_run("training", AdapterVersion(1), json!({"dial": "bold"}))
        .expect("run");
    store
        .append_metrics(
            run,
            1,
            vec![("policy_loss".into(), 0.5), ("kl".into(), f64::NAN)],
        )
        .expect("metrics");
    let mut r = store.run(run).expect("run");
    r.state = "promoted".into();
    r.ended_at = Some(5);
    store.update_run(r).expect("updated");
    assert_eq!(store.runs(5).expect("runs")[0].state, "promoted");
    assert_eq!(
        store.metrics(run, 100).expect("series"),
        [("policy_loss".to_owned(), vec![(1, 0.5)])]
    );
    store.set_setting("dial", Some("bold".into())).expect("set");
    assert_eq!(store.setting("dial").expect("get").as_deref(), Some("bold"));
}
