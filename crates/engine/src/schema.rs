//! JSON schemas of clients: what is wrong with them, and what of them can be enforced.
//!
//! A schema that is malformed is refused, with the path of what is wrong. A schema that
//! is merely awkward is relaxed: the keyword that cannot be enforced is left out and a
//! note says so, since a client is better served by a looser answer than by none.

use serde_json::{Map, Value, json};
use spotter_core::Code;
use spotter_core::code::Failure;

const TYPES: [&str; 7] = [
    "object", "array", "string", "number", "integer", "boolean", "null",
];
/// Lengths and counts above this are not enforced: the automaton would be huge.
const MOST_COUNTED: u64 = 256;
/// Patterns above this many bytes are not enforced.
const LONGEST_PATTERN: usize = 256;
/// Schemas nested more deeply are cut off.
const DEEPEST: usize = 48;

fn invalid(path: &str, reason: impl std::fmt::Display) -> Failure {
    Failure::new(
        Code::InvalidRequest,
        format!("the schema is not valid at {path}: {reason}"),
    )
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// Checks that `schema` is one.
///
/// # Errors
/// `InvalidRequest` with the path of what is wrong.
pub(crate) fn check(schema: &Value, path: &str) -> Result<(), Failure> {
    check_below(schema, schema, path, 0)
}

fn check_below(root: &Value, schema: &Value, path: &str, depth: usize) -> Result<(), Failure> {
    let object = match schema {
        Value::Bool(_) => return Ok(()),
        Value::Object(object) => object,
        other => {
            return Err(invalid(
                path,
                format!("{} is neither an object nor a boolean", short(other)),
            ));
        }
    };
    if depth > DEEPEST {
        return Ok(());
    }
    for (key, value) in object {
        let here = format!("{path}.{key}");
        let below = |schema: &Value, path: &str| check_below(root, schema, path, depth + 1);
        match key.as_str() {
            "type" => {
                let known = |v: &Value| v.as_str().is_some_and(|t| TYPES.contains(&t));
                let good = match value {
                    Value::Array(types) => !types.is_empty() && types.iter().all(known),
                    one => known(one),
                };
                if !good {
                    let reason = format!("{} is not one of {}", short(value), TYPES.join(", "));
                    return Err(invalid(&here, reason));
                }
            }
            "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas" => {
                let schemas = value
                    .as_object()
                    .ok_or_else(|| invalid(&here, format!("{} is not an object", short(value))))?;
                for (name, schema) in schemas {
                    below(schema, &format!("{here}.{name}"))?;
                }
            }
            "items" if value.is_array() => each(value, &here, &below)?,
            "items"
            | "additionalProperties"
            | "not"
            | "if"
            | "then"
            | "else"
            | "contains"
            | "propertyNames"
            | "unevaluatedProperties" => below(value, &here)?,
            "anyOf" | "allOf" | "oneOf" | "prefixItems" => {
                if value.as_array().is_none_or(Vec::is_empty) {
                    return Err(invalid(&here, "it is not a list of schemas"));
                }
                each(value, &here, &below)?;
            }
            "required" => {
                let names = value.as_array().map(|v| v.iter().all(Value::is_string));
                if names != Some(true) {
                    return Err(invalid(
                        &here,
                        format!("{} is not a list of names", short(value)),
                    ));
                }
            }
            "enum" if value.as_array().is_none_or(Vec::is_empty) => {
                return Err(invalid(&here, "it is not a list of values"));
            }
            "pattern" | "format" | "$ref" if !value.is_string() => {
                return Err(invalid(&here, format!("{} is not a string", short(value))));
            }
            "$ref" => {
                let reference = value.as_str().unwrap_or_default();
                if let Some(pointer) = reference.strip_prefix('#')
                    && (pointer.is_empty() || pointer.starts_with('/'))
                    && root.pointer(pointer).is_none()
                {
                    return Err(invalid(&here, format!("there is nothing at '{reference}'")));
                }
            }
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf"
                if !value.is_number() && !value.is_boolean() =>
            {
                return Err(invalid(&here, format!("{} is not a number", short(value))));
            }
            "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties"
            | "maxProperties"
                if value.as_f64().is_none_or(|n| n < 0.0) =>
            {
                return Err(invalid(&here, format!("{} is not a count", short(value))));
            }
            _ => {}
        }
    }
    Ok(())
}

fn each(
    schemas: &Value,
    path: &str,
    check: &impl Fn(&Value, &str) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for (i, schema) in schemas.as_array().into_iter().flatten().enumerate() {
        check(schema, &format!("{path}[{i}]"))?;
    }
    Ok(())
}

/// How much of a schema is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strictness {
    /// All that can be enforced at a reasonable price.
    Full,
    /// Types, properties and choices only.
    Shape,
    /// Any object.
    Object,
}

/// The enforceable part of a schema. `notes` says what was left out, and where.
pub(crate) fn relax(
    schema: &Value,
    path: &str,
    strictness: Strictness,
    notes: &mut Vec<String>,
) -> Value {
    if strictness == Strictness::Object {
        return json!({"type": "object"});
    }
    let mut out = relax_below(schema, path, strictness, 0, notes);
    if out.as_object().is_none_or(Map::is_empty) {
        out = json!({"type": "object"});
    }
    out
}

fn relax_below(
    schema: &Value,
    path: &str,
    strictness: Strictness,
    depth: usize,
    notes: &mut Vec<String>,
) -> Value {
    let Value::Object(object) = schema else {
        return match schema {
            Value::Bool(_) => schema.clone(),
            other => {
                notes.push(format!("{path} is {}, not a schema", short(other)));
                json!({})
            }
        };
    };
    if depth > DEEPEST {
        notes.push(format!("{path} is nested too deeply"));
        return json!({});
    }
    let mut out = Map::new();
    for (key, value) in object {
        let here = format!("{path}.{key}");
        let mut below =
            |schema: &Value, path: &str| relax_below(schema, path, strictness, depth + 1, notes);
        match key.as_str() {
            "properties" | "$defs" | "definitions" => {
                let Some(schemas) = value.as_object() else {
                    notes.push(here);
                    continue;
                };
                let relaxed = schemas
                    .iter()
                    .map(|(name, schema)| (name.clone(), below(schema, &format!("{here}.{name}"))));
                out.insert(key.clone(), Value::Object(relaxed.collect()));
            }
            "items" if value.is_array() => {
                // The older form of `prefixItems`.
                let schemas = value.as_array().into_iter().flatten();
                let list: Vec<Value> = schemas.map(|s| below(s, &here)).collect();
                out.insert("prefixItems".into(), Value::Array(list));
            }
            "items" | "additionalProperties" => {
                out.insert(key.clone(), below(value, &here));
            }
            "anyOf" | "oneOf" | "allOf" | "prefixItems" => {
                let schemas = value.as_array().into_iter().flatten();
                let list: Vec<Value> = schemas.map(|s| below(s, &here)).collect();
                if list.is_empty() {
                    notes.push(here);
                    continue;
                }
                // A choice of exactly one cannot be enforced while it is written.
                let key = if key == "oneOf" && !object.contains_key("anyOf") {
                    "anyOf"
                } else {
                    key
                };
                out.insert(key.to_owned(), Value::Array(list));
            }
            "type" => {
                let known = |v: &Value| v.as_str().is_some_and(|t| TYPES.contains(&t));
                match value {
                    Value::Array(types) if !types.is_empty() && types.iter().all(known) => {}
                    one if known(one) => {}
                    _ => {
                        notes.push(format!("{here} is {}", short(value)));
                        continue;
                    }
                }
                out.insert(key.clone(), value.clone());
            }
            "enum" | "const" => {
                out.insert(key.clone(), value.clone());
            }
            "required" => {
                let Some(names) = value.as_array() else {
                    notes.push(here);
                    continue;
                };
                let names = names.iter().filter(|n| n.is_string()).cloned().collect();
                out.insert(key.clone(), Value::Array(names));
            }
            "$ref" => {
                if value.as_str().is_some_and(|r| r.starts_with('#')) {
                    out.insert(key.clone(), value.clone());
                } else {
                    notes.push(format!("{here} points outside"));
                }
            }
            "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties"
            | "maxProperties" => {
                let count = value.as_u64();
                if strictness == Strictness::Full && count.is_some_and(|n| n <= MOST_COUNTED) {
                    out.insert(key.clone(), value.clone());
                } else {
                    notes.push(format!("{here} is {}", short(value)));
                }
            }
            "pattern" => {
                let simple = value.as_str().is_some_and(enforceable);
                if strictness == Strictness::Full && simple {
                    out.insert(key.clone(), value.clone());
                } else {
                    notes.push(format!("{here} is {}", short(value)));
                }
            }
            "format" | "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum"
            | "multipleOf" => {
                let good = value.is_number() || (key == "format" && value.is_string());
                if strictness == Strictness::Full && good {
                    out.insert(key.clone(), value.clone());
                } else {
                    notes.push(format!("{here} is {}", short(value)));
                }
            }
            // Words about the schema, not about the value.
            "title" | "description" | "default" | "examples" | "example" | "$schema" | "$id"
            | "id" | "$comment" | "deprecated" | "readOnly" | "writeOnly" | "nullable"
            | "strict" => {}
            _ => notes.push(here),
        }
    }
    Value::Object(out)
}

/// Whether a pattern is short and made of what an automaton can do.
fn enforceable(pattern: &str) -> bool {
    if pattern.len() > LONGEST_PATTERN || regex::Regex::new(pattern).is_err() {
        return false;
    }
    let mut groups = pattern.match_indices("(?");
    groups.all(|(at, _)| pattern[at..].starts_with("(?:")) && !pattern.contains("\\b")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Strictness, check, relax};

    #[test]
    fn a_malformed_schema_is_named_by_path() {
        let refused = |schema: Value, path: &str| {
            let failure = check(&schema, "schema").expect_err("not valid");
            assert!(failure.message.contains(path), "{failure}");
        };
        let age = json!({"type": "object", "properties": {"age": {"type": "integr"}}});
        refused(age, "schema.properties.age.type: \"integr\"");
        refused(json!(3), "at schema: 3");
        refused(
            json!({"anyOf": [{"type": "string"}, {"enum": []}]}),
            "schema.anyOf[1].enum",
        );
        refused(json!({"required": "name"}), "schema.required");
        refused(json!({"$ref": "#/$defs/none"}), "schema.$ref");
        refused(
            json!({"items": {"maxLength": -1}}),
            "schema.items.maxLength",
        );
        let good = json!({"type": ["object", "null"], "properties": {"a": {"$ref": "#/$defs/a"}},
            "$defs": {"a": {"enum": [1, "b"]}}, "required": ["a"], "additionalProperties": false, "x-own": 1});
        check(&good, "schema").expect("valid");
    }

    #[test]
    fn what_cannot_be_enforced_is_left_out_with_a_note() {
        let schema = json!({"type": "object", "title": "T", "properties": {
            "text": {"type": "string", "maxLength": 100_000, "pattern": "^(?!x).*$"},
            "code": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9},
            "odd": {"type": "any", "if": {"const": 1}},
            "one": {"oneOf": [{"type": "string"}, {"type": "null"}]}}});
        let mut notes = Vec::new();
        let relaxed = relax(&schema, "p", Strictness::Full, &mut notes);
        let expected = json!({"type": "object", "properties": {
            "text": {"type": "string"}, "code": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9},
            "odd": {}, "one": {"anyOf": [{"type": "string"}, {"type": "null"}]}}});
        assert_eq!(relaxed, expected);
        assert_eq!(notes.len(), 4, "{notes:?}");
        assert!(
            notes[0].starts_with("p.properties.text.maxLength"),
            "{notes:?}"
        );
        let shape = relax(&schema, "p", Strictness::Shape, &mut notes);
        assert_eq!(shape["properties"]["code"], json!({"type": "string"}));
    }
}
