//! Recorded answers as the data sets that other trainers read: TRL's unpaired (KTO) and
//! paired (DPO) preferences, and veRL's parquet.
//!
//! Messages have a role and a content. Tool calls and reasoning are written into the
//! content as Hermes-style markup, because a column of arguments that differ from call to
//! call has no type that Arrow could give it.

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;

use anyhow::{Context, Result};
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};

/// veRL's columns. `prompt` is a list of messages; what was answered and how it was
/// rewarded lies in `extra_info`.
const VERL: &str = "message verl {
    required binary data_source (STRING);
    required group prompt (LIST) {
        repeated group list {
            required group element {
                required binary role (STRING);
                required binary content (STRING);
            }
        }
    }
    required binary ability (STRING);
    required group reward_model {
        required binary style (STRING);
        required binary ground_truth (STRING);
    }
    required group extra_info {
        required binary split (STRING);
        required int64 index;
        required binary uid (STRING);
        required binary response (STRING);
        required double reward;
    }
}";

/// One rated answer to the person's own request.
#[derive(Clone, Debug, PartialEq)]
struct Rated {
    uid: String,
    prompt: Vec<(String, String)>,
    tools: Option<String>,
    answer: String,
    reward: f64,
    correction: Option<String>,
}

/// What was asked: messages and tools.
type Question<'a> = (&'a [(String, String)], Option<&'a str>);

impl Rated {
    fn question(&self) -> Question<'_> {
        (&self.prompt, self.tools.as_deref())
    }
}

/// Rated answers, gathered line by line.
#[derive(Debug, Default)]
pub(crate) struct Dataset {
    rated: Vec<Rated>,
}

/// A message's text, with everything else that it says.
fn content(message: &Value) -> String {
    let text = |key: &str| message[key].as_str().unwrap_or_default();
    let mut out = String::new();
    let reasoning = text("reasoning").trim();
    if !reasoning.is_empty() {
        out.push_str(&format!("<think>\n{reasoning}\n</think>\n\n"));
    }
    out.push_str(text("content"));
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let arguments: Value = call["arguments"]
            .as_str()
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_else(|| call["arguments"].clone());
        let call = json!({"name": call["name"], "arguments": arguments});
        if !out.is_empty() {
            out.push('\n');
        }
        out.push_str(&format!("<tool_call>\n{call}\n</tool_call>"));
    }
    out
}

/// Tool definitions as TRL takes them: one JSON text, in OpenAI's form.
fn tools(request: &Value) -> Option<String> {
    let tools = request["tools"].as_array().filter(|t| !t.is_empty())?;
    let tools: Vec<Value> = tools
        .iter()
        .map(|tool| match tool.get("function") {
            Some(_) => tool.clone(),
            None => json!({"type": "function", "function": tool}),
        })
        .collect();
    Some(Value::from(tools).to_string())
}

impl Dataset {
    /// Takes one line of Spotter's own export; answers without a reward, and calls that
    /// did not serve the person's own request, are left out.
    ///
    /// # Errors
    /// When the line is not JSON.
    pub(crate) fn add(&mut self, line: &str) -> Result<()> {
        let step: Value = serde_json::from_str(line).context("a line is not JSON")?;
        let reward = step["reward"].as_f64().filter(|r| *r != 0.0);
        let (Some(reward), Some("main")) = (reward, step["kind"].as_str()) else {
            return Ok(());
        };
        let prompt = step["request"]["messages"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|m| (m["role"].as_str().unwrap_or("user").to_owned(), content(m)))
            .collect();
        self.rated.push(Rated {
            uid: step["uid"].as_str().unwrap_or_default().to_owned(),
            prompt,
            tools: tools(&step["request"]),
            answer: content(&step["response"]),
            reward,
            correction: step["correction"]
                .as_str()
                .filter(|c| !c.trim().is_empty())
                .map(str::to_owned),
        });
        Ok(())
    }

    /// TRL's unpaired preferences: `prompt`, `completion`, `label`. A correction is a
    /// liked completion.
    pub(crate) fn kto(&self) -> Vec<Value> {
        let mut rows = Vec::new();
        for step in &self.rated {
            let row = |text: &str, label: bool| {
                let answer = json!([{"role": "assistant", "content": text}]);
                with_tools(
                    json!({"prompt": messages(&step.prompt), "completion": answer, "label": label}),
                    step,
                )
            };
            rows.push(row(&step.answer, step.reward > 0.0));
            rows.extend(step.correction.as_deref().map(|c| row(c, true)));
        }
        rows
    }

    /// TRL's preference pairs: `prompt`, `chosen`, `rejected`. An answer's correction is
    /// preferred to it, and the best-liked answer to a disliked one of the same prompt.
    pub(crate) fn dpo(&self) -> Vec<Value> {
        let mut best: HashMap<Question<'_>, &Rated> = HashMap::new();
        for step in self.rated.iter().filter(|s| s.reward > 0.0) {
            let liked = best.entry(step.question()).or_insert(step);
            // Among equals the newest: later lines are newer.
            if step.reward >= liked.reward {
                *liked = step;
            }
        }
        let mut rows = Vec::new();
        for step in &self.rated {
            let liked = best.get(&step.question());
            let chosen = match (&step.correction, liked) {
                (Some(correction), _) => correction,
                (None, Some(liked)) if step.reward < 0.0 => &liked.answer,
                _ => continue,
            };
            if chosen.trim() == step.answer.trim() {
                continue;
            }
            let answer = |text: &str| json!([{"role": "assistant", "content": text}]);
            rows.push(with_tools(
                json!({
                    "prompt": messages(&step.prompt),
                    "chosen": answer(chosen),
                    "rejected": answer(&step.answer),
                }),
                step,
            ));
        }
        rows
    }

    /// veRL's parquet; answers the number of rows.
    ///
    /// # Errors
    /// When writing fails.
    pub(crate) fn verl(&self, out: impl Write + Send) -> Result<usize> {
        let schema = Arc::new(parse_message_type(VERL)?);
        let properties = WriterProperties::builder()
            .set_compression(Compression::UNCOMPRESSED)
            .build();
        let mut file = SerializedFileWriter::new(out, schema, Arc::new(properties))?;
        let mut rows = file.next_row_group()?;
        let texts = |text: &dyn Fn(&Rated) -> String| -> Vec<ByteArray> {
            self.rated
                .iter()
                .map(|s| ByteArray::from(text(s).into_bytes()))
                .collect()
        };
        bytes(&mut rows, &texts(&|_| "spotter".into()), None)?;
        let (mut roles, mut contents) = (Vec::new(), Vec::new());
        let (mut definitions, mut repetitions) = (Vec::new(), Vec::new());
        for step in &self.rated {
            if step.prompt.is_empty() {
                definitions.push(0);
                repetitions.push(0);
            }
            for (i, (role, content)) in step.prompt.iter().enumerate() {
                definitions.push(1);
                repetitions.push(i16::from(i > 0));
                roles.push(ByteArray::from(role.clone().into_bytes()));
                contents.push(ByteArray::from(content.clone().into_bytes()));
            }
        }
        let levels = Some((definitions.as_slice(), repetitions.as_slice()));
        bytes(&mut rows, &roles, levels)?;
        bytes(&mut rows, &contents, levels)?;
        bytes(&mut rows, &texts(&|_| "agent".into()), None)?;
        bytes(&mut rows, &texts(&|_| "rule".into()), None)?;
        let truth = |step: &Rated| match &step.correction {
            Some(correction) => correction.clone(),
            None if step.reward > 0.0 => step.answer.clone(),
            None => String::new(),
        };
        bytes(&mut rows, &texts(&truth), None)?;
        bytes(&mut rows, &texts(&|_| "train".into()), None)?;
        let indices: Vec<i64> = (0..).take(self.rated.len()).collect();
        let mut column = rows.next_column()?.context("a column is missing")?;
        column
            .typed::<Int64Type>()
            .write_batch(&indices, None, None)?;
        column.close()?;
        bytes(&mut rows, &texts(&|s| s.uid.clone()), None)?;
        bytes(&mut rows, &texts(&|s| s.answer.clone()), None)?;
        let rewards: Vec<f64> = self.rated.iter().map(|s| s.reward).collect();
        let mut column = rows.next_column()?.context("a column is missing")?;
        column
            .typed::<DoubleType>()
            .write_batch(&rewards, None, None)?;
        column.close()?;
        rows.close()?;
        file.close()?;
        Ok(self.rated.len())
    }
}

/// Definition and repetition levels of a nested column.
type Levels<'a> = Option<(&'a [i16], &'a [i16])>;

/// Writes the next column, which holds text.
fn bytes<W: Write + Send>(
    rows: &mut SerializedRowGroupWriter<'_, W>,
    values: &[ByteArray],
    levels: Levels<'_>,
) -> Result<()> {
    let mut column = rows.next_column()?.context("a column is missing")?;
    let (definitions, repetitions) = levels.unzip();
    column
        .typed::<ByteArrayType>()
        .write_batch(values, definitions, repetitions)?;
    Ok(column.close()?)
}

fn messages(prompt: &[(String, String)]) -> Value {
    prompt
        .iter()
        .map(|(role, content)| json!({"role": role, "content": content}))
        .collect()
}

fn with_tools(mut row: Value, step: &Rated) -> Value {
    if let Some(tools) = &step.tools {
        row["tools"] = tools.as_str().into();
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(uid: &str, question: &str, answer: &str, reward: Value, correction: Value) -> String {
        json!({
            "uid": uid, "kind": "main", "reward": reward, "correction": correction,
            "request": {"messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": question},
            ]},
            "response": {"role": "assistant", "content": answer},
        })
        .to_string()
    }

    fn dataset() -> Dataset {
        let mut dataset = Dataset::default();
        let mut side = line("side", "title?", "Tea", json!(1.0), Value::Null);
        side = side.replace("\"main\"", "\"side\"");
        for line in [
            line("a", "tea?", "no", json!(-1.0), Value::Null),
            line("b", "tea?", "yes", json!(1.0), Value::Null),
            line("c", "milk?", "no", json!(-1.0), json!("with pleasure")),
            line("d", "sugar?", "no", Value::Null, Value::Null),
            line("e", "lemon?", "no", json!(-0.5), Value::Null),
            side,
        ] {
            dataset.add(&line).expect("JSON");
        }
        dataset
    }

    #[test]
    fn every_rated_answer_is_a_row_and_a_correction_is_liked() {
        let rows = dataset().kto();
        let labels: Vec<(&str, bool)> = rows
            .iter()
            .map(|r| {
                let text = r["completion"][0]["content"].as_str().expect("text");
                (text, r["label"].as_bool().expect("label"))
            })
            .collect();
        let expected = [
            ("no", false),
            ("yes", true),
            ("no", false),
            ("with pleasure", true),
            ("no", false),
        ];
        assert_eq!(labels, expected);
        assert_eq!(
            rows[0]["prompt"][1],
            json!({"role": "user", "content": "tea?"})
        );
    }

    #[test]
    fn pairs_come_from_corrections_and_from_liked_answers_to_the_same_prompt() {
        let rows = dataset().dpo();
        let pairs: Vec<(&str, &str)> = rows
            .iter()
            .map(|r| {
                let text = |key: &str| r[key][0]["content"].as_str().expect("text");
                (text("chosen"), text("rejected"))
            })
            .collect();
        assert_eq!(pairs, [("yes", "no"), ("with pleasure", "no")]);
    }

    #[test]
    fn tool_calls_and_reasoning_stay_in_the_text() {
        let message = json!({
            "role": "assistant", "content": "", "reasoning": "I must look.",
            "tool_calls": [{"id": "x", "name": "look", "arguments": "{\"at\":\"tea\"}"}],
        });
        assert_eq!(
            content(&message),
            "<think>\nI must look.\n</think>\n\n\n<tool_call>\n{\"name\":\"look\",\"arguments\":{\"at\":\"tea\"}}\n</tool_call>"
        );
        let mut dataset = Dataset::default();
        let mut step: Value =
            serde_json::from_str(&line("a", "tea?", "no", json!(-1), json!("yes"))).expect("JSON");
        step["request"]["tools"] = json!([{"name": "look", "description": "", "parameters": {}}]);
        dataset.add(&step.to_string()).expect("JSON");
        for row in [&dataset.kto()[0], &dataset.dpo()[0]] {
            let tools: Value =
                serde_json::from_str(row["tools"].as_str().expect("text")).expect("JSON");
            assert_eq!(tools[0]["function"]["name"], "look");
        }
    }

    #[test]
    fn parquet_holds_every_rated_answer() {
        use parquet::file::reader::{FileReader, SerializedFileReader};
        let file = tempfile::NamedTempFile::new().expect("file");
        let rows = dataset()
            .verl(file.reopen().expect("file"))
            .expect("written");
        assert_eq!(rows, 4);
        let reader = SerializedFileReader::new(file.reopen().expect("file")).expect("parquet");
        let rows: Vec<String> = reader
            .get_row_iter(None)
            .expect("rows")
            .map(|row| row.expect("row").to_string())
            .collect();
        assert_eq!(rows.len(), 4);
        for words in ["lemon?", "Be kind.", "spotter"] {
            assert!(rows[3].contains(words), "{}", rows[3]);
        }
    }
}
