"""The next token of each row, chosen on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig

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
_OF_SAMPLING = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")  # without which they do nothing
_TOP_K = 50  # tokens that transformers samples among where nothing is said of it


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: what logits are divided by; None: the likeliest token is taken.
        top_k: sample among this many of the likeliest tokens; None: among all.
        top_p: sample among the likeliest tokens that make up this much probability.
        repetition_penalty: logits of tokens that are in prompt or completion are divided by it, or multiplied if they
            are below 0 (arXiv:1909.05858); 1: they stay.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, config: GenerationConfig) -> Sampling:
        """The sampling that a generation config describes, if `why_not_sampled` accepts it."""
        penalty = config.repetition_penalty or 1.0
        temperature = 1.0 if config.temperature is None else config.temperature
        if not config.do_sample or temperature == 0:
            return cls(repetition_penalty=penalty)
        top_k = _TOP_K if config.top_k is None else config.top_k
        return cls(temperature, top_k or None, 1.0 if config.top_p is None else config.top_p, penalty)

    def choose(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """The next tokens int64 [rows].

        Args:
            logits: [rows, vocabulary], of which a float32 copy is changed.
            seen: bool [rows, vocabulary], the tokens that a row has had; None without a penalty.
        """
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
        # The largest of probabilities that are divided by exponential numbers is a token drawn by them: the same as
        # torch.multinomial, which asks the device whether the probabilities are valid.
        probabilities = logits.softmax(-1)
        return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)


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
