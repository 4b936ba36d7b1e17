"""What vLLM answers: a process that tests start with the Python of `.serving`, which has vLLM and not this project.

It reads jobs from stdin, one JSON object a line, and prints a line of JSON for each. All engines are made in this one
process, one after another, as an import of vLLM takes longer than an engine of a tiny model.

A job is {"name", "base", "dtype", "prompt": [token, ...], "max_tokens", "adapters": {name: folder}, "options",
"experts": file or null}. Its answer is {"name", "base": tokens, "logprobs": of these tokens, and for each adapter
{"tokens", "passed_over"}}: the layers of the adapter that vLLM has no place for. In place of tokens stands the message
of an error. Where `experts` names a file, nothing is generated: vLLM's buffers of the first adapter's experts are
multiplied and saved there.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
)

import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

ANSWER = "ANSWER "  # begins the lines that the tests read: vLLM writes to stdout too


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """What the base and each adapter answer, by their names."""
    found: dict[str, Any] = {"name": job["name"]}
    try:
        lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32} if job["adapters"] else {}
        model = LLM(
            job["base"],
            dtype=job["dtype"],
            max_model_len=128,
            max_num_batched_tokens=128,
            max_num_seqs=2,
            enforce_eager=True,
            skip_tokenizer_init=True,
            **lora,
            **job["options"],
        )
        requests = [LoRARequest(name, number, path) for number, (name, path) in enumerate(job["adapters"].items(), 1)]
        if job["experts"] is not None:
            found[requests[0].lora_name] = {"passed_over": place(model, requests[0])}
            (products,) = model.collective_rpc(multiply_experts, args=(requests[0].lora_int_id,))
            torch.save(products, job["experts"])
            return found
        found["base"], found["logprobs"] = complete(model, job, None)
        for request in requests:
            tokens, _ = complete(model, job, request)
            found[request.lora_name] = {"tokens": tokens, "passed_over": place(model, request)}
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def complete(model: LLM, job: dict[str, Any], request: LoRARequest | None) -> tuple[list[int], list[float]]:
    """The likeliest tokens after the prompt, and their log-probabilities."""
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], detokenize=False, ignore_eos=True, logprobs=1
    )
    prompt = {"prompt_token_ids": job["prompt"]}
    (output,) = model.generate([prompt], sampling, lora_request=request, use_tqdm=False)
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    return tokens, [each[token].logprob for token, each in zip(tokens, completion.logprobs, strict=True)]


def place(model: LLM, request: LoRARequest) -> list[str]:
    """Load an adapter. Returns the layers of it that vLLM passes over."""
    model.llm_engine.add_lora(request)
    (names,) = model.collective_rpc(passed_over, args=(request.lora_int_id,))
    return names


def passed_over(worker: Any, adapter: int) -> list[str]:
    """The layers of a loaded adapter that are no modules of the model.

    PEFT has the first weight of fused experts under `base_layer`, which vLLM moves to the experts' module.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    names = {name.removesuffix(".experts.base_layer") for name in manager.get_adapter(adapter).loras}
    experts = {name.removesuffix(".experts") for name in manager.modules if name.endswith(".experts")}
    return sorted(names - experts - set(manager.modules))


def multiply_experts(worker: Any, adapter: int) -> dict[str, Tensor]:
    """B A of all experts' weights, [E, rows, columns] in float32, from the buffers that vLLM's kernels read."""
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(adapter)
    found = {}
    for name, module in manager.modules.items():
        if not hasattr(module, "w13_lora_a_stacked"):
            continue
        gate_up = zip(module.w13_lora_b_stacked, module.w13_lora_a_stacked, strict=True)
        found[f"{name}.gate_up_proj"] = torch.cat([b[slot].float() @ a[slot].float() for b, a in gate_up], 1)
        found[f"{name}.down_proj"] = (
            module.w2_lora_b_stacked[0][slot].float() @ module.w2_lora_a_stacked[0][slot].float()
        )
    return found


if __name__ == "__main__":
    for line in sys.stdin:
        print(ANSWER + json.dumps(answer(json.loads(line))), flush=True)
        gc.collect()
