//! Typed unique ids: 32 lower-case hexadecimal digits, time-ordered (UUID v7).
//!
//! Letters and digits only, because clients such as OpenClaw rewrite ids to
//! alphanumerics and `chatcmpl-<uid>` must survive that.

use serde::{Deserialize, Serialize};

macro_rules! uid {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// A fresh id, greater than every earlier one made on this machine.
            #[allow(clippy::new_without_default)]
            pub fn new() -> Self {
                Self(uuid::Uuid::now_v7().simple().to_string())
            }

            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

uid!(
    /// One model call.
    StepUid
);
uid!(
    /// One task attempt. The Claw-R1 handshake hands it to the client.
    TrajectoryUid
);
uid!(
    /// One agent conversation, as Spotter names it.
    SessionUid
);

#[cfg(test)]
mod tests {
    use super::StepUid;

    #[test]
    fn ids_are_alphanumeric_and_ordered() {
        let (a, b) = (StepUid::new(), StepUid::new());
        assert!(a < b, "{a} was made before {b}");
        assert!(a.as_str().chars().all(|c| c.is_ascii_alphanumeric()));
        assert_eq!(a.as_str().len(), 32);
    }
}
