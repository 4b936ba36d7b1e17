"""What is trained on by the templates of published models, and by TRL's, which mark the assistant's turns.

TRL has a second template of each model, with {% generation %} marks, by which transformers makes masks. Where both
write the same text, each run of characters that one of the masks has and the other has not is explained by what a model
is given and what it generates at inference, as stock renders tell. REASONS has the differences of each family.
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from scripts.audit_templates import CASES, TOOLS, make_tokenizer
from tests.helpers.model_templates import MODELS, model_template

from qlora_fsdp.config.schema import LossOn
from qlora_fsdp.data.chats.conversation import format_messages, read_conversation
from qlora_fsdp.data.chats.stops import stops_of
from qlora_fsdp.data.chats.template import Conversation, Span
from qlora_fsdp.data.row import BadRow

# TRL's marks have it, and it is in the prompt for the answer: a header, or <think>, or empty thoughts.
IN_PROMPT = "in the prompt"
# TRL's marks have it, and generation has stopped before: the line break behind a stop token.
BEHIND_STOP = "behind the stop token"
# Only ours has it: the stop token of a call, which the template writes before the tool's answer, or of a last answer.
STOP = "the stop token"
# Only ours has it: the template writes it before the words, and its own prompt for the answer has it not.
NOT_IN_PROMPT = "not in the prompt"
# Not one text: TRL's template keeps the thoughts of all answers, or writes empty ones before each.
OTHER_TEXT = "another text"
# The model's template leaves a call or words out, and the row is refused; TRL trains on what is left.
REFUSED = "refused"

REASONS: dict[str, set[str]] = {
    "cohere": set(),
    "cohere2": set(),
    "deepseek_r1_distill": {IN_PROMPT, REFUSED},
    "deepseekv3": {IN_PROMPT},
    "diffusion_gemma": {STOP, BEHIND_STOP, NOT_IN_PROMPT},
    "gemma": {BEHIND_STOP},
    "gemma3": {BEHIND_STOP},
    "glm4moe": set(),
    "gptoss": {IN_PROMPT, REFUSED},
    "idefics3": {BEHIND_STOP, REFUSED},
    "lfm2": {BEHIND_STOP, REFUSED},
    "lfm2_v2": {BEHIND_STOP},
    "llama3": {REFUSED},
    "llava_next": set(),
    "muse_glimmer": {IN_PROMPT},
    "nemotron_3_5_lightning": {IN_PROMPT, BEHIND_STOP},
    "nemotron_3_nano": {IN_PROMPT, BEHIND_STOP},
    "nemotron_3_super": {IN_PROMPT, BEHIND_STOP},
    "nemotron_3_ultra": {IN_PROMPT, BEHIND_STOP},
    "phi3": {BEHIND_STOP, REFUSED},
    "phi3_5": {BEHIND_STOP, REFUSED},
    "qwen2_5": {IN_PROMPT, BEHIND_STOP},
    "qwen2_5_vl": {BEHIND_STOP, REFUSED},
    "qwen3": {BEHIND_STOP, OTHER_TEXT},
    "qwen3_5_nothink": {IN_PROMPT, BEHIND_STOP, OTHER_TEXT},
    "qwen3_5_think": {IN_PROMPT, BEHIND_STOP, OTHER_TEXT},
    "qwen3_6": {IN_PROMPT, BEHIND_STOP, OTHER_TEXT},
    "qwen3_8": {IN_PROMPT, BEHIND_STOP},
    "qwen3_instruct_2507": {BEHIND_STOP},
    "qwen3_vl": {BEHIND_STOP},
    "smolvlm": {BEHIND_STOP, REFUSED},
}


def mask_of(text: str, spans: list[Span] | tuple[Span, ...]) -> list[bool]:
    mask = [False] * len(text)
    for start, end in spans:
        mask[start:end] = [True] * (end - start)
    return mask


def explain_run(conversation: Conversation, text: str, run: Span, ours: list[bool]) -> str:
    """Why a run of characters is in one mask alone, of which ours is given; the run itself if nothing explains it."""
    start, end = run
    written = text[start:end]
    answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    prompts = [conversation.render(conversation.messages[:number], prompt=True) for number in answers]
    if ours[start]:
        if written.strip() in stops_of(conversation):
            return STOP
        word = re.findall(r"ANSWER\d", text[start:])[0]  # of the answer that begins here
        number = next(number for number in answers if word in json.dumps(conversation.messages[number]))
        prompt = conversation.render(conversation.messages[:number], prompt=True)
        return repr(written) if prompt.endswith(written) else NOT_IN_PROMPT
    if ours[start - 1] and text[:start].endswith(stops_of(conversation)):
        return BEHIND_STOP
    is_given = any(prompt.endswith(written) or prompt.startswith(text[:end]) for prompt in prompts)
    return IN_PROMPT if is_given else repr(written)


def explain(family: str, messages: list[dict[str, Any]], folder: Path) -> set[str]:
    """How the masks of a conversation differ."""
    tools = TOOLS if any("tool_calls" in message for message in messages) else None
    own, marked = model_template(family), model_template(f"{family}_training")
    tokenizer = make_tokenizer(family, own + marked, folder)  # the markers of both are tokens
    tokenizer.chat_template = marked
    try:
        their_text, their_spans = read_conversation(messages, tools, tokenizer).render_marks()
    except BadRow:
        their_text, their_spans = "", []
    tokenizer.chat_template = own
    conversation = read_conversation(messages, tools, tokenizer)
    try:
        text, spans, _ = format_messages(messages, tools, LossOn.completion, tokenizer)
    except BadRow:
        return {REFUSED} if their_text else set()
    if not text.startswith(their_text):
        return {OTHER_TEXT}
    ours, theirs = mask_of(text, spans), mask_of(text, their_spans)
    places = [place for place in range(len(text)) if ours[place] != theirs[place]]
    runs = []
    for _, group in groupby(enumerate(places), lambda each: (each[1] - each[0], ours[each[1]])):
        run = [place for _, place in group]
        runs.append(explain_run(conversation, text, (run[0], run[-1] + 1), ours))
    return set(runs)


FAMILIES = sorted(name.removesuffix("_training") for name in MODELS if name.endswith("_training"))


@pytest.mark.parametrize("family", FAMILIES or ["qwen3"])
def test_masks_are_those_of_trl_but_for_what_inference_gives(family: str, tmp_path: Path):
    found: set[str] = set()
    for messages in CASES.values():
        found |= explain(family, messages, tmp_path)
    assert found == REASONS[family]
