"""Which code computes layers that carry a state: transformers' in torch, or kernels of packages that are installed.

transformers' model files look for packages (flash-linear-attention, causal-conv1d, mamba-ssm) when they are imported,
and from then on call their kernels, on any device. These run on GPUs alone, and on some wrongly: flash-linear-attention
itself refuses its backward on Hopper with Triton 3.4 to 3.7.0. So torch computes, until a process of its own has shown
that the kernels do (model/trials/kernel_trial.py).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from transformers.integrations import hub_kernels

from qlora_fsdp.common.replaced import replaced
from qlora_fsdp.layers.liger import MODELS

PACKAGES = ("fla", "mamba_ssm", "causal_conv1d")


class _Function(NamedTuple):
    """A function of a model file that a package's kernel computes, or that it computed before `compute_by_torch`.

    Attributes:
        module: the model file.
        name: the function's name there.
        by_torch: transformers' own version, which refuses markers of packed rows as it does without the package.
        by_package: what calls the package's kernel.
    """

    module: ModuleType
    name: str
    by_torch: Callable[..., Any]
    by_package: Callable[..., Any]


def installed_packages() -> list[str]:
    """Those with kernels for recurrent layers that can be imported here."""
    return [name for name in PACKAGES if find_spec(name) is not None]


def compute_by_torch() -> None:
    """Let transformers' own code compute recurrent layers in all model files that are imported."""
    for function in _functions():
        setattr(function.module, function.name, function.by_torch)


def compute_by_packages() -> None:
    """Let kernels of the installed packages compute what they have kernels for, as transformers does by itself."""
    for function in _functions():
        setattr(function.module, function.name, function.by_package)


@contextmanager
def computed_by_torch() -> Iterator[None]:
    """While it lasts, transformers' own code computes recurrent layers in all model files that are imported."""
    with replaced([(function.module, function.name, function.by_torch) for function in _functions()]):
        yield


def _functions() -> Iterator[_Function]:
    """The functions of imported model files for which transformers has found a package's kernel."""
    if not installed_packages():
        return
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(MODELS)]
    for module in modules:
        for name, value in list(vars(module).items()):
            by_package = _by_package.get(value, value) if inspect.isfunction(value) else value
            known = _variables(by_package)
            if not known.get("is_new_implementation"):
                continue
            by_torch = _torch_version(by_package, known["func_name"], known["package"], known["torch_function"])
            yield _Function(module, name, by_torch, by_package)


_by_torch: dict[Any, Callable[..., Any]] = {}  # by the function that calls a package's kernel
_by_package: dict[Any, Callable[..., Any]] = {}  # and the other way


def _torch_version(
    by_package: Callable[..., Any], kernel: str, package: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """What transformers makes of a function where the package is missing."""
    if by_package not in _by_torch:
        with replaced([(sys.modules, package, None)]):  # None: it can't be imported
            made = hub_kernels.use_kernel_func_from_hub_with_fallback(kernel, package)(function)
        _by_torch[by_package] = made
        _by_package[made] = by_package
    return _by_torch[by_package]


def _variables(function: Any) -> dict[str, Any]:
    """What a function remembers of the function that made it, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
