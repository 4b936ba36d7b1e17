"""Tiny classifiers, labelled rows, and the reference: stock transformers, bitsandbytes and PEFT in one process."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import bitsandbytes as bnb
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BitsAndBytesConfig,
)

from qlora_fsdp.config.schema import Config, ProblemType, TaskName
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.run_data import prepare_data
from qlora_fsdp.data.sequences import epoch_order
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.model.parts import describe_task
from tests.helpers.checkpoints import SHAPE, VOCAB
from tests.helpers.lines import write_lines
from tests.helpers.one_process import one_process
from tests.helpers.quick_config import load_config
from tests.helpers.reference import add_lora, dequantize_int8

LABELS = ["rain", "birds", "town"]
WORD_LABELS = ["O", "B-town", "I-town"]
BEGIN, SPACE = 256, 32  # tokens before the first byte of a word
HEADS = ("score", "classifier")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES = {
    "llama": {"classifier_dropout": 0.0},
    "bert": NO_DROPOUT,
    "longformer": {**NO_DROPOUT, "attention_window": 8, "max_position_embeddings": 400},
}
CLASSES = {
    "head": AutoModelForSequenceClassification,
    "head for words": AutoModelForTokenClassification,
    "no head": AutoModel,
    "masked lm": AutoModelForMaskedLM,
}


def make_encoder(family: str, kind: str, folder: Path, num_labels: int = 3) -> Path:
    """A random checkpoint of a family: with a head for `num_labels` labels, without, or with one for another task."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]}, initializer_range=0.1)
    config.num_labels = num_labels
    CLASSES[kind].from_config(config).save_pretrained(folder)
    return folder


def write_labelled_rows(file: Path, form: ProblemType, num_rows: int) -> Path:
    """Rows of words and which of them are there, with labels given by name and by index."""
    rng = random.Random(0)
    rows = []
    for number in range(num_rows):
        text = " ".join(rng.choices([*LABELS, "sat", "on", "a"], k=rng.randint(1, 12)))
        found = [name for name in LABELS if name in text]
        first = found[0] if found else "town"
        labels = {
            ProblemType.single_label_classification: first if number % 2 else LABELS.index(first),
            ProblemType.multi_label_classification: found,
            ProblemType.regression: [len(text) / 30, -0.5],
        }
        rows.append({"text": text, "label": labels[form]})
    return write_lines(file, rows)


def write_labelled_words(file: Path, num_rows: int) -> Path:
    """Rows of words in which "town" and the words "old" behind it are marked, by name or by index."""
    rng = random.Random(0)
    rows = []
    for number in range(num_rows):
        words = rng.choices(["town", "town", "old", "old", "rain", "sat"], k=rng.randint(1, 9))
        tags = ["O"] * len(words)
        for i, word in enumerate(words):
            is_inside = word == "old" and i > 0 and tags[i - 1] != "O"
            tags[i] = "B-town" if word == "town" else "I-town" if is_inside else "O"
        indices = [WORD_LABELS.index(tag) for tag in tags]
        rows.append({"tokens": words, **({"labels": tags} if number % 2 else {"ner_tags": indices})})
    return write_lines(file, rows)


def load_stock_classifier(folder: Path, config: Config, heads: Sequence[str] = HEADS) -> nn.Module:
    """`from_pretrained` with a BitsAndBytesConfig; for int8 the layers hold the dequantized weights.

    Without `heads` in full precision, stock libraries would quantize what the checkpoint lacks, and fail.
    """
    hf_config = AutoConfig.from_pretrained(folder)
    describe_task(hf_config, config.task, byte_tokenizer().pad_token_id)
    options = {}
    if config.quant.load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=config.quant.bnb_4bit_quant_type.value,
            bnb_4bit_use_double_quant=config.quant.bnb_4bit_use_double_quant,
            bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=list(heads),
        )
    labels_words = config.task.name is TaskName.token_classification
    model = CLASSES["head for words" if labels_words else "head"].from_pretrained(
        folder, config=hf_config, dtype=torch.float32, attn_implementation="eager", device_map={"": "cpu"}, **options
    )
    if config.quant.load_in_8bit:
        for name, layer in model.named_modules():
            if type(layer) is nn.Linear and not name.startswith(HEADS):
                codes, scales, _ = bnb.functional.int8_vectorwise_quant(layer.weight.data.half())
                layer.weight.data = dequantize_int8(codes, scales, torch.float32)
    return model


def stock_classifier_losses(argv: Sequence[str]) -> list[float]:
    """Losses of the same run with stock libraries, a row at a time, unpadded; the checkpoint has the head."""
    config = load_config(argv)
    labels_words = config.task.name is TaskName.token_classification
    task_type = "TOKEN_CLS" if labels_words else "SEQ_CLS"
    if labels_words:  # PEFT leaves the head out of all-linear by itself for sequences alone
        config.lora.modules_to_save = list(HEADS)
    model = add_lora(load_stock_classifier(Path(config.model.path), config), config, task_type).train()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=config.training.learning_rate, weight_decay=0.0)
    losses = []
    for rows in _global_batches(config):
        loss_sum, num_labels = 0.0, sum(len(labels) for _, labels in rows)
        for tokens, labels in rows:
            logits = model(input_ids=torch.tensor([tokens])).logits
            if labels_words:
                logits = logits[0, [i + 1 for i, before in enumerate(tokens[:-1]) if before in (BEGIN, SPACE)]]
            losses_of_row = [_loss(*pair, config) for pair in zip(logits, torch.from_numpy(labels), strict=True)]
            loss = sum(losses_of_row) / num_labels
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(params, config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum)
    return losses


def _loss(logits: Tensor, labels: Tensor, config: Config) -> Tensor:
    form, weights = config.task.problem_type, config.task.class_weights
    weights = None if weights is None else torch.tensor(weights)
    if form is ProblemType.single_label_classification:
        label = labels[0].long()
        return F.cross_entropy(logits, label) * (1.0 if weights is None else weights[label])
    if form is ProblemType.multi_label_classification:
        return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weights)
    return F.mse_loss(logits, labels)


def _global_batches(config: Config) -> list[list[tuple[list[int], np.ndarray]]]:
    data = prepare_data(DataSpec.of(config), byte_tokenizer(), one_process(), VOCAB).train
    size, num_steps = config.training.global_batch_size, config.training.max_steps
    epochs = range(math.ceil(size * num_steps / len(data)))
    order = np.concatenate([epoch_order(len(data), config.training.seed, epoch) for epoch in epochs])
    rows = [(data.rows_of(i)[0][0].tolist(), data.labels_of(order[n : n + 1])) for n, i in enumerate(order.tolist())]
    return [rows[step * size :][:size] for step in range(num_steps)]
