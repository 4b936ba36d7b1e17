"""Products with codes: the kernel in Triton's interpreter, and the lookup's instructions in an emulation of theirs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.products import compare, divided, sorted_rows

from qlora_fsdp.layers.kernels.launch import HAS_TRITON
from qlora_fsdp.layers.kernels.triton_products import MAX_ROWS, Tile, best_tile, lookup, max_tiles
from qlora_fsdp.layers.quantized.format import Format, code_book

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or not HAS_TRITON, reason="tests/gpu runs the kernels themselves; without Triton none"
)


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


@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "int4", "mxfp4"])
def test_codes_are_looked_up(quant_type: str) -> None:
    book = code_book(quant_type, torch.device("cpu")).to(torch.bfloat16)
    text = lookup(tuple(book.tolist()), torch.bfloat16)
    for seed in range(64):
        codes = np.random.default_rng(seed).integers(0, 256, 4, dtype=np.uint8)
        results = np.array(run(text, int.from_bytes(codes.tobytes(), "little")), np.uint32)
        values = torch.from_numpy(results.view(np.int16).copy()).view(torch.bfloat16).tolist()
        upper = [book[code >> 4].item() for code in codes.tolist()]
        lower = [book[code & 15].item() for code in codes.tolist()]
        assert values == upper + lower


@interpreted
@pytest.mark.parametrize("rank", [0, 20])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_products_of_two_weights_with_biases_and_adapters(quant_type: str, double_quant: bool, rank: int) -> None:
    format = Format(quant_type, double_quant)  # type: ignore[arg-type]
    assert compare(format, [96, 40], 256, 5, Tile(64, 16, 2, 2, 4, 3), True, rank) < 1e-5


@interpreted
@pytest.mark.parametrize(
    ("format", "outputs", "width", "rows", "tile"),
    [
        (Format("nf4", True), [96, 40, 64], 512, 5, Tile(32, 16, 4, 2, 2, 3)),
        (Format("nf4", True), [48], 192, 3, Tile(32, 16, 1, 1, 2, 5)),  # three scales a row, in units of two bytes
        (Format("nf4", True, 128), [48], 512, 3, Tile(32, 16, 1, 3, 4, 3)),
        (Format("nf4", False, 256), [48], 512, 40, Tile(32, 32, 2, 1, 4, 3)),
        (Format("nf4", False, 32), [48], 96, 3, Tile(32, 16, 1, 1, 4, 3)),
        (Format("int4", blocksize=32), [48], 96, 3, Tile(32, 16, 1, 1, 4, 3)),  # scales in bfloat16
        (Format("int4", scale_dtype=torch.float32), [48], 192, 3, Tile(32, 16, 1, 1, 4, 3)),
        (Format("mxfp4", blocksize=32), [48, 32], 256, 20, Tile(32, 32, 4, 2, 4, 3)),
        (Format("int8"), [48, 32], 192, 19, Tile(32, 16, 1, 2, 4, 3)),
        (Format("nf4", True), [96, 40], 256, 40, Tile(64, 64, 1, 1, 4, 3, scales_weight=True)),
    ],
    ids=str,
)
def test_products_of_other_formats(format: Format, outputs: list[int], width: int, rows: int, tile: Tile) -> None:
    assert compare(format, outputs, width, rows, tile, False, 8) < 1e-5


@interpreted
def test_products_of_experts_with_their_rows() -> None:
    """One expert has no rows, and one more than a tile."""
    ends = sorted_rows([3, 0, 27, 10])
    for rank in (0, 20):
        assert compare(Format("nf4", True), [4 * 48], 256, 40, Tile(32, 16, 4, 1, 4, 3), True, rank, ends) < 1e-5


@pytest.mark.parametrize("width", [64, 192, 576, 4096, 14336])
@pytest.mark.parametrize("format", [Format("nf4", True), Format("fp4", blocksize=32), Format("int8")], ids=str)
def test_tiles_divide_every_width(format: Format, width: int) -> None:
    for outputs in (24, 4096, 57344):
        for rows in (1, 16, 17, 33, 100, MAX_ROWS):
            tile = best_tile(outputs, width, rows, format.blocksize, format.is_4bit, 132)
            assert tile is not None and width % (min(64, format.blocksize) * tile.step) == 0
            assert tile.split == 1 or width // (min(64, format.blocksize) * tile.step) >= 2 * tile.split
            assert divided(outputs, tile.outputs) * divided(rows, tile.rows) <= max_tiles([outputs])


def test_int8_rows_that_no_tile_divides() -> None:
    assert best_tile(64, 100, 1, 64, False, 132) is None
