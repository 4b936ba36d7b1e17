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
- Kernels of layers that carry a state run on GPUs alone. Where they are installed, a process of its own tries them
  there (kernel_trial.py), and what it finds of packed rows counts. Else transformers' torch code is tried.
- Ranks that share sequences (`distributed.context_parallel`) have slices, whose tokens may meet in attention alone. The
  small model computes slices side by side, with attention that joins them: a convolution or a state ends at each.
- What begins only after thousands of tokens is not reached, such as the second set of rotary factors of Phi 3.

Rank 0 decides, and all ranks get its verdict. What can't be tried is padded, which is right for any model.

Compute padded rows with a small classifier whose attention gets no mask, and each of them alone, and compare.

A decoder's tokens see what comes before them, and padding comes last: so attention that is told nothing of padding, as
`varlen` is, computes the rows of a decoder's classifier too. An encoder's tokens see the padding. Which of the two a
class is, this trial finds out as row_trial.py does for packed rows: the reference is stock transformers with eager
attention, one row at a time and without padding.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from qlora_fsdp.common.errors import CheckpointError, ConfigError
from qlora_fsdp.common.text import name_error
from qlora_fsdp.config.schema import Dtype, TaskConfig
from qlora_fsdp.config.settings import problem_about
from qlora_fsdp.layers.attention.choose import FLASH_4, VARLEN, traced_attention
from qlora_fsdp.layers.head_loss import LogitTransform
from qlora_fsdp.layers.recurrent.packages import compute_by_packages, compute_by_torch, installed_packages
from qlora_fsdp.model.build import AUTO_CLASSES
from qlora_fsdp.model.trials import row_trial
from qlora_fsdp.model.trials.attention_by_starts import BY_SEQUENCES, BY_SLICES, BY_STARTS, BY_STARTS_CAPPED
from qlora_fsdp.model.trials.kernel_trial import KernelVerdict, try_kernels
from qlora_fsdp.runtime.processes import Processes

NUM_LABELS = 3
PAD = row_trial.FIRST_TOKEN - 1


@dataclass(frozen=True)
class TrialSpec:
    """What a small model of a class is asked.

    Attributes:
        task: what the model is to learn. Classifiers are asked whether they see padding, causal models all else.
        max_length: tokens of the longest row.
        slices: whether ranks are to share sequences.
        trust_remote_code: run model code that comes with the files.
        deterministic: whether a run must repeat to the bit, for which packages' kernels are not asked.
    """

    task: TaskConfig
    max_length: int
    slices: bool = False
    trust_remote_code: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Traits:
    """Traits of a model's class that a small model showed. They are the same on all ranks.

    Attributes:
        transform: what makes the logits of the head's output; None if they are made in another way.
        why_not_by_starts: why kernels that get rows' starts and no mask (`varlen`) do not compute this model for its
            task; None if they do, or if it was not asked.
        unreached: linear layers that got no gradient, by their `general_name` (model/parts.py).
        why_not_causal: why the model can't learn to predict the next token; None if it can, or if it was not asked.
        why_not_sliced: why ranks can't share sequences of this model; None if they can, or if it was not asked.
        recurrent_by: what computes its layers that carry a state, for the log; None if it has none.
        uses_packages: whether kernels of installed packages compute these layers, and not torch.
    """

    transform: LogitTransform | None
    why_not_by_starts: str | None
    unreached: frozenset[str] = frozenset()
    why_not_causal: str | None = None
    why_not_sliced: str | None = None
    recurrent_by: str | None = None
    uses_packages: bool = False


def find_traits(model: PretrainedConfig, spec: TrialSpec, processes: Processes) -> Traits:
    """Try a small model of the model's class. Rank 0 does, and all ranks get the result. Collective.

    From then on each rank's recurrent layers are computed by what the trial has found to be right.
    """
    is_gpu = processes.device.type == "cuda"
    traits = try_small(model, spec, processes.device, is_gpu) if processes.is_main else None
    shared: Traits = processes.share(traits, Traits)
    row_trial.import_model_file(model)
    if shared.uses_packages:
        compute_by_packages()
    else:
        compute_by_torch()
    return shared


def try_small(
    model: PretrainedConfig, spec: TrialSpec, device: torch.device = row_trial.CPU, for_gpu: bool = True
) -> Traits:
    """Try a small causal language model of the model's class, and a small classifier if the task has one.

    Args:
        model: the model's config.
        spec: what is asked.
        device: where it is tried.
        for_gpu: whether it will run on a GPU, so that it is asked about kernels that get rows' starts.
    """
    trial, kernels = _trial(model, spec), _kernels(model, spec, device)
    recurrent_by = _describe_recurrent(trial, kernels) if trial.is_recurrent else None
    uses_packages = kernels is not None and kernels.why_not is None
    if not spec.task.is_causal:
        needs_mask = why_mask_is_needed(trial, AUTO_CLASSES[spec.task.name]) if for_gpu else None
        return Traits(None, needs_mask, trial.unreached, recurrent_by=recurrent_by, uses_packages=uses_packages)
    by_starts = _why_not_packed(trial, kernels, BY_STARTS) if for_gpu else None
    by_slices = _why_not_packed(trial, kernels, BY_SLICES) if spec.slices else None
    return Traits(
        trial.head_transform(),
        by_starts,
        trial.unreached,
        trial.why_not_causal(),
        by_slices,
        recurrent_by,
        uses_packages,
    )


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
    return decide_packing(wanted, model, spec.task, processes.share(reason, str | None))


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
    device: torch.device = row_trial.CPU,
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
    trial, kernels = _trial(model, spec), _kernels(model, spec, device)
    if trial.num_positions is not None and trial.num_positions < spec.max_length:
        return (
            f"it has embeddings of {trial.num_positions:,} positions, and with the padding at its end a row may have "
            f"training.max_length={spec.max_length}"
        )
    if attention == "auto":
        by_starts = _why_not_packed(trial, kernels, BY_STARTS)
        attention = traced_attention("auto", model, dtype, is_causal=True, why_not_by_starts=by_starts)
    return _why_not_packed(trial, kernels, _stand_in(attention))


def planned_dtype(precision: Dtype) -> torch.dtype:
    """The compute dtype of a run on recent GPUs, of which no GPU is asked, with this `training.precision`."""
    return torch.float32 if precision is Dtype.float32 else torch.bfloat16


def class_name(model: PretrainedConfig) -> str:
    """The class that transformers makes of a config."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model), None)
    found = found or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(model), None)
    return found.__name__ if isinstance(found, type) else str(model.model_type)


_TRIALS: dict[tuple[str, int], row_trial.RowTrial] = {}
_VERDICTS: dict[tuple[str, int, torch.device], KernelVerdict] = {}


def _trial(model: PretrainedConfig, spec: TrialSpec) -> row_trial.RowTrial:
    """The trial of a model on the CPU, where torch computes all of it; made once in a process."""
    # Which class classifies with a multimodal model's text part is not asked: that of the text part is tried.
    tried = model if spec.task.is_causal else model.get_text_config()
    key = tried.to_json_string(use_diff=False), spec.max_length
    if key not in _TRIALS:
        _TRIALS[key] = row_trial.RowTrial(tried, spec.max_length, row_trial.CPU, spec.trust_remote_code)
    return _TRIALS[key]


def _kernels(model: PretrainedConfig, spec: TrialSpec, device: torch.device) -> KernelVerdict | None:
    """What was found of installed kernels for the model's recurrent layers, once in a process; None if none is asked.

    They are asked on GPUs alone, and not by a run that must be deterministic: their backward adds in any order.
    """
    if device.type != "cuda" or spec.deterministic or not installed_packages():
        return None
    if not _trial(model, spec).wants_one_sequence:
        return None  # this program's own code computes the others
    key = model.to_json_string(use_diff=False), spec.max_length, device
    if key not in _VERDICTS:
        _VERDICTS[key] = try_kernels(model, spec.max_length, device, [BY_STARTS, BY_SLICES, "sdpa", "eager"])
    return _VERDICTS[key]


def _why_not_packed(trial: row_trial.RowTrial, kernels: KernelVerdict | None, attention: str) -> str | None:
    """Why rows can't be packed with an implementation of attention; None if they can."""
    if kernels is not None and kernels.why_not is None:
        return kernels.why_not_packed.get(attention, trial.error)
    return trial.why_not_packed(attention)


def _describe_recurrent(trial: row_trial.RowTrial, kernels: KernelVerdict | None) -> str:
    """What computes layers that carry a state, and why."""
    if not trial.wants_one_sequence:
        return "this program's own code (layers/recurrent), which keeps packed rows apart"
    names = " and ".join(installed_packages())
    if kernels is None:
        return (
            f"transformers' torch code ({names or 'no package with kernels'} {'not used' if names else 'is installed'})"
        )
    if kernels.why_not is None:
        return names
    return f"transformers' torch code, slower ({kernels.why_not})"


def _stand_in(attention: str) -> str:
    """The attention that stands for another one in the trial."""
    if attention in (VARLEN, FLASH_4, BY_STARTS, "varlen", "flash_attention_4"):
        return BY_STARTS
    if attention in ("eager", "sdpa"):
        return attention
    return "sdpa" if attention == "flex_attention" else BY_STARTS_CAPPED


def why_mask_is_needed(trial: row_trial.RowTrial, auto_class: Any) -> str | None:
    """Why attention without a mask does not compute a classifier's padded rows; None if it does.

    Args:
        trial: gives the small model's config, weights and rows.
        auto_class: transformers' class for the task, e.g. `AutoModelForSequenceClassification`.
    """
    if trial.error is not None:
        return trial.error
    config = deepcopy(trial.small)
    config.num_labels, config.pad_token_id = NUM_LABELS, PAD
    try:
        with row_trial.stock():
            alone = row_trial.compute_alone(trial.build("eager", config, auto_class), trial.rows)
            padded = _compute_padded(trial.build(BY_SEQUENCES, config, auto_class), trial.rows)
    except Exception as error:  # classes and configs are transformers', or come with a model
        row_trial.raise_shortage(error)
        return f"padded rows can't be computed without a mask ({name_error(error)})"
    of_logits, of_gradients = trial.tolerances
    for what, tolerance, found, expected in (
        ("logits", of_logits, padded.logits, alone.logits),
        ("gradients", of_gradients, padded.gradients, alone.gradients),
    ):
        difference = row_trial.largest_difference(found, expected)
        if not difference <= tolerance:
            return f"tokens see the padding (without a mask, {what} change by {difference:.1g} of the largest)"
    return None


def _compute_padded(model: PreTrainedModel, rows: list[Tensor]) -> row_trial.Result:
    """All rows in one batch, as training computes them."""
    input_ids = pad_sequence(rows, batch_first=True, padding_value=PAD).to(model.device)
    with row_trial.embedded_by(model) as embedded:
        found = model(input_ids=input_ids, attention_mask=(input_ids != PAD).long()).logits
    outputs = [each if each.ndim == 1 else each[: len(row)] for each, row in zip(found, rows, strict=True)]
    total = sum((output * row_trial.weights_of(index, output)).sum() for index, output in enumerate(outputs))
    gradient = torch.autograd.grad(total, embedded)[0]
    gradients = [each[: len(row)] for each, row in zip(gradient, rows, strict=True)]
    return row_trial.Result([output.detach() for output in outputs], gradients)
