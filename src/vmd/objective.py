"""Eq. 2, Eq. 5 and the block form, as one function.

Nothing here knows a network: `denoise` and `encode` are callables, so a test can drive the mathematics with oracles.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vmd.latent import Gaussian, standard_normal
from vmd.masking import Masks, all_masks, apply_mask

# (xt, x0, z) -> logits (B, L, V), where block b sees xt^b, x0^{<b} and z^b
Denoise = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# (x0, mask) -> posterior of z (B, blocks, dim)
Encode = Callable[[Tensor, Tensor], Gaussian]


class Loss(NamedTuple):
    """Nats per sequence, each (B,). `total` is what is minimised; the two parts are reported apart, unweighted."""

    total: Tensor
    reconstruction: Tensor
    kl: Tensor


def objective(
    denoise: Denoise,
    encode: Encode | None,
    x0: Tensor,
    masks: Masks,
    mask_id: int,
    *,
    noise: Tensor | None = None,
    kl_weight: float | Tensor = 1.0,
    free_bits: float = 0.0,
) -> Loss:
    """Eq. 2 without an encoder; Eq. 5 (one block) and Eq. 7 (blocks) with one. Appendix: Eq. 8 is Eq. 2, Eq. 9 and Eq. 11
    are the braces, Eq. 10 is Eq. 5.

    sum_b w_b { sum_{i masked in b} -log p(x0_i | xt^b, x0^{<b}, z^b) + kl_weight * KL(q(z^b | x0, xt) || p(z)) }

    where w_b is 1/t or, drawn by mask counts, m/k. Without an encoder its mean is a bound on -log p(x0). With one it is
    the paper's objective: a good trainer, but a *surrogate, not a bound* (docs/paper-notes.md). A block without masks
    has weight 0 and costs no KL. `noise` (B, blocks, dim) is N(0, I).
    """
    xt = apply_mask(x0, masks.mask, mask_id)
    weight = masks.weight  # (B, blocks)
    if encode is None:
        z, kl = None, torch.zeros_like(weight)
    else:
        assert noise is not None, "a latent needs noise"
        posterior = encode(x0, masks.mask)
        z = posterior.draw(noise)
        kl = posterior.kl(standard_normal(posterior.mean))  # (B, blocks)
    nll = token_nll(denoise(xt, x0, z), x0) * masks.mask  # (B, L)
    reconstruction = (nll.unflatten(-1, (weight.shape[-1], -1)).sum(-1) * weight).sum(-1)
    charged = torch.clamp(kl, min=free_bits) if free_bits else kl
    total = reconstruction + kl_weight * (charged * weight).sum(-1)
    return Loss(total, reconstruction, (kl * weight).sum(-1))


def token_nll(logits: Tensor, x0: Tensor) -> Tensor:
    """-log p(x0_i | ...) for every position, (B, L)."""
    return -logits.float().log_softmax(-1).gather(-1, x0.unsqueeze(-1)).squeeze(-1)


def exact_objective(
    denoise: Denoise,
    encode: Encode | None,
    x0: Tensor,
    block_size: int,
    mask_id: int,
    *,
    noise: Tensor | None = None,
    kl_weight: float = 1.0,
) -> Loss:
    """The expectation of `objective` over mask counts by enumerating all 2^r - 1 masks of a block.

    One pattern serves all blocks of a row at once, because the loss of block b sees no other block's mask. That is not
    so where z^{<b} reaches block b through the clean stream, and such a model must not be scored by this function.
    `noise` (S, B, blocks, dim) averages over S draws of z.
    """
    batch, length = x0.shape
    blocks = length // block_size
    patterns, coefficients = all_masks(block_size)
    draws: list[Tensor | None] = [None] if noise is None else list(noise)
    terms = []
    for pattern, coefficient in zip(patterns, coefficients.tolist(), strict=True):
        mask = pattern.to(x0.device).repeat(blocks).expand(batch, length)
        weight = torch.full((batch, blocks), coefficient, device=x0.device, dtype=torch.float64)
        for eps in draws:
            terms.append(objective(denoise, encode, x0, Masks(mask, weight), mask_id, noise=eps, kl_weight=kl_weight))
    return Loss(*(torch.stack(part).sum(0) / len(draws) for part in zip(*terms, strict=True)))
