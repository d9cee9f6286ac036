//! Scalar feedback and its precedence.

use serde::{Deserialize, Serialize};

/// Where a reward came from. An explicit user value always wins; no automatic
/// source ever overrides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RewardSource {
    /// A person's thumb or correction.
    User,
    /// The task's own result.
    Outcome,
    /// A rule over the answer.
    Rule,
    /// A model's judgement (weight 0.3).
    Judge,
    /// Inferred from what happened next.
    Implicit,
}

impl RewardSource {
    /// Higher wins: user, then outcome and rule, then judge, then implicit.
    pub fn precedence(self) -> u8 {
        match self {
            Self::User => 3,
            Self::Outcome | Self::Rule => 2,
            Self::Judge => 1,
            Self::Implicit => 0,
        }
    }

    /// How much one such reward counts in the loss.
    pub fn weight(self) -> f64 {
        match self {
            Self::User | Self::Outcome | Self::Rule => 1.0,
            Self::Judge | Self::Implicit => 0.3,
        }
    }

    /// The lower-case name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Outcome => "outcome",
            Self::Rule => "rule",
            Self::Judge => "judge",
            Self::Implicit => "implicit",
        }
    }
}

impl std::str::FromStr for RewardSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "user" => Ok(Self::User),
            "outcome" => Ok(Self::Outcome),
            "rule" => Ok(Self::Rule),
            "judge" => Ok(Self::Judge),
            "implicit" => Ok(Self::Implicit),
            other => Err(format!("'{other}' is not a reward source")),
        }
    }
}

/// One append-only reward row, on a step or on a trajectory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reward {
    /// In [-1, 1]; `None` withdraws the earlier value of this source.
    pub value: Option<f64>,
    /// Where it came from.
    pub source: RewardSource,
    /// Reason tags, from a fixed list or free.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// A free note.
    #[serde(default)]
    pub note: Option<String>,
    /// What the answer should have been.
    #[serde(default)]
    pub correction: Option<String>,
    /// Milliseconds since the Unix epoch.
    pub created_at: i64,
}
