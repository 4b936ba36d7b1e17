"""model.cache_quantized: the weights that one run has quantized are read by the next, byte for byte."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from qlora_fsdp import evaluate
from tests.helpers.checkpoints import quantize_checkpoint
from tests.helpers.ranks import Meeting, run_ranks
from tests.helpers.runs import gathered_parts, settings, train_all

pytestmark = pytest.mark.distributed
QUANT = {
    "nf4 double": [],
    "fp4": ["quant=fp4", "quant.bnb_4bit_use_double_quant=false"],
    "int8": ["quant=int8"],
    "tied": [],
}


def evaluate_twice(run: Path, rows: Path, cache: Path) -> list[tuple[float, str]]:
    """The loss and what was said, from the cache and from another folder, where nothing is."""
    results = []
    for folder in (cache, cache / "empty"):
        Meeting.new_port()
        out, said = run / "loss.json", io.StringIO()
        own = [f"adapter={run / 'adapter'}", f"model.cache_folder={folder}", f"out={out}", "training.max_length=64"]
        with contextlib.redirect_stderr(said):
            assert evaluate.main([*own, f"data.path={rows}", f"data.cache_folder={rows.parent / 'cache'}"]) == 0
        results.append((json.loads(out.read_text())["loss"], said.getvalue()))
    return results


def log_of(folder: Path) -> str:
    return (folder / "train.log").read_text()


def test_later_runs_read_the_bytes_of_the_first(checkpoint: Callable[..., Path], rows: Path, tmp_path: Path):
    cache, cases = tmp_path / "cache", {}
    for case, more in QUANT.items():
        model = checkpoint("qwen2" if case == "tied" else "llama")
        for kind in ("plain", "first", "second"):
            own = [] if kind == "plain" else ["model.cache_quantized=true", f"model.cache_folder={cache}"]
            folder = f"run.folder={tmp_path / f'{case}-{kind}'.replace(' ', '-')}"
            cases[case, kind] = settings(model, rows, "training.max_steps=2", folder, *more, *own)
    found = run_ranks(2, train_all, cases, gathered_parts)[0]
    for case in QUANT:
        plain = found[case, "plain"]
        for kind in ("first", "second"):
            cached = found[case, kind]
            assert cached.inspected.keys() == plain.inspected.keys() and cached.losses == plain.losses
            assert all(cached.inspected[name].equal(plain.inspected[name]) for name in plain.inspected)
        logs = [log_of(tmp_path / f"{case}-{kind}".replace(" ", "-")) for kind in ("first", "second")]
        assert ["Writing the quantized weights" in text for text in logs] == [True, False]
        assert all("Quantized weights come from" in text for text in logs)
    entries = [path for path in cache.iterdir() if path.is_dir()]
    assert len(entries) == len(QUANT)

    # Evaluation reads what training wrote, and writes nothing.
    (loss, said), (expected, warned) = run_ranks(2, evaluate_twice, tmp_path / "nf4-double-first", rows, cache)[0]
    assert loss == expected and "Quantized weights come from" in said
    assert "training with these settings has not written" in warned and not (cache / "empty").exists()

    # Another number of ranks. What is noticed: a file that lost its end, a value that another process changed, a bit.
    first = entries[0] / "quantized-00001.safetensors"
    first.write_bytes(first.read_bytes()[:-1])
    flipped = entries[2] / "quantized-00001.safetensors"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    manifest = entries[1] / "cache.json"
    manifest.write_text(json.dumps({"fingerprint": "another"}))
    again = {key: [*argv, "training.micro_batch_size=4"] for key, argv in cases.items() if key[1] == "second"}
    alone = run_ranks(1, train_all, again, gathered_parts)[0]
    for key, run in alone.items():
        plain = found[key[0], "plain"].inspected
        assert all(run.inspected[name].equal(plain[name]) for name in plain)
    logs = [log_of(tmp_path / f"{case}-second".replace(" ", "-")) for case in QUANT]
    assert sum("is damaged and made anew: " in text for text in logs) == 3
    assert sum("Writing the quantized weights" in text for text in logs) == 3


def test_files_are_as_bitsandbytes_writes_them(checkpoint: Callable[..., Path], rows: Path, tmp_path: Path):
    source, cache = checkpoint("llama"), tmp_path / "cache"
    own = ["model.cache_quantized=true", f"model.cache_folder={cache}", "training.precision=float32"]
    run_ranks(1, train_all, {"run": settings(source, rows, "training.max_steps=1", *own)}, None, False)
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    expected = load_file(quantize_checkpoint(source, tmp_path / "bnb", **options) / "model.safetensors")
    (file,) = cache.glob("*/quantized-00001.safetensors")
    cached = load_file(file)
    assert cached.keys() == {name for name in expected if ".layers." in name and "norm" not in name}
    for name, tensor in cached.items():
        assert tensor.dtype == expected[name].dtype and tensor.equal(expected[name]), name
