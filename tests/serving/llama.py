"""What llama.cpp answers: a process that tests start with the Python of `.llama_cpp`, which has the package xllamacpp.

It reads jobs from stdin, one JSON object a line, and prints a line of JSON for each. A job is {"model": file,
"adapter": file or null, "prompt": [token, ...], "max_tokens"}. Its answer is {"tokens": the likeliest tokens after the
prompt, "top": for each of them the log-probabilities of the likeliest tokens of its place, by the token's number}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import xllamacpp

ANSWER = "ANSWER "  # begins the lines that the tests read: llama.cpp writes to stdout too
NUM_TOP = 20


def answer(model: str, adapter: str | None, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 256
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if adapter is not None:
        found = xllamacpp.CommonAdapterLoraInfo()
        found.path = adapter
        found.scale = 1.0
        params.lora_adapters = [found]
    server = xllamacpp.Server(params)
    given = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "logprobs": NUM_TOP, "ignore_eos": False}
    chosen = server.handle_completions(given)["choices"][0]["logprobs"]["content"]
    top = [{each["id"]: each["logprob"] for each in place["top_logprobs"]} for place in chosen]
    return {"tokens": [place["id"] for place in chosen], "top": top}


if __name__ == "__main__":
    for line in sys.stdin:
        print(ANSWER + json.dumps(answer(**json.loads(line))), flush=True)
