"""Answers the memory plan's questions about a model, under any settings (`memory.traced.TracedModel`).

For each set of settings that changes modules, a model is built on meta as for training, with one layer of each kind. It
is then traced for each size of a micro-batch that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PretrainedConfig

from qlora_fsdp.common.errors import CheckpointError, ConfigError, UserError
from qlora_fsdp.common.families import LIGER_KERNELS
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.schema import Config, Kernel, KernelsConfig
from qlora_fsdp.data.tokenizer import AddedTokens
from qlora_fsdp.layers.attention.choose import describe_wide_heads, traced_attention
from qlora_fsdp.layers.attention.sliced import slice_attention
from qlora_fsdp.layers.experts.forward import mentions_experts
from qlora_fsdp.layers.head_loss import UNCHANGED, LogitTransform, LossKernel
from qlora_fsdp.layers.liger import stock_models
from qlora_fsdp.layers.rewire import rewire
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.traced import EndsUse, LayerUse, ModelParts
from qlora_fsdp.model.adapters.apply import check_no_experts_are_trained_whole
from qlora_fsdp.model.assemble import AssembledModel, adapt_model, add_router_loss
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import ModelFiles
from qlora_fsdp.model.positions import num_learned_positions
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.model.trials.packing import check_causal, planned_dtype, sees_no_padding, try_small
from qlora_fsdp.model.trials.slices import check_slices, whole_attention
from qlora_fsdp.tracing.liger_shapes import put_in_shapes
from qlora_fsdp.tracing.meta_batch import batch_on_meta
from qlora_fsdp.tracing.model_parts import count_parts, find_kinds
from qlora_fsdp.tracing.trace import Trace

# A setting whose value matches may be about some layers only, so that layers are not alike.
_ABOUT_A_LAYER = re.compile(r"\blayers?\b|\bh\b|\bblocks?\b|(?<![a-zA-Z_])\d")
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
    """

    dtype: torch.dtype
    attention: str
    liger_kernels: Collection[str]
    loss_kernel: LossKernel
    is_cuda: bool
    transform: LogitTransform | None = UNCHANGED
    unreached: frozenset[str] = frozenset()


class UntraceableModel(CheckpointError):
    """A model's code needs values, or does something else that meta tensors can't."""


class ModelTracer:
    """A model that can be planned under any settings.

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

    def notes(self, config: Config) -> tuple[str, ...]:
        """The notes that a run with these settings would log about the model, such as unquantized experts."""
        return self._built(config).notes

    def layer_use(
        self, config: Config, micro_batch_size: int, kind: int, policy: Policy, is_first: bool = False
    ) -> LayerUse:
        """Memory of one layer of a kind; `is_first` if no layer before it is trained."""
        tile = config.memory.num_tile_tokens
        key = (*self._key(config, micro_batch_size), kind, policy, is_first, tile)
        if key not in self._uses:
            trace = self._trace(config, micro_batch_size)
            with _explained():
                self._uses[key] = trace.layer(self._built(config).stand_ins[kind], policy, is_first, tile)
        return self._uses[key]

    def ends_use(self, config: Config, micro_batch_size: int) -> EndsUse:
        """Memory of everything around the layers."""
        return self._trace(config, micro_batch_size).ends

    def why_not_sliced(self, config: Config) -> str | None:
        """Why ranks can't share its sequences under these settings; None if they can."""
        try:
            with stock_models():
                check_slices(self.files.config, config, try_small(self.files.config, config))
            whole_attention(self.computing.attention, None, self.files.config, config, torch.device("cuda"))
        except ConfigError as error:
            return str(error)
        return None

    def _key(self, config: Config, micro_batch_size: int) -> tuple[str, int, int]:
        return f"{_modules_key(config)}{config.is_padded}", config.sequence_length, micro_batch_size

    def _trace(self, config: Config, micro_batch_size: int) -> Trace:
        key = self._key(config, micro_batch_size)
        if key not in self._traces:
            built = self._built(config)
            computing, num_positions = self.computing, num_learned_positions(built.model)
            batch = batch_on_meta(config, micro_batch_size, num_positions)
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
        computing, num_slices = self.computing, config.distributed.num_slices
        attention = computing.attention
        settings = BuildSettings(
            config.quant,
            computing.dtype,
            slice_attention(attention, num_slices, None) if num_slices > 1 else attention,
            config.task,
            keep=list(config.lora.modules_to_save or []),
            pad_token_id=0,
            trust_remote_code=self.trust_remote_code,
            shares_equal_layers=not _names_a_layer(config),
        )
        with stock_models():
            meta = build_model(self.files, settings)
        put_in_shapes(meta.model, computing.liger_kernels)
        loss_kernel, transform = computing.loss_kernel, computing.transform
        model = adapt_model(meta, config, self.tokens, loss_kernel, transform, computing.unreached)
        check_no_experts_are_trained_whole(model)
        add_router_loss(model, config.training.router_aux_loss_coef)
        rewire(model, config.compute, config.kernels)
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


def trace_assembled(assembled: AssembledModel, config: Config, is_cuda: bool) -> ModelTracer:
    """The tracer of a model that is about to be trained."""
    attention = assembled.attention
    if is_cuda:  # the attention that was chosen fits the model
        attention = traced_attention(attention, assembled.files.config, assembled.dtype, is_causal=True)
    kernels, loss, transform = assembled.liger_kernels, assembled.loss_kernel, assembled.model.transform
    computing = Computing(assembled.dtype, attention, kernels, loss, is_cuda, transform, assembled.unreached)
    return ModelTracer(assembled.files, computing, assembled.tokens, config.model.trust_remote_code)


def trace_config(model_config: PretrainedConfig, config: Config) -> ModelTracer:
    """The tracer of a model of which only the config is known, for a run on recent GPUs."""
    dtype, text = planned_dtype(config), model_config.get_text_config()
    traits = try_small(model_config, config)
    check_causal(model_config, traits)
    wanted, is_causal = config.model.attn_implementation.value, sees_no_padding(config, traits)
    attention = traced_attention(wanted, model_config, dtype, is_causal, traits.why_not_by_starts)
    if config.distributed.num_slices > 1:
        check_slices(model_config, config, traits)
        attention = whole_attention(attention, None, model_config, config, torch.device("cuda"))
    liger = planned_liger_kernels(config.kernels, model_config)
    loss = {Kernel.auto: "triton", Kernel.liger: "liger", Kernel.torch: "torch"}[config.kernels.cross_entropy]
    computing = Computing(dtype, attention, liger, cast(LossKernel, loss), True, traits.transform, traits.unreached)
    names = {*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens}
    # The model may have rows for some of these already. Only the tokenizer knows, which is not loaded here.
    ids = frozenset(range(text.vocab_size, text.vocab_size + len(names)))
    tokens = AddedTokens(ids, ids, text.vocab_size + len(names)) if names else AddedTokens()
    return ModelTracer(ModelFiles(None, model_config), computing, tokens, config.model.trust_remote_code)


def planned_liger_kernels(config: KernelsConfig, model: PretrainedConfig) -> list[str]:
    """The settings of `kernels` for which a run on GPUs uses Liger's, as `use_fused_kernels` finds them there."""
    known = set(LIGER_KERNELS.get(model.get_text_config().model_type, ()))
    known -= {"glu"} if mentions_experts(model) else set()  # it would replace experts too
    return [name for name in ("rms_norm", "rotary", "glu") if name in known and getattr(config, name) != Kernel.torch]


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


def _modules_key(config: Config) -> str:
    """Equal for settings that make the same modules."""
    made_of = (config.quant, config.lora, config.task, config.preference.loss, config.kernels, config.compute.matmul)
    return repr((*made_of, config.training.router_aux_loss_coef, config.distributed.num_slices))


def _names_a_layer(config: Config) -> bool:
    """Whether a setting may be about some of the transformer layers alone."""
    lora = config.lora
    named: list[Any] = [lora.target_modules, lora.exclude_modules, lora.modules_to_save]
    named += [list(lora.rank_pattern), list(lora.alpha_pattern), config.quant.llm_int8_skip_modules]
    return any(
        _ABOUT_A_LAYER.search(text) for some in named for text in ([some] if isinstance(some, str) else some or [])
    )
