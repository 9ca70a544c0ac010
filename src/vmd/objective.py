"""Eq. 2, Eq. 5 and the block form, and the certified bounds of a sampler, as one function.

Nothing here knows a network: `denoise`, `encode`, `prior` and `codes` are callables, so a test can drive the mathematics
with oracles.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vmd.latent import CodeChain, Gaussian, standard_normal
from vmd.masking import Masks, all_masks, apply_mask

# (xt, x0, z) -> logits (B, L, V), where block b sees xt^b, x0^{<b} and z^b
Denoise = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# (x0, mask, target) -> posterior of z (B, blocks, dim)
Encode = Callable[[Tensor, Tensor, Tensor], Gaussian]
# (xt, x0) -> prior of z (B, blocks, dim), where block b sees xt^b and x0^{<b}
Prior = Callable[[Tensor, Tensor], Gaussian]


class Codes(NamedTuple):
    log_prior: Tensor  # (B, blocks, K): log pi(k | revealed, earlier blocks)
    log_likelihood: Tensor  # (B, blocks, K): sum over the block's target tokens of log p(x_i | revealed, earlier, k)

    def log_joint(self) -> Tensor:
        """(B, blocks, K): its logsumexp is log p(targets)."""
        return self.log_prior + self.log_likelihood

    def double(self) -> "Codes":
        return Codes(self.log_prior.double(), self.log_likelihood.double())

    def merge_steps(self, steps: int) -> "Codes":
        """Of rows that are J steps of one code: it is drawn at the first, and serves the targets of all."""
        log_prior, log_likelihood = (part.unflatten(0, (-1, steps)) for part in self)
        return Codes(log_prior[:, 0], log_likelihood.sum(1))


class ChainCodes(NamedTuple):
    """The same for a chain, which has a code for each token, or for each span of them."""

    chain: CodeChain  # biases (B, blocks, r / span, K)
    log_likelihood: Tensor  # (B, blocks, r / span, K): sum over a span's targets of log p(x_i | revealed, earlier, k)

    def log_joint(self) -> Tensor:
        """(B, blocks, K), by the last token's code."""
        return self.chain.forward_messages(self.log_likelihood)[-1]

    def double(self) -> "ChainCodes":
        return ChainCodes(CodeChain(*(part.double() for part in self.chain)), self.log_likelihood.double())

    def merge_steps(self, steps: int) -> "ChainCodes":
        bias, log_likelihood = (part.unflatten(0, (-1, steps)) for part in (self.chain.bias, self.log_likelihood))
        return ChainCodes(CodeChain(bias[:, 0], self.chain.next), log_likelihood.sum(1))


# (xt, x0, target) -> Codes
ScoreCodes = Callable[[Tensor, Tensor, Tensor], Codes | ChainCodes]
# (xt, x0, target) -> Codes, and the sum over each block's targets of log sum_k pi_k p(x_i | k), (B, blocks)
ScoreCodesTwice = Callable[[Tensor, Tensor, Tensor], tuple[Codes | ChainCodes, Tensor]]


class Loss(NamedTuple):
    """Nats per sequence, each (B,). `total` is what is minimised; the two parts are reported apart, unweighted.

    Of tokens that are scored twice, the KL is that of one step, whatever it writes: not weighed by m/k as elsewhere.
    """

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
    prior: Prior | None = None,
    noise: Tensor | None = None,
    kl_weight: float | Tensor = 1.0,
    free_bits: float = 0.0,
    focal: float = 0.0,
    score_entropy: bool = False,
    drafts: bool = False,
) -> Loss:
    """Eq. 2 without an encoder; Eq. 5 (one block) and Eq. 7 (blocks) with one. Appendix: Eq. 8 is Eq. 2, Eq. 9 and Eq. 11
    are the braces, Eq. 10 is Eq. 5.

    sum_b w_b { sum_{i target in b} -log p(x0_i | xt^b, x0^{<b}, z^b) + kl_weight * KL(q(z^b | x0, xt) || p(z^b)) }

    With masks from `draw_masks` every masked token is a target and w_b is 1/t or m/k. Without an encoder its mean is a
    bound on -log p(x0). With one it is the paper's objective: a good trainer, but a *surrogate, not a bound*
    (docs/paper-notes.md). With masks from `draw_steps` its mean is a bound either way (docs/likelihood.md), except where z
    of a block that is given whole reaches later blocks: its KL is not charged here.

    A block without targets has weight 0 and costs no KL. `noise` (B, blocks, dim) is N(0, I); with S draws in front,
    (S, B, blocks, dim), the importance-weighted bound takes the place of the braces. The prior is N(0, I) unless given.
    """
    weight = masks.weight  # (B, blocks)
    if encode is None:
        nll = targets_nll(denoise, x0, masks, mask_id, None, focal, score_entropy, drafts)
        loss = (nll * weight).sum(-1)
        return Loss(loss, loss, torch.zeros_like(loss))
    assert noise is not None, "a latent needs noise"
    posterior, before = infer(encode, prior, x0, masks, mask_id)
    if noise.dim() == 4:
        nll, log_ratio = importance_terms(denoise, posterior, before, x0, masks, mask_id, noise)
        log_weights = log_ratio - nll  # (S, B, blocks)
        bound = math.log(len(noise)) - log_weights.logsumexp(0)
        expected_nll = (log_weights.softmax(0) * nll).sum(0)  # under the reweighted draws, so that the parts add up
        total, reconstruction, kl = bound, expected_nll, bound - expected_nll
    else:
        reconstruction = targets_nll(denoise, x0, masks, mask_id, posterior.draw(noise))
        kl = posterior.kl(before)  # (B, blocks)
        charged = torch.clamp(kl, min=free_bits) if free_bits else kl
        total = reconstruction + kl_weight * charged
    return Loss(*((part * weight).sum(-1) for part in (total, reconstruction, kl)))


def code_objective(codes: ScoreCodes, x0: Tensor, masks: Masks, mask_id: int) -> Loss:
    """The same for a categorical latent, whose sum over codes is exact: -log sum_k pi_k prod_i p(x0_i | k) in the braces.

    Its parts are those of the exact posterior over codes, KL(posterior || prior) and the rest: they add up to the whole.
    Those of a chain would take as long again as the sum itself: it is not split here.
    """
    terms = code_terms(codes, x0, masks, mask_id)
    log_joint = terms.log_joint()
    nll = -log_joint.logsumexp(-1)  # (B, blocks)
    reconstruction = nll if isinstance(terms, ChainCodes) else -(log_joint.softmax(-1) * terms.log_likelihood).sum(-1)
    return Loss(*((part * masks.weight).sum(-1) for part in (nll, reconstruction, nll - reconstruction)))


# Masked tokens, scored twice. By mask counts, k of m masked, one pass of the network says how likely they are if one step
# writes them all, and how likely each is if a step writes it alone:
#
#     (1 - s) (m / k) sum_i -log p(x0_i | xt) + s (-log p(all x0_i | xt))
#
# The mean of the first part is the certified bound at N = r, of a z drawn anew at each step; that of the second is the cost
# of one step for whatever is masked. A model that is trained for both serves every number of steps.


def both_ways(alone: Tensor, joint: Tensor, masks: Masks, together: float) -> Tensor:
    """(B, blocks) each -> (B,)."""
    return ((1 - together) * masks.weight * alone + together * joint).sum(-1)


def code_objective_together(codes: ScoreCodesTwice, x0: Tensor, masks: Masks, mask_id: int, together: float) -> Loss:
    """The KL is that of the tokens that are written in one step; of a chain it is not split off."""
    terms, log_alone = codes(apply_mask(x0, masks.mask, mask_id), x0, masks.target)
    log_joint = terms.log_joint()
    joint = -log_joint.logsumexp(-1)  # (B, blocks)
    total, kl = both_ways(-log_alone, joint, masks, together), torch.zeros_like(joint)
    if isinstance(terms, Codes):
        kl = joint + (log_joint.softmax(-1) * terms.log_likelihood).sum(-1)
    return Loss(total, total - together * kl.sum(-1), kl.sum(-1))


def draft_objective_together(denoise: Denoise, x0: Tensor, masks: Masks, mask_id: int, together: float) -> Loss:
    xt = apply_mask(x0, masks.mask, mask_id)
    known = torch.stack([xt, x0])  # by the end of a step that writes one token, and of one that writes all
    alone, joint = (
        (token_nll(logits, x0) * masks.mask).unflatten(-1, (masks.weight.shape[-1], -1)).sum(-1)
        for logits in denoise(xt, x0, known)
    )
    total = both_ways(alone, joint, masks, together)
    return Loss(total, total, torch.zeros_like(total))


def token_nll(logits: Tensor, x0: Tensor, score_entropy: bool = False) -> Tensor:
    """-log p(x0_i | ...) for every position, (B, L); or SEDD's bound on it, equal where the outputs are normalised."""
    if score_entropy:
        logits = logits.float().clamp(max=20.0)
        return logits.exp().sum(-1) - 1 - logits.gather(-1, x0.unsqueeze(-1)).squeeze(-1)
    return -logits.float().log_softmax(-1).gather(-1, x0.unsqueeze(-1)).squeeze(-1)


def targets_nll(
    denoise: Denoise,
    x0: Tensor,
    masks: Masks,
    mask_id: int,
    z: Tensor | None,
    focal: float = 0.0,
    score_entropy: bool = False,
    drafts: bool = False,
) -> Tensor:
    """Sum over each block's target tokens, and over the steps where masks have them, of -log p(x0_i | ...): (B, blocks).

    With `focal` each is weighed by (1 - p)^focal, which turns to tokens that are still hard. With `drafts` the targets of a
    step are written from left to right: `denoise` is told in the place of z what is known by the end of it, (B, L), of which
    a token sees what stands before it.
    """
    flat, rows, steps = flatten_steps(x0, masks)
    z = None if z is None else z.repeat_interleave(steps, dim=0)
    if drafts:
        z = apply_mask(rows, flat.mask & ~flat.target, mask_id)
    nll = token_nll(denoise(apply_mask(rows, flat.mask, mask_id), rows, z), rows, score_entropy) * flat.target
    nll = nll * (1 - (-nll).exp()) ** focal if focal else nll
    return nll.view(len(x0), steps, masks.weight.shape[-1], -1).sum((1, 3))


def code_terms(codes: ScoreCodes, x0: Tensor, masks: Masks, mask_id: int) -> Codes | ChainCodes:
    """What codes say of the targets of all steps."""
    flat, rows, steps = flatten_steps(x0, masks)
    return codes(apply_mask(rows, flat.mask, mask_id), rows, flat.target).merge_steps(steps)


def flatten_steps(x0: Tensor, masks: Masks) -> tuple[Masks, Tensor, int]:
    """Masks (B, J, L) as (B * J, L), x0 repeated to match, and J; one step if there is no dimension of steps."""
    if masks.mask.dim() == 2:
        return masks, x0, 1
    steps = masks.mask.shape[1]
    return Masks(masks.mask.flatten(0, 1), masks.target.flatten(0, 1), masks.weight), x0.repeat_interleave(steps, 0), steps


def infer(encode: Encode, prior: Prior | None, x0: Tensor, masks: Masks, mask_id: int) -> tuple[Gaussian, Gaussian]:
    """Posterior and prior of z, each (B, blocks, dim): at the first step, and told the targets of all that share z."""
    mask, target = masks.mask, masks.target
    if mask.dim() == 3:
        mask, target = mask[:, 0], target.any(1)
    posterior = encode(x0, mask, target)
    if prior is None:
        return posterior, standard_normal(posterior.mean)
    return posterior, prior(apply_mask(x0, mask, mask_id), x0)


def importance_terms(
    denoise: Denoise, posterior: Gaussian, prior: Gaussian, x0: Tensor, masks: Masks, mask_id: int, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """-log p(targets | z_s) and log p(z_s) - log q(z_s) for S draws z_s of the posterior, each (S, B, blocks)."""
    draws = len(noise)
    z = posterior.draw(noise)  # (S, B, blocks, dim)
    many = masks.map(lambda part: part.repeat(draws, *[1] * (part.dim() - 1)))
    nll = targets_nll(denoise, x0.repeat(draws, 1), many, mask_id, z.flatten(0, 1))
    return nll.unflatten(0, (draws, -1)), prior.log_prob(z) - posterior.log_prob(z)


def exact_objective(
    denoise: Denoise,
    encode: Encode | None,
    x0: Tensor,
    block_size: int,
    mask_id: int,
    *,
    prior: Prior | None = None,
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
        masks = Masks(mask, mask, torch.full((batch, blocks), coefficient, device=x0.device, dtype=torch.float64))
        for eps in draws:
            terms.append(objective(denoise, encode, x0, masks, mask_id, prior=prior, noise=eps, kl_weight=kl_weight))
    return Loss(*(torch.stack(part).sum(0) / len(draws) for part in zip(*terms, strict=True)))
