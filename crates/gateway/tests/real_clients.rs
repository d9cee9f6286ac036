//! Real clients against the gateway. A scripted engine stands in for the model:
//! the smallest models do not call tools reliably, and what is tested is the edge.
//!
//! A client that is not installed is reported and passed over, because installing
//! it needs the network: `SPOTTER_PYTHON` names a Python with `openai` and
//! `anthropic`, `SPOTTER_CLIENTS` a folder in which `npm install openai
//! @anthropic-ai/claude-code openclaw node@26` has run.

mod common;

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use common::{Gateway, TOKEN};
use serde_json::json;
use spotter_core::chat::{ResponseFormat, Role};
use spotter_core::generate::{GenerateRequest, Prompt};
use spotter_core::step::StepKind;
use spotter_gateway::engine::scripted::{Reply, ScriptedEngine};
use tokio::process::Command;

/// Calls the first known tool until there is a result, gives JSON for a schema,
/// and text otherwise.
fn script(request: &GenerateRequest) -> Reply {
    if request.response_format != ResponseFormat::Text {
        return Reply::text(r#"{"name": "Ada", "age": 36}"#);
    }
    if let Prompt::Chat {
        messages, tools, ..
    } = &request.prompt
    {
        // Only what follows the last words of the person counts: the turn before may
        // have used the tool already.
        let asked = messages.iter().rposition(|m| {
            m.role == Role::User && (m.content.contains("run a command") || m.content == "hi")
        });
        let answered = asked.is_none_or(|at| messages[at..].iter().any(|m| m.role == Role::Tool));
        let offered = |name: &str| tools.iter().any(|t| t.name == name);
        if !answered {
            if offered("get_weather") {
                return Reply::call("get_weather", r#"{"city":"Zurich"}"#);
            }
            for (tool, arguments) in [
                ("exec", r#"{"command":"echo tool-ran"}"#),
                (
                    "Bash",
                    r#"{"command":"echo tool-ran","description":"a test"}"#,
                ),
            ] {
                if offered(tool) && messages.iter().any(|m| m.content.contains("run a command")) {
                    return Reply::call(tool, arguments);
                }
            }
        }
    }
    Reply::text("Hello from the script.")
}

fn clients() -> Option<PathBuf> {
    let found = std::env::var_os("SPOTTER_CLIENTS").map(PathBuf::from);
    if found.is_none() {
        eprintln!("passed over: SPOTTER_CLIENTS names no folder with installed clients");
    }
    found
}

async fn run(mut command: Command) -> String {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(Duration::from_secs(120), command.output())
        .await
        .expect("the client ends")
        .expect("the client starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

#[tokio::test]
async fn openai_and_anthropic_for_python() {
    let Some(python) = std::env::var_os("SPOTTER_PYTHON") else {
        eprintln!("passed over: SPOTTER_PYTHON names no Python with openai and anthropic");
        return;
    };
    let gateway = Gateway::over(ScriptedEngine::new(script)).await;
    let mut command = Command::new(python);
    command
        .arg(format!(
            "{}/tests/clients/openai_client.py",
            env!("CARGO_MANIFEST_DIR")
        ))
        .args([&gateway.url, TOKEN]);
    assert!(run(command).await.contains("ok"));
    let steps = gateway.pool.all_steps();
    for client in ["openai-python", "anthropic-python"] {
        assert!(steps.iter().any(|s| s.client == client), "{client}");
    }
}

#[tokio::test]
async fn openai_for_javascript() {
    let Some(folder) = clients() else { return };
    let script_file = folder.join("openai_client.mjs");
    std::fs::copy(
        format!(
            "{}/tests/clients/openai_client.mjs",
            env!("CARGO_MANIFEST_DIR")
        ),
        &script_file,
    )
    .expect("copied beside node_modules");
    let gateway = Gateway::over(ScriptedEngine::new(script)).await;
    let mut command = Command::new("node");
    command.arg(&script_file).args([&gateway.url, TOKEN]);
    assert!(run(command).await.contains("ok"));
}

#[tokio::test]
async fn claude_code_with_a_tool_round() {
    let Some(folder) = clients() else { return };
    let gateway = Gateway::over(ScriptedEngine::new(script)).await;
    let home = tempfile::tempdir().expect("a home");
    let mut command = Command::new(folder.join("node_modules/.bin/claude"));
    command
        .args(["-p", "Please run a command", "--allowedTools", "Bash"])
        .current_dir(home.path())
        .env_clear()
        .env("PATH", path(&folder))
        .env("HOME", home.path())
        .env("ANTHROPIC_BASE_URL", &gateway.url)
        .env("ANTHROPIC_API_KEY", TOKEN)
        .env("DISABLE_TELEMETRY", "1")
        .env("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1");
    let text = run(command).await;
    assert!(text.contains("Hello from the script."), "{text}");
    let steps: Vec<_> = gateway
        .pool
        .all_steps()
        .into_iter()
        .filter(|s| s.kind == StepKind::Main)
        .collect();
    assert_eq!(steps.len(), 2, "a call and its continuation");
    assert_eq!(steps[0].client, "claude-code");
    assert_eq!(
        (&steps[0].session, &steps[0].turn),
        (&steps[1].session, &steps[1].turn)
    );
    assert_eq!(
        (steps[0].trajectory.clone(), steps[1].index),
        (steps[1].trajectory.clone(), 1)
    );
    assert_eq!(steps[1].user_text, "Please run a command");
    assert!(steps[1].request.to_string().contains("tool-ran"));
}

/// The clients' own Node, then the system's.
fn path(folder: &std::path::Path) -> String {
    format!(
        "{}:{}",
        folder.join("node_modules/node/bin").display(),
        std::env::var("PATH").unwrap_or_default()
    )
}

#[tokio::test]
async fn openclaw_plugin_joins_ratings_exactly() {
    let Some(folder) = clients() else { return };
    let gateway = Gateway::over(ScriptedEngine::new(script)).await;
    let trace = "5be9397bac496ffafd61ca17c3d069a3";
    let (_, answer) = gateway
        .chat(
            json!({"model": "spotter", "messages": [{"role": "user", "content": "hello"}]}),
            &[("traceparent", &format!("00-{trace}-52476c384e1930bf-01"))],
        )
        .await;
    let manifest = env!("CARGO_MANIFEST_DIR");
    // The plugin is TypeScript, which the clients' own Node runs as it is.
    let mut command = Command::new(folder.join("node_modules/.bin/node"));
    command
        .arg(format!("{manifest}/tests/clients/openclaw_plugin.mjs"))
        .args([&gateway.url, TOKEN])
        .arg(format!("{manifest}/../../examples/openclaw-plugin"))
        .args([answer["id"].as_str().expect("an id"), trace]);
    assert!(run(command).await.contains("ok"));
}

#[tokio::test]
async fn openclaw_two_turns_with_a_tool_round() {
    let Some(folder) = clients() else { return };
    let gateway = Gateway::over(ScriptedEngine::new(script)).await;
    let home = tempfile::tempdir().expect("a home");
    let config = json!({
        "agents": {"defaults": {"model": {"primary": "spotter/spotter"}}},
        "models": {"mode": "merge", "providers": {"spotter": {
            "baseUrl": format!("{}/v1", gateway.url),
            "apiKey": TOKEN,
            "api": "openai-completions",
            "timeoutSeconds": 60,
            "models": [{"id": "spotter", "name": "Spotter", "contextWindow": 65536, "maxTokens": 2048,
                        "compat": {"supportsPromptCacheKey": true}}]}}},
    });
    let folder_of_config = home.path().join(".openclaw");
    std::fs::create_dir_all(&folder_of_config).expect("made");
    std::fs::write(folder_of_config.join("openclaw.json"), config.to_string()).expect("written");
    for message in ["Say hello", "Please run a command"] {
        let mut command = Command::new(folder.join("node_modules/.bin/openclaw"));
        command
            .args([
                "agent",
                "--local",
                "--agent",
                "main",
                "--message",
                message,
                "--json",
            ])
            .current_dir(home.path())
            .env_clear()
            .env("PATH", path(&folder))
            .env("HOME", home.path());
        let text = run(command).await;
        assert!(text.contains("Hello from the script."), "{text}");
    }
    let steps: Vec<_> = gateway
        .pool
        .all_steps()
        .into_iter()
        .filter(|s| s.kind == StepKind::Main)
        .collect();
    assert_eq!(steps.len(), 3, "one call, then a call and its continuation");
    assert!(
        steps
            .iter()
            .all(|s| s.client == "openclaw" && s.session == steps[0].session)
    );
    let words: Vec<_> = steps.iter().map(|s| s.user_text.as_str()).collect();
    assert_eq!(
        words,
        ["Say hello", "Please run a command", "Please run a command"]
    );
    assert_ne!(steps[0].turn, steps[1].turn);
    assert_eq!(
        (&steps[1].trajectory, steps[2].index),
        (&steps[2].trajectory, 1)
    );

    // Rated by completion id and by trace id.
    let by_id = gateway
        .post(
            "/v1/feedback",
            json!({"id": format!("chatcmpl-{}", steps[0].uid), "rating": "up"}),
        )
        .await;
    assert_eq!(by_id["step"], steps[0].uid.as_str());
    let by_trace = gateway
        .post(
            "/v1/feedback",
            json!({"trace_id": steps[2].turn, "rating": "down"}),
        )
        .await;
    assert_eq!(by_trace["step"], steps[2].uid.as_str());

    // The history of the second turn carries the ids of the first answer.
    let last = gateway.engine.requests().pop().expect("a request");
    let Prompt::Chat { messages, .. } = &last.prompt else {
        panic!("a chat was expected");
    };
    let exact = messages.iter().filter(|m| m.token_ids.is_some()).count();
    assert_eq!(exact, 2, "both earlier answers are recognised");
}
