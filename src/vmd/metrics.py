"""How good samples are: accuracy and KL against a law that is known, by counting and by integration over z."""

import math

import torch
from torch import Tensor

from vmd.data.synthetic import Law
from vmd.model import VMD

FLOOR = 1e-8  # probability given to a sequence that was never drawn


def sequence_ids(tokens: Tensor, vocab_size: int) -> Tensor:
    """(..., L) -> (...): each sequence as one number in base V."""
    powers = vocab_size ** torch.arange(tokens.shape[-1] - 1, -1, -1, device=tokens.device)
    return (tokens * powers).sum(-1)


def empirical(tokens: Tensor, law: Law) -> Tensor:
    """(S,): the share of the samples that equal each sequence of the law's support."""
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
    """(S,): probability of each sequence when every block is sampled in one step, z drawn once: an integral over z.

    One block: p(x) = E_z prod_i p(x_i | [MASK].., z), and the same z serve all sequences. Several blocks: the product over
    blocks of such means given the true prefix; where z^{<b} reaches block b, the mean over joint draws of the product.
    Without a latent it is exact.
    """
    config, device = model.config, model.device
    sequences = sequences.to(device)
    count, length = sequences.shape
    if not config.has_latent:
        draws = 1
    one_block = config.blocks == 1
    rows_per_draw = 1 if one_block else count
    joint = config.has_latent and config.latent.on_clean
    total = torch.full((count, 1 if joint else config.blocks), -math.inf, device=device, dtype=torch.float64)
    for start in range(0, draws, max(1, chunk // rows_per_draw)):
        size = min(max(1, chunk // rows_per_draw), draws - start)
        x0 = sequences.new_zeros(size, length) if one_block else sequences.repeat(size, 1)
        shape = model.latent_shape(len(x0))
        z = None if shape is None else torch.randn(shape, generator=generator, device=device)
        logp = model.denoise(torch.full_like(x0, model.mask_id), x0, z).double().log_softmax(-1)
        if one_block:
            parts = torch.stack([logp[:, i, sequences[:, i]] for i in range(length)]).sum(0).unsqueeze(-1)  # (size, S, 1)
        else:
            tokens = logp.gather(-1, x0.unsqueeze(-1)).squeeze(-1).view(size, count, config.blocks, -1).sum(-1)
            parts = tokens.sum(-1, keepdim=True) if joint else tokens
        total = torch.logaddexp(total, parts.logsumexp(0))
    return (total - math.log(draws)).sum(-1).exp().cpu()
