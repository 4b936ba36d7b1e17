"""Prove on a small model that packed rows do not see one another, or say why rows are padded.

transformers keeps packed rows apart in nearly all of its models, and in some it does not: BERT ignores position ids, a
state space without its kernels runs on from row to row. Neither is an error, and the loss still falls. So before a run
packs, a small model of its own class (miniature.py) computes a packed batch, and each of its rows alone:

- packed, a row has the logits, and the gradient of its embeddings, that stock transformers gives the same row alone
  with eager attention;
- other tokens in one row change neither in another row.

The batch is laid out and marked as training does it (data/batch.py, model/inputs.py): several rows in each of two
sequences, padding at the end, rows longer than a window. It is computed in float32 on the CPU, where the chosen
attention may not run. What is proven depends on that:

- `sdpa` and `eager` are called as they are: transformers' masks, the model's classes and the call are proven.
- `varlen` and FlashAttention are told where rows start, and get no mask. A function of plain torch stands in for them
  that knows what they know: a token sees those before it in its row, as far as its window, and its heads' sinks
  (attention_by_starts.py). That proves that the model hands starts and windows down to its attention, and asks for
  nothing that the kernel leaves out (Gemma 2 caps logits, which varlen does not). That the kernel computes what the
  function computes is for its own tests (tests/gpu/test_gpu_attention.py).
- Kernels of layers that carry a state run on GPUs alone. Where they are installed, so does the trial of such a model.
- Ranks that share sequences (`distributed.context_parallel`) have slices, whose tokens may meet in attention alone. The
  small model computes slices side by side, with attention that joins them: a convolution or a state ends at each.
- What begins only after thousands of tokens is not reached, such as the second set of rotary factors of Phi 3.

Rank 0 decides, and all ranks get its verdict. What can't be tried is padded, which is right for any model.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from qlora_fsdp.common.errors import CheckpointError, ConfigError
from qlora_fsdp.config.schema import Dtype, TaskConfig
from qlora_fsdp.config.settings import problem_about
from qlora_fsdp.layers.attention.choose import FLASH_4, VARLEN, traced_attention
from qlora_fsdp.layers.head_loss import LogitTransform
from qlora_fsdp.model.build import AUTO_CLASSES
from qlora_fsdp.model.trials.attention_by_starts import BY_SLICES, BY_STARTS, BY_STARTS_CAPPED
from qlora_fsdp.model.trials.padding_trial import why_mask_is_needed
from qlora_fsdp.model.trials.row_trial import CPU, RowTrial
from qlora_fsdp.runtime.processes import Processes

# Packages with kernels for recurrent layers, which transformers uses where they are installed. They run on GPUs alone.
RECURRENT_KERNELS = ("fla", "mamba_ssm", "causal_conv1d")


@dataclass(frozen=True)
class TrialSpec:
    """What a small model of a class is asked.

    Attributes:
        task: what the model is to learn. Classifiers are asked whether they see padding, causal models all else.
        max_length: tokens of the longest row.
        slices: whether ranks are to share sequences.
        trust_remote_code: run model code that comes with the files.
    """

    task: TaskConfig
    max_length: int
    slices: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Traits:
    """Traits of a model's class that a small model showed. They are the same on all ranks.

    Attributes:
        transform: what makes the logits of the head's output; None if they are made in another way.
        why_not_by_starts: why kernels that get rows' starts and no mask (`varlen`) do not compute this model for its
            task; None if they do, or if it was not asked.
        unreached: linear layers that got no gradient, by their `general_name` (model/reached.py).
        why_not_causal: why the model can't learn to predict the next token; None if it can, or if it was not asked.
        why_not_sliced: why ranks can't share sequences of this model; None if they can, or if it was not asked.
    """

    transform: LogitTransform | None
    why_not_by_starts: str | None
    unreached: frozenset[str] = frozenset()
    why_not_causal: str | None = None
    why_not_sliced: str | None = None


def find_traits(model: PretrainedConfig, spec: TrialSpec, processes: Processes) -> Traits:
    """Try a small model of the model's class. Rank 0 does, and all ranks get the result. Collective."""
    is_gpu = processes.device.type == "cuda"
    traits = try_small(model, spec, processes.device, is_gpu) if processes.is_main else None
    shared: Traits = processes.share(traits)
    return shared


def try_small(model: PretrainedConfig, spec: TrialSpec, device: torch.device = CPU, for_gpu: bool = True) -> Traits:
    """Try a small causal language model of the model's class, and a small classifier if the task has one.

    Args:
        model: the model's config.
        spec: what is asked.
        device: where it is tried.
        for_gpu: whether it will run on a GPU, so that it is asked about kernels that get rows' starts.
    """
    trial = _trial(model, spec, device)
    if not spec.task.is_causal:
        needs_mask = why_mask_is_needed(trial, AUTO_CLASSES[spec.task.name]) if for_gpu else None
        return Traits(transform=None, why_not_by_starts=needs_mask, unreached=trial.unreached)
    by_starts = trial.why_not_packed(BY_STARTS) if for_gpu else None
    by_slices = trial.why_not_packed(BY_SLICES) if spec.slices else None
    return Traits(trial.head_transform(), by_starts, trial.unreached, trial.why_not_causal(), by_slices)


def sees_no_padding(task: TaskConfig, traits: Traits) -> bool:
    """Whether no token sees the padding at the end, so that attention needs no mask for it."""
    return task.is_causal or traits.why_not_by_starts is None


def check_causal(model: PretrainedConfig, traits: Traits) -> None:
    """Refuse to teach a model to predict tokens that it sees.

    Raises:
        CheckpointError: a small model of its class lets a token see later ones.
    """
    if traits.why_not_causal is not None:
        raise CheckpointError(
            f"{class_name(model)} can't learn to predict the next token: {traits.why_not_causal}. Set model.path to a "
            "decoder, or is_decoder to true in the config.json of an encoder that can be one (model.config.is_decoder="
            "true with random weights), or train a classifier (task=)."
        )


def settle_packing(
    wanted: bool | str, model: PretrainedConfig, spec: TrialSpec, attention: str, processes: Processes
) -> tuple[bool, list[str]]:
    """Decide whether rows are packed. Rank 0 does, and all ranks get the result. Collective.

    Args:
        wanted: `training.packing`: true, false or `auto`.
        model: the model's config.
        spec: what the small model is asked.
        attention: the implementation of attention that was chosen.
        processes: all ranks take part.

    Returns:
        Whether they are, and notes for the log.

    Raises:
        ConfigError: the settings ask for packing, and the model's rows can't be packed.
    """
    may_pack = wanted is not False and spec.task.is_causal
    reason = None
    if may_pack and processes.is_main:
        reason = why_not_packed(model, spec, attention, device=processes.device)
    return decide_packing(wanted, model, spec.task, processes.share(reason))


def decide_packing(
    wanted: bool | str, model: PretrainedConfig, task: TaskConfig, reason: str | None
) -> tuple[bool, list[str]]:
    """Decide on packing, given why the model's rows can't be packed, or None if they can; as `settle_packing`."""
    name = class_name(model)
    if wanted is True and reason is not None:
        fix = "Set training.packing=auto, which pads the rows of such a model."
        raise ConfigError([problem_about("training.packing", wanted, f"can't be used with {name}: {reason}.", fix)])
    packs_rows = wanted is not False and reason is None and task.is_causal
    is_told = wanted == "auto" and reason is not None and task.is_causal
    notes = [f"rows of {name} are padded: {reason}"] if is_told else []
    return packs_rows, notes


def why_not_packed(
    model: PretrainedConfig,
    spec: TrialSpec,
    attention: str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
) -> str | None:
    """Why rows can't be packed with a causal model; None if it keeps packed rows apart.

    Args:
        model: the model's config. Of a multimodal model that of its text decoder counts.
        spec: what the small model is asked.
        attention: the implementation of attention, as `choose_attention` or `model.attn_implementation` names it;
            `auto` is what recent GPUs compute with.
        dtype: the compute dtype, by which `auto` is chosen.
        device: where the model will run.
    """
    trial = _trial(model, spec, device)
    if trial.num_positions is not None and trial.num_positions < spec.max_length:
        return (
            f"it has embeddings of {trial.num_positions:,} positions, and with the padding at its end a row may have "
            f"training.max_length={spec.max_length}"
        )
    if attention == "auto":
        by_starts = trial.why_not_packed(BY_STARTS)
        attention = traced_attention("auto", model, dtype, is_causal=True, why_not_by_starts=by_starts)
    return trial.why_not_packed(_stand_in(attention))


def planned_dtype(precision: Dtype) -> torch.dtype:
    """The compute dtype of a run on recent GPUs, of which no GPU is asked, with this `training.precision`."""
    return torch.float32 if precision is Dtype.float32 else torch.bfloat16


def class_name(model: PretrainedConfig) -> str:
    """The class that transformers makes of a config."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model), None)
    return found.__name__ if isinstance(found, type) else str(model.model_type)


_TRIALS: dict[tuple[str, int, torch.device], RowTrial] = {}


def _trial(model: PretrainedConfig, spec: TrialSpec, device: torch.device) -> RowTrial:
    """The trial of a model, made once in a process: on the CPU, or on the GPU if its recurrent kernels need that."""
    text = model.get_text_config()
    max_length, trusted = spec.max_length, spec.trust_remote_code
    key = text.to_json_string(use_diff=False)
    if (key, max_length, CPU) not in _TRIALS:
        _TRIALS[key, max_length, CPU] = RowTrial(text, max_length, CPU, trusted)
    found = _TRIALS[key, max_length, CPU]
    has_kernels = any(find_spec(name) is not None for name in RECURRENT_KERNELS)
    if not found.wants_one_sequence or not has_kernels or device.type != "cuda":
        return found
    if (key, max_length, device) not in _TRIALS:
        _TRIALS[key, max_length, device] = RowTrial(text, max_length, device, trusted)
    return _TRIALS[key, max_length, device]


def _stand_in(attention: str) -> str:
    """The attention that stands for another one in the trial."""
    if attention in (VARLEN, FLASH_4, BY_STARTS, "varlen", "flash_attention_4"):
        return BY_STARTS
    if attention in ("eager", "sdpa"):
        return attention
    return "sdpa" if attention == "flex_attention" else BY_STARTS_CAPPED
