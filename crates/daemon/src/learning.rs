//! The loop from rated answers to a live adapter: claim, train, judge, swap, watch.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use spotter_core::AdapterVersion;
use spotter_core::code::{Code, Failure};
use spotter_core::train::{
    AdapterFiles, Dial, Estimator, TrainOutcome, TrainProgress, TrainRequest, TrainResult,
    TrainStep,
};
use spotter_core::worker::WorkerSettings;
use spotter_gateway::control::dto::{Changes, Dropped, Run, Verdict};
use spotter_gateway::control::events::{EventBody, EventHub};
use spotter_store::{AdapterRow, AdapterState, RunRow, Store, StoreError, now};
use tokio::sync::mpsc;

use crate::data_dir::DataDir;
use crate::gate::{Limits, judge};
use crate::schedule::labels_suffice;
use crate::serving::Serving;
use crate::training::{Told, Wish, train};

/// Most rated answers in one run.
const BATCH: usize = 64;
/// Earlier rated answers that a run is offered again.
const REPLAY: usize = 64;
/// From this many rated answers on, some are held out for the gate.
const HOLD_OUT_FROM: usize = 24;
/// One answer in this many is held out.
const HOLD_OUT_SHARE: u64 = 6;
/// Ratings of a version before its approval is compared with its predecessor's.
const WATCHED: u64 = 8;
/// A fall of the approval rate by this much rolls back.
const APPROVAL_FALL: f64 = 0.25;

/// What a run is started with, resolved from the settings at that moment.
#[derive(Clone)]
pub struct RunSettings {
    /// For the training worker.
    pub worker: WorkerSettings,
    /// How fast the model may change.
    pub dial: Dial,
    /// Single training settings that replace the dial's.
    pub overrides: serde_json::Map<String, Value>,
    /// Fewest labels.
    pub least_labels: u64,
    /// The base model's name.
    pub base_model: String,
}

struct Active {
    run: Run,
    began: Instant,
    wishes: mpsc::UnboundedSender<Wish>,
}

/// The learning loop; cloning shares it.
#[derive(Clone)]
pub struct Learning(Arc<Inner>);

struct Inner {
    store: Store,
    serving: Serving,
    data_dir: DataDir,
    events: EventHub,
    active: Mutex<Option<Active>>,
    starting: tokio::sync::Mutex<()>,
    paused: AtomicBool,
    /// The version whose approval has led to a rollback already.
    rolled_back: AtomicI64,
    ended: tokio::sync::Notify,
}

/// A store failure with its code.
pub(crate) fn store_failure(error: StoreError) -> Failure {
    let code = match &error {
        StoreError::NotFound { .. } => Code::NotFound,
        StoreError::Invalid(_) => Code::InvalidRequest,
        StoreError::Full => Code::Busy,
        e if e.is_disk_full() => Code::DiskFull,
        _ => Code::Internal,
    };
    Failure::new(code, error.to_string())
}

/// Runs store work on a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Failure::new(Code::Internal, e.to_string()))?
        .map_err(store_failure)
}

impl Learning {
    /// A loop over its parts; nothing runs yet.
    pub fn new(store: Store, serving: Serving, data_dir: DataDir, events: EventHub) -> Self {
        Self(Arc::new(Inner {
            store,
            serving,
            data_dir,
            events,
            active: Mutex::new(None),
            starting: tokio::sync::Mutex::new(()),
            paused: AtomicBool::new(false),
            rolled_back: AtomicI64::new(-1),
            ended: tokio::sync::Notify::new(),
        }))
    }

    fn active(&self) -> MutexGuard<'_, Option<Active>> {
        self.0.active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The run that is under way.
    pub fn current(&self) -> Option<Run> {
        self.active().as_ref().map(|a| a.run.clone())
    }

    /// Keeps runs from starting while it is held.
    pub(crate) async fn hold(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.0.starting.lock().await
    }

    /// Whether a person paused training.
    pub fn is_paused(&self) -> bool {
        self.0.paused.load(Ordering::Relaxed)
    }

    /// Pauses: the active run checkpoints, and no other starts by itself.
    pub fn pause(&self) {
        self.0.paused.store(true, Ordering::Relaxed);
        self.wish(Wish::Pause);
    }

    /// Continues after a pause.
    pub fn resume(&self) {
        self.0.paused.store(false, Ordering::Relaxed);
        self.wish(Wish::Resume);
    }

    fn wish(&self, wish: Wish) {
        if let Some(active) = self.active().as_ref() {
            let _ = active.wishes.send(wish);
        }
    }

    /// Stops a run and deletes its checkpoint.
    ///
    /// # Errors
    /// `NotFound` when it is not under way.
    pub fn cancel(&self, id: i64) -> Result<(), Failure> {
        match self.active().as_ref() {
            Some(active) if active.run.id == id => {
                let _ = active.wishes.send(Wish::Cancel);
                Ok(())
            }
            _ => Err(Failure::new(
                Code::NotFound,
                format!("run {id} is not under way"),
            )),
        }
    }

    /// Stops the active run at its last checkpoint and waits for its end.
    pub async fn shutdown(&self) {
        let ended = self.0.ended.notified();
        if self.active().is_none() {
            return;
        }
        self.wish(Wish::Stop);
        let _ = tokio::time::timeout(Duration::from_secs(20), ended).await;
    }

    /// Starts a run on what has been rated and returns its number.
    ///
    /// # Errors
    /// `Conflict` while another runs, `NotEnoughLabels` with the reason.
    pub async fn start(&self, settings: RunSettings) -> Result<i64, Failure> {
        let _one_at_a_time = self.0.starting.lock().await;
        if let Some(run) = self.current() {
            return Err(Failure::new(
                Code::Conflict,
                format!("run {} is under way already", run.id),
            ));
        }
        let store = self.0.store.clone();
        let labels = blocking(move || store.fresh_labels()).await?;
        labels_suffice(labels, settings.least_labels)
            .map_err(|reason| Failure::new(Code::NotEnoughLabels, reason))?;

        let live = self.0.serving.state().live;
        let run = Run {
            state: "queued".into(),
            parent: live.to_string(),
            started_at: now(),
            dial: format!("{:?}", settings.dial).to_lowercase(),
            estimator: "auto".into(),
            config: json!({}),
            ..Run::default()
        };
        let (store, detail) = (self.0.store.clone(), run_detail(&run));
        let (id, batch, replay, version) = blocking(move || {
            let id = store.insert_run("queued", live, detail)?;
            let batch = store.claim_batch(id, BATCH)?;
            let replay = store.replay(REPLAY)?;
            let last = store.adapters()?.last().map_or(0, |a| a.version.0);
            Ok((id, batch, replay, AdapterVersion(last + 1)))
        })
        .await?;
        let run = Run { id, ..run };
        let (wishes, inbox) = mpsc::unbounded_channel();
        *self.active() = Some(Active {
            run: run.clone(),
            began: Instant::now(),
            wishes,
        });
        self.publish(&run);

        let (steps, held_out) = hold_out(batch);
        let parent = (!live.is_base()).then(|| AdapterFiles {
            version: live,
            dir: self.0.data_dir.adapter(live),
        });
        let request = TrainRequest {
            run: id,
            checkpoint_dir: self.0.data_dir.run(id),
            output_dir: self.0.data_dir.adapter(version),
            version,
            parent_state: parent
                .as_ref()
                .map(AdapterFiles::state_dir)
                .filter(|d| d.exists()),
            parent,
            live,
            steps,
            replay,
            held_out,
            dial: settings.dial,
            estimator: Estimator::Auto,
            overrides: settings.overrides.clone(),
            seed: id as u64,
        };
        let this = self.clone();
        tokio::spawn(async move { this.carry_out(settings, request, inbox).await });
        Ok(id)
    }

    async fn carry_out(
        &self,
        settings: RunSettings,
        request: TrainRequest,
        wishes: mpsc::UnboundedReceiver<Wish>,
    ) {
        let run = request.run;
        let held_out: Vec<_> = request.held_out.iter().map(|s| s.uid.clone()).collect();
        let activity = self.0.serving.activity();
        let (parent, version) = (request.live, request.version);
        let result = train(
            settings.worker,
            request,
            wishes,
            activity,
            |told| match told {
                Told::Progress(progress) => self.progress(&progress),
                Told::Paused(paused) => {
                    self.change(|r| r.state = if paused { "paused" } else { "training" }.into());
                }
            },
        )
        .await;
        let ended = match result {
            Ok(TrainResult::Done { outcome }) => {
                self.publish_candidate(&settings.base_model, parent, version, *outcome, &held_out)
                    .await
            }
            Ok(TrainResult::Failed { failure, dropped }) => {
                let store = self.0.store.clone();
                // What was looked at and cannot teach is set aside, so that the next run
                // does not stumble over the same answers; a cancelled run gives all back.
                let keep = failure.code == Code::NothingToLearn;
                let dropped = if keep { dropped } else { Vec::new() };
                let counted = count_reasons(&dropped);
                self.change(|r| r.steps_dropped = counted);
                let consumed =
                    blocking(move || store.consume_batch(run, Vec::new(), dropped)).await;
                consumed.and(Err(failure))
            }
            Err(failure) => Err(failure),
        };
        if let Err(failure) = ended {
            let store = self.0.store.clone();
            if let Err(error) = blocking(move || store.release_batch(run)).await {
                tracing::error!(%error, run, "a run's answers could not be given back");
            }
            let cancelled = failure.code == Code::Cancelled;
            tracing::warn!(run, %failure, "a run ended without an adapter");
            self.change(|r| {
                r.state = if cancelled { "cancelled" } else { "failed" }.into();
                r.error = Some(failure.message.clone());
            });
        }
        let finished = self.change(|r| {
            r.ended_at = Some(now());
            r.eta_s = None;
            r.phase = None;
        });
        if let Some(run) = finished {
            self.save(&run).await;
            *self.active() = None;
            self.publish(&run);
        }
        self.0.ended.notify_waiters();
    }

    /// Applies a change to the active run and publishes it.
    fn change(&self, change: impl FnOnce(&mut Run)) -> Option<Run> {
        let run = {
            let mut active = self.active();
            let active = active.as_mut()?;
            change(&mut active.run);
            active.run.clone()
        };
        self.publish(&run);
        Some(run)
    }

    fn publish(&self, run: &Run) {
        self.0.events.publish(EventBody::Run {
            run: Box::new(run.clone()),
        });
    }

    async fn save(&self, run: &Run) {
        let row = RunRow {
            id: run.id,
            state: run.state.clone(),
            parent: run.parent.parse().unwrap_or_default(),
            version: run.version.as_deref().and_then(|v| v.parse().ok()),
            detail: run_detail(run),
            started_at: run.started_at,
            ended_at: run.ended_at,
        };
        let store = self.0.store.clone();
        if let Err(error) = blocking(move || store.update_run(row)).await {
            tracing::error!(%error, run = run.id, "a run could not be stored");
        }
    }

    fn progress(&self, p: &TrainProgress) {
        let began = self.active().as_ref().map(|a| a.began);
        self.change(|r| {
            if r.state != "paused" {
                r.state = if p.phase == "evaluating" {
                    "checking"
                } else {
                    "training"
                }
                .into();
            }
            r.progress = p.fraction;
            r.phase = Some(p.phase.clone());
            r.eta_s = began.filter(|_| p.fraction > 0.02).map(|b| {
                let spent = b.elapsed().as_secs_f64();
                spent / p.fraction - spent
            });
        });
        if p.metrics.is_empty() {
            return;
        }
        let values: Vec<(String, f64)> = p
            .metrics
            .iter()
            .map(|m| (m.name.clone(), m.value))
            .collect();
        if let Err(error) = self.0.store.append_metrics(p.run, p.step, values) {
            tracing::warn!(%error, "metrics were not stored");
        }
        let values = p
            .metrics
            .iter()
            .map(|m| (m.name.clone(), json!(m.value)))
            .collect();
        self.0.events.publish(EventBody::Metric {
            run_id: p.run,
            step: p.step,
            values,
        });
    }

    /// Judges a candidate and, when it passes, makes it live.
    async fn publish_candidate(
        &self,
        base_model: &str,
        parent: AdapterVersion,
        version: AdapterVersion,
        outcome: TrainOutcome,
        held_out: &[spotter_core::id::StepUid],
    ) -> Result<(), Failure> {
        let decision = judge(&outcome.evaluation, Limits::default());
        let evaluation = serde_json::to_value(&outcome.evaluation).unwrap_or(Value::Null);
        let mut verdict = Verdict {
            promoted: decision.promoted,
            reasons: decision.reasons,
            evaluation,
        };
        let mut dropped = outcome.dropped.clone();
        let held = "held out, to judge the lesson by".to_owned();
        dropped.extend(held_out.iter().map(|uid| (uid.clone(), held.clone())));
        let summary: serde_json::Map<String, Value> = outcome
            .metrics
            .iter()
            .map(|m| (m.name.clone(), json!(m.value)))
            .collect();

        let mut promoted = decision.promoted;
        if promoted {
            let files = outcome.adapter.clone();
            let swapped = match self.0.serving.load_adapter(files).await {
                Ok(()) => self.0.serving.swap(Some(parent), version).await,
                Err(failure) => Err(failure),
            };
            if let Err(failure) = swapped {
                promoted = false;
                verdict.promoted = false;
                verdict
                    .reasons
                    .insert(0, format!("It passed, but did not go live: {failure}."));
            }
        }
        let row = AdapterRow {
            version,
            parent: Some(parent),
            state: if promoted || decision.promoted {
                AdapterState::Kept
            } else {
                AdapterState::Rejected
            },
            run: Some(outcome.run),
            dir: outcome.adapter.dir.to_string_lossy().into_owned(),
            base_model: base_model.to_owned(),
            steps_used: outcome.used.len() as u32,
            size_bytes: directory_bytes(&outcome.adapter.dir),
            metrics: Value::Object(summary),
            verdict: serde_json::to_value(&verdict).ok(),
            pinned: false,
            created_at: now(),
        };
        let (store, used, run) = (self.0.store.clone(), outcome.used.clone(), outcome.run);
        let for_store = dropped.clone();
        blocking(move || {
            store.put_adapter(row)?;
            if promoted {
                store.set_live(version)?;
            }
            store.consume_batch(run, used, for_store)
        })
        .await?;
        let changes = changes(&outcome);
        self.change(|r| {
            r.state = if promoted { "promoted" } else { "rejected" }.into();
            r.version = Some(version.to_string());
            r.progress = 1.0;
            r.estimator = estimator_name(outcome.estimator).into();
            r.estimator_reason = Some(outcome.estimator_reason.clone());
            r.grad_scope = Some(outcome.grad_scope.clone());
            r.config = outcome.config.clone();
            r.steps_used = outcome.used.len() as u32;
            r.steps_dropped = count_reasons(&dropped);
            r.changes = Some(changes);
            r.verdict = Some(verdict);
        });
        self.0.events.publish(EventBody::Adapter {
            live: self.0.serving.state().live.to_string(),
            adapter: None,
        });
        Ok(())
    }

    /// Makes a version live by hand.
    ///
    /// # Errors
    /// `NotFound` when it is unknown, or what the worker says.
    pub async fn activate(&self, version: AdapterVersion) -> Result<(), Failure> {
        if !version.is_base() {
            let store = self.0.store.clone();
            let known = blocking(move || store.adapters()).await?;
            let row = known.iter().find(|a| a.version == version).ok_or_else(|| {
                let list: Vec<String> = known.iter().map(|a| a.version.to_string()).collect();
                Failure::new(
                    Code::NotFound,
                    format!(
                        "there is no adapter {version}; there are base {}",
                        list.join(" ")
                    ),
                )
            })?;
            if !self
                .0
                .serving
                .state()
                .loaded
                .iter()
                .any(|a| a.version == version)
            {
                self.0
                    .serving
                    .load_adapter(AdapterFiles {
                        version,
                        dir: row.dir.clone().into(),
                    })
                    .await?;
            }
        }
        self.0.serving.swap(None, version).await?;
        let store = self.0.store.clone();
        blocking(move || store.set_live(version)).await?;
        self.0.events.publish(EventBody::Adapter {
            live: version.to_string(),
            adapter: None,
        });
        Ok(())
    }

    /// Makes the live version's parent live.
    ///
    /// # Errors
    /// `Conflict` when the base is live already.
    pub async fn rollback(&self) -> Result<AdapterVersion, Failure> {
        let live = self.0.serving.state().live;
        if live.is_base() {
            return Err(Failure::new(
                Code::Conflict,
                "the base model is live; there is nothing to roll back",
            ));
        }
        let store = self.0.store.clone();
        let known = blocking(move || store.adapters()).await?;
        let parent = known
            .iter()
            .find(|a| a.version == live)
            .and_then(|a| a.parent)
            .unwrap_or_default();
        self.activate(parent).await?;
        Ok(parent)
    }

    /// Rolls back when the live version is liked clearly less than its parent was.
    ///
    /// # Errors
    /// When the store or the worker fails.
    pub async fn watch_approval(&self) -> Result<(), Failure> {
        let live = self.0.serving.state().live;
        if live.is_base() || self.0.rolled_back.load(Ordering::Relaxed) == i64::from(live.0) {
            return Ok(());
        }
        let store = self.0.store.clone();
        let (approval, adapters) =
            blocking(move || Ok((store.approval()?, store.adapters()?))).await?;
        let parent = adapters
            .iter()
            .find(|a| a.version == live)
            .and_then(|a| a.parent)
            .unwrap_or_default();
        let rate = |version| {
            approval
                .iter()
                .find(|(v, ..)| *v == version)
                .map(|(_, up, down)| (up + down, *up as f64 / (up + down).max(1) as f64))
        };
        if let (Some((n, now)), Some((m, before))) = (rate(live), rate(parent))
            && n >= WATCHED
            && m >= WATCHED
            && now < before - APPROVAL_FALL
        {
            self.0
                .rolled_back
                .store(i64::from(live.0), Ordering::Relaxed);
            let message = format!(
                "{live} is liked less ({:.0} % of {n}) than {parent} was ({:.0} % of {m}), so {parent} answers again.",
                now * 100.0,
                before * 100.0
            );
            tracing::warn!("{message}");
            self.rollback().await?;
            self.0.events.publish(EventBody::Alert {
                level: "warn".into(),
                code: "rolled_back".into(),
                message,
            });
        }
        Ok(())
    }
}

/// Sets some of a large batch aside for the gate, the same ones whenever it is repeated.
/// Corrections are never held out: they teach too much.
fn hold_out(batch: Vec<TrainStep>) -> (Vec<TrainStep>, Vec<TrainStep>) {
    if batch.len() < HOLD_OUT_FROM {
        return (batch, Vec::new());
    }
    batch.into_iter().partition(|step| {
        let sum: u64 = step.uid.as_str().bytes().map(u64::from).sum();
        step.correction.is_some()
            || step.reward.as_ref().is_none_or(|r| r.credit < 1.0)
            || !sum.is_multiple_of(HOLD_OUT_SHARE)
    })
}

fn count_reasons(dropped: &[(spotter_core::id::StepUid, String)]) -> Vec<Dropped> {
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for (_, reason) in dropped {
        *counts.entry(reason.as_str()).or_default() += 1;
    }
    counts
        .into_iter()
        .map(|(reason, count)| Dropped {
            reason: reason.to_owned(),
            count,
        })
        .collect()
}

fn changes(outcome: &TrainOutcome) -> Changes {
    let mean = |liked: bool, after: bool| {
        let values: Vec<f64> = outcome
            .changes
            .iter()
            .filter(|c| (c.reward > 0.0) == liked)
            .map(|c| if after { c.after } else { c.before })
            .collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    Changes {
        liked_before: mean(true, false),
        liked_after: mean(true, true),
        disliked_before: mean(false, false),
        disliked_after: mean(false, true),
        items: outcome
            .changes
            .iter()
            .filter_map(|c| serde_json::to_value(c).ok())
            .collect(),
    }
}

fn estimator_name(estimator: Estimator) -> &'static str {
    match estimator {
        Estimator::Auto => "auto",
        Estimator::Ppo => "ppo",
        Estimator::Binary => "binary",
        Estimator::Grpo => "grpo",
        Estimator::Rloo => "rloo",
        Estimator::Kto => "kto",
        Estimator::Dpo => "dpo",
    }
}

/// Bytes of a directory's files, one level deep.
pub(crate) fn directory_bytes(dir: &std::path::Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return 0;
    };
    entries
        .flatten()
        .filter_map(|e| e.metadata().ok())
        .map(|m| m.len())
        .sum()
}

/// What of a run is kept as JSON.
fn run_detail(run: &Run) -> Value {
    serde_json::to_value(run).unwrap_or_else(|_| json!({}))
}

/// A stored run as the API shows it.
pub(crate) fn stored_run(row: RunRow) -> Run {
    let mut run: Run = serde_json::from_value(row.detail.clone()).unwrap_or_default();
    if let Some(error) = row.detail["error"].as_str() {
        run.error = Some(error.to_owned());
    }
    run.id = row.id;
    run.state = row.state;
    run.started_at = row.started_at;
    run.ended_at = row.ended_at;
    run.parent = row.parent.to_string();
    run.version = row.version.map(|v| v.to_string());
    run
}

#[cfg(test)]
mod tests {
    use spotter_core::AdapterVersion;
    use spotter_core::id::{StepUid, TrajectoryUid};
    use spotter_core::reward::RewardSource;
    use spotter_core::train::{StepReward, TrainStep};

    use super::hold_out;

    fn step(i: usize) -> TrainStep {
        TrainStep {
            uid: StepUid::from(format!("step{i:04}")),
            trajectory: TrajectoryUid::from("t"),
            prompt_uid: "p".into(),
            index: i as u32,
            is_last: true,
            prompt_ids: vec![1],
            response_ids: vec![2],
            logprobs: vec![-1.0],
            adapter: AdapterVersion::BASE,
            temperature: 1.0,
            top_p: 1.0,
            reward: Some(StepReward {
                value: 1.0,
                source: RewardSource::User,
                credit: 1.0,
            }),
            correction: i.is_multiple_of(5).then(|| "better".to_owned()),
        }
    }

    #[test]
    fn only_a_large_batch_gives_some_up_and_never_a_correction() {
        let (train, held) = hold_out((0..23).map(step).collect());
        assert_eq!((train.len(), held.len()), (23, 0));
        let (train, held) = hold_out((0..60).map(step).collect());
        assert_eq!(train.len() + held.len(), 60);
        assert!((3..20).contains(&held.len()), "{} held out", held.len());
        assert!(held.iter().all(|s| s.correction.is_none()));
        let again = hold_out((0..60).map(step).collect()).1;
        assert_eq!(again.len(), held.len(), "a repeated run holds out the same");
    }
}
