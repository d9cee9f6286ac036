"""Transformers and PEFT as readers of Spotter's files, for as many questions as come.

Reads one JSON object per line from standard input and answers with one per line:
  {"do": "logprobs", "model": GGUF or folder, "adapter": directory or null, "ids": [...]}
      log-probabilities of the next token, whole vocabulary, computed in f32
  {"do": "train", "model": GGUF, "out": directory, "options": {...}, "ids": [...]}
      an adapter made and trained by PEFT itself; options are those of LoraConfig, with
      `dtype` of the saved file and `base`, the name it gives as its base
Answers {"ok": ...} or {"error": traceback}.
"""
import json
import pathlib
import sys
import traceback

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(path, ids):
    if not path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    # The folder's tokeniser and template are the model's own.
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer(text, add_special_tokens=False).input_ids == ids, text
    question = [{"role": "user", "content": "Hello"}]
    assert "assistant" in tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    return model


def logprobs(model, ids, adapter=None):
    model = load(pathlib.Path(model), ids)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
        # Every tensor of the file has found its place.
        with safe_open(pathlib.Path(adapter) / "adapter_model.safetensors", "pt") as file:
            exported = {name: file.get_tensor(name) for name in file.keys()}
        loaded = {n.replace(".default.", "."): v for n, v in model.named_parameters() if "lora_" in n}
        assert set(exported) == set(loaded), sorted(set(exported) ^ set(loaded))[:5]
        for name, value in exported.items():
            assert torch.equal(value.float(), loaded[name].float()), name
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].double()
    return torch.log_softmax(logits, -1).tolist()


def train(model, out, options, ids):
    out, dtype, base = pathlib.Path(out), options.pop("dtype", "float32"), options.pop("base")
    torch.manual_seed(7)
    model = get_peft_model(load(pathlib.Path(model), ids), LoraConfig(task_type="CAUSAL_LM", **options))
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    batch = torch.tensor([ids])
    for _ in range(4):
        optimiser.zero_grad()
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimiser.step()
    model.save_pretrained(out)
    config = json.loads((out / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    (out / "adapter_config.json").write_text(json.dumps(config))
    weights = out / "adapter_model.safetensors"
    if dtype != "float32":
        save_file({k: v.to(getattr(torch, dtype)) for k, v in load_file(weights).items()}, weights)
    return loss.item()


# What the libraries print is no answer.
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    question = json.loads(line)
    try:
        answer = {"ok": {"logprobs": logprobs, "train": train}[question.pop("do")](**question)}
    except Exception:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), file=answers, flush=True)
