"""Streams of small files, made on one or several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from qlora_fsdp.config.schema import BadRows, DataConfig, DataFormat, LossOn
from qlora_fsdp.data.read import find_source
from qlora_fsdp.data.sequences import SequenceSettings
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.streams.stream import StreamedSequences
from qlora_fsdp.data.streams.window_maker import WindowMaker
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.runtime.processes import Processes

TOKENIZER = byte_tokenizer()
NUM_SEQUENCES, GLOBAL_BATCH_SIZE = 60, 4
SETTINGS = SequenceSettings(max_length=32, pad_token_id=258, packing=True, seed=3)


def row_tokenizer() -> RowTokenizer:
    return RowTokenizer(TOKENIZER, DataFormat.auto, LossOn.completion, SETTINGS.max_length, BadRows.skip)


def stream(
    paths: Sequence[Path | str],
    processes: Processes,
    weights: Sequence[float] = (1.0,),
    settings: SequenceSettings = SETTINGS,
    map_batches: Callable[..., Any] | None = None,
    **more: Any,
) -> StreamedSequences:
    """A stream of 60 sequences in windows of 20 rows; `more` are arguments of WindowMaker or StreamedSequences."""
    making = {"buffer_rows": 20, "vocab_size": 259, "strict": False, "kept": None}
    making = {key: more.pop(key, value) for key, value in making.items()}
    maker = WindowMaker(
        [find_source(str(path), DataConfig(streaming=True)) for path in paths],
        weights,
        map_batches or partial(map, row_tokenizer()),
        settings,
        split=BatchSplit(1, GLOBAL_BATCH_SIZE, processes.num_ranks, NUM_SEQUENCES // GLOBAL_BATCH_SIZE, NUM_SEQUENCES),
        processes=processes,
        **making,
    )
    return StreamedSequences(maker, num_sequences=NUM_SEQUENCES, num_kept=20, key="ab" * 16, **more)
