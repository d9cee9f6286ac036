//! The data pool in one SQLite file.
//!
//! Owns the file, its lock and its migrations. It knows no HTTP and no tensors.

mod error;
mod open;
mod step;

pub use error::StoreError;
pub use open::Store;
