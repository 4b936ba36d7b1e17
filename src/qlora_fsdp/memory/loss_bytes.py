"""GPU bytes that computing the loss takes, by the kind of head (layers/head_loss.py).

The head goes through a micro-batch in chunks of tokens, so the logits of all tokens never exist together.
"""

from __future__ import annotations

import math

from qlora_fsdp.common.sizes import loss_chunk
from qlora_fsdp.config.schema import Kernel, TaskName
from qlora_fsdp.memory.parameter_bytes import HEAD, adapter_rank, is_saved, num_new_tokens
from qlora_fsdp.memory.workload import Workload


def loss_bytes(work: Workload) -> int:
    """Bytes in forward: the output of the last norm, one chunk of logits, and the gradient of the hidden states.

    A frozen head makes that gradient together with the loss. A trained one makes it in backward.
    """
    shape, tokens = work.shape, work.num_tokens
    hidden = tokens * shape.hidden_size * work.compute_bytes
    if work.config.task.name is not TaskName.causal_lm:
        return hidden + tokens * len(work.config.task.labels or [None]) * 4
    if is_trained(work):  # fp32 logits and their log-softmax; before that, two temporaries of a softcap
        return hidden + _chunk(work) * shape.vocab_size * max(12 if shape.has_softcap else 8, _adapting_bytes(work))
    is_fused = "cross_entropy" in work.fused and not num_new_tokens(work.config)
    if is_fused and work.config.kernels.cross_entropy is not Kernel.liger:  # a chunk of logits in the compute dtype
        chunk = loss_chunk(shape.vocab_size, work.compute_bytes)
        return 2 * hidden + min(tokens, chunk) * shape.vocab_size * work.compute_bytes
    if is_fused:  # Liger: logits as large as hidden states
        num_chunks = math.ceil(shape.vocab_size / shape.hidden_size)
        chunk = 1 << max(0, math.ceil(tokens / num_chunks) - 1).bit_length()
        return 2 * hidden + min(tokens, chunk) * shape.vocab_size * work.compute_bytes
    # fp32 logits, and two temporaries of logsumexp beside them
    return 2 * hidden + _chunk(work) * shape.vocab_size * (16 if shape.has_softcap else 12)


def loss_backward_bytes(work: Workload, head_bytes: int) -> int:
    """Bytes in the backward of a trained or adapted head, which computes each chunk of logits again.

    A chunk has its log-softmax, the gradient of that and the gradient of the logits. Once the latter exists, the
    gradient of the head's parameters is made from it.

    Args:
        work: what the plan is for; its head must be trained or adapted.
        head_bytes: bytes of the head's trained parameters.
    """
    assert is_trained(work)
    shape = work.shape
    hidden, logits = work.num_tokens * shape.hidden_size * work.compute_bytes, _chunk(work) * shape.vocab_size
    of_logits = logits * max(16 if shape.has_softcap else 12, _adapting_bytes(work))
    return 2 * hidden + max(of_logits, 4 * logits + head_bytes)


def has_chunks(work: Workload) -> bool:
    """Whether the tokens of a micro-batch go through the head in more than one chunk."""
    return _chunk(work) < work.num_tokens


def is_trained(work: Workload) -> bool:
    """Whether a language model's head is trained or adapted, so that backward computes its logits again."""
    config = work.config
    if config.task.name is not TaskName.causal_lm:
        return False
    return _adapting_bytes(work) > 0 or is_saved(HEAD, config.lora)


def _chunk(work: Workload) -> int:
    """Tokens of a micro-batch that go through the head at a time."""
    return min(work.num_tokens, loss_chunk(work.shape.vocab_size))


def _adapting_bytes(work: Workload) -> int:
    """Bytes per logit of an adapted head: the base's, the adapter's, that one scaled, and the sum; 0 if not adapted."""
    is_adapted = adapter_rank(HEAD, work.config.lora) > 0 and work.config.lora.target_modules != "all-linear"
    return 4 * work.compute_bytes if is_adapted else 0
