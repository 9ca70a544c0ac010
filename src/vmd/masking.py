"""Eq. 1: which tokens are masked, and what each masked block weighs in the objective."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vmd.config import is_whole, require


class Rows(NamedTuple):
    """Rows of a batch: start to stop of total."""

    start: int
    stop: int
    total: int

    def of(self, x: Tensor, dim: int = 0) -> Tensor:
        return x.narrow(dim, self.start, self.stop - self.start)


def send(x: Tensor, device: str | torch.device | None) -> Tensor:
    """To the device, without waiting for what it is still doing, as a copy from ordinary memory would."""
    if device is None or torch.device(device).type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class Masks(NamedTuple):
    """What a step of the sampler sees and what it is asked. With a dimension of steps, (B, J, L), the J steps of one z."""

    mask: Tensor  # (B, L) bool: True where the network is shown [MASK]
    target: Tensor  # (B, L) bool: the masked tokens that are scored; all of them in the paper's objective
    weight: Tensor  # (B, blocks): m/k for mask counts, 1/t for times, N for steps; 0 where nothing is scored

    def map(self, change: Callable[[Tensor], Tensor]) -> "Masks":
        return Masks(*map(change, self))


def apply_mask(x0: Tensor, mask: Tensor, mask_id: int) -> Tensor:
    """xt: x0 with [MASK] where the mask is set (Eq. 1, with the paper's delta read at x0)."""
    return torch.where(mask, mask_id, x0)


def stratified_uniforms(count: int, *, generator: torch.Generator | None = None, device=None) -> Tensor:
    """`count` numbers in [0, 1), one in each of `count` equal strata, in random order, all shifted by one random offset.

    Each is uniform; together they cover [0, 1) evenly. The random order keeps strata from being tied to batch rows.
    """
    order = torch.rand(count, generator=generator, device=device, dtype=torch.float64).argsort()
    offset = torch.rand((), generator=generator, device=device, dtype=torch.float64)
    return (order + offset) / count


def draw_uniforms(
    rows: Rows, blocks: int, block_size: int, generator: torch.Generator | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """These rows of a batch's stratified numbers (B, blocks), and of a score for every token (B, blocks, r)."""
    u = stratified_uniforms(rows.total * blocks, generator=generator, device=device).view(rows.total, blocks)
    scores = torch.rand(rows.total, blocks, block_size, generator=generator, device=device)
    return rows.of(u), rows.of(scores)


def maskable_blocks(x0: Tensor, block_size: int, fixed: Tensor | None) -> Tensor:
    """(B, blocks, r) bool: True where a token may be masked."""
    free = torch.ones_like(x0, dtype=torch.bool) if fixed is None else ~fixed.expand_as(x0)
    return free.unflatten(-1, (-1, block_size))


LINEAR_TIMES = 20


def draw_masks(
    x0: Tensor,
    block_size: int,
    *,
    kind: str = "counts",
    fixed: Tensor | None = None,
    t_min: float = 1e-3,
    whole: float = 0.0,
    generator: torch.Generator | None = None,
    rows: Rows | None = None,
) -> Masks:
    """Masks and weights for a batch, stratified over its rows and blocks; fixed tokens are never masked.

    With `rows`, x0 is those rows of a larger batch, and so are the masks.

    counts: k ~ U{1..m}, a uniformly random k-subset of the block's m maskable tokens, weight m/k. For the linear
        schedule this has exactly the expectation of Eq. 2, since the integral over t of (1/t) C(m,k) t^k (1-t)^(m-k)
        is 1/k; there is no clipping and never an empty mask.
        `whole` makes it a mixture: this share of blocks is masked whole, which is the bound of a sampler of one step.
    linear: t one of 1/T, 2/T, ..., 1 for T = 20, each maskable token masked with probability t, weight 1 + 1/T - t
        (Ye et al. 2025). No bound.
    times: t ~ U(t_min, 1], each maskable token masked with probability t, weight 1/t. A block that came out without
        masks has weight 0, so that it pays no KL (KL/t diverges as t -> 0).
    """
    require(isinstance(x0, Tensor) and x0.dim() == 2, "x0: expected a tensor of shape (rows, length)")
    batch, length = x0.shape
    fits = is_whole(block_size) and block_size >= 1 and length % block_size == 0
    require(fits, f"block_size={block_size!r}: expected a divisor of the length {length}")
    blocks, device = length // block_size, x0.device
    maskable = maskable_blocks(x0, block_size, fixed)
    u, scores = draw_uniforms(rows or Rows(0, batch, batch), blocks, block_size, generator, device)

    if kind == "counts":
        m = maskable.sum(-1)
        u = (u - whole) / (1 - whole)  # below 0 the block is masked whole
        k = torch.where(u < 0, m, torch.minimum((u * m).long() + 1, m))  # the minimum guards m = 0
        rank = scores.masked_fill(~maskable, 2.0).argsort(-1).argsort(-1)
        mask = (rank < k.unsqueeze(-1)) & maskable
        weight = m / k.clamp(min=1)
    elif kind == "times":
        t = 1 - (1 - t_min) * u
        mask = (scores < t.unsqueeze(-1)) & maskable
        weight = (1 - t_min) / t * mask.any(-1)
    elif kind == "linear":
        t = ((u * LINEAR_TIMES).long() + 1).clamp(max=LINEAR_TIMES) / LINEAR_TIMES
        mask = (scores < t.unsqueeze(-1)) & maskable
        weight = (1 + 1 / LINEAR_TIMES - t) * mask.any(-1)
    else:
        raise ValueError(f"kind={kind!r}: expected counts, times or linear")
    mask = mask.view(batch, length)
    return Masks(mask, mask, weight.float())


def ceil_share(step: Tensor | int, count: Tensor, steps: Tensor | int) -> Tensor:
    """ceil(j m / N): how many of m tokens are revealed after j of N steps."""
    return (step * count + steps - 1) // steps


def draw_steps(
    x0: Tensor,
    block_size: int,
    choices: tuple[int, ...],
    *,
    whole: bool = False,
    fixed: Tensor | None = None,
    generator: torch.Generator | None = None,
    rows: Rows | None = None,
) -> Masks:
    """A random step of the sampler that fills each block in N steps and random order, N one of the choices.

    Step j shows what the steps before it revealed and scores what it reveals itself. Its weight N makes the expectation
    that of the sum over all steps. With `whole` all steps come, (B, J, L) for J = max(choices), each of weight 1, and rows
    of fewer steps end with empty ones. Stratified over rows and blocks; fixed tokens are never masked.
    """
    batch, length = x0.shape
    blocks, device = length // block_size, x0.device
    maskable = maskable_blocks(x0, block_size, fixed)
    u, scores = draw_uniforms(rows or Rows(0, batch, batch), blocks, block_size, generator, device)
    u = u * len(choices)
    chosen = u.long().clamp(max=len(choices) - 1)
    steps = send(torch.tensor(choices), device)[chosen]  # (B, blocks)
    rank = scores.masked_fill(~maskable, 2.0).argsort(-1).argsort(-1)
    m = maskable.sum(-1)
    if whole:
        j = torch.arange(max(choices), device=device).view(-1, 1, 1)  # (J, 1, 1)
        weight = (m > 0).float()
    else:
        j = torch.minimum(((u - chosen) * steps).long(), steps - 1)
        weight = (steps * (ceil_share(j + 1, m, steps) > ceil_share(j, m, steps))).float()
    before = ceil_share(torch.minimum(j, steps), m, steps).unsqueeze(-1)  # ((J,) B, blocks, 1)
    after = ceil_share(torch.minimum(j + 1, steps), m, steps).unsqueeze(-1)
    mask = (rank >= before) & maskable
    target = mask & (rank < after)
    mask, target = mask.flatten(-2), target.flatten(-2)
    if whole:
        mask, target = mask.movedim(0, 1), target.movedim(0, 1)
    return Masks(mask, target, weight)


def all_masks(block_size: int) -> tuple[Tensor, Tensor]:
    """Every non-empty mask of one block and probability x weight of each under `counts`: (1/r) / C(r,k) * r/k.

    Sum of coefficient * (loss under the mask) is the exact expectation that `draw_masks` estimates.
    """
    r = block_size
    masks = torch.tensor(list(itertools.product([False, True], repeat=r))[1:])  # (2^r - 1, r)
    counts = masks.sum(-1).tolist()
    coefficients = torch.tensor([1 / (math.comb(r, k) * k) for k in counts], dtype=torch.float64)
    return masks, coefficients
