"""Render a conversation by a chat template: its text, the parts that the template marks, and each message's part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from jinja2 import Template, TemplateError, UndefinedError, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.limits import limited_memory, limited_time
from qlora_fsdp.common.text import shorten
from qlora_fsdp.data.row import REFUSED, BadRow

Span = tuple[int, int]  # characters: start, end
RENDER_SECONDS = 30.0  # of processor time; honest templates take milliseconds
RENDER_BYTES = 2**32
MAX_CHARACTERS = 2**27
ANOTHER = "Set data.chat_template to another."
BEGIN, END, MARK = "_begin_message", "_end_message", "_mark"
MAX_WORD = 40  # characters; longer texts are instructions, for which no template looks
_MARKUP = re.compile(r"[<>\[\]{}|]")


@contextmanager
def limited_rendering() -> Iterator[None]:
    """Wraps a chat template, which is a program that anybody may have written, for one conversation.

    Its sandbox keeps it from files and from the network. It does not keep it from loops without end, or from a text of
    many gigabytes.

    Raises:
        DataError: it takes too long, or too much memory. That is the template's fault, whatever the row.
    """
    slow = DataError(f"The chat template takes more than {RENDER_SECONDS:.0f} s for one conversation. {ANOTHER}")
    try:
        with limited_time(RENDER_SECONDS, slow), limited_memory(RENDER_BYTES):
            yield
    except MemoryError:
        raise DataError(
            f"The chat template takes more than {RENDER_BYTES // 2**30} GiB for one conversation. {ANOTHER}"
        ) from None


def check_length(text: str) -> None:
    """Refuses a text that is longer than any honest conversation, which would take minutes to tokenize.

    Raises:
        DataError: it is.
    """
    if len(text) > MAX_CHARACTERS:
        raise DataError(f"The chat template makes a text of {len(text):,} characters of one conversation. {ANOTHER}")


@dataclass(frozen=True)
class Trace:
    """A rendered conversation, with where its text comes from.

    Attributes:
        text: the same as the template gives without tracing.
        parts: for each message the part of the text that it gave. A message that the template does not write in one
            piece of one loop is missing.
        marks: what the template marks by {% generation %}.
    """

    text: str
    parts: dict[int, Span]
    marks: list[Span]


@dataclass(frozen=True)
class Conversation:
    """Messages, with the tools that they may call, and the template that writes them."""

    messages: list[dict[str, Any]]
    tools: Any
    template: str
    tokenizer: PreTrainedTokenizerBase

    def replace(self, number: int, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages with another one in the place of one."""
        return [*self.messages[:number], message, *self.messages[number + 1 :]]

    def render(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        """The text of messages of this conversation, with `prompt` followed by the prompt for an assistant's turn.

        Raises:
            BadRow: the template refuses them.
            DataError: it takes too long, or too much memory.
        """
        return self._render(messages, prompt=prompt)[0]

    def render_marks(self) -> tuple[str, list[Span]]:
        """The text of the whole conversation, and what the template marks in it by {% generation %}.

        Raises:
            BadRow: the template refuses it.
        """
        return self._render(self.messages, marks=has_generation_marks(self.template))

    def _render(
        self, messages: list[dict[str, Any]], *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        special_tokens: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
        try:
            with limited_rendering():
                rendered: Any = render_jinja_template(  # annotated as str, but a pair: texts, and spans of marks
                    conversations=[messages],
                    tools=self.tools,
                    chat_template=self.template,
                    add_generation_prompt=prompt,
                    return_assistant_tokens_mask=marks,
                    **special_tokens,
                )
        except DataError:
            raise
        except Exception as error:  # templates compute, and their sandbox lets any error through
            # What a template says by itself is clear; of its code's errors nobody can tell what they are about.
            is_said = isinstance(error, TemplateError) and not isinstance(error, UndefinedError)
            more = "" if is_said else _find_unusual(messages)
            raise BadRow(REFUSED, f"{str(error) or repr(error)}{more}") from error
        texts, spans = rendered
        check_length(texts[0])
        return texts[0], spans[0] if marks else []

    def trace(self) -> Trace:
        """Renders the whole conversation once, and notes where each part of the text comes from.

        Templates write messages in a loop. Here every loop calls a function where its body begins and where it ends,
        and the function notes how long the text is by then. So do {% generation %} marks, which transformers finds by
        joining all text before each of them, in time that is quadratic in their number.

        Raises:
            Exception: of any type; templates compute, and their sandbox lets errors through.
        """
        messages = _name_reasoning([dict(message) for message in self.messages])
        numbers = {id(message): number for number, message in enumerate(messages)}
        blocks: list[str] = []
        marks: list[Span] = []
        events: list[tuple[str, int, int]] = []  # begin or end, the message, the length of the text by then
        length = 0

        def note(event: str, item: Any) -> str:
            if id(item) in numbers:
                events.append((event, numbers[id(item)], length))
            return ""

        def mark(caller: Callable[[], str]) -> str:
            marked = caller()
            marks.append((length, length + len(marked)))
            return marked

        variables = {"messages": messages, "tools": self.tools, "documents": None, "add_generation_prompt": False}
        calls = {BEGIN: partial(note, BEGIN), END: partial(note, END), MARK: mark}
        with limited_rendering():
            for block in _compile(self.template).generate({**self.tokenizer.special_tokens_map, **variables, **calls}):
                blocks.append(block)
                length += len(block)
        text = "".join(blocks)
        check_length(text)
        return Trace(text, _whole_parts(events), marks)


def _find_unusual(messages: list[dict[str, Any]]) -> str:
    """What the first message has that many templates know nothing of, for what is said when one refuses them."""
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if isinstance(content, list):
            kinds = [str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content]
            return f"; the content of message {number} has parts: {shorten(', '.join(dict.fromkeys(kinds)))}"
        if content is None and message.get("tool_calls"):
            return f"; message {number} calls tools and has no content"
    return ""


def has_generation_marks(template: str) -> bool:
    """Whether a chat template marks the assistant's turns with {% generation %}."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _whole_parts(events: list[tuple[str, int, int]]) -> dict[int, Span]:
    """The parts of the text by the message that gave them, of messages that gave one whole part."""
    parts: dict[int, list[Span]] = {}
    for (event, number, start), (next_event, next_number, end) in pairwise(events):
        if event == BEGIN and end > start:
            is_whole = next_event == END and next_number == number
            parts.setdefault(number, []).extend([(start, end)] if is_whole else [(-1, -1), (-1, -1)])
    return {number: found[0] for number, found in parts.items() if len(found) == 1}


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    """The template with calls where the body of each loop begins and ends, and in the place of {% generation %}."""
    environment = chat_template_utils._compile_jinja_template(source).environment
    tree = environment.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        if isinstance(loop.target, nodes.Name):
            loop.body = [_write(_call(BEGIN, loop.target.name)), *loop.body, _write(_call(END, loop.target.name))]
    for block in tree.find_all(nodes.CallBlock):
        if isinstance(block.call.node, nodes.ExtensionAttribute):  # the one that transformers adds
            block.call = _call(MARK)
    tree.set_environment(environment)
    template: Template = Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
    return template


@lru_cache(maxsize=8)
def find_texts(source: str) -> tuple[str, ...]:
    """All text that a template has itself: what it writes as it is, and the constants of its expressions."""
    tree = chat_template_utils._compile_jinja_template(source).environment.parse(source)
    written = [node.data for node in tree.find_all(nodes.TemplateData)]
    return *written, *(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


@lru_cache(maxsize=8)
def find_words(source: str) -> re.Pattern[str] | None:
    """The markup that a template may look for in what a message says, such as </think>; None: there is none."""
    texts = {text.strip() for text in find_texts(source) if len(text) < MAX_WORD}
    words = sorted((text for text in texts if len(text) > 2 and _MARKUP.search(text)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None


def _call(function: str, *arguments: str) -> nodes.Call:
    return nodes.Call(nodes.Name(function, "load"), [nodes.Name(name, "load") for name in arguments], [], None, None)


def _write(call: nodes.Call) -> nodes.Output:
    output = nodes.Output([call])
    output.set_lineno(1)
    return output


def _name_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their reasoning under each name that templates use, as transformers renders them."""
    rename = getattr(chat_template_utils, "_alias_reasoning_fields", None)
    found: list[dict[str, Any]] = messages if rename is None else rename(messages)
    return found
