"""Reads exported parquet as veRL's data set does: the columns, and prompts as messages.

usage: read_verl.py DATA.parquet MODEL_FOLDER
"""
import sys

from datasets import load_dataset
from transformers import AutoTokenizer

rows = load_dataset("parquet", data_files=sys.argv[1], split="train")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
assert len(rows) > 0
for row in rows:
    assert row["data_source"] == "spotter" and row["ability"] == "agent"
    assert row["reward_model"].keys() == {"style", "ground_truth"}
    extra = row["extra_info"]
    assert -1 <= extra["reward"] <= 1 and extra["response"] and extra["uid"]
    assert [m.keys() == {"role", "content"} for m in row["prompt"]]
    ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True)
    assert len(ids) > 0
print(f"{len(rows)} rows; the first prompt is {rows[0]['prompt']}")
