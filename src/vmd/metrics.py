"""How good samples are: accuracy and KL against a law that is known, by counting and by integration over z."""

import math

import torch
from torch import Tensor

from vmd.data.synthetic import Law
from vmd.likelihood import nll_bound
from vmd.model import VMD

FLOOR = 1e-8  # probability given to a sequence that was never drawn


def share_error(share: float, count: int) -> float:
    """The standard error of a share of `count`, not zero where none or all were counted (Agresti and Coull 1998)."""
    middle = (share * count + 2) / (count + 4)
    return math.sqrt(middle * (1 - middle) / (count + 4))


def sequence_ids(tokens: Tensor, vocab_size: int) -> Tensor:
    """(..., L) -> (...): each sequence as one number in base V."""
    powers = vocab_size ** torch.arange(tokens.shape[-1] - 1, -1, -1, device=tokens.device)
    return (tokens * powers).sum(-1)


def empirical(tokens: Tensor, law: Law) -> Tensor:
    """(S,): the share of the samples that equal each sequence of the law's support."""
    foreign = (tokens >= law.vocab_size).any(-1, keepdim=True)
    tokens = torch.where(foreign, -1, tokens)
    ids = sequence_ids(tokens, law.vocab_size)
    support = sequence_ids(law.sequences.to(tokens.device), law.vocab_size)
    order = support.argsort()
    place = torch.searchsorted(support[order], ids).clamp(max=len(order) - 1)
    hit = support[order][place] == ids
    counts = torch.bincount(order[place[hit]], minlength=len(support))
    return counts.double().cpu() / len(tokens)


def accuracy(tokens: Tensor, law: Law) -> float:
    """Percentage of samples that are in the support."""
    return 100 * float(empirical(tokens, law).sum())


def kl_to(law: Law, probabilities: Tensor) -> float:
    """KL(law || model) in nats over the law's support, with max(probability, 1e-8), not renormalised."""
    q = probabilities.double().cpu().clamp(min=FLOOR)
    p = law.probabilities
    return float((p * (p.log() - q.log())).sum())


@torch.no_grad()
def one_step_probabilities(
    model: VMD, sequences: Tensor, draws: int = 100_000, *, generator: torch.Generator | None = None, chunk: int = 65_536
) -> Tensor:
    """Eq. 4 (Eq. 3 for one token, Eq. 6 for blocks): (S,), the probability of each sequence by integration over z.

    For samples of one step per block, z drawn once. One block: p(x) = E_z prod_i p(x_i | [MASK].., z). Several blocks: the
    product over blocks of such means given the true prefix; where z^{<b} reaches block b through the clean stream, the mean
    over joint draws of the product. Exact without a latent, and with codes, which are summed.
    """
    config, device = model.config, model.device
    sequences = sequences.to(device)
    if config.latent.coded or config.draft:
        return nll_bound(model, sequences, 1, chunk=chunk // 16).neg().exp().cpu()
    length, r, blocks = config.length, config.block_size, config.blocks
    # The predictions for a sequence depend on its tokens before the last block only: one pass for each such prefix.
    prefixes, which = sequences[:, : length - r].unique(dim=0, return_inverse=True) if blocks > 1 else (None, None)
    if prefixes is None or which is None:
        prefixes, which = sequences[:1, :0], sequences.new_zeros(len(sequences))
    x0 = torch.cat([prefixes, prefixes.new_zeros(len(prefixes), r)], dim=1)  # (U, L)
    draws = draws if config.has_latent else 1
    joint = config.z_reaches_later_blocks
    total = torch.full((len(sequences), 1 if joint else blocks), -math.inf, device=device, dtype=torch.float64)
    per_pass = max(1, chunk // len(x0))
    for start in range(0, draws, per_pass):
        size = min(per_pass, draws - start)
        rows = x0.repeat(size, 1)
        shape = model.latent_shape(len(rows))
        xt, z = torch.full_like(rows, model.mask_id), None
        if shape is not None:
            z = model.gaussian_prior(xt, rows).draw(torch.randn(shape, generator=generator, device=device))
        logits = model.denoise(xt, rows, z)
        log_p = logits.double().log_softmax(-1).unflatten(0, (size, -1))  # (size, U, L, V)
        tokens = torch.stack([log_p[:, which, i, sequences[:, i]] for i in range(length)], dim=-1)  # (size, S, L)
        per_block = tokens.unflatten(-1, (blocks, r)).sum(-1)
        parts = per_block.sum(-1, keepdim=True) if joint else per_block
        total = torch.logaddexp(total, parts.logsumexp(0))
    return (total - math.log(draws)).sum(-1).exp().cpu()
