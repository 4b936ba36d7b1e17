"""`load_config` without most of its time, for the many short runs of tests.

Hydra takes 0.3 s to compose the YAML files of a run. Here it does so once a process for each choice of files; single
values are set in the result, as Hydra does at its end. tests/unit/test_config_compose.py compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from unittest import mock

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from qlora_fsdp.config import compose, hydra_files
from qlora_fsdp.config.config_file import Sections
from qlora_fsdp.config.schema import Config
from qlora_fsdp.records.start_folder import find_start


@cache
def _compose_files(overrides: tuple[str, ...], folders: tuple[Path, ...], given: str, stand_ins: str) -> DictConfig:
    return _compose_all(list(overrides), folders, json.loads(given))


_compose_all = compose._compose


def load_config(argv: Sequence[str]) -> Config:
    """What `qlora_fsdp.config.compose.load_config` returns or raises, for a run."""
    with mock.patch.object(compose, "_compose", _compose):
        return compose.load_config(argv, find_start=find_start)


def _compose(overrides: Sequence[str], folders: Sequence[Path], given: Sections) -> DictConfig:
    values = [text for text in overrides if text.startswith("++")]
    files = [text for text in overrides if not text.startswith("++")]
    stand_ins = hydra_files.stand_ins.get()
    config = deepcopy(_compose_files(tuple(files), tuple(folders), json.dumps(given), json.dumps(stand_ins)))
    for value in OverridesParser.create().parse_overrides(values):
        OmegaConf.update(config, value.key_or_group, value.value(), merge=True, force_add=True)
    return config
