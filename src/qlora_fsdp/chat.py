"""`python -m qlora_fsdp.chat`: talk to a model, with the chat template that it was trained with."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import DataError, UserError
from qlora_fsdp.common.startup import quick_imports
from qlora_fsdp.config.schema import Config
from qlora_fsdp.generate import GenerateSettings, check_generation, run_generate
from qlora_fsdp.runtime.run_command import run_command

if TYPE_CHECKING:
    from qlora_fsdp.model.assemble import AssembledModel
    from qlora_fsdp.runtime.processes import Processes

USAGE = """
Talk to a model: the quantized base, with an adapter or without.

usage: [accelerate launch -m | torchrun ... -m | python -m] qlora_fsdp.chat [adapter=DIR] [setting=value ...]

  adapter=DIR         the adapter's folder, which also knows its base model. Without one: the base model, model.path=...
  system=TEXT         the system turn
  max_new_tokens=512  an answer's tokens, at most
  temperature=0       0: the likeliest token each time. Above: sampled, at this temperature
  top_p=1, seed=0     of sampling

In the chat: /reset forgets all turns, /system TEXT sets the system turn and forgets them, /exit (or Ctrl-D) ends.
"""

COMMANDS = "/reset, /system TEXT, /exit"


@dataclass
class ChatSettings(GenerateSettings):
    """Settings of `chat`, as its --help says."""

    system: str | None = None
    max_new_tokens: int = 512


def chat(settings: ChatSettings, config: Config, processes: Processes) -> None:
    """Read turns from the terminal until it ends. Rank 0 shares what it reads with the other ranks."""
    settings.prompt = ""  # a chat starts without one
    check_generation(settings, config)
    with quick_imports():
        from qlora_fsdp.inference.prompts import check_template
        from qlora_fsdp.inference.trained import load_trained

    trained = load_trained(config, settings.adapter, processes, generates=True)
    check_template(trained.tokenizer, "chat")
    if processes.is_main and sys.stdin.isatty():
        print(COMMANDS)
    conversation = Conversation(settings.system)
    while True:
        line = processes.share(_read_line() if processes.is_main else None, patiently=True)
        if line is None or line.strip() == "/exit":
            return
        if not line.strip() or conversation.obeys(line):
            continue
        if re.fullmatch(r"/\w*", line.strip()):
            if processes.is_main:
                print(f"{line.strip()} is none of {COMMANDS}")
            continue
        conversation.messages.append({"role": "user", "content": line})
        try:
            reply = _reply(trained, conversation.messages, settings, processes)
        except UserError as error:  # for example, the template refuses a system turn; the chat continues
            conversation.messages.pop()
            if processes.is_main:
                print(f"Error: {error}")
            continue
        conversation.messages.append({"role": "assistant", "content": reply})


class Conversation:
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


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _reply(
    trained: AssembledModel, messages: list[dict[str, str]], settings: ChatSettings, processes: Processes
) -> str:
    import torch
    from transformers import TextStreamer

    from qlora_fsdp.inference.prompts import chat_tokens, pad_left
    from qlora_fsdp.inference.trained import num_positions

    tokenizer = trained.tokenizer
    tokens = chat_tokens(tokenizer, messages, None, "the conversation")
    limit = num_positions(trained)
    if limit is not None and len(tokens) >= limit:
        raise DataError(
            f"the conversation has {len(tokens):,} tokens, and the model knows {limit:,} positions. /reset forgets it."
        )
    if limit is not None:
        settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, limit - len(tokens)))
    torch.manual_seed(settings.seed + len(messages))  # the same on every rank, so that all draw the same tokens
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if processes.is_main else None
    input_ids, mask = pad_left([tokens], tokenizer.pad_token_id)
    output = run_generate(trained, input_ids, mask, settings, processes, streamer=streamer)
    return str(tokenizer.decode(output[0, len(tokens) :], skip_special_tokens=True))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    return run_command(argv, ChatSettings, USAGE, chat, optional=["data.path"])


if __name__ == "__main__":
    sys.exit(main())
