"""Triton kernels of the gated delta rule, forward. layers/recurrent/delta_rule.py has the algebra and the names.

A program has one chunk of CHUNK tokens of one head, but for the scan, whose programs follow some columns of a head's
state from chunk to chunk. Products take operands in the dtype of the values and add up in float32.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from dataclasses import dataclass

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

CHUNK = 64  # tokens of a chunk: a power of two and at least 32
EPSILON = 1e-6  # under the root of the norm of queries and keys, as in transformers


@dataclass(frozen=True)
class Tiles:
    """How a kernel goes about its chunk.

    Attributes:
        values: columns of the values, and of a state, that are computed at a time.
        num_warps: warps of a program.
        num_stages: how many steps of a loop are in shared memory at a time.
    """

    values: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """The arguments of a launch."""
        return {"E": self.values, "num_warps": self.num_warps, "num_stages": self.num_stages}


# The fastest on an H100 for heads of 128 channels (benchmarks/delta_rule.py).
SYSTEM = Tiles(values=64, num_warps=4, num_stages=1)
SCAN = Tiles(values=32, num_warps=4, num_stages=3)
OUTPUT = Tiles(values=64, num_warps=4, num_stages=1)


@dataclass(frozen=True)
class Chunks:
    """Sizes of a call, and its tensors' strides.

    Attributes:
        query, key: [B, T, Hk, D], channels adjacent.
        value: [B, T, Hv, E], channels adjacent.
        gate: float32 [B, T, Hv], contiguous; the logarithm of the decay.
        beta: float32 [B, T, Hv], contiguous.
        rows: int32 [B, T], contiguous: the row that a token belongs to, rising along a sequence.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    beta: Tensor
    rows: Tensor

    @property
    def num_heads(self) -> int:
        """Heads of the values; a head of queries and keys serves some of them."""
        return self.value.shape[2]

    @property
    def num_chunks(self) -> int:
        """Chunks of a sequence; the last one may be shorter."""
        num_chunks: int = triton.cdiv(self.value.shape[1], CHUNK)
        return num_chunks

    @property
    def grid(self) -> tuple[int, int]:
        """A program for each chunk of each head."""
        return self.num_chunks, self.value.shape[0] * self.num_heads

    def sizes(self) -> dict[str, object]:
        """Arguments that all kernels take."""
        return {
            "num_tokens": self.value.shape[1],
            "num_heads": self.num_heads,
            "key_width": self.key.shape[3],
            "value_width": self.value.shape[3],
            "C": CHUNK,
            "D": triton.next_power_of_2(self.key.shape[3]),
            "PRECISION": "tf32" if self.value.dtype.itemsize == 2 else "ieee",
        }

    def options(self) -> dict[str, object]:
        """Arguments of kernels that read queries, keys and values."""
        return {
            **self.sizes(),
            "heads_a_key": self.num_heads // self.key.shape[2],
            "stride_query_b": self.query.stride(0),
            "stride_query_t": self.query.stride(1),
            "stride_query_h": self.query.stride(2),
            "stride_key_b": self.key.stride(0),
            "stride_key_t": self.key.stride(1),
            "stride_key_h": self.key.stride(2),
            "stride_value_b": self.value.stride(0),
            "stride_value_t": self.value.stride(1),
            "stride_value_h": self.value.stride(2),
        }


@triton.jit
def load_tile(x, tokens, is_token, stride, columns, width):
    """[C, columns] of some tokens of one head, in the dtype that they are stored in; 0 beyond the end."""
    places = tokens.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(x + places, mask=is_token[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def store_tile(x, values, tokens, is_token, stride, columns, width):
    """The reverse of `load_tile`."""
    places = tokens.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(x + places, values.to(x.dtype.element_ty), mask=is_token[:, None] & (columns < width)[None, :])


@triton.jit
def load_unit(x, tokens, is_token, stride, columns, width, scale):
    """The same, each token's vector divided by its length and times `scale`; float32."""
    tile = load_tile(x, tokens, is_token, stride, columns, width).to(tl.float32)
    squares = tl.sum(tile * tile, 1)
    return tile * (scale / tl.sqrt(squares + 1e-6))[:, None]


@triton.jit
def load_decays(gate, rows, first, tokens, is_token, num_tokens, num_heads, C: tl.constexpr):
    """How what was written at one place has decayed at another, of one chunk of one head.

    Returns:
        total: [C], the sum of the gate up to and with each token.
        between: [C, C], from a token (second) to itself and those after it in its row (first); else 0.
        into: [C], from the end of the chunk before to each token; 0 where a row has begun since.
        out: [C], from each token to the chunk's end; 0 where a row begins between.
        keep: from the end of the chunk before to this chunk's end; 0 where a row begins between.
    """
    total = tl.cumsum(tl.load(gate + tokens * num_heads, mask=is_token, other=0.0), 0)
    row = tl.load(rows + tokens, mask=is_token, other=-2)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1)
    last = tl.load(rows + tl.minimum(first + C, num_tokens) - 1)
    places = tl.arange(0, C)
    is_seen = (row[:, None] == row[None, :]) & (places[:, None] >= places[None, :])
    between = tl.exp(tl.where(is_seen, total[:, None] - total[None, :], float("-inf")))
    whole = tl.sum(tl.where(places == C - 1, total, 0.0), 0)
    into = tl.where(row == before, tl.exp(total), 0.0)
    out = tl.where(row == last, tl.exp(whole - total), 0.0)
    keep = tl.where(last == before, tl.exp(whole), 0.0)
    return total, between, into, out, keep


@triton.jit
def invert(a, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular matrix [C, C], float32.

    Blocks of 16 on the diagonal are inverted by substitution, all at once and row by row. Then neighbours are joined to
    blocks of 32, and so on: the inverse of [[A, 0], [X, B]] has -B^-1 X A^-1 in its corner. A product of powers of `a`
    would be shorter and is not stable: they grow like binomial coefficients where keys are alike.
    """
    N: tl.constexpr = C // 16
    blocks = tl.arange(0, N)
    inner = tl.arange(0, 16)
    is_same_block = blocks[:, None, None, None] == blocks[None, None, :, None]
    diagonal = tl.sum(tl.where(is_same_block, tl.reshape(a, (N, 16, N, 16)), 0.0), 2)  # [N, 16, 16]
    inverse = tl.where(inner[None, :, None] == inner[None, None, :], 1.0, 0.0) + tl.zeros([N, 16, 16], tl.float32)
    for step in range(1, 16):
        is_row = inner[None, :, None] == step
        row = -tl.sum(tl.where(is_row, diagonal, 0.0), 1)  # [N, 16]
        solved = tl.sum(row[:, :, None] * tl.where(inner[None, :, None] < step, inverse, 0.0), 1)
        inverse = tl.where(is_row & (inner[None, None, :] < step), solved[:, None, :], inverse)
    t = tl.reshape(tl.where(is_same_block, inverse[:, :, None, :], 0.0), (C, C))
    places = tl.arange(0, C)
    t = _join(a, t, places, 16, PRECISION)
    if C >= 64:
        t = _join(a, t, places, 32, PRECISION)
    if C >= 128:
        t = _join(a, t, places, 64, PRECISION)
    return t


@triton.jit
def _join(a, t, places, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """From inverses of blocks of SIZE to those of blocks twice as large."""
    block = places // SIZE
    is_corner = (block[:, None] // 2 == block[None, :] // 2) & (block[:, None] > block[None, :])
    corner = tl.where(is_corner, a, 0.0)
    product = tl.dot(t, tl.dot(corner, t, input_precision=PRECISION), input_precision=PRECISION)
    return t - product


@kernel
@triton.jit
def _system_kernel(
    query,
    key,
    value,
    gate,
    beta,
    rows,
    u,
    w,
    writing,
    keeping,
    inverse,
    num_tokens,
    num_heads,
    heads_a_key,
    key_width,
    value_width,
    stride_query_b,
    stride_query_t,
    stride_query_h,
    stride_key_b,
    stride_key_t,
    stride_key_h,
    stride_value_b,
    stride_value_t,
    stride_value_h,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
    STORES_INVERSE: tl.constexpr,
):
    """U = T beta V and W = T beta into K, where T = (I + A)^-1; and what the scan takes of keys and decays."""
    first = tl.program_id(0) * C
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = tl.program_id(1) % num_heads
    key += batch * stride_key_b + (head // heads_a_key) * stride_key_h
    value += batch * stride_value_b + head * stride_value_h
    gate += batch * num_tokens * num_heads + head
    beta += batch * num_tokens * num_heads + head
    rows += batch * num_tokens
    u += (batch * num_tokens * num_heads + head) * value_width
    w += (batch * num_tokens * num_heads + head) * key_width
    writing += (batch * num_tokens * num_heads + head) * key_width
    dtype = value.dtype.element_ty

    tokens = first + tl.arange(0, C)
    is_token = tokens < num_tokens
    places = tl.arange(0, C)
    channels = tl.arange(0, D)
    strength = tl.load(beta + tokens * num_heads, mask=is_token, other=0.0)
    _total, between, into, out, keep = load_decays(gate, rows, first, tokens, is_token, num_tokens, num_heads, C)
    tl.store(keeping + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), keep)
    k = load_unit(key, tokens, is_token, stride_key_t, channels, key_width, 1.0)
    store_tile(writing, k * out[:, None], tokens, is_token, num_heads * key_width, channels, key_width)
    stored = k.to(dtype)
    a = tl.dot(stored, tl.trans(stored), input_precision=PRECISION) * between * strength[:, None]
    a = tl.where(places[:, None] > places[None, :], a, 0.0)
    t = invert(a, C, PRECISION).to(dtype)
    if STORES_INVERSE:
        here = inverse + (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * C * C
        tl.store(here + places[:, None] * C + places[None, :], t)
    read = (k * (strength * into)[:, None]).to(dtype)
    store_tile(
        w, tl.dot(t, read, input_precision=PRECISION), tokens, is_token, num_heads * key_width, channels, key_width
    )
    for start in range(0, value_width, E):
        columns = start + tl.arange(0, E)
        v = load_tile(value, tokens, is_token, stride_value_t, columns, value_width).to(tl.float32)
        v = (v * strength[:, None]).to(dtype)
        solved = tl.dot(t, v, input_precision=PRECISION)
        store_tile(u, solved, tokens, is_token, num_heads * value_width, columns, value_width)


@kernel
@triton.jit
def _scan_kernel(
    u,
    w,
    writing,
    keeping,
    new,
    states,
    num_chunks,
    num_tokens,
    num_heads,
    key_width,
    value_width,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """From chunk to chunk: what is new of the values, U - W S, and the state S that a chunk begins with."""
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    of_head = batch * num_tokens * num_heads + tl.program_id(1) % num_heads
    u += of_head * value_width
    new += of_head * value_width
    w += of_head * key_width
    writing += of_head * key_width
    keeping += tl.program_id(1) * num_chunks
    states += tl.program_id(1).to(tl.int64) * num_chunks * key_width * value_width
    dtype = u.dtype.element_ty

    channels = tl.arange(0, D)
    columns = tl.program_id(0) * E + tl.arange(0, E)
    is_state = (channels < key_width)[:, None] & (columns < value_width)[None, :]
    state = tl.zeros([D, E], tl.float32)
    for chunk in range(num_chunks):
        tokens = chunk * C + tl.arange(0, C)
        is_token = tokens < num_tokens
        stored = state.to(dtype)
        tl.store(states + channels[:, None] * value_width + columns[None, :], stored, mask=is_state)
        states += key_width * value_width
        read = load_tile(w, tokens, is_token, num_heads * key_width, channels, key_width)
        solved = load_tile(u, tokens, is_token, num_heads * value_width, columns, value_width).to(tl.float32)
        written = (solved - tl.dot(read, stored, input_precision=PRECISION)).to(dtype)
        store_tile(new, written, tokens, is_token, num_heads * value_width, columns, value_width)
        k = load_tile(writing, tokens, is_token, num_heads * key_width, channels, key_width)
        keep = tl.load(keeping + chunk)
        state = state * keep + tl.dot(tl.trans(k), written, input_precision=PRECISION)


@kernel
@triton.jit
def _output_kernel(
    query,
    key,
    value,
    gate,
    beta,
    rows,
    new,
    states,
    output,
    scale,
    num_tokens,
    num_heads,
    heads_a_key,
    key_width,
    value_width,
    stride_query_b,
    stride_query_t,
    stride_query_h,
    stride_key_b,
    stride_key_t,
    stride_key_h,
    stride_value_b,
    stride_value_t,
    stride_value_h,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the queries read: of the state before the chunk, and of what is new in it."""
    first = tl.program_id(0) * C
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = tl.program_id(1) % num_heads
    query += batch * stride_query_b + (head // heads_a_key) * stride_query_h
    key += batch * stride_key_b + (head // heads_a_key) * stride_key_h
    gate += batch * num_tokens * num_heads + head
    rows += batch * num_tokens
    new += (batch * num_tokens * num_heads + head) * value_width
    output += (batch * num_tokens * num_heads + head) * value_width
    states += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * key_width * value_width
    dtype = value.dtype.element_ty

    tokens = first + tl.arange(0, C)
    is_token = tokens < num_tokens
    channels = tl.arange(0, D)
    _total, between, into, _out, _keep = load_decays(gate, rows, first, tokens, is_token, num_tokens, num_heads, C)
    q = load_unit(query, tokens, is_token, stride_query_t, channels, key_width, scale)
    k = load_unit(key, tokens, is_token, stride_key_t, channels, key_width, 1.0)
    seen = tl.dot(q.to(dtype), tl.trans(k.to(dtype)), input_precision=PRECISION)
    seen = (seen * between).to(dtype)
    q = (q * into[:, None]).to(dtype)
    for start in range(0, value_width, E):
        columns = start + tl.arange(0, E)
        is_state = (channels < key_width)[:, None] & (columns < value_width)[None, :]
        state = tl.load(states + channels[:, None] * value_width + columns[None, :], mask=is_state, other=0.0)
        written = load_tile(new, tokens, is_token, num_heads * value_width, columns, value_width)
        total = tl.dot(q, state, input_precision=PRECISION)
        total = tl.dot(seen, written, total, input_precision=PRECISION)
        store_tile(output, total, tokens, is_token, num_heads * value_width, columns, value_width)


@dataclass(frozen=True)
class Solved:
    """What the chunks' systems give.

    Attributes:
        u: [B, T, Hv, E].
        w: [B, T, Hv, D].
        writing: out K, with which new values are written to the state: [B, T, Hv, D].
        keeping: what is kept of the state: float32 [B * Hv, chunks].
        inverse: T, [B * Hv * chunks, CHUNK, CHUNK]; empty if it is not wanted.
    """

    u: Tensor
    w: Tensor
    writing: Tensor
    keeping: Tensor
    inverse: Tensor


def solve(chunks: Chunks, for_backward: bool = False) -> Solved:
    """Solve the systems of all chunks; T is returned for backward alone."""
    value = chunks.value
    num_chunks, num_heads = chunks.grid
    of_keys = (*value.shape[:3], chunks.key.shape[3])
    solved = Solved(
        u=value.new_empty(value.shape),
        w=value.new_empty(of_keys),
        writing=value.new_empty(of_keys),
        keeping=torch.empty(num_heads, num_chunks, dtype=torch.float32, device=value.device),
        inverse=value.new_empty(num_heads * num_chunks if for_backward else 0, CHUNK, CHUNK),
    )
    _system_kernel[chunks.grid](
        chunks.query,
        chunks.key,
        value,
        chunks.gate,
        chunks.beta,
        chunks.rows,
        solved.u,
        solved.w,
        solved.writing,
        solved.keeping,
        solved.inverse,
        STORES_INVERSE=for_backward,
        **SYSTEM.options(),
        **chunks.options(),
    )
    return solved


def scan(chunks: Chunks, solved: Solved, in_place: bool) -> tuple[Tensor, Tensor]:
    """What is new of the values [B, T, Hv, E], in place of U or beside it; and states [B * Hv, chunks, D, E]."""
    new = solved.u if in_place else torch.empty_like(solved.u)
    num_chunks, num_heads = chunks.grid
    states = new.new_empty(num_heads, num_chunks, chunks.key.shape[3], new.shape[3])
    _scan_kernel[(triton.cdiv(new.shape[3], SCAN.values), num_heads)](
        solved.u,
        solved.w,
        solved.writing,
        solved.keeping,
        new,
        states,
        num_chunks,
        **SCAN.options(),
        **chunks.sizes(),
    )
    return new, states


def forward(chunks: Chunks) -> Tensor:
    """The outputs [B, T, Hv, E] of the gated delta rule."""
    new, states = scan(chunks, solve(chunks), in_place=True)
    output = torch.empty_like(new)
    _output_kernel[chunks.grid](
        chunks.query,
        chunks.key,
        chunks.value,
        chunks.gate,
        chunks.beta,
        chunks.rows,
        new,
        states,
        output,
        chunks.key.shape[3] ** -0.5,
        **OUTPUT.options(),
        **chunks.options(),
    )
    return output
