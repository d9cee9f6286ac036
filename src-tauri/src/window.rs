//! The one window: created hidden or shown, kept on the daemon's own pages, closed to the tray.

use std::path::{Path, PathBuf};
use std::process::Command;

use tauri::utils::config::Color;
use tauri::webview::{DownloadEvent, NewWindowResponse};
use tauri::{AppHandle, Manager as _, Url, WebviewUrl, WebviewWindowBuilder, WindowEvent};
use tauri_plugin_dialog::{DialogExt as _, MessageDialogButtons, MessageDialogKind};

use crate::connection::Connection;
use crate::words::words;

const LABEL: &str = "main";
/// Exists once the person knows that closing the window does not stop the gateway.
const EXPLAINED: &str = "tray-explained";

/// Creates the window on the start page.
///
/// # Errors
/// Fails when the system offers no web view.
pub(crate) fn create(app: &AppHandle, visible: bool) -> tauri::Result<()> {
    let navigation = app.clone();
    let window = WebviewWindowBuilder::new(app, LABEL, WebviewUrl::App("index.html".into()))
        .title("Spotter")
        .inner_size(1200.0, 800.0)
        .min_inner_size(880.0, 600.0)
        .background_color(Color(250, 249, 246, 255))
        .visible(visible)
        .on_navigation(move |url| {
            let own = is_own(&navigation, url);
            if !own {
                open_outside(url);
            }
            own
        })
        .on_download(|webview, event| save(webview.app_handle(), event))
        .on_new_window(|url, _features| {
            open_outside(&url);
            NewWindowResponse::Deny
        })
        .build()?;
    let app = app.clone();
    window.on_window_event(move |event| {
        if let WindowEvent::CloseRequested { api, .. } = event {
            api.prevent_close();
            close_to_tray(&app);
        }
    });
    Ok(())
}

/// Brings the window to the front.
pub(crate) fn show(app: &AppHandle) {
    if let Some(window) = app.get_webview_window(LABEL) {
        window.show().ok();
        window.unminimize().ok();
        window.set_focus().ok();
    }
}

/// Shows the daemon's pages.
pub(crate) fn open(app: &AppHandle, connection: &Connection) {
    app.manage(Origin(connection.url.clone()));
    navigate(app, connection.page());
}

/// Shows the start page while the daemon starts.
pub(crate) fn wait(app: &AppHandle) {
    if let Some(page) = start_page(app) {
        navigate(app, page);
    }
}

/// Shows why there is no daemon.
pub(crate) fn fail(app: &AppHandle, reason: &str) {
    if let Some(mut page) = start_page(app) {
        // The page reads the form encoding of a query.
        let mut form = page.clone();
        form.query_pairs_mut().append_pair("failed", reason);
        page.set_fragment(form.query());
        navigate(app, page);
    }
    show(app);
}

/// The daemon whose pages this window may show.
struct Origin(Url);

fn start_page(app: &AppHandle) -> Option<Url> {
    let mut page = app.get_webview_window(LABEL)?.url().ok()?;
    page.set_fragment(None);
    Some(page)
}

fn navigate(app: &AppHandle, page: Url) {
    if let Some(window) = app.get_webview_window(LABEL)
        && let Err(error) = window.navigate(page)
    {
        eprintln!("The window cannot show the page: {error}");
    }
}

/// Whether the window itself may go there: the start page and the daemon. Anything else that model
/// text links to belongs into a browser, outside the reach of the shell.
fn is_own(app: &AppHandle, url: &Url) -> bool {
    match url.scheme() {
        "tauri" => true,
        "http" | "https" => {
            url.host_str() == Some("tauri.localhost")
                || app
                    .try_state::<Origin>()
                    .is_some_and(|own| own.0.origin() == url.origin())
        }
        _ => url.as_str() == "about:blank",
    }
}

/// Saves what a page offers, such as a run's measurements, under its name among the downloads. A
/// name that is taken gets a number.
fn save(app: &AppHandle, event: DownloadEvent<'_>) -> bool {
    let DownloadEvent::Requested { destination, .. } = event else {
        return true;
    };
    let Ok(downloads) = app.path().download_dir().or_else(|_| app.path().home_dir()) else {
        return false;
    };
    let name = destination
        .file_name()
        .unwrap_or_else(|| "download".as_ref());
    *destination = free_name(&downloads, Path::new(name));
    true
}

/// The first of `name`, `name-2`, `name-3`, … that does not exist in `dir`.
fn free_name(dir: &Path, name: &Path) -> PathBuf {
    let stem = name.file_stem().unwrap_or_default().to_string_lossy();
    let extension = name
        .extension()
        .map(|e| format!(".{}", e.to_string_lossy()));
    let extension = extension.unwrap_or_default();
    let numbered = (2..).map(|number| dir.join(format!("{stem}-{number}{extension}")));
    std::iter::once(dir.join(name))
        .chain(numbered)
        .find(|path| !path.exists())
        .unwrap_or_else(|| dir.join(name))
}

/// Opens web and mail addresses with the system's own programs, and nothing else.
fn open_outside(url: &Url) {
    if !matches!(url.scheme(), "http" | "https" | "mailto") {
        return;
    }
    let program = if cfg!(target_os = "macos") {
        "open"
    } else if cfg!(windows) {
        "explorer"
    } else {
        "xdg-open"
    };
    if let Err(error) = Command::new(program).arg(url.as_str()).spawn() {
        eprintln!("{program} cannot be run: {error}");
    }
}

/// Hides the window. The first time, the person is told before that the gateway goes on.
fn close_to_tray(app: &AppHandle) {
    let marker = app
        .path()
        .app_config_dir()
        .ok()
        .map(|dir| dir.join(EXPLAINED));
    if marker.as_deref().is_none_or(Path::exists) {
        hide(app);
        return;
    }
    let words = words();
    let handle = app.clone();
    let mut question = app
        .dialog()
        .message(words.close_body)
        .title(words.close_title)
        .kind(MessageDialogKind::Info)
        .buttons(MessageDialogButtons::OkCancelCustom(
            words.keep_running.to_owned(),
            words.quit.to_owned(),
        ));
    if let Some(window) = app.get_webview_window(LABEL) {
        question = question.parent(&window);
    }
    question.show(move |keep| {
        if let Some(marker) = marker {
            let written = marker
                .parent()
                .map_or(Ok(()), std::fs::create_dir_all)
                .and_then(|()| std::fs::write(&marker, ""));
            if let Err(error) = written {
                eprintln!("{} cannot be written: {error}", marker.display());
            }
        }
        if keep { hide(&handle) } else { handle.exit(0) }
    });
}

fn hide(app: &AppHandle) {
    if let Some(window) = app.get_webview_window(LABEL) {
        window.hide().ok();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::free_name;

    #[test]
    fn a_taken_name_gets_a_number() {
        let dir = std::env::temp_dir().join(format!("spotter-save-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let name = Path::new("run-3.csv");
        assert_eq!(free_name(&dir, name), dir.join("run-3.csv"));
        std::fs::write(dir.join("run-3.csv"), "").expect("a file");
        assert_eq!(free_name(&dir, name), dir.join("run-3-2.csv"));
        std::fs::remove_dir_all(&dir).expect("its end");
    }
}
