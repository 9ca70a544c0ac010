"""What sees what, attention behind one name, and the cache of keys and values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def sees(query: Tensor, key: Tensor, length: int, block_size: int, own_clean_block: bool) -> Tensor:
    """Whether places of the doubled sequence [xt ; x0] (0 to 2L - 1) see each other.

    noisy block b sees noisy block b, and clean blocks < b (decoder) or <= b (encoder, `own_clean_block=True`);
    clean block b sees clean blocks <= b and no noise. A decoder that saw its own clean block would read the answer.
    """
    noisy_query, noisy_key = query < length, key < length
    query_block, key_block = query % length // block_size, key % length // block_size
    same, earlier = query_block == key_block, query_block > key_block
    of_clean = earlier | same if own_clean_block else earlier | (same & ~noisy_query)
    return torch.where(noisy_key, noisy_query & same, of_clean)


def visibility(length: int, block_size: int, *, own_clean_block: bool, device=None) -> Tensor:
    """(2L, 2L) bool: True where the query (row) `sees` the key (column)."""
    place = torch.arange(2 * length, device=device)
    return sees(place.unsqueeze(1), place.unsqueeze(0), length, block_size, own_clean_block)


class Tiles(NamedTuple):
    """A visibility as the tiles that FlexAttention computes: those in which nothing is seen are skipped."""

    every: BlockMask
    noisy: BlockMask  # of the noisy stream's queries alone


class Fused(NamedTuple):
    """A visibility that the kernels of `vmd.kernels` know by its numbers."""

    length: int
    block_size: int
    own_clean_block: bool


class Whole(NamedTuple):
    """Everything sees everything, by a kernel."""

    roomy: bool  # the GPU has room for the kernels that score codes, which need more


class Everything(nn.Module):
    """What sees what in a pass over one block: everything, and by a kernel if it is short."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.other: Whole | None = None

    def forward(self, length: int) -> Whole | None:
        return self.other if self.other is not None and whole_fits(length, self.head_dim) else None

    def use(self, way: str) -> None:
        self.other = Whole(kernels_known_here()) if way == "fused" else None


def kernels_known_here() -> bool:
    """The kernels' tiles need the shared memory of a Hopper GPU; on those with less they must be asked for."""
    if not torch.cuda.is_available():
        return True
    return getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 0) >= 200_000


def whole_fits(length: int, head_dim: int) -> bool:
    """A head's keys and values, and their gradients, must fit a GPU's registers together."""
    return (1 << (length - 1).bit_length()) * head_dim <= 8192


class Visibility(nn.Module):
    """What sees what in a pass over the doubled sequence: a dense mask, tiles, or numbers for a kernel."""

    dense: Tensor

    def __init__(self, length: int, block_size: int, *, own_clean_block: bool):
        super().__init__()
        self.shape = Fused(length, block_size, own_clean_block)
        self.other: Tiles | Fused | None = None
        dense = visibility(length, block_size, own_clean_block=own_clean_block)
        self.register_buffer("dense", dense, persistent=False)

    def forward(self) -> "Tensor | Tiles | Fused":
        return self.dense if self.other is None else self.other

    @property
    def clean(self) -> Tensor:
        """(L, L): the clean stream's own part, block-causal."""
        return self.dense[self.shape.length :, self.shape.length :]

    def use(self, way: str) -> None:
        """dense, tiles (FlexAttention's, which need a compiled pass) or fused (the kernels, which need a GPU)."""

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return sees(query, key, *self.shape)

        length, device = self.shape.length, self.dense.device
        self.other = self.shape if way == "fused" else None
        if way == "tiles":
            made = (create_block_mask(mask, None, None, rows, 2 * length, device=device) for rows in (2 * length, length))
            self.other = Tiles(*made)


@contextmanager
def attention_by(model: nn.Module, way: str) -> Iterator[None]:
    """Attention in training is computed that way inside, and as before afterwards."""
    parts = [(part, part.other) for part in model.modules() if isinstance(part, (Visibility, Everything))]
    for part, _ in parts:
        part.use(way)
    try:
        yield
    finally:
        for part, before in parts:
            part.other = before


Visible = Tensor | Tiles | Fused | Whole | BlockMask | None


def of_first_queries(visible: Visible, keep: int | None) -> Tensor | BlockMask | None:
    """What the first `keep` queries see; None: all of them."""
    if isinstance(visible, Tiles):
        return visible.every if keep is None else visible.noisy
    assert not isinstance(visible, (Fused, Whole)), "the kernels take no queries apart"
    return visible[:keep] if isinstance(visible, Tensor) else visible


SHORT = 8  # up to this many keys, products and sums beat kernels made for long sequences (and fuse, and batch over models)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | BlockMask | None) -> Tensor:
    """Softmax attention, (B, H, Tq, D) x (B, H, Tk, D) -> (B, H, Tq, D); None: everything is visible."""
    if isinstance(visible, BlockMask):
        return flex_attention(q, k, v, block_mask=visible)
    if k.shape[-2] <= SHORT:
        return attend_short(q, k, v, visible)
    if q.is_cuda and q.shape[-2] <= FEW and not torch.is_grad_enabled():
        return attend_few(q, k, v, visible)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def attend_short(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * q.shape[-1] ** -0.5  # (B, H, Tq, Tk)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


FEW = 16  # queries of a step of sampling; kernels for many would work on tiles that are mostly empty


def attend_few(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


class CleanPrefix:
    """Keys and values of the clean stream, recorded layer by layer, for noisy streams that share it.

    `update` puts them behind a pass's own, repeated where the pass has several rows for each clean one. Of the text before
    the blocks of a pass, a prefix also has the tokens (B, length).
    """

    visible: Tensor | None = None  # the pass says itself

    def __init__(self, layers: dict[int, tuple[Tensor, Tensor]] | None = None, tokens: Tensor | None = None) -> None:
        self.layers = {} if layers is None else layers
        self.tokens = tokens
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

    A pass says by `look` where its tokens stand and how far it reads; `update` writes its keys and values there and returns
    all that it reads. A denoising pass leaves noisy ones behind, which nothing sees until the pass over the finished block
    replaces them. The places are a tensor, so that a recorded pass can be replayed for another block.
    """

    def __init__(
        self, layers: int, batch: int, heads: int, length: int, head_dim: int, block_size: int, *, device=None, dtype=None
    ):
        shape = (layers, batch, heads, length, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.block_size = block_size

    def look(self, positions: Tensor, reach: int, *, everything: bool) -> None:
        """Tokens at `positions` (T,) see the first `reach` keys up to the end of their own block, or simply all of them."""
        self.positions, self.reach = positions, reach
        ends = (positions // self.block_size + 1) * self.block_size
        self.visible = None if everything else torch.arange(reach, device=positions.device) < ends.unsqueeze(1)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer].index_copy_(2, self.positions, k.to(self.keys.dtype))
        self.values[layer].index_copy_(2, self.positions, v.to(self.values.dtype))
        return self.keys[layer, :, :, : self.reach].to(k.dtype), self.values[layer, :, :, : self.reach].to(v.dtype)

    def empty(self, batch: int, length: int) -> "KVCache":
        """Another one, for as many rows and tokens."""
        layers, _, heads, _, head_dim = self.keys.shape
        device, dtype = self.keys.device, self.keys.dtype
        return KVCache(layers, batch, heads, length, head_dim, self.block_size, device=device, dtype=dtype)

    def fill(self, other: "KVCache", rows: Tensor) -> None:
        """What another one holds, whose row rows[i] (B,) is the beginning of row i."""
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer in range(len(mine)):  # one at a time takes less memory
                mine[layer, :, :, : theirs.shape[3]] = theirs[layer, rows]

    def prefix(self, rows: Tensor, tokens: Tensor) -> CleanPrefix:
        """Of some rows (n,), as far as these clean tokens (n, length) go."""
        parts = (part[:, rows, :, : tokens.shape[1]] for part in (self.keys, self.values))
        return CleanPrefix(dict(enumerate(zip(*parts, strict=True))), tokens)
