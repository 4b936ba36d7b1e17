"""Zamba 2, whose layers have other layers in them that share their weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from qlora_fsdp import merge
from tests.helpers.checkpoints import SHAPE, write_checkpoint
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import settings, train_here, write_rows

pytestmark = pytest.mark.distributed
BLOCKS = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1}
MAMBA = {"mamba_d_state": 16, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_expand": 2, "adapter_rank": 8}
ADAPTED = "[q_proj,k_proj,v_proj,o_proj,down_proj]"


def make_base(folder: Path, **more: bool) -> Path:
    sizes = {**SHAPE, "num_key_value_heads": 4, "attention_head_dim": 32}
    config = AutoConfig.for_model("zamba2", **sizes | BLOCKS | MAMBA | more, hybrid_layer_ids=[1, 3])
    return write_checkpoint(config, folder, torch.float32)


def test_all_linear_leaves_out_what_shared_blocks_have_for_other_layers(tmp_path: Path):
    """Stock PEFT adapts that too; it gets no gradient."""
    base, rows = (
        make_base(tmp_path / "base", use_shared_attention_adapter=True),
        write_rows(tmp_path / "rows.jsonl", 20),
    )
    more = ["training.max_steps=3", "quant=none", f"run.folder={tmp_path / 'run'}"]
    argv = settings(base, rows, *more, packing=False)
    (found,) = run_ranks(1, train_here, argv)
    assert found.losses == pytest.approx(stock_losses(argv), abs=1e-5)
    with safe_open(tmp_path / "run" / "adapter" / "adapter_model.safetensors", "pt") as file:
        adapted = {key.rpartition(".lora_")[0].partition("layers.")[2] for key in file.keys()}  # noqa: SIM118
    mlp = "shared_transformer.feed_forward.gate_up_proj_adapter_list"
    assert {name for name in adapted if mlp in name} == {
        f"{n}.{mlp}.{i}.{j}" for n, i in ((1, 0), (3, 1)) for j in (0, 1)
    }
    assert sum("_adapter_list" in name for name in adapted) == 2 * 2 * 4  # of two layers, with queries, keys and values
    assert "no gradient reaches" in (tmp_path / "run" / "train.log").read_text()


def test_layers_in_layers_are_trained_and_are_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = make_base(tmp_path / "base")
    rows, few = write_rows(tmp_path / "rows.jsonl", 20), ["training.max_steps=3", "memory.activations=full"]
    more = [*few, "quant=none", f"lora.target_modules={ADAPTED}", f"run.folder={tmp_path / 'run'}"]
    argv = settings(base, rows, *more, packing=False)
    (found,) = run_ranks(1, train_here, argv)
    assert found.losses == pytest.approx(stock_losses(argv), abs=1e-5)
    with pytest.raises(RanksFailed, match=r"Set fsdp\.sharding_strategy=NO_SHARD"):
        run_ranks(2, train_here, argv)
    two = [*argv, "fsdp.sharding_strategy=NO_SHARD", f"run.folder={tmp_path / 'two'}"]
    for rank in run_ranks(2, train_here, two):
        assert rank.losses == pytest.approx(found.losses, abs=1e-5)
    out = tmp_path / "merged"
    assert merge.main([f"adapter={tmp_path / 'run' / 'adapter'}", f"out={out}"]) == 2
    assert "are one weight" in capsys.readouterr().err and not out.exists()
