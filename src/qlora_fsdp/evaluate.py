"""`python -m qlora_fsdp.evaluate`: loss and perplexity of a model, with or without an adapter, on data of yours."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qlora_fsdp.command import log, run_command, write_out
from qlora_fsdp.config.commands import AdapterSettings
from qlora_fsdp.config.schema import Config, TaskName

if TYPE_CHECKING:
    from qlora_fsdp.distributed import Processes

USAGE = """
Loss and perplexity of a model on data of yours, with an adapter or without. Several processes share model and data.

usage: [accelerate launch -m | torchrun ... -m | python -m] qlora_fsdp.evaluate [adapter=DIR] data.path=FILE [...]

  adapter=DIR     the adapter's folder, which also knows its base model. Without one: the base model, model.path=...
  data.path=FILE  rows as for training, all of them; training.max_length and data.* as there
  out=FILE.json   write the figures there too

examples:
  python -m qlora_fsdp.evaluate adapter=outputs/run/adapter data.path=held_out.jsonl
  torchrun --nproc_per_node 4 -m qlora_fsdp.evaluate model=llama3-70b data.path=held_out.jsonl training.max_length=4096
"""


@dataclass
class EvaluateSettings(AdapterSettings):
    """Settings of `evaluate`.

    Attributes:
        out: file to write the figures to.
    """

    out: str | None = None


def evaluate_on_data(settings: EvaluateSettings, config: Config, processes: Processes) -> None:
    """Load, evaluate, and print one line of JSON."""
    from qlora_fsdp.attention import check_packing
    from qlora_fsdp.data.prepare import prepare_data
    from qlora_fsdp.inference import load_trained
    from qlora_fsdp.loop import evaluate
    from qlora_fsdp.plan import split_batches

    trained = load_trained(config, settings.adapter, processes)
    check_packing(config.training.packing, trained.files.config)
    data = prepare_data(
        config,
        trained.tokenizer,
        is_main=processes.is_local_main,
        wait=processes.first_error,
        vocab_size=trained.model.vocab_size,
    )
    for line in str(data.report).splitlines():
        log.info(f"Data: {line}")
    started = time.perf_counter()
    split = split_batches(config.training, processes.num_ranks, len(data.train))
    loss, metrics = evaluate(trained.model, data.train, split, processes)
    figures: dict[str, Any] = {"adapter": settings.adapter, "data": config.data.path or config.data.mix, "loss": loss}
    if config.task.name is TaskName.causal_lm:
        figures["perplexity"] = math.exp(min(loss, 700.0))
        figures["num_target_tokens"] = data.report.num_target_tokens
    else:
        figures |= metrics | {"num_rows": data.report.num_rows}
    figures["seconds"] = round(time.perf_counter() - started, 2)
    if processes.is_main:
        print(json.dumps(figures))
        if settings.out is not None:
            write_out(settings.out, json.dumps(figures, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    return run_command(argv, EvaluateSettings, USAGE, evaluate_on_data)


if __name__ == "__main__":
    sys.exit(main())
