"""Certified likelihoods: how many nats a sampler of N steps per block needs for given sequences, never fewer than the truth.

A likelihood belongs to a sampler. Here it fills blocks in order, each in N steps and a uniformly random order, draws every
token from its predicted distribution, and z *fresh* for every step or *once* per block. docs/likelihood.md derives the
bounds. Nothing here knows a network: a test can drive the bounds with oracles that have the members of `Scorable`.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vmd.config import InvalidInput, ModelConfig, require, require_choice
from vmd.latent import Gaussian
from vmd.masking import Masks, apply_mask, draw_steps
from vmd.objective import ChainCodes, Codes, code_terms, importance_terms, infer, targets_nll
from vmd.sampling import ORDERS, Order, check_values, confidence, first_by, is_of_integers, named, reveal_counts

STEPS_SCORED = 8  # of a sampler with many steps, the bound scores this many, drawn without bias


class Scorable(Protocol):
    """What the bounds need of a model: as `vmd.objective` needs it."""

    config: ModelConfig

    def denoise(self, xt: Tensor, x0: Tensor, z: Tensor | None = None) -> Tensor: ...
    def encode(self, x0: Tensor, mask: Tensor, target: Tensor | None = None) -> Gaussian: ...
    def gaussian_prior(self, xt: Tensor, x0: Tensor) -> Gaussian: ...
    def codes(self, xt: Tensor, x0: Tensor, target: Tensor) -> Codes | ChainCodes: ...


class Bits(NamedTuple):
    """An estimate with its standard error, in bits per token."""

    value: float
    stderr: float | None


def check_rows(config: ModelConfig, x0: Tensor) -> None:
    shape = f"rows of shape {tuple(x0.shape)}: expected (rows, {config.length}), the model's length"
    require(x0.dim() == 2 and x0.shape[1] == config.length, shape)
    require(is_of_integers(x0), f"rows of {x0.dtype}: expected integers")
    if x0.numel():
        low, high = int(x0.min()), int(x0.max())
        known = low >= 0 and high < config.vocab_size
        require(known, f"token id {low if low < 0 else high} in the rows: expected 0 to {config.vocab_size - 1}")
        check_values(config, x0)


def check(config: ModelConfig, steps: int, z: str, samples: int) -> None:
    """Refuse what has no bound, or no meaning."""
    r = config.block_size
    require(1 <= steps <= r, f"steps={steps}: expected 1 to {r}, the block size (steps are counted per block)")
    require_choice("z", z, ("fresh", "once"))
    require(samples >= 1, f"samples={samples}: expected at least 1 draw of z")
    if z == "fresh" and steps > 1 and config.z_reaches_later_blocks:
        raise InvalidInput(
            "z=fresh: expected once: this model's z also enters the clean stream (model.latent.on_clean), and which of its "
            "draws later blocks would see is undefined"
        )


@torch.no_grad()
def nll_bound(
    model: Scorable,
    x0: Tensor,
    steps: int,
    *,
    z: str = "fresh",
    samples: int = 1,
    fixed: Tensor | None = None,
    generator: torch.Generator | None = None,
    chunk: int = 4_096,
    steps_scored: int = STEPS_SCORED,
    on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """(B,): an unbiased draw of an upper bound on -log p(x0 | fixed tokens) in nats, for the sampler of N = steps.

    The chance is in the order and in z. `samples` is S of the importance-weighted bound of a Gaussian latent (1: the
    ELBO); codes are summed exactly. `fixed`, (L,) or (B, L), marks the tokens that are given. No network pass has more than
    `chunk` rows, or the steps of one row if those are more. With fresh z (or none) and more than `steps_scored` steps, so
    many of them are drawn evenly and reweighted; with z once all of them are needed.
    """
    config = model.config
    check(config, steps, z, samples)
    check_rows(config, x0)
    x0 = x0.long()
    fresh = (z == "fresh" or steps == 1 or not config.has_latent) and not config.z_reaches_later_blocks
    kept = min(steps, steps_scored) if fresh else steps
    rows = max(1, min(chunk // kept, 2**28 // (steps * config.length)))  # the masks of all steps take memory too
    parts: list[Tensor] = []
    given = [fixed] * len(x0.split(rows)) if fixed is None or fixed.dim() == 1 else fixed.split(rows)
    for some, known in zip(x0.split(rows), given, strict=True):
        masks = draw_steps(some, config.block_size, (steps,), whole=True, fixed=known, generator=generator)
        if kept < steps:
            masks = keep_some_steps(masks, kept, generator)
        if fresh:  # every step draws a z of its own: a row for each
            mask, target = masks.mask.flatten(0, 1), masks.target.flatten(0, 1)
            scored = target.unflatten(-1, (config.blocks, -1)).any(-1).double()
            single = Masks(mask, target, scored)
            nll = marginal_nll(model, some.repeat_interleave(kept, 0), single, samples, generator, chunk) * scored
            parts.append(nll.view(len(some), kept, -1).sum((1, 2)) * (steps / kept))
        else:
            nll = marginal_nll(model, some, masks, samples, generator, chunk)
            scored = 1.0 if config.z_reaches_later_blocks else masks.weight.double()  # a full block needs no z
            parts.append((nll * scored).sum(-1))
        on_rows(min(len(parts) * rows, len(x0)), len(x0))
    return torch.cat(parts)


def keep_some_steps(masks: Masks, count: int, generator: torch.Generator | None) -> Masks:
    """`count` of the J steps of every row, evenly spread behind a random start: each is kept with probability count / J."""
    rows, steps = masks.mask.shape[:2]
    start = torch.rand(rows, 1, generator=generator, device=masks.mask.device, dtype=torch.float64)
    index = ((start + torch.arange(count, device=start.device)) * (steps / count)).long().clamp(max=steps - 1)
    index = index.unsqueeze(-1).expand(-1, -1, masks.mask.shape[-1])
    return Masks(masks.mask.gather(1, index), masks.target.gather(1, index), masks.weight)


def marginal_nll(
    model: Scorable, x0: Tensor, masks: Masks, samples: int, generator: torch.Generator | None, chunk: int
) -> Tensor:
    """(B, blocks) in float64: -log of the mean over z of p(targets | revealed, z), or a bound on it for a Gaussian.

    Where z^b reaches later blocks a mean block by block would spend z^{<b} twice and certify nothing. There the mean is over
    whole trajectories z^{1:B}, and the result (B, 1) is for the sequence.
    """
    config, mask_id = model.config, model.config.vocab_size
    if config.latent.kind == "none":
        return targets_nll(model.denoise, x0, masks, mask_id, None, drafts=config.draft > 0).double()
    if config.latent.coded:
        return -code_terms(model.codes, x0, masks, mask_id).double().log_joint().logsumexp(-1)
    posterior, prior = infer(model.encode, model.gaussian_prior, x0, masks, mask_id)
    steps = masks.mask.shape[1] if masks.mask.dim() == 3 else 1
    at_once = max(1, chunk // (len(x0) * steps))
    joint = config.z_reaches_later_blocks
    total = None
    for start in range(0, samples, at_once):
        shape = (min(at_once, samples - start), *posterior.mean.shape)
        noise = torch.randn(shape, generator=generator, device=x0.device)
        nll, log_ratio = importance_terms(model.denoise, posterior, prior, x0, masks, mask_id, noise)
        log_weights = log_ratio.double() - nll.double()  # (s, B, blocks)
        if joint:
            log_weights = log_weights.sum(-1, keepdim=True)
        summed = log_weights.logsumexp(0)
        total = summed if total is None else torch.logaddexp(total, summed)
    assert total is not None
    return math.log(samples) - total


@torch.no_grad()
def confidence_order_nll(model: Scorable, x0: Tensor, steps: int, order: Order, *, chunk: int = 4_096) -> Tensor:
    """(B,): exactly -log p(x0) of the sampler without z whose order is by confidence: the order follows from the tokens.

    What a step reveals is a function of its predictions, so one sequence has one order, and nothing is averaged.
    """
    config, r, mask_id = model.config, model.config.block_size, model.config.vocab_size
    check(config, steps, "fresh", 1)
    if not callable(order):
        require_choice("order", order, ORDERS[1:])
    require(
        not config.has_latent,
        f"order={named(order)}: expected random for a model with a latent: its order depends on the z that was drawn",
    )
    parts = []
    for rows in x0.split(chunk):
        masked = torch.ones_like(rows, dtype=torch.bool)
        nll = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        for count in reveal_counts(torch.full((len(rows),), r, device=rows.device), steps):
            xt = apply_mask(rows, masked, mask_id)
            logits = model.denoise(xt, rows, None)
            by_block = logits.double().softmax(-1).unflatten(-2, (-1, r))  # as the sampler asks
            score = confidence(by_block, order)
            score = score.masked_fill(~masked.unflatten(-1, (-1, r)), -torch.inf)
            first = first_by(score, count.unsqueeze(-1)).flatten(-2)
            revealed = masked & first
            if config.draft:  # the order is chosen before the step writes anything
                logits = model.denoise(xt, rows, torch.where(masked & ~revealed, mask_id, rows))
            log_p = logits.double().log_softmax(-1).gather(-1, rows.unsqueeze(-1)).squeeze(-1)
            nll -= (log_p * revealed).sum(-1)
            masked = masked & ~revealed
        parts.append(nll)
    return torch.cat(parts)


def all_orders(block_size: int, steps: int) -> Tensor:
    """(O, N, r) bool: every way to split r tokens into steps of the reveal counts; all are equally likely."""
    counts = reveal_counts(torch.tensor(block_size), steps).flatten().tolist()
    plans: list[list[tuple[int, ...]]] = [[]]
    for count in counts:
        plans = [
            [*plan, chosen]
            for plan in plans
            for chosen in itertools.combinations(sorted(set(range(block_size)) - {i for s in plan for i in s}), count)
        ]
    table = torch.zeros(len(plans), steps, block_size, dtype=torch.bool)
    for o, plan in enumerate(plans):
        for j, chosen in enumerate(plan):
            table[o, j, list(chosen)] = True
    return table


@torch.no_grad()
def enumerate_orders(
    model: Scorable,
    x0: Tensor,
    steps: int,
    *,
    z: str = "fresh",
    samples: int = 1,
    generator: torch.Generator | None = None,
    chunk: int = 4_096,
) -> Tensor:
    """(O, B, blocks): -log p(x0^b | order) of every order of a small block, exact where z is summed or absent.

    Its mean over orders is the bound that `nll_bound` estimates; -log of the mean of exp(-.) is the likelihood itself.
    """
    config = model.config
    check(config, steps, z, samples)
    require(config.block_size <= 6, f"block_size={config.block_size}: expected at most 6 to enumerate all orders")
    require(
        steps == 1 or not config.z_reaches_later_blocks,
        f"steps={steps}: expected 1 where z reaches later blocks, whose orders would have to be enumerated jointly",
    )
    batch, rows = len(x0), max(1, chunk // steps)
    out = []
    for order in all_orders(config.block_size, steps).to(x0.device):
        target = order.repeat(1, config.blocks)  # (N, L)
        mask = target.flip(0).cumsum(0).flip(0) > 0  # masked until its own step is over
        nlls = []
        for some in x0.split(rows):
            many = Masks(
                mask.expand(len(some), -1, -1),
                target.expand(len(some), -1, -1),
                torch.ones(len(some), config.blocks, device=x0.device),
            )
            if z == "once" or config.z_reaches_later_blocks:
                nlls.append(marginal_nll(model, some, many, samples, generator, chunk))
                continue
            each = Masks(many.mask.flatten(0, 1), many.target.flatten(0, 1), many.weight.repeat_interleave(steps, 0))
            nll = marginal_nll(model, some.repeat_interleave(steps, 0), each, samples, generator, chunk)
            nlls.append(nll.view(len(some), steps, -1).sum(1))
        out.append(torch.cat(nlls).view(batch, -1))
    return torch.stack(out)


def exact_nll(per_order: Tensor) -> Tensor:
    """(O, B, blocks) of `enumerate_orders` -> (B,): -log p(x0), the blocks' orders being independent."""
    return (math.log(len(per_order)) - (-per_order).logsumexp(0)).sum(-1)


@torch.no_grad()
def random_order_nll(model: Scorable, x0: Tensor, steps: int, *, chunk: int = 4_096) -> tuple[Tensor, Tensor]:
    """(B,) each: exactly -log p(x0) of the sampler in random order, z fresh; and its mean over orders, as in `nll_bound`.

    The second is what is usually printed, and above the first by as much as the order says of the tokens. Orders that have
    revealed the same tokens S go on alike: p(S and all that leads there) is a sum over the last step's tokens, and of r
    tokens one by one there are r 2^(r-1) steps where there are r! orders.
    """
    config, r = model.config, model.config.block_size
    check(config, steps, "fresh", 1)
    check_rows(config, x0)
    check_summable(config)
    every = frozenset(range(r))
    log_p: dict[frozenset[int], Tensor] = {frozenset(): torch.zeros(len(x0), config.blocks, dtype=torch.float64)}
    log_p = {none: zero.to(x0.device) for none, zero in log_p.items()}
    bound = torch.zeros(len(x0), dtype=torch.float64, device=x0.device)
    for count in reveal_counts(torch.tensor(r), steps).flatten().tolist():
        reached: dict[frozenset[int], Tensor] = {}
        ways = math.comb(r - len(next(iter(log_p))), count)
        for known, before in log_p.items():
            for chosen in map(frozenset, itertools.combinations(sorted(every - known), count)):
                nll = torch.cat([step_nll(model, some, known, chosen, chunk) for some in x0.split(chunk)])
                bound += nll.sum(-1) / (len(log_p) * ways)
                arriving, after = before - nll - math.log(ways), known | chosen
                reached[after] = torch.logaddexp(reached[after], arriving) if after in reached else arriving
        log_p = reached
    return -log_p[every].sum(-1), bound


LARGEST_SUMMED = 8  # tokens of a block: at most 1,024 passes


def check_summable(config: ModelConfig) -> None:
    r = config.block_size
    require(config.latent.kind != "gaussian", "a Gaussian latent: expected codes or none, which are summed exactly")
    require(r <= LARGEST_SUMMED, f"block_size={r}: expected at most {LARGEST_SUMMED} to sum over all orders")


def step_nll(model: Scorable, x0: Tensor, known: frozenset[int], chosen: frozenset[int], chunk: int) -> Tensor:
    """(B, blocks): what it costs every block to reveal some of its tokens when some are known."""
    config = model.config
    places = torch.arange(config.length, device=x0.device) % config.block_size
    mask, target = ~torch.isin(places, as_tensor(known, x0)), torch.isin(places, as_tensor(chosen, x0))
    weight = torch.ones(len(x0), config.blocks, device=x0.device)
    masks = Masks(mask.expand(len(x0), -1), target.expand(len(x0), -1), weight)
    return marginal_nll(model, x0, masks, 1, None, chunk)


def as_tensor(places: frozenset[int], like: Tensor) -> Tensor:
    return torch.tensor(sorted(places), dtype=torch.long, device=like.device)


def in_bits(nats: Tensor, tokens: int, groups: Tensor | None = None, probabilities: Tensor | None = None) -> Bits:
    """Mean and standard error in bits per token of nats (B,) of B sequences.

    With groups, rows of group g are draws of the bound of one sequence of known probability: the mean over the data is then
    a sum, and the error is that of order and z alone.
    """
    scale = 1 / (tokens * math.log(2))
    values = nats.double().cpu() * scale
    if groups is None or probabilities is None:
        return Bits(float(values.mean()), float(values.std() / len(values) ** 0.5) if len(values) > 1 else None)
    table = values[groups.argsort(stable=True)].view(len(probabilities), -1)  # (S, draws)
    mean = float((probabilities * table.mean(1)).sum())
    if table.shape[1] == 1:
        return Bits(mean, None)
    return Bits(mean, float((probabilities**2 * table.var(1) / table.shape[1]).sum().sqrt()))


def law_bits(model: Scorable, law: Any, score: Callable[[Tensor], Tensor], draws: int) -> Bits:
    """The expectation over a known law of score(x0) (B,) nats, each sequence scored `draws` times; bits per token."""
    index = torch.arange(len(law.sequences)).repeat_interleave(draws)
    device = getattr(model, "device", "cpu")
    return in_bits(score(law.sequences[index].to(device)), law.length, index, law.probabilities)
