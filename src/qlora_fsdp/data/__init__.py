"""From rows to batches, one stage per file: read → row → format → tokenize → cache → sequences → batch → prefetch.

`prepare_data` (run_data.py) runs the stages up to the cache once per node, and every rank maps the result into memory.
With data.streaming, `open_stream` (stream.py) runs them without a cache, while the model is trained.
"""

from qlora_fsdp.data.batch import Batch, collate, micro_batch_indices
from qlora_fsdp.data.counts import DataReport
from qlora_fsdp.data.prefetch import prefetch
from qlora_fsdp.data.run_data import PreparedData, prepare_data
from qlora_fsdp.data.sequences import Sequences, epoch_order
from qlora_fsdp.data.tokenizer import load_tokenizer

__all__ = [
    "Batch",
    "DataReport",
    "PreparedData",
    "Sequences",
    "collate",
    "epoch_order",
    "load_tokenizer",
    "micro_batch_indices",
    "prefetch",
    "prepare_data",
]
