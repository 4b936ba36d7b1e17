"""Packing, the split into batches, and their tensors."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from qlora_fsdp.common.sizes import num_lengths, round_length
from qlora_fsdp.data.batch import Batch, collate, micro_batch_indices
from qlora_fsdp.data.prefetch import prefetch
from qlora_fsdp.data.sequences import Sequences, SequenceSettings, assign_packs, epoch_order, make_sequences
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.tokenized_rows import TokenizedRows
from qlora_fsdp.model.count import FlopCounter
from qlora_fsdp.training.batches import GlobalBatches, micro_batches_of


def make_rows(*rows: tuple[list[int], str]) -> TokenizedRows:
    """Rows from (tokens, mask), where the mask has an x for each token that is trained on."""
    lengths = [len(tokens) for tokens, _ in rows]
    return TokenizedRows(
        tokens=np.concatenate([tokens for tokens, _ in rows]).astype(np.int32),
        is_target=np.array([mark == "x" for _, mask in rows for mark in mask]),
        starts=np.cumsum([0, *lengths]).astype(np.int64),
        num_targets=np.array([mask.count("x") for _, mask in rows], dtype=np.int32),
    )


ROWS = make_rows(([1, 2, 3], ".xx"), ([4, 5, 6, 7], "..xx"), ([8, 9], ".x"))
PACKED = Sequences(ROWS, np.array([1, 2, 0]), np.array([0, 2, 3]), max_length=8, pad_token_id=0, is_packed=True)


def num_targets(batch: Batch) -> int:
    return int((batch.targets != -100).sum())


def test_collate_packs():
    batch = collate(PACKED, np.array([0, 1]), micro_batch_size=2)
    assert batch.input_ids.tolist() == [[4, 5, 6, 7, 8, 9, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [
        [-100, 6, 7, -100, 9, -100, -100, -100],
        [2, 3, -100, -100, -100, -100, -100, -100],
    ]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.sequence_starts.tolist() == [0, 4, 8, 16]  # padding belongs to the last row before it
    assert batch.max_row_length == 8
    assert num_targets(batch) == 5 == PACKED.num_target_tokens(np.array([0, 1]))
    assert (batch.input_ids.dtype, batch.sequence_starts.dtype) == (torch.int64, torch.int32)


def test_collate_rows_without_packing():
    sequences = make_sequences(ROWS, np.array([0, 1]), SequenceSettings(64, 0, packing=False, seed=0))
    batch = collate(sequences, np.array([1]), micro_batch_size=2)  # a short one: the second is padding
    assert batch.input_ids.tolist() == [[4, 5, 6, 7, 0, 0, 0, 0], [1] * 8]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]] * 2
    assert batch.sequence_starts.tolist() == [0, 8, 16]  # no sequence has several rows
    assert num_targets(batch) == 2
    empty = collate(sequences, np.array([], dtype=np.int64), micro_batch_size=1)
    assert empty.input_ids.shape == (1, 8) and num_targets(empty) == 0


def test_slices_know_of_the_rows_around_them():
    """A target is in the next slice, a row goes on in it, and all rows' starts are those in whole sequences."""
    batch = collate(PACKED, np.array([0, 1]), micro_batch_size=2, num_slices=4)
    slices = [batch.slice(index, 4) for index in range(4)]
    for name in ("input_ids", "targets", "position_ids"):
        joined = torch.cat([getattr(part, name) for part in slices], dim=1)
        assert torch.equal(joined, getattr(batch, name))
    assert slices[0].targets.tolist() == [[-100, 6], [2, 3]]  # 6 is the next slice's first token
    assert slices[1].position_ids.tolist() == [[2, 3], [2, 3]]
    assert all(part.sequence_starts.tolist() == [0, 4, 8, 16] for part in slices)
    assert all((part.max_row_length, part.whole_length) == (8, 8) for part in slices)


@pytest.mark.parametrize("packing", [False, True])
def test_sequences_are_padded_to_slices_of_one_length(packing):
    """With positions that the model knows: no more than without slices."""
    sequences = make_sequences(ROWS, np.array([0, 1, 2]), SequenceSettings(8, 0, packing, seed=0))
    indices = np.arange(len(sequences))
    plain = collate(sequences, indices, micro_batch_size=3)
    batch = collate(sequences, indices, micro_batch_size=3, num_slices=3)
    assert batch.input_ids.shape == (3, 9)
    assert torch.equal(batch.targets[:, :8], plain.targets) and num_targets(batch) == num_targets(plain)
    assert torch.equal(batch.position_ids[:, :8], plain.position_ids)
    assert batch.position_ids.max() == 7
    assert [batch.slice(index, 3).input_ids.shape for index in range(3)] == [(3, 3)] * 3


def test_full_sequences_have_no_padding_row():
    full = Sequences(ROWS, np.array([0]), np.array([0, 1]), max_length=3, pad_token_id=0, is_packed=True)
    batch = collate(full, np.array([0]), micro_batch_size=1)
    assert batch.sequence_starts.tolist() == [0, 3]


def test_targets_equal_a_plain_loop():
    rng = np.random.default_rng(0)
    masks = ["".join(rng.choice(["x", "."], size=n)) for n in rng.integers(2, 60, size=200)]
    rows = make_rows(*((rng.integers(1, 99, size=len(mask)).tolist(), "." + mask[1:]) for mask in masks))
    sequences = make_sequences(rows, np.arange(200), SequenceSettings(64, 0, packing=True, seed=0))
    indices = np.arange(len(sequences))
    batch = collate(sequences, indices, micro_batch_size=len(sequences))
    flat_targets = batch.targets.flatten().tolist()
    expected = [-100] * len(flat_targets)
    for s in indices:
        begin = s * 64
        for tokens, is_target in sequences.rows_of(s):
            for i in range(1, len(tokens)):
                if is_target[i]:
                    expected[begin + i - 1] = int(tokens[i])
            begin += len(tokens)
    assert flat_targets == expected
    assert num_targets(batch) == sequences.num_target_tokens(indices)


@pytest.mark.parametrize("seed", range(20))
def test_packs_hold_every_row_once_and_fit(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 300))
    lengths = rng.integers(1, capacity + 1, size=rng.integers(1, 500))
    row_ids, starts = assign_packs(lengths, capacity, seed)
    assert sorted(row_ids) == list(range(len(lengths)))
    filled = np.add.reduceat(lengths[row_ids], starts[:-1])
    assert filled.max() <= capacity
    assert len(filled) == 1 or np.sort(filled)[:2].sum() > capacity  # no two packs would fit into one
    again = assign_packs(lengths, capacity, seed)
    np.testing.assert_array_equal(again[0], row_ids)
    np.testing.assert_array_equal(again[1], starts)


def test_packing_is_tight_and_fast_on_chats():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 0.9, size=200_000).astype(np.int64), 1, 2048)
    begin = time.perf_counter()
    _, starts = assign_packs(lengths, 2048, 0)
    assert lengths.sum() / ((len(starts) - 1) * 2048) >= 0.97
    assert time.perf_counter() - begin < 10


def test_the_split_does_not_change_the_global_batches():
    order = epoch_order(50, seed=3, epoch=1)
    for start in range(0, 50, 12):  # the last one is short
        expected = order[start : start + 12]
        for num_ranks, micro_batch_size in [(1, 12), (1, 1), (2, 3), (4, 3), (3, 2), (5, 4)]:
            ranks = [
                micro_batch_indices(expected, rank=rank, num_ranks=num_ranks, micro_batch_size=micro_batch_size)
                for rank in range(num_ranks)
            ]
            assert len({len(micro_batches) for micro_batches in ranks}) == 1
            in_order = [m[r] for m in zip(*ranks, strict=True) for r in range(num_ranks)]
            np.testing.assert_array_equal(np.concatenate(in_order), expected)


def test_ranks_that_share_sequences_get_the_same_ones():
    split = BatchSplit(1, 2, 2, num_steps=1, num_sequences=2, num_slices=2)  # two groups of two ranks
    ranks = [next(micro_batches_of(PACKED, np.array([0, 1]), split, rank)) for rank in range(4)]
    assert [batch.input_ids[0].tolist() for batch in ranks] == [[4, 5, 6, 7], [8, 9, 0, 0], [1, 2, 3, 0], [0, 0, 0, 0]]
    assert split.num_micro_batches(2) == 1


def test_epochs_are_different_seeded_permutations():
    orders = [epoch_order(100, seed, epoch).tolist() for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert epoch_order(100, 0, 0).tolist() == orders[0]


def test_prefetch_keeps_order_raises_in_place_and_stops():
    batch = collate(PACKED, np.array([0]), micro_batch_size=1)
    made = []

    def batches(num: int):
        for i in range(num):
            made.append(i)
            yield batch
        raise ValueError("broken")

    seen = prefetch(batches(3))
    for _ in range(3):
        assert next(seen).input_ids.tolist() == batch.input_ids.tolist()
    with pytest.raises(ValueError, match="broken"):
        next(seen)

    made.clear()
    seen = prefetch(batches(1000), num_ahead=2)
    next(seen)
    seen.close()
    assert len(made) <= 5


def test_an_epoch_is_done_when_every_sequence_was_seen():
    """The last step may be short: three sequences in steps of two, twice, are two epochs and not three."""
    sequences = make_sequences(ROWS, np.arange(3), SequenceSettings(64, 0, packing=False, seed=0))
    for total, expected in ((3, [2 / 3, 1.0]), (6, [2 / 3, 4 / 3, 2.0]), (5, [2 / 3, 4 / 3, 5 / 3])):
        batches = GlobalBatches(sequences, BatchSplit(1, 2, 1, len(expected), total), seed=0, rank=0)
        assert [batches.of_step(step).epoch for step in range(len(expected))] == pytest.approx(expected)


@pytest.mark.parametrize("num_slices", [1, 2])
def test_padding_is_no_work_of_the_model(num_slices: int):
    """The FLOPs of a micro-batch are those of its rows, each by itself, and of slices a part each."""
    counter, lengths = FlopCounter(1000, 10, 7), np.array([4.0, 2.0, 3.0])  # rows of PACKED, in two sequences
    expected = (4 * 1000 + 6 * 10) * lengths.sum() + 6 * 7 * (lengths**2).sum()
    batch = collate(PACKED, np.array([0, 1]), micro_batch_size=3, num_slices=num_slices)
    slices = [batch] if num_slices == 1 else [batch.slice(index, num_slices) for index in range(num_slices)]
    assert sum(map(counter.of_batch, slices)) == expected


@pytest.mark.parametrize("max_length", [100, 512, 1000, 2048, 131072])
def test_padded_sequences_have_few_lengths(max_length: int):
    """For each a CUDA graph is recorded. All but the shortest are a ninth of padding at most."""
    rounded = {longest: round_length(longest, max_length) for longest in range(1, max_length + 1)}
    assert all(longest <= length <= max_length for longest, length in rounded.items())
    assert all(length % 8 == 0 or length == max_length for length in rounded.values())
    assert len({*rounded.values()}) == num_lengths(max_length) <= 60
    shortest = max(72, max_length // 32)
    assert all(length - longest <= length / 9 for longest, length in rounded.items() if longest >= shortest)
