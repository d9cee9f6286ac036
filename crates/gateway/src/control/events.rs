//! The event stream: what happened, in order, with ids a client can resume from.
//!
//! [`EventHub`] keeps the recent past and owns no policy; whoever knows that
//! something happened publishes it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;
use utoipa::ToSchema;

use super::dto::{Adapter, DownloadProgress, Run, Status, StepSummary};

/// How many past events a reconnecting client can still receive.
const KEPT_EVENTS: usize = 1024;

/// What happened.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum EventBody {
    /// The state of everything changed; only the latest matters.
    Status(Box<Status>),
    /// A model call was answered and stored.
    Step {
        /// The step.
        step: Box<StepSummary>,
    },
    /// A step's rating changed.
    Rating {
        /// The step as it is now.
        step: Box<StepSummary>,
    },
    /// A run changed state or moved on.
    Run {
        /// The run.
        run: Box<Run>,
    },
    /// New values of a run's metrics.
    Metric {
        /// The run.
        run_id: i64,
        /// The optimiser step.
        step: u32,
        /// Values by glossary name.
        #[schema(value_type = Object)]
        values: serde_json::Map<String, serde_json::Value>,
    },
    /// The live adapter changed, or an adapter was added or removed.
    Adapter {
        /// The live version.
        live: String,
        /// The adapter concerned.
        #[serde(skip_serializing_if = "Option::is_none")]
        adapter: Option<Box<Adapter>>,
    },
    /// A download moved on.
    Download {
        /// The model.
        name: String,
        /// Its state, as in the list of models.
        state: String,
        /// Its progress.
        #[serde(skip_serializing_if = "Option::is_none")]
        progress: Option<DownloadProgress>,
    },
    /// An export moved on.
    Export {
        /// The version that is written out.
        version: String,
        /// In which form.
        format: String,
        /// Share done, 0 to 1.
        fraction: f64,
    },
    /// Something a person should know.
    Alert {
        /// `info`, `warn` or `error`.
        level: String,
        /// A code the interface translates.
        code: String,
        /// The words.
        message: String,
    },
}

impl EventBody {
    /// Events with equal keys replace one another when they come faster than
    /// the stream is sent; `None` is always sent.
    fn coalescing_key(&self) -> Option<String> {
        match self {
            Self::Status(_) => Some("status".to_owned()),
            Self::Run { run } => Some(format!("run {} {}", run.id, run.state)),
            Self::Download { name, state, .. } => Some(format!("download {name} {state}")),
            Self::Export {
                version, format, ..
            } => Some(format!("export {version} {format}")),
            Self::Rating { step } => Some(format!("rating {}", step.uid)),
            Self::Step { .. } | Self::Metric { .. } | Self::Adapter { .. } | Self::Alert { .. } => {
                None
            }
        }
    }
}

/// An event with its id.
#[derive(Clone, Debug)]
pub struct Event {
    /// Grows by one per event while the daemon lives.
    pub id: u64,
    /// What happened.
    pub body: EventBody,
}

struct Recent {
    next_id: u64,
    kept: VecDeque<Event>,
}

/// Where events are published and followed; clones share one stream.
#[derive(Clone)]
pub struct EventHub {
    recent: Arc<Mutex<Recent>>,
    sender: broadcast::Sender<Event>,
}

impl Default for EventHub {
    fn default() -> Self {
        Self {
            recent: Arc::new(Mutex::new(Recent {
                next_id: 1,
                kept: VecDeque::new(),
            })),
            sender: broadcast::channel(KEPT_EVENTS).0,
        }
    }
}

impl EventHub {
    /// Publishes; never waits.
    pub fn publish(&self, body: EventBody) {
        // Sending under the lock keeps ids in order for every follower.
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let event = Event {
            id: recent.next_id,
            body,
        };
        recent.next_id += 1;
        if recent.kept.len() == KEPT_EVENTS {
            recent.kept.pop_front();
        }
        recent.kept.push_back(event.clone());
        // An error only means that nobody is following.
        let _ = self.sender.send(event);
    }

    /// The events after `last` that are still kept, and the ones to come.
    pub fn follow(&self, last: Option<u64>) -> (Vec<Event>, broadcast::Receiver<Event>) {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let missed = match last {
            // An id from the future belongs to an earlier daemon; everything is news.
            Some(last) if last < recent.next_id => recent
                .kept
                .iter()
                .filter(|e| e.id > last)
                .cloned()
                .collect(),
            Some(_) => recent.kept.iter().cloned().collect(),
            None => Vec::new(),
        };
        (missed, self.sender.subscribe())
    }
}

/// Keeps the latest of the events that replace one another, in order.
pub(crate) fn coalesce(events: Vec<Event>) -> Vec<Event> {
    let mut kept: Vec<Event> = Vec::with_capacity(events.len());
    let mut seen = std::collections::HashSet::new();
    for event in events.into_iter().rev() {
        let replaced = event
            .body
            .coalescing_key()
            .is_some_and(|key| !seen.insert(key));
        if !replaced {
            kept.push(event);
        }
    }
    kept.reverse();
    kept
}

#[cfg(test)]
mod tests {
    use super::{EventBody, EventHub, coalesce};
    use crate::control::dto::Status;

    fn alert(code: &str) -> EventBody {
        EventBody::Alert {
            level: "info".into(),
            code: code.into(),
            message: String::new(),
        }
    }

    #[test]
    fn a_reconnecting_follower_misses_nothing() {
        let hub = EventHub::default();
        hub.publish(alert("a"));
        hub.publish(alert("b"));
        let (missed, _) = hub.follow(Some(1));
        assert_eq!(missed.len(), 1);
        assert_eq!(missed[0].id, 2);
        assert_eq!(hub.follow(Some(99)).0.len(), 2, "ids of an earlier daemon");
        assert!(hub.follow(None).0.is_empty());
    }

    #[test]
    fn only_the_latest_status_is_sent() {
        let hub = EventHub::default();
        hub.publish(EventBody::Status(Box::default()));
        hub.publish(alert("a"));
        hub.publish(EventBody::Status(Box::new(Status {
            uptime_s: 5,
            ..Status::default()
        })));
        let events = coalesce(hub.follow(Some(0)).0);
        assert_eq!(events.len(), 2);
        assert_eq!(events[1].id, 3);
    }
}
