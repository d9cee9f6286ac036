"""Log-probabilities of the next token, from transformers and PEFT in f32.

usage: peft_logits.py MODEL.gguf|FOLDER ADAPTER_DIR|- TOKEN_ID...

Prints one JSON list with one value per token of the vocabulary. Of an adapter, every
tensor in its file must have found its place.
"""
import json
import pathlib
import sys

import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

path, adapter, ids = pathlib.Path(sys.argv[1]), sys.argv[2], [int(i) for i in sys.argv[3:]]
if path.is_dir():
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    tokenizer = AutoTokenizer.from_pretrained(path)
    # The tokeniser of the folder is the model's own.
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer(text, add_special_tokens=False).input_ids == ids, text
    assert "assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
else:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
if adapter != "-":
    model = PeftModel.from_pretrained(model, adapter)
    with safe_open(pathlib.Path(adapter) / "adapter_model.safetensors", "pt") as file:
        exported = {name: file.get_tensor(name) for name in file.keys()}
    loaded = {
        name.replace(".default.", "."): value
        for name, value in model.named_parameters()
        if "lora_" in name
    }
    assert set(exported) == set(loaded), sorted(set(exported) ^ set(loaded))[:5]
    for name, value in exported.items():
        assert torch.equal(value.float(), loaded[name].float()), name
model.eval()
with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0, -1].double()
print(json.dumps(torch.log_softmax(logits, -1).tolist()))
