//! How a model family writes tool calls, and which one this is.

use spotter_model::ChatTemplate;

/// The way tool calls are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen, and every model
    /// whose template knows no tools, since they are told so.
    #[default]
    Hermes,
    /// `{"name": …, "parameters": …}` as the whole answer, or behind `<|python_tag|>`.
    Llama,
    /// `[TOOL_CALLS]` before a list of calls, or before each `name[ARGS]{…}`.
    Mistral {
        /// Whether names and arguments are parted by `[ARGS]`.
        arguments_mark: bool,
    },
    /// `{"name": …, "arguments": …}` as the whole answer, fenced or not, or a list of them.
    Json,
}

impl Dialect {
    /// The dialect that a chat template teaches.
    pub fn of(template: &ChatTemplate) -> Self {
        Self::of_source(template.source(), template.knows_tools())
    }

    fn of_source(source: &str, knows_tools: bool) -> Self {
        if !knows_tools || source.contains("<tool_call>") {
            Self::Hermes
        } else if source.contains("[TOOL_CALLS]") {
            Self::Mistral {
                arguments_mark: source.contains("[ARGS]"),
            }
        } else if source.contains("<|python_tag|>") || source.contains("<|start_header_id|>") {
            Self::Llama
        } else {
            Self::Json
        }
    }

    /// The key under which a call's arguments stand.
    pub(crate) fn arguments_key(self) -> &'static str {
        match self {
            Self::Llama => "parameters",
            Self::Hermes | Self::Mistral { .. } | Self::Json => "arguments",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Dialect;

    #[test]
    fn the_template_says_the_dialect() {
        let of = |source: &str| Dialect::of_source(source, true);
        assert_eq!(of("{{ tools }} <tool_call> {{ x }}"), Dialect::Hermes);
        assert_eq!(
            of("<|start_header_id|>ipython<|end_header_id|>"),
            Dialect::Llama
        );
        let mistral = |arguments_mark| Dialect::Mistral { arguments_mark };
        assert_eq!(of("[TOOL_CALLS] [AVAILABLE_TOOLS]"), mistral(false));
        assert_eq!(of("[TOOL_CALLS]{{ name }}[ARGS]"), mistral(true));
        assert_eq!(of("{{ tools | tojson }}"), Dialect::Json);
        assert_eq!(Dialect::of_source("{{ messages }}", false), Dialect::Hermes);
    }
}
