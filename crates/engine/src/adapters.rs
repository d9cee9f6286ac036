//! Adapter versions in memory, the live one, and turns that stay on theirs.
//!
//! `current` is an alias for an immutable version and is replaced by compare-and-swap.
//! A sequence holds its adapter, so an unloaded version is freed when its last sequence
//! ends. A call of a turn that began on one version stays on it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spotter_core::generate::AdapterChoice;
use spotter_core::{AdapterVersion, Code, code::Failure};
use spotter_model::LoraAdapter;

/// How long a silent turn keeps its version.
const TURN_LIFETIME: Duration = Duration::from_secs(15 * 60);

/// The adapters of a serving engine.
#[derive(Debug, Default)]
pub struct Adapters {
    loaded: HashMap<AdapterVersion, Arc<LoraAdapter>>,
    current: AdapterVersion,
    turns: HashMap<String, (AdapterVersion, Instant)>,
}

/// A version and its weights; the base has none.
pub type Selected = (AdapterVersion, Option<Arc<LoraAdapter>>);

impl Adapters {
    /// The live version.
    pub fn current(&self) -> AdapterVersion {
        self.current
    }

    /// Makes a version available without making it live.
    pub fn insert(&mut self, version: AdapterVersion, adapter: Arc<LoraAdapter>) {
        self.loaded.insert(version, adapter);
    }

    /// Makes `to` live if `expected` is live now (or is `None`).
    ///
    /// # Errors
    /// `Conflict` when another version is live, `ModelNotFound` when `to` is not loaded.
    pub fn swap(
        &mut self,
        expected: Option<AdapterVersion>,
        to: AdapterVersion,
    ) -> Result<AdapterVersion, Failure> {
        if let Some(expected) = expected.filter(|e| *e != self.current) {
            return Err(Failure::new(
                Code::Conflict,
                format!(
                    "{} is live, not {expected}; nothing was changed",
                    self.current
                ),
            ));
        }
        self.find(to)?;
        self.current = to;
        Ok(to)
    }

    /// Forgets a version; the live one stays.
    pub fn remove(&mut self, version: AdapterVersion) {
        if version != self.current {
            self.loaded.remove(&version);
        }
    }

    fn find(&self, version: AdapterVersion) -> Result<Option<Arc<LoraAdapter>>, Failure> {
        if version.is_base() {
            return Ok(None);
        }
        self.loaded.get(&version).cloned().map(Some).ok_or_else(|| {
            let mut known: Vec<AdapterVersion> = self.loaded.keys().copied().collect();
            known.push(AdapterVersion::BASE);
            known.sort_unstable();
            let list: Vec<String> = known.iter().map(ToString::to_string).collect();
            Failure::new(
                Code::ModelNotFound,
                format!(
                    "there is no adapter {version}; these are loaded: {}",
                    list.join(", ")
                ),
            )
        })
    }

    /// Whether a request that names a version can be answered.
    ///
    /// # Errors
    /// `ModelNotFound`, with the list of what is loaded.
    pub fn check(&self, choice: AdapterChoice) -> Result<(), Failure> {
        match choice {
            AdapterChoice::Current => Ok(()),
            AdapterChoice::Version(version) => self.find(version).map(drop),
        }
    }

    /// The version for a new request.
    ///
    /// # Errors
    /// `ModelNotFound` when a version was named that is not loaded.
    pub fn select(
        &mut self,
        choice: AdapterChoice,
        turn: Option<&str>,
    ) -> Result<Selected, Failure> {
        let version = match (choice, turn) {
            (AdapterChoice::Version(version), _) => version,
            (AdapterChoice::Current, None) => self.current,
            (AdapterChoice::Current, Some(turn)) => {
                let now = Instant::now();
                self.turns
                    .retain(|_, (_, used)| now.duration_since(*used) < TURN_LIFETIME);
                let loaded = &self.loaded;
                let current = self.current;
                let entry = self.turns.entry(turn.to_owned()).or_insert((current, now));
                if !entry.0.is_base() && !loaded.contains_key(&entry.0) {
                    entry.0 = current;
                }
                entry.1 = now;
                entry.0
            }
        };
        Ok((version, self.find(version)?))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spotter_core::generate::AdapterChoice;
    use spotter_core::{AdapterVersion, Code};
    use spotter_model::{LoraAdapter, LoraConfig, config::Config};

    use super::Adapters;

    fn adapter() -> Arc<LoraAdapter> {
        let config = Config {
            architecture: "llama".into(),
            hidden: 4,
            intermediate: 4,
            layers: 1,
            heads: 1,
            kv_heads: 1,
            head_dim: 4,
            vocab: 4,
            context: 8,
            norm_eps: 1e-5,
            rope_theta: 1e4,
            rope_scaling: Default::default(),
        };
        Arc::new(LoraAdapter::init(&config, LoraConfig::default(), 0).expect("adapter"))
    }

    #[test]
    fn swaps_compare_and_turns_stay() {
        let (base, v1, v2) = (AdapterVersion::BASE, AdapterVersion(1), AdapterVersion(2));
        let mut adapters = Adapters::default();
        assert_eq!(
            adapters.swap(None, v1).expect_err("not loaded").code,
            Code::ModelNotFound
        );
        adapters.insert(v1, adapter());
        adapters.insert(v2, adapter());
        let select =
            |a: &mut Adapters, turn| a.select(AdapterChoice::Current, turn).expect("selects").0;
        assert_eq!(select(&mut adapters, Some("t")), base);
        adapters.swap(Some(base), v1).expect("base is live");
        assert_eq!(
            adapters.swap(Some(base), v2).expect_err("v1 is live").code,
            Code::Conflict
        );
        assert_eq!(select(&mut adapters, Some("t")), base, "the turn stays");
        assert_eq!(select(&mut adapters, Some("u")), v1);
        assert_eq!(select(&mut adapters, None), v1);
        let named = adapters
            .select(AdapterChoice::Version(v2), Some("t"))
            .expect("loaded")
            .0;
        assert_eq!(named, v2);
        adapters.remove(v1);
        assert_eq!(
            select(&mut adapters, None),
            v1,
            "the live version is never removed"
        );
        adapters.remove(v2);
        let gone = adapters
            .select(AdapterChoice::Version(v2), None)
            .expect_err("removed");
        assert!(gone.message.contains("base, v1"), "{}", gone.message);
    }
}
