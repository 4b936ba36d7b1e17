"""Triton kernels of the gated delta rule, backward. layers/recurrent/delta_rule.py has the algebra and the names.

What forward made of queries, keys and values is made again first: only these are kept. Nothing is added up by several
programs, so gradients repeat to the bit.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton
from qlora_fsdp.layers.kernels.triton_delta_rule import (
    Chunks,
    Tiles,
    load_decays,
    load_tile,
    load_unit,
    scan,
    solve,
    store_tile,
)

# The fastest on an H100 for heads of 128 channels (benchmarks/delta_rule.py).
PULL = Tiles(values=64, num_warps=4, num_stages=1)
REVERSE_SCAN = Tiles(values=32, num_warps=4, num_stages=2)
READ = Tiles(values=64, num_warps=8, num_stages=1)
WRITE = Tiles(values=64, num_warps=4, num_stages=1)
UNIT_ROWS = 32  # vectors of one program that takes gradients through the norm of queries and keys


@kernel
@triton.jit
def _pull_kernel(
    query,
    key,
    value,
    gate,
    beta,
    rows,
    grad_output,
    grad_new,
    reading,
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
    """The part of the new values' gradient that comes from outputs of the same chunk; and into Q, for the scan."""
    first = tl.program_id(0) * C
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = tl.program_id(1) % num_heads
    query += batch * stride_query_b + (head // heads_a_key) * stride_query_h
    key += batch * stride_key_b + (head // heads_a_key) * stride_key_h
    gate += batch * num_tokens * num_heads + head
    rows += batch * num_tokens
    grad_output += (batch * num_tokens * num_heads + head) * value_width
    grad_new += (batch * num_tokens * num_heads + head) * value_width
    reading += (batch * num_tokens * num_heads + head) * key_width
    dtype = value.dtype.element_ty

    tokens = first + tl.arange(0, C)
    is_token = tokens < num_tokens
    channels = tl.arange(0, D)
    _total, between, into, _out, _keep = load_decays(gate, rows, first, tokens, is_token, num_tokens, num_heads, C)
    q = load_unit(query, tokens, is_token, stride_query_t, channels, key_width, scale)
    store_tile(reading, q * into[:, None], tokens, is_token, num_heads * key_width, channels, key_width)
    q = q.to(dtype)
    k = load_unit(key, tokens, is_token, stride_key_t, channels, key_width, 1.0).to(dtype)
    seen = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * between).to(dtype)
    for start in range(0, value_width, E):
        columns = start + tl.arange(0, E)
        grad = load_tile(grad_output, tokens, is_token, num_heads * value_width, columns, value_width)
        pulled = tl.dot(tl.trans(seen), grad, input_precision=PRECISION)
        store_tile(grad_new, pulled, tokens, is_token, num_heads * value_width, columns, value_width)


@kernel
@triton.jit
def _reverse_scan_kernel(
    w,
    reading,
    writing,
    keeping,
    grad_output,
    grad_new,
    grad_states,
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
    """From the last chunk to the first: the gradient of the state behind each, and all of the new values' gradient."""
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    of_head = batch * num_tokens * num_heads + tl.program_id(1) % num_heads
    w += of_head * key_width
    reading += of_head * key_width
    writing += of_head * key_width
    keeping += tl.program_id(1) * num_chunks
    grad_output += of_head * value_width
    grad_new += of_head * value_width
    grad_states += (tl.program_id(1).to(tl.int64) + 1) * num_chunks * key_width * value_width
    dtype = w.dtype.element_ty

    channels = tl.arange(0, D)
    columns = tl.program_id(0) * E + tl.arange(0, E)
    is_state = (channels < key_width)[:, None] & (columns < value_width)[None, :]
    grad_state = tl.zeros([D, E], tl.float32)
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step
        tokens = chunk * C + tl.arange(0, C)
        is_token = tokens < num_tokens
        stored = grad_state.to(dtype)
        grad_states -= key_width * value_width
        tl.store(grad_states + channels[:, None] * value_width + columns[None, :], stored, mask=is_state)
        k = load_tile(writing, tokens, is_token, num_heads * key_width, channels, key_width)
        pulled = load_tile(grad_new, tokens, is_token, num_heads * value_width, columns, value_width).to(tl.float32)
        whole = (pulled + tl.dot(k, stored, input_precision=PRECISION)).to(dtype)
        store_tile(grad_new, whole, tokens, is_token, num_heads * value_width, columns, value_width)
        q = load_tile(reading, tokens, is_token, num_heads * key_width, channels, key_width)
        grad = load_tile(grad_output, tokens, is_token, num_heads * value_width, columns, value_width)
        read = load_tile(w, tokens, is_token, num_heads * key_width, channels, key_width)
        keep = tl.load(keeping + chunk)
        grad_state = grad_state * keep + tl.dot(tl.trans(q), grad, input_precision=PRECISION)
        grad_state -= tl.dot(tl.trans(read), whole, input_precision=PRECISION)


@kernel
@triton.jit
def _read_kernel(
    query,
    key,
    value,
    gate,
    beta,
    rows,
    new,
    states,
    grad_states,
    grad_output,
    grad_new,
    grad_query,
    grad_key,
    grad_w,
    grad_total,
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
    """Gradients of the queries, of W, and those of keys and decays that come from outputs and the next state."""
    first = tl.program_id(0) * C
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = tl.program_id(1) % num_heads
    query += batch * stride_query_b + (head // heads_a_key) * stride_query_h
    key += batch * stride_key_b + (head // heads_a_key) * stride_key_h
    gate += batch * num_tokens * num_heads + head
    rows += batch * num_tokens
    of_head = batch * num_tokens * num_heads + head
    new += of_head * value_width
    grad_output += of_head * value_width
    grad_new += of_head * value_width
    grad_query += of_head * key_width
    grad_key += of_head * key_width
    grad_w += of_head * key_width
    grad_total += of_head
    state_place = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * key_width * value_width
    states += state_place
    grad_states += state_place
    dtype = value.dtype.element_ty

    tokens = first + tl.arange(0, C)
    is_token = tokens < num_tokens
    channels = tl.arange(0, D)
    grad_seen = tl.zeros([C, C], tl.float32)
    grad_reading = tl.zeros([C, D], tl.float32)  # of the queries, as the state before the chunk is read
    grad_writing = tl.zeros([C, D], tl.float32)  # of the keys, as the state behind the chunk is written
    grad_solved = tl.zeros([C, D], tl.float32)  # of W
    grad_keep = 0.0
    for start in range(0, value_width, E):
        columns = start + tl.arange(0, E)
        is_state = (channels < key_width)[:, None] & (columns < value_width)[None, :]
        places = channels[:, None] * value_width + columns[None, :]
        grad = load_tile(grad_output, tokens, is_token, num_heads * value_width, columns, value_width)
        written = load_tile(new, tokens, is_token, num_heads * value_width, columns, value_width)
        grad_seen = tl.dot(grad, tl.trans(written), grad_seen, input_precision=PRECISION)
        state = tl.load(states + places, mask=is_state, other=0.0)
        grad_reading = tl.dot(grad, tl.trans(state), grad_reading, input_precision=PRECISION)
        grad_written = load_tile(grad_new, tokens, is_token, num_heads * value_width, columns, value_width)
        grad_solved = tl.dot(grad_written, tl.trans(state), grad_solved, input_precision=PRECISION)
        grad_state = tl.load(grad_states + places, mask=is_state, other=0.0)
        grad_writing = tl.dot(written, tl.trans(grad_state), grad_writing, input_precision=PRECISION)
        grad_keep += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32))
    store_tile(grad_w, -grad_solved, tokens, is_token, num_heads * key_width, channels, key_width)

    _total, between, into, out, keep = load_decays(gate, rows, first, tokens, is_token, num_tokens, num_heads, C)
    q = load_unit(query, tokens, is_token, stride_query_t, channels, key_width, scale)
    k = load_unit(key, tokens, is_token, stride_key_t, channels, key_width, 1.0)
    grad_reading *= into[:, None]
    grad_writing *= out[:, None]
    read = tl.sum(grad_reading * q, 1)
    written_from = tl.sum(grad_writing * k, 1)
    q = q.to(dtype)
    k = k.to(dtype)
    grad_product = grad_seen * between
    of_decays = grad_product * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    grad_product = grad_product.to(dtype)
    grad_q = tl.dot(grad_product, k, grad_reading, input_precision=PRECISION)
    grad_k = tl.dot(tl.trans(grad_product), q, grad_writing, input_precision=PRECISION)
    store_tile(grad_query, grad_q, tokens, is_token, num_heads * key_width, channels, key_width)
    store_tile(grad_key, grad_k, tokens, is_token, num_heads * key_width, channels, key_width)
    # The sum of the gate up to a token raises what it reads, and lowers what is read of it.
    of_total = tl.sum(of_decays, 1) - tl.sum(of_decays, 0) + read - written_from
    whole = tl.sum(written_from, 0) + grad_keep * keep
    is_last = tl.arange(0, C) == C - 1
    of_total = tl.where(is_last, of_total + whole, of_total)
    # Beyond the end the gate is 0, and so the sum there is the last token's: the last of the chunk takes it over.
    end = tl.minimum(C, num_tokens - first) - 1
    beyond = tl.sum(tl.where(tl.arange(0, C) > end, of_total, 0.0), 0)
    of_total = tl.where(tl.arange(0, C) == end, of_total + beyond, of_total)
    tl.store(grad_total + tokens * num_heads, of_total, mask=is_token)


@kernel
@triton.jit
def _write_kernel(
    query,
    key,
    value,
    gate,
    beta,
    rows,
    u,
    w,
    inverse,
    grad_new,
    grad_w,
    grad_key,
    grad_value,
    grad_total,
    grad_gate,
    grad_beta,
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
    """Gradients through T: of the values, of beta, the rest of the keys' and of the gate's."""
    first = tl.program_id(0) * C
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = tl.program_id(1) % num_heads
    key += batch * stride_key_b + (head // heads_a_key) * stride_key_h
    value += batch * stride_value_b + head * stride_value_h
    of_head = batch * num_tokens * num_heads + head
    gate += of_head
    beta += of_head
    rows += batch * num_tokens
    u += of_head * value_width
    w += of_head * key_width
    grad_new += of_head * value_width
    grad_value += of_head * value_width
    grad_w += of_head * key_width
    grad_key += of_head * key_width
    grad_total += of_head
    grad_gate += of_head
    grad_beta += of_head
    inverse += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * C * C
    dtype = value.dtype.element_ty

    places = tl.arange(0, C)
    tokens = first + places
    is_token = tokens < num_tokens
    channels = tl.arange(0, D)
    strength = tl.load(beta + tokens * num_heads, mask=is_token, other=0.0)
    back = tl.trans(tl.load(inverse + places[:, None] * C + places[None, :]))
    grad_a = tl.zeros([C, C], tl.float32)
    of_beta = tl.zeros([C], tl.float32)
    for start in range(0, value_width, E):
        columns = start + tl.arange(0, E)
        grad = load_tile(grad_new, tokens, is_token, num_heads * value_width, columns, value_width)
        solved = load_tile(u, tokens, is_token, num_heads * value_width, columns, value_width)
        v = load_tile(value, tokens, is_token, stride_value_t, columns, value_width).to(tl.float32)
        pulled = tl.dot(back, grad, input_precision=PRECISION)
        of_beta += tl.sum(pulled * v, 1)
        scaled = pulled * strength[:, None]
        store_tile(grad_value, scaled, tokens, is_token, num_heads * value_width, columns, value_width)
        grad_a -= tl.dot(pulled.to(dtype), tl.trans(solved), input_precision=PRECISION)
    grad = load_tile(grad_w, tokens, is_token, num_heads * key_width, channels, key_width)
    pulled = tl.dot(back, grad, input_precision=PRECISION)
    solved = load_tile(w, tokens, is_token, num_heads * key_width, channels, key_width)
    grad_a -= tl.dot(pulled.to(dtype), tl.trans(solved), input_precision=PRECISION)

    _total, between, into, _out, _keep = load_decays(gate, rows, first, tokens, is_token, num_tokens, num_heads, C)
    k = load_unit(key, tokens, is_token, stride_key_t, channels, key_width, 1.0)
    read = into * tl.sum(pulled * k, 1)
    stored = k.to(dtype)
    grad_a = tl.where(places[:, None] > places[None, :], grad_a * between, 0.0)
    of_product = grad_a * tl.dot(stored, tl.trans(stored), input_precision=PRECISION)
    of_beta += read + tl.sum(of_product, 1)
    tl.store(grad_beta + tokens * num_heads, of_beta, mask=is_token)
    of_product *= strength[:, None]
    grad_a = (grad_a * strength[:, None]).to(dtype)
    grad_k = load_tile(grad_key, tokens, is_token, num_heads * key_width, channels, key_width).to(tl.float32)
    grad_k += pulled * (strength * into)[:, None]
    grad_k = tl.dot(grad_a, stored, grad_k, input_precision=PRECISION)
    grad_k = tl.dot(tl.trans(grad_a), stored, grad_k, input_precision=PRECISION)
    store_tile(grad_key, grad_k, tokens, is_token, num_heads * key_width, channels, key_width)
    of_total = tl.load(grad_total + tokens * num_heads, mask=is_token, other=0.0)
    of_total += tl.sum(of_product, 1) - tl.sum(of_product, 0) + strength * read
    # The gate of a token is in the sums of all that follow it in the chunk.
    of_gate = tl.sum(of_total, 0) - tl.cumsum(of_total, 0) + of_total
    tl.store(grad_gate + tokens * num_heads, of_gate, mask=is_token)


@kernel
@triton.jit
def _unit_kernel(
    x,
    grad_unit,
    grad,
    scale,
    num_tokens,
    num_vectors,
    num_keys,
    heads_a_key,
    width,
    stride_b,
    stride_t,
    stride_h,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """Through x / |x| * scale, of vectors that several heads of the values have used."""
    vectors = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_vector = vectors < num_vectors
    token = (vectors // num_keys).to(tl.int64)
    head = vectors % num_keys
    channels = tl.arange(0, D)
    is_channel = is_vector[:, None] & (channels < width)[None, :]
    start = (token // num_tokens) * stride_b + (token % num_tokens) * stride_t + head * stride_h
    tile = tl.load(x + start[:, None] + channels[None, :], mask=is_channel, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, D], tl.float32)
    first = (token * num_keys + head) * heads_a_key * width
    for each in range(heads_a_key):
        places = (first + each * width)[:, None] + channels[None, :]
        total += tl.load(grad_unit + places, mask=is_channel, other=0.0).to(tl.float32)
    length = 1.0 / tl.sqrt(tl.sum(tile * tile, 1) + 1e-6)
    unit = tile * length[:, None]
    along = tl.sum(unit * total, 1)
    result = (total - unit * along[:, None]) * (length * scale)[:, None]
    places = (token * num_keys + head)[:, None] * width + channels[None, :]
    tl.store(grad + places, result.to(grad.dtype.element_ty), mask=is_channel)


def backward(chunks: Chunks, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value (their shapes and dtypes), gate and beta (float32 [B, T, Hv]).

    Args:
        chunks: what forward got.
        grad_output: [B, T, Hv, E], contiguous.
    """
    inputs = (chunks.query, chunks.key, chunks.value, chunks.gate, chunks.beta, chunks.rows)
    scale = chunks.key.shape[3] ** -0.5
    options = chunks.options()
    num_chunks, num_heads = chunks.grid
    solved = solve(chunks, for_backward=True)
    new, states = scan(chunks, solved, in_place=False)
    grad_new = torch.empty_like(new)
    reading = torch.empty_like(solved.w)
    _pull_kernel[chunks.grid](*inputs, grad_output, grad_new, reading, scale, **PULL.options(), **options)
    grad_states = torch.empty_like(states)
    _reverse_scan_kernel[(triton.cdiv(chunks.value.shape[3], REVERSE_SCAN.values), num_heads)](
        solved.w,
        reading,
        solved.writing,
        solved.keeping,
        grad_output,
        grad_new,
        grad_states,
        num_chunks,
        **REVERSE_SCAN.options(),
        **chunks.sizes(),
    )
    del reading
    grad_query = torch.empty_like(solved.w)
    grad_key = torch.empty_like(solved.w)
    grad_w = torch.empty_like(solved.w)
    grad_total = torch.empty_like(chunks.gate)
    _read_kernel[chunks.grid](
        *inputs,
        new,
        states,
        grad_states,
        grad_output,
        grad_new,
        grad_query,
        grad_key,
        grad_w,
        grad_total,
        scale,
        **READ.options(),
        **options,
    )
    del new, states, grad_states
    grad_value = torch.empty_like(solved.u)
    grad_gate = torch.empty_like(grad_total)
    grad_beta = torch.empty_like(grad_total)
    _write_kernel[chunks.grid](
        *inputs,
        solved.u,
        solved.w,
        solved.inverse,
        grad_new,
        grad_w,
        grad_key,
        grad_value,
        grad_total,
        grad_gate,
        grad_beta,
        **WRITE.options(),
        **options,
    )
    of_query = _through_norm(chunks.query, grad_query, scale)
    of_key = _through_norm(chunks.key, grad_key, 1.0)
    return of_query, of_key, grad_value, grad_gate, grad_beta


def _through_norm(x: Tensor, grad_unit: Tensor, scale: float) -> Tensor:
    """The gradient of x [B, T, Hk, D] from that of its unit vectors, by head of the values [B, T, Hv, D]."""
    grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_vectors = x.shape[0] * x.shape[1] * x.shape[2]
    _unit_kernel[(triton.cdiv(num_vectors, UNIT_ROWS),)](
        x,
        grad_unit,
        grad,
        scale,
        x.shape[1],
        num_vectors,
        x.shape[2],
        grad_unit.shape[2] // x.shape[2],
        x.shape[3],
        *x.stride()[:3],
        ROWS=UNIT_ROWS,
        D=triton.next_power_of_2(x.shape[3]),
        num_warps=4,
    )
    return grad
