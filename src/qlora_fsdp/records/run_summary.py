"""How a run ended: summary.json with its figures, and what its log says last, with what to type next."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import UserError
from qlora_fsdp.common.files import write_json
from qlora_fsdp.common.text import plural, show_duration
from qlora_fsdp.config.reading.commands import read_corrected_format, read_trained_on
from qlora_fsdp.config.recorded import hide
from qlora_fsdp.config.schema import DataFormat
from qlora_fsdp.records.record_files import check_own, records_in
from qlora_fsdp.records.run_state import REPORT_FILE, SUMMARY_FILE

FIRST_SIGNAL_CODE = 128  # a shell's exit code for a process that a signal ended is above this


class RunSummary:
    """Collects the figures of a run, and writes summary.json when the run ends.

    Every rank has one, because any rank may be the one that records a failure. Only rank 0 calls `write`.

    Attributes:
        figures: what summary.json would hold now.
    """

    def __init__(self, num_ranks: int) -> None:
        self.figures: dict[str, Any] = {"status": "running", "num_ranks": num_ranks}
        self._folder: Path | None = None
        self._holder: str | None = None

    def open(self, folder: Path, holder: str | None) -> None:
        """From here on a failure can be recorded: the run folder is this run's. Its lock names the `holder`, rank 0."""
        self._folder = folder
        self._holder = holder

    @contextmanager
    def resuming(self) -> Iterator[None]:
        """Around what a checkpoint costs at the start: to verify it, and to load it."""
        started = time.perf_counter()
        yield
        self.figures["resume_seconds"] = self.figures.get("resume_seconds", 0.0) + time.perf_counter() - started

    def starts_from(self, adapter: str, digest: str | None) -> None:
        """The adapter that `lora.start` names, and the SHA-256 of its weights."""
        self.figures["started_from"] = {"adapter": adapter, "sha256": digest}

    def loaded(self, figures: dict[str, Any], setup_seconds: float) -> None:
        """The model is loaded and proven; all that came before the first step took `setup_seconds`."""
        self.figures |= figures | {"setup_seconds": setup_seconds}

    def served(self, export: str | None, merge: str | None) -> None:
        """Why a server does not apply the adapter as it is, or beside its base at all; None where it does."""
        reasons = {"not_served_as_it_is_because": export, "not_served_because": merge}
        self.figures |= {name: reason for name, reason in reasons.items() if reason is not None}

    def trained(self, checkpoints: dict[str, Any]) -> None:
        """Training has ended, well or not; `checkpoints` is what was saved on the way."""
        self.figures["checkpoints"] = checkpoints

    def measured(self, predicted: dict[str, Any] | None, measured: dict[str, Any]) -> None:
        """The memory that the plan predicted, if there is one, and the memory that the run took."""
        self.figures["memory"] = {"predicted": predicted, "measured": measured}

    def finished(self, result: dict[str, Any], seconds: float) -> None:
        """The adapter is written; `result` is how training went."""
        self.figures |= {"status": "finished"} | result | {"seconds": seconds}

    def failed(self, error: BaseException) -> None:
        """Write that an error or a signal, on whichever rank, has ended the run; nothing before there is a folder."""
        if self._folder is None:
            return
        status = "interrupted" if getattr(error, "exit_code", 1) > FIRST_SIGNAL_CODE else "failed"
        text = hide(str(error) if isinstance(error, UserError) else repr(error))
        with suppress(OSError):  # the folder may be what failed
            check_own(self._folder, self._holder)
            write_json(self._folder / SUMMARY_FILE, self.figures | {"status": status, "error": text})

    def write(self) -> None:
        """Write summary.json, if the disk takes it."""
        assert self._folder is not None
        records_in(self._folder).write(SUMMARY_FILE, lambda file: write_json(file, self.figures))


def describe_end(folder: Path, summary: Mapping[str, Any], is_causal: bool, is_random: bool, trusts_code: bool) -> str:
    """Returns the last lines of a run's log.

    Args:
        folder: the run folder.
        summary: what summary.json holds.
        is_causal: whether the model writes text.
        is_random: whether the base's weights are random.
        trusts_code: whether model code that comes with the files is run.
    """
    lines = [f"Finished: {plural(summary['steps'], 'step')} in {show_duration(summary['seconds'])}."]
    lines += _before_and_after("training loss", summary.get("initial_loss"), summary.get("final_loss"))
    num_averaged = summary.get("losses_are_means_of", 1)
    if num_averaged > 1:
        lines[-1] += f", means of {num_averaged} steps"
    lines += _before_and_after("evaluation loss", summary.get("initial_eval_loss"), summary.get("eval_loss"))
    commands = commands_for(folder / "adapter", is_causal, is_random, trusts_code)
    named = {"adapter": folder / "adapter", "report": folder / REPORT_FILE}
    lines += [f"  {name:<16} {path}" for name, path in named.items() if path.exists()]
    if summary.get("doubt"):
        lines.append(f"Note: {summary['doubt']}")
    lines += ["Next:", *(f"  {command}" for command in commands)]
    if is_causal and not is_random:
        lines += _for_servers(folder / "adapter", summary, trusts_code)
    return "\n".join(lines)


def _for_servers(adapter: Path, summary: Mapping[str, Any], trusts_code: bool) -> list[str]:
    """Lines on what a server needs, where it does not apply the adapter as it is."""
    reason = summary.get("not_served_because")
    if reason is not None:
        return [f"Note: no server applies the adapter beside its base, because {reason}. merge makes one model of both"]
    reason = summary.get("not_served_as_it_is_because")
    if reason is None:
        return []
    given = f"adapter={shlex.quote(str(adapter))}{trust(trusts_code)}"
    out = shlex.quote(str(adapter.with_name("for-vllm")))
    return [
        f"Note: the adapter is for PEFT. For vLLM it has to be written once more, because {reason}:",
        f"  qlora-fsdp merge {given} out={out} write=adapter",
    ]


def commands_for(adapter: Path, is_causal: bool, is_random: bool, trusts_code: bool) -> list[str]:
    """Returns the commands that can use an adapter, as one types them."""
    given = f"adapter={shlex.quote(str(adapter))}"
    loaded = given + trust(trusts_code)
    has_chats = read_trained_on(str(adapter)) in (None, DataFormat.messages)
    if not is_causal:
        commands = [f"qlora-fsdp {name} {loaded} data.path=FILE" for name in ("predict", "evaluate")]
        commands[0] += " out=predictions.csv"
    elif has_chats:
        commands = [ask(loaded, adapter)]
    else:
        commands = [f'qlora-fsdp generate {loaded} raw=true prompt="..."']
    if not is_random:
        merged = shlex.quote(str(adapter.with_name("merged")))
        onto = " base=dequantized" if read_corrected_format(str(adapter)) is not None else ""
        commands.append(f"qlora-fsdp merge {loaded} out={merged}{onto}")
        commands.append(f"qlora-fsdp push {given} repo=ORG/NAME")
    return commands


def trust(trusts_code: bool) -> str:
    """Returns what the next command needs to run the model's own code: an adapter's folder can't allow it."""
    return " model.trust_remote_code=true" if trusts_code else ""


def ask(given: str, folder: Path) -> str:
    """Returns the command that lets a model write: `chat`, where the tokenizer in its folder has a chat template.

    Args:
        given: what names the model, such as `adapter=FOLDER`.
        folder: of the adapter or the model, with its tokenizer.
    """
    has_template = (folder / "chat_template.jinja").is_file()
    if not has_template:
        config = folder / "tokenizer_config.json"  # older versions of transformers wrote the template into it
        has_template = config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
    return f"qlora-fsdp chat {given}" if has_template else f'qlora-fsdp generate {given} prompt="..."'


def _before_and_after(name: str, before: float | None, after: float | None) -> list[str]:
    if before is None or after is None:
        return []
    return [f"  {name:<16} {before:.4f} -> {after:.4f}"]
