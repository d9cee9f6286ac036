//! One training run, top to bottom: batch, old and reference log-probabilities,
//! advantages, minibatch epochs, evaluation, adapter.
//!
//! What it implements: PPO's clipped surrogate (Schulman et al. 2017) on the
//! answers of a language model with a LoRA adapter, with advantages from a
//! step-level critic, a running baseline or prompt groups; KTO for answers that
//! cannot be importance-weighted; DPO plus likelihood for corrections. All three
//! share the minibatches, each example contributing `weight × loss / minibatch`.
//!
//! How it departs:
//! 1. π_old is recomputed by the trainer at the start of the run, and what
//!    sampled the answer enters as a truncated importance weight, so a stale
//!    adapter or a nucleus does not bias the ratio. Log-probabilities are taken
//!    at the sampling temperature; a greedy answer (temperature 0) counts as
//!    sampled at temperature 1 with weight 1.
//! 2. The loss is averaged per answer and then over answers: a long answer does
//!    not outweigh a short one.
//! 3. The reference is the same model with the adapter off.
//! 4. Negative advantages count less (`disliked_weight`). A liked answer also
//!    contributes likelihood (`liked_nll_weight`): with a dozen thumbs, the clipped
//!    surrogate alone moves too little before its ratio is cut.
//! 5. Every update is also pulled towards the base model on neutral texts
//!    (`retention`), so that a taste costs no general ability.
//!    What still raises the probe's loss by more than `max_probe_rise` is scaled back
//!    towards the parent before anything is measured.
//! 6. The tensor graph ends at the log-probabilities. Losses are plain arithmetic
//!    of [`spotter_core::loss`] with exact gradients, fed back as upstream
//!    gradients.
//! 7. Randomness is a function of (seed, epoch) only, and every update is
//!    checkpointed, so a killed run continues bit for bit on CPU.

use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

use candle_core::{Device, Tensor};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use spotter_core::code::{Code, Failure};
use spotter_core::loss::{Kto, clipped_policy_gradient, dpo, k3, kto, kto_reference_point};
use spotter_core::train::{AdapterFiles, Metric, TrainOutcome, TrainProgress, TrainRequest};
use spotter_model::LoadedModel;

use crate::TrainError;
use crate::batch::{self, Example, Prepared};
use crate::checkpoint::Checkpoint;
use crate::config::TrainConfig;
use crate::estimator;
use crate::evaluate::{self, Measurement};
use crate::learner::{Learner, ParentState};
use crate::metrics::{Tally, metric, peak_memory};
use crate::packing::{Sequence, micro_batches};
use crate::retention::Retention;
use crate::vocabulary::Vocabulary;

/// Mismatched pairs behind KTO's reference point.
const MISMATCHED_PAIRS: usize = 8;

/// Shares of a run's change that are tried when all of it costs too much ability.
const KEPT_SHARES: [f64; 5] = [0.85, 0.7, 0.55, 0.4, 0.2];

/// Share of a run's progress bar that the updates take.
const UPDATING: (f64, f64) = (0.15, 0.85);

/// What the run asks of whoever runs it.
pub trait Observer {
    /// Progress, after every update and at every change of phase.
    fn progress(&mut self, progress: TrainProgress);

    /// Called between micro-batches: may wait while requests are being served, and
    /// returns [`TrainError::Paused`] or [`TrainError::Cancelled`] to end the run here.
    fn between(&mut self) -> Result<(), TrainError>;
}

/// The position in a run, stored with every checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Position {
    /// Updates done.
    step: u32,
    /// Whether the run stopped early because the KL target was passed.
    stopped: bool,
    /// Seconds spent before the last resume.
    seconds: f64,
    /// z₀ of KTO in the current epoch.
    reference_point: f64,
    /// Metrics of the last update.
    last: Vec<Metric>,
}

/// Runs `request` from its checkpoint, or from the start, to a finished adapter.
///
/// A run that is killed, paused or stopped continues when it is called again with
/// the same request. Fails with [`TrainError::NothingToLearn`] instead of making
/// an adapter that changes nothing.
pub fn train(
    model: &LoadedModel,
    request: &TrainRequest,
    vocabulary: &dyn Vocabulary,
    observer: &mut dyn Observer,
) -> Result<TrainOutcome, TrainError> {
    let started = Instant::now();
    let config = TrainConfig::resolve(request.dial, &request.overrides)?;
    let mut report = Reporter {
        run: request.run,
        observer,
        total: 0,
        step: 0,
    };
    report.phase("loading", 0.0);

    // ---- batch: what each answer is used for ----
    let steps = estimator::steps_of(request);
    let selection = estimator::select(request, &steps, &config, &|text| vocabulary.answer(text))?;
    let (sequences, layout) = batch::sequences(&steps, &selection);
    if sequences.is_empty() {
        return Err(nothing_to_learn(
            "no answer can be used",
            &selection.dropped,
        ));
    }
    let (parent, parent_state) = (request.parent.as_ref(), request.parent_state.as_deref());
    let mut learner = Learner::new(model, parent, parent_state, request.seed, &config)?;
    learner.choose_scope(&sequences, &config);

    // ---- π_old, reference, and what the parent does on held-out data ----
    report.phase("reference", 0.02);
    let prepared_path = request.checkpoint_dir.join("prepared.safetensors");
    let (prepared, before) = match read_prepared(&prepared_path)? {
        Some(found) => found,
        None => {
            let old = learner.score(&sequences, true, report.observer)?;
            let reference = if learner.is_fresh() {
                old.logprobs.clone() // A fresh adapter adds exactly nothing.
            } else {
                learner.score(&sequences, false, report.observer)?.logprobs
            };
            let before =
                evaluate::measure(&learner, request, &config, vocabulary, report.observer)?;
            let prepared = Prepared {
                old: old.logprobs,
                reference,
                features: old.features,
            };
            write_prepared(&prepared_path, &prepared, &before)?;
            (prepared, before)
        }
    };

    // ---- advantages and examples ----
    let ParentState {
        critic,
        mut baseline,
        ..
    } = learner.parent_state();
    let credit = batch::credit(
        &steps, &selection, &layout, &prepared, baseline, critic, &config,
    );
    let batch = batch::examples(
        request, &steps, &selection, &layout, &credit, &prepared, &config,
    );
    if batch.fresh == 0 {
        return Err(nothing_to_learn(
            "every new answer was dropped",
            &batch.dropped,
        ));
    }
    let fresh = selection
        .policy
        .iter()
        .filter(|item| item.step < request.steps.len());
    let rewards: Vec<f64> = fresh.map(|item| item.reward).collect();
    baseline.observe(&rewards, config.baseline_decay);
    let batch_metrics = batch::batch_metrics(
        &selection,
        &credit,
        &batch,
        &sequences,
        baseline,
        &request.steps,
    );
    let kto_settings = kto_settings(&batch.examples, &config);

    // ---- minibatch epochs ----
    let retention = Retention::new(&learner, vocabulary, &config, report.observer)?;
    let run_path = request.checkpoint_dir.join("run.safetensors");
    let mut position = match Checkpoint::<Position>::read(&run_path, &Device::Cpu)? {
        Some(checkpoint) => {
            learner.restore(&checkpoint.tensors, u64::from(checkpoint.state.step))?;
            checkpoint.state
        }
        None => Position::default(),
    };
    let seconds_before = position.seconds;
    let per_epoch = batch.examples.len().div_ceil(config.minibatch) as u32;
    let total = per_epoch * config.epochs;
    report.total = total;
    while position.step < total && !position.stopped {
        let (epoch, cursor) = (position.step / per_epoch, position.step % per_epoch);
        let mut order: Vec<usize> = (0..batch.examples.len()).collect();
        let mut rng = ChaCha8Rng::seed_from_u64(request.seed);
        rng.set_stream(u64::from(epoch) + 1);
        order.shuffle(&mut rng);
        if cursor == 0 {
            position.reference_point =
                reference_point(&learner, &batch.examples, &sequences, report.observer)?;
        }
        let minibatch: Vec<&Example> = order
            .iter()
            .skip(cursor as usize * config.minibatch)
            .take(config.minibatch)
            .map(|&i| &batch.examples[i])
            .collect();

        let update_started = Instant::now();
        let mut tally = Tally::default();
        let units: Vec<Vec<Sequence<'_>>> = minibatch
            .iter()
            .map(|example| {
                example
                    .members()
                    .into_iter()
                    .map(|i| sequences[i])
                    .collect()
            })
            .collect();
        for micro in micro_batches(&units, learner.micro_batch_tokens()) {
            report.observer.between()?;
            let members: Vec<Sequence<'_>> = micro
                .iter()
                .flat_map(|&i| units[i].iter().copied())
                .collect();
            tally.tokens += learner.accumulate(&members, &mut |new| {
                let (mut upstream, mut rest) = (Vec::with_capacity(new.len()), new);
                for &i in &micro {
                    let (own, others) = rest.split_at(units[i].len());
                    rest = others;
                    let mut gradients = upstream_of(
                        minibatch[i],
                        own,
                        &prepared,
                        &config,
                        kto_settings,
                        position.reference_point,
                        &mut tally,
                    );
                    for value in gradients.iter_mut().flatten() {
                        *value /= minibatch.len() as f64;
                    }
                    upstream.append(&mut gradients);
                }
                upstream
            })?;
        }
        tally.tokens += retention.accumulate(&mut learner, position.step, &config)?;
        let learning_rate = config.learning_rate_at(position.step, total);
        let gradient_norm = learner.step(learning_rate, &config)?;
        position.step += 1;

        let mut metrics = tally.metrics(update_started.elapsed().as_secs_f64());
        metrics.push(metric("gradient_norm", gradient_norm));
        metrics.push(metric("learning_rate", learning_rate));
        metrics.push(metric("peak_memory", peak_memory() as f64));
        if position.step == 1 {
            metrics.extend(batch_metrics.iter().cloned());
        }
        position.stopped = tally.kl_to_base().is_some_and(|kl| kl > config.kl_target);
        position.seconds = seconds_before + started.elapsed().as_secs_f64();
        position.last.clone_from(&metrics);
        Checkpoint {
            tensors: learner.state(),
            state: position.clone(),
        }
        .write(&run_path)?;
        report.update(position.step, metrics);
    }

    // ---- what the run did, and the gate's evidence ----
    report.phase("evaluating", UPDATING.1);
    let kept = keep_ability(
        &mut learner,
        model,
        request,
        &config,
        vocabulary,
        report.observer,
    )?;
    let after = learner.score(&sequences, true, report.observer)?.logprobs;
    let changes = batch::changes(&steps, &selection, &layout, &prepared, &after);
    let candidate = evaluate::measure(&learner, request, &config, vocabulary, report.observer)?;
    let kl_to_base = batch::sampled_kl(&layout, &prepared, &after);
    let mut metrics = batch_metrics;
    metrics.extend(position.last);
    metrics.extend(batch::change_metrics(
        &changes, &selection, &layout, &prepared, &after,
    ));
    metrics.push(metric("kl_to_base", kl_to_base));
    metrics.push(metric("change_kept", kept));
    let mut by_name = std::collections::BTreeMap::new();
    for entry in metrics {
        by_name.insert(entry.name, entry.value); // The latest value of a name is the run's.
    }

    report.phase("writing", 0.98);
    let adapter = AdapterFiles {
        version: request.version,
        dir: request.output_dir.clone(),
    };
    let state = ParentState {
        critic: credit.critic,
        baseline,
        ..ParentState::default()
    };
    learner.write_output(&adapter, state)?;
    report.phase("done", 1.0);
    Ok(TrainOutcome {
        run: request.run,
        adapter,
        estimator: credit.estimator,
        estimator_reason: credit.reason,
        grad_scope: learner.scope_name().to_owned(),
        used: batch.used,
        dropped: batch.dropped,
        changes,
        metrics: by_name
            .into_iter()
            .map(|(name, value)| Metric { name, value })
            .collect(),
        evaluation: evaluate::compare(&before, &candidate, kl_to_base),
        config: serde_json::to_value(&config).map_err(std::io::Error::other)?,
        seconds: seconds_before + started.elapsed().as_secs_f64(),
        peak_memory: peak_memory(),
    })
}

/// `∂ loss / ∂ log-probability` of each member of an example, given the members'
/// log-probabilities `new` under the policy as it is now.
fn upstream_of(
    example: &Example,
    new: &[Vec<f64>],
    prepared: &Prepared,
    config: &TrainConfig,
    kto_settings: Kto,
    reference_point: f64,
    tally: &mut Tally,
) -> Vec<Vec<f64>> {
    match example {
        Example::Policy {
            sequence,
            advantage,
            weights,
            likelihood,
        } => {
            let (new, old) = (&new[0], &prepared.old[*sequence]);
            let reference = &prepared.reference[*sequence];
            let surrogate = clipped_policy_gradient(new, old, *advantage, weights, config.clip());
            let kl = k3(new, reference);
            tally.policy(&surrogate, new, old, reference);
            let nll = likelihood / new.len().max(1) as f64;
            let gradient = surrogate.gradient.iter().zip(&kl.gradient);
            vec![
                gradient
                    .map(|(s, k)| config.policy_weight * s + config.kl_coefficient * k - nll)
                    .collect(),
            ]
        }
        Example::Kto {
            sequence,
            liked,
            weight,
        } => {
            let reference = &prepared.reference[*sequence];
            let mut out = kto(&new[0], reference, *liked, reference_point, kto_settings);
            tally.kto(out.value, &new[0], &prepared.old[*sequence], reference);
            for value in &mut out.gradient {
                *value *= weight * config.kto_weight;
            }
            vec![out.gradient]
        }
        Example::Pair { chosen, rejected } => {
            let mut out = dpo(
                (&new[0], &prepared.reference[*chosen]),
                (&new[1], &prepared.reference[*rejected]),
                config.dpo_beta,
                config.dpo_nll_weight,
            );
            tally.pair(&out);
            for value in out.chosen.iter_mut().chain(&mut out.rejected) {
                *value *= config.preference_weight;
            }
            vec![out.chosen, out.rejected]
        }
    }
}

/// Goes back towards the parent as far as the probe asks for, and returns the share of
/// the change that was kept.
///
/// A rise by `max_probe_rise` is what the gate allows at most: a smaller step that goes
/// live teaches more than a larger one that is thrown away.
fn keep_ability(
    learner: &mut Learner<'_>,
    model: &LoadedModel,
    request: &TrainRequest,
    config: &TrainConfig,
    vocabulary: &dyn Vocabulary,
    observer: &mut dyn Observer,
) -> Result<f64, TrainError> {
    let base = evaluate::probe(learner, false, vocabulary, observer)?;
    let allowed = base * (1.0 + config.max_probe_rise);
    let mut kept = 1.0;
    if evaluate::probe(learner, true, vocabulary, observer)? <= allowed {
        return Ok(kept);
    }
    let parent = Learner::new(model, request.parent.as_ref(), None, request.seed, config)?;
    let candidate = learner.values()?;
    for share in KEPT_SHARES {
        kept = share;
        learner.blend(&parent, &candidate, share)?;
        if evaluate::probe(learner, true, vocabulary, observer)? <= allowed {
            break;
        }
    }
    Ok(kept)
}

/// KTO's weights, balanced over the examples that use it.
fn kto_settings(examples: &[Example], config: &TrainConfig) -> Kto {
    let count = |wanted: bool| {
        examples
            .iter()
            .filter(|e| matches!(e, Example::Kto { liked, .. } if *liked == wanted))
            .count()
    };
    config.kto(count(true), count(false))
}

/// z₀ of KTO: the policy's log-ratio on prompts paired with the next example's
/// answer. 0 without KTO examples.
fn reference_point(
    learner: &Learner<'_>,
    examples: &[Example],
    sequences: &[Sequence<'_>],
    observer: &mut dyn Observer,
) -> Result<f64, TrainError> {
    let rated: Vec<Sequence<'_>> = examples
        .iter()
        .filter_map(|example| match example {
            Example::Kto { sequence, .. } => Some(sequences[*sequence]),
            _ => None,
        })
        .take(MISMATCHED_PAIRS)
        .collect();
    if rated.is_empty() {
        return Ok(0.0);
    }
    let mismatched: Vec<Sequence<'_>> = (0..rated.len())
        .map(|i| Sequence {
            response: rated[(i + 1) % rated.len()].response,
            ..rated[i]
        })
        .collect();
    let policy = learner.score(&mismatched, true, observer)?.logprobs;
    let base = learner.score(&mismatched, false, observer)?.logprobs;
    let ratios: Vec<f64> = policy
        .iter()
        .zip(&base)
        .map(|(p, b)| p.iter().sum::<f64>() - b.iter().sum::<f64>())
        .collect();
    Ok(kto_reference_point(&ratios))
}

/// Log-probabilities and the parent's measurement are kept on disk, because after
/// the first update they cannot be recomputed.
fn write_prepared(
    path: &Path,
    prepared: &Prepared,
    before: &Measurement,
) -> Result<(), TrainError> {
    let mut tensors = HashMap::new();
    for (name, rows) in [("old", &prepared.old), ("reference", &prepared.reference)] {
        for (i, row) in rows.iter().enumerate() {
            tensors.insert(
                format!("{name}.{i}"),
                Tensor::new(row.as_slice(), &Device::Cpu)?,
            );
        }
    }
    for (i, row) in prepared.features.iter().enumerate() {
        tensors.insert(
            format!("features.{i}"),
            Tensor::new(row.as_slice(), &Device::Cpu)?,
        );
    }
    let state = before.clone();
    Checkpoint { tensors, state }.write(path)
}

fn read_prepared(path: &Path) -> Result<Option<(Prepared, Measurement)>, TrainError> {
    let Some(checkpoint) = Checkpoint::<Measurement>::read(path, &Device::Cpu)? else {
        return Ok(None);
    };
    let mut prepared = Prepared::default();
    for i in 0.. {
        let tensor = |name: &str| checkpoint.tensors.get(&format!("{name}.{i}"));
        let (Some(old), Some(reference), Some(features)) =
            (tensor("old"), tensor("reference"), tensor("features"))
        else {
            break;
        };
        prepared.old.push(old.to_vec1()?);
        prepared.reference.push(reference.to_vec1()?);
        prepared.features.push(features.to_vec1()?);
    }
    Ok(Some((prepared, checkpoint.state)))
}

fn nothing_to_learn(what: &str, dropped: &[(spotter_core::id::StepUid, String)]) -> TrainError {
    let mut reasons: Vec<&str> = dropped.iter().map(|(_, reason)| reason.as_str()).collect();
    reasons.sort_unstable();
    reasons.dedup();
    let failure = Failure::new(
        Code::NothingToLearn,
        format!(
            "The run would change nothing, because {what}. {} The ratings are kept; rate more answers, some liked and some disliked, or type a correction.",
            reasons.join(" ")
        ),
    );
    TrainError::NothingToLearn {
        failure,
        dropped: dropped.to_vec(),
    }
}

/// Turns phases and updates into progress reports.
struct Reporter<'a> {
    run: i64,
    observer: &'a mut dyn Observer,
    total: u32,
    step: u32,
}

impl Reporter<'_> {
    fn phase(&mut self, phase: &str, fraction: f64) {
        self.send(phase, fraction, Vec::new());
    }

    fn update(&mut self, step: u32, metrics: Vec<Metric>) {
        self.step = step;
        let share = f64::from(step) / f64::from(self.total.max(1));
        self.send(
            "updating",
            UPDATING.0 + (UPDATING.1 - UPDATING.0) * share,
            metrics,
        );
    }

    fn send(&mut self, phase: &str, fraction: f64, metrics: Vec<Metric>) {
        self.observer.progress(TrainProgress {
            run: self.run,
            phase: phase.to_owned(),
            step: self.step,
            total_steps: self.total,
            fraction,
            metrics,
        });
    }
}
