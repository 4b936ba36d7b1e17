"""`qlora-fsdp chat`: talk to a model, with the chat template that it was trained with."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import DataError, Problem, UserError
from qlora_fsdp.common.startup import end_process, quick_imports
from qlora_fsdp.common.text import for_stdout, is_unicode
from qlora_fsdp.config.reading.commands import read_trained_on
from qlora_fsdp.config.schema import Config, DataFormat
from qlora_fsdp.config.settings import show
from qlora_fsdp.generate import IN_UTF8, GenerateSettings, check_generation, tell_conversations
from qlora_fsdp.runtime.run_command import log, run_command

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, TextStreamer

    from qlora_fsdp.decoding.completer import Completer
    from qlora_fsdp.decoding.stop_strings import StopStrings
    from qlora_fsdp.model.assemble import AssembledModel
    from qlora_fsdp.runtime.processes import Processes

USAGE = """
Talk to a model: the quantized base, with an adapter or without.

usage: qlora-fsdp chat [adapter=DIR] [launch.num_processes=N] [setting=value ...]

  adapter=DIR         the adapter's folder, which also knows its base model. Without one: the base model, model.path=...
  system=TEXT         the system turn (default: the data.system_prompt that the adapter was trained with)
  data.template_arguments={NAME: VALUE}  what the chat template is given, such as {enable_thinking: false} (default: as
                      the adapter was trained with)
  max_new_tokens=512  an answer's tokens, at most
  temperature=0       0: the likeliest token each time. Above: sampled, at this temperature
  top_p=1, seed=0     of sampling
  other_base=true     use the adapter on a base with other weights than those that it was trained on (default: false)

In the chat: /help says what there is, /reset forgets all turns, /system TEXT sets the system turn and forgets
them, /exit (or Ctrl-D) ends.
Arrow keys bring back earlier lines. Ctrl-C stops an answer that is being written (of one process).
"""

OF_GENERATE = ("prompt", "prompts", "raw", "out", "batch_size")
COMMANDS = "/help, /reset, /system TEXT, /exit"
HELP = """/reset        forgets all turns
/system TEXT  sets the system turn and forgets all others; without TEXT there is none
/exit         ends, as Ctrl-D does
Ctrl-C stops an answer that is being written. Everything else is said to the model."""


@dataclass
class ChatSettings(GenerateSettings):
    """Settings of `chat`, as its --help says."""

    system: str | None = None
    max_new_tokens: int = 512


def chat(settings: ChatSettings, config: Config, processes: Processes) -> None:
    """Read turns from the terminal until it ends. Rank 0 shares what it reads with the other ranks."""
    bad = [
        Problem(show(name, value), "is a setting of generate: a chat reads what you type, and prints.", "Leave it out.")
        for name in OF_GENERATE
        if (value := getattr(settings, name)) != getattr(GenerateSettings, name)
    ]
    settings.prompt, settings.prompts = "", None  # a chat starts without one
    system = settings.system = config.data.system_prompt if settings.system is None else settings.system
    if system is not None and not is_unicode(system):
        bad.append(Problem("system", "has bytes that are no UTF-8.", IN_UTF8))
    check_generation(settings, config.task, bad)
    with quick_imports():
        from qlora_fsdp.inference.completions import make_completer, sampling_config
        from qlora_fsdp.inference.prompts import check_template
        from qlora_fsdp.inference.trained import load_trained

    trained = load_trained(config, settings, processes, generates=True)
    check_template(trained.tokenizer, "chat")
    tell_conversations(system, config.data.template_arguments)
    form = read_trained_on(settings.adapter)
    if form not in (None, DataFormat.messages):
        log.info(f"Note: the adapter was trained on {form.value} rows, and has not seen this template")
    generation = sampling_config(trained, settings.temperature, settings.top_p, settings.max_new_tokens)
    answerer = Answerer(trained, generation, make_completer(trained, generation, processes, 1), processes)
    if processes.is_main:
        _prepare_terminal()
    interrupts = Interrupts()
    # With several processes, signals are the watch's, and no rank may stop alone.
    with interrupts.taken() if processes.num_ranks == 1 else nullcontext():
        try:
            _talk(answerer, settings, interrupts, processes)
        finally:
            if answerer.completer is not None:
                answerer.completer.release()


def _talk(answerer: Answerer, settings: ChatSettings, interrupts: Interrupts, processes: Processes) -> None:
    """Answer one line after another."""
    conversation = ChatHistory(settings.system)
    while True:
        line = processes.share(interrupts.read_line() if processes.is_main else None, str | None, patiently=True)
        if line is None or line.strip() in ("/exit", "/quit"):
            return
        if not line.strip() or conversation.obeys(line):
            continue
        if line.strip() == "/help":
            if processes.is_main:
                print(HELP)
            continue
        if re.fullmatch(r"/\w*", line.strip()):
            if processes.is_main:
                print(f"{line.strip()} is none of {COMMANDS}")
            continue
        conversation.messages.append({"role": "user", "content": line})
        try:
            reply = answerer.answer(conversation.messages, settings, interrupts)
        except UserError as error:  # for example, the template refuses a system turn; the chat continues
            conversation.messages.pop()
            if processes.is_main:
                print(for_stdout(f"Error: {error}"))
            continue
        conversation.messages.append({"role": "assistant", "content": reply})


class ChatHistory:
    """The turns so far."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system's."""
        self.messages: list[dict[str, str]] = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})

    def obeys(self, line: str) -> bool:
        """Carry out a line that is a command. Returns whether it is one."""
        command, _, rest = line.strip().partition(" ")
        if command not in ("/reset", "/system"):
            return False
        if command == "/system":
            self.system = rest.strip() or None
        self.reset()
        return True


class Interrupts:
    """What Ctrl-C does in a chat of one process: it empties the line, or stops the answer; while that stops, all.

    Also a stopping criterion of transformers' `generate`.
    """

    def __init__(self) -> None:
        self.is_reading = self.is_asked = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A context in which Ctrl-C does this."""
        before = signal.getsignal(signal.SIGINT)

        def obey(number: int, frame: FrameType | None) -> None:
            if self.is_reading:
                raise KeyboardInterrupt
            if self.is_asked and callable(before):
                before(number, frame)
            self.is_asked = True

        signal.signal(signal.SIGINT, obey)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def read_line(self) -> str | None:
        """The next line; None at the end."""
        self.is_asked, self.is_reading = False, sys.stdin.isatty()
        try:
            return input("> " if self.is_reading else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D ends the chat")
            return ""
        finally:
            self.is_reading = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **others: object) -> Tensor:
        """For each row whether it is to end: bool [num_rows]."""
        import torch

        return torch.full((len(input_ids),), self.is_asked, device=input_ids.device)


def _prepare_terminal() -> None:
    """Let lines be edited, and be read whatever bytes are in them."""
    with suppress(AttributeError, OSError):  # a test's stdin
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    if sys.stdin.isatty():
        with suppress(ImportError):  # Python may be built without it
            import readline  # noqa: F401  # from here on `input` has a history, and obeys arrow keys
        print(COMMANDS)


class Answerer:
    """Writes the next turn of a conversation, and prints it meanwhile, by transformers if there is no `completer`."""

    def __init__(
        self,
        trained: AssembledModel,
        generation: GenerationConfig,
        completer: Completer | None,
        processes: Processes,
    ) -> None:
        from qlora_fsdp.decoding.stop_strings import StopStrings, stop_strings

        self.trained, self.generation = trained, generation
        self.completer, self.processes = completer, processes
        self.stops = StopStrings(trained.tokenizer, stop_strings(generation))

    def answer(self, messages: list[dict[str, str]], settings: ChatSettings, interrupts: Interrupts) -> str:
        """The assistant's turn after `messages`.

        Raises:
            DataError: the template refuses the conversation, or it has more tokens than the model knows positions.
        """
        import torch

        from qlora_fsdp.data.tokenizer import ContainedTokenizer
        from qlora_fsdp.inference.prompts import chat_tokens
        from qlora_fsdp.inference.trained import num_positions

        tokenizer = self.trained.tokenizer
        tokens = chat_tokens(tokenizer, messages, None, "the conversation")
        limit, max_new_tokens = num_positions(self.trained), settings.max_new_tokens
        if limit is not None and len(tokens) >= limit:
            raise DataError(
                f"the conversation has {len(tokens):,} tokens, and the model knows {limit:,} positions. /reset forgets "
                "it."
            )
        if limit is not None:
            max_new_tokens = min(max_new_tokens, limit - len(tokens))
        torch.manual_seed(settings.seed + len(messages))  # the same on every rank, so that all draw the same tokens
        found = self._complete(tokens, max_new_tokens, interrupts)
        return self.stops.cut(ContainedTokenizer(tokenizer).decode(found, skip_special_tokens=True))

    def _complete(self, tokens: list[int], max_new_tokens: int, interrupts: Interrupts) -> list[int]:
        import torch

        from qlora_fsdp.decoding.completer import Request
        from qlora_fsdp.inference.completions import run_transformers
        from qlora_fsdp.inference.prompts import pad_left

        streamer = _streamer(self.trained, self.stops) if self.processes.is_main else None
        may_stop = self.processes.num_ranks == 1
        if self.completer is None:
            pad_token_id = self.trained.tokenizer.pad_token_id
            self.generation.update(max_new_tokens=max_new_tokens)
            options: dict[str, Any] = {"streamer": streamer, "stopping_criteria": [interrupts] if may_stop else None}
            padded = pad_left([tokens], pad_token_id)
            output = run_transformers(self.trained, *padded, self.generation, self.processes, **options)
            return output[0, len(tokens) :].tolist()
        request = Request(tokens, max_new_tokens)
        if streamer is not None:
            streamer.put(torch.tensor([tokens]))  # the prompt, which is skipped

        def show(request: Request, token: int) -> None:
            if streamer is not None:
                streamer.put(torch.tensor([token]))

        self.completer.complete([request], show, lambda: may_stop and interrupts.is_asked)
        if streamer is not None:
            streamer.end()
        return request.completion


def _streamer(trained: AssembledModel, stops: StopStrings) -> TextStreamer:
    """Prints an answer word by word, without what a terminal would obey, and without the text that ends it."""
    from transformers import TextStreamer

    from qlora_fsdp.data.tokenizer import ContainedTokenizer

    class Streamer(TextStreamer):
        waiting = ""  # what may be the beginning of a text that ends the answer

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            said = stops.cut(self.waiting + text)
            num_sure = len(said) if stream_end else stops.num_sure(said)
            self.waiting = said[num_sure:]
            print(for_stdout(said[:num_sure]), flush=True, end="\n" if stream_end else "")

    tokenizer: Any = ContainedTokenizer(trained.tokenizer)  # of which it calls `decode` alone
    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    return run_command(argv, ChatSettings, USAGE, chat, optional=["data.path", "reward.functions"])


if __name__ == "__main__":
    end_process(main())
