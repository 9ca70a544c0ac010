"""log p(x0_i | k) of every masked token under every code as GPU kernels, without logits in memory. Needs Triton.

A tile of tokens of one place of a block meets one tile of codes after the other: products, log-softmax and the answer's
own logit stay on the chip, and only a number for each token and code is written. The backward pass makes the logits again.
Tokens that are no targets are passed over; which these are is known on the device alone, so programs look it up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmd.codes import order_targets
from vmd.kernels import load_rows


@triton.jit
def load_tokens(
    features, base, x0, order, place, first, last, per_place, R: tl.constexpr, V: tl.constexpr, BM: tl.constexpr
):
    """A tile of targets of one place: where they are, their features (BM, R), what all codes share (BM, V), the answers."""
    n = first + tl.arange(0, BM)
    ok = n < last
    token = tl.load(order + place * per_place + n, mask=ok, other=0).to(tl.int64)
    x, b = load_rows(features, token, ok, R, R), load_rows(base, token, ok, V, V)
    return token, ok, x, b.to(tl.float32), tl.load(x0 + token, mask=ok, other=0)


@triton.jit
def load_codes(rows, bias, place, k, codes, R: tl.constexpr, V: tl.constexpr, G: tl.constexpr):
    """The output rows of G codes at a place, (G V, R), and their biases."""
    n = tl.arange(0, G * V)
    ok, at = k * V + n < codes * V, (place * codes + k).to(tl.int64) * V + n
    return load_rows(rows, at, ok, R, R), tl.load(bias + at, mask=ok, other=0.0)


@triton.jit
def log_softmax(x, b, w, c, BM: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    """(BM, G, V): log p(v | k) of a tile of tokens and codes."""
    logits = tl.reshape(tl.dot(x, tl.trans(w)) + c[None, :], (BM, G, V)) + b[:, None, :]
    logits -= tl.max(logits, 2)[:, :, None]
    return logits - tl.log(tl.sum(tl.exp(logits), 2))[:, :, None]


@triton.jit
def is_answer(answer, V: tl.constexpr):
    return tl.arange(0, V)[None, None, :] == answer[:, None, None]


@triton.jit
def score_kernel(
    features, base, rows, bias, x0, order, counts, out, per_place, codes, R: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    place, first = tl.program_id(1), tl.program_id(0) * BM
    count = tl.load(counts + place)
    if first < count:
        token, ok, x, b, answer = load_tokens(features, base, x0, order, place, first, count, per_place, R, V, BM)
        for k in range(0, codes, G):
            w, c = load_codes(rows, bias, place, k, codes, R, V, G)
            log_p = log_softmax(x, b, w, c, BM, G, V)
            own = tl.sum(tl.where(is_answer(answer, V), log_p, 0.0), 2)
            code = k + tl.arange(0, G)
            tl.store(out + token[:, None] * codes + code[None, :], own, mask=ok[:, None] & (code < codes)[None, :])


@triton.jit
def logit_gradient(x, b, w, c, answer, token, ok, dout, k, codes, BM: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    """(BM, G, V)"""
    code = k + tl.arange(0, G)
    g = tl.load(dout + token[:, None] * codes + code[None, :], mask=ok[:, None] & (code < codes)[None, :], other=0.0)
    p = tl.exp(log_softmax(x, b, w, c, BM, G, V))
    return g[:, :, None] * (tl.where(is_answer(answer, V), 1.0, 0.0) - p)


@triton.jit
def token_gradient_kernel(
    features, base, rows, bias, x0, order, counts, dout, dfeatures, dbase, per_place, codes, R: tl.constexpr,
    V: tl.constexpr, G: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    place, first = tl.program_id(1), tl.program_id(0) * BM
    count = tl.load(counts + place)
    if first < count:
        token, ok, x, b, answer = load_tokens(features, base, x0, order, place, first, count, per_place, R, V, BM)
        dx, db = tl.zeros([BM, R], tl.float32), tl.zeros([BM, V], tl.float32)
        for k in range(0, codes, G):
            w, c = load_codes(rows, bias, place, k, codes, R, V, G)
            d = logit_gradient(x, b, w, c, answer, token, ok, dout, k, codes, BM, G, V)
            db += tl.sum(d, 1)
            dx += tl.dot(tl.reshape(d, (BM, G * V)).to(w.dtype), w)
        tl.store(dfeatures + token[:, None] * R + tl.arange(0, R)[None, :], dx.to(x.dtype), mask=ok[:, None])
        kind = dbase.dtype.element_ty
        tl.store(dbase + token[:, None] * V + tl.arange(0, V)[None, :], db.to(kind), mask=ok[:, None])


@triton.jit
def code_gradient_kernel(
    features, base, rows, bias, x0, order, counts, dout, drows, dbias, per_place, codes, R: tl.constexpr, V: tl.constexpr,
    G: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Of G codes at one place, over a share of the tokens."""
    k, place, share = tl.program_id(0) * G, tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + place)
    tiles = tl.cdiv(tl.cdiv(count, BM), tl.num_programs(2))
    w, c = load_codes(rows, bias, place, k, codes, R, V, G)
    dw, dc = tl.zeros([G * V, R], tl.float32), tl.zeros([G * V], tl.float32)
    for first in range(share * tiles * BM, tl.minimum((share + 1) * tiles * BM, count), BM):
        token, ok, x, b, answer = load_tokens(features, base, x0, order, place, first, count, per_place, R, V, BM)
        d = tl.reshape(logit_gradient(x, b, w, c, answer, token, ok, dout, k, codes, BM, G, V), (BM, G * V))
        dc += tl.sum(d, 0)
        dw += tl.dot(tl.trans(d.to(x.dtype)), x)
    n = tl.arange(0, G * V)
    ok, at = k * V + n < codes * V, ((share * tl.num_programs(1) + place) * codes + k).to(tl.int64) * V + n
    tl.store(drows + at[:, None] * R + tl.arange(0, R)[None, :], dw, mask=ok[:, None])
    tl.store(dbias + at, dc, mask=ok)


# Tokens of a tile, logits of a token in it, warps, stages.
TILES = {"score": (128, 128, 8, 2), "tokens": (128, 64, 8, 3), "codes": (128, 64, 8, 2)}
ENOUGH = 264  # programs for the 132 multiprocessors of an H200


def sizes_of(kernel: str, rank: int, vocab: int) -> dict[str, int]:
    tokens, logits, warps, stages = TILES[kernel]
    return {"R": rank, "V": vocab, "G": max(1, logits // vocab), "BM": tokens, "num_warps": warps, "num_stages": stages}


@torch.library.custom_op("vmd::score_codes", mutates_args=())
def score_codes(features: Tensor, base: Tensor, rows: Tensor, bias: Tensor, x0: Tensor, target: Tensor) -> Tensor:
    """log_softmax(base_i + rows_kp . features_i + bias_kp) at x0_i of each target i, at place p: (T, K), else 0.

    features (T, R), base (T, V), rows (places, K, V, R), bias (places, K, V); V and R are powers of two.
    """
    features, base, rows, bias, x0 = (part.contiguous() for part in (features, base, rows, bias, x0))
    places, codes, vocab, rank = rows.shape
    order, counts = order_targets(target, places)
    out = torch.zeros(len(features), codes, dtype=torch.float32, device=features.device)
    sizes = sizes_of("score", rank, vocab)
    grid = (triton.cdiv(order.shape[1], sizes["BM"]), places)
    score_kernel[grid](features, base, rows, bias, x0, order, counts, out, order.shape[1], codes, **sizes)
    return out


@score_codes.register_fake
def _(features, base, rows, bias, x0, target):
    return features.new_empty(len(features), rows.shape[1], dtype=torch.float32)


@torch.library.custom_op("vmd::score_codes_backward", mutates_args=())
def score_codes_backward(
    features: Tensor, base: Tensor, rows: Tensor, bias: Tensor, x0: Tensor, target: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    features, base, rows, bias, x0 = (part.contiguous() for part in (features, base, rows, bias, x0))
    places, codes, vocab, rank = rows.shape
    order, counts = order_targets(target, places)
    dfeatures, dbase = torch.zeros_like(features), torch.zeros_like(base)
    sizes = sizes_of("tokens", rank, vocab)
    tokens = order.shape[1]
    inputs = (features, base, rows, bias, x0, order, counts, dout)
    token_gradient_kernel[triton.cdiv(tokens, sizes["BM"]), places](*inputs, dfeatures, dbase, tokens, codes, **sizes)
    sizes = sizes_of("codes", rank, vocab)
    tiles = triton.cdiv(codes, sizes["G"])
    shares = min(triton.cdiv(ENOUGH, tiles * places), triton.cdiv(tokens, sizes["BM"]))
    drows = torch.empty(shares, *rows.shape, dtype=torch.float32, device=rows.device)
    dbias = torch.empty(shares, *bias.shape, dtype=torch.float32, device=rows.device)
    code_gradient_kernel[tiles, places, shares](*inputs, drows, dbias, tokens, codes, **sizes)
    return dfeatures, dbase, drows.sum(0).to(rows.dtype), dbias.sum(0).to(bias.dtype)


@score_codes_backward.register_fake
def _(features, base, rows, bias, x0, target, dout):
    return tuple(part.new_empty(part.shape) for part in (features, base, rows, bias))


def keep_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx, dout: Tensor):
    return *score_codes_backward(*ctx.saved_tensors, dout.contiguous()), None, None


score_codes.register_autograd(backward, setup_context=keep_inputs)
