"""Text of any length, by a model of rows: window after window, each of which sees the end of what stands before it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vmd.config import InvalidInput, is_whole, require
from vmd.sampling import Samples, check_seeds, hashed_uniforms, is_of_integers

if TYPE_CHECKING:
    from vmd.model import VMD

NO_WINDOWS = ("desk", "trace", "on_step")  # what is of one window


def write(
    model: "VMD",
    prompt: str | Tensor,
    n: int = 1,
    *,
    length: int,
    seeds: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Samples:
    """n rows (n, length) that go on from a prompt: a text, of a model of text, or tokens (P,), either of them of any length.

    What fits one window is written in one. Else a prompt up to three quarters of the model's length is seen whole,
    and every further window sees half a window. Options are those of `VMD.sample`; a row depends on its seed alone.
    Evaluations are the sum over windows, and z is not kept.
    """
    full, r = model.config.length, model.config.block_size
    require(is_whole(n) and n >= 1, f"n={n!r}: expected a whole number of samples, at least 1")
    require(is_whole(length) and length >= 1, f"length={length!r}: expected a whole number of tokens, at least 1")
    require(generator is None or seeds is None, "generator and seeds: expected one of the two")
    for name in NO_WINDOWS:
        require(options.get(name) in (None, False), f"{name}: expected no such option of a text in several windows")
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise InvalidInput(f"a prompt {prompt!r:.60}: expected tokens: this is no model of text")
        prompt = torch.as_tensor(model.tokenizer.encode(prompt))
    line = isinstance(prompt, Tensor) and prompt.dim() == 1 and is_of_integers(prompt)
    require(line, "a prompt: expected a text, or a tensor of integers of shape (length,)")
    own = bool(((prompt >= 0) & (prompt < model.config.vocab_size)).all())
    require(own, f"a prompt: expected tokens from 0 to {model.config.vocab_size - 1}, and no gaps: `vmd.infill` fills them")
    require(len(prompt) <= length, f"length={length}: expected at least {len(prompt)}, the tokens of the prompt")
    if seeds is None:
        device = "cpu" if generator is None else generator.device
        seeds = torch.randint(2**62, (n,), generator=generator, device=device).tolist()
    check_seeds(seeds, n)

    rows, have, begun = torch.empty(n, length, dtype=torch.long), len(prompt), len(prompt)
    rows[:, :begun] = prompt
    nfe = cache_passes = windows = 0
    window, desk = model, None
    while have < length:
        seen = have if length <= full or have <= full - max(1, full // 4) else full // 2
        size = min(full, max(model.config.shortest, -(-(seen + length - have) // r) * r))
        if size != window.config.length:
            window, desk = model.shortened(size), None
        canvas = torch.full((n, size), -1)
        canvas[:, :seen] = rows[:, have - seen : have]
        chance = seeds if not windows else fresh_seeds(seeds, windows)

        def tell(done: int, total: int, have: int = have, new: int = size - seen) -> None:
            on_progress(min(length, have + new * done // total) - begun, length - begun)

        desk = desk or window.desk_for(canvas, **options)  # what is recorded serves all windows of a size
        made = window.sample(prompt=canvas, seeds=chance, on_progress=tell, desk=desk, **options)
        end = min(length, have + size - seen)
        rows[:, have:end] = made.tokens[:, seen : seen + end - have]
        have = end
        nfe, cache_passes, windows = nfe + made.nfe, cache_passes + made.cache_passes, windows + 1
    return Samples(rows.to(model.device), None, nfe, cache_passes, [])


def fresh_seeds(seeds: Sequence[int], window: int) -> list[int]:
    return (hashed_uniforms(torch.tensor([int(seed) for seed in seeds]), window, 1)[:, 0] * 2**52).long().tolist()
