"""Compute packed rows with a small model, and each of them alone, and compare.

packing.py says what that proves. The small model is of the run's own class (miniature.py). The reference is stock
transformers with eager attention, one row at a time and without padding.

Find out, with a small model, what a model does to the output of its head.

Only for logits that are the head's output, maybe scaled or capped, can the loss be computed a chunk of tokens at a time
(layers/head_loss.py). Configs give the scale of logits under several names, and families read the same name in opposite
ways: Granite divides by `logits_scaling`, HyperCLOVA X multiplies by it. So the factor is measured, and then it is
shown where it comes from, because a small model might have another one than its large relative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from qlora_fsdp.common.hub import without_hub
from qlora_fsdp.common.text import name_error
from qlora_fsdp.data.batch import lay_out
from qlora_fsdp.layers.head_loss import LogitTransform
from qlora_fsdp.layers.liger import MODELS, stock_models
from qlora_fsdp.layers.recurrent.packages import computed_by_torch
from qlora_fsdp.layers.recurrent.replace import (
    has_recurrent_layers,
    plain_functions,
    replaced_functions,
    wants_one_sequence,
)
from qlora_fsdp.model.build import drop_towers, language_model_class, on_meta
from qlora_fsdp.model.inputs import lay_out_for, masks_without_asking, row_markers
from qlora_fsdp.model.limited_building import LimitedBuilding
from qlora_fsdp.model.parts import ReachedLinears
from qlora_fsdp.model.positions import num_learned_positions
from qlora_fsdp.model.trials.attention_by_starts import BY_SLICES, register_stand_ins
from qlora_fsdp.model.trials.miniature import MAX_PARAMETERS, VOCAB, miniature
from qlora_fsdp.runtime.hardware import is_shortage

CPU = torch.device("cpu")
# Largest differences between the same row packed and alone, as parts of the largest logit and of the largest gradient.
# Rows that see one another differ by a hundredth and more. Where an activation has a kink, gradients differ by more
# than rounding (Gemma 3n: 3e-5). On a GPU kernels multiply in TensorFloat-32.
LOGITS_TOLERANCE, GRADIENTS_TOLERANCE = 1e-5, 1e-3
GPU_TOLERANCE = 0.02
# Rows by sequence, in tokens: some longer than the small model's windows, a short one first, padding after the last.
ROWS = ((5, 19, 3), (11, 13))
LENGTH = 27
SLICE_LENGTH = 9  # of slices, where ranks share sequences: rows begin, end and go on in all of them
CHANGED = (0, 2, 4)  # these of the five rows get other tokens, and the others must not notice
FIRST_TOKEN = 3  # those before it are special
PER_TOKEN = ("input_ids", "position_ids", "seq_idx")  # arguments of the model's forward with a value for each token
Differs = Callable[[Tensor, Tensor], bool]


@dataclass(frozen=True)
class Result:
    """The outputs of the small model for each row.

    Attributes:
        logits: [tokens, outputs] of each row; [outputs] of a classifier of rows.
        gradients: [tokens, hidden] of each row's embeddings, of a weighted sum of all logits.
    """

    logits: list[Tensor]
    gradients: list[Tensor]


class RowTrial:
    """A small model of a class, and what stock transformers computes with it, a row at a time.

    Args:
        config: of the model; it stays as it is. Of a multimodal model the text decoder is tried, in the class that a
            run would train it in.
        max_length: tokens of the longest sequence.
        device: where the small model computes.
        trust_remote_code: run model code that comes with the files.
        with_packages: see `stock`.

    Attributes:
        tolerances: of logits and of gradients: how far they may differ, as parts of the largest.
        is_recurrent: whether the model has layers that carry a state from token to token.
        wants_one_sequence: whether these can keep packed rows apart in one sequence alone.
        num_positions: positions that it has embeddings for; None if it computes them.
        unreached: linear layers that got no gradient, by their `general_name`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        max_length: int,
        device: torch.device = CPU,
        trust_remote_code: bool = False,
        with_packages: bool = False,
    ) -> None:
        self.config = config
        self.device = device
        self.trust_remote_code = trust_remote_code
        self.with_packages = with_packages
        self.tolerances = (LOGITS_TOLERANCE, GRADIENTS_TOLERANCE) if device.type == "cpu" else (GPU_TOLERANCE,) * 2
        self.rows = _draw_rows()
        self.found: dict[str, str | None] = {}  # by the implementation of attention
        self.error: str | None = None
        self.is_recurrent = False
        self.num_positions = None
        self.unreached = frozenset[str]()
        self.wants_one_sequence = False
        register_stand_ins()
        import_model_file(config)
        with stock(with_packages):
            try:
                self.small = miniature(config, max_length)
                self._check_size()
                self.model = self.build("eager")
                self.is_recurrent = has_recurrent_layers(self.model)
                self.num_positions = num_learned_positions(self.model)
                linears = ReachedLinears(self.model)
                self.wants_one_sequence = wants_one_sequence(self.model)
                with plain_functions(self.model):
                    self.alone = compute_alone(self.model, self.rows, linears, use_cache=False)
                self._check_tokens()
                self.unreached = linears.unreached()
            except Exception as error:  # classes and configs are transformers', or come with a model
                raise_shortage(error)
                self.error = f"a small model of its kind, to try it with, fails ({name_error(error)})"

    def why_not_packed(self, attention: str) -> str | None:
        """Why packed rows are not what they are alone, with an implementation of attention that runs anywhere."""
        if self.error is not None:
            return self.error
        if attention not in self.found:
            with stock(self.with_packages):
                self.found[attention] = self._try(attention)
        return self.found[attention]

    def _try(self, attention: str) -> str | None:
        length, rows = (SLICE_LENGTH, "sliced") if attention == BY_SLICES else (LENGTH, "packed")
        try:
            model = self.build(attention)
            model.load_state_dict(self.model.state_dict())
            with replaced_functions(model):
                packed = _compute_packed(model, self.rows, length)
                changed = _compute_packed(model, _change(self.rows), length)
        except Exception as error:
            raise_shortage(error)
            return f"{rows} rows can't be computed ({name_error(error)})"
        others = [row for row in range(len(self.rows)) if row not in CHANGED]
        of_logits, of_gradients = self.tolerances
        for what, tolerance, before, after, alone in (
            ("logits", of_logits, packed.logits, changed.logits, self.alone.logits),
            ("gradients", of_gradients, packed.gradients, changed.gradients, self.alone.gradients),
        ):
            change = largest_difference([before[row] for row in others], [after[row] for row in others])
            if not change <= tolerance:
                return f"{rows} rows see one another ({what} change by {change:.1g} of the largest)"
            difference = largest_difference(before, alone)
            if not difference <= tolerance:
                return (
                    f"{rows} rows are not what they are alone (their {what} differ by {difference:.1g} of the largest)"
                )
        return None

    def why_not_causal(self) -> str | None:
        """Why the model can't learn to predict the next token: a token sees later ones. None if it sees none."""
        if self.error is not None:
            return None
        row, before = self.rows[1].clone(), self.alone.logits[1][:-1]
        row[-1:] = _other_tokens(row[-1:])
        with stock(self.with_packages), plain_functions(self.model), torch.no_grad():
            after = self.model(input_ids=row[None].to(self.device), use_cache=False).logits[0, :-1]
        change = largest_difference([after], [before])
        if change <= self.tolerances[0]:
            return None
        return f"tokens see later ones (with another last token, logits change by {change:.1g} of the largest)"

    def head_transform(self) -> LogitTransform | None:
        """What makes the logits of the head's output for the decoder's last hidden state; None for another way."""
        if self.error is not None:
            return None
        row, logits = self.rows[1].to(self.device), self.alone.logits[1]
        with stock(self.with_packages), plain_functions(self.model), torch.no_grad():
            try:
                build = partial(self.build, "eager")
                return HeadTrial(self.model, self.config, row, logits, build, _are_apart).transform()
            except Exception as error:  # no such parts, or parts that want to be called in another way
                raise_shortage(error)
                return None

    def build(self, attention: str, config: PretrainedConfig | None = None, auto_class: Any = None) -> PreTrainedModel:
        """A small model in training mode, with random weights that are so large that whatever is mixed shows.

        Args:
            attention: the implementation of attention.
            config: the small model's config; None: `small`.
            auto_class: transformers' class for the task; None: that of a model which predicts tokens.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._make(attention, config, auto_class)
            _fill_meta(model)
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    is_table = "embed" in name or "wte" in name
                    nn.init.normal_(parameter, std=1.0 if is_table else parameter.shape[-1] ** -0.5)
                elif not parameter.any():  # zeros, as of sinks and biases, would hide what is done with them
                    nn.init.normal_(parameter, std=0.1)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.to(self.device)  # type: ignore[arg-type]
        model.train()
        return model

    def _check_tokens(self) -> None:
        for row, logits in zip(self.rows, self.alone.logits, strict=True):
            if len(logits) != len(row):
                raise ValueError(f"of {len(row)} tokens it gives logits for {len(logits)}")

    def _check_size(self) -> None:
        model = self._make("eager", is_empty=True)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if num_parameters > MAX_PARAMETERS:
            raise ValueError(f"it has {num_parameters:,} parameters, so its config has sizes under unknown names")

    def _make(
        self,
        attention: str,
        config: PretrainedConfig | None = None,
        auto_class: Any = None,
        is_empty: bool = False,
    ) -> PreTrainedModel:
        """A small model. That of a multimodal class has no towers; its parameters are on meta, as with `is_empty`."""
        config = deepcopy(config or self.small)
        auto_class = auto_class or language_model_class(config)
        has_towers = any(isinstance(part, PretrainedConfig) for part in vars(config).values())
        offline = nullcontext() if self.trust_remote_code else without_hub()
        with on_meta() if has_towers or is_empty else LimitedBuilding(on_meta=False), offline:
            model: PreTrainedModel = auto_class.from_config(
                config,
                attn_implementation=attention,
                dtype=torch.float32,
                trust_remote_code=self.trust_remote_code,
            )
        if has_towers:
            drop_towers(model)
        return model


def _fill_meta(model: PreTrainedModel) -> None:
    """Give the parameters on meta memory on the CPU: ones in vectors, zeros in biases; matrices are drawn later."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                value = 0.0 if name.endswith("bias") else 1.0
                filled = torch.full(parameter.shape, value, dtype=parameter.dtype)
                module.register_parameter(name, nn.Parameter(filled))
    model.tie_weights()


def raise_shortage(error: Exception) -> None:
    """Raise the error again if memory ran out: that says nothing of the model, and the next start may have more."""
    if is_shortage(error):
        raise error


def _draw_rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(FIRST_TOKEN, VOCAB, (n,), generator=generator) for sequence in ROWS for n in sequence]


def _change(rows: Sequence[Tensor]) -> list[Tensor]:
    """The rows, with other tokens in some of them."""
    return [_other_tokens(row) if index in CHANGED else row for index, row in enumerate(rows)]


def _other_tokens(row: Tensor) -> Tensor:
    return (row - FIRST_TOKEN + 17) % (VOCAB - FIRST_TOKEN) + FIRST_TOKEN


def compute_alone(
    model: PreTrainedModel, rows: Sequence[Tensor], linears: ReachedLinears | None = None, **options: Any
) -> Result:
    """Each row by itself, as anybody would call the model; `linears` learns which of them get a gradient."""
    logits, gradients = [], []
    for index, row in enumerate(rows):
        noting: AbstractContextManager[list[Tensor]] = nullcontext([]) if linears is None else linears.outputs()
        with embedded_by(model) as embedded, noting as outputs:
            found = model(input_ids=row[None].to(model.device), **options).logits
        logits.append(found[0].detach())
        total = (found[0] * weights_of(index, found[0])).sum()
        (embeddings,) = embedded
        gradient, *of_outputs = torch.autograd.grad(total, [embeddings, *outputs], allow_unused=True)
        gradients.append(gradient[0])
        if linears is not None:
            linears.note(of_outputs)
    return Result(logits, gradients)


def _compute_packed(model: PreTrainedModel, rows: Sequence[Tensor], length: int) -> Result:
    """All rows in one batch, as training computes them. The gradient is that of the sum over all rows.

    Args:
        model: a small model.
        rows: the rows of all sequences.
        length: tokens in each row of the input: LENGTH for sequences, SLICE_LENGTH for slices of them, side by side.
    """
    pairs = iter([(row.numpy().astype(np.int32), np.ones(len(row), dtype=bool)) for row in rows])
    sequences = [[next(pairs) for _ in part] for part in ROWS]
    is_recurrent = has_recurrent_layers(model)
    batch = lay_out_for(lay_out(sequences, LENGTH, pad_token_id=0).to(model.device), wants_one_sequence(model))
    inputs = {"input_ids": batch.input_ids, **row_markers(batch, is_recurrent)}
    if length < LENGTH:
        in_tokens = {name: value for name, value in inputs.items() if name in PER_TOKEN}
        inputs |= {name: value.view(-1, length) for name, value in in_tokens.items()}
    with embedded_by(model) as embedded, masks_without_asking(batch):
        output = model(**inputs)
    logits = output.logits.flatten(0, 1)
    starts = [index * LENGTH + sum(part[:n]) for index, part in enumerate(ROWS) for n in range(len(part))]
    places = [slice(start, start + len(row)) for start, row in zip(starts, rows, strict=True)]
    total = sum((logits[place] * weights_of(index, logits[place])).sum() for index, place in enumerate(places))
    gradient = torch.autograd.grad(total, embedded)[0].flatten(0, 1)
    return Result([logits[place].detach() for place in places], [gradient[place] for place in places])


@contextmanager
def embedded_by(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collects what the model's embeddings give."""
    found: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: found.append(output))
    try:
        yield found
    finally:
        hook.remove()


def weights_of(row: int, logits: Tensor) -> Tensor:
    """Random factors for a row's logits. The gradient of the weighted sum is what rows are compared by."""
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(row)).to(logits.device)


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of all rows, as a part of the largest value; NaN if a value is."""
    difference = torch.cat([(a - b).abs().flatten() for a, b in zip(found, expected, strict=True)]).max()
    return float(difference / torch.cat([tensor.abs().flatten() for tensor in expected]).max())


def _are_apart(found: Tensor, expected: Tensor) -> bool:
    return not largest_difference([found], [expected]) <= LOGITS_TOLERANCE


def import_model_file(config: PretrainedConfig) -> None:
    """Import the files that have the classes of the model and of its text part, as far as they are transformers'."""
    for part in (config, config.get_text_config()):
        if not type(part).__module__.startswith(MODELS):
            continue
        name = type(part).__module__.replace("configuration_", "modeling_")
        if find_spec(name) is not None:  # else its classes are another model's
            import_module(name)


@contextmanager
def stock(with_packages: bool = False) -> Iterator[None]:
    """Transformers as it comes, without the GPU kernels of an earlier run; its warnings would be of the small model.

    Args:
        with_packages: whether kernels of installed packages compute layers that carry a state; else torch does.
    """
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    recurrent = nullcontext() if with_packages else computed_by_torch()
    try:
        with stock_models(), recurrent:
            yield
    finally:
        transformers.logging.set_verbosity(level)


class HeadTrial:
    """A small model, a row, and the row's logits.

    Args:
        model: the small model, in training mode.
        config: the config at its real size.
        row: tokens, int64 [L], on the model's device.
        logits: what the model makes of them, float32 [L, vocabulary].
        build: makes a model with the same weights of another config.
        differ: whether logits differ by more than rounding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: PretrainedConfig,
        row: Tensor,
        logits: Tensor,
        build: Callable[[PretrainedConfig], PreTrainedModel],
        differ: Differs,
    ) -> None:
        self.model = model
        self.config = config
        self.row = row
        self.logits = logits
        self.build, self.differ = build, differ

    def transform(self) -> LogitTransform | None:
        """What makes the model's logits of its head's output; None if they are made in another way.

        Raises:
            Exception: the model has no such parts, or parts that want to be called in another way.
        """
        embeddings, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        decoder = self.model.get_decoder()
        ids = self.row[None]
        ways = [{"input_ids": ids}]
        if type(embeddings) is nn.Embedding:  # then CausalLM looks the tokens up itself
            ways.append({"inputs_embeds": embeddings(ids)})
        outputs = [head(decoder(**way, use_cache=False).last_hidden_state)[0] for way in ways]
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        factor = 1.0 if cap is not None else self._factor(outputs[0])
        found = None if factor is None else LogitTransform(factor, cap)
        if found is None or any(self.differ(found(output), self.logits) for output in outputs):
            return None
        has_bias = getattr(head, "bias", None) is not None
        return None if has_bias and found.factor != 1.0 else found  # HeadLoss scales the hidden states, and no bias

    def _factor(self, output: Tensor) -> float | None:
        """What the head's output is multiplied by: 1, or a number of the real config or its inverse; else None."""
        if not self.differ(output, self.logits):
            return 1.0
        head, logits = output.double().flatten(), self.logits.double().flatten()
        measured = float(head @ logits / (head @ head))
        small = self.model.config.get_text_config().to_dict()
        real = self.config.get_text_config().to_dict()
        for name, value in small.items():
            if type(value) not in (int, float) or not value or real.get(name) != value:
                continue
            for factor, power in ((float(value), 1), (1.0 / value, -1)):
                if abs(measured - factor) <= 1e-5 * abs(factor) and self._follows(name, value, power):
                    return factor
        return None

    def _follows(self, name: str, value: float, power: int) -> bool:
        """Whether logits are twice or half as large when the config's value is doubled, and all else is as it was."""
        changed = deepcopy(self.model.config)
        try:
            setattr(changed.get_text_config(), name, 2 * value)
            logits = self.build(changed)(input_ids=self.row[None], use_cache=False).logits[0]
        except Exception as error:  # the number is a size, equal to the factor by chance, that fits no others
            if is_shortage(error):
                raise
            return False
        return not self.differ(logits, self.logits * 2.0**power)
