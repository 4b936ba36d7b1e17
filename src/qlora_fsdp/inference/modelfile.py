"""An Ollama Modelfile: the model, and the chat template in the language that Ollama has for templates.

A chat template in transformers is a program in Jinja, and Ollama's are programs in Go's language. Most chat templates
only put fixed words around each message, so these words are found by rendering conversations with marks in place of the
messages' texts. What follows is tried on other conversations: only where it gives the same text, letter for letter, is
it written. Templates that do more (thoughts, tools, turns that depend on one another) are left to what Ollama makes of
the file itself, and the Modelfile says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.contained import TryError
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.text import printable_lines
from qlora_fsdp.data.chats.stops import end_ids_of
from qlora_fsdp.data.chats.template import render_contained, render_text

ROLES = ("system", "user", "assistant")
MARK = "QXZ{number}ZXQ"  # a message's text: no template has such a word, and none strips it
Message = Mapping[str, str]


@dataclass(frozen=True)
class PlainTemplate:
    """A chat template that puts fixed words around each message.

    Attributes:
        start: what a conversation begins with, in any case.
        around: for each role, the words before and after a message's text.
        prompt: what the assistant's turn begins with, where it is to answer.
        system: the system message of conversations that have none; None for none.
    """

    start: str
    around: Mapping[str, tuple[str, str]]
    prompt: str
    system: str | None

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation that the assistant is to answer, as Ollama would write it by `as_go`."""
        given = list(messages)
        if self.system is not None and (not given or given[0]["role"] != "system"):
            given.insert(0, {"role": "system", "content": self.system})
        parts = [self.start]
        for message in given:
            before, after = self.around[message["role"]]
            parts += [before, message["content"], after]
        return "".join([*parts, self.prompt])

    def as_go(self) -> str:
        """The template in Go's language, of `text/template`."""
        cases: list[str] = []
        for role, (before, after) in self.around.items():
            word = "if" if not cases else "else if"
            cases.append(f'{{{{ {word} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}')
        return f"{self.start}{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}{{{{ end }}}}{self.prompt}"


def find_template(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> PlainTemplate | None:
    """The tokenizer's chat template, if it puts fixed words around each message; None if it does more, or is none.

    The begin token, which llama.cpp adds to a text where the tokenizer does, is left out of it.

    Args:
        tokenizer: of the model.
        arguments: that the template was given in training.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        template = tokenizer.get_chat_template()
    except ValueError:  # it has several with names, and none for every conversation
        return None
    if "strftime_now" in template:  # today's date would be in it for good
        return None
    variables = {**tokenizer.special_tokens_map, **arguments}
    begins_by_itself = tokenizer.bos_token is not None and tokenizer("x").input_ids[:1] == [tokenizer.bos_token_id]

    def render(messages: Sequence[Message], asks: bool = True) -> str:
        """The text of a conversation; a template that refuses one or goes beyond the limits of others' raises."""
        given = [dict(message) for message in messages]
        text, _, refusal = render_contained(render_text, template, given, None, variables, asks, False)
        if refusal is not None:
            raise DataError(f"The chat template refuses a conversation: {refusal}")
        return str(text).removeprefix(str(tokenizer.bos_token)) if begins_by_itself else text

    try:
        found = _find_words(render)
        if found is None or any(found.render(each) != render(each) for each in _conversations()):
            return None
    except (DataError, TryError):
        return None
    return found if all(_is_plain(text) for text in _texts_of(found)) else None


def _is_plain(text: str) -> bool:
    """Whether words of a template can be written into a Modelfile as they are."""
    if "{{" in text or '"""' in text:
        return False
    if text.startswith('"') or text.endswith(('"', "{")):  # which would join the marks of the language beside it
        return False
    return printable_lines(text) == text


def _find_words(render: Any) -> PlainTemplate | None:
    """The words around messages, of one conversation with all roles and of one without a system message."""
    marks = [MARK.format(number=number) for number in range(4)]
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    closed = render(messages, asks=False)
    asked = render(messages)
    if not asked.startswith(closed):
        return None
    prompt = asked.removeprefix(closed)
    between = []
    rest = closed
    for mark in marks:
        if rest.count(mark) != 1:
            return None
        before, rest = rest.split(mark)
        between.append(before)
    # A user's message before an answer and after it has the same words around it. So what stands between an answer and
    # the user's next message ends with what begins a user's message.
    one_turn = render(messages[:2], asks=False)
    after_user = one_turn.rpartition(marks[1])[2]
    if after_user != rest or not between[2].startswith(after_user):
        return None
    before_assistant = between[2].removeprefix(after_user)
    whole = render(messages[:3], asks=False)
    after_assistant = whole.rpartition(marks[2])[2]
    if not between[3].startswith(after_assistant):
        return None
    before_user = between[3].removeprefix(after_assistant)
    if not between[1].endswith(before_user):
        return None
    after_system = between[1].removesuffix(before_user)
    without = render([messages[1]], asks=False)
    lead = without.partition(marks[1])[0]
    if not lead.endswith(before_user):
        return None
    lead = lead.removesuffix(before_user)
    # What stands before the first message whatever that is belongs to no role.
    system_start = between[0]
    start = _common_start(lead, system_start) if not lead or not lead.endswith(after_system) else ""
    before_system = system_start.removeprefix(start)
    system = None
    if lead.removeprefix(start):
        given = lead.removeprefix(start)
        if not (given.startswith(before_system) and given.endswith(after_system)):
            return None
        system = given.removeprefix(before_system).removesuffix(after_system)
    around = {
        "system": (before_system, after_system),
        "user": (before_user, after_user),
        "assistant": (before_assistant, after_assistant),
    }
    return PlainTemplate(start, around, prompt, system)


def _common_start(one: str, other: str) -> str:
    """The longest beginning that two texts share."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]


def _conversations() -> list[list[Message]]:
    """Conversations on which a template is tried: with and without a system message, of one turn and of several."""

    def say(*turns: str) -> list[Message]:
        roles = ("user", "assistant")
        return [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]

    system = {"role": "system", "content": "You answer in one word."}
    short = say("Why?")
    long = say("One, two", "three.\n\nFour", "five", "six", "7 { } <x>\nlines")
    return [short, long, [system, *short], [system, *long]]


def _texts_of(found: PlainTemplate) -> list[str]:
    around = [text for pair in found.around.values() for text in pair]
    return [found.start, *around, found.prompt, found.system or ""]


def make_modelfile(
    source: Sequence[str], tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], stops: Sequence[str]
) -> str:
    """Returns the text of a Modelfile.

    Args:
        source: the lines that name the model, and an adapter.
        tokenizer: of the model.
        arguments: that the chat template was given in training.
        stops: the texts of the tokens at which answers end.
    """
    lines = list(source)
    found = find_template(tokenizer, arguments)
    if found is not None:
        lines.append(f'TEMPLATE """{found.as_go()}"""')
        if found.system:
            lines.append(f'SYSTEM """{found.system}"""')
    elif tokenizer.chat_template is not None:
        lines += [
            "# The chat template does more than to put words around messages, which is not translated into Ollama's",
            "# language here. Ollama takes the template of the GGUF file where it knows that; compare what it writes.",
        ]
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    return "\n".join(lines) + "\n"


def end_marks(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of the tokens at which answers end."""
    return [str(text) for text in tokenizer.convert_ids_to_tokens(sorted(end_ids_of(tokenizer)))]
