//! The committed description of the control API, from which the interface's types are generated.

use std::path::Path;

/// `SPOTTER_WRITE_OPENAPI=1 cargo test -p spotter-gateway --test openapi` writes it anew; then
/// `npm run types` in `ui/` follows.
#[test]
fn the_committed_description_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi.json");
    let mut current =
        serde_json::to_string_pretty(&spotter_gateway::control::openapi()).expect("JSON");
    current.push('\n');
    if std::env::var_os("SPOTTER_WRITE_OPENAPI").is_some() {
        std::fs::write(&path, &current).expect("the description is written");
    }
    let committed = std::fs::read_to_string(&path).expect("openapi.json is committed");
    assert!(
        committed == current,
        "openapi.json is not current; write it anew as said above"
    );
}
