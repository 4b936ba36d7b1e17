"""Checkpoints that bitsandbytes has quantized already: its bytes are taken as they are, before and after training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.checkpoints import quantize_checkpoint
from tests.helpers.ranks import once, run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import Trained, gathered_parts, settings, train_all

pytestmark = pytest.mark.distributed
STEPS = "training.max_steps=8"

CHECKPOINTS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4 double in bfloat16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "fp4 in bfloat16": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("quantized")
    source = checkpoint("llama", torch.float32)
    return {
        name: quantize_checkpoint(source, base / name.replace(" ", "-"), **CHECKPOINTS[name]) for name in CHECKPOINTS
    }


@pytest.fixture(scope="module")
def trained(folders: dict[str, Path], rows: Path) -> Callable[[int], list[dict[str, Trained]]]:
    cases = {name: settings(folder, rows, STEPS, "training.micro_batch_size=2") for name, folder in folders.items()}
    return once(lambda num_ranks: run_ranks(num_ranks, train_all, cases, gathered_parts))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bytes_are_the_files_own(folders, trained, name: str, num_ranks: int):
    stored = load_file(folders[name] / "model.safetensors")
    for rank in trained(num_ranks):
        parts = dict(rank[name].inspected)
        for key, expected in stored_parts(stored).items():
            found = parts.pop(key)
            width = expected.nbytes // len(found)  # our rows may end in padding
            torch.testing.assert_close(found[:, :width].flatten(), to_bytes(expected), rtol=0, atol=0, msg=key)
        assert not parts


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_losses(checkpoint, folders, rows, trained, name: str):
    # Stock int8 also quantizes activations: there the reference is the original, with dequantized weights.
    source, more = (checkpoint("llama", torch.float32), ["quant=int8"]) if name == "int8" else (folders[name], [])
    reference = stock_losses(settings(source, rows, STEPS, *more))
    for num_ranks in (1, 2):
        assert trained(num_ranks)[0][name].losses == pytest.approx(reference, abs=1e-5)


def stored_parts(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts of every quantized weight as the file has them, under our names."""
    parts = {}
    for key, tensor in stored.items():
        if key.endswith(".SCB"):
            name = key.removesuffix(".SCB")
            parts |= {f"{name}.codes": stored[f"{name}.weight"], f"{name}.scales": tensor}
        elif ".quant_state." in key:
            weight = key.partition(".quant_state.")[0]
            name, state = weight.removesuffix(".weight"), json.loads(bytes(tensor.tolist()))
            parts |= {f"{name}.codes": stored[weight], f"{name}.scales": stored[f"{weight}.absmax"]}
            if "nested_offset" in state:
                nested = stored[f"{weight}.nested_absmax"]
                parts[f"{name}.nested_scales"] = torch.cat([nested, torch.tensor([state["nested_offset"]])])
    return parts


def to_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()
