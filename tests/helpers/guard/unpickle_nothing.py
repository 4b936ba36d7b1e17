"""Lets every collective of torch that unpickles what a peer has sent fail, whoever calls it.

The module beside this one, which Python imports when it starts, has it hold in commands and the ranks that they start:
tests/cli/launch.py puts this folder on their PYTHONPATH. Ranks that a test forks have torch already
(tests/helpers/ranks.py).
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

MODULE = "torch.distributed.distributed_c10d"


def refuse_objects(module: ModuleType, *copies: ModuleType) -> None:
    """Let torch's collectives of objects fail.

    Args:
        module: torch.distributed.distributed_c10d.
        copies: modules that have imported its functions already.
    """

    def refused(*arguments: Any, **named: Any) -> NoReturn:
        raise AssertionError("an object of a peer would be unpickled")

    found = [name for name in vars(module) if "object" in name and name in module.__all__]
    assert {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"} <= set(found)
    for name in found:
        for each in (module, *copies):
            setattr(each, name, refused)
    module._tensor_to_object = refused  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    """Finds that module as Python does, and changes it once it is loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            refuse_objects(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


if __name__ == "unpickle_nothing":
    sys.meta_path.insert(0, _Finder())
