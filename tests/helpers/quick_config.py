"""`load_config` without most of its time, which tests call thousands of times.

Hydra takes 0.3 s to compose the YAML files of a run. Here it does so once a test session for each choice of files.
tests/unit/test_config_compose.py compares the two. Processes that tests start as users do compose as ever.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from unittest import mock

from hydra.core.utils import setup_globals
from omegaconf import DictConfig

from qlora_fsdp.common.errors import refuse
from qlora_fsdp.config.checks.check_settings import check_world
from qlora_fsdp.config.reading import compose
from qlora_fsdp.config.reading.command_line import conf_folder
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.settings import Sections
from qlora_fsdp.config.world import World
from qlora_fsdp.records.check_run_folder import check_run
from qlora_fsdp.records.start_folder import find_start

# Names the folder in which the processes of a session find what one of them has composed
COMPOSED = "TESTS_COMPOSED_FOLDER"

setup_globals()  # the resolvers of ${now:...} and ${hydra:...}, which Hydra sets when it composes
_compose_all = compose._compose_files


def load_config(argv: Sequence[str]) -> Config:
    """What `qlora_fsdp.config.reading.compose.load_config` returns or raises, for a run."""
    with composing_quickly():
        return compose.load_config(argv, find_start=find_start)


def check(config: Config, world: World) -> None:
    """Refuses what can't be used of a run's configuration, of its folder, or on this number of ranks and device."""
    refuse([*check_run(config), *check_world(config, world)])


@contextmanager
def composing_quickly() -> Iterator[None]:
    """Every `load_config` inside composes as this module does."""
    with mock.patch.object(compose, "_compose_files", _compose):
        yield


@contextmanager
def composing_anew() -> Iterator[None]:
    """In every `load_config` inside Hydra composes, as it does for users."""
    with mock.patch.object(compose, "_compose_files", _compose_all):
        yield


def _compose(options: Sequence[str], folders: Sequence[Path], given: Sections, stand_ins: Sections) -> DictConfig:
    if list(folders) != [conf_folder()]:  # tests write into folders of their own
        return _compose_all(options, folders, given, stand_ins)
    return pickle.loads(_compose_own_files(tuple(options), pickle.dumps(given), pickle.dumps(stand_ins)))


@cache
def _compose_own_files(overrides: tuple[str, ...], given: bytes, stand_ins: bytes) -> bytes:
    """The pickled `DictConfig` of this project's files alone; processes share it, as these files don't change."""
    folders = [conf_folder()]
    shared = os.environ.get(COMPOSED)
    if shared is None:
        return pickle.dumps(_compose_all(overrides, folders, pickle.loads(given), pickle.loads(stand_ins)))
    file = Path(shared) / sha256(repr((overrides, given, stand_ins)).encode()).hexdigest()
    with suppress(FileNotFoundError):
        return file.read_bytes()
    made = pickle.dumps(_compose_all(overrides, folders, pickle.loads(given), pickle.loads(stand_ins)))
    own = file.with_name(f"{file.name}.{os.getpid()}")
    own.write_bytes(made)
    own.replace(file)
    return made
