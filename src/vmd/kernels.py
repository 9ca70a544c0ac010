"""Attention as GPU kernels that know what it sees. Needs Triton, which GPU builds of torch bring along.

Over the doubled sequence [xt ; x0] a tile of queries reads its own noisy block and the clean blocks before it, and nothing
else: a quarter of what a dense mask makes. Over a short sequence that is one block, a head's keys and values are loaded
once, and rotary positions are turned while that is done; of the doubled sequence many tiles read the same keys, so queries
and keys are turned before. The backward pass makes the scores again instead of keeping them (as FlashAttention does: Dao et
al. 2022).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
NOTHING = -1e30  # a score that adds nothing; finite, so that rows which have seen nothing yet stay numbers


@triton.jit
def load_turned(base, rows, positions, ok, cos, sin, ROW: tl.constexpr, HALF: tl.constexpr):
    """Both halves of some rows (n, D / 2), turned by their positions."""
    columns = tl.arange(0, HALF)
    at = rows[:, None] * ROW + columns[None, :]
    first = tl.load(base + at, mask=ok[:, None], other=0.0).to(tl.float32)
    second = tl.load(base + at + HALF, mask=ok[:, None], other=0.0).to(tl.float32)
    angle = positions[:, None] * HALF + columns[None, :]
    c = tl.load(cos + angle, mask=ok[:, None], other=0.0)
    s = tl.load(sin + angle, mask=ok[:, None], other=0.0)
    return first * c - second * s, first * s + second * c


@triton.jit
def load_rows(base, rows, ok, ROW: tl.constexpr, D: tl.constexpr):
    at = rows[:, None] * ROW + tl.arange(0, D)[None, :]
    return tl.load(base + at, mask=ok[:, None], other=0.0)


@triton.jit
def store_turned_back(base, rows, positions, ok, cos, sin, first, second, ROW: tl.constexpr, HALF: tl.constexpr):
    columns = tl.arange(0, HALF)
    angle = positions[:, None] * HALF + columns[None, :]
    c = tl.load(cos + angle, mask=ok[:, None], other=0.0)
    s = tl.load(sin + angle, mask=ok[:, None], other=0.0)
    at = rows[:, None] * ROW + columns[None, :]
    kind = base.dtype.element_ty
    tl.store(base + at, (first * c + second * s).to(kind), mask=ok[:, None])
    tl.store(base + at + HALF, (second * c - first * s).to(kind), mask=ok[:, None])


@triton.jit
def turn_kernel(
    qkv, cos, sin, turned, rows, length, scale, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Queries and keys of some tokens (B 2L, 2 H D), turned, the halves of a head interleaved, and queries scaled.

    Done once, because every tile of queries would turn all the keys it sees anew.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.arange(0, C)[None, :]  # of the H D pairs of queries and keys
    ok = (row < rows)[:, None] & (column < H * D)
    head, half = column // (D // 2), column % (D // 2)
    first = qkv + row[:, None] * (3 * H * D) + head * D + half
    a = tl.load(first, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(first + D // 2, mask=ok, other=0.0).to(tl.float32)
    angle = (row % length)[:, None] * (D // 2) + half
    by = tl.where(head < H, scale, 1.0)
    c, s = tl.load(cos + angle, mask=ok, other=0.0) * by, tl.load(sin + angle, mask=ok, other=0.0) * by
    both = tl.reshape(tl.join(a * c - b * s, a * s + b * c), (BM, 2 * C))
    to = tl.arange(0, 2 * C)[None, :]
    there = (row < rows)[:, None] & (to < 2 * H * D)
    tl.store(turned + row[:, None] * (2 * H * D) + to, both.to(turned.dtype.element_ty), mask=there)


@triton.jit
def visible(query_block, key_block, same: tl.constexpr, ahead):
    """Queries of a block see keys of the same block, or of blocks before `query_block + ahead`."""
    if same:
        return query_block[:, None] == key_block[None, :]
    else:
        return key_block[None, :] < query_block[:, None] + ahead


@triton.jit
def absorb(
    acc, top, total, q, query_block, keys, values, first_key, stream, last, ahead, same: tl.constexpr,
    masked: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile of keys and values, into a running softmax in base 2."""
    positions = first_key + tl.arange(0, BN)
    ok = positions < last
    k, v = load_rows(keys, stream + positions, ok, 2 * W, D), load_rows(values, stream + positions, ok, 3 * W, D)
    scores = tl.dot(q, tl.trans(k))
    if masked:
        seen = visible(query_block, positions // R, same, ahead) & ok[None, :]
        scores = tl.where(seen, scores, NOTHING_IN_KERNEL)
    higher = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
    return acc, higher, total * shrink + tl.sum(p, 1)


NOTHING_IN_KERNEL: tl.constexpr = tl.constexpr(NOTHING)


@triton.jit
def forward_kernel(
    qkv, turned, out, lse, length, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, OWN: tl.constexpr,
    NOISY_ONLY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head of one sequence."""
    W: tl.constexpr = H * D
    tiles = tl.cdiv(length, BM)
    clean = tl.program_id(1) // tiles
    first = tl.program_id(1) % tiles * BM
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    token = batch.to(tl.int64) * (2 * length)
    asked, values = turned + token * (2 * W) + head * D, qkv + token * (3 * W) + 2 * W + head * D
    keys = asked + W
    queries = 1 if NOISY_ONLY else 2
    positions = first + tl.arange(0, BM)
    ok = positions < length
    rows = clean * length + positions
    q = load_rows(asked, rows, ok, 2 * W, D)
    query_block = positions // R
    acc = tl.zeros([BM, D], tl.float32)
    top = tl.full([BM], NOTHING_IN_KERNEL, tl.float32)
    total = tl.zeros([BM], tl.float32)
    first_block, last_block = first // R, (tl.minimum(first + BM, length) - 1) // R
    if clean == 0:  # a noisy block sees itself
        end = tl.minimum((last_block + 1) * R, length)
        for key in range(first_block * R, end, BN):
            acc, top, total = absorb(
                acc, top, total, q, query_block, keys, values, key, 0, end, 0, True, True, R, W, D, BN
            )  # fmt: skip
    ahead = tl.where(clean == 1, 1, 1 if OWN else 0)  # whether the clean copy of the block itself is seen
    whole = (first_block + ahead) * R // BN * BN  # every query of the tile sees all keys before
    end = tl.minimum((last_block + ahead) * R, length)
    whole = tl.minimum(whole, end // BN * BN)
    for key in range(0, whole, BN):
        acc, top, total = absorb(
            acc, top, total, q, query_block, keys, values, key, length, end, ahead, False, False, R, W, D, BN
        )  # fmt: skip
    for key in range(whole, end, BN):
        acc, top, total = absorb(
            acc, top, total, q, query_block, keys, values, key, length, end, ahead, False, True, R, W, D, BN
        )  # fmt: skip
    acc = acc / total[:, None]
    out_rows = batch.to(tl.int64) * (queries * length) + rows
    at = out_rows[:, None] * W + head * D + tl.arange(0, D)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=ok[:, None])
    tl.store(lse + tl.program_id(0).to(tl.int64) * (queries * length) + rows, top + tl.log2(total), mask=ok)


@triton.jit
def add_to_dq(
    dq, q, do, lse, delta, query_block, keys, values, first_key, stream, last, ahead, same: tl.constexpr,
    masked: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    positions = first_key + tl.arange(0, BN)
    ok = positions < last
    k, v = load_rows(keys, stream + positions, ok, 2 * W, D), load_rows(values, stream + positions, ok, 3 * W, D)
    p = tl.exp2(tl.dot(q, tl.trans(k)) - lse[:, None])
    if masked:
        seen = visible(query_block, positions // R, same, ahead) & ok[None, :]
        p = tl.where(seen, p, 0.0)
    return dq + tl.dot((p * (tl.dot(do, tl.trans(v)) - delta[:, None])).to(q.dtype), k)


@triton.jit
def query_gradient_kernel(
    qkv, turned, cos, sin, out, dout, lse, delta, dqkv, length, scale, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    OWN: tl.constexpr, NOISY_ONLY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of queries; also writes delta, the sum of out * dout, for the keys' kernel."""
    W: tl.constexpr = H * D
    tiles = tl.cdiv(length, BM)
    clean = tl.program_id(1) // tiles
    first = tl.program_id(1) % tiles * BM
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    token = batch.to(tl.int64) * (2 * length)
    asked, values = turned + token * (2 * W) + head * D, qkv + token * (3 * W) + 2 * W + head * D
    keys = asked + W
    queries = 1 if NOISY_ONLY else 2
    positions = first + tl.arange(0, BM)
    ok = positions < length
    rows = clean * length + positions
    q = load_rows(asked, rows, ok, 2 * W, D)
    out_base = batch.to(tl.int64) * (queries * length * W) + head * D
    do = load_rows(dout + out_base, rows, ok, W, D)
    o = load_rows(out + out_base, rows, ok, W, D)
    my_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = tl.program_id(0).to(tl.int64) * (queries * length) + rows
    tl.store(delta + at, my_delta, mask=ok)
    my_lse = tl.load(lse + at, mask=ok, other=0.0)
    query_block = positions // R
    dq = tl.zeros([BM, D], tl.float32)
    first_block, last_block = first // R, (tl.minimum(first + BM, length) - 1) // R
    if clean == 0:
        end = tl.minimum((last_block + 1) * R, length)
        for key in range(first_block * R, end, BN):
            dq = add_to_dq(
                dq, q, do, my_lse, my_delta, query_block, keys, values, key, 0, end, 0, True, True, R, W, D, BN
            )  # fmt: skip
    ahead = tl.where(clean == 1, 1, 1 if OWN else 0)
    end = tl.minimum((last_block + ahead) * R, length)
    whole = tl.minimum((first_block + ahead) * R // BN * BN, end // BN * BN)
    for key in range(0, whole, BN):
        dq = add_to_dq(
            dq, q, do, my_lse, my_delta, query_block, keys, values, key, length, end, ahead, False, False, R, W, D, BN
        )  # fmt: skip
    for key in range(whole, end, BN):
        dq = add_to_dq(
            dq, q, do, my_lse, my_delta, query_block, keys, values, key, length, end, ahead, False, True, R, W, D, BN
        )  # fmt: skip
    to = dqkv + token * (3 * W) + head * D
    dq1, dq2 = tl.split(tl.reshape(dq * (scale / LOG2_E_IN_KERNEL), (BM, D // 2, 2)))
    store_turned_back(to, rows, positions, ok, cos, sin, dq1, dq2, 3 * W, D // 2)


LOG2_E_IN_KERNEL: tl.constexpr = tl.constexpr(LOG2_E)


@triton.jit
def add_to_dkv(
    dk, dv, k, v, key_block, asked, dout, lse, delta, first_query, stream, length, ahead, same: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    positions = first_query + tl.arange(0, BM)
    ok = positions < length
    rows = stream + positions
    q, do = load_rows(asked, rows, ok, 2 * W, D), load_rows(dout, rows, ok, W, D)
    my_lse = tl.load(lse + rows, mask=ok, other=0.0)
    my_delta = tl.load(delta + rows, mask=ok, other=0.0)
    scores = tl.dot(k, tl.trans(q))  # (keys, queries)
    seen = tl.trans(visible(positions // R, key_block, same, ahead)) & ok[None, :]
    p = tl.where(seen, tl.exp2(scores - my_lse[None, :]), 0.0)
    dv += tl.dot(p.to(do.dtype), do)
    ds = (p * (tl.dot(v, tl.trans(do)) - my_delta[None, :])).to(q.dtype)
    return dk + tl.dot(ds, q), dv


@triton.jit
def key_gradient_kernel(
    qkv, turned, cos, sin, dout, lse, delta, dqkv, length, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    OWN: tl.constexpr, NOISY_ONLY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values."""
    W: tl.constexpr = H * D
    tiles = tl.cdiv(length, BN)
    clean = tl.program_id(1) // tiles
    first = tl.program_id(1) % tiles * BN
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    token = batch.to(tl.int64) * (2 * length)
    asked = turned + token * (2 * W) + head * D
    queries = 1 if NOISY_ONLY else 2
    dout_base = dout + batch.to(tl.int64) * (queries * length * W) + head * D
    at = tl.program_id(0).to(tl.int64) * (queries * length)
    lse_base, delta_base = lse + at, delta + at
    positions = first + tl.arange(0, BN)
    ok = positions < length
    rows = clean * length + positions
    k = load_rows(asked + W, rows, ok, 2 * W, D)
    v = load_rows(qkv + token * (3 * W) + 2 * W + head * D, rows, ok, 3 * W, D)
    key_block = positions // R
    dk, dv = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
    first_block, last_block = first // R, (tl.minimum(first + BN, length) - 1) // R
    if clean == 0:  # seen by its own noisy block alone
        for query in range(first_block * R, tl.minimum((last_block + 1) * R, length), BM):
            dk, dv = add_to_dkv(
                dk, dv, k, v, key_block, asked, dout_base, lse_base, delta_base, query, 0, length, 0, True, R, W, D, BM
            )  # fmt: skip
    else:
        ahead = 1 if OWN else 0
        for query in range((first_block + 1 - ahead) * R, length, BM):
            dk, dv = add_to_dkv(
                dk, dv, k, v, key_block, asked, dout_base, lse_base, delta_base, query, 0, length, ahead, False, R, W, D, BM
            )  # fmt: skip
        if not NOISY_ONLY:
            for query in range(first_block * R, length, BM):
                dk, dv = add_to_dkv(
                    dk, dv, k, v, key_block, asked, dout_base, lse_base, delta_base, query, length, length, 1, False, R, W,
                    D, BM,
                )  # fmt: skip
    to = dqkv + token * (3 * W) + W + head * D
    dk1, dk2 = tl.split(tl.reshape(dk * (1 / LOG2_E_IN_KERNEL), (BN, D // 2, 2)))
    store_turned_back(to, rows, positions, ok, cos, sin, dk1, dk2, 3 * W, D // 2)
    at_v = to + W + rows[:, None] * (3 * W) + tl.arange(0, D)[None, :]
    tl.store(at_v, dv.to(dqkv.dtype.element_ty), mask=ok[:, None])


# Queries and keys of a tile, warps and stages, by kernel and size of a head: for heads of 32 the fastest on an H200 at 256
# tokens; not tuned for others.
TILES = {
    "forward": {32: (64, 32, 4, 3), 64: (64, 32, 4, 3), 128: (64, 32, 8, 3)},
    "queries": {32: (128, 32, 4, 3), 64: (64, 64, 4, 2), 128: (64, 32, 8, 3)},
    "keys": {32: (32, 64, 4, 3), 64: (32, 64, 4, 3), 128: (32, 64, 8, 2)},  # 3 stages of float32 do not fit
}


def tile_sizes(kernel: str, head_dim: int) -> dict[str, int]:
    return dict(zip(("BM", "BN", "num_warps", "num_stages"), TILES[kernel][head_dim], strict=True))


@torch.library.custom_op("vmd::doubled_attention", mutates_args=())
def doubled_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, block_size: int, own_clean_block: bool, noisy_only: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed projections (B, 2L, 3 H D) and the rotary table (L, D / 2) -> (B, 2L or L, H D), and what backward needs."""
    batch, both, width = qkv.shape
    length, head_dim = both // 2, width // (3 * heads)
    queries = length if noisy_only else both
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    turned = qkv.new_empty(batch, both, 2 * heads * head_dim)
    tokens, columns = batch * both, triton.next_power_of_2(heads * head_dim)
    sizes = {"H": heads, "D": head_dim, "C": columns, "BM": max(1, 2048 // columns)}
    grid = (triton.cdiv(tokens, sizes["BM"]),)
    turn_kernel[grid](qkv, cos, sin, turned, tokens, length, head_dim**-0.5 * LOG2_E, **sizes)
    out = qkv.new_empty(batch, queries, heads * head_dim)
    lse = torch.empty(batch * heads, queries, device=qkv.device, dtype=torch.float32)
    sizes = tile_sizes("forward", head_dim)
    tiles = triton.cdiv(length, sizes["BM"]) * (1 if noisy_only else 2)
    forward_kernel[(batch * heads, tiles)](  # the first axis of a grid is the long one
        qkv, turned, out, lse, length, H=heads, D=head_dim, R=block_size, OWN=own_clean_block, NOISY_ONLY=noisy_only, **sizes
    )  # fmt: skip
    return out, lse, turned


@doubled_attention.register_fake
def _(qkv, cos, sin, heads, block_size, own_clean_block, noisy_only):
    batch, both, width = qkv.shape
    queries = both // 2 if noisy_only else both
    lse = qkv.new_empty(batch * heads, queries, dtype=torch.float32)
    return qkv.new_empty(batch, queries, width // 3), lse, qkv.new_empty(batch, both, width // 3 * 2)


@torch.library.custom_op("vmd::doubled_attention_backward", mutates_args=())
def doubled_attention_backward(
    qkv: Tensor, cos: Tensor, sin: Tensor, out: Tensor, dout: Tensor, lse: Tensor, turned: Tensor, heads: int,
    block_size: int, own_clean_block: bool, noisy_only: bool,
) -> Tensor:  # fmt: skip
    batch, both, width = qkv.shape
    length, head_dim = both // 2, width // (3 * heads)
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    dqkv = torch.zeros_like(qkv) if noisy_only else torch.empty_like(qkv)  # the clean queries were not asked
    delta = torch.empty_like(lse)
    same = {"H": heads, "D": head_dim, "R": block_size, "OWN": own_clean_block, "NOISY_ONLY": noisy_only}
    scale = head_dim**-0.5 * LOG2_E
    sizes = tile_sizes("queries", head_dim)
    grid = (batch * heads, triton.cdiv(length, sizes["BM"]) * (1 if noisy_only else 2))
    query_gradient_kernel[grid](qkv, turned, cos, sin, out, dout, lse, delta, dqkv, length, scale, **same, **sizes)
    sizes = tile_sizes("keys", head_dim)
    grid = (batch * heads, 2 * triton.cdiv(length, sizes["BN"]))
    key_gradient_kernel[grid](qkv, turned, cos, sin, dout, lse, delta, dqkv, length, **same, **sizes)
    return dqkv


@doubled_attention_backward.register_fake
def _(qkv, cos, sin, out, dout, lse, turned, heads, block_size, own_clean_block, noisy_only):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def keep_for_backward(ctx, inputs, output) -> None:
    qkv, cos, sin, *ctx.settings = inputs
    ctx.save_for_backward(qkv, cos, sin, *output)


def backward(ctx, dout: Tensor, *_):
    qkv, cos, sin, out, lse, turned = ctx.saved_tensors
    dqkv = doubled_attention_backward(qkv, cos, sin, out, dout.contiguous(), lse, turned, *ctx.settings)
    return dqkv, None, None, None, None, None, None


doubled_attention.register_autograd(backward, setup_context=keep_for_backward)


# One block: every token sees every other.


@triton.jit
def load_keys_and_values(base, keys, there, cos, sin, H: tl.constexpr, D: tl.constexpr):
    ROW: tl.constexpr = 3 * H * D
    kind = base.dtype.element_ty
    k1, k2 = load_turned(base + H * D, keys, keys, there, cos, sin, ROW, D // 2)
    return k1.to(kind), k2.to(kind), load_rows(base + 2 * H * D, keys, there, ROW, D)


@triton.jit
def whole_forward_kernel(
    qkv, cos, sin, out, length, scale, H: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """One head of one sequence: keys and values stay, queries come in tiles."""
    ROW: tl.constexpr = 3 * H * D
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    base = qkv + batch.to(tl.int64) * (length * ROW) + head * D
    kind = qkv.dtype.element_ty
    keys = tl.arange(0, KEYS)
    there = keys < length
    k1, k2, v = load_keys_and_values(base, keys, there, cos, sin, H, D)
    to = out + batch.to(tl.int64) * (length * H * D) + head * D
    for first in range(0, length, BM):
        rows = first + tl.arange(0, BM)
        ok = rows < length
        q1, q2 = load_turned(base, rows, rows, ok, cos, sin, ROW, D // 2)
        scores = tl.dot((q1 * scale).to(kind), tl.trans(k1)) + tl.dot((q2 * scale).to(kind), tl.trans(k2))
        scores = tl.where(there[None, :], scores, NOTHING_IN_KERNEL)
        p = tl.exp2(scores - tl.max(scores, 1)[:, None])
        p = p / tl.sum(p, 1)[:, None]
        at = rows[:, None] * (H * D) + tl.arange(0, D)[None, :]
        tl.store(to + at, tl.dot(p.to(kind), v).to(kind), mask=ok[:, None])


@triton.jit
def whole_backward_kernel(
    qkv, cos, sin, dout, dqkv, length, scale, H: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """The same for all three gradients; whole rows of scores are here, so nothing of the forward pass need be kept."""
    ROW: tl.constexpr = 3 * H * D
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    place = batch.to(tl.int64) * (length * ROW) + head * D
    base = qkv + place
    kind = qkv.dtype.element_ty
    keys = tl.arange(0, KEYS)
    there = keys < length
    k1, k2, v = load_keys_and_values(base, keys, there, cos, sin, H, D)
    dk1 = tl.zeros([KEYS, D // 2], tl.float32)
    dk2 = tl.zeros([KEYS, D // 2], tl.float32)
    dv = tl.zeros([KEYS, D], tl.float32)
    dout_base = dout + batch.to(tl.int64) * (length * H * D) + head * D
    for first in range(0, length, BM):
        rows = first + tl.arange(0, BM)
        ok = rows < length
        q1, q2 = load_turned(base, rows, rows, ok, cos, sin, ROW, D // 2)
        q1, q2 = (q1 * scale).to(kind), (q2 * scale).to(kind)
        do = load_rows(dout_base, rows, ok, H * D, D)
        scores = tl.dot(k1, tl.trans(q1)) + tl.dot(k2, tl.trans(q2))  # (keys, queries)
        scores = tl.where(there[:, None], scores, NOTHING_IN_KERNEL)
        p = tl.exp2(scores - tl.max(scores, 0)[None, :])
        p = p / tl.sum(p, 0)[None, :]
        dp = tl.dot(v, tl.trans(do))
        ds = (p * (dp - tl.sum(p * dp, 0)[None, :])).to(kind)
        dv += tl.dot(p.to(kind), do)
        dk1 += tl.dot(ds, q1)
        dk2 += tl.dot(ds, q2)
        back = scale / LOG2_E_IN_KERNEL
        dq1, dq2 = tl.dot(tl.trans(ds), k1) * back, tl.dot(tl.trans(ds), k2) * back
        store_turned_back(dqkv + place, rows, rows, ok, cos, sin, dq1, dq2, ROW, D // 2)
    unscale = 1 / LOG2_E_IN_KERNEL
    store_turned_back(dqkv + place + H * D, keys, keys, there, cos, sin, dk1 * unscale, dk2 * unscale, ROW, D // 2)
    to = dqkv + place + 2 * H * D + keys[:, None] * ROW + tl.arange(0, D)[None, :]
    tl.store(to, dv.to(kind), mask=there[:, None])


# Queries of a tile, warps, stages, up to 128 keys and for more: the fastest on an H200 at 81 and 164 tokens, heads of 32.
# Larger heads, which are not tuned, have too many registers for four warps backward.
WHOLE_TILES = {"forward": ((64, 4, 1), (64, 4, 2)), "backward": ((32, 4, 2), (64, 8, 2))}


def whole_sizes(kernel: str, length: int, heads: int, head_dim: int) -> dict[str, int]:
    keys = max(16, triton.next_power_of_2(length))
    queries, warps, stages = WHOLE_TILES[kernel][keys > 128]
    warps = 8 if kernel == "backward" and head_dim > 32 else warps
    return {"H": heads, "D": head_dim, "KEYS": keys, "BM": queries, "num_warps": warps, "num_stages": stages}


@torch.library.custom_op("vmd::whole_attention", mutates_args=())
def whole_attention(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Packed projections (B, L, 3 H D) and the rotary table (L, D / 2) -> (B, L, H D)."""
    batch, length, width = qkv.shape
    head_dim = width // (3 * heads)
    out = qkv.new_empty(batch, length, width // 3)
    sizes = whole_sizes("forward", length, heads, head_dim)
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    whole_forward_kernel[(batch * heads,)](qkv, cos, sin, out, length, head_dim**-0.5 * LOG2_E, **sizes)
    return out


@whole_attention.register_fake
def _(qkv, cos, sin, heads):
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)


@torch.library.custom_op("vmd::whole_attention_backward", mutates_args=())
def whole_attention_backward(qkv: Tensor, cos: Tensor, sin: Tensor, dout: Tensor, heads: int) -> Tensor:
    batch, length, width = qkv.shape
    head_dim = width // (3 * heads)
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    dqkv = torch.empty_like(qkv)
    sizes = whole_sizes("backward", length, heads, head_dim)
    whole_backward_kernel[(batch * heads,)](qkv, cos, sin, dout, dqkv, length, head_dim**-0.5 * LOG2_E, **sizes)
    return dqkv


@whole_attention_backward.register_fake
def _(qkv, cos, sin, dout, heads):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def keep_inputs(ctx, inputs, output) -> None:
    *tensors, ctx.heads = inputs
    ctx.save_for_backward(*tensors)


def whole_backward(ctx, dout: Tensor):
    return whole_attention_backward(*ctx.saved_tensors, dout.contiguous(), ctx.heads), None, None, None


whole_attention.register_autograd(whole_backward, setup_context=keep_inputs)
