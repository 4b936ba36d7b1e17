"""Train the demo's base model, demo/base/: a small Llama that speaks Python's documentation.

    python scripts/train_demo_base.py

One thread, fp32, about 25 minutes. The text is what people wrote in the standard library's sources: docstrings,
comments and the signatures above them, and the language reference in pydoc_data. It never has the question-and-answer
form of demo/docstrings.jsonl, nor the held-out modules, which measure the loss that demo/base/README.md tells.
"""

from __future__ import annotations

import ast
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from make_docstring_pairs import DEMO, HELD_OUT_MODULES, parse, stdlib_sources

FOLDER = DEMO / "base"
END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"

VOCAB_SIZE = 2048
CONTEXT_TOKENS = 256
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
}
BATCH_SIZE = 4
NUM_STEPS = 4000
WARMUP_STEPS = 200
PEAK_LEARNING_RATE = 2e-3
LOG_EVERY_STEPS = 100

README = """# The demo's base model

A Llama of {num_parameters_millions:.2f} M parameters with a byte-level BPE of {vocab_size} tokens, made by `python scripts/train_demo_base.py`
from the docstrings, comments, signatures and language reference of Python {python}'s standard library
({num_text_tokens_millions:.2f} M tokens, {num_epochs:.1f} passes, {minutes:.0f} minutes on one CPU thread, seed 0, torch {torch}).
Loss a token: {train_loss:.2f} in training, {held_out_loss:.2f} on modules kept out of it.

The text belongs to the Python Software Foundation and its contributors
([PSF License](https://docs.python.org/3/license.html)). The model exists to make the demo and the tests real, and is good
for nothing else.
"""  # noqa: E501


def documentation_lines(source: str) -> str:
    """Returns a module's source without its code: docstrings, comments, and the signatures of functions and classes."""
    lines = source.splitlines()
    kept = {number for number, line in enumerate(lines, start=1) if line.lstrip().startswith("#")}
    for node in ast.walk(parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            if not isinstance(node, ast.Module):
                # A body may start on the signature's own line: `def f(): pass`.
                kept.update(range(node.lineno, max(node.body[0].lineno, node.lineno + 1)))
            if ast.get_docstring(node) is not None:
                kept.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return "\n".join(lines[number - 1].rstrip() for number in sorted(kept))


def reference_text() -> list[str]:
    """Returns the topics of the language reference that `help()` prints, one text each."""
    from pydoc_data.topics import topics

    return [text for _, text in sorted(topics.items())]


def load_text() -> tuple[list[str], list[str]]:
    """Returns the texts to train on and those of the held-out modules."""
    train = reference_text()
    held_out: list[str] = []
    for module, source in stdlib_sources():
        if not module.startswith("pydoc_data"):
            (held_out if module in HELD_OUT_MODULES else train).append(documentation_lines(source))
    return [text for text in train if text.strip()], held_out


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE: it can write any text, so there is no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PADDING, model_max_length=CONTEXT_TOKENS
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Returns all texts as one stream of token ids, int64 [T], each closed by the end-of-text token."""
    encoded = tokenizer([text + END_OF_TEXT for text in texts], verbose=False)["input_ids"]
    return torch.tensor([token for tokens in encoded for token in tokens])


def build_model(tokenizer: PreTrainedTokenizerFast, **sizes: Any) -> LlamaForCausalLM:
    """Returns a new model; every layer's in_features is a multiple of 64, the block of 4-bit quantization."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **(SIZES | sizes),
        )
    )


def train(model: LlamaForCausalLM, tokens: Tensor) -> float:
    """Trains on random windows of `tokens`, int64 [T]; returns the mean loss a token of the last steps."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))
    losses: list[float] = []
    start = time.monotonic()
    for step in range(1, NUM_STEPS + 1):
        # Linear warmup, then a cosine down to zero.
        cosine = 0.5 * (1 + math.cos(math.pi * step / NUM_STEPS))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LEARNING_RATE * min(step / WARMUP_STEPS, cosine)
        starts = torch.randint(len(tokens) - CONTEXT_TOKENS, (BATCH_SIZE,))
        batch = torch.stack([tokens[first : first + CONTEXT_TOKENS] for first in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % LOG_EVERY_STEPS == 0:
            seconds = time.monotonic() - start
            print(f"step {step}/{NUM_STEPS} loss {mean(losses[-LOG_EVERY_STEPS:]):.3f} {seconds:.0f} s", flush=True)
    return mean(losses[-LOG_EVERY_STEPS:])


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokens: Tensor) -> float:
    """Returns the mean loss a token over `tokens`, int64 [T], in windows of the context's length."""
    windows = tokens[: len(tokens) // CONTEXT_TOKENS * CONTEXT_TOKENS].view(-1, CONTEXT_TOKENS)
    return mean([model(input_ids=batch, labels=batch).loss.item() for batch in windows.split(BATCH_SIZE)])


def mean(values: list[float]) -> float:
    """Returns the arithmetic mean."""
    return sum(values) / len(values)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, readme: str) -> None:
    """Writes model (bf16), tokenizer and README into `folder`."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(readme, encoding="utf-8")


def main() -> None:
    """Trains tokenizer and model, writes them, and lets the model speak."""
    torch.set_num_threads(1)  # The sum of products depends on the number of threads.
    torch.manual_seed(0)
    start = time.monotonic()
    train_texts, held_out_texts = load_text()
    tokenizer = train_tokenizer(train_texts)
    train_tokens, held_out_tokens = tokenize(tokenizer, train_texts), tokenize(tokenizer, held_out_texts)
    model = build_model(tokenizer)
    print(f"{len(train_tokens):,} tokens to train on, {len(held_out_tokens):,} held out")

    train_loss = train(model, train_tokens)
    readme = README.format(
        num_parameters_millions=model.num_parameters() / 1e6,
        vocab_size=VOCAB_SIZE,
        python=platform.python_version(),
        num_text_tokens_millions=len(train_tokens) / 1e6,
        num_epochs=NUM_STEPS * BATCH_SIZE * CONTEXT_TOKENS / len(train_tokens),
        minutes=(time.monotonic() - start) / 60,
        torch=torch.__version__,
        train_loss=train_loss,
        held_out_loss=evaluate(model, held_out_tokens),
    )
    save(model, tokenizer, FOLDER, readme)
    print(readme)
    prompt = tokenizer('def read(self, size):\n    """Return', return_tensors="pt")
    print(tokenizer.decode(model.float().generate(**prompt, max_new_tokens=60, do_sample=False)[0]))


if __name__ == "__main__":
    main()
