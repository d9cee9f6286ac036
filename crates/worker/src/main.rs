//! Placeholder until the first commit.
fn main() {}
