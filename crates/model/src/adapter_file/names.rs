//! Whether two names mean the same base model.

/// The part of a name that tells models apart: no owner or folder, no file extension, no
/// quantisation, no punctuation, no case.
fn essence(name: &str) -> String {
    let name = name.trim_end_matches(['/', '\\']);
    let last = name.rsplit(['/', '\\']).next().unwrap_or_default();
    let lower = last.to_lowercase();
    let mut kept = String::new();
    for (i, part) in lower
        .split(['-', '_', '.', ' '])
        .filter(|p| !p.is_empty())
        .enumerate()
    {
        let digits = |p: &str| p.starts_with(|c: char| c.is_ascii_digit());
        let quantised = part.strip_prefix("iq").or_else(|| part.strip_prefix('q'));
        let is_precision = quantised.is_some_and(digits)
            || matches!(
                part,
                "f16" | "fp16" | "bf16" | "f32" | "fp32" | "gguf" | "bnb"
            );
        if i > 0 && is_precision {
            break;
        }
        kept.extend(part.chars().filter(|c| c.is_alphanumeric()));
    }
    kept
}

/// Whether the base that an adapter names is one of these (a model's name, its file, its
/// folder). Owners, quantisation and spelling do not matter.
pub fn same_base<'a>(named: &str, ours: impl IntoIterator<Item = &'a str>) -> bool {
    let named = essence(named);
    !named.is_empty() && ours.into_iter().any(|name| essence(name) == named)
}

#[cfg(test)]
mod tests {
    use super::same_base;

    #[test]
    fn spelling_owner_and_quantisation_do_not_matter_but_the_model_does() {
        let ours = ["SmolLM2 135M Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf"];
        for same in [
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "/models/smollm2-135m-instruct/",
            "smollm2-135m-instruct-q4_k_m.gguf",
            "unsloth/SmolLM2-135M-Instruct-bnb-4bit",
            "C:\\models\\SmolLM2-135M-Instruct-F16.gguf",
        ] {
            assert!(same_base(same, ours), "{same}");
        }
        for other in [
            "HuggingFaceTB/SmolLM2-135M",
            "HuggingFaceTB/SmolLM2-360M-Instruct",
            "q4",
            "",
            "/",
        ] {
            assert!(!same_base(other, ours), "{other}");
        }
    }
}
