"""Log-probabilities of the next token, from llama.cpp.

usage: llama_cpp_logits.py MODEL.gguf LORA.gguf|- TOKEN_ID...

Prints one JSON list with one value per token of the vocabulary.
"""
import json
import sys

import llama_cpp
import numpy

path, lora, ids = sys.argv[1], sys.argv[2], [int(i) for i in sys.argv[3:]]
model = llama_cpp.Llama(
    path,
    lora_path=None if lora == "-" else lora,
    n_ctx=512,
    n_threads=2,
    logits_all=True,
    # The key/value cache in f32, so that only the weights are approximate.
    type_k=0,
    type_v=0,
    verbose=False,
)
model.eval(ids)
logits = numpy.array(model.scores[len(ids) - 1], dtype=numpy.float64)
logits -= logits.max()
print(json.dumps((logits - numpy.log(numpy.exp(logits).sum())).tolist()))
