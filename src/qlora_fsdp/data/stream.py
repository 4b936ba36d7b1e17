"""A run's data as a stream: the sources found, the place to begin at, the first window made."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.config.schema import BadRows, Config
from qlora_fsdp.data.cache import fingerprint
from qlora_fsdp.data.prepare import (
    PreparedData,
    count_data,
    prepare_held_out,
    raise_on_all,
    row_tokenizer,
    training_paths,
)
from qlora_fsdp.data.read import find_source
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.windows import StreamedSequences, find_place, note_place
from qlora_fsdp.runtime.processes import Processes

STREAM_FILE = "stream.jsonl"
BATCHES_KEPT = 8  # behind the newest one asked for: they are made ahead, and a bad step asks for its own again


def open_stream(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    split: BatchSplit,
    processes: Processes,
    folder: Path,
    first_step: int,
    vocab_size: int,
) -> PreparedData[StreamedSequences]:
    """Begin to read the data, at the step that a run goes on from; held-out data is there as a whole.

    Args:
        config: `data` and `training` are used.
        tokenizer: of `load_tokenizer`, with new tokens.
        split: how many sequences a step has, and the run.
        processes: all ranks take part; rank 0 writes.
        folder: the run folder, in which the places of windows are noted.
        first_step: steps that are done.
        vocab_size: of the model.

    Raises:
        DataError: the data can't be used; on every rank.
    """
    stream: StreamedSequences | None = None
    failure: Exception | None = None
    try:
        stream = _open(config, tokenizer, split, processes, folder, first_step, vocab_size)
    except Exception as error:
        failure = error
    raise_on_all(failure, processes.first_error)
    assert stream is not None
    held_out = None
    if config.data.eval_path is not None:
        held_out = prepare_held_out(
            replace(config, data=replace(config.data, streaming=False)),
            tokenizer,
            is_main=processes.is_local_main,
            wait=processes.first_error,
            vocab_size=vocab_size,
        )
    window = stream.first_window
    report = count_data([window.report], window.sequences, held_out)
    return PreparedData(stream, held_out, replace(report, streamed_rows=config.data.buffer_rows))


def _open(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    split: BatchSplit,
    processes: Processes,
    folder: Path,
    first_step: int,
    vocab_size: int,
) -> StreamedSequences:
    data, training, first = config.data, config.training, first_step * split.global_batch_size
    sources = [find_source(path, data) for path in training_paths(data)]
    weights = list(data.mix.values()) or [1.0]
    key = fingerprint(
        tokenizer,
        [[source.identity for source in sources], weights, data.format.value, data.loss_on.value, data.bad_rows.value],
        [training.max_length, training.packing, training.seed, data.buffer_rows],
    )
    files = [folder / STREAM_FILE]
    if config.checkpoint.resume not in ("auto", "none"):  # run/checkpoints/step-...
        files.append(Path(config.checkpoint.resume).expanduser().resolve().parents[1] / STREAM_FILE)
    assert isinstance(tokenizer.pad_token_id, int)
    return StreamedSequences(
        sources,
        weights,
        row_tokenizer(config, tokenizer),
        num_sequences=split.num_sequences,
        num_kept=BATCHES_KEPT * split.global_batch_size,
        buffer_rows=data.buffer_rows,
        max_length=training.max_length,
        pad_token_id=tokenizer.pad_token_id,
        packing=training.packing,
        seed=training.seed,
        vocab_size=vocab_size,
        strict=data.bad_rows is BadRows.error,
        key=key,
        start=find_place(files, key, first),
        note=partial(note_place, files[0], key) if processes.is_main else lambda window: None,
    )
