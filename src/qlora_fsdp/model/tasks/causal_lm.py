"""A causal language model with its loss: the sum of the cross-entropy over the batch's target tokens.

The load-balancing loss of a mixture of experts, as the model's own code defines it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import peft
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.common.sizes import IGNORE_INDEX
from qlora_fsdp.config.schema import LossType, TaskConfig
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.head_loss import UNCHANGED, LogitTransform, LossKernel, Reduction, entropies_of
from qlora_fsdp.layers.quantized.linear import QuantizedEmbedding
from qlora_fsdp.layers.recurrent.replace import has_recurrent_layers, wants_one_sequence
from qlora_fsdp.layers.rewire import attach_loss
from qlora_fsdp.model.experts import has_experts
from qlora_fsdp.model.inputs import lay_out_for, masks_without_asking, row_markers
from qlora_fsdp.model.positions import first_position
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.rows import gather_whole


class CausalLM(TaskModel):
    """A PEFT-wrapped causal language model with its loss.

    In most models the logits are the head applied to the last hidden state, maybe scaled or capped. For these, backbone
    and head run apart, and the head computes the loss without holding the logits of all tokens. Any other model runs
    its own forward.

    Frozen embeddings and a frozen head are large, and forward alone needs them. The model gathers these itself, each
    into one buffer for the time of its use; FSDP's hooks would take two buffers.

    Args:
        model: the wrapped model, on meta or not.
        loss_kernel: what computes the loss of a frozen head.
        transform: what makes logits of the head's output; None if the logits are made in another way.
        task: the loss, and noise on embeddings, in training.

    Attributes:
        router_loss: what is added in training for a mixture of experts; None for nothing.
    """

    router_loss: RouterLoss | None = None

    def __init__(
        self,
        model: peft.PeftModel,
        loss_kernel: LossKernel = "torch",
        transform: LogitTransform | None = UNCHANGED,
        task: TaskConfig | None = None,
    ) -> None:
        super().__init__(model)
        task = task or TaskConfig()
        self.loss_type = task.loss_type
        self.smoothing = task.label_smoothing_factor
        self.transform = transform
        self.is_recurrent = has_recurrent_layers(self.base)
        self.wants_one_sequence = wants_one_sequence(self.base)
        self.first_position = first_position(self.base)
        embeddings, head = self.base.get_input_embeddings(), self.base.get_output_embeddings()
        own: list[nn.Module] = []
        if transform is not None:
            is_plain = type(embeddings) is nn.Embedding and not embeddings.weight.requires_grad
            if is_plain or isinstance(embeddings, QuantizedEmbedding):
                own.append(embeddings)
            if not attach_loss(head, transform, loss_kernel):
                own.append(cast(nn.Module, self.head))
        self.gathered_by_model = own
        self.noise: EmbeddingNoise | None = None
        if task.neftune_noise_alpha is not None:
            self.noise = EmbeddingNoise(task.neftune_noise_alpha)
            if embeddings not in own:
                embeddings.register_forward_hook(self._add_noise)

    def _add_noise(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        assert self.noise is not None
        # A graph that is replayed prepares nothing: what was noted last may be of a training batch of long ago.
        return self.noise.add(output) if self.training else output

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the cross-entropy over the batch's targets, not divided by their number: float32 scalar.

        In training the router's loss, if there is one, is added to each target's. It is no part of what held-out rows
        tell, which would not be that of `evaluate` then, and would depend on the micro-batch. Nor do held-out rows have
        label smoothing, another loss, or noise.
        """
        if self.training and self.loss_type is LossType.dft:
            losses, router_loss = self.losses(batch, "none")
            loss = (losses * torch.exp(-losses.detach())).sum()
        else:
            loss, router_loss = self.losses(batch, "sum")
        return loss if router_loss is None else loss + router_loss * (batch.targets != IGNORE_INDEX).sum()

    def losses(self, batch: Batch, reduction: Reduction) -> tuple[Tensor, Tensor | None]:
        """The cross-entropy, 0 where there is no target, and in training the router's loss, a mean over tokens.

        Args:
            batch: the micro-batch.
            reduction: `sum`, a scalar, or `none`, the loss of each token: float32 [B, L], or [1, B * L] of a model
                whose kernels want one sequence. `with_entropy` is as in `HeadLoss`, [2, B, L] and so on.
        """
        given, batch = batch, lay_out_for(batch, self.wants_one_sequence)
        inputs = self._inputs(batch, given)
        head = self.base.get_output_embeddings()
        smoothing = self.smoothing if self.training else 0.0
        router_loss = self.router_loss if self.training else None
        if router_loss is not None:
            inputs["output_router_logits"] = True
        if self.transform is not None:
            with masks_without_asking(batch):
                outputs = self.base.get_decoder()(**inputs)
            compute = head.forward if self.head in self.gathered_by_model else head  # calling `head` runs FSDP's hooks
            loss: Tensor = compute(outputs.last_hidden_state, batch.targets, reduction, smoothing)
        else:
            with masks_without_asking(batch):
                outputs = self.base(**inputs)
            loss = self._loss_of(outputs.logits.float().flatten(0, 1), batch.targets.flatten(), reduction, smoothing)
        return loss, None if router_loss is None else router_loss.of(outputs.router_logits, given)

    def _inputs(self, batch: Batch, given: Batch) -> dict[str, Any]:
        """What the model is called with: a batch as its kernels want it, made of the one that was `given`."""
        inputs = row_markers(batch, self.is_recurrent)
        if self.first_position:
            inputs["position_ids"] = batch.position_ids + self.first_position
        if self.noise is not None:
            self.noise.prepare(given, self.training)
        if self.base.get_input_embeddings() in self.gathered_by_model:
            embedded = self._look_up(batch.input_ids)
            inputs["inputs_embeds"] = embedded if self.noise is None else self.noise.add(embedded)
        else:
            inputs["input_ids"] = batch.input_ids
        return inputs

    def hidden_states(self, batch: Batch) -> Tensor:
        """What the head would get of the batch's tokens, [B * L, D]."""
        laid = lay_out_for(batch, self.wants_one_sequence)
        with masks_without_asking(laid):
            outputs = self.base.get_decoder()(**self._inputs(laid, batch))
        return cast(Tensor, outputs.last_hidden_state).flatten(0, 1)

    def _loss_of(self, logits: Tensor, targets: Tensor, reduction: Reduction, smoothing: float) -> Tensor:
        """The loss where the model makes the logits [N, V] itself; with entropies [2, N]."""
        summed = "sum" if reduction == "sum" else "none"
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction=summed, label_smoothing=smoothing)
        return torch.stack([loss, entropies_of(logits.detach(), targets)]) if reduction == "with_entropy" else loss

    def may_get_zero_gradient(self, name: str) -> bool:
        """Rows of new tokens may, because a batch may have none of these tokens."""
        return ".trainable_tokens_delta." in name

    def _look_up(self, ids: Tensor) -> Tensor:
        """Embeddings x_BLD of ids_BL. The whole table is gathered for this call, unless its rows can be read."""
        embeddings, index = self.base.get_input_embeddings(), ids.flatten()
        if self.embedding_tables:
            rows = [table.look_up(index) for table in self.embedding_tables]
        else:
            rows = [gather_whole(part, ids.device)[index] for part in embeddings.parameters(recurse=False)]
        found = embeddings.dequantize_rows(*rows) if isinstance(embeddings, QuantizedEmbedding) else rows[0]
        return found.view(*ids.shape, -1)


class RouterLoss:
    """`coef` times the loss that is 1 where tokens spread evenly over experts (arXiv:2101.03961, equations 4 to 6).

    It is a mean over the tokens of a micro-batch, and counts for as much of a step as the micro-batch has targets.
    Routers are frozen, so it moves adapters alone: towards hidden states that are routed more evenly.

    Raises:
        ConfigError: the model's code defines no such loss.
    """

    def __init__(self, base: PreTrainedModel, coef: float) -> None:
        function = vars(sys.modules[type(base).__module__]).get("load_balancing_loss_func")
        if function is None or not hasattr(base, "num_experts_per_tok"):
            reason = f"can't be used: transformers' {type(base).__name__} has no load-balancing loss."
            fix = "Set training.router_aux_loss_coef=0."
            raise ConfigError([Problem(f"training.router_aux_loss_coef={coef}", reason, fix)])
        self.function = cast(Callable[..., Tensor], function)
        self.coef = coef
        self.num_experts: int = cast(Any, base).num_experts
        self.top_k: int = cast(Any, base).num_experts_per_tok

    def of(self, router_logits: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """The loss of a micro-batch, a float32 scalar.

        Args:
            router_logits: each layer's, [B * L, E].
            batch: padding in it does not count, unless there is nothing else: a rank may have no rows in a short step,
                and no targets to multiply the loss by, which must not be a mean over nothing then.
        """
        assert batch.num_tokens is not None
        column = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
        is_token = column < batch.num_tokens[:, None]
        mask = (is_token | ~is_token.any()).long()
        loss = self.function(router_logits, self.num_experts, self.top_k, mask)
        return self.coef * loss


def describe_router_loss(base: PreTrainedModel, coef: float) -> list[str]:
    """A note for the log on a model whose own loss has a term for its routers; none for other models."""
    own = getattr(base.config.get_text_config(), "router_aux_loss_coef", None)
    if own is None or coef or not has_experts(base):
        return []
    return [f"no load-balancing loss (training.router_aux_loss_coef=0; the model's config has {own})"]


class EmbeddingNoise:
    """NEFTune (arXiv:2310.05914): noise that is added to the embeddings of training rows.

    Each value gets a uniform random number between -m and m, where m = alpha / sqrt(tokens of the row x hidden size),
    as in transformers. There a padded batch counts its padding; here a row has the noise of its own length, packed or
    padded.

    Args:
        alpha: how much noise.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self._lengths: Tensor | None = None  # of the rows of the present batch; None where no noise is wanted

    def prepare(self, batch: Batch, is_training: bool) -> None:
        """Note the rows of the batch whose embeddings come next; held-out rows get no noise."""
        self._lengths = row_lengths(batch) if is_training else None

    def add(self, embedded: Tensor) -> Tensor:
        """Embeddings [..., D] with noise, if the batch gets some."""
        if self._lengths is None:
            return embedded
        magnitudes = self.alpha * (self._lengths * embedded.shape[-1]).clamp(min=1).float().rsqrt()
        noise = torch.empty(embedded.shape, dtype=torch.float32, device=embedded.device).uniform_(-1.0, 1.0)
        noise.mul_(magnitudes.view(*embedded.shape[:-1], 1))
        return embedded + noise.to(embedded.dtype)


def row_lengths(batch: Batch) -> Tensor:
    """How many tokens the row of each token has, without padding: int64 [B, L], without asking the device."""
    assert batch.num_tokens is not None
    length = batch.input_ids.shape[1]
    column = torch.arange(length, device=batch.input_ids.device)
    is_token = (column < batch.num_tokens[:, None]).long().flatten()
    row = ((batch.position_ids == 0).flatten().cumsum(0) - 1).clamp(min=0)
    counts = torch.zeros_like(is_token).scatter_add_(0, row, is_token)
    return counts[row].view(batch.input_ids.shape)
