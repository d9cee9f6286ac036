//! Adapter versions.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A version of the LoRA adapter. Zero is the base model without an adapter.
///
/// Its text form is `base`, `v1`, `v2`, …, in headers, API paths and JSON alike;
/// a bare number is read too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterVersion(pub u32);

impl AdapterVersion {
    /// The base model, with no adapter.
    pub const BASE: Self = Self(0);

    /// Whether this is the base model.
    pub fn is_base(self) -> bool {
        self.0 == 0
    }
}

impl std::fmt::Display for AdapterVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_base() {
            f.write_str("base")
        } else {
            write!(f, "v{}", self.0)
        }
    }
}

/// The text was neither `base`, nor `v` and a number, nor a number.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("'{0}' is not an adapter version; write base, v1, v2, …")]
pub struct ParseVersionError(pub String);

impl std::str::FromStr for AdapterVersion {
    type Err = ParseVersionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.eq_ignore_ascii_case("base") {
            return Ok(Self::BASE);
        }
        let digits = text.strip_prefix(['v', 'V']).unwrap_or(text);
        digits
            .parse()
            .map(Self)
            .map_err(|_| ParseVersionError(text.to_owned()))
    }
}

impl Serialize for AdapterVersion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for AdapterVersion {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Raw {
            Number(u32),
            Text(String),
        }
        match Raw::deserialize(deserializer)? {
            Raw::Number(n) => Ok(Self(n)),
            Raw::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::AdapterVersion;

    #[test]
    fn text_form_round_trips() {
        for version in [AdapterVersion::BASE, AdapterVersion(1), AdapterVersion(42)] {
            assert_eq!(version.to_string().parse(), Ok(version));
            let json = serde_json::to_string(&version).expect("serialises");
            assert_eq!(
                serde_json::from_str::<AdapterVersion>(&json).expect("parses"),
                version
            );
        }
        assert_eq!("7".parse(), Ok(AdapterVersion(7)));
        assert!("latest".parse::<AdapterVersion>().is_err());
    }
}
