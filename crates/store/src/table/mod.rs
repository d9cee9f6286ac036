//! One file per table: its SQL, its rows, its reads and writes.

pub(crate) mod adapter;
pub(crate) mod content;
pub(crate) mod drop_count;
pub(crate) mod reward;
pub(crate) mod run;
pub(crate) mod run_metric;
pub(crate) mod session;
pub(crate) mod setting;
pub(crate) mod step;
pub(crate) mod trajectory;
