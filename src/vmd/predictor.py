"""A model's answers to the sampler: by the training pass, or block by block behind cached keys and values."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vmd.attention import KVCache
from vmd.codes import CodeFeatures
from vmd.latent import Categorical, CodeChain, Gaussian, standard_normal
from vmd.network import largest_tensor
from vmd.sampling import Draw

if TYPE_CHECKING:
    from vmd.model import VMD

Prior = Gaussian | Categorical | CodeChain
REACH = 256  # recorded passes read keys in multiples of this


class Predictor:
    """Answers the sampler by the training pass: the doubled sequence of the canvas so far, computed anew each time."""

    def __init__(self, model: "VMD"):
        self.model = model
        self.codes = model.config.latent.coded
        self.prepared = -1
        # The block of now, where a recorded pass reads it.
        self.block = torch.zeros(1, dtype=torch.long, device=model.device)

    def prepare(self, block: int) -> tuple | None:
        """Go to a block. What the next pass will be, for those who record it: passes of equal kinds differ in tensors only.

        None: not worth recording, since no other block's pass is like it.
        """
        if self.prepared != block:
            self.block.fill_(block)
            self.prepared = block
        return ("whole",) if self.model.config.blocks == 1 else None

    def predict(self, canvas: Tensor, block: int, z: Tensor | None, noise: Tensor | None = None) -> Tensor:
        """Logits (B, r, V) of block b, given the canvas (B, L) with [MASK] for what is unknown and z^{<=b} (B, C, dim).

        With noise (B, dim), z^b is first drawn from its prior and written into z; with (B, 0), the likeliest is.
        """
        if self.prepared != block:
            self.prepare(block)
        if self.codes and z is not None:
            self.seen = features = self._code_features(canvas)
            if noise is not None:
                self._write(z, features.prior, noise)
            return self._code_logits(features, z)
        if noise is not None:
            self.draw(canvas, block, z, noise)
        return self._logits(canvas, z)

    def marginal(self) -> Tensor:
        """log p(x_i) (B, r, V) of the last prediction, summed over codes."""
        return self._marginal(self.seen)

    def draw(self, canvas: Tensor, block: int, z: Tensor | None, noise: Tensor) -> None:
        """Draw a Gaussian z^b from its prior."""
        assert z is not None
        self._write(z, self._gaussian_prior(canvas), noise)

    def read(self, canvas: Tensor, first: int, last: int, z: Tensor | None, noise: Tensor | None) -> int:
        """In blocks first to last, `last` not among them, nothing is left to write: draw their z (noise: (B, n, dim)).

        Returns the number of network passes that also fill a cache.
        """
        if z is not None and noise is not None:
            prior = self.model.prior(canvas, canvas)
            z[:, first:last] = drawn(of_blocks(prior, lambda part: part[:, first:last]), noise)
        return 0

    def commit(self, canvas: Tensor, block: int, z: Tensor | None) -> int:
        """Block b is finished. Returns the number of network passes that took."""
        return 0

    def _write(self, z: Tensor, prior: Gaussian | Categorical | CodeChain, noise: Tensor) -> None:
        def here(part: Tensor) -> Tensor:
            return part if part.shape[1] == 1 else part.index_select(1, self.block)

        z.index_copy_(1, self.block, drawn(of_blocks(prior, here), noise.unsqueeze(1)).to(z.dtype))

    def _of_block(self, x: Tensor, before: int = 0) -> Tensor:
        """The tokens of the block, and of some before it."""
        return x.index_select(1, self._positions(before))

    def _positions(self, before: int = 0) -> Tensor:
        r = self.model.config.block_size
        return (self.block - before) * r + torch.arange((1 + before) * r, device=self.block.device)

    def _logits(self, canvas: Tensor, z: Tensor | None) -> Tensor:
        if self.model.config.draft:
            return self._draft_logits(canvas, self._of_block(self.model.decoder.features(canvas, canvas, None)))
        return self._of_block(self.model.denoise(canvas, canvas, z))

    def _draft_logits(self, canvas: Tensor, h: Tensor) -> Tensor:
        """Before the step writes anything; what `write` goes on from is kept."""
        draft = self.model.decoder.draft
        assert draft is not None
        self.blind, self.features = self.model.decoder.head(h), draft.features(h)
        places = self.block * self.model.config.block_size + torch.arange(-draft.reach, h.shape[1], device=h.device)
        self.line = canvas.index_select(1, places.clamp(min=0)).masked_fill(places < 0, draft.outside)
        return self.blind + draft(self.features, self.line.unfold(1, draft.reach, 1)[:, :-1])

    def write(self, known: Tensor, writes: Tensor, draw: Draw) -> Tensor:
        """The block (B, r) after the last prediction's step has written where it `writes`, each in sight of those before."""
        draft = self.model.decoder.draft
        assert draft is not None
        line = torch.cat([self.line[:, : draft.reach], known], 1)  # the text before the block, and the block
        for place in range(known.shape[1]):
            window = line[:, place : place + draft.reach]
            token = draw(self.blind[:, place] + draft(self.features[:, place], window), place)
            here = place + draft.reach
            line[:, here] = torch.where(writes[:, place], token, line[:, here])
        return line[:, draft.reach :]

    def _gaussian_prior(self, canvas: Tensor) -> Gaussian:
        return self.model.gaussian_prior(canvas, canvas)

    def _code_features(self, canvas: Tensor) -> CodeFeatures:
        return self.model.coder.code_features(canvas, canvas)

    def _code_logits(self, features: CodeFeatures, z: Tensor) -> Tensor:
        return self._of_block(self.model.coder.code_logits(features, z.long()))

    def _marginal(self, features: CodeFeatures) -> Tensor:
        return self._of_block(self.model.coder.code_marginals(features))


def of_blocks(prior: Prior, some: Callable[[Tensor], Tensor]) -> Prior:
    """Of some rows and blocks, taken from what there is of all, (B, C, ...)."""
    return CodeChain(some(prior.bias), prior.next) if isinstance(prior, CodeChain) else type(prior)(*map(some, prior))


def drawn(prior: Prior, noise: Tensor) -> Tensor:
    """z (B, C, dim); without noise, (B, C, 0), the likeliest."""
    return prior.draw(noise) if noise.shape[-1] else prior.likeliest()


class CachedPredictor(Predictor):
    """The same answers from the keys and values of the finished blocks: each pass costs one block.

    A finished block needs a clean pass of its own before others can see it. That pass waits for the first pass of the next
    block and goes with it, so that N steps per block take N passes.
    """

    def __init__(self, model: "VMD", batch: int, recorded: bool = False):
        super().__init__(model)
        c = model.config
        device, dtype = model.device, model.decoder.head.weight.dtype

        def cache(layers: int) -> KVCache:
            return KVCache(layers, batch, c.heads, c.length, c.width // c.heads, c.block_size, device=device, dtype=dtype)

        self.cache = cache(c.layers)
        self.prior_cache = None if model.prior_network is None else cache(c.latent.prior_layers)
        self.recorded = recorded
        self.start_again()

    def start_again(self) -> None:
        """For another batch of as many rows."""
        self.prepared, self.waiting, self.joined, self.reach = -1, False, 0, 0

    def prepare(self, block: int) -> tuple | None:
        super().prepare(block)
        self.joined = int(self.waiting)  # finished blocks that this pass takes along
        self.waiting = False
        end = (block + 1) * self.model.config.block_size
        # A recorded pass reads a little further than it sees, so that it serves many blocks.
        self.reach = min(self.model.config.length, -(-end // REACH) * REACH) if self.recorded else end
        return self.joined, self.reach

    def read(self, canvas: Tensor, first: int, last: int, z: Tensor | None, noise: Tensor | None) -> int:
        """In one pass, if it fits in memory, which takes along a block that waits."""
        c, passes = self.model.config, 0
        fit_in = max(1, largest_tensor(self.model.device) // (len(canvas) * c.block_size * max(3, c.mlp_ratio) * c.width))
        for start in range(first, last, fit_in):
            end = min(start + fit_in, last)
            passes += self._read_some(
                canvas, start, end, z, None if noise is None else noise[:, start - first : end - first]
            )
        return passes

    def _read_some(self, canvas: Tensor, first: int, last: int, z: Tensor | None, noise: Tensor | None) -> int:
        """Rows that begin alike are read once.

        A block that is given is as noisy as it is clean: the pass that keeps its keys also knows the prior of its z.
        """
        c, model, r = self.model.config, self.model, self.model.config.block_size
        begin, self.waiting, self.prepared = first - self.waiting, False, -1
        positions = torch.arange(begin * r, last * r, device=canvas.device)
        tokens, rows = canvas[:, positions], slice(None)
        caches = used = [self.cache] if self.prior_cache is None else [self.cache, self.prior_cache]
        if begin == 0 and not c.z_reaches_later_blocks:
            distinct, which = tokens.unique(dim=0, return_inverse=True)
            if 2 * len(distinct) <= len(tokens):
                tokens, rows, used = distinct, which, [cache.empty(len(distinct), len(positions)) for cache in caches]
        for cache in used:
            cache.look(positions, last * r, everything=False)
        prior: Prior = standard_normal(torch.zeros(len(tokens), last - begin, c.latent.dim, device=canvas.device))
        if self.codes:
            prior = model.coder.read_blocks(tokens, used[0])
        elif model.prior_network is not None:
            prior = model.prior_network.forward_blocks(tokens, used[1])
        if z is not None and noise is not None:
            z[:, first:last] = drawn(of_blocks(prior, lambda part: part[rows][:, first - begin :]), noise)
        has_readers = last < c.blocks
        if has_readers and not self.codes:
            clean_z = z[:, begin:last] if z is not None and c.z_reaches_later_blocks else None
            model.decoder.forward_blocks(tokens, clean_z, used[0], clean=last - begin)
        if isinstance(rows, Tensor):
            for cache, some in zip(caches, used, strict=True):
                cache.fill(some, rows)
        return int(has_readers or self.codes)

    def commit(self, canvas: Tensor, block: int, z: Tensor | None) -> int:
        """The pass over a finished block waits, unless it cannot go with another."""
        c = self.model.config
        self.waiting = block + 1 < c.blocks  # nothing reads the last block's keys
        if self.waiting and self.codes and c.latent.code_layers:  # the last layers run for the noisy block alone
            return self._read_some(canvas, block + 1, block + 1, z, None)
        return 0

    def _tokens(self, canvas: Tensor, cache: KVCache) -> Tensor:
        cache.look(self._positions(self.joined), self.reach, everything=not self.joined and not self.recorded)
        return self._of_block(canvas, self.joined)

    def _logits(self, canvas: Tensor, z: Tensor | None) -> Tensor:
        blocks = (
            None
            if z is None
            else z.index_select(1, self.block - self.joined + torch.arange(1 + self.joined, device=z.device))
        )
        tokens = self._tokens(canvas, self.cache)
        h = self.model.decoder.forward_blocks(tokens, blocks, self.cache, clean=self.joined)
        h = h[:, -self.model.config.block_size :]
        return self._draft_logits(canvas, h) if self.model.config.draft else self.model.decoder.head(h)

    def _gaussian_prior(self, canvas: Tensor) -> Gaussian:
        if self.model.prior_network is None or self.prior_cache is None:
            return standard_normal(torch.zeros(len(canvas), 1, self.model.config.latent.dim, device=canvas.device))
        found = self.model.prior_network.forward_blocks(self._tokens(canvas, self.prior_cache), self.prior_cache)
        return Gaussian(*(part[:, -1:] for part in found))

    def _code_features(self, canvas: Tensor) -> CodeFeatures:
        return self.model.coder.code_block_features(self._tokens(canvas, self.cache), self.cache, clean=self.joined)

    def _code_logits(self, features: CodeFeatures, z: Tensor) -> Tensor:
        return self.model.coder.code_logits(features, z.index_select(1, self.block).long())

    def _marginal(self, features: CodeFeatures) -> Tensor:
        return self.model.coder.code_marginals(features)
