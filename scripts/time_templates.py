"""How long conversations of 161 messages take under each chat template of a folder, beside stock's render of them.

usage: python scripts/time_templates.py FOLDER [FOLDER ...]

One conversation has 40 calls of a tool, the other none. A row is what training does with it, the second time, when the
kinds of turns are known; stock is transformers' `render_jinja_template` alone. Both are processor times of this one
process, in which templates render as they do in the processes that tokenize. The slowest, by their ratio, come first;
each is on stderr as soon as it is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from audit_templates import TOOLS, make_tokenizer
from qlora_fsdp.common.contained import contain_itself
from qlora_fsdp.config.schema import LossOn
from qlora_fsdp.data.chats.conversation import format_messages, read_conversation
from qlora_fsdp.data.chats.template import Conversation, has_generation_marks
from qlora_fsdp.data.row import BadRow

LIMIT = 10  # times as long as stock's render
NUM_SHOWN = 20
NUM_MEANS = 3
MEAN_SECONDS = 0.03


def with_calls() -> list[dict[str, Any]]:
    """A question, and 40 times a call, its answer, an answer and the next question."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What do the files say?"}]
    for number in range(40):
        name = f"abcde{number:04}"
        function = {"name": "weather", "arguments": {"city": f"city {number}"}}
        call = {"id": name, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "weather", "tool_call_id": name, "content": f"result {number}"})
        messages.append({"role": "assistant", "content": f"answer {number}"})
        messages.append({"role": "user", "content": f"question {number}"})
    return messages


def without_calls() -> list[dict[str, Any]]:
    """80 questions with their answers, and a last question."""
    pairs = [{"role": role, "content": f"{role} {n} says"} for n in range(80) for role in ("user", "assistant")]
    return [*pairs, {"role": "user", "content": "the end"}]


def render(conversation: Conversation) -> Any:
    """Stock's render of a conversation."""
    given = conversation.as_template_takes(conversation.messages)
    return render_jinja_template([given], conversation.tools, None, conversation.template, **conversation.variables)


def measure(compute: Callable[[], Any]) -> float:
    """Seconds of processor time of a call, the least of several means: others may use the machine."""
    compute()
    means = []
    for _ in range(NUM_MEANS):
        num_calls = 0
        start = time.process_time()
        while time.process_time() - start < MEAN_SECONDS:  # that clock may tick a hundred times a second
            compute()
            num_calls += 1
        means.append((time.process_time() - start) / num_calls)
    return min(means)


def main(folders: list[str]) -> int:
    """Prints the table; the exit code is 1 if a template is above the limit."""
    if not folders:
        print(__doc__, file=sys.stderr)
        return 2
    contain_itself()
    found: list[tuple[float, str, str, float, float]] = []
    files = sorted((file for folder in folders for file in Path(folder).rglob("*.jinja")), key=lambda file: file.stem)
    with TemporaryDirectory() as scratch:
        for file in files:
            template = file.read_text(encoding="utf-8")
            if has_generation_marks(template):
                continue
            tokenizer = make_tokenizer(file.stem, template, Path(scratch))
            for kind, messages, tools in (("calls", with_calls(), TOOLS), ("chat", without_calls(), None)):
                conversation = read_conversation(messages, tools, tokenizer)
                try:
                    own = measure(lambda: format_messages(messages, tools, LossOn.completion, tokenizer))  # noqa: B023
                except BadRow:  # the template knows no tools, or no such order
                    continue
                stock = measure(lambda: render(conversation))  # noqa: B023
                found.append((own / stock, file.stem, kind, own, stock))
                print(f"{file.stem}, {kind}: {own / stock:.1f}", file=sys.stderr)
    found.sort(reverse=True)
    print("| template | conversation | times stock | row, ms | stock, ms |\n|---|---|---|---|---|")
    for ratio, name, kind, own, stock in found[:NUM_SHOWN]:
        print(f"| `{name}` | {kind} | {ratio:.1f} | {1000 * own:.1f} | {1000 * stock:.1f} |")
    above = sum(ratio > LIMIT for ratio, *_ in found)
    print(f"\n{len(found)} measured, {above} above {LIMIT} times stock's render.")
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
