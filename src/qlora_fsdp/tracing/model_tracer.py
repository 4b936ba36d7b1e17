"""Answers the memory plan's questions about a model, under any settings (`memory.traced.TracedModel`).

For each set of settings that changes modules, a model is built on meta as for training, with one layer of each kind. It
is then traced for each size of a micro-batch that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig
from typing_extensions import assert_never

from qlora_fsdp.common.errors import CheckpointError, UserError
from qlora_fsdp.common.families import FAMILIES
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.schema import Config, Dtype, Kernel, TaskName
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.data.label_counts import label_width
from qlora_fsdp.data.tokenizer import AddedTokens
from qlora_fsdp.layers import QuantizedLinear
from qlora_fsdp.layers.attention import traced_attention
from qlora_fsdp.layers.head_loss import LossKernel
from qlora_fsdp.layers.rewire import rewire
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.traced import EndsUse, LayerKind, LayerUse, ModelParts, Tensor
from qlora_fsdp.model.assemble import AssembledModel, adapt_model
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.count import count_bytes
from qlora_fsdp.model.find import ModelFiles
from qlora_fsdp.model.layer_kinds import kind_of
from qlora_fsdp.model.shard import embedding_and_head_units
from qlora_fsdp.model.task_model import TaskModel
from qlora_fsdp.tracing.liger_shapes import put_in_shapes
from qlora_fsdp.tracing.trace import Trace

# A setting with such a name in it may be about one layer of many, so that they are not alike.
_ABOUT_A_LAYER = re.compile(r"\blayers?\b|\bh\b|\bblocks?\b|(?<![a-zA-Z_])\d")
MAX_REASON = 200  # characters of an error's message


@dataclass(frozen=True)
class Computing:
    """How a run computes, beside what its settings say.

    Attributes:
        dtype: of activations.
        attention: a name in transformers' registry; `eager`, `sdpa` or varlen can be traced.
        liger_kernels: the settings of `kernels` for which Liger's are used.
        loss_kernel: what computes the loss of a frozen head.
        is_cuda: whether it computes on a GPU.
    """

    dtype: torch.dtype
    attention: str
    liger_kernels: Collection[str]
    loss_kernel: LossKernel
    is_cuda: bool


class UntraceableModel(CheckpointError):
    """A model's code needs values, or does something else that meta tensors can't."""


class ModelTracer:
    """A model that can be planned under any settings.

    Args:
        files: the model's config counts, and no file.
        computing: how the run computes.
        tokens: the tokens whose rows are trained.
        trust_remote_code: run model code that comes with the files.

    Raises:
        UntraceableModel: (its methods) the model's code does what meta tensors can't.
    """

    def __init__(
        self, files: ModelFiles, computing: Computing, tokens: AddedTokens, trust_remote_code: bool = False
    ) -> None:
        self.files = ModelFiles(files.folder, files.config)  # without tensors: nothing is read
        self.computing, self.tokens, self.trust_remote_code = computing, tokens, trust_remote_code
        self._models: dict[str, _Built] = {}
        self._traces: dict[Any, Trace] = {}
        self._uses: dict[Any, LayerUse] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the models, so that rank 0 can send a plan to the others, which build what they need of them."""
        return vars(self) | {"_models": {}, "_traces": {}, "_uses": {}}

    def parts(self, config: Config) -> ModelParts:
        """Its parameters under these settings of `quant`, `lora`, `task`, `kernels` and `compute`."""
        return self._built(config).parts

    def layer_use(
        self, config: Config, micro_batch_size: int, kind: int, policy: Policy, is_first: bool = False
    ) -> LayerUse:
        """What one layer of a kind takes; `is_first` for the first layer of the model."""
        key = (*self._key(config, micro_batch_size), kind, policy, is_first)
        if key not in self._uses:
            trace = self._trace(config, micro_batch_size)
            with _explained():
                self._uses[key] = trace.layer(self._built(config).stand_ins[kind], policy, is_first)
        return self._uses[key]

    def ends_use(self, config: Config, micro_batch_size: int) -> EndsUse:
        """What is around the layers takes."""
        return self._trace(config, micro_batch_size).ends

    def _key(self, config: Config, micro_batch_size: int) -> tuple[str, int, int]:
        return _modules_key(config), config.training.max_length, micro_batch_size

    def _trace(self, config: Config, micro_batch_size: int) -> Trace:
        key = self._key(config, micro_batch_size)
        if key not in self._traces:
            built = self._built(config)
            batch, computing = _batch(config, micro_batch_size), self.computing
            with _explained():
                self._traces[key] = Trace(built.model, batch, computing.is_cuda, computing.liger_kernels)
        return self._traces[key]

    def _built(self, config: Config) -> _Built:
        key = _modules_key(config)
        if key not in self._models:
            with _explained():
                self._models[key] = self._build(config)
        return self._models[key]

    def _build(self, config: Config) -> _Built:
        computing = self.computing
        settings = BuildSettings(
            config.quant,
            computing.dtype,
            computing.attention,
            config.task,
            keep=list(config.lora.modules_to_save or []),
            pad_token_id=0,
            trust_remote_code=self.trust_remote_code,
            shares_equal_layers=not _names_a_layer(config),
        )
        meta = build_model(self.files, settings)
        put_in_shapes(meta.model, computing.liger_kernels)
        model = adapt_model(meta, config.lora, config.task, self.tokens, computing.loss_kernel)
        rewire(model, config.compute, config.kernels)
        if not model.layers:
            raise ValueError("it has no transformer layers")
        stand_ins, order = _find_kinds(model)
        return _Built(model.train(), stand_ins, _parts(model, stand_ins, order))


@dataclass(frozen=True)
class _Built:
    """A model on meta.

    Attributes:
        stand_ins: for each kind of layer: the index in `model.layers` of one that is of this kind.
        parts: its parameters.
    """

    model: TaskModel
    stand_ins: tuple[int, ...]
    parts: ModelParts


def trace_assembled(assembled: AssembledModel, config: Config, is_cuda: bool) -> ModelTracer:
    """The tracer of a model that is about to be trained."""
    is_causal = config.task.name is TaskName.causal_lm
    attention = assembled.attention
    if is_cuda:
        attention = traced_attention(attention, assembled.files.config, assembled.dtype, is_causal)
    computing = Computing(assembled.dtype, attention, assembled.liger_kernels, assembled.loss_kernel, is_cuda)
    return ModelTracer(assembled.files, computing, assembled.tokens, config.model.trust_remote_code)


def trace_config(model_config: PretrainedConfig, config: Config) -> ModelTracer:
    """The tracer of a model of which only the config is known, for a run on recent GPUs."""
    dtype = torch.float32 if config.training.precision is Dtype.float32 else torch.bfloat16
    is_causal, text = config.task.name is TaskName.causal_lm, model_config.get_text_config()
    attention = traced_attention(config.model.attn_implementation.value, model_config, dtype, is_causal)
    chosen = {name: getattr(config.kernels, name) for name in ("rms_norm", "rotary", "glu")}
    # Liger may know more families. What it saves there is not counted on.
    liger = [name for name, choice in chosen.items() if choice is not Kernel.torch and text.model_type in FAMILIES]
    loss = {Kernel.auto: "triton", Kernel.liger: "liger", Kernel.torch: "torch"}[config.kernels.cross_entropy]
    computing = Computing(dtype, attention, liger, cast(LossKernel, loss), is_cuda=True)
    names = {*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens}
    # The model may have rows for some of these already. Only the tokenizer knows, which is not loaded here.
    ids = frozenset(range(text.vocab_size, text.vocab_size + len(names)))
    tokens = AddedTokens(ids, ids, text.vocab_size + len(names)) if names else AddedTokens()
    return ModelTracer(ModelFiles(None, model_config), computing, tokens, config.model.trust_remote_code)


@contextmanager
def _explained() -> Iterator[None]:
    """Turns whatever a model's code raises on meta into an `UntraceableModel`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = shorten(" ".join(str(error).split()), MAX_REASON)
        raise UntraceableModel(
            f"The model's code does what can't be planned ({type(error).__name__}: {reason}). Try it on GPUs with "
            "experiment=dry_run."
        ) from error


def _modules_key(config: Config) -> str:
    """Equal for settings that make the same modules."""
    return repr((config.quant, config.lora, config.task, config.kernels, config.compute))


def _names_a_layer(config: Config) -> bool:
    """Whether a setting may be about some of the transformer layers alone."""
    lora = config.lora
    named: list[Any] = [lora.target_modules, lora.exclude_modules, lora.modules_to_save]
    named += [list(lora.rank_pattern), list(lora.alpha_pattern), config.quant.llm_int8_skip_modules]
    return any(
        _ABOUT_A_LAYER.search(text) for some in named for text in ([some] if isinstance(some, str) else some or [])
    )


def _find_kinds(model: TaskModel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One layer of each kind, as indices of `model.layers`; and the kind of each layer, in the order of running."""
    places = {layer: index for index, layer in enumerate(model.layers)}
    lists = [m for m in model.base.modules() if isinstance(m, nn.ModuleList)]
    in_order = [layer for modules in lists for layer in modules if layer in places]
    kinds: dict[Any, int] = {}
    stand_ins, order = [], []
    for layer in in_order if set(in_order) == places.keys() else places:
        key = kind_of(layer)
        if key not in kinds:
            kinds[key] = len(kinds)
            stand_ins.append(places[layer])
        order.append(kinds[key])
    return tuple(stand_ins), tuple(order)


def _parts(model: TaskModel, stand_ins: Sequence[int], order: Sequence[int]) -> ModelParts:
    layers = [model.layers[index] for index in stand_ins]
    kinds = tuple(_layer_kind(layer) for layer in layers)
    tables = [end for end in (model.embeddings, model.head) if end is not None]
    units = embedding_and_head_units(model)
    names = {id(model.embeddings): "embeddings", id(model.head): "head"}
    ends = {"embeddings": (), "head": ()} | {names[id(unit)]: tuple(_tensors([unit], [], tables)) for unit in units}
    ends["root"] = tuple(_tensors([model], [*model.layers, *units], tables))
    around = count_bytes(model, 0, 1).num_base - sum(count_bytes(layer, 0, 1).num_base for layer in model.layers)
    return ModelParts(
        kinds=kinds,
        layers=tuple(order),
        ends=ends,
        gathered_by_model=frozenset(names[id(unit)] for unit in units if unit in model.gathered_by_model),
        num_parameters=around + sum(count_bytes(layers[kind], 0, 1).num_base for kind in order),
        num_quantized=sum(kinds[kind].num_quantized for kind in order),
    )


def _layer_kind(layer: nn.Module) -> LayerKind:
    quantized = [module for module in layer.modules() if isinstance(module, QuantizedLinear)]
    matrices = [p for m in layer.modules() if m not in quantized for p in m._parameters.values() if p is not None]
    plain = sum(p.numel() for p in matrices if p.ndim > 1 and not p.requires_grad)
    sizes = [module.out_features * module.in_features for module in quantized]
    return LayerKind(
        tensors=tuple(_tensors([layer], [], [])),
        matrix_elements=plain + sum(sizes),
        largest_weight=max((n * m.compute_dtype.itemsize for n, m in zip(sizes, quantized, strict=True)), default=0),
        num_quantized=len(quantized),
    )


def _tensors(
    inside: Iterable[nn.Module], outside: Iterable[nn.Module], tables: Iterable[nn.Module]
) -> Iterator[Tensor]:
    """The parameters of some modules but not of others, each once; `tables` are embeddings and head."""
    left_out = {module for each in outside for module in each.modules()}
    table_modules = {module for each in tables for module in each.modules()}
    seen: set[int] = set()
    for module in (module for each in inside for module in each.modules()):
        for name, param in module._parameters.items() if module not in left_out else ():
            if param is None or id(param) in seen:
                continue
            seen.add(id(param))
            rows = param.shape[0] if param.ndim else 1
            part = _part_of(name, param, module in table_modules)
            yield Tensor(part, rows, param.numel() // max(1, rows) * param.itemsize)


def _part_of(name: str, param: nn.Parameter, is_table: bool) -> str:
    """What the plan counts a parameter as."""
    if param.requires_grad:
        return "adapters"
    if is_table:
        return "embeddings"
    if name.endswith("codes"):
        return "codes"
    return "scales" if name.endswith("scales") else "full_precision"


def _batch(config: Config, size: int) -> Batch:
    """A micro-batch of the largest size, on meta. Every sequence has a row and some padding, or several rows."""
    length = config.training.max_length
    ids = torch.empty(size, length, dtype=torch.int64, device="meta")
    starts = torch.empty(2 * size + 1, dtype=torch.int32, device="meta")
    batch = Batch(ids, ids, ids, starts, length)
    match config.task.name:
        case TaskName.causal_lm:
            return batch
        case TaskName.sequence_classification:
            num_labels = size
        case TaskName.token_classification:
            num_labels = size * length
        case _:
            assert_never(config.task.name)
    labels = torch.empty(num_labels, label_width(config.task), device="meta")
    return replace(batch, labels=labels, label_positions=torch.empty(num_labels, dtype=torch.int64, device="meta"))
