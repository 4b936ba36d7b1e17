"""Put the gated delta rule and the short convolution of this folder in the place of transformers' functions.

transformers' classes call functions of their own module. Without a package's kernels these are slow, and refuse packed
rows. Which functions are meant is no list of names: a function whose arguments fit is called with small random tensors
on the CPU, and is replaced if it gives what ours gives.

The short causal convolution, before a gated delta rule or a state space, knows where rows begin.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.common.replaced import replaced
from qlora_fsdp.layers.kernels import triton_short_convolution
from qlora_fsdp.layers.kernels.launch import has_kernels
from qlora_fsdp.layers.recurrent.delta_rule import gated_delta_rule
from qlora_fsdp.runtime.hardware import is_shortage

TOLERANCE = 1e-5  # of the largest value, in float32
RULE_VALUES = frozenset({"query", "key", "value", "g", "beta"})
RULE_ARGUMENTS = RULE_VALUES | {"initial_state", "output_final_state"}
CONVOLUTION_ARGUMENTS = frozenset({"weight", "bias", "activation"})
Function = Callable[..., Any]
_proven: dict[Function, Function | None] = {}  # by a function of transformers': ours, if it is the same
_ours: set[Function] = set()


def replace_functions(model: nn.Module) -> list[str]:
    """Replace what is proven to be the same in the modules that a model's layers come from, for the whole process.

    Returns:
        The names of the functions that are replaced, sorted; none for models without such layers.
    """
    found = list(_find(model))
    for source, name, ours in found:
        setattr(source, name, ours)
    return sorted({name for _source, name, _ours in found})


@contextmanager
def replaced_functions(model: nn.Module) -> Iterator[None]:
    """While it lasts, the layers of a model call ours."""
    with _calling(model, lambda ours: ours):
        yield


@contextmanager
def plain_functions(model: nn.Module) -> Iterator[None]:
    """While it lasts, the layers of a model call transformers' functions of plain torch, whatever is installed."""
    with _calling(model, inspect.unwrap):
        yield


@contextmanager
def _calling(model: nn.Module, choose: Callable[[Function], Function]) -> Iterator[None]:
    with replaced([(source, name, choose(ours)) for source, name, ours in _find(model)]):
        yield


def has_recurrent_layers(model: nn.Module) -> bool:
    """Whether the model has layers that carry a state from token to token: all of those in use begin with a Conv1d."""
    return any(isinstance(module, nn.Conv1d) for module in model.modules())


def wants_one_sequence(model: nn.Module) -> bool:
    """Whether a model has recurrent layers that keep rows apart in one sequence alone, [1, B * L], if they do.

    The gated delta rule of this folder keeps them apart in any layout. A layer calls it if its Python module has delta
    rules and all of them are ours; of other recurrences nothing is known.
    """
    return not all(_has_our_rules(source) for source in _sources(model))


def _has_our_rules(source: ModuleType) -> bool:
    functions = [value for value in list(vars(source).values()) if inspect.isfunction(value)]
    rules = [function for function in functions if inspect.signature(function).parameters.keys() >= RULE_VALUES]
    return bool(rules) and all(_ours_for(rule) is not None for rule in rules)


def _find(model: nn.Module) -> Iterator[tuple[ModuleType, str, Function]]:
    """What can be replaced, or is: the Python module, the name there, and ours."""
    for source in _sources(model):
        for name, function in list(vars(source).items()):
            ours = _ours_for(function)
            if ours is not None:
                yield source, name, ours


def _sources(model: nn.Module) -> set[ModuleType]:
    """Python modules that define the classes of layers which begin with a convolution, as all recurrent ones do."""
    kinds = {
        type(layer) for layer in model.modules() if any(isinstance(child, nn.Conv1d) for child in layer.children())
    }
    return {sys.modules[kind.__module__] for kind in kinds}


def _ours_for(function: Any) -> Function | None:
    """Ours for a function of transformers', or for ours itself; None for anything else."""
    if not inspect.isfunction(function):
        return None
    if function in _ours:
        return function
    if function not in _proven:
        _proven[function] = _prove(function)
        found = _proven[function]
        if found is not None:
            _ours.add(found)
    return _proven[function]


def _prove(function: Function) -> Function | None:
    """Ours for a function, if it computes the same as the function that it wraps, which is plain torch."""
    plain = inspect.unwrap(function)
    arguments = inspect.signature(plain).parameters
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        if arguments.keys() >= RULE_ARGUMENTS:
            ours = _rule_for(function)
            trials = _rule_trials()
        elif arguments.keys() >= CONVOLUTION_ARGUMENTS and len(arguments) <= 6:
            ours = _convolution_for(function)
            trials = _convolution_trials()
        else:
            return None
        return ours if all(_gives_the_same(plain, ours, *trial) for trial in trials) else None


def _gives_the_same(plain: Function, ours: Function, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    try:
        expected = plain(*args, **options)
        found = ours(*args, **options)
    except Exception as error:  # it wants other arguments
        if is_shortage(error):
            raise
        return False
    expected = expected[0] if isinstance(expected, tuple) else expected
    found = found[0] if isinstance(found, tuple) else found
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        return False
    return float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


def _rule_trials() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    query = torch.randn(2, 70, 2, 16)
    key = torch.randn(2, 70, 2, 16)
    value = torch.randn(2, 70, 4, 24)
    gate = -torch.rand(2, 70, 4)
    beta = torch.rand(2, 70, 4)
    yield (query, key, value), {"g": gate, "beta": beta, "use_qk_l2norm_in_kernel": True}


def _convolution_trials() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    x = torch.randn(2, 6, 9)
    weight = torch.randn(6, 4)
    yield (x, weight, torch.randn(6)), {"activation": "silu"}
    yield (x, weight, None), {"activation": None}


def _rule_for(stock: Function) -> Function:
    """Ours with the arguments and results of transformers' function."""

    @wraps(stock)
    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if initial_state is not None or output_final_state or not use_qk_l2norm_in_kernel:  # text is written
            return stock(  # type: ignore[no-any-return]
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **options,
            )
        rows = _rows(options, value.shape[0], value.shape[1], value.device)
        return gated_delta_rule(query, key, value, g, beta, rows), None

    return rule


def _convolution_for(stock: Function) -> Function:
    """Ours with the arguments and results of transformers' function."""

    @wraps(stock)
    def convolution(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **options: Any,
    ) -> Tensor:
        if activation not in (None, "silu", "swish"):
            return stock(hidden_states, weight, bias, activation=activation, **options)  # type: ignore[no-any-return]
        rows = _rows(options, hidden_states.shape[0], hidden_states.shape[2], hidden_states.device)
        found = short_convolution(hidden_states.mT, weight, bias, rows, has_silu=activation is not None)
        return found.mT

    return convolution


def _rows(options: dict[str, Any], num_sequences: int, num_tokens: int, device: torch.device) -> Tensor:
    """The row of each token, int32 [B, T]; of a batch that tells of none, each sequence is one.

    Raises:
        ValueError: the rows are told of other tokens than these.
    """
    rows: Tensor | None = options.get("seq_idx")  # as model/inputs.py makes it
    if rows is None:
        return torch.zeros(num_sequences, num_tokens, dtype=torch.int32, device=device)
    if rows.shape != (num_sequences, num_tokens):
        raise ValueError(f"rows of {tuple(rows.shape)} tokens were given for {(num_sequences, num_tokens)}")
    return rows


def short_convolution(x_BTC: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, has_silu: bool) -> Tensor:
    """The convolution [B, T, C], in the dtype of x.

    Args:
        x_BTC: [B, T, C].
        weight: [C, taps].
        bias: [C], or None.
        rows: int32 [B, T], the row that a token belongs to.
        has_silu: apply SiLU to the sums.
    """
    is_trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    is_short = weight.shape[1] <= triton_short_convolution.MAX_TAPS
    if has_kernels(x_BTC) and is_short and not is_trained:
        return cast(Tensor, _ShortConvolution.apply(x_BTC, weight, bias, rows, has_silu))  # type: ignore[no-untyped-call]
    wide = x_BTC.to(weight.dtype)
    total = torch.zeros_like(wide) if bias is None else bias.expand_as(wide)
    num_taps = weight.shape[1]
    for tap in range(num_taps):
        distance = num_taps - 1 - tap
        earlier = F.pad(wide, (0, 0, distance, 0))[:, : wide.shape[1]]
        is_seen = F.pad(rows, (distance, 0), value=-1)[:, : rows.shape[1]] == rows
        total = total + earlier * (is_seen[..., None] * weight[:, tap])
    return (F.silu(total) if has_silu else total).to(x_BTC.dtype)


class _ShortConvolution(torch.autograd.Function):
    """The same by Triton kernels, for weights that are frozen."""

    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, has_silu: bool) -> Tensor:
        """The convolution, contiguous."""
        x_BTC = x_BTC if x_BTC.stride(-1) == 1 else x_BTC.contiguous()
        weight = weight.contiguous()
        rows = rows.contiguous()
        ctx.save_for_backward(x_BTC, weight, bias, rows)
        ctx.has_silu = has_silu
        return triton_short_convolution.forward(x_BTC, weight, bias, rows, has_silu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x."""
        x_BTC, weight, bias, rows = ctx.saved_tensors
        grad = triton_short_convolution.backward(x_BTC, weight, bias, rows, grads[0].contiguous(), ctx.has_silu)
        return grad, None, None, None, None
