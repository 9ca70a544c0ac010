"""Gaps with text on both sides, filled by a model that reads its blocks from left to right.

Such a model does not see what follows a gap when it writes. So it writes several candidates, which weigh as much as they
make the text after the gap likely: a particle filter, gap after gap, in which one candidate is drawn in the end.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vmd.attention import CleanPrefix, KVCache
from vmd.config import ModelConfig, is_whole, require
from vmd.data.tokenizers import Tokenizer
from vmd.evaluation import rows_per_score
from vmd.masking import Masks
from vmd.network import largest_tensor
from vmd.objective import code_terms, targets_nll
from vmd.sampling import Samples, Step, check_prompt, check_seeds, hashed_uniforms

if TYPE_CHECKING:
    from vmd.model import VMD

TRIES = 32
JUDGED_BY = 64  # tokens after a gap: what comes later says little more, and takes time


class Stage(NamedTuple):
    """Gaps that are written and judged together, in tokens, at borders of blocks: they lie in first:last, judged to end."""

    first: int
    last: int
    end: int


def stages(gap: Sequence[bool], block_size: int) -> list[Stage]:
    """Gaps of blocks that touch are one stage: no whole block of text between them could tell."""
    blocks = [any(gap[i : i + block_size]) for i in range(0, len(gap), block_size)]
    firsts = [b for b, here in enumerate(blocks) if here and not (b and blocks[b - 1])]
    found = []
    for first, following in zip(firsts, [*firsts, len(blocks)][1:], strict=True):
        last = next((b for b in range(first, len(blocks)) if not blocks[b]), len(blocks))
        reach = -(-JUDGED_BY // block_size)
        found.append(Stage(*(b * block_size for b in (first, last, min(following, last + reach)))))
    return found


def between_gaps(text: str) -> list[str]:
    r"""The parts of a text between its gaps, each of which is a _. One that is meant is \_, a backslash before a gap \\."""
    parts, end = [""], 0
    for mark in re.finditer(r"(\\*)_", text):
        backslashes, meant = divmod(len(mark[1]), 2)  # two are one; one that is left over is for the _
        parts[-1] += text[end : mark.start()] + "\\" * backslashes + "_" * meant
        parts += [] if meant else [""]
        end = mark.end()
    return [*parts[:-1], parts[-1] + text[end:]]


def gaps_of(text: str, tokenizer: Tokenizer | None) -> Tensor:
    """Tokens of a text, -1 for every gap."""
    require(tokenizer is not None, f"a prompt {text!r:.60}: expected tokens: this is no model of text")
    parts = [tokenizer.encode(part).tolist() for part in between_gaps(text)]  # type: ignore[union-attr]
    return torch.tensor(parts[0] + [token for part in parts[1:] for token in (-1, *part)])


def usual_tries(config: ModelConfig) -> int:
    """1 for a model of one block, which sees all of the text, and for a Gaussian z, of which there is but a noisy bound."""
    return 1 if config.blocks == 1 or config.latent.kind == "gaussian" else TRIES


@torch.no_grad()
def infill(
    model: "VMD",
    prompt: Tensor | str,
    n: int = 1,
    *,
    tries: int | None = None,
    seeds: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    trace: bool = False,
    on_step: Callable[[Step], None] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **options,
) -> Samples:
    """n rows (n, L) of a text (L,) whose gaps, -1, are filled; L may be less than the model's length. z is not kept.

    prompt: tokens, or of a model of text "the ____ of science"; `model.tokenizer.decode` reads what comes back.
    tries: candidates for each gap (default: 32; 1 with a Gaussian latent and for a model of one block, which sees the whole
        text). A candidate x weighs p(x) / p(gap | the text before it and in its blocks): how likely it makes the given text
        up to the next gap, or 64 tokens on. With many of them gaps follow the law of the model's samples of one step given
        both sides. With several steps, another rule or a temperature the weights stay those of one step; without a latent
        and a draft head they are then those of tokens written in turn.
    Other options are those of `vmd.sampling.sample`. The trace is of the candidates that were drawn, evaluations are of one
    candidate, and `on_progress` is told how many are weighed, of how many.
    """
    config = model.config
    if isinstance(prompt, str):
        prompt = gaps_of(prompt, model.tokenizer)
    line = isinstance(prompt, Tensor) and prompt.dim() == 1 and len(prompt) > 0
    what = f"shape {tuple(prompt.shape)}" if isinstance(prompt, Tensor) else f"type {type(prompt).__name__}"
    require(line, f"a prompt of {what}: expected a tensor of shape (length,), or of a model of text a text with _ for gaps")
    whole = prompt.dtype not in (torch.bool, torch.uint8) and not prompt.is_floating_point() and not prompt.is_complex()
    require(whole, f"a prompt of {prompt.dtype}: expected integers, -1 for a gap")
    require(len(prompt) <= config.length, f"a text of {len(prompt)} tokens: expected at most {config.length}")
    require(is_whole(n) and n >= 1, f"n={n!r}: expected a whole number of samples, at least 1")
    most = usual_tries(config)
    tries = most if tries is None else tries
    require(is_whole(tries) and tries >= 1, f"tries={tries!r}: expected a whole number, at least 1")
    why = "a model of one block sees all of the text, and a Gaussian latent has no likelihood to weigh by"
    require(tries == 1 or most > 1, f"tries={tries}: expected 1: {why}")
    require(generator is None or seeds is None, "generator and seeds: expected one of the two")
    for name in ("batch_size", "desk", "prompt"):
        require(name not in options, f"{name}: expected no such option of an infill")
    known = generator is None or isinstance(generator, torch.Generator)
    require(known, f"generator={generator!r}: expected a torch.Generator")
    if seeds is None:
        device = "cpu" if generator is None else generator.device
        seeds = torch.randint(2**62, (n,), generator=generator, device=device).tolist()
    check_seeds(seeds, n)
    seeds = [int(seed) for seed in seeds]

    wanted, r = len(prompt), config.block_size
    text = torch.full((max(config.shortest, -(-wanted // r) * r),), -1)
    text[:wanted] = prompt.cpu()
    check_prompt(text.unsqueeze(0), replace(config, length=len(text)))
    gap = text < 0
    gap[wanted:] = False  # blocks are filled up with what nobody asked for
    plan = stages(gap.tolist(), r) if tries > 1 else [Stage(0, len(text), len(text))] if gap.any() else []
    given = (~gap[:wanted]).nonzero().flatten()
    judged = [tries > 1 and bool(((given > gap[s.first :].long().argmax() + s.first) & (given < s.end)).any()) for s in plan]
    total, done, drawn = n * tries * sum(judged), 0, 0

    def chance(count: int) -> Tensor:
        nonlocal drawn
        drawn += count
        return hashed_uniforms(torch.tensor(seeds), drawn - count, count)

    particles, log_weights = text.repeat(n, tries, 1), torch.zeros(n, tries, dtype=torch.float64)
    written_by: list[Tensor] = []  # of each stage so far, the seeds of the candidates there are now
    nfe = cache_passes = 0
    for stage, to_judge in zip(plan, judged, strict=True):
        if not to_judge and particles.shape[1] > 1:  # what is not judged need be written but once
            particles, written_by, log_weights = pick(log_weights, chance(1), particles, written_by)
        written_by.append((chance(particles.shape[1]) * 2**52).long())
        short, rows = model.shortened(max(config.shortest, stage.last)), particles.flatten(0, 1)
        per_token = max(2**13, 4 * config.layers * config.width)  # twice its keys and values
        at_once, weights = max(1, largest_tensor(model.device) // (per_token * stage.end)), []
        for some, by in zip(rows.split(at_once), written_by[-1].flatten().split(at_once), strict=True):
            canvas = some[:, : short.config.length]
            desk = short.desk(len(some), cache=options.get("cache", True), record=short.records(canvas, **options))
            made = short.sample(prompt=canvas, seeds=by.tolist(), desk=desk, **options)
            some[:, stage.first : stage.last] = made.tokens[:, stage.first : stage.last].cpu()
            if to_judge:
                # Layers that see a code run for the noisy blocks apart, and not behind a cache where all codes are scored.
                cache = None if config.latent.code_layers else getattr(desk.predictor, "cache", None)
                weights.append(fit(model, some, gap, wanted, stage, options.get("steps", 1), cache))
                done += len(some)
                on_progress(done, total)
        nfe, cache_passes = nfe + made.nfe, cache_passes + made.cache_passes
        particles = rows.view(particles.shape)
        if to_judge:
            log_weights = torch.cat(weights).view(n, -1)
            if stage is not plan[-1]:  # evenly spread draws: each candidate about as often as it weighs
                places = (torch.arange(tries) + chance(1)) / tries
                particles, written_by, log_weights = pick(log_weights, places, particles, written_by)
    particles, written_by, _ = pick(log_weights, chance(1), particles, written_by)
    tokens, steps = particles[:, 0], []
    if trace or on_step is not None:  # a row depends on its seed alone: what was drawn is written once more to be seen
        for stage, by in zip(plan, written_by, strict=True):
            short = model.shortened(max(config.shortest, stage.last))
            canvas = tokens.masked_fill(gap | (torch.arange(len(text)) >= wanted), -1)
            canvas[:, : stage.first] = tokens[:, : stage.first]
            prompts, again = canvas[:, : short.config.length], by[:, 0].tolist()
            for step in short.sample(prompt=prompts, seeds=again, trace=True, **options).trace:
                if step.revealed[:, stage.first : min(stage.last, wanted)].any():
                    steps.append(step)
                    if on_step is not None:
                        on_step(step)
    return Samples(tokens[:, :wanted].to(model.device), None, nfe, cache_passes, steps if trace else [])


def pick(
    log_weights: Tensor, places: Tensor, particles: Tensor, written_by: list[Tensor]
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The candidates at these places (n, m) of the distribution by weight, which then weigh the same."""
    cumulative = log_weights.softmax(-1).cumsum(-1)
    index = torch.searchsorted(cumulative, places * cumulative[:, -1:]).clamp(max=log_weights.shape[1] - 1)
    chosen = particles.gather(1, index.unsqueeze(-1).expand(-1, -1, particles.shape[-1]))
    return chosen, [by.gather(1, index) for by in written_by], torch.zeros(index.shape, dtype=torch.float64)


def fit(
    model: "VMD", rows: Tensor, gap: Tensor, wanted: int, stage: Stage, steps: int, cache: KVCache | None = None
) -> Tensor:
    """(B,): log p(blocks of the stage | all before) - log p(its gaps | given tokens of their blocks, and all before).

    Both by the law of one step; without a latent and a draft head, if several are taken, of tokens in turn from the left.
    With a cache of the text before the stage only its blocks are evaluated; without, all of them.
    """
    config, r = model.config, model.config.block_size
    length = stage.end if cache is not None else max(config.shortest, stage.end)
    start, judge = (stage.first, model) if cache is not None else (0, model.shortened(length))
    place = torch.arange(length)
    inside = (place >= stage.first) & (place < stage.end)
    gap = gap[:length] & inside
    of_gaps = gap.view(-1, r).all(1).repeat_interleave(r)
    asked = inside & ~of_gaps & (place < wanted)  # blocks of gaps alone cancel
    in_turn = steps > 1 and not config.has_latent and not config.draft
    turns = [(place % r >= j, place % r == j) for j in range(r)] if in_turn else [(place >= 0, place >= 0)]
    terms = [(inside & left, asked & now, -1) for left, now in turns]
    terms += [((gap | (inside & (place >= wanted))) & left, gap & asked & now, 1) for left, now in turns]
    distinct, which = rows[:, :length].clamp(min=0).unique(dim=0, return_inverse=True)  # those alike weigh the same
    one_of_each = torch.zeros(len(distinct), dtype=torch.long).scatter(0, which, torch.arange(len(rows)))
    at_once, found = max(1, rows_per_score(model) * config.length // length), []
    for some, at in zip(distinct.split(at_once), one_of_each.split(at_once), strict=True):
        x0, total = some.to(model.device), torch.zeros(len(some), dtype=torch.float64)
        prefix = None if cache is None else cache.prefix(at.to(model.device), x0[:, :start])
        for mask, target, sign in terms:
            if target.any():
                stop = length if cache is None else (int(target.nonzero().max()) // r + 1) * r  # no later block has a part
                blocks = target[start:stop].view(-1, r).any(1).double()
                parts = (mask[start:stop], target[start:stop], blocks)
                masks = Masks(*(part.to(x0.device).expand(len(x0), -1) for part in parts))
                nll = nll_behind(judge, prefix, x0[:, start:stop], masks)
                total += sign * (nll.cpu() * blocks).sum(-1)
        found.append(total)
    return torch.cat(found)[which]


def nll_behind(model: "VMD", prefix: CleanPrefix | None, x0: Tensor, masks: Masks) -> Tensor:
    """(B, blocks): -log p(targets | revealed) of blocks behind a prefix, summed over codes as in `marginal_nll`."""
    if model.config.latent.coded:
        terms = code_terms(partial(model.codes, prefix=prefix), x0, masks, model.mask_id)
        return -terms.double().log_joint().logsumexp(-1)
    denoise = partial(model.denoise, prefix=prefix)
    return targets_nll(denoise, x0, masks, model.mask_id, None, drafts=model.config.draft > 0).double()
