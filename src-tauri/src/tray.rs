//! The tray icon and its menu.

use tauri::menu::{CheckMenuItem, Menu, MenuItem, PredefinedMenuItem};
use tauri::tray::{MouseButton, MouseButtonState, TrayIconBuilder, TrayIconEvent};
use tauri::{AppHandle, include_image};
use tauri_plugin_autostart::ManagerExt as _;

use crate::window;
use crate::words::words;

/// Puts the icon into the tray.
///
/// # Errors
/// Fails when the menu cannot be built.
pub(crate) fn create(app: &AppHandle) -> tauri::Result<()> {
    let words = words();
    let starts_at_login = app.autolaunch().is_enabled().unwrap_or(false);
    let open = MenuItem::with_id(app, "open", words.open, true, None::<&str>)?;
    let login = CheckMenuItem::with_id(
        app,
        "login",
        words.start_at_login,
        true,
        starts_at_login,
        None::<&str>,
    )?;
    let quit = MenuItem::with_id(app, "quit", words.quit, true, None::<&str>)?;
    let menu = Menu::with_items(
        app,
        &[&open, &login, &PredefinedMenuItem::separator(app)?, &quit],
    )?;
    TrayIconBuilder::with_id("main")
        .icon(include_image!("../icons/tray.png"))
        .tooltip("Spotter")
        .menu(&menu)
        .show_menu_on_left_click(false)
        .on_menu_event(move |app, event| match event.id().as_ref() {
            "open" => window::show(app),
            "login" => toggle_login(app, &login),
            "quit" => app.exit(0),
            _ => {}
        })
        .on_tray_icon_event(|tray, event| {
            if let TrayIconEvent::Click {
                button: MouseButton::Left,
                button_state: MouseButtonState::Up,
                ..
            } = event
            {
                window::show(tray.app_handle());
            }
        })
        .build(app)?;
    Ok(())
}

/// Switches starting at login, and lets the mark say what is really so.
fn toggle_login(app: &AppHandle, item: &CheckMenuItem<tauri::Wry>) {
    let login = app.autolaunch();
    let enabled = login.is_enabled().unwrap_or(false);
    let switched = if enabled {
        login.disable()
    } else {
        login.enable()
    };
    if let Err(error) = switched {
        eprintln!("Starting at login cannot be changed: {error}");
    }
    item.set_checked(login.is_enabled().unwrap_or(enabled)).ok();
}
