"""Gaps with text on both sides, filled by a model that reads its blocks from left to right.

Such a model does not see what follows a gap when it writes. So it writes several candidates, and one of them is drawn by how
well the text after the gap follows from each: sampling importance resampling, gap after gap.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vmd.config import require
from vmd.evaluation import rows_per_pass
from vmd.likelihood import nll_bound
from vmd.network import largest_tensor
from vmd.sampling import Samples, Step, check_prompt, hashed_uniforms

if TYPE_CHECKING:
    from vmd.model import VMD


def stages(gap: Sequence[bool], block_size: int) -> list[int]:
    """Where the text ends that each gap is judged by: at the block of the next gap, in whole blocks; the last at the end.

    Gaps of one block, or of blocks that touch, are written together: no whole block of text between them could tell.
    """
    blocks = [any(gap[i : i + block_size]) for i in range(0, len(gap), block_size)]
    begins = [b for b in range(1, len(blocks)) if blocks[b] and not blocks[b - 1] and any(blocks[:b])]
    return [b * block_size for b in begins] + [len(blocks) * block_size]


@torch.no_grad()
def infill(
    model: "VMD",
    prompt: Tensor,
    n: int = 1,
    *,
    tries: int = 32,
    seeds: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    trace: bool = False,
    on_step: Callable[[Step], None] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **options,
) -> Samples:
    """n rows (n, L) of a text (L,) whose gaps, -1, are filled; L may be less than the model's length.

    tries: candidates for each gap. A candidate x weighs p(x) / p(gap | the text before it and in its blocks): how likely it
        makes the given text, up to the next gap. Of a latent or a draft head in one step, else in as many as it is written
        in. 1: written blindly. A model of one block sees the whole text; it needs none, and makes one.
    Other options are those of `VMD.sample`. The trace is of the candidates that were drawn. `on_progress` is told how many
    candidates are done, of how many.
    """
    config = model.config
    require(prompt.dim() == 1 and len(prompt) > 0, f"a text of shape {tuple(prompt.shape)}: expected (length,)")
    require(len(prompt) <= config.length, f"a text of {len(prompt)} tokens: expected at most {config.length}")
    require(n >= 1, f"n={n}: expected at least 1 sample")
    require(tries >= 1, f"tries={tries}: expected at least 1")
    require(generator is None or seeds is None, "generator and seeds: expected one of the two")
    if seeds is None:
        seeds = torch.randint(2**62, (n,), generator=generator).tolist()
    require(len(seeds) == n, f"{len(seeds)} seeds: expected one for each of {n} rows")
    wanted, r = len(prompt), config.block_size
    padded = torch.full((max(config.shortest, -(-wanted // r) * r),), -1, dtype=prompt.dtype)
    padded[:wanted] = prompt
    check_prompt(padded.unsqueeze(0), model.shortened(len(padded)).config)
    rows, parts = padded.repeat(n, 1), []
    tries = tries if config.blocks > 1 else 1
    ends = [end for end in stages((prompt < 0).tolist(), r)[:-1] if end >= config.shortest] if tries > 1 else []
    ends.append(len(padded))
    done = 0
    for number, end in enumerate(ends):
        short = model.shortened(end)
        chance = hashed_uniforms(torch.tensor(seeds), number * (tries + 1), tries + 1)
        drawn_by = (chance[:, :tries] * 2**52).long()  # the seed of each candidate
        text, given = rows[:, :end], rows[0, :end] >= 0
        if tries > 1 and bool((given.diff(prepend=given[:1]) & given).any()):  # there is text after a gap
            log_weights, at_once = [], max(1, largest_tensor(model.device) // (2**8 * end))
            candidates = text.repeat_interleave(tries, dim=0).split(at_once)
            for some, by in zip(candidates, drawn_by.flatten().split(at_once), strict=True):
                written = short.sample(prompt=some, seeds=by.tolist(), **options).tokens
                log_weights.append(fit(short, written, given, options.get("steps", 1)).cpu())
                done += len(some)
                on_progress(done, n * tries * len(ends))
            weights = torch.cat(log_weights).view(n, tries).softmax(-1)
            best = torch.searchsorted(weights.cumsum(-1), chance[:, tries:] * weights.sum(-1, keepdim=True))
            drawn_by = drawn_by.gather(1, best.clamp(max=tries - 1))
        # A row depends on its seed alone, so the one that was drawn is written once more for those who watch.
        drawn_seeds = drawn_by[:, 0].tolist()
        parts.append(short.sample(prompt=text, seeds=drawn_seeds, trace=trace, on_step=writes_only(on_step), **options))
        rows[:, :end] = parts[-1].tokens.cpu()
    last = parts[-1]
    return Samples(
        last.tokens[:, :wanted],
        last.z,
        sum(part.nfe for part in parts),
        sum(part.cache_passes for part in parts),
        [step for part in parts for step in part.trace if step.revealed.any()],
    )


def writes_only(on_step: Callable[[Step], None] | None) -> Callable[[Step], None] | None:
    """Not told of blocks that are there already."""
    return on_step and (lambda step: on_step(step) if step.revealed.any() else None)


def fit(model: "VMD", x: Tensor, given: Tensor, steps: int) -> Tensor:
    """(B,): log p(x) - log p(what was written | given tokens of its blocks, and all before)."""
    config = model.config
    steps = 1 if config.has_latent or config.draft else steps
    generator = torch.Generator(x.device).manual_seed(0)

    def nll(end: int, known: Tensor | None) -> Tensor:
        short, z = model.shortened(end), "once" if config.z_reaches_later_blocks else "fresh"
        return nll_bound(short, x[:, :end], steps, z=z, fixed=known, generator=generator, chunk=rows_per_pass(short))

    gap = (~given).unflatten(0, (-1, config.block_size))
    total = -nll(config.length, gap.all(1).repeat_interleave(config.block_size).to(x.device))
    mixed = (gap.any(1) & ~gap.all(1)).nonzero()  # blocks with both: those of gaps alone would cancel
    if len(mixed):
        end = max(config.shortest, (int(mixed.max()) + 1) * config.block_size)
        total += nll(end, (given | gap.all(1).repeat_interleave(config.block_size))[:end].to(x.device))
    return total
