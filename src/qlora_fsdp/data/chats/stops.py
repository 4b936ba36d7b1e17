"""The token that ends an answer: a model that was not trained to say it goes on for ever.

Most templates write it as a part of the answer (`<|im_end|>`). Some write it as the beginning of what follows: GLM's
answers end where `<|user|>` or `<|observation|>` begins the next message, and these are the tokens at which generation
stops. So an answer is trained on with the stop token that stands right behind it. Behind the last answer nothing
follows, and the stop token is added that the template would write there.
"""

from __future__ import annotations

from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.data.chats.calls import ANSWER, ASSISTANT, CALL, NEXT_USER, TOOLS, USER, WORD, write_calls
from qlora_fsdp.data.chats.template import Conversation, Span
from qlora_fsdp.data.row import BadRow
from qlora_fsdp.data.stop_tokens import stop_texts


def end_turns(conversation: Conversation, text: str, spans: list[Span]) -> tuple[str, list[Span]]:
    """The text and the turns in it, each with the stop token that ends it.

    Args:
        conversation: what the text says.
        text: of the whole conversation.
        spans: the turns to train on, in their order. A turn that the text ends with may get a stop token behind it.
    """
    stops = stop_texts(conversation.tokenizer)
    spans = [(start, _end_at_stop(text, end, stops)) for start, end in spans]
    if not spans or text[spans[-1][1] :].strip():
        return text, spans
    start, end = spans[-1]
    calls = bool(conversation.messages[-1].get("tool_calls"))
    stop = _written_stop(conversation.template, conversation.tokenizer, stops, calls)
    if stop is None or text[start:end].rstrip().endswith(stops):
        return text, spans
    return text[:end] + stop, [*spans[:-1], (start, end + len(stop))]


def _end_at_stop(text: str, end: int, stops: tuple[str, ...]) -> int:
    """Where a turn ends that was found to end at `end`: behind the stop token that follows at once, if one does."""
    if text[:end].rstrip().endswith(stops):
        return end
    following = text[end:].lstrip()
    begins = len(text) - len(following)
    return next((begins + len(stop) for stop in stops if following.startswith(stop)), end)


@lru_cache(maxsize=64)
def _written_stop(
    template: str, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...], after_call: bool
) -> str | None:
    """The stop token that a template writes behind an answer, or a call of a tool, that another message follows.

    None: it writes another marker there, or is one that can't say.
    """
    if after_call:
        call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        messages = [USER, call, {**ANSWER, "tool_call_id": CALL["id"]}, ASSISTANT]
        said, next_said = WORD, str(ANSWER["content"])
    else:
        messages = [USER, ASSISTANT, NEXT_USER, {**ASSISTANT, "content": "last"}]
        said, next_said = str(ASSISTANT["content"]), str(NEXT_USER["content"])
    messages = write_calls(messages, template, tokenizer)
    conversation = Conversation(messages, TOOLS if after_call else None, template, tokenizer)
    try:
        text = conversation.render(messages)
    except BadRow:
        return None
    before, _, _ = text.rpartition(next_said)
    _, _, between = before.rpartition(said)
    found = [(between.find(stop), stop) for stop in stops if stop in between]
    return min(found)[1] if found else None
