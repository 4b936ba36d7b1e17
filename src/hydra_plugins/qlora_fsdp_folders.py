"""The folders of `--config-dir` as Hydra reads them. Hydra finds this because it is in `hydra_plugins`."""

from __future__ import annotations

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult


class SettingsFolderSource(FileConfigSource):
    """A folder of YAML that may be somebody else's: each file is checked before Hydra reads it.

    Hydra's own groups (which launcher, which callbacks) are not looked for in it.
    """

    @staticmethod
    def scheme() -> str:
        return "settings"

    def load_config(self, config_path: str) -> ConfigResult:
        from qlora_fsdp.config.experiment_files import check_experiment  # only here: every Hydra program scans this

        check_experiment(Path(self.path) / self._normalize_file_name(config_path))
        return super().load_config(config_path)

    def is_group(self, config_path: str) -> bool:
        return not _is_hydras(config_path) and bool(super().is_group(config_path))

    def is_config(self, config_path: str) -> bool:
        return not _is_hydras(config_path) and bool(super().is_config(config_path))


def _is_hydras(config_path: str) -> bool:
    return Path(config_path).parts[:1] == ("hydra",)
