"""Data that is read while it is trained on, because it is larger than the disk.

A thread of each rank makes the next window of rows while the present one is trained on. The ranks do so together (see
`window_maker`), and the global batches are the same at any number of ranks. The run folder's stream.jsonl lists where
windows begin, in the run and in the files, and `windows/` has the last of them as files (`kept_windows`). So a run that
resumes has its first window at once, and reads and tokenizes from its end on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common import threads
from qlora_fsdp.config.data_sets import mixed_sets
from qlora_fsdp.config.schema import BadRows, DataConfig, Thoughts
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.cache import fingerprint
from qlora_fsdp.data.notes import note_mistakes
from qlora_fsdp.data.read import Source, find_source, look_for_unused, training_paths
from qlora_fsdp.data.run_data import PreparedData, count_data, prepare_held_out
from qlora_fsdp.data.sequences import NO_LABELS, Indices, Sequences, SequenceSettings
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.streams.kept_windows import KeptWindows
from qlora_fsdp.data.streams.window_maker import WindowMaker
from qlora_fsdp.data.streams.windows import Place, Window, find_place, note_place
from qlora_fsdp.data.together import check_same_counts, check_same_files, failing_together
from qlora_fsdp.data.tokenize import Mask, Tokens
from qlora_fsdp.data.tokenize_source import ROWS_A_PROCESS, text_tokenizer
from qlora_fsdp.data.workers import Workers, num_cores
from qlora_fsdp.records.run_state import STREAM_FILE
from qlora_fsdp.runtime.processes import Processes

BATCHES_KEPT = 8  # before the newest one: batches are made ahead, and a bad step asks for its own again
MAX_WORKERS = 8  # processes of a rank that tokenize, unless data.num_proc says otherwise


class StreamedSequences:
    """Streamed data in the form that the training loop knows, `TrainingData`.

    Args:
        maker: makes the windows.
        num_sequences: sequences that the run trains on.
        num_kept: sequences before the newest one asked for that may still be asked for.
        key: tells this data and these settings from others; hexadecimal.
        start: where to begin; None: at the beginning of the data.
        note: called with every window, in the thread that made it, if given.
    """

    has_labels = False
    num_answers = 0

    def __init__(
        self,
        maker: WindowMaker,
        *,
        num_sequences: int,
        num_kept: int,
        key: str,
        start: Place | None = None,
        note: Callable[[Window], None] | None = None,
    ) -> None:
        self.maker = maker
        self.num_sequences = num_sequences
        self.num_kept = num_kept
        self.key = key
        self.note = note
        settings = maker.settings
        self.max_length, self.pad_token_id = settings.max_length, settings.pad_token_id
        self.is_packed = settings.packing
        start = start or Place.first(len(maker.sources))
        self._lock, self._windows = threading.Lock(), [self._make(start)]
        self._next = self._make_ahead()

    def __len__(self) -> int:
        return self.num_sequences

    @property
    def first_window(self) -> Window:
        """The window that the run begins or resumes in."""
        return self._windows[0]

    def describe(self) -> dict[str, int]:
        """What tells this data from other data."""
        return {"stream": int(self.key[:12], 16)}

    def order(self, first: int, last: int, seed: int) -> Indices:
        """The sequences `first` to `last` of the run. Their windows have shuffled them already."""
        return np.arange(first, last)

    def lengths_of(self, indices: Indices) -> NDArray[np.int64]:
        """Tokens of sequences, [len(indices)]."""
        found = [self._find(int(index)) for index in indices]
        return np.array([sequences.lengths[local] for sequences, local in found], dtype=np.int64)

    def num_tokens(self, indices: Indices) -> int:
        """Tokens of these sequences."""
        return int(self.lengths_of(indices).sum())

    def num_target_tokens(self, indices: Indices) -> int:
        """Positions with a target in these sequences."""
        found = [self._find(int(index)) for index in indices]
        return sum(int(sequences.num_targets[local]) for sequences, local in found)

    def rows_of(self, sequence: int) -> list[tuple[Tokens, Mask]]:
        """The rows of a sequence: tokens, and which of them are trained on."""
        sequences, local = self._find(sequence)
        return sequences.rows_of(local)

    def labels_of(self, indices: Indices) -> NDArray[np.float32]:
        """No labels, because classifiers are not trained on streams."""
        return NO_LABELS

    def _find(self, index: int) -> tuple[Sequences, int]:
        """The sequences of the window that has sequence `index` of the run, and its number among them."""
        while True:
            with self._lock:
                if index < self._windows[-1].next_place.sequence:
                    oldest = index - self.num_kept
                    self._windows = [w for w in self._windows if w.next_place.sequence > oldest]
                    window = next(w for w in reversed(self._windows) if w.place.sequence <= index)
                    return window.sequences, int(window.order[index - window.place.sequence])
                coming = self._next
            assert coming is not None
            # Not under the lock: the thread that makes batches may wait for a window that this rank's other thread has
            # to train up to, because all ranks make a window together.
            window = coming.result()
            with self._lock:
                if self._next is coming:
                    self._windows.append(window)
                    self._next = self._make_ahead()

    def _make_ahead(self) -> Future[Window] | None:
        """Begins to make the next window, unless the run ends before it."""
        place = self._windows[-1].next_place
        return threads.begin_call(partial(self._make, place), "stream") if place.sequence < self.num_sequences else None

    def _make(self, place: Place) -> Window:
        window = self.maker.make(place)
        if self.note is not None:
            self.note(window)
        return window


def open_stream(
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerBase,
    split: BatchSplit,
    processes: Processes,
    folder: Path | None,
    first_step: int,
    vocab_size: int,
    earlier_folder: Path | None = None,
) -> PreparedData[StreamedSequences]:
    """Begins to read the data, at the step that the run starts or resumes at. Held-out data is prepared as a whole.

    Args:
        spec: which rows, and what becomes of them.
        tokenizer: the result of `load_tokenizer`, with new tokens added.
        split: how many sequences a step has, and the run.
        processes: all ranks take part; rank 0 writes.
        folder: the run folder, in which windows and their places are kept; None: nowhere.
        first_step: number of steps that are done.
        vocab_size: number of tokens that the model knows.
        earlier_folder: the folder of another run, whose checkpoint this one resumes from; None for none.

    Raises:
        DataError: the data can't be used; raised on every rank.
    """
    notes = note_mistakes(tokenizer, spec)
    with failing_together(processes):
        sources = [find_source(path, spec.settings, spec.task.settings) for path in training_paths(spec.settings)]
        # Rank 0 alone says it.
        unused = [name for s in sources if processes.is_main for name in look_for_unused(s, spec.settings.columns)]
    check_same_files(sources, processes)
    # Hosts may have copies of the data that are of another time, and only rank 0's has the run folder for sure.
    key = processes.share(_key(spec, tokenizer, sources) if processes.is_main else None, str)
    start = None
    kept = None
    note = None
    if folder is not None:
        own = folder / STREAM_FILE
        others = [] if earlier_folder is None else [earlier_folder / STREAM_FILE]
        done = first_step * split.global_batch_size
        start = processes.share(find_place([own, *others], key, done) if processes.is_main else None, Place | None)
        kept = KeptWindows(folder, [file.parent for file in others], key, split.global_batch_size)
        note = partial(note_place, own, key) if processes.is_main else None
    stream = StreamedSequences(
        _window_maker(spec, tokenizer, sources, vocab_size, split, processes.for_thread(), kept),
        num_sequences=split.num_sequences,
        num_kept=BATCHES_KEPT * split.global_batch_size,
        key=key,
        start=start,
        note=note,
    )
    held_out = None
    if spec.settings.eval_path is not None:
        whole = replace(spec, settings=replace(spec.settings, streaming=False))
        held_out = prepare_held_out(whole, tokenizer, processes, vocab_size)
    window = stream.first_window
    report = count_data([replace(window.report, unused=tuple(dict.fromkeys(unused)))], window.sequences, held_out)
    check_same_counts(report, processes)
    return PreparedData(stream, held_out, replace(report, streamed_rows=spec.settings.buffer_rows, notes=tuple(notes)))


def _window_maker(
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    vocab_size: int,
    split: BatchSplit,
    processes: Processes,
    kept: KeptWindows | None,
) -> WindowMaker:
    data = spec.settings
    tokenize = text_tokenizer(spec, tokenizer)
    num_workers = _num_workers(data, processes)
    return WindowMaker(
        sources=sources,
        weights=_weights(data),
        map_batches=Workers(tokenize, num_workers).map if num_workers else partial(map, tokenize),
        settings=SequenceSettings.of(spec, tokenizer),
        buffer_rows=data.buffer_rows,
        vocab_size=vocab_size,
        strict=data.bad_rows is BadRows.error,
        split=split,
        processes=processes,
        kept=kept,
    )


def _weights(data: DataConfig) -> list[float]:
    """The weight of each source, relative to the others'."""
    return [own.weight for own in mixed_sets(data).values()] or [1.0]


def _num_workers(data: DataConfig, processes: Processes) -> int:
    """Processes that tokenize for this rank; 0: a thread of the rank does, as where windows are too small for more."""
    if data.num_proc is not None:
        return data.num_proc
    if data.buffer_rows < ROWS_A_PROCESS:
        return 0
    own_cores = num_cores() // processes.local_num_ranks
    return max(0, min(MAX_WORKERS, own_cores - 1))  # a core for training itself


def _key(spec: DataSpec, tokenizer: PreTrainedTokenizerBase, sources: Sequence[Source]) -> str:
    """A hash of everything that the windows depend on."""
    data = spec.settings
    identities = [source.identity for source in sources]
    return fingerprint(
        tokenizer,
        [identities, _weights(data), data.format.value, data.loss_on.value, data.bad_rows.value],
        [spec.max_length, spec.packs_rows, spec.seed, data.buffer_rows],
        *([data.columns] if data.columns else []),
        *(["system", data.system_prompt] if data.system_prompt else []),
        *(["thoughts", data.thoughts.value] if data.thoughts is not Thoughts.last else []),
    )
