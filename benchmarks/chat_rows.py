"""CPU time to format one conversation with tools, by its number of turns, in one process.

usage: python benchmarks/chat_rows.py [TEMPLATE.jinja ...]

Without templates of yours, those of the tests whose form knows tools, with and without generation marks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from qlora_fsdp.config.schema import DataConfig, DataFormat, LossOn, ModelConfig
from qlora_fsdp.data.format import format_row
from qlora_fsdp.data.tokenizer import load_tokenizer

QWEN = Path(__file__).parents[1] / "tests" / "helpers" / "templates" / "qwen2.5.jinja"
NUM_CALLS = (16, 64, 256)


def conversation(num_calls: int) -> dict[str, Any]:
    """A question, calls of a tool with their answers, and the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is in these files?"}]
    for number in range(num_calls):
        call = {"function": {"name": "read", "arguments": {"path": f"file-{number}.txt", "lines": number}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", **call}]})
        messages.append({"role": "tool", "content": f"The text of file {number}. " * 20})
    messages.append({"role": "assistant", "content": "They have numbered texts."})
    return {"messages": messages, "tools": [{"type": "function", "function": {"name": "read", "parameters": {}}}]}


def main(paths: list[str]) -> None:
    """Print milliseconds of CPU time per row, the least of three measurements."""
    templates = {Path(path).stem: Path(path).read_text() for path in paths}
    if not templates:
        plain = QWEN.read_text()
        start, end = "{{- '<|im_start|>assistant' + ", "    {%- else %}"
        before, _, rest = plain.partition(start)
        calls, _, after = rest.partition(end)
        marked = (
            before + "{{- '<|im_start|>assistant' }}{% generation %}{{ " + calls + "{% endgeneration %}" + end + after
        )
        templates = {"qwen2.5": plain, "qwen2.5 with marks": marked}
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig())
    for name, template in templates.items():
        tokenizer.chat_template = template
        for num_calls in NUM_CALLS:
            row, num_rows = conversation(num_calls), 4 * NUM_CALLS[-1] // num_calls
            for small in (1, 4):  # compiles the template, and lets it be learned
                format_row(DataFormat.messages, conversation(small), LossOn.completion, tokenizer)
            times = []
            for _ in range(3):
                started = time.process_time()
                for _ in range(num_rows):
                    format_row(DataFormat.messages, row, LossOn.completion, tokenizer)
                times.append((time.process_time() - started) / num_rows)
            print(f"{name}: {num_calls} calls, {1000 * min(times):.2f} ms", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
