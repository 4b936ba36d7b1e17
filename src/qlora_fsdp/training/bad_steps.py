"""Find bad steps, which would spoil the adapter, and do what training.on_bad_step says.

A step is bad if its loss or its gradient is NaN or infinite, or if its gradient norm is far above those of the steps
before. The rule is applied twice. First `step.StepRunner` applies it on the device: the optimizer then leaves the
weights alone, so the gradient of a bad step is never used. Later, when the host knows loss and norm, `BadSteps.check`
applies the same rule. It writes the rows of the batch to run.folder/bad_steps/. Then it stops the run (`stop`),
continues with the next batch (`skip`), or first loads the newest checkpoint, weights and optimizer (`rollback`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from qlora_fsdp.common.errors import TrainingError
from qlora_fsdp.common.files import write_json
from qlora_fsdp.common.text import finite_or_none
from qlora_fsdp.config.schema import OnBadStep
from qlora_fsdp.config.specs import StepSpec
from qlora_fsdp.data.batch import micro_batch_indices
from qlora_fsdp.data.sequences import Indices, TrainingData
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.records.record_files import records_in
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.records.run_state import BAD_STEPS_FOLDER
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.checkpoints.saver import Saver

NUM_NORMS = 100  # a norm is compared with the median norm of this many last good steps
MIN_NORMS = 20  # with fewer good steps than this, no norm counts as too large
MAX_IN_A_ROW = 10  # more bad steps in a row stop the run, whatever training.on_bad_step says


class BadSteps:
    """Decides which steps of a run are bad, and acts on them.

    Loss and norm are the same on every rank, so all ranks decide the same. `check` is collective.

    Args:
        spec: what a bad step is, and what follows it.
        folder: the run folder.
        data: the training data.
        split: how the sequences of a step are divided among ranks and micro-batches.
        decode: turns the tokens of a row into text.
        norms: gradient norms of the last good steps before this start, oldest first.
        saver: saves before a stop, and loads the newest checkpoint for a rollback.
        processes: all ranks take part.
    """

    def __init__(
        self,
        spec: StepSpec,
        folder: Path,
        data: TrainingData,
        split: BatchSplit,
        decode: Callable[[Sequence[int]], str],
        norms: Sequence[float],
        saver: Saver,
        processes: Processes,
    ) -> None:
        self.spec = spec
        self.folder = folder
        self.data = data
        self.split = split
        self.decode = decode
        self.norms = list(norms)[-NUM_NORMS:]
        self.saver = saver
        self.processes = processes
        self.num_in_a_row = 0

    def check(self, step: int, loss: float, norm: float, indices: Indices, micro_losses: Sequence[Tensor]) -> bool:
        """Return whether a step is good. If it is not, do what `training.on_bad_step` says. Collective.

        Args:
            step: optimizer steps done before this one.
            loss: the mean loss of the step, over all ranks.
            norm: global norm of its gradient, before clipping.
            indices: the sequences of its global batch.
            micro_losses: this rank's part of the loss in each micro-batch, scalars on the device.

        Raises:
            TrainingError: the step is bad, and `on_bad_step` is stop or more than MAX_IN_A_ROW steps in a row were bad.
        """
        reason = self._judge(loss, norm)
        if reason is None:
            self.norms = [*self.norms, norm][-NUM_NORMS:]
            self.num_in_a_row = 0
            return True
        self.num_in_a_row += 1
        file = self._write(step, loss, norm, reason, indices, micro_losses)
        rows = "its rows could not be written" if file is None else f"its rows are in {file}"
        text = f"Step {step + 1}: {reason}. Its gradient was not used; {rows}."
        if self.spec.on_bad_step is OnBadStep.stop or self.num_in_a_row > MAX_IN_A_ROW:
            saved = self.saver.save(step).text
            row = f" These were {MAX_IN_A_ROW + 1} in a row." if self.num_in_a_row > MAX_IN_A_ROW else ""
            raise TrainingError(
                f"{text}{row} {saved} Look at these rows; set training.on_bad_step=skip to go on with the next batch, "
                f"or training.learning_rate lower than {self.spec.learning_rate}."
            )
        if self.spec.on_bad_step is OnBadStep.rollback:
            restored = self.saver.restore()
            text += (
                " There is no checkpoint to go back to." if restored is None else f" Back to step {restored}'s weights."
            )
        log.warning(f"{text} On with the next batch.")
        return False

    def limit(self) -> float:
        """The largest gradient norm that counts as good: `grad_norm_spike` times the median of the last good steps.

        Infinite if `grad_norm_spike` is null, or after fewer than MIN_NORMS good steps.
        """
        spike = self.spec.grad_norm_spike
        return math.inf if spike is None or len(self.norms) < MIN_NORMS else spike * statistics.median(self.norms)

    def _judge(self, loss: float, norm: float) -> str | None:
        """What is wrong with a step; None if it is good."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss}, gradient norm {norm}"
        if norm > self.limit():
            usual = statistics.median(self.norms)
            return f"gradient norm {norm:.4g}, {norm / max(usual, 1e-30):.1f} times the usual {usual:.4g}"
        return None

    def _write(
        self, step: int, loss: float, norm: float, reason: str, indices: Indices, micro_losses: Sequence[Tensor]
    ) -> Path | None:
        """Write the step's sequences to a file, each with the loss of its micro-batch, highest first. Collective.

        Returns:
            The file; None if the disk does not take it.
        """
        file = self.folder / BAD_STEPS_FOLDER / f"step-{step + 1:08}.json"
        size, num_groups = self.split.micro_batch_size, self.split.num_groups
        group = self.processes.rank // self.split.num_slices
        parts = micro_batch_indices(indices, rank=group, num_ranks=num_groups, micro_batch_size=size)
        own = [
            self._describe(int(sequence), loss.item())
            for part, loss in zip(parts, micro_losses, strict=False)
            for sequence in part
        ]
        gathered = self.processes.gather(
            own, list[dict[str, Any]]
        )  # streamed rows are on the rank that trains on them alone
        if self.processes.is_main:
            found = self._join_slices(gathered)
            found.sort(key=lambda entry: -math.inf if entry["loss"] is None else -entry["loss"])
            step_facts = {
                "step": step + 1,
                "reason": reason,
                "loss": finite_or_none(loss),
                "grad_norm": finite_or_none(norm),
            }
            facts = step_facts | {"action": self.spec.on_bad_step.name, "sequences": found}
            records_in(self.folder).write(f"{BAD_STEPS_FOLDER}/{file.name}", partial(_write_facts, facts))
        is_written = self.processes.share(file.is_file() if self.processes.is_main else None, bool)
        return file if is_written else None

    def _describe(self, sequence: int, loss: float) -> dict[str, Any]:
        """A sequence with the texts of its rows, as an entry of the file."""
        texts = [self.decode(tokens.tolist()) for tokens, _ in self.data.rows_of(sequence)]
        return {"sequence": sequence, "rank": self.processes.rank, "loss": loss, "rows": texts}

    def _join_slices(self, gathered: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The entries of all ranks; of ranks that share their sequences the first one's, with the sum of the losses."""
        size = self.split.num_slices
        groups = [gathered[first : first + size] for first in range(0, len(gathered), size)]
        same = [entries for group in groups for entries in zip(*group, strict=True)]
        return [entries[0] | {"loss": finite_or_none(sum(entry["loss"] for entry in entries))} for entries in same]


def _write_facts(facts: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    write_json(file, facts)
