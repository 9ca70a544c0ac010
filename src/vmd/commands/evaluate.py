"""`vmd evaluate`."""

import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from vmd.commands.options import Device, Model, path_option
from vmd.config import require
from vmd.terminal import (
    data_to_score,
    is_same_file,
    note_unfinished,
    parse_counts,
    pick_device,
    print_table,
    saved,
    say,
    several_processes,
    unit_of,
)


def evaluate(
    model: Model,
    data: Annotated[
        str,
        typer.Option(help="A named data set, integers as .npy or .csv, a table as .csv, a text file or folder, or puzzles."),
    ],
    steps: Annotated[str, typer.Option(help="Steps per block, as in 1,2.")] = "1",
    order: Annotated[str, typer.Option(help="Of samples: random, prob, margin or entropy. Bounds are for random.")] = "prob",
    z: Annotated[
        str | None,
        typer.Option(
            help="once or fresh; of puzzles also likeliest. A bound for once takes N passes a row, for fresh at most 8. "
            "[default: as for samples]"
        ),
    ] = None,
    revise: Annotated[
        bool, typer.Option("--revise", help="Of puzzles: steps may mask again what earlier ones wrote.")
    ] = False,
    iwae: Annotated[str, typer.Option(help="Samples of z in the bounds of a Gaussian latent, as in 1,16.")] = "1,16",
    n: Annotated[int, typer.Option("-n", "--n", help="Samples drawn of data whose law is known.")] = 20_000,
    rows: Annotated[int, typer.Option(help="Rows scored.")] = 2_000,
    split: Annotated[
        str | None, typer.Option(help="Of text: all, train, validation or test. [default: test of what it was trained on]")
    ] = None,
    fixed: Annotated[
        str | None, typer.Option(help="Positions always given, as in 0:4. [default: as in the model's training]")
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Also the bits that bounds are above: all orders summed over, of blocks of up to 8."),
    ] = False,
    against: Annotated[
        str | None, typer.Option(help="Another model: also how many bits fewer or more, row by row, with the error of that.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of masks and samples.")] = 0,
    json_out: Annotated[
        Path | None, path_option("--json", help="Also write the rows as JSON, and, but for puzzles, a plot beside it.")
    ] = None,
    plot: Annotated[Path | None, path_option(help="Where the plot goes, a .png. [default: beside the JSON]")] = None,
    device: Device = "auto",
) -> None:
    """Score a model: certified bits per token for each number of steps, the objective, what the latent carries, and, where
    the law of the data is known, accuracy and KL of samples. Of Sudoku puzzles: how many it solves."""
    from vmd.data import ArrayData, SudokuData
    from vmd.data.arrays import same_positions
    from vmd.data.synthetic import Law
    from vmd.diagnostics import advice
    from vmd.diagnostics import describe as describe_latent
    from vmd.distributed import one_after_the_first, rank
    from vmd.evaluation import EXACT, ORDER_PART, diagnose_model, evaluate_model, evaluate_puzzles
    from vmd.files import hardware, write_atomically
    from vmd.model import VMD, model_folder
    from vmd.progress import progress_bar
    from vmd.scoring import difference_rows, require_comparable

    least = max(2, int(os.environ["WORLD_SIZE"]) if several_processes() else 1)
    require(n >= least, f"--n {n}: expected at least {least}")
    require(rows >= least, f"--rows {rows}: expected at least {least}")
    require(0 <= seed < 2**62, f"--seed {seed}: expected 0 to 2^62")
    counts, draws, drawn = parse_counts("--steps", steps), parse_counts("--iwae", iwae), plot is not None
    if json_out is not None:
        require(json_out.parent.is_dir(), f"--json {json_out}: no such folder {json_out.parent}")
        require(json_out.suffix == ".json", f"--json {json_out}: expected a path ending in .json")
        require(not json_out.is_dir(), f"--json {json_out}: expected a file, found a folder")
        plot = plot or json_out.with_suffix(".png")
    if plot is not None:
        from vmd.plotting import pyplot

        require(plot.suffix == ".png", f"--plot {plot}: expected a path ending in .png")
        require(plot.parent.is_dir(), f"--plot {plot}: no such folder {plot.parent}")
        require(not plot.is_dir(), f"--plot {plot}: expected a file, found a folder")
        pyplot()
    folder = model_folder(model)
    loaded = VMD.from_pretrained(folder, device=pick_device(device))
    note_unfinished(loaded, folder)
    require(z is None or loaded.config.has_latent, f"--z {z}: expected with a model that has a latent")
    asked_z = z
    z = z or (loaded.usual_z if max(counts) > 1 else "once")
    with one_after_the_first():  # who prepares the data for all
        loaded_data = data_to_score(folder, loaded, data, split)
    if isinstance(loaded_data, SudokuData):
        require(not drawn, f"--plot {plot}: expected with data other than puzzles")
    asked_fixed = fixed
    if fixed is None:
        fixed = loaded.fixed
    if exact:
        require(not isinstance(loaded_data, SudokuData), "--exact: expected data other than puzzles")
        kept = z == "once" and max(counts) > 1 and loaded.config.has_latent
        require(not kept, "--exact: expected --z fresh: orders of a z that is kept are not summed over")
    other = None
    if against is not None:
        whole = not isinstance(loaded_data, SudokuData) and not several_processes()
        require(whole, f"--against {against}: expected no puzzles, and one process")
        other, there = VMD.from_pretrained(against, device=loaded.device), model_folder(against)
        note_unfinished(other, there)
        require_comparable(loaded, other)
        apart = f"--against {against}: it was trained with positions {other.fixed!r} given, and {model} with {fixed!r}"
        same_given = asked_fixed is not None or same_positions(other.fixed, fixed, loaded.config.length)
        require(same_given, f"{apart}: expected --fixed, for both")
        other_z = asked_z or (other.usual_z if max(counts) > 1 else "once")
    if fixed and asked_fixed is None:
        say(f"positions {fixed} are given, as in training; --fixed says otherwise")
    with progress_bar(f"vmd evaluate {model}, percent", 100) as update:

        def on_part(done: float, total: int) -> None:
            update(int(100 * done / total), f"part {min(int(done) + 1, total)} of {total}")

        same = {"order": order, "z": z, "rows_scored": rows, "seed": seed, "on_part": on_part}
        if isinstance(loaded_data, SudokuData):
            scores = evaluate_puzzles(loaded, loaded_data, counts, revise=revise, **same)  # type: ignore[arg-type]
        else:
            require(not revise, "--revise: expected with puzzles: samples that are revised have no certified likelihood")
            scores = evaluate_model(loaded, loaded_data, counts, iwae=draws, n=n, fixed=fixed, exact=exact, **same)  # type: ignore[arg-type]
            if other is not None:
                both = (z, other_z)
                how = {"samples": max(draws), "rows": rows, "seed": seed, "fixed": fixed}
                scores += difference_rows(loaded, other, str(against), loaded_data, counts, both, how)
    if rank() != 0:
        return
    entropy = None
    if isinstance(loaded_data, Law) and not fixed:
        entropy = loaded_data.entropy / (loaded_data.length * math.log(2))
    broken = [row["metric"] for row in scores if not math.isfinite(row["value"])]
    require(not broken, f"{model}: {broken[0] if broken else ''} is not a number: expected a model with finite weights")
    headers = ["metric", "value", "setting"]
    unit = unit_of(loaded.tokenizer)
    lines = [
        [
            row["metric"].replace("per token", f"per {unit}"),
            f"{round(row['value'], 4) + 0.0:.4f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.4f}"),
            row["about"],
        ]
        for row in scores
    ]
    if entropy is not None:
        lines.insert(
            0,
            [
                f"entropy of the data, bits per {unit}",
                f"{entropy:.4f}",
                "no certified figure can be below it, but for its error",
            ],
        )
    print_table(headers, lines)
    print(end="", flush=True)  # what follows may take a while, and nobody should lose this
    trained_on = str(saved(folder, "data").get("name") or "")
    if isinstance(loaded_data, ArrayData) and is_same_file(trained_on, data):
        say(f"note: {data} is what it was trained on, and may know by heart: rows it has not seen tell how good it is")
    carried = diagnose_model(loaded, loaded_data, seed, fixed, rows=min(512, rows))
    if carried is not None:
        kind = loaded.config.latent.kind
        say(describe_latent(carried, kind))
        warning = advice(carried, kind)
        if warning is not None:
            say(f"warning: {warning}")
    if json_out is not None:
        command = shlex.join(["vmd", *sys.argv[1:]])
        latent = None if carried is None else carried._asdict()
        record = {"command": command, "data": data, "seed": seed, "hardware": hardware(loaded.device.type)}
        record |= {"entropy": entropy, "rows": scores, "latent": latent}
        write_atomically(json_out, json.dumps(record, indent=1))
    if plot is not None and not isinstance(loaded_data, SudokuData):
        from vmd.plotting import draw_scores

        title = f"{model} on {data}" + (f", z {z}" if loaded.config.has_latent else "")
        bounds = [row for row in scores if "against" not in row and row["metric"] not in (EXACT, ORDER_PART)]
        draw_scores(bounds, entropy, carried, loaded.config.latent.kind, title, plot)
        say(f"picture: {plot}")
