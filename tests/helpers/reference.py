"""The independent reference: stock transformers, bitsandbytes and PEFT in one process, a row at a time.

No padding, no packing. It takes the same settings as our runs, so that a test says what is compared once.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import bitsandbytes as bnb
import numpy as np
import peft
import torch
from peft.tuners import lora
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerBase

from qlora_fsdp.config.schema import Config, EmbeddingStorage, Optimizer, QuantConfig
from qlora_fsdp.data.run_data import prepare_data
from qlora_fsdp.data.sequences import epoch_order
from qlora_fsdp.data.tokenizer import add_tokens, byte_tokenizer
from tests.helpers.checkpoints import VOCAB
from tests.helpers.one_process import one_process
from tests.helpers.quick_config import load_config

Row = tuple[list[int], list[bool]]  # tokens, and which of them are targets


def stock_losses(argv: Sequence[str], device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[float]:
    """Losses of the same run with stock libraries."""
    config = load_config(argv)
    model = load_stock(Path(config.model.path), config.quant, device, dtype)
    model = add_lora(model, config, token_rows=grow(model, config))
    return train_stock(model, global_batches(config), config)


def stock_loss(model: nn.Module, rows: Path, max_length: int = 64) -> tuple[float, int]:
    """Mean loss of the completions of a file's rows, byte tokens cut to `max_length`, and the number of targets."""
    loss_sum, num_targets = 0.0, 0
    for row in map(json.loads, rows.read_text().splitlines()):
        prompt, text = (256, *row["prompt"].encode()), (256, *(row["prompt"] + row["completion"]).encode(), 257)
        ids = torch.tensor([text[:max_length]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        targets = ids[0, len(prompt) :]
        loss_sum += F.cross_entropy(logits[:, :VOCAB], targets, reduction="sum").item()
        num_targets += len(targets)
    return loss_sum / num_targets, num_targets


def load_stock(folder: Path, quant: QuantConfig, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """`from_pretrained` with a BitsAndBytesConfig, as PEFT's documentation does it; a quantized checkpoint as it is.

    Stock int8 also quantizes activations, which we do not: for int8 the layers hold the dequantized weights.
    """
    options = {}  # quantization_config=None would make transformers take stored codes for weights
    if quant.load_in_4bit and not _is_quantized(folder):
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quant.bnb_4bit_quant_type.value,
            bnb_4bit_use_double_quant=quant.bnb_4bit_use_double_quant,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=quant.llm_int8_skip_modules,
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", device_map={"": device}, **options
    )
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    in_int8 = ends if quant.embeddings is EmbeddingStorage.int8 else []
    if quant.load_in_8bit and not _is_quantized(folder):
        in_int8 += [layer for layer in model.modules() if type(layer) is nn.Linear and layer not in ends]
    for layer in in_int8:
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(layer.weight.data.half())
        layer.weight.data = dequantize_int8(codes, scales, dtype)
    return model


def dequantize_int8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight that int8 codes [out, in] with row maxima [out] stand for."""
    return (codes.double() * scales.double()[:, None] / 127).to(dtype)


@torch.no_grad()
def grow(model: nn.Module, config: Config) -> dict[str, list[int]] | None:
    """Resize a model for the new tokens of the settings, each at the mean; PEFT's trainable_token_indices."""
    tokenizer, wanted = byte_tokenizer(), [*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens]
    if not wanted:
        return None
    first = len(tokenizer)
    tokenizer.add_tokens(wanted)
    tables = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    means = {name: table.weight.double().mean(0) for name, table in tables.items()}
    model.resize_token_embeddings(max(VOCAB, len(tokenizer)), mean_resizing=False)
    tables = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    for name, table in tables.items():
        table.weight[first : len(tokenizer)] = means[name].to(table.weight.dtype)
    whole, ids = config.lora.modules_to_save or [], list(range(first, len(tokenizer)))
    is_tied = tables["embed_tokens"].weight is tables["lm_head"].weight
    names = ["embed_tokens"] if is_tied and not whole else tables
    return {name: ids for name in names if name not in whole} or None


def add_lora(
    model: nn.Module,
    config: Config,
    task_type: str = "CAUSAL_LM",
    token_rows: dict[str, list[int]] | None = None,
) -> peft.PeftModel:
    """PEFT on the stock model, A drawn as PEFT does but from the seed that we use.

    `lora.Linear` goes over bitsandbytes' layer too, as PEFT's `Linear4bit` rounds in another order.
    """
    wanted = config.lora
    settings = peft.LoraConfig(
        task_type=task_type,
        r=wanted.r,
        lora_alpha=wanted.lora_alpha,
        lora_dropout=wanted.lora_dropout,
        use_rslora=wanted.use_rslora,
        use_dora=wanted.use_dora,
        target_modules=wanted.target_modules,
        exclude_modules=wanted.exclude_modules,
        modules_to_save=wanted.modules_to_save,
        rank_pattern=wanted.rank_pattern,
        alpha_pattern=wanted.alpha_pattern,
        trainable_token_indices=token_rows,
    )
    settings._register_custom_module({bnb.nn.Linear4bit: lora.Linear, bnb.nn.Linear8bitLt: lora.Linear})
    model.requires_grad_(False)
    wrapped = peft.get_peft_model(model, settings)
    for name, module in wrapped.named_modules():
        if isinstance(module, lora.LoraLayer):
            weight = module.lora_A["default"].weight
            generator = torch.Generator().manual_seed(zlib.crc32(f"{config.training.seed}/{name}".encode()))
            bound = math.sqrt(1 / weight.shape[1])
            weight.data.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))
    return wrapped


def global_batches(config: Config, tokenizer: PreTrainedTokenizerBase | None = None) -> list[list[Row]]:
    """The rows of every step: the data's own sequences, in the order of the epochs, `global_batch_size` a step.

    Without a tokenizer of the model's own, tokens are bytes.
    """
    tokenizer = tokenizer or byte_tokenizer()
    vocab_size = max(VOCAB, len(tokenizer), add_tokens(tokenizer, config.tokenizer).vocab_size)
    data = prepare_data(config, tokenizer, one_process(), vocab_size).train
    size, num_steps = config.training.global_batch_size, config.training.max_steps
    num_epochs = math.ceil(size * num_steps / len(data))
    order = np.concatenate([epoch_order(len(data), config.training.seed, epoch) for epoch in range(num_epochs)])
    return [
        [(tokens.tolist(), mask.tolist()) for i in order[step * size :][:size] for tokens, mask in data.rows_of(int(i))]
        for step in range(num_steps)
    ]


def train_stock(model: peft.PeftModel, steps: Sequence[Sequence[Row]], config: Config) -> list[float]:
    """Losses of plain AdamW steps at a constant rate; each step's loss is the mean over all its target tokens."""
    params = [p for p in model.parameters() if p.requires_grad]
    adamw = bnb.optim.AdamW8bit if config.optim.name is Optimizer.adamw_8bit else torch.optim.AdamW
    wanted = config.optim
    optimizer = adamw(params, config.training.learning_rate, tuple(wanted.betas), wanted.eps, wanted.weight_decay)
    device = params[0].device
    losses = []
    model.train()
    for rows in steps:
        total = sum(sum(mask[1:]) for _, mask in rows)
        loss_sum = 0.0
        for tokens, mask in rows:
            ids = torch.tensor([tokens], device=device)
            logits = model(input_ids=ids).logits[0, :-1].float()
            targets = torch.where(torch.tensor(mask[1:], device=device), ids[0, 1:], -100)
            loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / total
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(params, config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum)
    return losses


def _is_quantized(folder: Path) -> bool:
    return "quantization_config" in (folder / "config.json").read_text()
