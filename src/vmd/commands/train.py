"""`vmd train`."""

from pathlib import Path
from typing import Annotated

import typer

from vmd.commands.options import Device, Settings, path_option
from vmd.config import override_all, require
from vmd.runs import HOW_IT_RUNS, run_as_it_began, run_files, sized_as_it_began, train_run
from vmd.terminal import pick_device


def train(
    preset: Annotated[str, typer.Argument(help="A preset (`vmd presets`); array is for your own data.")] = "array",
    data: Annotated[
        str | None,
        typer.Option(
            help="A named data set, integers (rows, length) as .npy or .csv, a table as .csv, a text file or folder."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Of text: char, text8 (27 letters for any text), byte, or a path: JSON of `tokenizers`, or of a model. "
            "[default: char]"
        ),
    ] = None,
    out: Annotated[Path | None, path_option(help="Output folder. [default: runs/PRESET]")] = None,
    init: Annotated[
        str | None,
        typer.Option(help="A trained model to start from: a folder, or one that comes with vmd. Parts it has not are new."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest checkpoint in the output folder; --out and this are enough."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew in a folder that holds a run.")] = False,
    fast: Annotated[
        bool, typer.Option(help="On a GPU: choose precision, attention, compiled and recorded steps for speed.")
    ] = True,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log to OUT/tensorboard.")] = False,
    device: Device = "auto",
    settings: Settings = None,
) -> None:
    """Train a model on a preset's data, or on your own array, text or puzzles."""
    from dataclasses import replace

    from vmd import presets

    changes = [*(settings or []), *([] if init is None else [f"training.init={init}"])]
    begun = (out or Path("runs") / preset) / "run.json"
    require(not (resume and overwrite), "--resume and --overwrite: expected one of the two")
    require(begun.exists() or not resume, f"{begun.parent}: expected a run to resume, with its run.json")
    kept = run_as_it_began(begun) if resume else None
    from_python = kept is not None and not kept.data.name
    told = f"{begun.parent}: a run begun in Python, with data of no name: expected vmd.train(..., resume=True) there"
    require(not from_python, told)
    as_begun = kept is not None and preset == "array"  # --out and --resume say it all
    run = kept if kept is not None and as_begun else presets.preset(preset)
    if kept is not None and not run.data.name:
        run = replace(run, data=kept.data)
    run = override_all(run, changes)
    if data is not None:
        run = replace(run, data=replace(run.data, name=data))
    if tokenizer is not None:
        run = replace(run, data=replace(run.data, tokenizer=tokenizer))
    require(bool(run.data.name), f"preset {preset!r} has no data of its own: give it with --data")
    chosen = {setting.partition("=")[0].strip() for setting in settings or []}
    how_it_ran = {f"training.{name}" for name in HOW_IT_RUNS} if as_begun else set()
    folder = out or Path("runs") / preset
    held = [path.name for path in run_files(folder) if path.exists()]
    there = f"{folder} holds a run ({', '.join(held[:3])}): use --resume, --overwrite or another --out"
    require(resume or overwrite or not held, there)
    require(init != "", "--init '': expected a model folder, or the name of a model that comes with vmd")
    run = sized_as_it_began(run, folder, resume, chosen)
    begins = bool(run.training.init) or not run.training.freeze
    require(begins, "training.freeze=true: expected with --init: what is frozen must have been trained")
    train_run(run, folder, resume, pick_device(device), fast=fast, chosen=chosen | how_it_ran, tensorboard=tensorboard)
