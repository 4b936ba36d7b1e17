"""Reward models: adapters of task=reward on the base that is trained, in whose place they stand for single passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.config.reading.commands import read_base_fingerprint
from qlora_fsdp.config.settings import show
from qlora_fsdp.data.questions import Question
from qlora_fsdp.data.sequences import SequenceSettings
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.model.adapters.other_adapter import OtherAdapter
from qlora_fsdp.model.adapters.read_adapter import SavedAdapter
from qlora_fsdp.model.assemble import AssembledModel, check_fingerprint
from qlora_fsdp.model.tasks.answering_lm import AnsweringLM
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.answers.answered import AnsweredRows, AnsweredStep
from qlora_fsdp.training.answers.rollouts import Completion
from qlora_fsdp.training.capture.passes import place

SETTING = "reward.models"
HEAD = "score"  # transformers' name of the head of a sequence classifier on a language model


class RewardModels:
    """Gives answers the rewards of models. All ranks call it together.

    Args:
        folders: adapters of task=reward.
        assembled: the model, loaded.
        base: what the settings call the base.
        layout: how answers become sequences.
        split: how ranks share sequences.
        processes: all ranks take part.

    Raises:
        AdapterError: a folder's adapter was trained on other weights, is no reward model, has NaN or infinite values,
            or adapts what has no adapter here; the same on every rank.
    """

    def __init__(
        self,
        folders: Sequence[str],
        assembled: AssembledModel,
        base: str,
        layout: SequenceSettings,
        split: BatchSplit,
        processes: Processes,
    ) -> None:
        assert isinstance(assembled.model, AnsweringLM)
        if assembled.model.transform is None:
            raise AdapterError(f"{SETTING} can't be used with this model: it makes its logits in a way of its own.")
        self.model = assembled.model
        self.layout = layout
        self.split = split
        self.processes = processes
        self.adapters: list[OtherAdapter] = []
        for folder in folders:
            saved = SavedAdapter(Path(folder).expanduser(), SETTING)
            check_fingerprint(
                assembled,
                read_base_fingerprint(folder),
                processes,
                base=show("model.path", base),
                adapter=str(saved),
                fix=f". A reward model is an adapter of the same base: train it on that, or leave {SETTING} out.",
            )
            adapter = OtherAdapter(saved, self.model.model, processes.device, HEAD)
            saved.check_values(processes)
            self.adapters.append(adapter)

    @torch.no_grad()
    def score(self, questions: Sequence[Question], completions: Sequence[Completion]) -> NDArray[np.float64]:
        """The reward of each answer by each model, [num_answers, num_models], the same on every rank.

        Args:
            questions: the prompt of each answer.
            completions: the answers.
        """
        rows = AnsweredRows([question.tokens for question in questions], completions, np.ones(len(completions), bool))
        laid = AnsweredStep.of(rows, self.layout, self.split, self.processes.rank)
        nothing = np.zeros(len(completions))
        found = np.zeros((len(completions), len(self.adapters)))
        with self.model.without_dropout():
            for number, adapter in enumerate(self.adapters):
                own: dict[int, float] = {}
                with adapter.in_place():
                    for micro, batch in enumerate(laid.batches(nothing, nothing)):
                        ids, ends = laid.row_ends(micro, batch.input_ids.shape[1])
                        at_ends = replace(batch, label_positions=torch.tensor(ends, dtype=torch.int64))
                        hidden = self.model(place(at_ends, self.processes.device, False), "hidden")
                        assert adapter.head is not None
                        values = hidden.float() @ adapter.head[0]
                        own |= dict(zip(ids, values.tolist(), strict=True))
                free_gathered(self.model)
                for part in self.processes.gather(own, dict[int, float]):
                    for row, value in part.items():
                        found[row, number] = value
        return found
