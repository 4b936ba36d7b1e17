"""1,000 random conversations over 40 templates of published models: what holds of every one of them.

They have any roles in any order, thoughts in fields and in words, markup of templates in what anybody says, several
calls and answers that are not to be trained on. Each word tells whose it is. A seed makes each; nothing else decides.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from scripts.audit_templates import TOOLS, make_tokenizer
from tests.helpers.model_templates import MODELS, model_template

from qlora_fsdp.config.schema import LossOn
from qlora_fsdp.data.chats.conversation import format_messages, read_conversation
from qlora_fsdp.data.chats.stops import stops_of
from qlora_fsdp.data.chats.template import has_generation_marks
from qlora_fsdp.data.chats.told import THOUGHTS_LEFT_OUT, WORDS_LEFT_OUT
from qlora_fsdp.data.row import BadRow

NUM_TEMPLATES = 40
SEEDS = range(25)
MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|im_end|>",
    "<|im_start|>assistant",
    "<|eot_id|>",
    "[/INST]",
    "</s>",
    "<tool_response>",
    "<|user|>",
    "{}",
    '{"name": "f"}',
    "\n",
    "\n\n",
    " ",
)
# Of all templates without marks, at even distances in the order of their names.
OWN = sorted(name for name, template in MODELS.items() if not has_generation_marks(template))
STEP = max(1, len(OWN) / NUM_TEMPLATES)
TEMPLATES = [OWN[int(number * STEP)] for number in range(min(NUM_TEMPLATES, len(OWN)))]


class Speaker:
    """Says words that nobody else says, with markup around some of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_words = 0

    def say(self, who: str, markup: float = 0.15) -> str:
        """One to four words of somebody's."""
        words = []
        for _ in range(self.rng.randint(1, 4)):
            self.num_words += 1
            words.append(f"{who}{self.num_words}x")
            if self.rng.random() < markup:
                words.append(self.rng.choice(MARKUP))
        return " ".join(words)


def make_conversation(seed: int) -> list[dict[str, Any]]:
    """A conversation of up to ten messages and the answers of tools."""
    rng = random.Random(seed)
    speaker = Speaker(rng)
    calls_tools = rng.random() < 0.5
    thinks = rng.choice([0.0, 0.5, 1.0])
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": speaker.say("SYSTEM")})
    for _ in range(rng.randint(1, 5)):
        if rng.random() < 0.95 or not messages:
            messages.append({"role": "user", "content": speaker.say("USER")})
        while calls_tools and rng.random() < 0.4:
            calls = []
            for number in range(rng.randint(1, 3)):
                function = {"name": "weather", "arguments": {"city": speaker.say("CALL", markup=0)}}
                calls.append({"id": f"call{len(messages):04}{number}", "type": "function", "function": function})
            content = speaker.say("ANSWER") if rng.random() < 0.3 else ""
            messages.append(think(speaker, thinks, {"role": "assistant", "content": content, "tool_calls": calls}))
            for call in calls:
                said = {"role": "tool", "name": "weather", "tool_call_id": call["id"], "content": speaker.say("TOOL")}
                messages.append(said)
        if rng.random() < 0.95:
            answer = think(speaker, thinks, {"role": "assistant", "content": speaker.say("ANSWER")})
            if rng.random() < 0.1:
                answer["train"] = False
            messages.append(answer)
    return messages


def think(speaker: Speaker, share: float, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, maybe with thoughts, in a field or before its words."""
    if speaker.rng.random() >= share:
        return answer
    thoughts = speaker.say("THOUGHT", markup=0)
    if speaker.rng.random() < 0.5:
        return {**answer, "reasoning_content": thoughts}
    return {**answer, "content": f"<think>\n{thoughts}\n</think>\n\n{answer['content']}"}


def words_of(message: dict[str, Any]) -> set[str]:
    return set(re.findall(r"[A-Z]+\d+x", json.dumps(message)))


def check(template: str, messages: list[dict[str, Any]], tokenizer: Any) -> bool:
    """Checks what is trained on of a conversation; whether the row is used at all."""
    tools = TOOLS if any("tool_calls" in message for message in messages) else None
    try:
        text, spans, told = format_messages(messages, tools, LossOn.completion, tokenizer)
    except BadRow as bad:
        assert bad.detail
        return False
    trained = "\0".join(text[start:end] for start, end in spans)
    targets = [message for message in messages if message["role"] == "assistant" and message.get("train", True)]
    others = [message for message in messages if message not in targets]
    foreign = set().union(*map(words_of, others)) & words_of({"content": trained})
    assert not foreign, f"{template}: trained on {foreign}"
    for message in targets:
        lost = words_of(message) - words_of({"content": trained})
        values = {word for word in lost if word.startswith("CALL")}
        assert not values, f"{template}: not trained on {values}"
        assert not lost or told & (THOUGHTS_LEFT_OUT | WORDS_LEFT_OUT), f"{template}: {lost} is lost, and not told"

    conversation = read_conversation(messages, tools, tokenizer)
    stock = conversation.render(conversation.messages)  # by transformers' render_jinja_template
    assert text.startswith(stock)
    added = text[len(stock) :].strip()
    assert not added or added in stops_of(conversation), f"{template}: {added!r} is added"
    return True


@pytest.mark.parametrize("template", TEMPLATES or ["qwen3"])
def test_nobody_elses_words_are_trained_on_and_every_answers_are_or_that_is_told(template: str, tmp_path: Path):
    tokenizer = make_tokenizer(template, model_template(template), tmp_path)
    first = TEMPLATES.index(template) * len(SEEDS)
    num_used = sum(check(template, make_conversation(first + seed), tokenizer) for seed in SEEDS)
    assert num_used >= 8
