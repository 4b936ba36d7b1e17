"""At which tokens an answer stops: those of the model's files, and what its chat template ends answers with.

Those of the files are the tokenizer's end token and all of `eos_token_id` in generation_config.json (`stop_tokens`). A
template may end answers with a marker that neither file names, or with a text of several tokens. So it is tried on a
small conversation.
"""

from __future__ import annotations

from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.text import num_common
from qlora_fsdp.data.chats.calls import TOOLS, WORD, write_calls
from qlora_fsdp.data.chats.examples import followed
from qlora_fsdp.data.chats.template import Conversation
from qlora_fsdp.data.row import BadRow
from qlora_fsdp.data.stop_tokens import stop_ids, stop_texts
from qlora_fsdp.data.tokenizer import encode

MAX_SPACE = 100  # characters between the end of a message and the stop token with which the next one begins


def stops_of(conversation: Conversation) -> tuple[str, ...]:
    """The stop tokens of answers as text: those of the model, and the one with which the template ends answers."""
    tokenizer = conversation.tokenizer
    return _find_stops(conversation.template, tokenizer, stop_texts(tokenizer), conversation.variables_key)


def ends_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """With what texts end that need no end token: the stop tokens, and what the chat template ends answers with."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return stop_texts(tokenizer)
    return stops_of(Conversation([], None, template, tokenizer))


def end_ids_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids at which generation stops: the stop tokens, and what the chat template ends answers with.

    The latter is left out where it is no added token; see `end_texts_of`.
    """
    known = tokenizer.added_tokens_encoder
    written = [known[text] for text in ends_of(tokenizer) if text in known]
    return tuple(dict.fromkeys([*stop_ids(tokenizer), *written]))


def end_texts_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """What the chat template ends answers with, where that is several tokens: generation stops there as a text.

    A single token of ordinary text, such as a bracket, stops nothing: answers have it too.
    """
    known = tokenizer.added_tokens_encoder
    stops = stop_texts(tokenizer)
    texts = [text for text in ends_of(tokenizer) if text not in stops and text not in known]
    return tuple(text for text in texts if len(encode(tokenizer, text)) > 1)


def find_stop(text: str, words_end: int, end: int, stops: tuple[str, ...]) -> tuple[str, int]:
    """The first stop token behind the words of a message, and where it ends; empty: there is none up to the next one's.

    It may be the last of what the message says itself, and it may stand right behind the message's part of the text.

    Args:
        text: of the conversation.
        words_end: where the words end.
        end: of the message's part of the text.
        stops: the stop tokens.
    """
    following = text[end : end + MAX_SPACE]
    begins = end + len(following) - len(following.lstrip())
    found: list[tuple[int, str]] = []
    for stop in stops:
        place = text.find(stop, max(0, words_end - len(stop)), begins + len(stop))
        if place >= 0:
            found.append((place, stop))
    place, stop = min(found, default=(0, ""))
    return stop, place + len(stop)


def added_stop(conversation: Conversation, calls: bool) -> str | None:
    """What the template writes behind an answer, or a call, that ends a conversation, once more follows.

    It ends with a stop token. None: the template writes none there.
    """
    tokenizer = conversation.tokenizer
    return _find_added(conversation.template, tokenizer, stops_of(conversation), calls, conversation.variables_key)


@lru_cache(maxsize=64)
def _find_stops(
    template: str, tokenizer: PreTrainedTokenizerBase, of_model: tuple[str, ...], variables: str
) -> tuple[str, ...]:
    """The stop tokens of the model, with what the template ends answers with if that is none of them."""
    marker = _find_marker(template, tokenizer, of_model)
    return (*of_model, marker) if marker else of_model


def _find_marker(template: str, tokenizer: PreTrainedTokenizerBase, of_model: tuple[str, ...]) -> str:
    """What ends an answer that another message follows, which may be no token; empty: a stop token of the model."""
    messages, more = followed(calls=False)
    number = len(messages) - 1
    words = str(messages[number]["content"])
    conversation = Conversation([*messages, *more], None, template, tokenizer)
    try:
        text = conversation.render(conversation.messages)
        behind_last = conversation.render(messages).rpartition(words)[2]
        pieces = conversation.trace().parts.get(number, [])
    except DataError:
        raise
    except Exception:  # of any type; another conversation may be written
        return ""
    if behind_last.lstrip().startswith(of_model):
        # It ends answers as the model does, though earlier ones may end otherwise: those of gpt-oss end with the token
        # that ends thoughts too.
        return ""
    marker = ""
    if len(pieces) == 1:
        start, end = pieces[0]
        marker = text[start:end].rpartition(words)[2].strip()
    if not marker:  # the next message begins with it
        behind = text.partition(words)[2]
        marker = behind[: num_common(behind, behind_last)].strip()
    holds_stop = any(stop in marker for stop in of_model)
    if not marker or holds_stop or _is_before_calls(marker, template, tokenizer):
        return ""
    return marker


def _is_before_calls(marker: str, template: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a template writes a marker within turns too, before a call, as that of GigaChat 3: it ends no turn."""
    messages, more = followed(calls=True)
    conversation = Conversation(write_calls([*messages, *more], template, tokenizer), TOOLS, template, tokenizer)
    try:
        prompt = conversation.render(messages[:-1], prompt=True)
        text = conversation.render(conversation.messages)
    except BadRow:  # it knows no calls
        return False
    before, call, _ = text[num_common(prompt, text) :].partition(WORD)
    return bool(call) and marker in before


@lru_cache(maxsize=64)
def _find_added(
    template: str, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...], calls: bool, variables: str
) -> str | None:
    messages, more = followed(calls)
    tools = TOOLS if calls else None
    conversation = Conversation(write_calls([*messages, *more], template, tokenizer), tools, template, tokenizer)
    try:
        text = conversation.render(conversation.messages)
        after = conversation.render(conversation.messages[: len(messages)])
    except BadRow:
        return None
    if not text.startswith(after):
        return None
    stop, end = find_stop(text, len(after) + 1, len(after), stops)
    return text[len(after) : end] if stop and end > len(after) else None
