"""Sudoku puzzles solved by a model. The rules of the board say when a grid is right: no solution has to be known."""

import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from vmd.config import ModelConfig, require, require_range
from vmd.data import sudoku_engine as engine
from vmd.data.sudoku import Puzzles, Symmetry, check_digits, keeps_clues, load_puzzles, random_symmetry, valid
from vmd.files import write_atomically
from vmd.model import SHIPPED, VMD
from vmd.progress import percent_bar, progress_bar
from vmd.sampling import Chosen, Inputs, Noise, Rule, check_settings, choose, reveal_counts, sums_codes
from vmd.terminal import print_table


class Solved(NamedTuple):
    grids: Tensor  # (n, cells) digits: of a puzzle that was not solved, the first try's
    right: Tensor  # (n,) bool: keeps the clues, and every row, column and box holds every digit once
    evaluations: Tensor  # (n,): of the network, in all tries
    tries: Tensor  # (n,)


class Frame(NamedTuple):
    """The boards of a batch after a step, as the puzzles stand; all (B, cells)."""

    canvas: Tensor  # digits, 0 for what is still unknown
    guess: Tensor  # digits: all that the model would write
    score: Tensor  # how sure it was, by the order
    masked: Tensor  # bool: unknown before the step


@torch.no_grad()
def solve_puzzles(
    model: VMD,
    puzzle: Tensor,
    *,
    steps: int = 20,
    order: str = "margin",
    rule: str = "argmax",
    revise: bool = False,
    tries: int = 1,
    early: bool = True,
    seed: int = 0,
    batch_size: int = 256,
    on_rows: Callable[[int], None] = lambda done: None,
    on_step: Callable[[int, "Frame"], None] = lambda attempt, frame: None,
) -> Solved:
    """Fill the blanks (0) of puzzles (n, cells), at most `tries` times each.

    The first try takes the likeliest latent at every step. Every other draws one, and looks at the board under a random
    symmetry, which the network does not know to be the same puzzle. A row is finished when its grid is right: with `early`
    as soon as all that the model would write, kept or not, is right, else after the last step.
    """
    config = model.config
    size = f"{config.blocks} x {config.block_size} positions and {config.vocab_size} tokens"
    require(knows_boards(config), f"a model of {size}: expected one of whole Sudoku boards, a token for each digit")
    require(puzzle.dim() == 2, f"puzzles of shape {tuple(puzzle.shape)}: expected (n, {config.length})")
    require(puzzle.shape[1] == config.length, f"puzzles of {puzzle.shape[1]} cells: expected {config.length}, the model's")
    digits = ((puzzle >= 0) & (puzzle <= config.vocab_size)).all()
    require(bool(digits), f"puzzles: expected digits 1 to {config.vocab_size}, and 0 for blanks")
    check_settings(config, steps, order, rule, "once", 1.0, 1.0)
    require(not revise or order != "random", "revise: expected order prob, margin or entropy: what to doubt is not random")
    require_range("tries", tries, 1)
    require_range("batch_size", batch_size, 1)
    require_range("seed", seed, 0, 2**62)
    puzzle = puzzle.to(model.device).long()
    grids = torch.zeros_like(puzzle)
    right = torch.zeros(len(puzzle), dtype=torch.bool, device=model.device)
    evaluations, taken = torch.zeros_like(right, dtype=torch.long), torch.zeros_like(right, dtype=torch.long)
    generator = torch.Generator(model.device).manual_seed(seed)
    how = Rule(order, rule, 1.0, 1.0, revise, summed=sums_codes(config, order, rule, steps))
    was_training = model.training
    model.eval()
    try:
        for attempt in range(tries):
            if right.all():
                break
            for rows in (~right).nonzero()[:, 0].split(batch_size):
                view = random_symmetry(len(rows), config.length, generator=generator, device=model.device)
                seen = view.apply(puzzle[rows]) if attempt else puzzle[rows]
                show = partial(show_frame, on_step, attempt, view if attempt else None, model.mask_id)
                filled, spent = fill(model, seen, steps, how, early, generator, show, likeliest=attempt == 0)
                filled = view.undo(filled) if attempt else filled
                found = valid(filled) & keeps_clues(filled, puzzle[rows])
                grids[rows] = torch.where(found[:, None] | (attempt == 0), filled, grids[rows])
                right[rows] = found
                evaluations[rows] += spent
                taken[rows] += 1
                on_rows(int((right | (taken == tries)).sum()))
    finally:
        model.train(was_training)
    return Solved(grids, right, evaluations, taken)


def knows_boards(config: ModelConfig) -> bool:
    return config.blocks == 1 and config.length in engine.BOARDS and config.vocab_size == math.isqrt(config.length)


def fill(
    model: VMD,
    puzzle: Tensor,
    steps: int,
    how: Rule,
    early: bool,
    generator: torch.Generator,
    on_step: Callable[[Chosen], None],
    *,
    likeliest: bool,
) -> tuple[Tensor, Tensor]:
    """One try: grids (B, cells) and the evaluations each took. Rows that are right leave the batch."""
    noise = Noise(len(puzzle), model.device, generator, None)
    shape, mask_id = model.latent_shape(len(puzzle)), model.mask_id
    z = None if shape is None else torch.zeros(shape, device=model.device)
    z_noise = None if shape is None else noise.normal(shape[-1])[:, : 0 if likeliest else None]
    given = puzzle > 0
    canvas = torch.where(given, puzzle - 1, mask_id)
    counts = reveal_counts((~given).sum(-1), steps)
    counts = counts.cumsum(0) if how.revise else counts
    random_order = noise.uniform(canvas.shape[1]) if how.order == "random" else None
    grids, spent = torch.zeros_like(canvas), torch.zeros(len(canvas), dtype=torch.long, device=model.device)
    left = torch.arange(len(canvas), device=model.device)  # rows that are still worked on
    predictor = model.predictor(len(canvas))
    for step in range(steps):
        uniforms = noise.uniform(canvas.shape[1])[left] if how.rule == "sample" else None
        now = None if z is None else z[left]
        draws = z_noise if likeliest or step == 0 else None
        logits = predictor.predict(canvas[left], 0, now, None if draws is None else draws[left])
        if z is not None and now is not None:
            z[left] = now
        inputs = Inputs(None, uniforms, None if random_order is None else random_order[left], counts[step, left])
        write = predictor.write if model.config.draft else None
        marginal = predictor.marginal() if how.summed else None
        chosen = choose(logits, canvas[left], given[left], mask_id, how, inputs, write, marginal)
        on_step(chosen)
        canvas[left] = chosen.after
        grids[left] = chosen.guess + 1
        spent[left] += 1
        if early:
            left = left[~valid(chosen.guess + 1)]
            if not len(left):
                break
    return grids, spent


def show_frame(
    on_step: Callable[[int, Frame], None], attempt: int, view: Symmetry | None, mask_id: int, chosen: Chosen
) -> None:
    canvas = torch.where(chosen.after == mask_id, 0, chosen.after + 1)
    if view is None:
        on_step(attempt, Frame(canvas, chosen.guess + 1, chosen.score, chosen.masked))
    elif len(canvas) == len(view.cell):  # no row has left the batch
        back = view.cell.argsort(-1)
        places = (chosen.score.gather(1, back), chosen.masked.gather(1, back))
        on_step(attempt, Frame(view.undo(canvas), view.undo(chosen.guess + 1), *places))


def broken_rule(grid: Tensor, puzzle: Tensor) -> str:
    """The first rule that a grid (cells,) breaks, in words; nothing if it breaks none."""
    units = engine.BOARDS[len(grid)].units
    side = units.shape[1]
    for cell in ((puzzle > 0) & (puzzle != grid)).nonzero()[:, 0].tolist():
        return f"the clue {int(puzzle[cell])} in row {cell // side + 1}, column {cell % side + 1} was overwritten"
    for number, unit in enumerate(units):
        digits = grid[torch.from_numpy(unit)].tolist()
        for digit in range(1, side + 1):
            if digits.count(digit) > 1:
                where = ("row", "column", "box")[number // side]
                return f"{digit} stands {digits.count(digit)} times in {where} {number % side + 1}"
    return ""


def parse_puzzle(text: str, cells: int) -> Tensor:
    """(1, cells) of a puzzle in characters, without line breaks and spaces. Clues must not contradict each other."""
    characters = "".join(text.split())
    shown = characters if len(characters) <= 20 else characters[:17] + "..."
    require(
        len(characters) == cells,
        f"{shown!r}: {len(characters)} characters: expected the {cells} cells of a board, or an existing file of puzzles",
    )
    side = engine.BOARDS[cells].units.shape[1]
    digits = []
    for number, character in enumerate(characters, start=1):
        digit = 0 if character in "._" else int(character) if character in "0123456789" else side + 1
        require(
            digit <= side,
            f"{character!r} at character {number} of the puzzle: expected 1 to {side}, and . or 0 or _ for blanks",
        )
        digits.append(digit)
    puzzle = np.array([digits], dtype=np.uint8)
    check_digits(puzzle, np.zeros_like(puzzle), lambda row: "the puzzle")
    return torch.from_numpy(puzzle.astype("int64"))


def board_text(grid: Tensor, puzzle: Tensor, wrong: bool = False) -> Text:
    """The board with its boxes: clues bold, what the model wrote in green, or in red if the grid breaks the rules."""
    box = engine.BOARDS[len(grid)].box
    side = box * box
    board = Text()
    for row in range(side):
        if row and row % box == 0:
            board.append("+".join(["-" * (2 * box + 1)] * box)[1:-1] + "\n", style="dim")
        for column in range(side):
            cell = row * side + column
            if column and column % box == 0:
                board.append("| ", style="dim")
            style = "bold" if puzzle[cell] else ("red" if wrong else "green")
            board.append(str(int(grid[cell])) if grid[cell] else ".", style=style)
            board.append(" " if column + 1 < side else "\n")
    return board


# The command

SHOWN = 9  # boards of a file


def solve_command(
    what: str, folder: str | None, device: str, batch: int, animate: Path | None, out: Path | None, options: dict[str, Any]
) -> bool:
    """Solve one puzzle, or a file of them, and say so on the terminal. Whether all were solved."""
    is_file = os.path.isfile(what)
    require(is_file or out is None, f"--out {out}: expected with a file of puzzles")
    require(not is_file or animate is None, f"--animate {animate}: expected with one puzzle, not a file")
    require(animate is None or animate.suffix == ".gif", f"--animate {animate}: expected a name that ends in .gif")
    for option, path in (("--animate", animate), ("--out", out)):
        require(path is None or path.parent.is_dir(), f"{option} {path}: no such folder {path and path.parent}")
        require(path is None or not path.is_dir(), f"{option} {path}: expected a file, found a folder")
    require_range("--batch", batch, 1)
    if animate is not None:
        from vmd.plotting import pyplot

        pyplot()  # a missing matplotlib is better known before the solving
    if folder is None:
        require(
            (SHIPPED / "sudoku").is_dir(), "no solver came with this copy of vmd: give one with --model (`vmd train sudoku`)"
        )
    model = VMD.from_pretrained(SHIPPED / "sudoku" if folder is None else folder, device=device)
    require(knows_boards(model.config), f"--model {folder}: expected a model of whole Sudoku boards")
    options = options | {"steps": min(20, model.config.length) if options["steps"] is None else options["steps"]}
    if not is_file:
        return solve_one(model, parse_puzzle(what, model.config.length), animate, options)
    return solve_file(model, load_puzzles(what), batch, out, options)


def solve_one(model: VMD, puzzle: Tensor, animate: Path | None, options: dict[str, Any]) -> bool:
    frames: dict[int, list[Frame]] = {}
    options = options if animate is None else options | {"early": False}  # it would show little
    started = time.perf_counter()
    found = solve_puzzles(
        model, puzzle, on_step=lambda attempt, frame: frames.setdefault(attempt, []).append(frame), **options
    )
    seconds = time.perf_counter() - started
    grid, solved = found.grids[0].cpu(), bool(found.right[0])
    can_be = True if solved else engine.solvable(puzzle[0].numpy())
    require(can_be is not False, "the puzzle has no solution")
    say = partial(Console().print, highlight=False, soft_wrap=True)
    say(board_text(grid, puzzle[0], wrong=not solved), end="")
    effort = f"{plural(int(found.evaluations[0]), 'evaluation')} in {plural(int(found.tries[0]), 'try', 'tries')}"
    if solved:
        say(f"solved with {effort}, {seconds:.2f} s: every row, column and box holds every digit once")
    else:
        say(f"NOT solved with {effort}, {seconds:.2f} s: {broken_rule(grid, puzzle[0])}", style="red")
        if can_be is None:
            say("whether it has a solution at all would take longer to say")
    if animate is not None:
        from vmd.board_figures import animate_board

        shown = frames[int(found.tries[0]) - 1 if solved else 0]  # the try that wrote the grid
        with percent_bar("drawing the animation") as on_frame:
            path = animate_board(puzzle[0], shown, animate, on_frame)
        print(f"animation: {path}", file=sys.stderr)
    return solved


def unsolvable(puzzle: np.ndarray, patience: float = 5.0) -> tuple[int, int]:
    """How many of puzzles (n, cells) have no solution, and of how many that could be said within some seconds."""
    found: list[bool | None] = []
    for one in puzzle:
        found.append(engine.solvable(one))
        if len(found) == 1:  # which may have waited for a compiler
            started = time.perf_counter()
        if time.perf_counter() - started > patience:
            break
    return found.count(False), len(found) - found.count(None)


def solve_file(model: VMD, puzzles: Puzzles, batch: int, out: Path | None, options: dict[str, Any]) -> bool:
    puzzle = torch.from_numpy(puzzles.puzzle.astype("int64"))
    started = time.perf_counter()
    with progress_bar("vmd solve", len(puzzle)) as update:
        found = solve_puzzles(model, puzzle, batch_size=batch, on_rows=lambda done: update(done, ""), **options)
    seconds = time.perf_counter() - started
    right, grids = found.right.cpu(), found.grids.cpu()
    rows = [
        ["solved, by the rules", f"{int(right.sum())} of {len(right)}", f"{100 * float(right.double().mean()):.2f} %"],
        ["in the first try", f"{int((right & (found.tries.cpu() == 1)).sum())} of {len(right)}", ""],
    ]
    unsolved = puzzles.puzzle[~right.numpy()]
    hopeless, decided = unsolvable(unsolved)
    if hopeless:
        least = "" if decided == len(unsolved) else "at least "
        rows.append(["have no solution", f"{least}{hopeless} of {len(right)}", ""])
    known = torch.from_numpy(puzzles.solution.any(1))
    if known.any():
        same = (grids == torch.from_numpy(puzzles.solution.astype("int64"))).all(1) & known
        rows.append(["as the solution given", f"{int(same.sum())} of {int(known.sum())}", ""])
    mean = float(found.evaluations.double().mean())
    rows.append(["evaluations per puzzle", f"{mean:.1f}", f"at most {options['steps'] * options['tries']}"])
    rows.append(["puzzles per second", f"{len(right) / seconds:.1f}", f"{seconds:.1f} s on {model.device.type}"])
    about = f"order {options['order']}, rule argmax, {options['steps']} steps, {plural(options['tries'], 'try', 'tries')}"
    if out is None and len(right) <= SHOWN:
        for grid, clues, is_right in zip(grids, puzzle, right.tolist(), strict=True):
            Console().print(board_text(grid, clues, wrong=not is_right), highlight=False, soft_wrap=True)
    print_table(["of the puzzles", "", ""], rows, title=f"{puzzles.name}: {about}")
    if out is None and len(right) > SHOWN:
        print("--out FILE writes the grids, one a line", file=sys.stderr)
    if out is not None:
        lines = ["".join(map(str, g if r else [0] * len(g))) for g, r in zip(grids.tolist(), right.tolist(), strict=True)]
        write_atomically(out, "".join(line + "\n" for line in lines))
    return bool(right.all())


def plural(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
