"""The folders of `--config-dir` as Hydra reads them. Hydra finds this because it is in `hydra_plugins`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf


class SettingsFolderSource(FileConfigSource):
    """A folder of YAML that may be somebody else's: each file is checked before Hydra reads it.

    Its values are those of this project's reader, not of Hydra's, which makes 86400 of `slurm.time: 24:00:00`. Hydra's
    own groups (which launcher, which callbacks) are not looked for in it.
    """

    @staticmethod
    def scheme() -> str:
        return "settings"

    def load_config(self, config_path: str) -> ConfigResult:
        from qlora_fsdp.config.reading.config_file import read_experiment  # only here: every Hydra program scans this

        values = read_experiment(Path(self.path) / self._normalize_file_name(config_path))
        return replace(super().load_config(config_path), config=OmegaConf.create(values))

    def is_group(self, config_path: str) -> bool:
        return not _is_hydras(config_path) and bool(super().is_group(config_path))

    def is_config(self, config_path: str) -> bool:
        return not _is_hydras(config_path) and bool(super().is_config(config_path))


def _is_hydras(config_path: str) -> bool:
    return Path(config_path).parts[:1] == ("hydra",)
