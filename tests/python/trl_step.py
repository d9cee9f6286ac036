"""Takes one step with a TRL trainer on exported data.

usage: trl_step.py kto|dpo DATA.jsonl MODEL_FOLDER
"""
import math
import sys
import tempfile

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

kind, data, folder = sys.argv[1:4]
rows = load_dataset("json", data_files=data, split="train")
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
with tempfile.TemporaryDirectory() as out:
    shared = dict(
        output_dir=out,
        max_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
    )
    if kind == "kto":
        from trl import KTOConfig, KTOTrainer

        trainer = KTOTrainer(model, args=KTOConfig(**shared), train_dataset=rows, processing_class=tokenizer)
    else:
        from trl import DPOConfig, DPOTrainer

        trainer = DPOTrainer(model, args=DPOConfig(**shared), train_dataset=rows, processing_class=tokenizer)
    result = trainer.train()
assert result.global_step == 1 and math.isfinite(result.training_loss), result
print(f"TRL's {kind} took a step on {len(rows)} rows; loss {result.training_loss:.4f}")
