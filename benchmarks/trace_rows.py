"""CPU time from a line of JSON to tokens and targets, for traces of an agent, beside what TRL calls for each row.

usage: python benchmarks/trace_rows.py TOKENIZER_FOLDER [TEMPLATE.jinja ...]

A trace has 40 calls of a tool and some 19,000 tokens. TRL's SFTTrainer calls `apply_chat_template` for each row, with
the marks of {% generation %} if only the assistant's turns are to be trained on, and can't find these turns otherwise.
Without templates of yours, some of the tests' templates.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from qlora_fsdp.config.schema import BadRows, DataFormat, LossOn
from qlora_fsdp.data.chats.template import has_generation_marks
from qlora_fsdp.data.tokenize import RowTokenizer

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "tests" / "helpers" / "model_templates"
SHOWN = ("qwen2_5", "qwen2_5_training", "qwen3", "qwen3_training")
NUM_CALLS, NUM_ROWS, NUM_TIMES = 40, 4, 10
WORDS = (ROOT / "docs" / "data.md").read_text().split()
TOOLS = [{"type": "function", "function": {"name": "open_file", "description": "Opens.", "parameters": {}}}]


def trace(seed: int) -> dict[str, Any]:
    """A question, 40 calls with their answers, and the answer, in words of a page of the docs."""
    rng = random.Random(seed)

    def say(num_words: int) -> str:
        return " ".join(rng.choices(WORDS, k=num_words))

    messages: list[dict[str, Any]] = [{"role": "user", "content": say(50)}]
    for _ in range(NUM_CALLS):
        call = {"name": "open_file", "arguments": {"path": say(2)}}
        calls = [{"type": "function", "function": call}]
        messages.append({"role": "assistant", "content": say(20), "tool_calls": calls})
        messages.append({"role": "tool", "content": say(200)})
    return {"messages": [*messages, {"role": "assistant", "content": say(80)}], "tools": TOOLS}


def least(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The least CPU time of each function in ms a row, measured in turns, because other work slows some turns."""
    times: dict[str, float] = {}
    for _ in range(NUM_TIMES):
        for name, function in functions.items():
            started = time.process_time()
            function()
            times[name] = min(times.get(name, 1e9), 1000 * (time.process_time() - started) / NUM_ROWS)
    return times


def main(folder: str, paths: list[str]) -> None:
    """Print milliseconds of CPU time per row."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for path in [Path(path) for path in paths] or [TEMPLATES / f"{name}.jinja" for name in SHOWN]:
        tokenizer.chat_template = path.read_text()
        has_marks = has_generation_marks(tokenizer.chat_template)
        rows = [trace(seed) for seed in range(NUM_ROWS)]
        batch: dict[str, list[Any]] = {"place": [""] * NUM_ROWS, "row": [json.dumps(row).encode() for row in rows]}
        tokenize = RowTokenizer(tokenizer, DataFormat.messages, LossOn.completion, 2**20, BadRows.truncate)
        num_tokens = sum(len(tokens) for tokens in tokenize(batch)["tokens"]) // NUM_ROWS

        def as_trl(rows: list[dict[str, Any]] = rows, has_marks: bool = has_marks) -> None:
            options: Any = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": has_marks}
            for row in rows:
                tokenizer.apply_chat_template(row["messages"], tools=row["tools"], **options)

        times = least({"ours": lambda t=tokenize, b=batch: t(b), "as TRL": as_trl})  # type: ignore[misc]
        shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in times.items())
        print(f"{path.stem}: {num_tokens:,} tokens, {shown}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
