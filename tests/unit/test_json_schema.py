"""The JSON schema for editors: it takes every file of settings that is taken, and none with a slip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helpers.quick_config import load_config

from qlora_fsdp.config.bounded_yaml import read_yaml
from qlora_fsdp.config.reading.command_line import conf_folder, group_options
from qlora_fsdp.config.reading.compose import to_yaml
from qlora_fsdp.config.reading.json_schema import json_schema, main
from qlora_fsdp.config.settings import all_settings

jsonschema = pytest.importorskip("jsonschema")
FILES = sorted(file for file in conf_folder().glob("*/*.yaml"))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema()


def mistakes(values: Any, schema: dict[str, Any]) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(values)]


def test_it_is_printed_and_a_schema(capsys: pytest.CaptureFixture[str], schema: dict[str, Any]) -> None:
    assert main([]) == 0
    assert json.loads(capsys.readouterr().out) == schema
    jsonschema.Draft7Validator.check_schema(schema)
    assert main(["--what"]) == 2


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_file_under_conf_fits(file: Path, schema: dict[str, Any]) -> None:
    values = read_yaml(file)
    is_whole = "@package _global_" in file.read_text()
    if not is_whole and isinstance(values, dict):
        values.pop("defaults", None)
    own = schema if is_whole else schema | {"$ref": f"#/definitions/{file.parent.name}"}
    assert mistakes(values, own) == []


def test_a_runs_own_config_fits(schema: dict[str, Any]) -> None:
    config = load_config(["model=qwen3-8b", "task.labels=[a]", "lora.rank_pattern={q: 2}", "run.name='${model.name}'"])
    assert mistakes(yaml.safe_load(to_yaml(config, as_written=True)), schema) == []
    assert mistakes(yaml.safe_load(to_yaml(config)), schema) == []


@pytest.mark.parametrize(
    "text",
    [
        "model: org/name",
        "quant: int8",
        "experiment: dry_run",
        "lora: {r: 8}",
        "lora.r: 8",
        "lora:",
        "data: a.jsonl",
        "data: [a]",
    ],
)
def test_what_a_file_may_hold_fits(text: str, schema: dict[str, Any]) -> None:
    assert mistakes(yaml.safe_load(text), schema) == []


@pytest.mark.parametrize(
    "text",
    [
        *("lora: {rank: 8}", "lora: {r: 0}", "lora.r: many", "max_steps: 3", "quant: {load_in_4bit: maybe}"),
        *("training: {precision: bf16}", "lora: [8]", "training.micro_batch_size: 0", "lora.rank_pattern: {q: x}"),
    ],
)
def test_a_slip_does_not(text: str, schema: dict[str, Any]) -> None:
    assert len(mistakes(yaml.safe_load(text), schema)) == 1


def test_it_knows_every_setting_with_its_description(schema: dict[str, Any]) -> None:
    for key, setting in all_settings().items():
        section, _, name = key.partition(".")
        value = schema["definitions"][section]["properties"][name]
        assert value["description"] == setting.comment and schema["properties"][key] == value
    option = schema["properties"]["quant"]["anyOf"][1]
    assert option["anyOf"][0]["enum"] == group_options("quant", [conf_folder()])
