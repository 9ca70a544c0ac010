"""Codes that nothing needs take over half of those that several modes of the data share."""

import math

import torch
from torch import Tensor

from vmd.diagnostics import code_posterior
from vmd.distributed import forget_whole_weights, full, mean_of_all, take_shard, world_size
from vmd.ensemble import Ensemble
from vmd.model import VMD
from vmd.step import Batch


@torch.no_grad()
def split_codes(model: VMD | Ensemble, batch: Batch, generator: torch.Generator, fixed: Tensor | None = None) -> None:
    """Let codes that are hardly missed take over half of costly ones: a copy with a little noise, and half of the prior.

    Two modes of the data that share a code stay together for ever, because a code that is unused, or one of several for
    another mode, has no gradient towards them. After a split the halves grow apart. Every process splits the same codes.
    """
    if isinstance(model, Ensemble):
        for index in range(len(model)):
            member, parameters = model.member(index)
            split_member(member, parameters, batch.x0[index], fixed, generator)
    else:
        given = fixed if batch.given is None else batch.given
        split_member(model, dict(model.named_parameters()), batch.x0, given, generator)


def split_member(
    model: VMD, parameters: dict[str, Tensor], x0: Tensor, fixed: Tensor | None, generator: torch.Generator
) -> None:
    every = math.ceil(len(x0) * world_size() / 1024)  # of some thousand rows of all processes
    fixed = fixed[::every] if fixed is not None and fixed.dim() == 2 else fixed
    posterior, _, log_likelihood = code_posterior(model, x0[::every], fixed)  # (blocks of all rows, K)
    usage = mean_of_all(posterior.mean(0))
    cost = mean_of_all(-(posterior * log_likelihood).mean(0))  # nats per block that each code leaves to its tokens
    worth = mean_of_all(
        -torch.log1p(-posterior.clamp(max=1 - 1e-6)).mean(0)
    )  # nats that the data would cost more without it
    few = max(1, len(usage) // 16)  # at a time: the others must keep up
    source, spare = cost.argsort(descending=True)[:few], worth.argsort()[:few]
    pays = (worth[spare] < 0.5 * cost[source]) & (cost[source] > 0.1 * usage[source]) & ~torch.isin(spare, source)
    if not bool(pays.any()):
        return
    source, spare = source[pays], spare[pays]
    forget_whole_weights(model)
    codes = ("code_scale.weight", "code_shift.weight", "code_table.weight", "code_next.weight", "code.weight")
    names = (*codes, "prior.weight", "prior.bias")
    for name in names:
        kept = parameters.get(f"decoder.pathway.{name}")
        if kept is None:
            continue
        rows = full(kept).clone()
        if name == "code_next.weight":  # what comes before a code is copied too; half of each by the prior's bias
            rows[:, spare] = rows[:, source]
        if name == "prior.bias":
            rows[source] -= math.log(2)
        rows[spare] = rows[source]
        if not name.startswith("prior"):
            noise = torch.randn(rows[source].shape, generator=generator, device=rows.device)
            rows[spare] += 0.3 * rows[source].std(-1, keepdim=True) * noise
        kept.copy_(take_shard(rows, kept))
