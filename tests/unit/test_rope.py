"""Rotary embeddings that reach further: the same as stock transformers with that config, in every use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.helpers.checkpoints import SHAPE
from tests.helpers.quick_config import load_config
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config.checks.check_settings import check_settings
from qlora_fsdp.model.adapters.model_card import describe_usage
from qlora_fsdp.model.find import find_model
from qlora_fsdp.model.positions import needed_factor, scale_rope, write_rope

YARN = {"rope_type": "yarn", "factor": 4.0}
KNOWN = SHAPE["max_position_embeddings"]


def make_config(family: str = "llama", **more: Any) -> PretrainedConfig:
    return AutoConfig.for_model(family, **{**SHAPE, **more})


def frequencies(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """What the rotary embeddings of a model turn by at each position."""
    model = AutoModelForCausalLM.from_config(config)
    return {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}


@pytest.mark.parametrize("wanted", [YARN, {"rope_type": "linear", "factor": 2.0}])
def test_as_in_a_config_json_that_has_it(wanted: dict[str, Any]) -> None:
    ours, stock = make_config(), make_config(rope_scaling=dict(wanted))
    scale_rope(ours, wanted)
    assert ours.rope_parameters == stock.rope_parameters
    assert ours.max_position_embeddings == KNOWN * wanted["factor"]
    for name, stretched in frequencies(stock).items():
        torch.testing.assert_close(frequencies(ours)[name], stretched, rtol=0, atol=0)
        assert not torch.equal(stretched, frequencies(make_config())[name])


def test_llama_3_goes_further_by_its_own_type() -> None:
    own = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    own |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ours = make_config(rope_scaling=dict(own))
    assert needed_factor(ours, 1000) == 32
    with pytest.raises(ConfigError, match=r"contradicts the model's own scaling, rope_type=llama3"):
        scale_rope(ours, YARN)
    scale_rope(ours, {"rope_type": "llama3", "factor": 32.0})
    assert ours.max_position_embeddings == 1024
    stock = make_config(rope_scaling=own | {"factor": 32.0})
    assert all(torch.equal(value, frequencies(stock)[name]) for name, value in frequencies(ours).items())


def test_positions_before_scaling_may_be_stated() -> None:
    """As Qwen's pages have it: Qwen 3 knows 40,960 positions, and these pages scale from 32,768."""
    wanted = {**YARN, "original_max_position_embeddings": 192}
    ours, stock = make_config(), make_config(rope_scaling=wanted, max_position_embeddings=768)
    scale_rope(ours, wanted)
    assert (ours.rope_parameters, ours.max_position_embeddings) == (stock.rope_parameters, 768)
    assert all(torch.equal(value, frequencies(stock)[name]) for name, value in frequencies(ours).items())


def test_what_transformers_can_not_compute_is_the_settings_fault() -> None:
    with pytest.raises(ConfigError, match=r"model\.rope_scaling=.* can't be computed by transformers for mixtral"):
        scale_rope(make_config("mixtral"), YARN)
    with pytest.raises(ConfigError, match=r"model\.rope_scaling=.* can't be computed by transformers for llama"):
        scale_rope(make_config(), {**YARN, "rope_theta": 1.0})


def test_windows_are_not_stretched() -> None:
    ours = make_config("gemma3_text", head_dim=16)
    before = dict(ours.rope_parameters)
    scale_rope(ours, YARN)
    assert ours.rope_parameters["sliding_attention"] == before["sliding_attention"]
    assert ours.rope_parameters["full_attention"]["rope_type"] == "yarn"


def test_a_model_without_rotary_embeddings_is_refused() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=64, n_layer=1, n_head=2)
    with pytest.raises(ConfigError, match=r"model\.rope_scaling=.* can't be used: gpt2 has no rotary embeddings"):
        scale_rope(config, YARN)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{factor:4.0}", "has no rope_type of yarn, linear, llama3"),
        ("{rope_type:longrope,factor:4.0}", "has no rope_type of yarn"),
        ("{rope_type:yarn}", "needs a factor above 1, up to 1024"),
        ("{rope_type:yarn,factor:0.5}", "needs a factor above 1"),
        ("{rope_type:yarn,factor:.inf}", "needs a factor above 1"),
        ("{rope_type:yarn,factor:2.0,beta_fst:16}", "has beta_fst, which yarn does not take"),
        ("{rope_type:linear,factor:2.0,beta_fast:16}", "has beta_fast, which linear does not take"),
        ("{rope_type:yarn,factor:2.0,beta_fast:x}", "has beta_fast=x, which is no number above 0"),
        ("{rope_type:yarn,factor:2.0,attention_factor:-1}", "has attention_factor=-1, which is no number above 0"),
        ("{rope_type:yarn,factor:2.0,original_max_position_embeddings:many}", "is no number above 0"),
        ("{rope_type:yarn,factor:2.0,rope_theta:0}", "has rope_theta=0, which is no number above 0"),
        ("{rope_type:yarn,factor:2.0,truncate:1}", "has truncate=1, which is neither true nor false"),
        ("{rope_type:llama3,factor:2.0,low_freq_factor:4}", "needs a low_freq_factor below high_freq_factor"),
        ("{rope_type:yarn,factor:2.0,beta_slow:33}", "needs a beta_slow below beta_fast"),
    ],
)
def test_values_of_no_use_are_refused(value: str, message: str) -> None:
    problems = check_settings(load_config(["model=tiny", "data=random", f"model.rope_scaling={value}"]))
    assert any(message in str(problem) for problem in problems)


@pytest.mark.parametrize("own", [{}, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}])
def test_a_merged_config_json_has_it(tmp_path: Path, own: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 500000.0, **SHAPE, **own}))
    settings = load_config(["model=custom", f"model.path={tmp_path}", "model.weights=random", "data=random"])
    settings.model.rope_scaling = dict(YARN)
    config = find_model(settings.model, is_main=True, first_error=lambda error: error).config
    values = json.loads((tmp_path / "config.json").read_text())
    write_rope(values, config)
    again = AutoConfig.for_model(**values)
    assert (again.rope_parameters, again.max_position_embeddings) == (config.rope_parameters, 4 * KNOWN)


def test_a_config_json_that_has_it_stays_as_it_is() -> None:
    values = {"model_type": "llama", **SHAPE}
    before = dict(values)
    write_rope(values, make_config())
    assert values == before


def test_the_card_gives_stock_peft_the_same_rotary_embeddings(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(make_config()).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    scale_rope(config, YARN)
    stretched = AutoModelForCausalLM.from_config(config)
    adapted = get_peft_model(stretched, LoraConfig(target_modules=["q_proj"]))
    code, _ = describe_usage(adapted, str(tmp_path), scales_rope=True)
    (line,) = [line for line in code.splitlines() if line.startswith("model = AutoModelForCausalLM")]
    stock = eval(line.removeprefix("model = "), {"AutoModelForCausalLM": AutoModelForCausalLM})
    assert stock.config.rope_parameters == config.rope_parameters
    assert stock.config.max_position_embeddings == 4 * KNOWN
