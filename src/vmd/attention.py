"""What sees what, attention behind one name, and the cache of keys and values."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor


def visibility(length: int, block_size: int, *, own_clean_block: bool, device=None) -> Tensor:
    """(2L, 2L) bool for the doubled sequence [xt ; x0]: True where the query (row) sees the key (column).

    noisy block b sees noisy block b, and clean blocks < b (decoder) or <= b (encoder, `own_clean_block=True`);
    clean block b sees clean blocks <= b and no noise. The lower right quarter alone is block-causal attention.
    A decoder that saw its own clean block would read the answer.
    """
    block = torch.arange(length, device=device) // block_size
    query, key = block.unsqueeze(1), block.unsqueeze(0)
    same, earlier = query == key, query > key
    noisy_to_clean = earlier | same if own_clean_block else earlier
    top = torch.cat([same, noisy_to_clean], dim=1)
    bottom = torch.cat([torch.zeros_like(same), earlier | same], dim=1)
    return torch.cat([top, bottom], dim=0)


def block_causal(length: int, block_size: int, *, device=None) -> Tensor:
    """(L, L): the clean stream's part of `visibility`, for an encoder that runs on one stream."""
    return visibility(length, block_size, own_clean_block=True, device=device)[length:, length:]


SHORT = 8  # up to this many keys, products and sums beat kernels made for long sequences (and fuse, and batch over models)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax attention, (B, H, Tq, D) x (B, H, Tk, D) -> (B, H, Tq, D); None: everything is visible."""
    if k.shape[-2] <= SHORT:
        return attend_short(q, k, v, visible)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def attend_short(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * q.shape[-1] ** -0.5  # (B, H, Tq, Tk)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


class CleanPrefix:
    """Keys and values of the clean stream, recorded layer by layer, for noisy streams that share it.

    `update` puts them behind a pass's own, repeated where the pass has several rows for each clean one.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._recording = True
        yield
        self._recording = False

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._recording:
            self.layers[layer] = (k, v)
            return k, v
        clean_k, clean_v = self.layers[layer]
        each = len(k) // len(clean_k)
        return (
            torch.cat([k, clean_k.repeat_interleave(each, dim=0)], dim=2),
            torch.cat([v, clean_v.repeat_interleave(each, dim=0)], dim=2),
        )


class KVCache:
    """Keys and values of the clean blocks decoded so far. Preallocated; lives outside the network.

    `update` writes a pass's keys and values behind the cached ones and returns both together. They stay only if
    `advance` is called: a denoising pass reads the prefix and is forgotten, a pass over a finished block is kept.
    """

    def __init__(self, layers: int, batch: int, heads: int, length: int, head_dim: int, *, device=None, dtype=None):
        shape = (layers, batch, heads, length, head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, tokens: int) -> None:
        self.length += tokens
