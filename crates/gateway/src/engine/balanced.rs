//! Several engines behind one: least-loaded, with conversations staying where
//! their prefix cache is, and failover as long as nothing has been said.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use futures::StreamExt;
use spotter_core::code::{Code, Failure};
use spotter_core::generate::{AdapterChoice, GenerateEvent, GenerateRequest, Prompt};
use spotter_core::worker::ModelFacts;

use super::{Adapters, Engine, EventStream};

/// How many conversations are remembered.
const REMEMBERED: usize = 10_000;
/// How much busier than the least busy engine a conversation's own may be. A
/// cached prefix is worth some waiting, not any.
const SLACK: usize = 2;

struct Member {
    engine: Arc<dyn Engine>,
    running: Arc<AtomicUsize>,
}

struct Members {
    members: Vec<Member>,
    homes: Mutex<HashMap<String, usize>>,
}

/// The engines; the first is the primary one, whose facts and adapters count.
pub struct BalancedEngine {
    inner: Arc<Members>,
}

/// Counts a generation for as long as it lives.
struct Load(Arc<AtomicUsize>);

impl Load {
    fn on(running: &Arc<AtomicUsize>) -> Self {
        running.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(running))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether another engine may do better.
fn worth_another_try(code: Code) -> bool {
    matches!(
        code,
        Code::Busy | Code::Unavailable | Code::OutOfMemory | Code::Internal
    )
}

impl BalancedEngine {
    /// Engines in order of preference; the first is the primary one.
    pub fn new(engines: Vec<Arc<dyn Engine>>) -> Self {
        let members = engines
            .into_iter()
            .map(|engine| Member {
                engine,
                running: Arc::default(),
            })
            .collect();
        Self {
            inner: Arc::new(Members {
                members,
                homes: Mutex::default(),
            }),
        }
    }
}

impl Members {
    fn adapters(&self) -> Adapters {
        self.members
            .first()
            .map(|m| m.engine.adapters())
            .unwrap_or_default()
    }

    /// The engines to try for a request, best first.
    fn order(&self, request: &GenerateRequest) -> Vec<usize> {
        let wanted = match request.adapter {
            AdapterChoice::Version(version) => version,
            AdapterChoice::Current => self.adapters().live,
        };
        let home = {
            let homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
            homes.get(&request.session).copied()
        };
        let load = |at: usize| self.members[at].running.load(Ordering::SeqCst);
        let ready: Vec<usize> = (0..self.members.len())
            .filter(|at| self.members[*at].engine.ready())
            .collect();
        let least = ready.iter().map(|at| load(*at)).min().unwrap_or(0);
        let mut order: Vec<usize> = ready
            .into_iter()
            .filter(|at| match request.adapter {
                AdapterChoice::Version(version) => {
                    let has = self.members[*at].engine.adapters();
                    version.is_base() || has.live == version || has.loaded.contains(&version)
                }
                AdapterChoice::Current => true,
            })
            .collect();
        order.sort_by_key(|at| {
            let has = self.members[*at].engine.adapters();
            // An engine without the live adapter answers worse; it is the last resort.
            let lacks = has.live != wanted && !has.loaded.contains(&wanted);
            let is_home = home == Some(*at) && load(*at) <= least + SLACK;
            (lacks, !is_home, load(*at), *at)
        });
        order
    }

    fn remember(&self, session: &str, at: usize) {
        if session.is_empty() {
            return;
        }
        let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        if homes.len() >= REMEMBERED && !homes.contains_key(session) {
            // Losing a home costs one cold prefill, so starting over is cheap enough.
            homes.clear();
        }
        homes.insert(session.to_owned(), at);
    }
}

#[async_trait]
impl Engine for BalancedEngine {
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream, Failure> {
        let inner = Arc::clone(&self.inner);
        // Trying goes on inside the stream, so that waiting clients get signs of life.
        Ok(Box::pin(async_stream::stream! {
            let mut last = Failure::new(Code::Unavailable, "No engine is ready; try again.");
            for at in inner.order(&request) {
                let member = &inner.members[at];
                let _load = Load::on(&member.running);
                let mut stream = match member.engine.generate(request.clone()).await {
                    Ok(stream) => stream,
                    Err(failure) if worth_another_try(failure.code) => {
                        last = failure;
                        continue;
                    }
                    Err(failure) => {
                        yield GenerateEvent::Failed { failure };
                        return;
                    }
                };
                let mut said = false;
                let mut ended = false;
                while let Some(event) = stream.next().await {
                    match event {
                        GenerateEvent::Failed { failure } if !said && worth_another_try(failure.code) => {
                            last = failure;
                            break;
                        }
                        event => {
                            if !said && matches!(event, GenerateEvent::Delta { .. } | GenerateEvent::Finished { .. }) {
                                said = true;
                                inner.remember(&request.session, at);
                            }
                            ended = matches!(event, GenerateEvent::Failed { .. } | GenerateEvent::Finished { .. });
                            yield event;
                        }
                    }
                }
                if said || ended {
                    return;
                }
            }
            yield GenerateEvent::Failed { failure: last };
        }))
    }

    async fn count_tokens(&self, prompt: Prompt) -> Result<u32, Failure> {
        let mut last = Failure::new(Code::Unavailable, "No engine is ready; try again.");
        for member in self.inner.members.iter().filter(|m| m.engine.ready()) {
            match member.engine.count_tokens(prompt.clone()).await {
                Ok(count) => return Ok(count),
                Err(failure) => last = failure,
            }
        }
        Err(last)
    }

    fn facts(&self) -> Option<ModelFacts> {
        self.inner.members.iter().find_map(|m| m.engine.facts())
    }

    fn adapters(&self) -> Adapters {
        self.inner.adapters()
    }

    fn ready(&self) -> bool {
        self.inner.members.iter().any(|m| m.engine.ready())
    }
}
