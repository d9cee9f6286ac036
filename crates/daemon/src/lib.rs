//! Composition: what `spotter serve` is made of besides the gateway and the store.

pub mod catalog;
pub mod connect;
pub mod data_dir;
pub mod download;
pub mod hardware;
pub mod secrets;
pub mod settings;
