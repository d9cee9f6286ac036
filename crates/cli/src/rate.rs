//! `spotter rate`.

use anyhow::Result;
use serde_json::json;

use crate::args::{Rate, Thumb};
use crate::client::{Client, part};
use crate::output::Output;

pub(crate) async fn run(command: Rate, client: &Client, output: Output) -> Result<()> {
    // Clients are given `chatcmpl-`, `msg_` or `resp_` and the id.
    let uid = command.id.rsplit(['-', '_']).next().unwrap_or_default();
    let uid = part(uid)?;
    let rating = match command.rating {
        Thumb::Up => json!("up"),
        Thumb::Down => json!("down"),
        Thumb::None => json!(null),
    };
    let change = json!({
        "rating": rating,
        "reasons": command.reason,
        "note": command.note,
        "correction": command.correction,
    });
    let step = client.put(&format!("steps/{uid}/rating"), &change).await?;
    output.result(&step, || match command.rating {
        Thumb::Up => format!("{uid} is rated up."),
        Thumb::Down => format!("{uid} is rated down."),
        Thumb::None => format!("The rating of {uid} is withdrawn."),
    });
    Ok(())
}
