//! The shared harness of the end-to-end tests.
