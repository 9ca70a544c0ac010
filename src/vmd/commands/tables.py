"""`vmd reproduce` and `vmd report`: tables of the experiments."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from vmd.commands.options import Device, Settings, path_option
from vmd.config import require, require_choice
from vmd.files import working_in
from vmd.terminal import parse_seeds, pick_device, print_table, say, several_processes


@contextmanager
def no_arguments() -> Iterator[None]:
    """torch.compile writes the word after an --only into its code, and cannot quote "the paper's VMD"."""
    words, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = words


def reproduce(
    name: Annotated[str, typer.Argument(help="two-token, four-token, ablations, heads, sudoku, text or text-scan.")],
    quick: Annotated[bool, typer.Option("--quick", help="The same code on a budget for two CPU cores.")] = False,
    preset: Annotated[str, typer.Option(help="ours, or the settings of the paper.")] = "ours",
    seeds: Annotated[
        str | None, typer.Option(help="Number of seeds, or the seeds as in 100,101. [default: 5, with --quick 1]")
    ] = None,
    out: Annotated[Path | None, path_option(help="Output folder. [default: runs/NAME]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the groups of models that a stopped run finished.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Of the controlled experiments: make results anew that are there.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Of sudoku, text and text-scan: run this system now, as its row is called. Repeatable."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Of sudoku: where puzzles are, or are made [default: data/sudoku]. Of text: text8, or a file."),
    ] = None,
    device: Device = "auto",
    settings: Settings = None,
) -> None:
    """Train and evaluate a table of the paper; write results.json, table.md and figures."""
    from vmd.experiments.controlled import TABLES, reproduce
    from vmd.experiments.figures import draw_figures
    from vmd.experiments.tables import summary_table
    from vmd.plotting import pyplot

    require_choice("NAME", name, (*TABLES, "sudoku", "text", "text-scan"))
    require(not several_processes(), "vmd reproduce runs in one process: start it without torchrun")
    chosen_seeds = None if seeds is None else parse_seeds(seeds)
    pyplot()  # a missing matplotlib is better known before the training
    for setting in settings or []:
        begins = setting.strip().startswith(("training.init", "training.freeze"))
        require(not begins, f"--set {setting}: expected with `vmd train`: systems of a table are trained from the start")
    command = shlex.join(["vmd", *sys.argv[1:]])
    suffix = ("" if preset == "ours" else f"-{preset}") + ("-quick" if quick else "")
    folder = out or Path("runs") / (name + suffix)
    if name in ("sudoku", "text", "text-scan"):
        require(preset == "ours", f"--preset {preset}: expected ours: {name} has the paper's systems among its rows")
        require(seeds is None, f"--seeds: expected none with {name}; try --set training.seed=7 with another --out")
        require(
            not overwrite, f"--overwrite: expected none with {name}, whose rows take long: remove {folder}, or another --out"
        )
        options: dict[str, Any] = {
            "out": folder,
            "command": command,
            "quick": quick,
            "device": pick_device(device),
            "overrides": settings or [],
            "resume": resume,
            "only": tuple(only or ()),
            "on_note": say,
        }
        if name == "sudoku":
            from vmd.experiments.puzzle_table import reproduce_sudoku

            with no_arguments(), working_in(folder):
                results = reproduce_sudoku(data=Path(data or "data/sudoku"), **options)
        else:
            from vmd.experiments.text_table import reproduce_text

            with no_arguments(), working_in(folder):
                results = reproduce_text(table=name, data=data or "", **options)
        bits = "certified bits per character of the"
        titles = {
            "sudoku": "logic puzzles solved, %, argmax",
            "text": f"{bits} test text, and real words of samples",
            "text-scan": f"{bits} validation text",
        }
        print_table(*summary_table(results), title=f"{name}: {titles[name]}")
        if name == "text":
            say("cells: certified bits per character · real words of samples (rule sample), by evaluations of the network")
        for picture in [folder / "table.md", *draw_figures(folder)]:
            say(f"{'every row' if picture.suffix == '.md' else 'picture'}: {picture}")
        return
    require(data is None, f"--data {data}: expected with sudoku, text or text-scan")
    require(not only, "--only: expected with sudoku, text or text-scan")
    results = reproduce(
        name,
        out=folder,
        command=command,
        quick=quick,
        seeds=chosen_seeds,
        family=preset,
        device=pick_device(device),
        overrides=settings or [],
        resume=resume,
        overwrite=overwrite,
    )
    shown = {"ablations": "certified bits per token", "heads": "valid sequences and exact KL, nats, in one step"}
    print_table(*summary_table(results), title=f"{name}: {shown.get(name, 'accuracy and KL(data || samples), nats')}")
    pictures = draw_figures(folder)
    about = {"ablations": "N: steps per block, z fresh", "heads": "ms: of a training step of all models together"}
    blurred = "a Gaussian z is blurred where tokens are drawn (rule sample); codes are not (vmd train poker)"
    explained = about.get(name, f"KL in nats; printed: the paper's figures; {blurred}")
    say(f"{explained}; every row and its setting: {folder / 'table.md'}")
    for picture in pictures:
        say(f"picture: {picture}")


def report(
    readme: Annotated[Path, path_option(help="The file whose marked sections are rewritten.")] = Path("README.md"),
    results: Annotated[Path, path_option(help="The results folder.")] = Path("results"),
) -> None:
    """Draw tables and figures of the results folder, and rewrite the README's tables from it."""
    import shutil
    from tempfile import TemporaryDirectory

    from vmd.experiments.figures import draw_figures
    from vmd.experiments.report import as_written, read_results, renewed, update_readme
    from vmd.experiments.tables import render
    from vmd.files import write_atomically

    require(results.is_dir(), f"{results}: no such folder: expected results of `vmd reproduce`")
    made: dict[Path, bytes] = {}  # all of it first: what is damaged must not leave half of the files renewed
    for path in sorted(results.glob("*/results.json")):
        with as_written(path):
            made[path.with_name("table.md")] = render(read_results(path)).encode()
        with as_written(path.parent), TemporaryDirectory() as aside:
            for kept in (path, path.with_name("heatmaps.json")):
                if kept.exists():
                    shutil.copy(kept, aside)
            made |= {path.with_name(picture.name): picture.read_bytes() for picture in draw_figures(Path(aside))}
    renewed(readme, results)
    for path, content in made.items():
        write_atomically(path, content)
    say(f"{readme}: {'updated' if update_readme(readme, results) else 'unchanged'}")
