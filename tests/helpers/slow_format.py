"""The reference for conversations: each answer is replayed as inference has it, by stock renders alone.

It takes quadratic time and knows nothing of parts, kinds and frames, so `data/chats/turns.py` must find the same. It
says nothing of answers that it can't replay: where a template writes what stands before otherwise once more follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from qlora_fsdp.data.chats.calls import write_calls
from qlora_fsdp.data.chats.template import Span
from qlora_fsdp.data.message import TRAIN_KEYS, is_trained

PROBE = "\ue000"


@dataclass(frozen=True)
class Expected:
    """What stock renders say of a conversation.

    Attributes:
        text: of the whole.
        turns: for each answer to train on where the model's words begin, and where they end with `stop`; None: another
            text stands before it than inference has, or the end is not to be told.
    """

    text: str
    turns: list[Span | None]


def replay_all(messages: list[dict[str, Any]], tools: Any, tokenizer: PreTrainedTokenizerBase, stop: str) -> Expected:
    """Replays every answer to train on.

    Args:
        messages: the conversation.
        tools: that it has.
        tokenizer: with the template.
        stop: the token that the template ends answers with.

    Raises:
        Exception: of any type: the template refuses the conversation.
    """
    template = tokenizer.get_chat_template(tools=tools)
    # Parquet fills missing fields with null; templates test whether a field is there.
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    trained = [message["role"] == "assistant" and is_trained(message) for message in messages]
    messages = [{key: value for key, value in message.items() if key not in TRAIN_KEYS} for message in messages]
    messages = write_calls(messages, template, tokenizer)

    def render(messages: list[dict[str, Any]], prompt: bool = False) -> str:
        special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)
        texts, _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=prompt,
            **special_tokens,
        )
        return str(texts[0])

    text = render(messages)

    def replay(number: int) -> Span | None:
        message = messages[number]
        content = message.get("content")
        if not isinstance(content, str) or not content.strip() or number == 0:
            return None
        try:
            prompt, after = render(messages[:number], prompt=True), render(messages[: number + 1])
            other = render([*messages[:number], {**message, "content": PROBE}])
        except Exception:  # the template wants more messages
            return None
        if not text.startswith(prompt) or not after.startswith(prompt):
            return None
        after_words = len(after) - next(
            (n for n, (a, b) in enumerate(zip(reversed(after), reversed(other), strict=False)) if a != b), len(other)
        )
        end = text.find(stop, after_words)
        if (
            not text.startswith(after[:after_words])
            or end < 0
            or text[after_words:end].strip()
            or message.get("tool_calls")
        ):
            return None
        return len(prompt), end + len(stop)

    return Expected(text, [replay(number) for number, is_target in enumerate(trained) if is_target])
