"""`vmd data sudoku` and `vmd solve`."""

from pathlib import Path
from typing import Annotated

import typer

from vmd.commands.options import Device, path_option
from vmd.config import require, require_choice
from vmd.terminal import pick_device, say, several_processes


def data(
    what: Annotated[str, typer.Argument(help="sudoku.")],
    train: Annotated[int, typer.Option(help="Puzzles to train on.")] = 1_800_000,
    test: Annotated[
        int, typer.Option(help="Puzzles to test on; none has a training solution, not even up to symmetry.")
    ] = 100_000,
    kind: Annotated[
        str,
        typer.Option(
            help="logic: solved by seven strategies; hard: not; any: either; multi: 2 to 50 solutions; grid: no clues."
        ),
    ] = "logic",
    seed: Annotated[int, typer.Option(help="The files depend on sizes, kind and seed alone.")] = 0,
    out: Annotated[Path, path_option(help="Output folder.")] = Path("data/sudoku"),
    workers: Annotated[int, typer.Option(help="Processes. [default: one for each core]")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace puzzles that are there.")] = False,
) -> None:
    """Make Sudoku puzzles with their solutions, 24 bytes each: OUT/train.sudoku and OUT/test.sudoku."""
    from vmd.data.sudoku import make_puzzles
    from vmd.data.sudoku_engine import COMPILED
    from vmd.progress import progress_bar

    require_choice("WHAT", what, ("sudoku",))
    held = [name for name in ("train.sudoku", "test.sudoku") if (out / name).exists()]
    require(overwrite or not held, f"{out} holds puzzles ({', '.join(held)}): use --overwrite or another --out")
    if not COMPILED:
        say("note: numba is not installed, which makes this some 200 times slower: pip install numba")
    with progress_bar(f"vmd data {what}", train + test) as update:
        made = make_puzzles(train, test, kind, seed, out, workers, update)
    shown = f"{made['train']:,} to train, {made['test']:,} to test, kind {kind}, seed {seed}, {made['seconds']:.0f} s"
    say(f"{out}: {shown}")


def solve(
    puzzle: Annotated[
        str,
        typer.Argument(
            help="81 characters, . or 0 for a blank; or a file of puzzles: lines of 81, or boards of nine lines."
        ),
    ],
    model: Annotated[str | None, typer.Option(help="A model folder. [default: the solver that comes with vmd]")] = None,
    steps: Annotated[int | None, typer.Option(help="Most evaluations in a try. [default: 20]")] = None,
    order: Annotated[str, typer.Option(help="random, prob, margin or entropy.")] = "margin",
    tries: Annotated[int, typer.Option(help="Most tries; each looks at the board under another symmetry.")] = 8,
    revise: Annotated[bool, typer.Option("--revise", help="A step may take back what an earlier one wrote.")] = False,
    early: Annotated[bool, typer.Option(help="Stop as soon as all that the model would write obeys the rules.")] = True,
    animate: Annotated[
        Path | None, path_option(help="Of one puzzle: write all steps as a .gif; none is left out by --early.")
    ] = None,
    out: Annotated[Path | None, path_option(help="Of a file: write the grids, one a line; unsolved ones as blanks.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of latents and symmetries.")] = 0,
    batch: Annotated[int, typer.Option(help="Of a file: puzzles at a time.")] = 64,
    device: Device = "auto",
) -> None:
    """Solve Sudoku puzzles with a model, and check what it wrote by the rules. Exit code 1: not solved."""
    from vmd.solving import solve_command

    require(not several_processes(), "vmd solve runs in one process: start it without torchrun")
    chosen = {"steps": steps, "order": order, "tries": tries, "revise": revise, "early": early, "seed": seed}
    if not solve_command(puzzle, model, pick_device(device), batch, animate, out, chosen):
        raise typer.Exit(1)
