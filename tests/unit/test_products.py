"""Products with codes: the instructions that look up values, in an emulation of those six that are used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bitsandbytes.functional import get_4bit_type

from qlora_fsdp.layers.kernels.triton_products import lookup


def prmt(first: int, second: int, choices: int) -> int:
    """PTX's byte permute: each nibble of `choices` names one of eight bytes, or with its top bit that byte's sign."""
    source = first.to_bytes(4, "little") + second.to_bytes(4, "little")
    chosen = []
    for place in range(4):
        nibble = (choices >> (4 * place)) & 15
        byte = source[nibble & 7]
        repeats_sign = nibble & 8
        if repeats_sign:
            byte = 255 if byte & 128 else 0
        chosen.append(byte)
    return int.from_bytes(bytes(chosen), "little")


def lop3(a: int, b: int, c: int, table: int) -> int:
    """PTX's logic of three words: bit abc of `table`, for each place."""
    found = 0
    for place in range(32):
        index = 4 * ((a >> place) & 1) + 2 * ((b >> place) & 1) + ((c >> place) & 1)
        found |= ((table >> index) & 1) << place
    return found


def run(text: str, codes: int) -> list[int]:
    """What inline PTX leaves in its four results."""
    words = {"$4": codes}
    actions = {
        "mov.b32": lambda value: value,
        "and.b32": lambda one, other: one & other,
        "shr.u32": lambda value, places: value >> places,
        "shl.b32": lambda value, places: (value << places) & 0xFFFFFFFF,
        "prmt.b32": prmt,
        "lop3.b32": lop3,
    }
    for line in text.strip("{}\n").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name not in actions:
            assert name in ("", ".reg")
            continue
        result, *operands = [operand.strip() for operand in rest.split(",")]
        words[result] = actions[name](*[words[item] if item in words else int(item, 0) for item in operands])
    return [words[f"${number}"] for number in range(4)]


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_codes_are_looked_up(quant_type: str) -> None:
    book = get_4bit_type(quant_type, device="cpu").to(torch.bfloat16)
    text = lookup(tuple(book.tolist()), torch.bfloat16)
    for seed in range(64):
        codes = np.random.default_rng(seed).integers(0, 256, 4, dtype=np.uint8)
        results = np.array(run(text, int.from_bytes(codes.tobytes(), "little")), np.uint32)
        values = torch.from_numpy(results.view(np.int16).copy()).view(torch.bfloat16).tolist()
        upper = [book[code >> 4].item() for code in codes.tolist()]
        lower = [book[code & 15].item() for code in codes.tolist()]
        assert values == upper + lower
