"""Default settings with models of which `all-linear` leaves layers out: losses and adapters against stock libraries."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest

from qlora_fsdp import evaluate
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.families import make_config
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import load_stock, stock_loss, stock_losses
from tests.helpers.runs import printed_by, settings, train_here, write_rows

pytestmark = pytest.mark.distributed
REASONS = {"bart": "no gradient reaches", "jamba": "no gradient reaches", "mamba": "PEFT refuses to adapt"}


@pytest.mark.parametrize("family", REASONS)
def test_all_that_can_be_trained_is_and_stock_peft_loads_it(family: str, tmp_path: Path):
    config = make_config(family)
    config.update({key: 2 for key in ("encoder_layers", "decoder_layers") if hasattr(config, key)})
    base, rows = write_checkpoint(config, tmp_path / family), write_rows(tmp_path / "rows.jsonl", 6)
    more = ["quant=none", "training.max_steps=2", f"run.folder={tmp_path / 'run'}"]
    argv = settings(base, rows, *more, packing=False)
    (found,) = run_ranks(1, train_here, argv)
    assert found.losses == pytest.approx(stock_losses(argv), abs=1e-5)
    assert f"lora.target_modules=all-linear leaves out linear layers that {REASONS[family]}" in (
        (tmp_path / "run" / "train.log").read_text()
    )
    adapter = tmp_path / "run" / "adapter"
    stock = peft.PeftModel.from_pretrained(load_stock(base, load_config(argv).quant), adapter).eval()
    expected, _ = stock_loss(stock, rows)
    arguments = [f"adapter={adapter}", f"data.path={rows}", f"data.cache_folder={tmp_path}", "training=padded"]
    printed, *_ = run_ranks(1, printed_by, evaluate.main, arguments)
    assert json.loads(printed)["loss"] == pytest.approx(expected, abs=1e-5)
