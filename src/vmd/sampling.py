"""Algorithms 2 and 4 as one function: blocks in order, N steps per block, one latent per block.

Nothing here knows a network: anything with the members of `Sampleable` can be sampled.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vmd.config import InvalidInput, ModelConfig, is_number, is_whole, require, require_choice
from vmd.masking import ceil_share

ORDERS = ("random", "prob", "margin", "entropy")
Order = str | Callable[[Tensor], Tensor]  # one of these, or how sure a step is of each position: (..., r, V) -> (..., r)
RULES = ("argmax", "sample")
DRAWS = ("once", "fresh", "likeliest")  # of z


class BlockPredictor(Protocol):
    """Answers for a batch. One that has `prepare(block)` is told of every step before it (`vmd.predictor.Predictor`)."""

    def predict(self, canvas: Tensor, block: int, z: Tensor | None, noise: Tensor | None = None) -> Tensor: ...
    def read(self, canvas: Tensor, first: int, last: int, z: Tensor | None, noise: Tensor | None) -> int: ...
    def commit(self, canvas: Tensor, block: int, z: Tensor | None) -> int: ...


class Sampleable(Protocol):
    """What the sampler needs of a model: its shape, its latents' shape, and a predictor for a batch."""

    config: ModelConfig

    def latent_shape(self, batch: int) -> tuple[int, int, int] | None: ...
    def predictor(self, batch: int, *, cached: bool = True) -> BlockPredictor: ...


class Step(NamedTuple):
    """One step of the trace: the canvas after it ([MASK] is the vocabulary size), and what it revealed."""

    block: int
    step: int
    canvas: Tensor  # (n, L)
    revealed: Tensor  # (n, L) bool
    confidence: Tensor  # (n, L): the order's score of every position that was masked before the step; nan elsewhere


class Samples(NamedTuple):
    tokens: Tensor  # (n, L)
    z: Tensor | None  # (n, blocks, dim): the latent in force when each block was finished
    nfe: int  # denoising evaluations per row
    cache_passes: int  # further passes, over blocks that were given or finished, to fill the cache
    trace: list[Step]

    def first(self, rows: int) -> "Samples":
        if rows == len(self.tokens):
            return self
        trace = [Step(s.block, s.step, *(getattr(s, name)[:rows] for name in Step._fields[2:])) for s in self.trace]
        return self._replace(tokens=self.tokens[:rows], z=None if self.z is None else self.z[:rows], trace=trace)

    @staticmethod
    def concatenate(parts: "list[Samples]") -> "Samples":
        """Samples of several batches as one. Evaluations are per row, so they are not added up."""
        if len(parts) == 1:
            return parts[0]
        zs = [part.z for part in parts if part.z is not None]
        trace = [
            Step(first.block, first.step, *(torch.cat([getattr(s, name) for s in steps]) for name in Step._fields[2:]))
            for steps in zip(*(part.trace for part in parts), strict=True)
            for first in steps[:1]
        ]
        return Samples(
            torch.cat([part.tokens for part in parts]),
            torch.cat(zs) if zs else None,
            max(part.nfe for part in parts),
            max(part.cache_passes for part in parts),
            trace,
        )


def hashed_uniforms(seeds: Tensor, start: int, count: int) -> Tensor:
    """(B, count) numbers in (0, 1), a function of the row's seed and of start, start + 1, ... alone: SplitMix64, counted.

    The same on every device, and without a generator for every row.
    """

    def mix(x: Tensor) -> Tensor:
        x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed number
        x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
        return x ^ (x >> 31 & 0x1FFFFFFFF)

    golden = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
    counter = torch.arange(start + 1, start + count + 1, device=seeds.device)
    bits = mix(mix(seeds).unsqueeze(1) + counter * golden)
    return ((bits >> 12 & 0xFFFFFFFFFFFFF).double() + 0.5) * 2.0**-52  # 53 bits could round to 1


class Noise:
    """All chance of a batch: one generator for all rows, or one seed per row (then a row is the same in any batch)."""

    def __init__(self, rows: int, device, generator: torch.Generator | None, seeds: Sequence[int] | None):
        self.rows, self.device, self.generator = rows, device, generator
        self.seeds = None if seeds is None else torch.tensor([int(s) for s in seeds], device=device)
        self.drawn = 0

    def normal(self, *shape: int) -> Tensor:
        if self.seeds is not None:
            return torch.special.ndtri(self._hashed(shape)).float()
        return self._draw(torch.randn, shape, torch.float32)

    def uniform(self, *shape: int) -> Tensor:
        return self._hashed(shape) if self.seeds is not None else self._draw(torch.rand, shape, torch.float64)

    def _hashed(self, shape: tuple[int, ...]) -> Tensor:
        assert self.seeds is not None
        count = math.prod(shape)
        self.drawn += count
        return hashed_uniforms(self.seeds, self.drawn - count, count).view(self.rows, *shape)

    def _draw(self, function, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        source = self.device if self.generator is None else self.generator.device
        return function((self.rows, *shape), generator=self.generator, dtype=dtype, device=source).to(self.device)


def reveal_counts(masked: Tensor, steps: int) -> Tensor:
    """n_j = ceil(j m / N) - ceil((j-1) m / N) for j = 1..N: (B,) masked tokens -> (N, B) tokens to reveal."""
    j = torch.arange(steps + 1, device=masked.device).unsqueeze(1)
    return ceil_share(j, masked, steps).diff(dim=0)


def confidence(probabilities: Tensor, order: Order) -> Tensor:
    """Section 3.3: how sure the model is of each position, (..., V) -> (...). A function of its predictions alone."""
    if not isinstance(order, str):
        score = order(probabilities)
        fits = isinstance(score, Tensor) and score.shape == probabilities.shape[:-1]
        require(fits, f"order={named(order)}: expected a function (..., r, V) -> (..., r) of tensors")
        lowest = torch.finfo(probabilities.dtype).min  # and still above what is finished
        return score.to(probabilities.dtype).nan_to_num(nan=lowest, neginf=lowest)
    if order == "prob":
        return probabilities.amax(-1)
    if order == "margin":
        if probabilities.shape[-1] == 1:
            return probabilities[..., 0]
        top = probabilities.topk(2, dim=-1).values
        return top[..., 0] - top[..., 1]
    if order == "entropy":
        return torch.special.entr(probabilities).sum(-1).neg()
    raise ValueError(f"order={order!r}: expected one of {', '.join(ORDERS)}")


def named(order: Order) -> str:
    return order if isinstance(order, str) else getattr(order, "__name__", type(order).__name__)


def confidence_in(probabilities: Tensor, tokens: Tensor, order: Order) -> Tensor:
    """How sure the model is of these tokens (...,), by the same measure: already written, or chosen by another rule."""
    if order == "entropy" or not isinstance(order, str):  # which are of no token
        return confidence(probabilities, order)
    own = probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if order == "prob" or probabilities.shape[-1] == 1:
        return own
    others = probabilities.scatter(-1, tokens.unsqueeze(-1), 0.0)
    return own - others.amax(-1)


def first_by(score: Tensor, count: Tensor) -> Tensor:
    """True at the `count` (...) positions of the highest score (..., r); of equals the first."""
    return score.argsort(dim=-1, descending=True, stable=True).argsort(-1) < count.unsqueeze(-1)


def keep_nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the fewest most probable tokens that hold a mass of at least top_p. Not renormalised."""
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # mass of strictly better tokens
    total = ordered.sum(-1, keepdim=True)
    kept = torch.where(before < top_p * total, ordered, 0)
    return torch.zeros_like(probabilities).scatter(-1, index, kept)


def draw_tokens(logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """One token per position by inverting the distribution function in float64, exact far into the tails.

    logits (..., V), uniforms (...) in [0, 1). A token of probability zero is never drawn.
    """
    logits = logits.double()
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p < 1:
        probabilities = keep_nucleus(probabilities, top_p)
    cumulative = probabilities.cumsum(-1)
    total = cumulative[..., -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms.unsqueeze(-1).double() * total, below_total)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def check_settings(
    config: ModelConfig, steps: int, order: Order, rule: str, z: str, temperature: float, top_p: float
) -> None:
    if not callable(order):
        require_choice("order", order, ORDERS)
    require_choice("rule", rule, RULES)
    require_choice("z", z, DRAWS)
    require(
        is_whole(steps) and 1 <= steps <= config.block_size,
        f"steps={steps!r}: expected 1 to {config.block_size}, the block size (steps are counted per block)",
    )
    hot = is_number(temperature) and 0 < temperature < float("inf")
    require(hot, f"temperature={temperature!r}: expected a positive number (use rule argmax for 0)")
    require(is_number(top_p) and 0 < top_p <= 1, f"top_p={top_p!r}: expected a number in (0, 1]")
    require(
        rule == "sample" or (temperature == 1 and top_p == 1),
        "temperature and top_p belong to rule=sample: rule=argmax does not use them",
    )
    if z != "once" and config.z_reaches_later_blocks:
        raise InvalidInput(f"z={z}: which draw later blocks see is undefined when z enters the clean stream too; use z=once")


class Rule(NamedTuple):
    """How a step turns predictions into tokens."""

    order: Order
    rule: str
    temperature: float
    top_p: float
    revise: bool
    summed: bool = False  # confidences are those of all codes together


class Inputs(NamedTuple):
    """What differs from step to step."""

    noise: Tensor | None  # (B, dim): of z, if this step draws it; (B, 0): it takes the likeliest
    uniforms: Tensor | None  # (B, r): of the tokens, if they are drawn
    random_order: Tensor | None  # (B, r): scores of positions, if the order is random
    quota: Tensor  # (B,): how many positions it reveals
    doubt: Tensor | None = None  # (B, r): noise on the order, if there is any


BATCH_ROWS = 8192  # of those who do not say


class Desk:
    """What the steps of a batch read and write. It can be used again for a batch of as many rows.

    With `record`, a step of a kind seen before is recorded as a CUDA graph and from then on replayed: the host then has
    nothing to do between steps but to say go.
    """

    def __init__(self, model: Sampleable, rows: int, *, cache: bool = True, record: bool = False, device=None):
        config = model.config
        options = {"recorded": True} if record else {}
        self.predictor = model.predictor(rows, cached=cache, **options)
        self.prepare = getattr(self.predictor, "prepare", lambda block: None)
        self.canvas = torch.zeros(rows, config.length, dtype=torch.long, device=device)
        self.given = torch.zeros(rows, config.length, dtype=torch.bool, device=device)
        shape = model.latent_shape(rows)
        self.latents = None if shape is None else torch.zeros(shape, device=device)
        self.positions = torch.arange(config.block_size, device=device)  # of the block of now
        self.missing = missing_values(config, device)
        self.mask_id, self.r = config.vocab_size, config.block_size
        self.model, self.rows, self.cached, self.record = model, rows, cache, record
        self.pool = torch.cuda.graph_pool_handle() if record else None
        self.seen: set[tuple] = set()
        self.recordings: dict[tuple, tuple[torch.cuda.CUDAGraph, Inputs, tuple[Tensor, Tensor, Tensor]]] = {}

    def lay_out(self, prompt: Tensor) -> None:
        self.canvas.copy_(torch.where(prompt < 0, self.mask_id, prompt))
        self.given.copy_(prompt >= 0)
        if self.latents is not None:
            self.latents.zero_()
        if hasattr(self.predictor, "start_again"):
            self.predictor.start_again()

    def go_to(self, block: int) -> None:
        torch.arange(block * self.r, (block + 1) * self.r, out=self.positions)

    def step(self, block: int, how: Rule, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """One evaluation: what it revealed, the scores of positions, and what was masked before."""
        kind = self.prepare(block)
        if not self.record or kind is None or not isinstance(how.order, str):  # who knows what one's own does
            return self.take(block, how, inputs)
        key = (kind, how, *(None if x is None else x.shape for x in inputs))
        if key not in self.seen:
            self.seen.add(key)  # the first of its kind runs as it is: kernels choose their ways before they are recorded
            return self.take(block, how, inputs)
        if key not in self.recordings:
            kept = Inputs(*(None if x is None else x.clone() for x in inputs))  # type: ignore[arg-type]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                outputs = self.take(block, how, kept)
            self.recordings[key] = (graph, kept, outputs)
        graph, kept, outputs = self.recordings[key]
        for ours, theirs in zip(kept, inputs, strict=True):
            if ours is not None and theirs is not None:
                ours.copy_(theirs)
        graph.replay()
        return outputs

    def take(self, block: int, how: Rule, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Predict the block, choose tokens, keep the surest. Reads and writes tensors only: nothing here waits."""
        logits = self.predictor.predict(self.canvas, block, self.latents, inputs.noise)
        before, given = (x.index_select(1, self.positions) for x in (self.canvas, self.given))
        write = self.predictor.write if self.model.config.draft else None  # type: ignore[attr-defined]
        marginal = self.predictor.marginal() if how.summed else None  # type: ignore[attr-defined]
        if self.missing is not None:  # a column's values alone: the bits of those that are drawn can only fall
            missing = self.missing.index_select(0, self.positions)
            logits = logits.masked_fill(missing, -math.inf)
            marginal = None if marginal is None else marginal.masked_fill(missing, -math.inf)
            write = None if write is None else partial(write_with, write, missing)
        chosen = choose(logits, before, given, self.mask_id, how, inputs, write, marginal)
        self.canvas.index_copy_(1, self.positions, chosen.after)
        return chosen.revealed, chosen.score, chosen.masked


def missing_values(config: ModelConfig, device: torch.device | None) -> Tensor | None:
    """(L, V): of a table, the ids that a column has no values for."""
    if not config.columns:
        return None
    values = torch.tensor([len(column) - 1 for column in config.columns], device=device)
    return torch.arange(config.vocab_size, device=device) >= values.unsqueeze(1)


def write_with(write: Callable, missing: Tensor, known: Tensor, writes: Tensor, draw: "Draw") -> Tensor:
    """A draft's writing, of values that there are."""
    return write(known, writes, lambda logits, place: draw(logits.masked_fill(missing[place], -math.inf), place))


class Chosen(NamedTuple):
    """What a step makes of its predictions; all (B, r)."""

    guess: Tensor  # a token for every position, kept or not
    after: Tensor  # the block after the step, [MASK] where it stays unknown
    revealed: Tensor
    score: Tensor  # of positions, by the order
    masked: Tensor  # before the step


Draw = Callable[[Tensor, int | slice], Tensor]  # logits (B, V) of a place, or (B, r, V) of all, -> tokens


def choose(
    logits: Tensor,
    before: Tensor,
    given: Tensor,
    mask_id: int,
    how: Rule,
    inputs: Inputs,
    write: Callable[[Tensor, Tensor, Draw], Tensor] | None = None,
    marginal: Tensor | None = None,
) -> Chosen:
    """Choose a token for every masked position, and keep the surest.

    With `write`, which is told what is known, what to write and how to draw, those that are kept are written in turn. With
    a `marginal`, log p(x_i) summed over z (B, r, V), the surest are those whose token it believes in.
    """
    _, uniforms, random_order, quota, doubt = inputs

    def draw(logits: Tensor, place: int | slice) -> Tensor:
        if uniforms is None:
            return logits.argmax(-1)
        return draw_tokens(logits, uniforms[:, place], how.temperature, how.top_p)

    tokens = draw(logits, slice(None)) if write is None else logits.argmax(-1)  # a guess, to be written over
    masked = before == mask_id
    probabilities = None if random_order is not None else (logits if marginal is None else marginal).double().softmax(-1)
    score = random_order
    if probabilities is not None and marginal is None:
        score = confidence(probabilities, how.order)
    elif probabilities is not None:
        score = confidence_in(probabilities, tokens, how.order)
    assert score is not None

    def doubted(score: Tensor) -> Tensor:
        if doubt is None:
            return score
        return doubt + (score.clamp(min=1e-300).log() if how.order == "prob" else score)

    guess = torch.where(masked, tokens, before)
    if how.revise and probabilities is not None:
        written = confidence_in(probabilities, torch.where(masked, 0, before), how.order)
        score = doubted(torch.where(masked, score, written)).masked_fill(given, -torch.inf)
        kept = first_by(score, quota) & ~given
        stays = torch.where(given | (kept & ~masked), before, mask_id)
        revealed = kept & masked
    else:
        score = doubted(score).masked_fill(~masked, -torch.inf)
        revealed, stays = masked & first_by(score, quota), before
    after = torch.where(revealed, tokens, stays) if write is None else write(stays, revealed, draw)
    guess = torch.where(revealed, after, guess)
    return Chosen(guess, after, revealed, score, masked)


@torch.no_grad()
def sample(
    model: Sampleable,
    prompt: Tensor,
    *,
    steps: int = 1,
    order: Order = "prob",
    rule: str = "sample",
    temperature: float = 1.0,
    top_p: float = 1.0,
    z: str | None = None,
    revise: bool = False,
    order_noise: float = 0.0,
    cache: bool = True,
    generator: torch.Generator | None = None,
    seeds: Sequence[int] | None = None,
    trace: bool = False,
    on_step: Callable[[Step], None] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    desk: Desk | None = None,
) -> Samples:
    """Algorithm 2 (one block) and Algorithm 4 (several): fill every gap of the prompt.

    prompt: (n, L) token ids, -1 where the model is to write. Given tokens never move, wherever they stand. Their own block
        and later ones see them; z heeds them if the encoder was trained to see the mask.
    steps: N per block; exactly N evaluations for every block that has a gap in some row. Other blocks that follow each
        other are read in one pass.
    order: which positions a step keeps (the others are remasked): random, or the most confident by prob, margin, entropy,
        or a function of your own, of probabilities (..., r, V) to scores (..., r): the highest stay; it is not recorded.
        With codes and argmax, confidence in a token is summed over codes (unless they enter before the output layer).
    rule: argmax (the paper's) or sample (temperature, top_p).
    z: drawn once per block (the paper's), fresh for every step, or at every step the likeliest of its prior. By default as
        suits how the model was trained: fresh for codes, but for those of one step and of z that is kept, else once.
    revise: a step keeps the surest of all tokens of the block so far, and masks again what an earlier one wrote and the
        model has come to doubt (as in Ye et al. 2025). Such samples have no certified likelihood.
    order_noise: Gumbel noise on the confidences (log p for prob), this much times the share of steps that are still to come,
        so that the order is greedy only in the end (Ye et al. 2025 and Kim et al. 2025: 0.5, revising).
    cache: keep keys and values of finished blocks; off, every evaluation runs over the whole prefix again.
    generator or seeds: with one seed per row, a row's result does not depend on the rest of its batch.
    trace and on_step: keep a record of every step, or be told of it as it is made.
    on_progress: is told how many blocks are done, of how many.
    desk: of an earlier batch of as many rows, to use what it recorded.
    """
    config = model.config
    z = z or str(getattr(model, "usual_z", "once") if steps != 1 else "once")
    check_settings(config, steps, order, rule, z, temperature, top_p)
    check_prompt(prompt, config)
    require(generator is None or seeds is None, "generator and seeds: expected one of the two")
    named = generator is None or isinstance(generator, torch.Generator)
    require(named, f"generator={generator!r:.60}: expected a torch.Generator; numbers are for seeds")
    if seeds is not None:
        check_seeds(seeds, len(prompt))
    rows, r = len(prompt), config.block_size
    noise = Noise(rows, prompt.device, generator, seeds)
    desk = desk or Desk(model, rows, cache=cache, device=prompt.device)
    require(desk.model is model, "a desk of another model: expected one made by this model's `desk`")
    require(desk.rows == rows, f"a desk of {desk.rows} rows: expected {rows}, the rows of the prompt")
    require(desk.cached == cache, f"cache={cache}: expected {desk.cached}, as the desk was made")
    desk.lay_out(prompt)
    require(not revise or order != "random", "revise: expected order prob, margin or entropy: what to doubt is not random")
    noisy = is_number(order_noise) and 0 <= order_noise < float("inf")
    require(noisy, f"order_noise={order_noise!r}: expected a number of at least 0")
    require(not order_noise or order != "random", f"order_noise={order_noise}: expected 0 with order random")
    how = Rule(order, rule, temperature, top_p, revise, sums_codes(config, order, rule, steps))
    gaps = (prompt < 0).unflatten(1, (config.blocks, r)).sum(-1)  # (B, blocks)
    has_gaps = gaps.any(0).tolist()  # for all blocks at once: it waits for the device
    nfe, cache_passes, steps_taken = 0, 0, []
    last_noise: list[Tensor] = []  # of z, of every block so far
    read = 0  # blocks so far that were written, or read where there is nothing to write

    def read_up_to(block: int) -> int:
        noise_of_z = torch.stack(last_noise[read:block], dim=1) if last_noise[read:block] else None
        return desk.predictor.read(desk.canvas, read, block, desk.latents, noise_of_z) if read < block else 0

    for block in range(config.blocks):
        # Drawn for every block, needed or not: what a row receives must not depend on the rows beside it.
        z_noise = None if desk.latents is None else noise.normal(steps if z == "fresh" else 1, desk.latents.shape[-1])
        if z_noise is not None and z == "likeliest":
            z_noise = z_noise[..., :0].expand(-1, steps, -1)
        token_uniforms = noise.uniform(steps, r)
        random_order = noise.uniform(r)
        doubts = None
        if order_noise:
            to_come = 1 - torch.arange(1, steps + 1, device=prompt.device) / steps
            doubts = -order_noise * to_come.unsqueeze(-1) * (-noise.uniform(steps, r).log()).log()
        desk.go_to(block)
        if z_noise is not None:
            last_noise.append(z_noise[:, -1])
        if has_gaps[block]:
            cache_passes += read_up_to(block)
        counts = reveal_counts(gaps[:, block], steps)
        for step, count in enumerate(counts.cumsum(0) if revise else counts):
            if not has_gaps[block]:  # nothing to write in any row; the trace still shows the step, with nothing revealed
                score = torch.full_like(random_order, -torch.inf)
                revealed = masked = torch.zeros_like(random_order, dtype=torch.bool)
            else:
                draws_z = z_noise if z != "once" or step == 0 else None
                inputs = Inputs(
                    None if draws_z is None else draws_z[:, step],
                    None if rule == "argmax" else token_uniforms[:, step],
                    random_order if order == "random" else None,
                    count,
                    None if doubts is None else doubts[:, step],
                )
                revealed, score, masked = desk.step(block, how, inputs)
                nfe += 1
            if trace or on_step is not None:
                here = slice(block * r, (block + 1) * r)
                taken = _trace_step(desk.canvas, block, step, here, revealed, score, masked)
                if trace:
                    steps_taken.append(taken)
                if on_step is not None:
                    on_step(taken)
        if has_gaps[block]:
            cache_passes += desk.predictor.commit(desk.canvas, block, desk.latents)
            read = block + 1
        on_progress(block + 1, config.blocks)
    cache_passes += read_up_to(config.blocks)
    latents = None if desk.latents is None else desk.latents.clone()
    return Samples(desk.canvas.clone(), latents, nfe, cache_passes, steps_taken)


def _trace_step(canvas: Tensor, block: int, step: int, here: slice, revealed: Tensor, score: Tensor, masked: Tensor) -> Step:
    everywhere = torch.zeros_like(canvas, dtype=torch.bool)
    everywhere[:, here] = revealed
    confidences = torch.full_like(canvas, torch.nan, dtype=torch.float64)
    confidences[:, here] = score.masked_fill(~masked, torch.nan)
    return Step(block, step, canvas.clone(), everywhere, confidences)


def sums_codes(config: ModelConfig, order: Order, rule: str, steps: int) -> bool:
    """Whether positions are ranked by what all codes together say of their tokens.

    Who asks for the likeliest tokens has no use for those that are sure under one code, which may be wrong. Who draws
    tokens draws the code too: no code is wrong then, and what is sure under it says most. One step keeps all positions.
    """
    sums = config.latent.coded and not config.latent.code_layers
    return sums and rule == "argmax" and order != "random" and steps > 1


def check_seeds(seeds: Sequence[int], rows: int) -> None:
    try:
        numbers = [operator.index(seed) for seed in seeds]
    except TypeError:
        raise InvalidInput(f"seeds={seeds!r:.60}: expected whole numbers, one for each of {rows} rows") from None
    require(len(numbers) == rows, f"{len(numbers)} seeds: expected one for each of {rows} rows")
    require(all(0 <= seed < 2**63 for seed in numbers), "seeds: expected numbers from 0 to 2^63")


def is_of_integers(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def check_values(config: ModelConfig, tokens: Tensor) -> None:
    """Of a table, a column has values of its own."""
    missing = missing_values(config, tokens.device)
    if missing is None:
        return
    places = torch.arange(config.length, device=tokens.device).expand_as(tokens)
    wrong = missing[places, tokens.clamp(min=0)].nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        name, *values = config.columns[place]
        raise InvalidInput(f"token id {int(tokens[row, place])} of column {name!r}: expected 0 to {len(values) - 1}")


def check_prompt(prompt: Tensor, config: ModelConfig) -> None:
    require(
        isinstance(prompt, Tensor),
        f"a prompt of type {type(prompt).__name__}: expected a tensor of shape (rows, {config.length})",
    )
    require(
        prompt.dim() == 2 and prompt.shape[1] == config.length,
        f"a prompt of shape {tuple(prompt.shape)}: expected (rows, {config.length}), one entry for each position",
    )
    require(is_of_integers(prompt), f"a prompt of {prompt.dtype}: expected integers")
    if prompt.numel():
        low, high = int(prompt.min()), int(prompt.max())
        bad = low if low < -1 else high
        require(
            low >= -1 and high < config.vocab_size,
            f"token id {bad} in the prompt: expected 0 to {config.vocab_size - 1}, or -1 for a gap",
        )
        check_values(config, prompt)
