//! The few words the shell itself says, in the languages of the UI.

/// One language.
pub(crate) struct Words {
    pub(crate) open: &'static str,
    pub(crate) start_at_login: &'static str,
    pub(crate) quit: &'static str,
    pub(crate) close_title: &'static str,
    pub(crate) close_body: &'static str,
    pub(crate) keep_running: &'static str,
    pub(crate) went_live: &'static str,
    pub(crate) was_rejected: &'static str,
    pub(crate) lesson_failed: &'static str,
}

const ENGLISH: Words = Words {
    open: "Open Spotter",
    start_at_login: "Start at login",
    quit: "Quit Spotter",
    close_title: "Spotter keeps running",
    close_body: "Closing the window does not stop Spotter: your agent is still answered, and \
                 training goes on. Open or quit it from its icon in the tray.",
    keep_running: "Keep running",
    went_live: "A better adapter went live",
    was_rejected: "A new adapter was not good enough",
    lesson_failed: "A lesson failed",
};

const CHINESE: Words = Words {
    open: "打开 Spotter",
    start_at_login: "登录时启动",
    quit: "退出 Spotter",
    close_title: "Spotter 仍在运行",
    close_body: "关闭窗口不会停止 Spotter：智能体照常得到回答，训练也会继续。可从托盘图标重新打开或退出。",
    keep_running: "继续运行",
    went_live: "更好的适配器已启用",
    was_rejected: "新的适配器未通过检验",
    lesson_failed: "一课失败了",
};

/// The words in the language of the desktop.
pub(crate) fn words() -> &'static Words {
    let locale = ["LC_ALL", "LC_MESSAGES", "LANG"]
        .into_iter()
        .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    match locale {
        Some(locale) if locale.starts_with("zh") => &CHINESE,
        _ => &ENGLISH,
    }
}
