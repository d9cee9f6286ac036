//! The model card: where an export comes from and how it is used.

use std::fmt::Write;

use serde_json::Value as Json;

use super::{Format, Source};

/// The LoRA file's name inside an export.
pub(super) const LORA_FILE: &str = "adapter.gguf";
/// The merged GGUF file's name inside an export.
pub(super) const MERGED_FILE: &str = "model.gguf";

/// A fact on one line, with nothing that Markdown or YAML would take for its own.
fn line(value: &Json) -> String {
    let text = match value {
        Json::String(text) => text.clone(),
        other => other.to_string(),
    };
    text.chars()
        .filter(|c| !c.is_control() && !matches!(c, '`' | '"' | '\\' | '<' | '>' | '|'))
        .take(200)
        .collect()
}

/// The card. Of the metrics only numbers are taken, so that no text of a conversation can
/// get in.
pub(super) fn text(source: Source<'_>, format: Format, notes: &[String]) -> String {
    let facts = source.facts;
    let base = line(&Json::from(source.base.name.as_str()));
    let name = source.name;
    let licence = facts["base_licence"]
        .as_str()
        .filter(|l| !l.is_empty())
        .map(|l| line(&l.into()));
    let library = match format {
        Format::Peft => "library_name: peft\n",
        Format::MergedSafetensors => "library_name: transformers\npipeline_tag: text-generation\n",
        _ => "",
    };
    let mut out = String::from("---\n");
    if let Some(licence) = &licence {
        let _ = writeln!(out, "license: \"{}\"", licence.to_lowercase());
    }
    let _ = write!(
        out,
        "{library}base_model: \"{base}\"\ntags:\n- lora\n- spotter\n---\n\n# {name} for {base}\n\n"
    );
    out.push_str(match format {
        Format::Peft | Format::GgufLora | Format::Ollama => "A LoRA adapter, ",
        Format::MergedSafetensors | Format::MergedGguf => {
            "The base model with a LoRA adapter merged in, "
        }
    });
    let imported = facts["imported"] == Json::Bool(true);
    out.push_str(if imported {
        "taken into Spotter from elsewhere and written out again.\n"
    } else {
        "trained by Spotter from the ratings of one person's own agent. It holds no conversation.\n"
    });
    out.push_str("\n## Use\n\n");
    out.push_str(&match format {
        Format::Peft => format!(
            "```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n# The base: {base}\nmodel = AutoModelForCausalLM.from_pretrained(BASE)\nmodel = PeftModel.from_pretrained(model, \".\")\n```\n"
        ),
        Format::GgufLora => format!("```\nllama-server -m BASE.gguf --lora {LORA_FILE}\n```\n"),
        Format::MergedSafetensors => {
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\nmodel = AutoModelForCausalLM.from_pretrained(\".\")\ntokenizer = AutoTokenizer.from_pretrained(\".\")\n```\n".to_owned()
        }
        Format::MergedGguf => format!("```\nllama-server -m {MERGED_FILE}\n```\n"),
        Format::Ollama => "```\nollama create NAME -f Modelfile\nollama run NAME\n```\n\n`FROM` in the Modelfile is the base's file on the machine of the export; change it when the folder moves.\n".to_owned(),
    });
    for note in notes {
        let _ = write!(out, "\n{note}\n");
    }

    out.push_str("\n## Facts\n\n| | |\n| --- | --- |\n");
    let mut row = |key: &str, value: String| {
        let _ = writeln!(out, "| {key} | {value} |");
    };
    row("base model", base.clone());
    row("block type of the base", source.base.quantisation.clone());
    if let Some(sha256) = facts["base_sha256"].as_str() {
        row("SHA-256 of the base", line(&sha256.into()));
    }
    row(
        "licence of the base",
        licence.unwrap_or_else(|| "not known to Spotter; the base's own applies".to_owned()),
    );
    let config = source.adapter.config();
    row("rank, alpha", format!("{}, {}", config.rank, config.alpha));
    let targets: Vec<&str> = config.targets.iter().map(|t| t.name()).collect();
    row("target modules", targets.join(", "));
    if let Some(lineage) = facts["lineage"].as_array() {
        let versions: Vec<String> = lineage.iter().map(line).collect();
        row("lineage, newest first", versions.join(" ← "));
    }
    for (key, words) in [
        ("answers_learned_from", "answers it learned from"),
        (
            "answers_learned_from_in_all",
            "answers its lineage learned from",
        ),
        ("liked", "its own answers, liked"),
        ("disliked", "its own answers, disliked"),
        ("made_at_ms", "made at (milliseconds since 1970)"),
    ] {
        if facts[key].is_number() {
            row(words, facts[key].to_string());
        }
    }
    let metrics: Vec<(&String, &Json)> = facts["metrics"]
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, value)| value.is_number())
        .collect();
    if !metrics.is_empty() {
        out.push_str("\n## Metrics of its training\n\n| | |\n| --- | --- |\n");
        for (key, value) in metrics {
            let key = line(&key.as_str().into());
            let _ = writeln!(out, "| {key} | {value} |");
        }
    }
    out
}
