"""Files that come with the program beside its modules: conf/ and accelerate_configs/. Imports no torch."""

from __future__ import annotations

from pathlib import Path


def shipped_file(name: str) -> Path:
    """Returns a file: inside the package when that was installed from a wheel, at the root of the repository otherwise.

    Args:
        name: its path from there, e.g. `conf/config.yaml`.
    """
    package = Path(__file__).parents[1]
    for folder in (package, package.parents[1]):
        if (folder / name).is_file():
            return folder / name
    raise AssertionError(f"{name} is neither in {package} nor in {package.parents[1]}: the installation is broken")
