"""The other side of `scripts/bench`: the same cases in llama.cpp and PyTorch + PEFT.

usage: bench_reference.py MODEL.gguf THREADS CASE

Cases are those of crates/model/examples/bench_model.rs. `prefill` and `decode` are run by
llama.cpp (llama-cpp-python), `train` by transformers + PEFT on the dequantised weights in
f32 with gradient checkpointing. One JSON line is printed. One case per process, so that
the peak memory is that case's own.
"""

import ctypes
import json
import os
import statistics
import sys
import time

REPEAT = 5


def ids(n, seed):
    out = []
    for _ in range(n):
        seed = (seed * 1664525 + 1013904223) & 0xFFFFFFFF
        out.append(20 + (seed >> 8) % 49000)
    return out


def peak_mib():
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


class Llama:
    """As much of llama.cpp's C interface as the cases need."""

    def __init__(self, path, threads, context, sequences):
        import llama_cpp

        self.api = api = llama_cpp
        self.quiet = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self.quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        model = api.llama_model_default_params()
        self.model = api.llama_model_load_from_file(path.encode(), model)
        settings = api.llama_context_default_params()
        settings.n_ctx = context * sequences
        settings.n_batch = max(512, sequences)
        settings.n_ubatch = 512
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, settings)
        self.batch = api.llama_batch_init(settings.n_batch, 0, 1)

    def clear(self):
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def decode(self, items):
        """`items` are (token, position, sequence, whether logits are wanted)."""
        for start in range(0, len(items), 512):
            part = items[start : start + 512]
            self.batch.n_tokens = len(part)
            for i, (token, position, sequence, wanted) in enumerate(part):
                self.batch.token[i] = token
                self.batch.pos[i] = position
                self.batch.n_seq_id[i] = 1
                self.batch.seq_id[i][0] = sequence
                self.batch.logits[i] = wanted
            if self.api.llama_decode(self.context, self.batch) != 0:
                raise RuntimeError("llama_decode failed")


def prefill(path, threads, n):
    llama = Llama(path, threads, n + 8, 1)
    tokens = ids(n, 7)
    seconds = []
    for _ in range(REPEAT):
        llama.clear()
        began = time.perf_counter()
        llama.decode([(t, i, 0, i == n - 1) for i, t in enumerate(tokens)])
        seconds.append(time.perf_counter() - began)
    return n, seconds


def decode(path, threads, past, sequences):
    steps = 32
    llama = Llama(path, threads, past + steps + 8, sequences)
    for sequence in range(sequences):
        llama.decode([(t, i, sequence, i == past - 1) for i, t in enumerate(ids(past, sequence))])
    seconds = []
    for step in range(steps):
        began = time.perf_counter()
        tokens = [ids(1, step * 31 + s)[0] for s in range(sequences)]
        llama.decode([(t, past + step, s, 1) for s, t in enumerate(tokens)])
        seconds.append(time.perf_counter() - began)
    return sequences, seconds


def train(path, threads, sequences, n):
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        os.path.dirname(path), gguf_file=os.path.basename(path), dtype=torch.float32
    )
    model.config.use_cache = False
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=linears))
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    x = torch.tensor([ids(n + 1, s + 1) for s in range(sequences)])
    advantages = torch.tensor(ids(sequences * n, 3)).remainder(2000) / 1000 - 1
    advantages = advantages.view(sequences, n)
    seconds = []
    for _ in range(REPEAT):
        began = time.perf_counter()
        logits = model(input_ids=x[:, :-1].contiguous()).logits
        new = torch.log_softmax(logits, -1).gather(-1, x[:, 1:, None]).squeeze(-1)
        ratio = (new - new.detach()).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (-surrogate.mean()).backward()
        seconds.append(time.perf_counter() - began)
        model.zero_grad(set_to_none=True)
    return sequences * n, seconds


def main():
    path, threads, case = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    kind, *numbers = case.split(":")
    run = {"prefill": prefill, "decode": decode, "train": train}[kind]
    tokens, seconds = run(path, threads, *map(int, numbers))
    row = {
        "section": "training" if kind == "train" else "model",
        "engine": "PyTorch + PEFT" if kind == "train" else "llama.cpp",
        "row": case,
        "value": tokens / statistics.median(seconds),
        "unit": "tokens/s",
        "peak_mib": peak_mib(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
