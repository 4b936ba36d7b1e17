"""The independent reference: stock transformers + bitsandbytes + PEFT in one process, a row at a time, no padding, no packing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import bitsandbytes as bnb
import peft
import torch
from peft.tuners import lora
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

Row = tuple[list[int], list[bool]]  # tokens, and which of them are targets


def load_stock(
    folder: Path, dtype: torch.dtype, quant_type: str | None = "nf4", double_quant: bool = True, device: str = "cpu"
) -> torch.nn.Module:
    """`from_pretrained` with a BitsAndBytesConfig, as PEFT's documentation does it."""
    quant = None
    if quant_type is not None:
        quant = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quant_type,
            bnb_4bit_use_double_quant=double_quant,
            bnb_4bit_compute_dtype=dtype,
        )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=quant, attn_implementation="eager", device_map={"": device}
    )


def add_lora(model: torch.nn.Module, **settings: object) -> peft.PeftModel:
    """PEFT on the stock model, `lora.Linear` over bitsandbytes' layer (PEFT's `Linear4bit` rounds in another order)."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **settings)
    config._register_custom_module({bnb.nn.Linear4bit: lora.Linear})
    model.requires_grad_(False)
    return peft.get_peft_model(model, config)


def train_stock(
    model: peft.PeftModel, steps: Sequence[Sequence[Row]], learning_rate: float, max_grad_norm: float, autocast: bool = False
) -> list[float]:
    """Losses of plain AdamW steps at a constant rate; each step's loss is the mean over all its target tokens."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=learning_rate, weight_decay=0.0)
    device = params[0].device
    losses = []
    model.train()
    for rows in steps:
        total = sum(sum(mask[1:]) for _, mask in rows)
        loss_sum = 0.0
        for tokens, mask in rows:
            ids = torch.tensor([tokens], device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                logits = model(input_ids=ids).logits[0, :-1].float()
            targets = torch.where(torch.tensor(mask[1:], device=device), ids[0, 1:], -100)
            loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / total
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(params, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum)
    return losses
