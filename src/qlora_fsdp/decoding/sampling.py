"""The next token of each row, chosen on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig

from qlora_fsdp.layers.kernels.launch import has_tensor_cores

# Fields of a generation config that `Sampling` applies, that only say where a text ends, or that do not change which
# token comes next.
_KNOWN = {
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "min_p",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "repetition_penalty",
    "return_dict_in_generate",
    "stop_strings",
    "temperature",
    "top_k",
    "top_p",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
}
_ONE = ("num_beams", "num_beam_groups", "num_return_sequences")
_OF_SAMPLING = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")  # without which they do nothing
_TOP_K = 50  # tokens that transformers samples among where nothing is said of it
_GOLDEN = -1640531527  # 2**32 divided by the golden ratio, as a signed number: neighbours get numbers far apart
_FACTORS = (0x7FEB352D, -2073254261)  # Chris Wellons' `lowbias32`, of which the second is signed here


@dataclass(frozen=True)
class Draws:
    """What the random numbers of a step depend on, so that they are the same whatever is computed beside a text.

    Attributes:
        keys: int64 [rows], a number for each text.
        positions: int64 [rows], the place of each text's last token.
    """

    keys: Tensor
    positions: Tensor

    @classmethod
    def new(cls, num_rows: int, device: torch.device) -> Draws:
        """Draws that depend on torch's next random number alone; a CUDA graph gets another one at each replay."""
        keys = torch.empty(num_rows, dtype=torch.int64, device=device).random_()
        return cls(keys, torch.zeros_like(keys))

    def exponentials(self, number: int) -> Tensor:
        """Exponentially distributed numbers float32 [rows, number], each a hash of key, position and column.

        Two multiplications and three shifts on 32 bits (https://github.com/skeeto/hash-prospector), between which the
        second half of what a row's key and position give is added.
        """
        mixed = _mix(self.keys ^ _mix(self.positions))
        first = mixed.to(torch.int32)
        second = (mixed >> 32).to(torch.int32)
        columns = torch.arange(number, dtype=torch.int32, device=self.keys.device)
        bits = columns * _GOLDEN + first[:, None]
        bits ^= (bits >> 16) & 0xFFFF
        bits *= _FACTORS[0]
        bits += second[:, None]
        bits ^= (bits >> 15) & 0x1FFFF
        bits *= _FACTORS[1]
        bits ^= (bits >> 16) & 0xFFFF
        # The upper 23 bits, at the middle of their interval, are a number above 0 and below 1. Of 24 bits the largest
        # would be rounded to 1, and its logarithm is 0: a token that is left out would get 0 / 0, which argmax takes.
        uniform = ((bits >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
        return uniform.log_().neg_()


def hash_factors() -> tuple[int, int, int]:
    """The factors of `Draws.exponentials`, for a kernel that computes the same numbers."""
    return _GOLDEN, *_FACTORS


def _mix(values: Tensor) -> Tensor:
    """int64 numbers that have nothing in common with these: the last steps of SplitMix64 (Steele et al. 2014)."""
    mixed = values + (-7046029254386353131)
    mixed = (mixed ^ ((mixed >> 30) & (2**34 - 1))) * (-4658895280553007687)
    mixed = (mixed ^ ((mixed >> 27) & (2**37 - 1))) * (-7723592293110705685)
    return mixed ^ ((mixed >> 31) & (2**33 - 1))


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: what logits are divided by; None: the likeliest token is taken.
        top_k: sample among this many of the likeliest tokens; None: among all.
        top_p: sample among the likeliest tokens that make up this much probability.
        min_p: sample among tokens that are at least this many times as likely as the likeliest one (arXiv:2407.01082).
        repetition_penalty: logits of tokens that are in prompt or completion are divided by it, or multiplied if they
            are below 0 (arXiv:1909.05858); 1: they stay.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, config: GenerationConfig) -> Sampling:
        """The sampling that a generation config describes, if `why_not_sampled` accepts it."""
        penalty = config.repetition_penalty or 1.0
        temperature = 1.0 if config.temperature is None else config.temperature
        if not config.do_sample or temperature == 0:
            return cls(repetition_penalty=penalty)
        top_k = _TOP_K if config.top_k is None else config.top_k
        top_p = 1.0 if config.top_p is None else config.top_p
        return cls(temperature, top_k or None, top_p, penalty, config.min_p or 0.0)

    @property
    def leaves_out(self) -> bool:
        """Whether tokens are drawn among some alone."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0

    def choose(self, logits: Tensor, seen: Tensor | None, draws: Draws | None = None) -> Tensor:
        """The next tokens int64 [rows].

        Args:
            logits: [rows, vocabulary], which stay as they are.
            seen: bool [rows, vocabulary], the tokens that a row has had; None without a penalty.
            draws: what the random numbers depend on; None: they are torch's next ones.
        """
        is_plain = seen is None and self.top_k is None and self.top_p == 1.0 and self.min_p == 0.0
        if is_plain and self.temperature is None:
            return logits.argmax(-1)
        if is_plain and self.temperature is not None and has_tensor_cores(logits.device):
            from qlora_fsdp.layers.kernels import triton_sampling

            draws = draws or Draws.new(len(logits), logits.device)
            return triton_sampling.draw(logits, self.temperature, draws.keys, draws.positions, hash_factors())
        logits = logits.to(torch.float32, copy=True)
        if seen is not None:
            penalty = self.repetition_penalty
            penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(seen, penalized, logits)
        if self.temperature is None:
            return logits.argmax(-1)
        logits /= self.temperature
        if self.top_k is not None:
            smallest = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, float("-inf"))
        if self.top_p < 1.0:
            logits = _keep_top_p(logits, self.top_p)
        if self.min_p > 0.0:
            logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(self.min_p), float("-inf"))
        # The largest of probabilities that are divided by exponential numbers is a token drawn by them: the same as
        # torch.multinomial, which asks the device whether the probabilities are valid.
        probabilities = logits.softmax(-1)
        if draws is None:
            exponentials = torch.empty_like(probabilities).exponential_(1)
        else:
            exponentials = draws.exponentials(probabilities.shape[-1])
        return (probabilities / exponentials).argmax(-1)

    def log_probs(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Log-probabilities of the tokens that were chosen, float32 [rows], as a loss of the model computes them.

        They are of all tokens at this temperature: what top_k, top_p, min_p and the penalty leave out counts too.

        Args:
            logits: [rows, vocabulary].
            chosen: int64 [rows].
        """
        if has_tensor_cores(logits.device):
            from qlora_fsdp.layers.kernels import triton_sampling

            return triton_sampling.log_probs(logits, chosen, self.temperature or 1.0)
        scaled = logits.float() / (self.temperature or 1.0)
        return scaled.gather(-1, chosen[:, None])[:, 0] - scaled.logsumexp(-1)


def why_not_sampled(config: GenerationConfig) -> str | None:
    """Which setting of a generation config is not known here; None if all are."""
    for name, value in config.to_diff_dict().items():
        is_default = value in (None, False) or (name in _ONE and value == 1)
        is_unused = name in _OF_SAMPLING and not config.do_sample
        if name not in _KNOWN and not is_default and not is_unused:
            return f"the generation config sets {name}"
    return None


def end_tokens(config: GenerationConfig) -> Sequence[int]:
    """The tokens that end a text."""
    found = config.eos_token_id
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Logits of -inf for all but the likeliest tokens that make up `top_p`, the one that reaches it included."""
    ascending, order = logits.sort(-1)
    before = ascending.softmax(-1).cumsum(-1)
    drops = before <= 1 - top_p
    drops[:, -1] = False
    return logits.masked_fill(drops.scatter(-1, order, drops), float("-inf"))
