"""Find out, with a small model, whether prompts can be completed beside longer ones.

transformers completes several prompts at once by padding the shorter ones on their left and masking that. Not every
class heeds the mask everywhere: DeepSeek V4 compresses every few tokens to one, counted from the padding.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from qlora_fsdp.common.text import name_error
from qlora_fsdp.decoding.trial import MAX_LENGTH, TOLERANCE
from qlora_fsdp.inference.prompts import pad_left
from qlora_fsdp.layers.liger import stock_models
from qlora_fsdp.model.trials.row_trial import RowTrial
from qlora_fsdp.runtime.hardware import is_shortage
from qlora_fsdp.runtime.run_command import log

STOCK_BATCH_SIZE = 8  # prompts at a time where transformers completes them, whose cache grows
PAD, NUM_NEW = 0, 2


def stock_batch_size(config: PretrainedConfig, trust_remote_code: bool, wanted: int | None) -> int:
    """How many prompts transformers completes at a time: `wanted` or as many as are fast, and one if padding is seen.

    Args:
        config: the model's.
        trust_remote_code: run model code that comes with the files.
        wanted: None for as many as are fast.
    """
    size = wanted or STOCK_BATCH_SIZE
    if size > 1 and (reason := why_not_padded(config.get_text_config(), trust_remote_code)) is not None:
        log.info(f"Prompts are completed one at a time: {reason}")
        return 1
    return size


def why_not_padded(config: PretrainedConfig, trust_remote_code: bool) -> str | None:
    """Why such a model's logits are others beside a longer prompt; None if they are not, or if that can't be tried."""
    trial = RowTrial(config, MAX_LENGTH, trust_remote_code=trust_remote_code)
    if trial.error is not None:
        return None
    try:
        with stock_models(), torch.no_grad():
            difference = _difference(trial)
    except Exception as error:  # classes are transformers', or come with a model
        if is_shortage(error):
            raise
        return f"padded prompts can't be computed ({name_error(error)})"
    if not difference <= TOLERANCE:
        return f"beside a longer prompt its logits would differ by {difference:.1g} of the largest"
    return None


def _difference(trial: RowTrial) -> float:
    """The largest difference of a logit of the next two tokens, as a part of the largest logit."""
    model, rows = trial.model.eval(), [row.tolist() for row in trial.rows]
    beside, largest, scale = _complete(model, rows), 0.0, 0.0
    for index, row in enumerate(rows):
        alone = _complete(model, [row])
        for step, (found, expected) in enumerate(zip(beside.logits, alone.logits, strict=True)):
            largest = max(largest, float((found[index] - expected[0]).abs().max()))
            scale = max(scale, float(expected.abs().max()))
            if beside.sequences[index, step - NUM_NEW] != alone.sequences[0, step - NUM_NEW]:
                break  # the next logits are those of other texts
    return largest / scale


def _complete(model: Any, rows: list[list[int]]) -> Any:
    input_ids, mask = pad_left(rows, PAD)
    options = {"do_sample": False, "min_new_tokens": NUM_NEW, "max_new_tokens": NUM_NEW, "pad_token_id": PAD}
    return model.generate(input_ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
