"""Does the latent carry anything? Numbers to act on, from a batch of data at the first step of every block."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vmd.masking import Masks
from vmd.model import VMD
from vmd.objective import code_terms, infer, targets_nll

COLLAPSED = 0.01  # nats per block that z must carry
DEAD = 0.01  # a code is dead if it has less than this part of an even share


class Diagnostics(NamedTuple):
    """All in nats. `spread` is the KL of each dimension of a Gaussian, or the share of blocks that use each code."""

    kl: float  # KL(posterior || prior) per block
    information: float  # I(x; z) per block, estimated within the batch: at most the log of its rows
    marginal_gap: float  # KL(mean posterior || prior): what of the KL tells nothing about x
    nll_gap: float  # nats per token that a z of the prior costs more than one of the posterior
    active: int  # dimensions whose posterior mean varies over the data, or codes that are used
    size: int  # dimensions or codes in all
    spread: list[float]


@torch.no_grad()
def diagnose(
    model: VMD, x0: Tensor, *, fixed: Tensor | None = None, generator: torch.Generator | None = None
) -> Diagnostics | None:
    """None for a model without latent."""
    config = model.config
    if not config.has_latent:
        return None
    mask = torch.ones_like(x0, dtype=torch.bool) if fixed is None else (~fixed).expand_as(x0)
    masks = Masks(mask, mask, torch.ones(len(x0), config.blocks, device=x0.device))
    scored = mask.unflatten(-1, (config.blocks, -1)).any(-1)  # blocks that are all given have no z to speak of
    tokens = int(mask.sum())
    if config.latent.kind == "categorical":
        return diagnose_codes(model, x0, masks, scored, tokens)
    posterior, prior = infer(model.encode, model.gaussian_prior, x0, masks, model.mask_id)
    shift = (posterior.mean - prior.mean) * (-prior.log_std).exp()
    log_ratio = posterior.log_std - prior.log_std
    per_dimension = 0.5 * ((2 * log_ratio).exp() + shift**2 - 1 - 2 * log_ratio)  # (B, blocks, dim)
    noise = torch.randn(posterior.mean.shape, generator=generator, device=x0.device)
    z = posterior.draw(noise)
    # log q(z_i | x_i) against log of the mean over rows j of q(z_i | x_j), block by block
    pairs = torch.stack([posterior.log_prob(z[i]) for i in range(len(z))])  # (B, B, blocks): z_i under x_j
    own = posterior.log_prob(z)
    information = (own - (pairs.logsumexp(1) - math.log(len(z))))[scored].mean()
    kl = per_dimension.sum(-1)[scored].mean()
    nlls = [targets_nll(model.denoise, x0, masks, model.mask_id, some) for some in (z, prior.draw(noise))]
    variance = posterior.mean.var(0).mean(0) if len(x0) > 1 else torch.zeros(config.latent.dim)
    return Diagnostics(
        float(kl),
        max(0.0, float(information)),
        float(kl - information),
        float((nlls[1] - nlls[0]).sum() / tokens),
        int((variance > 0.01).sum()),
        config.latent.dim,
        per_dimension[scored].mean(0).tolist(),
    )


def diagnose_codes(model: VMD, x0: Tensor, masks: Masks, scored: Tensor, tokens: int) -> Diagnostics:
    """The posterior over codes is known: its mean is the usage, and entropies give the information."""
    log_prior, log_likelihood = code_terms(model.codes, x0, masks, model.mask_id)
    posterior = (log_prior + log_likelihood).softmax(-1)
    usage = posterior[scored].mean(0)
    kl = (posterior * ((posterior + 1e-30).log() - log_prior)).sum(-1)[scored].mean()
    information = torch.special.entr(usage).sum() - torch.special.entr(posterior).sum(-1)[scored].mean()
    expected = [-(weights * log_likelihood).sum(-1).sum() for weights in (posterior, log_prior.exp())]
    return Diagnostics(
        float(kl),
        max(0.0, float(information)),
        float(kl - information),
        float((expected[1] - expected[0]) / tokens),
        int((usage >= DEAD / len(usage)).sum()),
        len(usage),
        usage.tolist(),
    )


def code_posterior(model: VMD, x0: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior and log-likelihood of every code at the first step of every block, (B, blocks, K) each."""
    mask = torch.ones_like(x0, dtype=torch.bool)
    masks = Masks(mask, mask, torch.ones(len(x0), model.config.blocks, device=x0.device))
    log_prior, log_likelihood = code_terms(model.codes, x0, masks, model.mask_id)
    return (log_prior + log_likelihood).softmax(-1), log_likelihood


def advice(information: float | None, kind: str) -> str | None:
    """One line for a latent that carries nothing."""
    if information is None or information >= COLLAPSED:
        return None
    if kind == "categorical":
        tries = "try more model.latent.codes or another training.seed"
    else:
        tries = (
            "try a smaller objective.kl_weight, objective.free_bits, objective.samples=16 or model.latent.kind=categorical"
        )
    return (
        f"the latent has collapsed: z carries {information:.4f} nats per block; {tries} "
        "(if the tokens of a block do not depend on each other, z has nothing to say)"
    )


def describe(found: Diagnostics, kind: str) -> str:
    unit = "codes used" if kind == "categorical" else "dimensions active"
    return (
        f"z: KL {found.kl:.3f}, I(x; z) {found.information:.3f}, mean posterior to prior {found.marginal_gap:.3f} nats per "
        f"block; {found.active} of {found.size} {unit}; tokens cost {found.nll_gap:.3f} nats more under a z of the prior"
    )
