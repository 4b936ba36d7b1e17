"""Answers the memory plan's questions about a model, under any settings (`memory.traced.TracedModel`).

For each set of settings that changes modules, a model is built on meta as for training, with one layer of each kind. It
is then traced for each size of a micro-batch that is asked for.

A model's parameters as the memory plan counts them, by kind of layer and by FSDP unit (sharding/shard.py).
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

from qlora_fsdp.common.errors import CheckpointError, ConfigError, UserError
from qlora_fsdp.common.model_figures import head_sizes
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.schema import Config, Kernel, KernelsConfig, TaskName
from qlora_fsdp.config.specs import BatchSpec, ModuleSpec
from qlora_fsdp.data.batch import Batch, Rewarded, Taught
from qlora_fsdp.data.labels import label_width
from qlora_fsdp.data.tokenizer import AddedTokens
from qlora_fsdp.layers.attention.choose import describe_wide_heads, traced_attention
from qlora_fsdp.layers.attention.sliced import slice_attention
from qlora_fsdp.layers.divergence import TopTeacher
from qlora_fsdp.layers.experts.forward import mentions_experts
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.head_loss import UNCHANGED, LogitTransform, LossKernel
from qlora_fsdp.layers.liger import stock_models
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.quantized.matmul import DequantizedMatmul
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.layers.rewire import rewire, use_head_pieces
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.traced import EndsUse, LayerKind, LayerUse, ModelParts, ParameterSize
from qlora_fsdp.model.adapters.apply import check_no_experts_are_trained_whole
from qlora_fsdp.model.adapters.read_adapter import NO_ADAPTER
from qlora_fsdp.model.adapters.rounding_error import check_can_correct
from qlora_fsdp.model.assemble import AssembledModel, adapt_model, add_router_loss
from qlora_fsdp.model.build import BuildSettings, build_model, kind_of
from qlora_fsdp.model.count import count_bytes
from qlora_fsdp.model.experts import has_experts
from qlora_fsdp.model.find import ModelFiles
from qlora_fsdp.model.positions import num_learned_positions
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.model.trials.packing import TrialSpec, check_causal, planned_dtype, sees_no_padding, try_small
from qlora_fsdp.model.trials.slices import check_slices, whole_attention
from qlora_fsdp.sharding.shard import embedding_and_head_units
from qlora_fsdp.tracing.liger_shapes import LIGER_KERNELS, put_in_shapes
from qlora_fsdp.tracing.trace import Trace

# A setting whose value matches may be about some layers only, so that layers are not alike.
_ABOUT_A_LAYER = re.compile(r"\blayers?\b|\bh\b|\bblocks?\b|(?<![a-zA-Z_])\d")
SCORED_TOKENS = 64  # of the teacher for each token, in a file that need not be here; what they take is little
MAX_REASON = 200  # characters of an error's message


@dataclass(frozen=True)
class Computing:
    """What decides how a run computes, besides its settings.

    Attributes:
        dtype: the dtype of activations.
        attention: a name in transformers' registry; `eager`, `sdpa` or varlen can be traced. It computes whole
            sequences, though ranks may share them.
        liger_kernels: the settings of `kernels` for which Liger's are used.
        loss_kernel: what computes the loss of a frozen head.
        is_cuda: whether it computes on a GPU.
        transform: what makes a causal model's logits of its head's output, see `CausalLM`.
        unreached: linear layers that no gradient reaches, see `Traits`.
        is_trained: whether it has adapters. A teacher that is a model of its own has none.
    """

    dtype: torch.dtype
    attention: str
    liger_kernels: Collection[str]
    loss_kernel: LossKernel
    is_cuda: bool
    transform: LogitTransform | None = UNCHANGED
    unreached: frozenset[str] = frozenset()
    is_trained: bool = True


class UntraceableModel(CheckpointError):
    """A model's code needs values, or does something else that meta tensors can't."""


class ModelTracer:
    """A model that can be planned with any modules and for any micro-batch: see `TracedModel`.

    Args:
        files: only the model's config is used; no file is read.
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
        self.computing = computing
        self.tokens = tokens
        self.trust_remote_code = trust_remote_code
        self._models: dict[str, _Built] = {}
        self._traces: dict[Any, Trace] = {}
        self._uses: dict[Any, LayerUse] = {}

    def parts(self, modules: ModuleSpec) -> ModelParts:
        """The parameters of these modules."""
        return self._built(modules).parts

    def notes(self, modules: ModuleSpec) -> tuple[str, ...]:
        """The notes that a run with these modules would log about the model, such as unquantized experts."""
        return self._built(modules).notes

    def layer_use(
        self,
        modules: ModuleSpec,
        batch: BatchSpec,
        kind: int,
        policy: Policy,
        is_first: bool = False,
        tile_tokens: int | None = None,
    ) -> LayerUse:
        """Memory of one layer of a kind; `is_first` if no layer before it is trained."""
        key = (*_trace_key(modules, batch), kind, policy, is_first, tile_tokens)
        if key not in self._uses:
            trace = self._trace(modules, batch)
            layer = self._built(modules).stand_ins[kind]
            with _explained():
                self._uses[key] = trace.layer(layer, policy, is_first, tile_tokens)
        return self._uses[key]

    def ends_use(self, modules: ModuleSpec, batch: BatchSpec, head_in_pieces: bool = False) -> EndsUse:
        """Memory of everything around the layers; `head_in_pieces` as `HeadLoss.in_pieces`."""
        return self._trace(modules, batch, head_in_pieces).ends

    def why_not_sliced(self, batch: BatchSpec) -> str | None:
        """Why ranks can't share the sequences of such a micro-batch; None if they can."""
        model, num_slices = self.files.config, batch.num_slices
        spec = TrialSpec(batch.task.settings, batch.max_length, num_slices > 1, self.trust_remote_code)
        try:
            with stock_models():
                check_slices(model, num_slices, batch.max_length, try_small(model, spec))
            whole_attention(self.computing.attention, None, model, num_slices, torch.device("cuda"))
        except ConfigError as error:
            return str(error)
        return None

    def _trace(self, modules: ModuleSpec, batch: BatchSpec, head_in_pieces: bool = False) -> Trace:
        key = (*_trace_key(modules, batch), head_in_pieces)
        if key not in self._traces:
            built = self._built(modules)
            on_meta = batch_on_meta(batch, num_learned_positions(built.model), built.model)
            use_head_pieces(built.model.head, head_in_pieces)
            with _explained():
                computing = self.computing
                self._traces[key] = Trace(built.model, on_meta, computing.is_cuda, computing.liger_kernels)
        return self._traces[key]

    def _built(self, modules: ModuleSpec) -> _Built:
        key = _modules_key(modules)
        if key not in self._models:
            with _explained():
                self._models[key] = self._build(modules)
        return self._models[key]

    def _build(self, modules: ModuleSpec) -> _Built:
        computing = self.computing
        if not computing.is_trained:
            modules = replace(modules, lora=NO_ADAPTER)
        attention = computing.attention
        if modules.num_slices > 1:
            attention = slice_attention(attention, modules.num_slices, None)
        settings = BuildSettings(
            modules.quant,
            computing.dtype,
            attention,
            modules.task.settings,
            keep=list(modules.lora.modules_to_save or []),
            pad_token_id=0,
            trust_remote_code=self.trust_remote_code,
            shares_equal_layers=not _names_a_layer(modules),
        )
        with stock_models():
            meta = build_model(self.files, settings)
        put_in_shapes(meta.model, computing.liger_kernels)
        model = adapt_model(
            meta,
            modules.lora,
            modules.task,
            self.tokens,
            computing.loss_kernel,
            computing.transform,
            computing.unreached,
        )
        check_no_experts_are_trained_whole(model)
        if computing.is_trained and modules.lora.corrects_rounding:
            check_can_correct(model.model, meta.assignments)
        add_router_loss(model, modules.router_aux_loss_coef)
        if computing.is_trained:
            rewire(model, modules.compute, modules.kernels)
        if not model.layers:
            raise ValueError("it has no transformer layers")
        stand_ins, order = find_kinds(model)
        notes = [*meta.notes, *describe_wide_heads(attention, self.files.config)]
        return _Built(model.train(), stand_ins, count_parts(model, stand_ins, order), tuple(notes))


@dataclass(frozen=True)
class _Built:
    """A model on meta.

    Attributes:
        stand_ins: for each kind of layer: the index in `model.layers` of one that is of this kind.
        parts: its parameters.
        notes: for the user, on how it was built.
    """

    model: TaskModel
    stand_ins: tuple[int, ...]
    parts: ModelParts
    notes: tuple[str, ...]


def trace_assembled(assembled: AssembledModel, is_cuda: bool) -> ModelTracer:
    """The tracer of a model that is about to be trained."""
    spec = assembled.spec
    attention = spec.attention
    if is_cuda:  # the attention that was chosen fits the model
        attention = traced_attention(attention, spec.files.config, spec.dtype, is_causal=True)
    computing = Computing(
        dtype=spec.dtype,
        attention=attention,
        liger_kernels=assembled.liger_kernels,
        loss_kernel=spec.loss_kernel,
        is_cuda=is_cuda,
        transform=assembled.model.transform,
        unreached=spec.unreached,
        is_trained=spec.trains,
    )
    return ModelTracer(spec.files, computing, spec.tokens, spec.trust_remote_code)


def trace_config(model_config: PretrainedConfig, config: Config, is_trained: bool = True) -> ModelTracer:
    """The tracer of a model of which only the config is known, for a run on recent GPUs.

    Args:
        model_config: the model's.
        config: the settings of the run.
        is_trained: whether it is the model that is trained, or a teacher beside it.
    """
    dtype = planned_dtype(config.training.precision)
    text = model_config.get_text_config()
    num_slices, max_length = config.distributed.num_slices, config.training.max_length
    trusted = config.model.trust_remote_code
    traits = try_small(model_config, TrialSpec(config.task, max_length, num_slices > 1, trusted))
    check_causal(model_config, traits)
    wanted = config.model.attn_implementation.value
    is_causal = sees_no_padding(config.task, traits)
    attention = traced_attention(wanted, model_config, dtype, is_causal, traits.why_not_by_starts)
    if num_slices > 1:
        check_slices(model_config, num_slices, max_length, traits)
        attention = whole_attention(attention, None, model_config, num_slices, torch.device("cuda"))
    liger = planned_liger_kernels(config.kernels, model_config)
    loss = {Kernel.auto: "triton", Kernel.liger: "liger", Kernel.torch: "torch"}[config.kernels.cross_entropy]
    computing = Computing(
        dtype,
        attention,
        liger,
        cast(LossKernel, loss),
        is_cuda=True,
        transform=traits.transform,
        unreached=traits.unreached,
        is_trained=is_trained,
    )
    names = {*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens}
    # The model may have rows for some of these already. Only the tokenizer knows, which is not loaded here.
    num_rows = getattr(text, "vocab_size", 0)  # a model without a vocabulary is refused where it is built
    ids = frozenset(range(num_rows, num_rows + len(names)))
    tokens = AddedTokens(ids, ids, num_rows + len(names)) if names else AddedTokens()
    return ModelTracer(ModelFiles(None, model_config), computing, tokens, trusted)


def planned_liger_kernels(config: KernelsConfig, model: PretrainedConfig) -> list[str]:
    """The parts of a layer for which a run on GPUs uses Liger's kernels, as `use_fused_kernels` finds them there."""
    known = set(LIGER_KERNELS.get(model.get_text_config().model_type, ()))
    known -= {"glu"} if mentions_experts(model) else set()  # it would replace experts too
    if config.of_layers is Kernel.torch:
        return []
    return [part for part in ("rms_norm", "rotary", "glu") if part in known]


@contextmanager
def _explained() -> Iterator[None]:
    """A context that turns whatever a model's code raises on meta into an `UntraceableModel`."""
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


def _trace_key(modules: ModuleSpec, batch: BatchSpec) -> tuple[str, bool, int, int]:
    """Equal where a trace finds the same."""
    return _modules_key(modules), batch.packs_rows, batch.sequence_length, batch.size


def _modules_key(modules: ModuleSpec) -> str:
    """Equal for specs that make the same modules."""
    return repr(
        (
            modules.quant,
            modules.lora,
            modules.task.settings,
            modules.task.preference.loss,
            modules.kernels,
            modules.compute.matmul,
            modules.router_aux_loss_coef,
            modules.num_slices,
        )
    )


def _names_a_layer(modules: ModuleSpec) -> bool:
    """Whether a setting may be about some of the transformer layers alone."""
    lora = modules.lora
    of_settings = (
        lora.target_modules,
        lora.exclude_modules,
        lora.modules_to_save,
        list(lora.rank_pattern),
        list(lora.alpha_pattern),
        modules.quant.llm_int8_skip_modules,
    )
    for value in of_settings:
        names = [value] if isinstance(value, str) else value or []
        if any(_ABOUT_A_LAYER.search(name) for name in names):
            return True
    return False


def batch_on_meta(spec: BatchSpec, num_positions: int | None = None, model: TaskModel | None = None) -> Batch:
    """A rank's largest micro-batch, on meta. Each sequence has two rows, or one where rows are padded.

    Args:
        spec: its size and the lengths of its sequences.
        num_positions: those that the model has embeddings for, if it has such a table. No row is longer.
        model: whose head says the size of hidden states, where a teacher's are part of the batch.
    """
    task = spec.task
    size = spec.size
    length = spec.slice_length
    if task.has_pairs and not spec.packs_rows:
        size = 2 * spec.size
        length = spec.max_length
    if not spec.packs_rows and num_positions is not None:
        length = min(length, num_positions)
    ids = torch.empty(size, length, dtype=torch.int64, device="meta")
    num_rows = 2 * size if spec.packs_rows else size
    starts = torch.empty(num_rows + 1, dtype=torch.int32, device="meta")
    counts = torch.empty(size, dtype=torch.int64, device="meta")
    most = spec.num_slices * length
    batch = Batch(ids, ids, ids, starts, most, num_tokens=counts, num_slices=spec.num_slices)
    match task.name:
        case TaskName.causal_lm:
            return batch
        case TaskName.preference:
            # The batch has the reference's log-probabilities. A pass that computes them keeps nothing and takes less.
            reference = torch.empty(num_rows // 2 if task.has_pairs else num_rows, 2, device="meta")
            is_good = torch.empty(num_rows, dtype=torch.bool, device="meta")
            return replace(batch, num_answers=num_rows, is_good=is_good, reference=reference)
        case TaskName.grpo:
            values = torch.empty(size, length, device="meta")
            old = values if task.grpo.needs_old_log_probs else None
            before = values if task.grpo.beta > 0 else None
            advantages = torch.empty(num_rows, device="meta")
            return replace(batch, rewarded=Rewarded(advantages, values, values, old, before))
        case TaskName.distill:
            positions = torch.empty(size * length, dtype=torch.int64, device="meta")
            sampled = torch.empty(size * length, device="meta")
            if task.distill.teacher_scores is not None:
                ids = positions.view(-1, 1).expand(-1, SCORED_TOKENS)
                top = TopTeacher(ids, torch.empty(size * length, SCORED_TOKENS + 1, device="meta"), sampled)
                return replace(batch, label_positions=positions, taught=Taught(positions, sampled, top=top))
            # The batch has the teacher's hidden states. The pass that computes them keeps nothing and takes less.
            assert model is not None
            hidden_size = cast(nn.Linear, model.head).in_features
            hidden = torch.empty(size * length, hidden_size, dtype=model.base.dtype, device="meta")
            return replace(batch, label_positions=positions, taught=Taught(positions, sampled, hidden=hidden))
        case TaskName.reward:
            return replace(batch, num_answers=size, margins=torch.empty(size // 2, device="meta"))
        case TaskName.sequence_classification:
            num_labels = size
        case TaskName.token_classification:
            num_labels = size * length
        case _:
            assert_never(task.name)
    labels = torch.empty(num_labels, label_width(task.settings), device="meta")
    positions = torch.empty(num_labels, dtype=torch.int64, device="meta")
    return replace(batch, labels=labels, label_positions=positions)


def find_kinds(model: TaskModel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One layer of each kind, as indices of `model.layers`; and the kind of each layer, in the order they run in."""
    places = {layer: index for index, layer in enumerate(model.layers)}
    lists = [module for module in model.base.modules() if isinstance(module, nn.ModuleList)]
    in_order = [layer for modules in lists for layer in modules if layer in places]
    if set(in_order) != places.keys():
        in_order = list(places)
    kinds: dict[Any, int] = {}
    stand_ins: list[int] = []
    order: list[int] = []
    for layer in in_order:
        key = kind_of(layer)
        if key not in kinds:
            kinds[key] = len(kinds)
            stand_ins.append(places[layer])
        order.append(kinds[key])
    return tuple(stand_ins), tuple(order)


def count_parts(model: TaskModel, stand_ins: Sequence[int], order: Sequence[int]) -> ModelParts:
    """The parameters of a model.

    Args:
        model: on meta, with adapters; layers that are alike may be one module.
        stand_ins: one layer of each kind, as indices of `model.layers`.
        order: the kind of each layer.
    """
    layers = [model.layers[index] for index in stand_ins]
    kinds = tuple(_layer_kind(layer) for layer in layers)
    per_layer = model.per_layer_tables
    tables = [end for end in (model.embeddings, model.head, *per_layer) if end is not None]
    units = embedding_and_head_units(model)
    names = {id(model.embeddings): "embeddings", id(model.head): "head"}
    ends: dict[str, tuple[ParameterSize, ...]] = {"embeddings": (), "head": ()}
    for unit in units:
        ends[names[id(unit)]] = tuple(_sizes([unit], [], tables))
    ends["per_layer_tables"] = tuple(_sizes(per_layer, [], tables))
    ends["root"] = tuple(_sizes([model], [*model.layers, *units, *per_layer], tables))
    around = count_bytes(model, 0, 1).num_base - sum(count_bytes(layer, 0, 1).num_base for layer in model.layers)
    return ModelParts(
        kinds=kinds,
        layers=tuple(order),
        ends=ends,
        gathered_by_model=frozenset(names[id(unit)] for unit in units if unit in model.gathered_by_model),
        num_parameters=around + sum(count_bytes(layers[kind], 0, 1).num_base for kind in order),
        num_quantized=sum(kinds[kind].num_quantized for kind in order),
        cached_bytes=_cached_values(model.base.config.get_text_config()) * model.base.dtype.itemsize,
        has_experts=has_experts(model),
        held_whole=_held_whole(model),
    )


def _held_whole(model: nn.Module) -> tuple[ParameterSize, ...]:
    """The weights of formats with a global scale, in the compute dtype, one of each shape."""
    found: dict[ParameterSize, None] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLayer) and module.format.has_global_scale:
            row_bytes = module.in_features * module.compute_dtype.itemsize
            found[ParameterSize("full_precision", module.out_features, row_bytes)] = None
    return tuple(found)


def _cached_values(config: PretrainedConfig) -> int:
    """Numbers of a token's keys and values, in all layers."""
    return sum(layer.num_key_heads * (layer.key_size + layer.value_size) for layer in head_sizes(config))


def _layer_kind(layer: nn.Module) -> LayerKind:
    linears = [module for module in layer.modules() if isinstance(module, QuantizedLinear)]
    experts = [module for module in layer.modules() if isinstance(module, QuantizedExpertWeight)]
    dequantized = [module for module in linears if isinstance(module.matmul, DequantizedMatmul)]
    return LayerKind(
        tensors=tuple(_sizes([layer], [], [])),
        largest_weight=max((module.weight_bytes for module in linears), default=0),
        ahead=max((module.dequantized_bytes for module in dequantized), default=0),
        dequantized=sum(module.weight_bytes for module in dequantized),
        num_quantized=len(linears) + len(experts),
    )


def _sizes(
    inside: Iterable[nn.Module], outside: Iterable[nn.Module], tables: Iterable[nn.Module]
) -> Iterator[ParameterSize]:
    """The parameters of some modules but not of others, each once; `tables` are embeddings and head."""
    left_out = _modules(outside)
    table_modules = _modules(tables)
    seen: set[int] = set()
    for module in _modules(inside):
        if module in left_out:
            continue
        for name, param in module.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            rows = param.shape[0] if param.ndim else 1
            part = _part_of(name, param, module in table_modules)
            yield ParameterSize(part, rows, param.numel() // max(1, rows) * param.itemsize)


def _modules(parents: Iterable[nn.Module]) -> dict[nn.Module, None]:
    """The modules and all that is in them, each once, in order."""
    return dict.fromkeys(module for parent in parents for module in parent.modules())


def _part_of(name: str, param: nn.Parameter, is_table: bool) -> str:
    """The part of the plan that a parameter counts in."""
    if param.requires_grad:
        return "adapters"
    if is_table:
        return "embeddings"
    if name.endswith("codes"):
        return "codes"
    return "scales" if name.endswith("scales") else "full_precision"
