//! `spotter-desktop`: the window around the daemon.
//!
//! Owns what only a desktop program can do: the window, the tray, notifications, start at login,
//! native file dialogs, and starting or attaching to `spotter serve`. Refuses to own any decision
//! about models, training or data: the window shows the daemon's own pages, and the shell reads the
//! same HTTP API as any browser.

mod connection;
mod daemon;
mod notify;
mod tray;
mod webview;
mod window;
mod words;

use anyhow::Context as _;
use tauri::{AppHandle, Manager as _, RunEvent};

use crate::daemon::Daemon;

fn main() -> anyhow::Result<()> {
    webview::guard().context("cannot restart with the settings the web view needs")?;
    let app = tauri::Builder::default()
        // First, as its documentation asks: a second start must end before anything else begins.
        .plugin(tauri_plugin_single_instance::init(
            |app, _arguments, _directory| {
                window::show(app);
            },
        ))
        .plugin(tauri_plugin_window_state::Builder::default().build())
        .plugin(tauri_plugin_notification::init())
        .plugin(tauri_plugin_dialog::init())
        .plugin(
            tauri_plugin_autostart::Builder::new()
                .arg("--hidden")
                .build(),
        )
        .manage(Daemon::default())
        .invoke_handler(tauri::generate_handler![retry, quit])
        .setup(|app| {
            let hidden = std::env::args().any(|argument| argument == "--hidden");
            window::create(app.handle(), !hidden)?;
            tray::create(app.handle())?;
            connect(app.handle());
            end_with_the_session(app.handle());
            Ok(())
        })
        .build(tauri::generate_context!())
        .context("cannot open the desktop")?;
    app.run(|app, event| match event {
        // The last window closing is not the end: the gateway keeps answering from the tray.
        RunEvent::ExitRequested {
            api, code: None, ..
        } => api.prevent_exit(),
        RunEvent::Exit => app.state::<Daemon>().stop(),
        _ => {}
    });
    Ok(())
}

/// Starts or attaches to the daemon and shows its pages, or the reason why there are none.
fn connect(app: &AppHandle) {
    let app = app.clone();
    tauri::async_runtime::spawn(async move {
        match app.state::<Daemon>().connect(&app).await {
            Ok(connection) => {
                window::open(&app, &connection);
                notify::follow(app.clone(), connection).await;
            }
            Err(error) => window::fail(&app, &format!("{error:#}")),
        }
    });
}

/// Leaves in order when the session manager or a terminal asks, so that the daemon ends in order too.
#[cfg(unix)]
fn end_with_the_session(app: &AppHandle) {
    use tokio::signal::unix::{SignalKind, signal};

    let app = app.clone();
    tauri::async_runtime::spawn(async move {
        let (Ok(mut terminate), Ok(mut interrupt)) = (
            signal(SignalKind::terminate()),
            signal(SignalKind::interrupt()),
        ) else {
            return;
        };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        app.exit(0);
    });
}

#[cfg(not(unix))]
fn end_with_the_session(_app: &AppHandle) {}

/// Asked by the start page after a failure.
#[tauri::command]
fn retry(app: AppHandle) {
    window::wait(&app);
    connect(&app);
}

/// Asked by the start page after a failure.
#[tauri::command]
fn quit(app: AppHandle) {
    app.exit(0);
}
