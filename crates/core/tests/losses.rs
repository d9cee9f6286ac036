//! Losses and advantages against PyTorch autograd and TRL, on the tensors that
//! `tests/python/loss_fixtures.py` wrote.

use serde::Deserialize;
use spotter_core::advantage::{group_relative, leave_one_out};
use spotter_core::loss::{
    Clip, Kto, clipped_policy_gradient, clipped_value, dpo, importance_weights, k3, kto,
};

const TOLERANCE: f64 = 1e-5;

#[derive(Deserialize)]
struct Fixtures {
    clip: ClipFixture,
    policy: Vec<PolicyCase>,
    k3: Vec<K3Case>,
    value: Vec<ValueCase>,
    dpo: Vec<DpoCase>,
    kto: Vec<KtoCase>,
    groups: Vec<GroupCase>,
}

#[derive(Deserialize)]
struct ClipFixture {
    low: f64,
    high: f64,
    dual: f64,
    cap: f64,
}

#[derive(Deserialize)]
struct PolicyCase {
    new: Vec<f64>,
    old: Vec<f64>,
    behaviour: Vec<f64>,
    advantage: f64,
    weights: Vec<f64>,
    loss: f64,
    gradient: Vec<f64>,
}

#[derive(Deserialize)]
struct K3Case {
    new: Vec<f64>,
    reference: Vec<f64>,
    value: f64,
    gradient: Vec<f64>,
}

#[derive(Deserialize)]
struct ValueCase {
    value: f64,
    old: f64,
    target: f64,
    clip: f64,
    loss: f64,
    gradient: f64,
}

#[derive(Deserialize)]
struct DpoCase {
    chosen: Vec<f64>,
    chosen_reference: Vec<f64>,
    rejected: Vec<f64>,
    rejected_reference: Vec<f64>,
    beta: f64,
    nll_weight: f64,
    loss: f64,
    margin: f64,
    chosen_gradient: Vec<f64>,
    rejected_gradient: Vec<f64>,
}

#[derive(Deserialize)]
struct KtoCase {
    new: Vec<f64>,
    reference: Vec<f64>,
    liked: bool,
    kl: f64,
    beta: f64,
    desirable_weight: f64,
    undesirable_weight: f64,
    loss: f64,
    gradient: Vec<f64>,
}

#[derive(Deserialize)]
struct GroupCase {
    rewards: Vec<f64>,
    grpo: Vec<f64>,
    rloo: Vec<f64>,
}

fn fixtures() -> Fixtures {
    serde_json::from_str(include_str!("fixtures/losses.json")).expect("the fixture file parses")
}

fn assert_close(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (a, b) in got.iter().zip(want) {
        assert!((a - b).abs() <= TOLERANCE, "{what}: {a} is not {b}");
    }
}

#[test]
fn the_clipped_policy_gradient_is_pytorchs() {
    let fixtures = fixtures();
    let clip = Clip {
        low: fixtures.clip.low,
        high: fixtures.clip.high,
        dual: fixtures.clip.dual,
    };
    let (mut upper, mut lower, mut dual, mut truncated) = (0, 0, 0, 0);
    for case in &fixtures.policy {
        let weights = importance_weights(&case.old, &case.behaviour, fixtures.clip.cap);
        assert_close(&weights, &case.weights, "importance weights");
        truncated += weights.iter().filter(|w| **w == fixtures.clip.cap).count();
        let got = clipped_policy_gradient(&case.new, &case.old, case.advantage, &weights, clip);
        assert_close(&[got.loss], &[case.loss], "loss");
        assert_close(&got.gradient, &case.gradient, "gradient");
        for (new, old) in case.new.iter().zip(&case.old) {
            let ratio = (new - old).exp();
            upper += usize::from(case.advantage > 0.0 && ratio > 1.0 + clip.high);
            lower += usize::from(case.advantage < 0.0 && ratio < 1.0 - clip.low);
            dual += usize::from(case.advantage < 0.0 && ratio > clip.dual);
        }
    }
    for (count, branch) in [
        (upper, "upper clip"),
        (lower, "lower clip"),
        (dual, "dual clip"),
        (truncated, "truncated weight"),
    ] {
        assert!(count > 0, "no fixture reaches the {branch}");
    }
}

#[test]
fn k3_is_pytorchs() {
    for case in fixtures().k3 {
        let got = k3(&case.new, &case.reference);
        assert_close(&[got.value], &[case.value], "k3");
        assert_close(&got.gradient, &case.gradient, "k3 gradient");
    }
}

#[test]
fn the_clipped_value_loss_is_pytorchs() {
    let cases = fixtures().value;
    assert!(
        cases.iter().any(|case| case.gradient == 0.0),
        "the clip is active in a case"
    );
    for case in cases {
        let (loss, gradient) = clipped_value(case.value, case.old, case.target, case.clip);
        assert_close(&[loss, gradient], &[case.loss, case.gradient], "value loss");
    }
}

#[test]
fn dpo_with_likelihood_is_trls() {
    for case in fixtures().dpo {
        let got = dpo(
            (&case.chosen, &case.chosen_reference),
            (&case.rejected, &case.rejected_reference),
            case.beta,
            case.nll_weight,
        );
        assert_close(&[got.loss, got.margin], &[case.loss, case.margin], "dpo");
        assert_close(&got.chosen, &case.chosen_gradient, "chosen gradient");
        assert_close(&got.rejected, &case.rejected_gradient, "rejected gradient");
    }
}

#[test]
fn kto_is_trls() {
    for case in fixtures().kto {
        let settings = Kto {
            beta: case.beta,
            desirable_weight: case.desirable_weight,
            undesirable_weight: case.undesirable_weight,
        };
        let got = kto(&case.new, &case.reference, case.liked, case.kl, settings);
        assert_close(&[got.value], &[case.loss], "kto");
        assert_close(&got.gradient, &case.gradient, "kto gradient");
    }
}

#[test]
fn group_advantages_are_trls() {
    for case in fixtures().groups {
        assert_close(&group_relative(&case.rewards, true), &case.grpo, "grpo");
        assert_close(&leave_one_out(&case.rewards), &case.rloo, "rloo");
    }
}
