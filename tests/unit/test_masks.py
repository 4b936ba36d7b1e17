"""Masks are made without waiting for the device, so that steps can be recorded as CUDA graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.families import make_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, masking_utils

from qlora_fsdp.data.batch import Batch, lay_out
from qlora_fsdp.layers.recurrent.replace import has_recurrent_layers, replaced_functions
from qlora_fsdp.model.inputs import lay_out_for, masks_without_asking, row_markers

# Families that transformers' masks were seen to wait for the device in, on a GPU; without experts, which ask on CPUs.
FAMILIES = ("bamba", "falcon_h1", "gemma2", "lfm2", "nemotron", "nemotron_h", "stablelm", "vaultgemma", "llama")
ROWS = ([[5, 7], [3, 8]], [[12], [11]])


class NoReads(TorchDispatchMode):
    """Refuses to read a tensor's value, for which a GPU's queue would have to run empty."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the device is asked"
        return func(*args, **(kwargs or {}))


def make_batch(lengths: list[list[int]]) -> Batch:
    rows = [[(np.arange(3, 3 + n, dtype=np.int32), np.ones(n, dtype=bool)) for n in sequence] for sequence in lengths]
    return lay_out(rows, 12, pad_token_id=0)


@pytest.mark.parametrize("lengths", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_asks_nothing_of_the_device(family: str, lengths: list[list[int]]):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(family), attn_implementation="eager")
    is_packed = len(lengths[0]) > 1
    if is_packed and family in ("bamba", "falcon_h1", "nemotron_h"):
        pytest.skip("its rows are padded without a package's kernels")
    batch = lay_out_for(make_batch(lengths), False)
    inputs = {"input_ids": batch.input_ids, **row_markers(batch, has_recurrent_layers(model) and is_packed)}
    with replaced_functions(model):
        expected = model(**inputs).logits
        with masks_without_asking(batch), NoReads():
            found = model(**inputs).logits
    assert torch.equal(found, expected)


@pytest.mark.parametrize("lengths", ROWS)
def test_rows_are_those_that_transformers_finds(lengths: list[list[int]]):
    batch = make_batch(lengths)
    expected = masking_utils.find_packed_sequence_indices(batch.position_ids)
    with masks_without_asking(batch):
        found = masking_utils.find_packed_sequence_indices(batch.position_ids)
    assert found is None if expected is None else torch.equal(found, expected)
