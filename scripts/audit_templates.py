"""What is trained on by each chat template of a folder: a table of templates and kinds of turns, for docs/data.md.

usage: python scripts/audit_templates.py FOLDER [FOLDER ...]

Templates are `*.jinja` files. Every conversation goes through the project's own tokenizing of rows, with a tokenizer of
bytes to which the template's markers are added; the words of each message say whose they are. A cell says

    yes      the words are trained on, and nothing of user, system and tools; a stop token is the last target
    no stop  the same, and the template writes no stop token behind the answer, which the log tells
    told     the template leaves words or thoughts out, which the log tells
    refused  the row is left out, and the log says why
    WRONG    none of these
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.config.schema import BadRows, DataFormat, LossOn, ModelConfig
from qlora_fsdp.data.chats.template import has_generation_marks
from qlora_fsdp.data.chats.told import NO_STOP, THOUGHTS_LEFT_OUT, WORDS_LEFT_OUT
from qlora_fsdp.data.stop_tokens import GENERATION_FILE, remember_stop_tokens
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenizer import byte_tokenizer

MARKER = re.compile(
    r"<\|[^<>|\s'\"{}]+\|>|<\uff5c[^<>\uff5c\s]+\uff5c>|<(?:start|end)_of_turn>|<\|[a-z_]+>|<[a-z_]+\|>"
)
# What the models' generation_config.json name beside the end of an answer, as the packages have templates alone.
STOPS = {
    "apertus": ["<|assistant_end|>", "<|tools_suffix|>"],
    "glm": ["<|user|>", "<|observation|>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "diffusiongemma": ["<turn|>", "<|tool_response>"],
    "gptoss": ["<|return|>", "<|call|>"],
}
FOREIGN = re.compile(r"(?:USER|TOOL|SYSTEM)\d")
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "-", "parameters": {"type": "object"}}}]


def user(number: int) -> dict[str, Any]:
    """A question."""
    return {"role": "user", "content": f"USER{number} asks?"}


def answer(number: int, **more: Any) -> dict[str, Any]:
    """An answer."""
    return {"role": "assistant", "content": f"ANSWER{number} is given.", **more}


def call(*numbers: int, content: str = "") -> list[dict[str, Any]]:
    """An answer that calls tools, and their answers."""
    calls = [
        {"id": f"abcde000{n}", "type": "function", "function": {"name": "weather", "arguments": {"city": f"ANSWER{n}"}}}
        for n in numbers
    ]
    said = [{"role": "tool", "tool_call_id": f"abcde000{n}", "name": "weather", "content": f"TOOL{n}"} for n in numbers]
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *said]


CASES: dict[str, list[dict[str, Any]]] = {
    "answers": [user(1), answer(1), user(2), answer(2)],
    "calls": [user(1), *call(1), answer(2)],
    "several calls": [user(1), *call(1, 2), answer(3)],
    "words and a call": [user(1), *call(1, content="ANSWER2 looks."), answer(3)],
    "thoughts": [user(1), answer(1, reasoning_content="ANSWER2 thinks.")],
    "earlier thoughts": [
        user(1),
        answer(1, reasoning_content="ANSWER2 thinks."),
        user(2),
        answer(3, reasoning_content="ANSWER4 thinks."),
    ],
}


def make_tokenizer(name: str, template: str, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of bytes, with the template, its markers and its model's stop tokens; `folder` is overwritten."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(MARKER.findall(template)))})
    tokenizer.chat_template = template
    plain = re.sub(r"[-_.]", "", name.lower())
    families = [family for family in STOPS if family in plain]
    stops = [stop for family in families for stop in STOPS[family] if stop in template]
    ids = tokenizer.convert_tokens_to_ids(stops)
    (folder / GENERATION_FILE).write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    remember_stop_tokens(tokenizer, ModelConfig(path=str(folder)))
    return tokenizer


def audit(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    """What becomes of a conversation, as the table says it."""
    rows = RowTokenizer(tokenizer, DataFormat.messages, LossOn.completion, 10**6, BadRows.truncate)
    row = {"messages": messages, **({"tools": TOOLS} if any("tool_calls" in each for each in messages) else {})}
    out = rows.whole({"place": ["row"], "row": [json.dumps(row).encode()]})
    (tokens,), (mask,), (flags,) = out["tokens"], out["is_target"], out["flags"]
    if not len(tokens):
        return "refused"
    trained = str(tokenizer.decode(tokens[mask].tolist()))
    wanted = {word for message in messages for word in re.findall(r"ANSWER\d", json.dumps(message))}
    if FOREIGN.search(trained):
        return "WRONG"
    if any(word not in trained for word in wanted):
        return "told" if flags & (THOUGHTS_LEFT_OUT | WORDS_LEFT_OUT) else "WRONG"
    return "no stop" if flags & NO_STOP else "yes"


def main(folders: list[str]) -> int:
    """Prints the table; the exit code is 1 if a cell is wrong."""
    if not folders:
        print(__doc__, file=sys.stderr)
        return 2
    print(f"| template | {' | '.join(CASES)} |\n|---{'|---' * len(CASES)}|")
    is_wrong = False
    files = sorted((file for folder in folders for file in Path(folder).rglob("*.jinja")), key=lambda file: file.stem)
    with TemporaryDirectory() as scratch:
        for file in files:
            template = file.read_text(encoding="utf-8")
            if has_generation_marks(template):  # which decide
                continue
            tokenizer = make_tokenizer(file.stem, template, Path(scratch))
            cells = [audit(tokenizer, messages) for messages in CASES.values()]
            is_wrong |= "WRONG" in cells
            print(f"| `{file.stem}` | {' | '.join(cells)} |", flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
