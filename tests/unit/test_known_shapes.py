"""Operations on meta that are answered from memory give what torch itself gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.plans import traced
from tests.helpers.quick_config import load_config
from torch import Tensor
from torch.utils._pytree import tree_leaves

from qlora_fsdp.config.specs import BatchSpec, ModuleSpec
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.tracing import live_bytes
from qlora_fsdp.tracing.live_bytes import run_on_meta
from qlora_fsdp.tracing.model_tracer import ModelTracer

aten: Any = torch.ops.aten
SIZE = (4, 6)


def meta(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


# Operators and their arguments, made anew for each call
CALLS: dict[str, Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "a sum of two": lambda: (aten.add.Tensor, (meta(*SIZE), meta(1, 6)), {}),
    "times one": lambda: (aten.mul.Tensor, (meta(*SIZE, dtype=torch.int64), 1), {}),
    "times 1.0": lambda: (aten.mul.Tensor, (meta(*SIZE, dtype=torch.int64), 1.0), {}),
    "times true": lambda: (aten.mul.Tensor, (meta(*SIZE, dtype=torch.bool), True), {}),
    "turned": lambda: (aten.exp.default, (meta(6, 4).t(),), {}),
    "a product": lambda: (aten.mm.default, (meta(4, 6), meta(6, 5)), {}),
    "two results": lambda: (aten.topk.default, (meta(*SIZE), 2), {}),
    "in place": lambda: (aten.addmm_.default, (meta(4, 5), meta(4, 6), meta(6, 5)), {}),
    "to another dtype": lambda: (aten._to_copy.default, (meta(*SIZE),), {"dtype": torch.bfloat16}),
    "a list": lambda: (aten.cat.default, ([meta(*SIZE), meta(*SIZE)], 1), {}),
    "a view": lambda: (aten.view.default, (meta(*SIZE), [24]), {}),
    "an undeclared view": lambda: (aten._unsafe_view.default, (meta(*SIZE), [24]), {}),
    "turned in place": lambda: (aten.t_.default, (meta(*SIZE),), {}),
    "into another": lambda: (aten.add.out, (meta(*SIZE), meta(*SIZE)), {"out": meta(*SIZE)}),
    "on the CPU": lambda: (aten.arange.default, (3,), {}),
    "pieces": lambda: (aten.split.Tensor, (meta(*SIZE), 2), {}),
}


def described(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Any]:
    """All that a trace sees of a result: shapes, storages, and which argument's storage each shares."""
    given = [tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
    return [
        (
            (
                each.shape,
                each.stride(),
                each.dtype,
                each.device,
                each.storage_offset(),
                each.untyped_storage().nbytes(),
            ),
            [storage == each.untyped_storage()._cdata for storage in given],
            [each is other for other in tree_leaves((args, kwargs))],
        )
        if isinstance(each, Tensor)
        else each
        for each in tree_leaves(out)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_remembered_is_what_torch_says(name: str) -> None:
    func, args, kwargs = CALLS[name]()
    expected = described(args, kwargs, func(*args, **kwargs))
    for _ in ("asked", "remembered"):
        func, args, kwargs = CALLS[name]()
        out = run_on_meta(func, args, kwargs)
        assert described(args, kwargs, out) == expected
        shares = {tensor.untyped_storage()._cdata for tensor in tree_leaves(out)}
        assert len(shares) == (1 if name == "pieces" else len(tree_leaves(out)))


def test_a_shape_that_does_not_fit_is_refused_each_time() -> None:
    run_on_meta(aten.mm.default, (meta(4, 6), meta(6, 5)), {})
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run_on_meta(aten.mm.default, (meta(4, 6), meta(5, 6)), {})


def test_a_trace_is_the_same_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when another trace of the same shapes has filled it."""
    more = ["training.max_length=512", "kernels.cross_entropy=torch", "lora.r=4"]
    config = load_config(["model=smollm2-135m-instruct", *more])

    def trace() -> list[Any]:
        of_all = traced(config)
        tracer = ModelTracer(of_all.files, of_all.computing, of_all.tokens)  # which has traced nothing yet
        uses = [tracer.layer_use(ModuleSpec.of(config), BatchSpec.of(config, 2), 0, policy) for policy in Policy]
        return [tracer.ends_use(ModuleSpec.of(config), BatchSpec.of(config, 2)), *uses]

    monkeypatch.setattr(live_bytes, "_known", {})
    first, again = trace(), trace()
    assert len(live_bytes._known) > 50
    monkeypatch.setattr(live_bytes, "run_on_meta", lambda func, args, kwargs: func(*args, **kwargs))
    assert first == again == trace()
