"""Render a conversation by a chat template: its text, the parts that the template marks, and each message's part."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import count
from typing import Any

from jinja2 import Environment, Template, TemplateError, UndefinedError, meta, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from qlora_fsdp.common.contained import LimitError, TryError, call, describe_seconds
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.text import shorten
from qlora_fsdp.data.row import REFUSED, BadRow
from qlora_fsdp.data.template_arguments import template_arguments

Span = tuple[int, int]  # characters: start, end
RENDER_SECONDS = 10.0  # of processor time; honest templates take milliseconds
RENDER_BYTES = 2**32
MAX_CHARACTERS = 2**27
ANOTHER = "Set data.chat_template to another."
BEGIN, TAKE, END, MARK = "_begin_body", "_take_message", "_end_body", "_mark"
MAX_WORD = 40  # characters; longer texts are instructions, for which no template looks
_MARKUP = re.compile(r"[<>\[\]{}|]")


def render_contained(function: Callable[..., Any], *args: Any) -> Any:
    """Has a chat template, which is a program that anybody may have written, render one conversation, within limits.

    Its sandbox keeps it from files and from the network. It does not keep it from loops without end, or from a text of
    many gigabytes.

    Args:
        function: renders, in another process or in this one; it returns a text, with what is to be known beside.
        args: plain values.

    Raises:
        DataError: it takes too long, too much memory, or makes a text that would take minutes to tokenize. That is the
            template's fault, whatever the row.
        TryError: the template raises an error of any type.
    """
    try:
        text, *more = call(function, *args, MAX_CHARACTERS, seconds=RENDER_SECONDS, num_bytes=RENDER_BYTES)
    except LimitError as error:
        raise DataError(f"The chat template {error} for one conversation. {ANOTHER}") from None
    if type(text) is int:
        raise DataError(f"The chat template makes a text of {text:,} characters of one conversation. {ANOTHER}")
    return text, *more


def too_slow() -> DataError:
    """The error where a process that tokenizes was ended because a template took too long."""
    return DataError(f"The chat template {describe_seconds(RENDER_SECONDS)} for one conversation. {ANOTHER}")


@dataclass(frozen=True)
class Trace:
    """A rendered conversation, with where its text comes from.

    Attributes:
        text: the same as the template gives without tracing.
        parts: for each message the pieces of the text that it gave, in their order: one as a rule. Where a template
            writes the answers of tools within the message that called them, these divide it. A message that is
            written in no loop over the messages is missing.
        marks: what the template marks by {% generation %}.
    """

    text: str
    parts: dict[int, list[Span]]
    marks: list[Span]


@dataclass(frozen=True)
class Conversation:
    """Messages, with the tools that they may call, and the template that writes them."""

    messages: list[dict[str, Any]]
    tools: Any
    template: str
    tokenizer: PreTrainedTokenizerBase

    @property
    def variables(self) -> dict[str, Any]:
        """What the template is given beside the messages and the tools: special tokens, and data.template_arguments."""
        return {**self.tokenizer.special_tokens_map, **template_arguments(self.tokenizer)}

    @property
    def variables_key(self) -> str:
        """These as one text, by which what is found out of a template is kept: a tokenizer may get others."""
        return json.dumps(self.variables, default=str)

    def as_template_takes(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose texts are lists of one part for a template that knows parts alone, as some of images do."""
        if not _takes_parts_alone(self.template, self.variables_key):
            return messages
        return [_with_parts(message) for message in messages]

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
        given = self.as_template_takes(messages)
        try:
            text, spans, refusal = render_contained(
                render_text, self.template, given, self.tools, self.variables, prompt, marks
            )
        except TryError as error:  # templates compute, and their sandbox lets any error through
            raise BadRow(REFUSED, f"{error}{_find_unusual(messages)}") from error
        if refusal is not None:
            raise BadRow(REFUSED, refusal)
        return text, [(start, end) for start, end in spans]

    def trace(self) -> Trace:
        """Renders the whole conversation once, and notes where each part of the text comes from.

        Templates write messages in a loop. Here every loop calls a function where its body begins and where it ends,
        and where the body takes a message by its number (`{% set message = messages[i] %}`), and the function notes
        how long the text is by then. So do {% generation %} marks, which transformers finds by joining all text before
        each of them, in time that is quadratic in their number.

        Raises:
            Exception: of any type; templates compute, and their sandbox lets errors through.
        """
        messages = self.as_template_takes(_name_reasoning([dict(message) for message in self.messages]))
        text, parts, marks = render_contained(trace_text, self.template, messages, self.tools, self.variables)
        pieces = {number: [(start, end) for start, end in spans] for number, spans in parts}
        return Trace(text, pieces, [(start, end) for start, end in marks])


def render_text(
    template: str,
    messages: list[dict[str, Any]],
    tools: Any,
    variables: dict[str, Any],
    prompt: bool,
    marks: bool,
    max_characters: int,
) -> tuple[str | int, list[Span], str | None]:
    """A conversation as transformers renders it: its text, what {% generation %} marks in it, and why not, if refused.

    A text of more than `max_characters` stands there as its length. What a template says by itself is clear; of its
    code's errors, which are raised, nobody can tell what they are about.
    """
    try:
        rendered: Any = render_jinja_template(  # annotated as str, but a pair: texts, and spans of marks
            conversations=[messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=marks,
            **variables,
        )
    except UndefinedError:
        raise
    except TemplateError as error:
        return "", [], str(error) or repr(error)
    texts, spans = rendered
    return _limit_text(texts[0], max_characters), spans[0] if marks else [], None


def trace_text(
    template: str, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any], max_characters: int
) -> tuple[str | int, list[tuple[int, list[Span]]], list[Span]]:
    """The text of a conversation, the parts of each message, and what {% generation %} marks: see `Conversation.trace`.

    A text of more than `max_characters` stands there as its length.
    """
    numbers = {id(message): number for number, message in enumerate(messages)}
    blocks: list[str] = []
    marks: list[Span] = []
    sources = _Sources()
    length = 0

    def note(event: str, loop: int, item: Any = None) -> str:
        sources.note(event, loop, numbers.get(id(item)), length)
        return ""

    def mark(caller: Callable[[], str]) -> str:
        marked = caller()
        marks.append((length, length + len(marked)))
        return marked

    given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": False}
    calls = {event: partial(note, event) for event in (BEGIN, TAKE, END)} | {MARK: mark}
    for block in _compile(template).generate({**variables, **given, **calls}):
        blocks.append(block)
        length += len(block)
    sources.end(length)
    return _limit_text("".join(blocks), max_characters), list(sources.parts.items()), marks


def _limit_text(text: str, max_characters: int) -> str | int:
    return text if len(text) <= max_characters else len(text)


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


class _Sources:
    """Which message the text comes from, by the events of a render.

    The bodies of loops lie within one another. Text belongs to the message of the innermost of them that has one.
    """

    def __init__(self) -> None:
        self.parts: dict[int, list[Span]] = {}
        self._open: list[tuple[int, int, bool]] = []  # of each open body: the loop, the message, whether it was taken
        self._length = 0

    def note(self, event: str, loop: int, number: int | None, length: int) -> None:
        """An event of a loop, with the message of it or None, at a length of the text."""
        if event == TAKE:
            is_another = number is not None and bool(self._open) and self._open[-1][0] == loop
            if number is None or (is_another and not self._open[-1][2]):  # a look at a neighbour
                return
        self._add_text(length)
        while any(opened == loop for opened, _, _ in self._open):  # {% continue %} may have left the body
            self._open.pop()
        if number is not None and event != END:
            self._open.append((loop, number, event == TAKE))

    def end(self, length: int) -> None:
        """The end of the text."""
        self._add_text(length)

    def _add_text(self, length: int) -> None:
        """The text since the last event, up to a length."""
        start, self._length = self._length, length
        if not self._open or length == start:
            return
        pieces = self.parts.setdefault(self._open[-1][1], [])
        if pieces and pieces[-1][1] == start:
            start, _ = pieces.pop()
        pieces.append((start, length))


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    """The template with calls where the body of each loop begins and ends, and in the place of {% generation %}."""
    environment = _environment()
    tree = _parse(source)
    tree.body = _tell_messages(tree.body, None, count(), _find_collection(tree))
    for block in tree.find_all(nodes.CallBlock):
        if isinstance(block.call.node, nodes.ExtensionAttribute):  # the one that transformers adds
            block.call = _call(MARK)
    tree.set_environment(environment)
    template: Template = Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
    return template


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


@lru_cache(maxsize=8)
def _takes_parts_alone(source: str, variables: str) -> bool:
    """Whether a template writes what a message says only where that is a list of parts: both are tried.

    Args:
        source: the template.
        variables: what it is given beside the messages, as JSON.
    """
    message = {"role": "user", "content": "Is this word written?"}
    found = []
    for tried in (message, _with_parts(message)):
        try:
            text, *_ = render_contained(write_text, source, [tried], json.loads(variables))
        except TryError:  # it wants another conversation, and is given texts
            return False
        found.append(message["content"] in text)
    return found == [False, True]


def write_text(
    source: str, messages: list[dict[str, Any]], variables: dict[str, Any], max_characters: int
) -> tuple[str | int]:
    """The text that a template makes of messages; one of more than `max_characters` stands there as its length."""
    given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
    template = chat_template_utils._compile_jinja_template(source)
    return (_limit_text("".join(template.generate({**variables, **given})), max_characters),)


def _parse(source: str) -> nodes.Template:
    """A template's statements. To compile it would compute what is constant in it."""
    return _environment().parse(source)


@cache
def _environment() -> Environment:
    """Where transformers compiles templates."""
    environment: Environment = chat_template_utils._compile_jinja_template("").environment
    return environment


@lru_cache(maxsize=8)
def find_texts(source: str) -> tuple[str, ...]:
    """All text that a template has itself: what it writes as it is, and the constants of its expressions."""
    tree = _parse(source)
    written = [node.data for node in tree.find_all(nodes.TemplateData)]
    return *written, *(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


@lru_cache(maxsize=8)
def find_variables(source: str) -> frozenset[str]:
    """The names that a template looks at and does not set itself."""
    return frozenset(meta.find_undeclared_variables(_parse(source)))


@lru_cache(maxsize=8)
def find_words(source: str) -> re.Pattern[str] | None:
    """The markup that a template may look for in what a message says, such as </think>; None: there is none."""
    texts = {text.strip() for text in find_texts(source) if len(text) < MAX_WORD}
    words = sorted((text for text in texts if len(text) > 2 and _MARKUP.search(text)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None


def _find_collection(tree: nodes.Template) -> str:
    """The attribute of a namespace, such as `ns.out`, in which a template collects all of its text; empty: it has none.

    The text is added there (`{% set ns.out = ns.out ~ text %}`), and written at the end, which says nothing of the
    messages that it comes from.
    """
    statements = [node for node in tree.body if not isinstance(node, nodes.Macro)]
    outputs = [output for node in statements for output in (node, *node.find_all(nodes.Output))]
    written = [node for output in outputs if isinstance(output, nodes.Output) for node in output.nodes]
    written = [node for node in written if not isinstance(node, nodes.TemplateData) or node.data.strip()]
    name = _name_of(written[0]) if len(written) == 1 else ""
    is_added_to = any(_added_to(node) == name for node in tree.find_all(nodes.Assign))
    return name if is_added_to else ""


def _name_of(node: nodes.Node) -> str:
    """The name of an attribute of a variable; empty: the node is none."""
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    return ""


def _added_to(node: nodes.Assign) -> str:
    """The name of the attribute to whose value a statement adds; empty: it does something else."""
    if not isinstance(node.target, nodes.NSRef) or not isinstance(node.node, nodes.Concat):
        return ""
    name = f"{node.target.name}.{node.target.attr}"
    return name if _name_of(node.node.nodes[0]) == name else ""


def _tell_messages(
    body: list[nodes.Node], loop: int | None, numbers: Iterator[int], collection: str
) -> list[nodes.Node]:
    """A template's statements with calls that tell which item of a loop is written. Loops that write nothing have none.

    Args:
        body: the statements.
        loop: the number of the innermost loop that they are in; None: they are in none.
        numbers: of the loops within them.
        collection: what is added to this attribute is written at once too, and not at the end.
    """
    told: list[nodes.Node] = []
    for node in body:
        if collection and isinstance(node, nodes.Assign) and _added_to(node) == collection:
            assert isinstance(node.node, nodes.Concat)
            told.append(nodes.Output(node.node.nodes[1:], lineno=node.lineno))
        if collection and isinstance(node, nodes.Output):
            node.nodes = [written for written in node.nodes if _name_of(written) != collection]
        told.append(node)
        if isinstance(node, nodes.For):
            added = {_added_to(each) for each in node.find_all(nodes.Assign)} - {""}
            if node.find(nodes.Output) is None and collection not in added:
                continue
            number = next(numbers)
            begin = _call(BEGIN, number, node.target if isinstance(node.target, nodes.Name) else None)
            node.body = [
                _write(begin),
                *_tell_messages(node.body, number, numbers, collection),
                _write(_call(END, number)),
            ]
            told.append(_write(_call(END, number)))  # also where {% break %} left it
            continue
        is_macro = isinstance(node, nodes.Macro)  # whose variables are its own
        for name in ("body", "else_"):
            if isinstance(getattr(node, name, None), list):
                inner = _tell_messages(
                    getattr(node, name), None if is_macro else loop, numbers, "" if is_macro else collection
                )
                setattr(node, name, inner)
        for branch in getattr(node, "elif_", []):
            branch.body = _tell_messages(branch.body, loop, numbers, collection)
        if loop is None or not isinstance(node, nodes.Assign) or not isinstance(node.node, nodes.Getitem):
            continue
        is_field = isinstance(node.node.arg, nodes.Const) and isinstance(node.node.arg.value, str)
        if isinstance(node.target, nodes.Name) and not is_field:
            told.append(_write(_call(TAKE, loop, node.target)))
    return told


def _call(function: str, number: int | None = None, variable: nodes.Name | None = None) -> nodes.Call:
    arguments: list[nodes.Expr] = [] if number is None else [nodes.Const(number)]
    if variable is not None:
        arguments.append(nodes.Name(variable.name, "load"))
    return nodes.Call(nodes.Name(function, "load"), arguments, [], None, None)


def _write(call: nodes.Call) -> nodes.Output:
    output = nodes.Output([call])
    output.set_lineno(1)
    return output


def _name_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their reasoning under each name that templates use, as transformers renders them."""
    rename = getattr(chat_template_utils, "_alias_reasoning_fields", None)
    found: list[dict[str, Any]] = messages if rename is None else rename(messages)
    return found
