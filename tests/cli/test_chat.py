"""chat on a terminal: earlier lines come back, and Ctrl-C stops an answer or empties a line, but not the chat."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from qlora_fsdp import chat

DEMO = Path(__file__).parents[2] / "demo" / "base"
SECONDS = 300.0  # until a test that waits for output gives up


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, arguments: list[str]) -> None:
        self.side, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=other, stdout=other, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=lambda: os.close(os.open(os.ttyname(1), os.O_RDWR)),
        )  # fmt: skip
        os.close(other)
        self.seen = 0
        self.text = ""

    def wait_for(self, pattern: str) -> str:
        """Reads until the pattern is found in what came since the last call, and returns what came up to there."""
        while not (found := re.compile(pattern).search(self.text, self.seen)):
            assert select.select([self.side], [], [], SECONDS)[0], self.text
            try:
                part = os.read(self.side, 4096)
            except OSError:  # the other side is closed
                part = b""
            assert part, f"it ended before {pattern!r} came: {self.text}"
            self.text += part.decode(errors="replace")
        start, self.seen = self.seen, found.end()
        return self.text[start : self.seen]

    def wait_until_it_reads(self) -> None:
        """Waits until its main thread sleeps, in readline's select.

        A signal that comes just before that is not noticed until the next one: Python looks for signals only where
        select ends with EINTR.
        """
        state, until = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat"), time.monotonic() + SECONDS
        while state.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < until, self.text
            time.sleep(0.01)

    def type(self, text: str) -> None:
        os.write(self.side, text.encode())


def test_a_chat_on_a_terminal():
    base = [f"model.path={DEMO}", "data.chat_template=chatml", "quant=none"]
    terminal = Terminal(["qlora_fsdp.chat", *base, "max_new_tokens=400", "temperature=1"])
    try:
        terminal.wait_for("/reset, /system TEXT, /exit")
        terminal.wait_for("> ")
        terminal.type("the cat sat\n")
        terminal.wait_for("the cat sat\r\n")
        terminal.wait_for(r"[a-z]+ ")  # it is answering
        terminal.type("\x03")
        answer = terminal.wait_for("\r\n.*> ")
        assert len(answer.split()) < 300, "it was stopped"
        terminal.type("\x1b[A")  # the key for the line before
        terminal.wait_for("the cat sat")
        terminal.wait_until_it_reads()
        terminal.type("\x03")
        terminal.wait_for("/exit or Ctrl-D ends the chat\r\n.*> ")
        terminal.type("/quit\n")
        assert terminal.process.wait(SECONDS) == 0
    finally:
        terminal.process.kill()
        os.close(terminal.side)


def test_a_second_interrupt_while_an_answer_stops_is_the_programs():
    interrupts, ended = chat.Interrupts(), []
    before = chat.signal.signal(chat.signal.SIGINT, lambda number, frame: ended.append(number))
    try:
        with interrupts.taken():
            os.kill(os.getpid(), chat.signal.SIGINT)
            assert interrupts.is_asked and not ended
            os.kill(os.getpid(), chat.signal.SIGINT)
        assert ended == [chat.signal.SIGINT]
    finally:
        chat.signal.signal(chat.signal.SIGINT, before)
