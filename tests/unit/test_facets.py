"""Each setting says of itself what the program knows of it, and no other place names settings that are not there."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import field, fields, make_dataclass
from pathlib import Path

import pytest

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config import schema, settings
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.schema import Config, Files, Owner, Run
from qlora_fsdp.config.schema.facets import ALWAYS, Facets, setting, when
from qlora_fsdp.config.schema.former import FORMER
from qlora_fsdp.config.settings import all_settings, other_names

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
SECTIONS = "|".join(section.name for section in fields(Config))
WHOLE = re.compile(rf"(?:{SECTIONS})\.[a-z]\w*")
ASSIGNED = re.compile(rf"(?<![\w./-])((?:{SECTIONS})\.[a-z]\w*)=")
# What is read as `group.NAME`, also by the groups themselves, whose properties answer for some.
READ = {
    node.attr
    for file in SOURCES
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
}
# Files, and figures of nvidia-smi and of cgroups, which are written in the same form.
OTHERS = {"tokenizer.json", "tokenizer.model", "model.safetensors", "slurm.json"}
OTHERS |= {f"memory.{name}" for name in ("total", "current", "max", "stat", "limit_in_bytes", "usage_in_bytes")}


def declared(kind: type, **facets: object) -> dict[str, settings.Setting]:
    """The settings of a section `lora` with one new field."""
    arguments = {"run": Run.fixed, "used": ALWAYS, "files": Files.users, "owner": Owner.adapter} | facets
    section = make_dataclass("LoraConfig", [("new", kind, setting(None, **arguments))])
    section.__module__ = schema.facets.__name__
    whole = make_dataclass("Config", [("lora", section, field(default_factory=section))])
    return {each.key: each for each in settings._walk(whole, prefix="")}


@pytest.mark.parametrize(
    ("kind", "facets", "missing"),
    [
        (bool, {"owner": None}, "an adapter's own"),
        (bool, {"files": None}, "which files may set it"),
        (int, {}, "which numbers it takes"),
        (float, {}, "which numbers it takes"),
        (dict[str, int], {}, "what a value looks like"),
    ],
)
def test_a_new_setting_without_a_decision_fails_at_once(monkeypatch, kind, facets, missing) -> None:
    monkeypatch.setattr(settings, "_comments", lambda config_class: {})
    with pytest.raises(TypeError, match=rf"lora\.new must say .*{missing}"):
        declared(kind, **facets)
    assert declared(bool)["lora.new"].facets.run is Run.fixed
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'run' and 'used'"):
        setting(None)


def test_a_field_without_facets_fails_at_once(monkeypatch) -> None:
    monkeypatch.setattr(settings, "_comments", lambda config_class: {})
    section = make_dataclass("LoraConfig", [("new", int, field(default=1))])
    whole = make_dataclass("Config", [("lora", section, field(default_factory=section))])
    with pytest.raises(TypeError, match=r"lora\.new is declared without its facets"):
        list(settings._walk(whole, prefix=""))


@pytest.mark.parametrize("key", all_settings())
def test_every_facet_means_something(key: str) -> None:
    found = all_settings()[key]
    facets = found.facets
    for condition in facets.used:
        other = all_settings()[condition.key]
        if other.type is bool:
            assert set(condition.values) < {True, False}, condition
        else:
            assert all(value.name in other.choices for value in condition.values), condition
        assert condition.values or other.is_optional, condition
    assert bool(facets.values) <= (found.type is not bool and "Any" in str(found.type))
    assert not facets.values or found.default in facets.values
    assert bool(facets.example) == found.takes_mapping
    assert facets.owner is None or found.section in ("model", "lora")
    for name in facets.other_names:
        assert name not in all_settings() and other_names()[name] == key, "two settings have this other name"
    if found.files is Files.adapters:
        assert found.section in ("model", "tokenizer", "quant", "task", "preference", "training", "data")


def test_a_condition_is_of_one_setting() -> None:
    (condition,) = when("data.eval_path")
    assert condition.holds("a.jsonl") and not condition.holds(None)
    (condition,) = when("optim.name", schema.Optimizer.adamw)
    assert condition.holds(schema.Optimizer.adamw) and not condition.holds(schema.Optimizer.adamw_8bit)


def test_every_facet_is_read_somewhere() -> None:
    readers = "\n".join(file.read_text(encoding="utf-8") for file in SOURCES if file.stem != "facets")
    assert [facet.name for facet in fields(Facets) if f"facets.{facet.name}" not in readers] == []


@pytest.mark.parametrize("key", all_settings())
def test_every_setting_is_read_somewhere(key: str) -> None:
    """One that nothing reads would be taken, and have no effect, without a word."""
    assert key.rpartition(".")[2] in READ


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_texts_name_settings_that_are_there(file: Path) -> None:
    """A setting is named by its key, in messages too. When it goes, or is called otherwise, its readers fail here."""
    named = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named |= {node.value} if WHOLE.fullmatch(node.value) else set()
            named |= set(ASSIGNED.findall(node.value))
    former = set(FORMER) if file.stem == "former" else set()
    assert named - set(all_settings()) - OTHERS - former == set()


@pytest.mark.parametrize("key", FORMER)
def test_a_former_name_is_told_what_stands_in_its_place(key: str, tmp_path: Path) -> None:
    former = FORMER[key]
    assert key not in all_settings()
    value = "3" if former.default != 3 else "4"
    with pytest.raises(ConfigError) as caught:
        load_config([f"{key}={value}"])
    assert f"{key}={value} is no setting any more. {former.instead}" in str(caught.value)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({key: former.default}))  # as a run of an earlier version wrote it
    load_config(["--config", str(file)])
    file.write_text(json.dumps({key: 3}))
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}=3 is no setting any more\."):
        load_config(["--config", str(file)])


def test_a_former_value_is_told_what_it_is_called_now() -> None:
    with pytest.raises(ConfigError, match=r"memory\.activations=every_k must be .* Set memory\.activations=half\."):
        load_config(["memory.activations=every_k"])
