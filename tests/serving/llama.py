"""What llama.cpp answers: a process that tests start with the Python of `.llama_cpp`, which has the package xllamacpp.

It reads one JSON object from stdin, {"model": file, "adapter": file or null, "prompt": [token, ...], "max_tokens"}, and
prints a line of JSON: {"tokens": the likeliest tokens after the prompt, "log_probs": of each}.
"""

from __future__ import annotations

import json
import sys

import xllamacpp

ANSWER = "ANSWER "  # begins the line that the tests read: llama.cpp writes to stdout too


def answer(model: str, adapter: str | None, prompt: list[int], max_tokens: int) -> dict[str, list[float]]:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 256
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    if adapter is not None:
        found = xllamacpp.CommonAdapterLoraInfo()
        found.path = adapter
        found.scale = 1.0
        params.lora_adapters = [found]
    server = xllamacpp.Server(params)
    given = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    chosen = server.handle_completions(given)["choices"][0]["logprobs"]["content"]
    return {"tokens": [each["id"] for each in chosen], "log_probs": [each["logprob"] for each in chosen]}


if __name__ == "__main__":
    print(ANSWER + json.dumps(answer(**json.load(sys.stdin))), flush=True)
