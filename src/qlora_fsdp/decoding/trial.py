"""Prove on a small model that texts in slots get the logits that stock transformers gives them, or say why not.

A model may keep more of its past than keys, values and states, or ask more of its attention than
layers/attention/slots.py knows. Neither need be an error. So a small model of its own class (model/trials/miniature.py)
reads the beginnings of a few rows into slots that have held other texts, and goes on step by step, in float32 on the
CPU. All logits must be those of eager attention over one whole row at a time.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from qlora_fsdp.common.text import name_error
from qlora_fsdp.decoding.sampling import Sampling
from qlora_fsdp.decoding.slot_cache import SlotCache, attending
from qlora_fsdp.decoding.steps import Steps
from qlora_fsdp.layers.attention.slots import Step, running
from qlora_fsdp.layers.liger import stock_models
from qlora_fsdp.model.trials.miniature import VOCAB
from qlora_fsdp.model.trials.row_trial import CPU, RowTrial
from qlora_fsdp.runtime.hardware import is_shortage

TOLERANCE = 1e-4  # of the largest logit; rows whose past is wrong differ by a hundredth and more
LENGTH = 32  # longer than the rows that are tried, and than the small model's windows
MAX_LENGTH = 2**40  # so that windows of any length are made shorter than the rows


def why_not_in_slots(config: PretrainedConfig, trust_remote_code: bool, with_several_ends: bool = False) -> str | None:
    """Why texts of such a model can't run in slots; None if they can.

    Args:
        config: the model's.
        trust_remote_code: run model code that comes with the files.
        with_several_ends: whether texts are to be read once with several ends after one another (likelihoods.py).
    """
    trial = RowTrial(config, MAX_LENGTH, trust_remote_code=trust_remote_code)
    if trial.error is not None:
        return trial.error
    if trial.is_recurrent and with_several_ends:
        return "its layers carry a state from token to token"
    try:
        with stock_models(), torch.no_grad(), attending(trial.model):
            difference = _difference(trial)
    except Exception as error:  # classes are transformers', or come with a model
        if is_shortage(error):
            raise
        return f"its class can't be called so ({name_error(error)})"
    if not difference <= TOLERANCE:
        return f"its logits would differ by {difference:.1g} of the largest"
    return None


def _difference(trial: RowTrial) -> float:
    """The largest difference of a logit, as a part of the largest logit."""
    rows = [row.tolist() for row in trial.rows]
    expected = trial.alone.logits
    trial.model.eval()
    steps = _steps(trial, len(rows))
    slots = list(range(len(rows)))
    other_text = [(token + 7) % VOCAB for token in max(rows, key=len)]
    steps.admit(slots, [other_text] * len(rows), 0)
    halves = [len(row) // 2 for row in rows]
    beginnings = [row[: half + 1] for row, half in zip(rows, halves, strict=True)]
    steps.admit(slots, beginnings, 0)
    num_left = max(len(row) - half for row, half in zip(rows, halves, strict=True))
    largest = 0.0
    for done in range(num_left):
        logits = steps.logits()
        following: list[int] = []
        for slot, row in enumerate(rows):
            place = halves[slot] + done
            if place < len(row):
                difference = (logits[slot] - expected[slot][place]).abs().max()
                largest = max(largest, float(difference))
            following.append(row[min(place + 1, len(row) - 1)])
        steps.tokens.copy_(torch.tensor(following))
        steps.positions.add_(1)
    scale = max(float(logits.abs().max()) for logits in expected)
    return largest / scale


def _steps(trial: RowTrial, num_slots: int) -> Steps:
    cache = SlotCache(trial.small.get_text_config().num_hidden_layers)
    one = torch.zeros((1, 1), dtype=torch.int64)
    with running(Step(slots=one[0])):
        trial.model(input_ids=one, position_ids=one, past_key_values=cache, use_cache=True)
    return Steps(trial.model, Sampling(), num_slots, LENGTH, cache, VOCAB, CPU, captures=False)
