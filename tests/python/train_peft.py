"""Makes an adapter with PEFT itself: a LoRA on a base, trained for a few steps.

usage: train_peft.py MODEL.gguf OUT_DIR OPTIONS_JSON TOKEN_ID...

Options: r, lora_alpha, target_modules and other fields of LoraConfig; `dtype` of the
saved file; `base`, the name it gives as its base.
"""
import json
import pathlib
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

path, out, options = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
ids = torch.tensor([[int(i) for i in sys.argv[4:]]])
dtype, base = options.pop("dtype", "float32"), options.pop("base")
torch.manual_seed(7)
model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
for _ in range(4):
    optimiser.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimiser.step()
model.save_pretrained(out)
config = json.loads((out / "adapter_config.json").read_text())
config["base_model_name_or_path"] = base
(out / "adapter_config.json").write_text(json.dumps(config))
weights = out / "adapter_model.safetensors"
if dtype != "float32":
    save_file({k: v.to(getattr(torch, dtype)) for k, v in load_file(weights).items()}, weights)
print(json.dumps({"loss": loss.item()}))
