//! Steps and their rewards. A step is kept as zstd-compressed JSON; rewards are append-only.

use rusqlite::{OptionalExtension, params};
use spotter_core::reward::Reward;
use spotter_core::step::Step;

use crate::{Store, StoreError};

impl Store {
    /// Appends `steps` in one transaction, creating their sessions and trajectories. On return they
    /// are committed. A uid that is already stored is kept as it is.
    ///
    /// # Errors
    /// When a step cannot be encoded or SQLite fails; then none of `steps` is stored.
    pub fn append_steps(&mut self, steps: &[Step]) -> Result<(), StoreError> {
        let transaction = self.connection.transaction()?;
        for step in steps {
            let (session, trajectory) = (step.session.to_string(), step.trajectory.to_string());
            transaction.execute(
                "INSERT OR IGNORE INTO session (uid, created_at) VALUES (?1, ?2)",
                params![session, step.created_at],
            )?;
            transaction.execute(
                "INSERT OR IGNORE INTO trajectory (uid, session_id, prompt_uid, channel, state, created_at)
                 SELECT ?1, id, ?3, 'train', 'open', ?4 FROM session WHERE uid = ?2",
                params![trajectory, session, step.prompt_uid, step.created_at],
            )?;
            let content = zstd::encode_all(serde_json::to_vec(step)?.as_slice(), 3)?;
            transaction.execute(
                "INSERT OR IGNORE INTO step (uid, trajectory_id, content, created_at)
                 SELECT ?1, id, ?3, ?4 FROM trajectory WHERE uid = ?2",
                params![step.uid.to_string(), trajectory, content, step.created_at],
            )?;
        }
        Ok(transaction.commit()?)
    }

    /// Reads one step, or `None` when the uid is unknown.
    ///
    /// # Errors
    /// When SQLite fails or the stored content cannot be decoded.
    pub fn step(&self, uid: &str) -> Result<Option<Step>, StoreError> {
        let content: Option<Vec<u8>> = self
            .connection
            .query_row("SELECT content FROM step WHERE uid = ?1", [uid], |row| {
                row.get(0)
            })
            .optional()?;
        match content {
            Some(bytes) => Ok(Some(serde_json::from_slice(&zstd::decode_all(
                bytes.as_slice(),
            )?)?)),
            None => Ok(None),
        }
    }

    /// Appends a reward to a step; `false` when the uid is unknown.
    ///
    /// # Errors
    /// When the reward cannot be encoded or SQLite fails.
    pub fn add_reward(&mut self, uid: &str, reward: &Reward) -> Result<bool, StoreError> {
        let rows = self.connection.execute(
            "INSERT INTO reward (step_id, content) SELECT id, ?2 FROM step WHERE uid = ?1",
            params![uid, serde_json::to_string(reward)?],
        )?;
        Ok(rows == 1)
    }

    /// All rewards of a step, oldest first.
    ///
    /// # Errors
    /// When SQLite fails or a stored reward cannot be decoded.
    pub fn rewards(&self, uid: &str) -> Result<Vec<Reward>, StoreError> {
        let mut statement = self.connection.prepare_cached(
            "SELECT reward.content FROM reward JOIN step ON step.id = step_id
             WHERE step.uid = ?1 ORDER BY reward.id",
        )?;
        let rows = statement.query_map([uid], |row| row.get::<_, String>(0))?;
        rows.map(|text| Ok(serde_json::from_str(&text?)?)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_step_and_its_rewards_survive_reopening_and_a_repeat_adds_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let step: Step = serde_json::from_value(json!({
            "uid": "s1", "session": "c1", "trajectory": "t1", "prompt_uid": "p1", "turn": "u1",
            "index": 0, "kind": "main", "kind_reason": "", "adapter": "v1", "base_model": "tiny",
            "prompt_ids": [1, 2, 3], "response_ids": [4, 5], "logprobs": [-0.1, -2.345_678],
            "model_logprobs": [-0.1, -2.0], "sampling": spotter_core::generate::Sampling::default(),
            "finish_reason": spotter_core::generate::FinishReason::Stop, "cached_tokens": 0,
            "first_token_ms": 1, "total_ms": 2, "client": "test", "user_text": "你好",
            "answer_text": "hi", "request": {}, "response": {}, "created_at": 7
        }))
        .unwrap();
        let reward: Reward =
            serde_json::from_value(json!({"value": 1.0, "source": "user", "created_at": 8}))
                .unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        store.append_steps(&[step.clone(), step.clone()]).unwrap();
        assert!(store.add_reward("s1", &reward).unwrap());
        assert!(!store.add_reward("unknown", &reward).unwrap());
        drop(store);
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(store.step("s1").unwrap(), Some(step));
        assert_eq!(store.step("unknown").unwrap(), None);
        assert_eq!(store.rewards("s1").unwrap(), vec![reward]);
    }
}
