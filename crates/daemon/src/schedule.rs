//! When to train, and why not now: pure functions of what is known.

use spotter_store::LabelCounts;

/// When training may start by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// As soon as there are enough labels.
    #[default]
    Always,
    /// When no request has come for some minutes.
    Idle {
        /// The minutes.
        minutes: u64,
    },
    /// Between two times of day.
    Hours {
        /// When it may, as `HH:MM`.
        from: String,
        /// Until when.
        until: String,
        /// Whether it is that time now.
        open: bool,
    },
    /// Only when a person asks.
    Manual,
}

/// How many labels are needed.
#[derive(Clone, Copy, Debug)]
pub struct Floor {
    /// For a run that starts by itself.
    pub automatic: u64,
    /// For a run that a person asks for.
    pub least: u64,
}

/// Whether a run may start, or one sentence why not.
pub fn labels_suffice(labels: LabelCounts, needed: u64) -> Result<(), String> {
    if labels.labels < needed {
        let plural = if labels.labels == 1 {
            "answer"
        } else {
            "answers"
        };
        return Err(format!(
            "{} rated {plural} of {needed} that a lesson needs; rate a few more.",
            labels.labels
        ));
    }
    if labels.negative < 2 && labels.corrections == 0 {
        return Err(
            "A lesson needs at least two disliked answers or one correction: only praise says little about what to change."
                .to_owned(),
        );
    }
    Ok(())
}

/// What the schedule knows.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Fresh labels.
    pub labels: LabelCounts,
    /// Seconds since the last request.
    pub idle_seconds: u64,
    /// Whether a person paused training.
    pub paused: bool,
    /// Whether a model is ready.
    pub ready: bool,
}

/// The state's name for the API and one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Start a run now.
    Start,
    /// Not now: state and reason.
    Wait(&'static str, String),
}

/// Whether to start a run now.
pub fn decide(policy: &Policy, floor: Floor, now: Now) -> Decision {
    if now.paused {
        return Decision::Wait("paused", "You paused training.".into());
    }
    if *policy == Policy::Manual {
        let reason = match labels_suffice(now.labels, floor.least) {
            Ok(()) => "A lesson is ready; training starts only when you ask for it.".to_owned(),
            Err(reason) => format!("Training starts only when you ask for it. {reason}"),
        };
        return Decision::Wait("off", reason);
    }
    if let Err(reason) = labels_suffice(now.labels, floor.automatic) {
        return Decision::Wait("collecting", reason);
    }
    if !now.ready {
        return Decision::Wait("waiting", "The model is not loaded yet.".into());
    }
    if let Policy::Hours {
        from,
        until,
        open: false,
    } = policy
    {
        return Decision::Wait(
            "waiting",
            format!("A lesson is ready; it waits for {from}, and trains until {until}."),
        );
    }
    if let Policy::Idle { minutes } = policy
        && now.idle_seconds < minutes * 60
    {
        let left = (minutes * 60 - now.idle_seconds).div_ceil(60);
        return Decision::Wait(
            "waiting",
            format!("Waiting until your agent has been quiet for {minutes} minutes; {left} to go."),
        );
    }
    Decision::Start
}

/// Whether a time of day (minutes since midnight) lies between two, across midnight too.
/// Equal times mean the whole day; a text that is no time means never.
pub fn is_open(from: &str, until: &str, minute: u32) -> bool {
    let parse = |text: &str| -> Option<u32> {
        let (h, m) = text.split_once(':')?;
        let (h, m) = (h.parse::<u32>().ok()?, m.parse::<u32>().ok()?);
        (h < 24 && m < 60).then_some(h * 60 + m)
    };
    match (parse(from), parse(until)) {
        (Some(a), Some(b)) if a < b => (a..b).contains(&minute),
        (Some(a), Some(b)) if a > b => minute >= a || minute < b,
        (Some(_), Some(_)) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use spotter_store::LabelCounts;

    use super::{Decision, Floor, Now, Policy, decide, is_open, labels_suffice};

    const FLOOR: Floor = Floor {
        automatic: 16,
        least: 8,
    };

    fn now(labels: u64, negative: u64, corrections: u64) -> Now {
        Now {
            labels: LabelCounts {
                labels,
                negative,
                corrections,
            },
            idle_seconds: 30,
            paused: false,
            ready: true,
        }
    }

    fn state(policy: Policy, now: Now) -> &'static str {
        match decide(&policy, FLOOR, now) {
            Decision::Start => "start",
            Decision::Wait(state, reason) => {
                assert!(reason.ends_with('.'), "a sentence: {reason}");
                state
            }
        }
    }

    #[test]
    fn labels_decide_first_then_the_policy() {
        assert_eq!(state(Policy::Always, now(15, 5, 0)), "collecting");
        assert_eq!(state(Policy::Always, now(16, 1, 0)), "collecting");
        assert_eq!(state(Policy::Always, now(16, 0, 1)), "start");
        assert_eq!(state(Policy::Idle { minutes: 5 }, now(16, 2, 0)), "waiting");
        assert_eq!(state(Policy::Idle { minutes: 0 }, now(16, 2, 0)), "start");
        let hours = |open| Policy::Hours {
            from: "22:00".into(),
            until: "06:00".into(),
            open,
        };
        assert_eq!(state(hours(false), now(16, 2, 0)), "waiting");
        assert_eq!(state(hours(true), now(16, 2, 0)), "start");
        assert_eq!(state(Policy::Manual, now(99, 9, 9)), "off");
        assert_eq!(
            state(
                Policy::Always,
                Now {
                    paused: true,
                    ..now(99, 9, 9)
                }
            ),
            "paused"
        );
        assert_eq!(
            state(
                Policy::Always,
                Now {
                    ready: false,
                    ..now(99, 9, 9)
                }
            ),
            "waiting"
        );
    }

    #[test]
    fn hours_may_cross_midnight() {
        assert!(is_open("22:00", "06:00", 23 * 60) && is_open("22:00", "06:00", 60));
        assert!(!is_open("22:00", "06:00", 12 * 60));
        assert!(
            is_open("09:00", "17:30", 17 * 60 + 29) && !is_open("09:00", "17:30", 17 * 60 + 30)
        );
        assert!(!is_open("9 o'clock", "17:00", 600));
    }

    #[test]
    fn a_person_may_ask_earlier() {
        let labels = |labels, negative| LabelCounts {
            labels,
            negative,
            corrections: 0,
        };
        assert!(labels_suffice(labels(8, 2), FLOOR.least).is_ok());
        assert!(labels_suffice(labels(7, 2), FLOOR.least).is_err());
        assert!(labels_suffice(labels(8, 0), FLOOR.least).is_err());
    }
}
