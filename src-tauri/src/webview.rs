//! The environment WebKitGTK needs before it is initialised.

use std::io;

/// Set once the environment is arranged, so that the program restarts at most once.
const ARRANGED: &str = "SPOTTER_WEBVIEW_ARRANGED";

/// On Linux with NVIDIA's driver, WebKitGTK's DMA-BUF renderer shows an empty window. The variable
/// that turns it off must be there before any thread starts, so the program replaces itself with a
/// copy that has it. What the user has set already is left as it is.
///
/// # Errors
/// Fails when the program cannot be started again.
#[cfg(target_os = "linux")]
pub(crate) fn guard() -> io::Result<()> {
    use std::os::unix::process::CommandExt as _;
    use std::path::Path;
    use std::process::Command;

    const RENDERER: &str = "WEBKIT_DISABLE_DMABUF_RENDERER";
    let nvidia = Path::new("/proc/driver/nvidia/version").exists()
        || Path::new("/sys/module/nvidia").exists();
    if !nvidia || std::env::var_os(RENDERER).is_some() || std::env::var_os(ARRANGED).is_some() {
        return Ok(());
    }
    // Returns only when it fails.
    Err(Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(RENDERER, "1")
        .env(ARRANGED, "1")
        .exec())
}

/// Other systems bring their own web view.
#[cfg(not(target_os = "linux"))]
pub(crate) fn guard() -> io::Result<()> {
    let _ = ARRANGED;
    Ok(())
}
