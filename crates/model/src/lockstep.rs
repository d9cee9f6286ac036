//! Threads that go through the stages of one forward together.
//!
//! A decoding step is some 150 small stages, each needing the one before it. Forking
//! and joining tasks for each costs more than the stage itself, so here every compute
//! thread runs the whole step, takes its share of each stage, and meets the others at
//! a barrier that spins for a moment before it lets other processes run.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Spins before a waiting thread offers its core to others, a few tens of microseconds.
const SPINS: u32 = 4_000;

/// Shared state of one run.
#[derive(Debug)]
pub(crate) struct Lockstep {
    threads: usize,
    arrived: AtomicUsize,
    epoch: AtomicUsize,
    taken: Vec<AtomicUsize>,
    abandoned: AtomicBool,
}

impl Lockstep {
    /// For runs of at most `stages` stages.
    pub(crate) fn new(threads: usize, stages: usize) -> Self {
        Self {
            threads,
            arrived: AtomicUsize::new(0),
            epoch: AtomicUsize::new(0),
            taken: (0..stages).map(|_| AtomicUsize::new(0)).collect(),
            abandoned: AtomicBool::new(false),
        }
    }

    /// Takes part on the current thread. Every one of the `threads` threads must call
    /// this, and call [`Crew::stage`] equally often.
    pub(crate) fn join(&self) -> Crew<'_> {
        Crew {
            lockstep: self,
            stage: 0,
        }
    }

    fn wait(&self) {
        let epoch = self.epoch.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.store(0, Ordering::Relaxed);
            self.epoch.store(epoch + 1, Ordering::Release);
            return;
        }
        let mut spins = 0;
        while self.epoch.load(Ordering::Acquire) == epoch {
            assert!(
                !self.abandoned.load(Ordering::Relaxed),
                "another compute thread stopped in the middle of a step"
            );
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

/// One thread's part in a [`Lockstep`].
#[derive(Debug)]
pub(crate) struct Crew<'a> {
    lockstep: &'a Lockstep,
    stage: usize,
}

impl Crew<'_> {
    /// Shares `items` in chunks of at least `grain` among the threads, then waits until
    /// all of them are done. What was written before is visible to every thread after.
    pub(crate) fn stage(&mut self, items: usize, grain: usize, mut work: impl FnMut(Range<usize>)) {
        let grain = grain.max(items / (8 * self.lockstep.threads)).max(1);
        let taken = &self.lockstep.taken[self.stage];
        loop {
            let start = taken.fetch_add(grain, Ordering::Relaxed);
            if start >= items {
                break;
            }
            work(start..(start + grain).min(items));
        }
        self.stage += 1;
        self.lockstep.wait();
    }
}

impl Drop for Crew<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.lockstep.abandoned.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::Lockstep;

    fn pool(threads: usize) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("threads")
    }

    #[test]
    fn every_item_is_done_once_and_stages_do_not_overlap() {
        for threads in [1, 2, 5] {
            let lockstep = Lockstep::new(threads, 50);
            let done: Vec<AtomicUsize> = (0..50).map(|_| AtomicUsize::new(0)).collect();
            pool(threads).broadcast(|_| {
                let mut crew = lockstep.join();
                for stage in 0..50 {
                    crew.stage(37, 3, |items| {
                        if stage > 0 {
                            assert_eq!(done[stage - 1].load(Ordering::Relaxed), 37);
                        }
                        done[stage].fetch_add(items.len(), Ordering::Relaxed);
                    });
                }
            });
            assert!(done.iter().all(|d| d.load(Ordering::Relaxed) == 37));
        }
    }

    #[test]
    fn a_panic_on_one_thread_ends_all() {
        let lockstep = Lockstep::new(2, 2);
        let pool = pool(2);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.broadcast(|context| {
                let mut crew = lockstep.join();
                crew.stage(1, 1, |_| {});
                assert_eq!(context.index(), 0, "thread 1 fails on purpose");
                crew.stage(1, 1, |_| {});
            });
        }));
        assert!(outcome.is_err());
    }
}
