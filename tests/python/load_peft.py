"""Loads an exported adapter with PEFT on the dequantised GGUF base.

usage: load_peft.py MODEL.gguf ADAPTER_DIR

Fails unless every LoRA tensor in the export is found in the model and the
adapter changes the model's log-probabilities.
"""
import pathlib
import sys

import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf, adapter = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
base = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
ids = tokenizer("What is tea?", return_tensors="pt").input_ids
with torch.no_grad():
    before = base(ids).logits
    model = PeftModel.from_pretrained(base, adapter)
    after = model(ids).logits

with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
    exported = {name: file.get_tensor(name) for name in file.keys()}
loaded = {
    name.replace(".default.", "."): tensor
    for name, tensor in model.named_parameters()
    if "lora_" in name
}
assert set(exported) == set(loaded), sorted(set(exported) ^ set(loaded))[:5]
for name, tensor in exported.items():
    assert torch.equal(tensor.float(), loaded[name].float()), name
change = (after - before).abs().max().item()
assert change > 1e-4, f"the adapter changes nothing ({change})"
print(f"PEFT loaded {len(exported)} tensors; the logits change by up to {change:.4f}")
