"""Does the latent carry anything? Numbers to act on, from a batch of data at the first step of every block."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vmd.latent import CodeChain, Gaussian
from vmd.masking import Masks
from vmd.model import VMD
from vmd.objective import ChainCodes, code_terms, infer, targets_nll

COLLAPSED = 0.01  # nats per block that z must carry
DEAD = 0.01  # a code is dead if it has less than this part of an even share


class Diagnostics(NamedTuple):
    """All in nats. `spread` is the KL of each dimension of a Gaussian, or the share of blocks that use each code."""

    kl: float  # KL(posterior || prior) per block
    information: float  # what z tells of x: I(x; z) per block within the batch, or the KL if less
    marginal_gap: (
        float | None
    )  # KL(mean posterior || prior): what of the KL tells nothing of x; None if priors differ by row
    nll_gap: float  # nats per token that a z of the prior costs more than one of the posterior
    active: int  # dimensions whose posterior mean varies over the data, or codes that are used
    size: int  # dimensions or codes in all
    spread: list[float]
    limit: float  # the most that I(x; z) can be within so many rows: their log, for each code

    @property
    def limited(self) -> bool:
        """Whether more rows would tell of more: a nat below the limit an estimate lacks less than 0.3."""
        return self.limit == 0 or self.limit - 1 < self.information < self.kl


@torch.no_grad()
def diagnose(
    model: VMD, x0: Tensor, *, fixed: Tensor | None = None, generator: torch.Generator | None = None
) -> Diagnostics | None:
    """None for a model without latent. Blocks that are given whole have no z to speak of and are left out."""
    config = model.config
    if not config.has_latent:
        return None
    mask = torch.ones_like(x0, dtype=torch.bool) if fixed is None else (~fixed).expand_as(x0)
    tokens = int(mask.sum())
    learned = config.latent.coded or config.latent.prior == "learned"
    one_prior = not learned or (config.blocks == 1 and fixed is None)  # the same for every row
    if config.latent.coded:
        return diagnose_codes(model, x0, fixed, tokens, one_prior)
    masks = Masks(mask, mask, torch.ones(len(x0), config.blocks, device=x0.device))
    scored = mask.unflatten(-1, (config.blocks, -1)).any(-1)
    posterior, prior = infer(model.encode, model.gaussian_prior, x0, masks, model.mask_id)
    per_dimension = posterior.kl_by_dimension(prior)  # (B, blocks, dim)
    noise = torch.randn(posterior.mean.shape, generator=generator, device=x0.device)
    z = posterior.draw(noise)
    kl = float(per_dimension.sum(-1)[scored].mean())
    draws = max(1, min(16, 4_096 // noise[0].numel()))  # of z for each row: one is noisy, and many take time
    drawn = [z, *(posterior.draw(torch.randn(z.shape, generator=generator, device=z.device)) for _ in range(draws - 1))]
    information = sum(information_of(posterior, some, scored) for some in drawn) / draws if len(x0) > 1 else kl
    nlls = [targets_nll(model.denoise, x0, masks, model.mask_id, some) for some in (z, prior.draw(noise))]
    variance = posterior.mean.var(0)[scored.any(0)].mean(0) if len(x0) > 1 else torch.zeros(config.latent.dim)
    return Diagnostics(
        kl,
        max(0.0, min(information, kl)),
        max(0.0, kl - information) if one_prior else None,
        float((nlls[1] - nlls[0]).sum() / tokens),
        int((variance > 0.01).sum()),
        config.latent.dim,
        per_dimension[scored].mean(0).tolist(),
        math.log(len(x0)),
    )


def information_of(posterior: Gaussian, z: Tensor, scored: Tensor) -> float:
    """log q(z_i | x_i) against log of the mean over rows j of q(z_i | x_j), block by block."""
    pairs = torch.stack([posterior.log_prob(z[i]) for i in range(len(z))])  # (B, B, blocks): z_i under x_j
    return float((posterior.log_prob(z) - (pairs.logsumexp(1) - math.log(len(z))))[scored].mean())


def diagnose_codes(model: VMD, x0: Tensor, fixed: Tensor | None, tokens: int, one_prior: bool) -> Diagnostics:
    """The posterior over codes is known: entropies of it and of its mean, block by block, give the information."""
    posterior, log_prior, log_likelihood = code_posterior(model, x0, fixed)  # (rows and blocks, K) each
    chain = model.config.latent.kind == "chain"
    blocks = len(posterior) // len(x0)
    usage_by_block = posterior.unflatten(0, (len(x0), blocks)).mean(0)  # (blocks, K)
    # Of a chain, the sum over its codes of what each says by itself.
    each = model.config.block_size // model.config.latent.span if chain else 1
    kl = each * float((posterior * ((posterior + 1e-30).log() - log_prior)).sum(-1).mean())
    own = torch.special.entr(posterior).sum(-1).mean()
    information = each * float(torch.special.entr(usage_by_block).sum(-1).mean() - own)
    information = information if len(x0) > 1 else kl
    expected = [-(weights * log_likelihood).sum() for weights in (posterior, log_prior.exp())]
    usage = usage_by_block.mean(0)
    return Diagnostics(
        kl,
        max(0.0, min(information, kl)),
        max(0.0, kl - information) if one_prior else None,
        float((expected[1] - expected[0]) / tokens),
        int((usage >= DEAD / len(usage)).sum()),
        len(usage),
        usage.tolist(),
        each * math.log(len(x0)),
    )


def code_posterior(model: VMD, x0: Tensor, fixed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Posterior, log-prior and log-likelihood of every code at the first step of every block that is not given whole.

    Each is (B * blocks, K), the blocks of a row beside each other. Of a chain: of each of its codes, (B * codes, K).
    """
    config = model.config
    mask = torch.ones_like(x0, dtype=torch.bool) if fixed is None else (~fixed).expand_as(x0)
    masks = Masks(mask, mask, torch.ones(len(x0), config.blocks, device=x0.device))
    terms = code_terms(model.codes, x0, masks, model.mask_id)
    kept = mask.unflatten(-1, (config.blocks, -1)).any(-1).all(0)  # blocks with something to write in every row
    if isinstance(terms, ChainCodes):
        chain = CodeChain(terms.chain.bias[:, kept], terms.chain.next)
        log_likelihood = terms.log_likelihood[:, kept]
        found = (chain.marginals(log_likelihood), chain.marginals(torch.zeros_like(log_likelihood)).log(), log_likelihood)
        posterior, log_prior, log_likelihood = (part.flatten(0, 2) for part in found)
        return posterior, log_prior, log_likelihood
    log_prior, log_likelihood = terms.log_prior[:, kept].flatten(0, 1), terms.log_likelihood[:, kept].flatten(0, 1)
    return (log_prior + log_likelihood).softmax(-1), log_prior, log_likelihood


def advice(found: Diagnostics, kind: str) -> str | None:
    """One line for a latent that carries nothing."""
    if found.information >= COLLAPSED and found.active:
        return None
    if kind in ("categorical", "chain"):
        tries = "try more model.latent.codes, training.split_codes_every or another training.seed"
    else:
        tries = (
            "try a smaller objective.kl_weight, objective.free_bits, model.latent.kind=categorical, "
            "or objective.samples=16 with objective.kl_weight=1"
        )
    return (
        f"the latent has collapsed: z carries {found.information:.4f} nats per block; {tries} "
        "(if the tokens of a block do not depend on each other, z has nothing to say)"
    )


def describe(found: Diagnostics, kind: str) -> str:
    unit = "dimensions active" if kind == "gaussian" else "codes used"
    information = f"{found.information:.3f}"
    gap = "" if found.marginal_gap is None else f", mean posterior to prior {found.marginal_gap:.3f}"
    if found.limited:  # what so few rows cannot tell would be taken for the gap
        limit = f" (so few rows tell at most {found.limit:.3f})"
        information, gap = f"at least {information}{limit}" if found.limit else "not told by one row", ""
    return (
        f"what z says, nats per block: KL {found.kl:.3f}, I(x; z) {information}{gap}; "
        f"{found.active} of {found.size} {unit}; with a z drawn from the prior tokens cost {found.nll_gap:.3f} more"
    )
