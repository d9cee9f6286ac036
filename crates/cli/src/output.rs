//! What the command prints: JSON or words on standard output, progress on standard error.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use tracing_subscriber::EnvFilter;

/// How results are printed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    /// As JSON.
    pub(crate) json: bool,
}

impl Output {
    /// Prints a result: as one line of JSON, or in words.
    pub(crate) fn result(self, json: &Value, words: impl FnOnce() -> String) {
        if self.json {
            self.line(&json.to_string());
        } else {
            self.line(words().trim_end());
        }
    }

    /// Prints one line; a closed pipe ends the program quietly.
    pub(crate) fn line(self, text: &str) {
        self.bytes(text.as_bytes());
        self.bytes(b"\n");
    }

    /// Prints bytes as they are.
    pub(crate) fn bytes(self, bytes: &[u8]) {
        let mut out = io::stdout().lock();
        if let Err(error) = out.write_all(bytes).and_then(|()| out.flush()) {
            let closed = error.kind() == io::ErrorKind::BrokenPipe;
            std::process::exit(if closed { 0 } else { 1 });
        }
    }
}

/// Columns of equal width, two blanks apart.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let head: Vec<String> = header.iter().map(|&title| title.to_owned()).collect();
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells
            .chain(head.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<_> = (0..header.len()).map(width).collect();
    let mut out = String::new();
    for row in std::iter::once(&head).chain(rows) {
        let cells: Vec<_> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        out.push_str(cells.join("  ").trim_end());
        out.push('\n');
    }
    out
}

/// A bar for bytes; hidden where standard error is no terminal.
pub(crate) fn byte_bar(what: &str, total: u64) -> ProgressBar {
    bar(
        total,
        "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
    )
    .with_message(what.to_owned())
}

/// A bar for a share of 1000.
pub(crate) fn share_bar() -> ProgressBar {
    bar(1000, "{msg} {wide_bar} {percent}% {elapsed}")
}

fn bar(total: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// Text of a JSON field; empty when it is absent.
pub(crate) fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// `SPOTTER_LOG`, else `fallback`.
pub(crate) fn log_filter(fallback: &str) -> EnvFilter {
    EnvFilter::try_from_env("SPOTTER_LOG").unwrap_or_else(|_| EnvFilter::new(fallback))
}

/// Warnings of a short command go to standard error.
pub(crate) fn log_to_stderr() {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(log_filter("warn"))
        .with_writer(io::stderr)
        .without_time()
        .try_init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = vec![
            vec!["é".to_owned(), "x".to_owned()],
            vec!["long".to_owned(), String::new()],
        ];
        assert_eq!(table(&["A", "B"], &rows), "A     B\né     x\nlong\n");
    }
}
