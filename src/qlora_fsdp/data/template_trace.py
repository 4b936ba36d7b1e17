"""A chat template rendered with a note of which part of the text each message gave."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import Template, nodes
from transformers.utils import chat_template_utils

BEGIN, END = "_begin_message", "_end_message"


def trace_messages(
    template: str, messages: list[dict[str, Any]], tools: Any, special_tokens: dict[str, Any]
) -> tuple[str, dict[int, tuple[int, int]]]:
    """Renders a conversation, and finds the part of the text that each message gave.

    Templates write messages in a loop. Each loop is made to call a function where its body begins and ends, which
    notes how long the text is by then.

    Args:
        template: source of the Jinja template.
        messages: the conversation.
        tools: its tools, or None.
        special_tokens: further variables of the template.

    Returns:
        The text, and start and end of its parts by message. A message is missing where a template does not write it
        in one piece of one loop.

    Raises:
        Exception: of any type; templates compute, and their sandbox lets errors through.
    """
    messages = _name_reasoning([dict(message) for message in messages])
    numbers = {id(message): number for number, message in enumerate(messages)}
    blocks: list[str] = []
    events: list[tuple[str, int, int]] = []  # begin or end, the message, the length of the text by then
    length = 0

    def note(event: str, item: Any) -> str:
        if id(item) in numbers:
            events.append((event, numbers[id(item)], length))
        return ""

    variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": False}
    calls = {BEGIN: lambda item: note(BEGIN, item), END: lambda item: note(END, item)}
    for block in _compile(template).generate({**special_tokens, **variables, **calls}):
        blocks.append(block)
        length += len(block)

    parts: dict[int, list[tuple[int, int]]] = {}
    for (event, number, start), (next_event, next_number, end) in pairwise(events):
        if event == BEGIN and end > start:
            is_whole = next_event == END and next_number == number
            parts.setdefault(number, []).extend([(start, end)] if is_whole else [(-1, -1), (-1, -1)])
    return "".join(blocks), {number: found[0] for number, found in parts.items() if len(found) == 1}


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    """The template with a call where the body of each loop begins, and one where it ends."""
    environment = chat_template_utils._compile_jinja_template(source).environment
    tree = environment.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        if isinstance(loop.target, nodes.Name):
            loop.body = [_call(BEGIN, loop.target.name), *loop.body, _call(END, loop.target.name)]
    tree.set_environment(environment)
    template: Template = Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
    return template


def _call(function: str, argument: str) -> nodes.Output:
    call = nodes.Call(nodes.Name(function, "load"), [nodes.Name(argument, "load")], [], None, None)
    output: nodes.Output = nodes.Output([call]).set_lineno(1)
    return output


def _name_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their reasoning under each name that templates use, as transformers renders them."""
    rename = getattr(chat_template_utils, "_alias_reasoning_fields", None)
    found: list[dict[str, Any]] = messages if rename is None else rename(messages)
    return found
