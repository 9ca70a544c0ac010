"""The `vmd` command. Nothing here imports torch until a command needs it."""

import errno
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from vmd.config import (
    InvalidInput,
    flatten,
    override_all,
    require,
    require_choice,
    to_dict,
)
from vmd.files import working_in
from vmd.runs import HOW_IT_RUNS, read_log, run_as_it_began, run_files, sized_as_it_began, train_run
from vmd.terminal import (
    Watch,
    check_array_path,
    complain,
    data_to_score,
    first_process,
    lost_others,
    note_unfinished,
    parse_counts,
    parse_seeds,
    pick_device,
    print_table,
    prompt_row,
    saved,
    say,
    several_processes,
    show,
    trained_fixed,
    unit_of,
    usage_line,
    usual_z,
    visible,
    write_array,
)

app = typer.Typer(
    help="Variational masked diffusion: generate many discrete tokens at once and make them agree.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def version(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """Variational masked diffusion: generate many discrete tokens at once and make them agree."""
    if show_version:
        from vmd import __version__

        print(__version__)
        raise typer.Exit


Settings = Annotated[list[str] | None, typer.Option("--set", help="Override a field: section.field=value. Repeatable.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Model = Annotated[str, typer.Argument(help="A model folder, as written by `vmd train`, or a model that comes with vmd.")]


def path_option(*names: str, help: str) -> Any:
    """For every option that takes a path: an empty one, as of a variable that was never set, is not the current folder."""

    def given(text: str | Path) -> Path:
        if not str(text).strip():
            raise typer.BadParameter(f"{str(text)!r}: expected a path")
        return Path(text)

    return typer.Option(*names, help=help, parser=given, metavar="<path>")


@contextmanager
def no_arguments() -> Iterator[None]:
    """torch.compile writes the word after an --only into its code, and cannot quote "the paper's VMD"."""
    words, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = words


@app.command(short_help="Train and measure a table of the paper.")
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


@app.command(short_help="Train a model, on data of your own or a preset's.")
def train(
    preset: Annotated[str, typer.Argument(help="A preset (`vmd presets`); array is for your own data.")] = "array",
    data: Annotated[
        str | None,
        typer.Option(help="A named data set, integers (rows, length) as .npy or .csv, a text file or folder."),
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


@app.command()
def sample(
    model: Model,
    n: Annotated[int, typer.Option("-n", "--n", help="Number of samples.")] = 10,
    steps: Annotated[int, typer.Option(help="Steps per block.")] = 1,
    order: Annotated[str, typer.Option(help="random, prob, margin or entropy.")] = "prob",
    rule: Annotated[
        str | None,
        typer.Option(help="argmax (the paper's) or sample. [default: argmax with a Gaussian latent, else sample]"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="For rule sample.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="For rule sample.")] = 1.0,
    z: Annotated[
        str | None,
        typer.Option(
            help="once per block, fresh or the likeliest at every step. [default: fresh for codes trained so, else once]"
        ),
    ] = None,
    revise: Annotated[
        bool, typer.Option("--revise", help="A step may mask again what an earlier one wrote, where the model has doubts.")
    ] = False,
    order_noise: Annotated[
        float, typer.Option(help="Gumbel noise on the confidences, less with every step: an order not greedy at first.")
    ] = 0.0,
    prompt: Annotated[
        str | None, typer.Option(help="Tokens with _ for each gap, as in '3 _ _ 6'; of text, how it begins.")
    ] = None,
    infill: Annotated[
        str | None, typer.Option(help="Text with _ for each gap, as in 'the ____ of science'; \\_ is no gap.")
    ] = None,
    tries: Annotated[
        int | None,
        typer.Option(
            help="Of an infill: candidates for each gap, of which one is drawn by how well the text after it follows. "
            "[default: 32; 1 for a model of one block, which sees all of the text, and with a Gaussian latent]"
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Of text: write so many tokens, in windows that see the end of the last. [default: the model's length]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Sample i depends on the seed and i alone.")] = 0,
    cache: Annotated[bool, typer.Option(help="Keep keys and values of finished blocks.")] = True,
    trace: Annotated[bool, typer.Option("--trace", help="Show every step of the first sample.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the tokens of the first sample as they appear.")] = False,
    out: Annotated[Path | None, path_option(help="Also write the tokens as .npy.")] = None,
    device: Device = "auto",
) -> None:
    """Draw samples, or fill the gaps of a prompt. One sample per line; of texts with line ends, --- between samples."""
    import torch

    from vmd.distributed import gather_rows, my_share, rank
    from vmd.evaluation import rows_per_pass
    from vmd.infilling import TRIES
    from vmd.infilling import infill as fill_gaps
    from vmd.model import VMD, model_folder
    from vmd.progress import percent_bar
    from vmd.step import step_seed
    from vmd.writing import write

    require(1 <= n <= 10_000_000, f"--n {n}: expected 1 to 10,000,000")
    require(0 <= seed < 2**62, f"--seed {seed}: expected 0 to 2^62")
    folder = model_folder(model)
    loaded = VMD.from_pretrained(folder, device=pick_device(device))
    note_unfinished(loaded, folder)
    config = loaded.config
    rule = rule or ("argmax" if config.latent.kind == "gaussian" else "sample")
    require(z is None or config.has_latent, f"--z {z}: expected with a model that has a latent")
    z = z or (usual_z(saved(folder, "objective"), config) if steps > 1 else "once")
    deaf = config.latent.kind == "gaussian" and config.latent.prior == "normal" and not config.latent.encoder_sees_mask
    if prompt is not None and deaf:
        say("note: this model's z does not heed the prompt; for prompts train with model.latent.encoder_sees_mask=true")
    if prompt is None and trained_fixed(folder):
        say(f"note: this model was trained with positions {trained_fixed(folder)} given; use --prompt to give them")
    tokenizer = loaded.tokenizer
    if length is not None:
        of_text = tokenizer is not None and infill is None
        require(
            of_text and not (watch or trace),
            f"--length {length}: expected with a model of text, no --infill, --watch, --trace",
        )
        require(1 <= length <= 1_000_000, f"--length {length}: expected 1 to 1,000,000")
    row = prompt_row(prompt, infill, config, tokenizer, length)
    wanted = len(row)  # of an infill no more than it holds
    require(tries is None or infill is not None, f"--tries {tries}: expected with --infill")
    require(tries is None or tries >= 1, f"--tries {tries}: expected at least 1")
    if out is not None:
        check_array_path(out)
    mine = my_share(n)
    watching = Watch(config, tokenizer, row, whole=infill is not None) if watch and rank() == 0 else None
    options: dict = {
        "steps": steps,
        "order": order,
        "rule": rule,
        "temperature": temperature,
        "top_p": top_p,
        "z": z,
        "revise": revise,
        "order_noise": order_noise,
        "cache": cache,
        "seeds": [step_seed(seed, i) for i in mine or [0]],  # a process without a share draws one for nothing
        "trace": trace,
        "on_step": watching,
    }
    bar: Any = nullcontext(lambda done, total: None) if watch else percent_bar(f"vmd sample {model}")
    if length is not None:
        given = torch.tensor([token for token in row if token >= 0], dtype=torch.long)
        options |= {"length": length, "batch_size": rows_per_pass(loaded)}
        with bar as show_progress:
            drawn = write(loaded, given, max(1, len(mine)), on_progress=show_progress, **options)
    elif infill is None:
        size = 8_192 if watch or trace else rows_per_pass(loaded)  # of every batch all steps would be shown
        rows = torch.tensor([row]).repeat(max(1, len(mine)), 1)
        with bar as show_progress:
            drawn = loaded.sample(prompt=rows, batch_size=size, on_progress=show_progress, **options)
    else:
        weighed = []  # candidates, if there were any to weigh

        def tell(done: int, total: int) -> None:
            weighed.append(total)
            show_progress(done, total)

        with bar as show_progress:
            drawn = fill_gaps(loaded, torch.tensor(row), max(1, len(mine)), tries=tries, on_progress=tell, **options)
    if watching is not None:
        watching.close()
    everything = gather_rows(drawn.tokens[: len(mine), :wanted])
    if rank() != 0:
        return
    if out is not None:
        write_array(out, everything)
    for step in drawn.trace:
        say(f"block {step.block} step {step.step}: {visible(show(step.canvas[0, :wanted].tolist(), config, tokenizer))}")
    texts = [show(tokens, config, tokenizer) for tokens in everything.tolist()]
    print(("\n---\n" if any("\n" in text for text in texts) else "\n").join(texts))
    say(
        f"n {n}, rule {rule}, order {order}, {steps} step{'s' if steps > 1 else ''} per block, NFE {drawn.nfe}"
        + (f" and {drawn.cache_passes} to fill the cache" if drawn.cache_passes else "")
        + (f", for each of {tries or TRIES} candidates, of which one is drawn by how it fits" if infill and weighed else "")
        + (f", z {z}" if config.has_latent else "")
        + (", revising" if revise else "")
        + (f", noise {order_noise:g} on the order" if order_noise else "")
    )


@app.command(short_help="Certified bits of a model at each number of steps.")
def evaluate(
    model: Model,
    data: Annotated[
        str,
        typer.Option(help="A named data set, integers as .npy or .csv, a text file or folder, or puzzles."),
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
    from vmd.data import SudokuData
    from vmd.data.synthetic import Law
    from vmd.diagnostics import advice
    from vmd.diagnostics import describe as describe_latent
    from vmd.distributed import one_after_the_first, rank
    from vmd.evaluation import diagnose_model, evaluate_model, evaluate_puzzles
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
    z = z or (usual_z(saved(folder, "objective"), loaded.config) if max(counts) > 1 else "once")
    with one_after_the_first():  # who prepares the data for all
        loaded_data = data_to_score(folder, loaded, data, split)
    if isinstance(loaded_data, SudokuData):
        require(not drawn, f"--plot {plot}: expected with data other than puzzles")
    if fixed is None:
        fixed = trained_fixed(folder)
        if fixed:
            say(f"positions {fixed} are given, as in training; --fixed says otherwise")
    other = None
    if against is not None:
        whole = not fixed and not isinstance(loaded_data, SudokuData) and not several_processes()
        require(whole, f"--against {against}: expected no puzzles, no positions that are given (--fixed), and one process")
        other, there = VMD.from_pretrained(against, device=loaded.device), model_folder(against)
        note_unfinished(other, there)
        require_comparable(loaded, other)
        other_z = asked_z or (usual_z(saved(there, "objective"), other.config) if max(counts) > 1 else "once")
    with progress_bar(f"vmd evaluate {model}, percent", 100) as update:

        def on_part(done: float, total: int) -> None:
            update(int(100 * done / total), f"part {min(int(done) + 1, total)} of {total}")

        same = {"order": order, "z": z, "rows_scored": rows, "seed": seed, "on_part": on_part}
        if isinstance(loaded_data, SudokuData):
            scores = evaluate_puzzles(loaded, loaded_data, counts, revise=revise, **same)  # type: ignore[arg-type]
        else:
            require(not revise, "--revise: expected with puzzles: samples that are revised have no certified likelihood")
            scores = evaluate_model(loaded, loaded_data, counts, iwae=draws, n=n, fixed=fixed, **same)  # type: ignore[arg-type]
            if other is not None:
                both = (z, other_z)
                scores += difference_rows(loaded, other, str(against), loaded_data, counts, both, max(draws), rows, seed)
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
            f"{row['value']:.4f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.4f}"),
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
        draw_scores(
            [row for row in scores if "against" not in row], entropy, carried, loaded.config.latent.kind, title, plot
        )
        say(f"picture: {plot}")


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="Show this preset's fields.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Also those of the controlled experiments.")] = False,
) -> None:
    """List the presets, or show one as `--set` would name its fields."""
    from vmd.presets import all_presets, controlled, preset

    if name is None:
        left_out = [] if every else controlled()
        print(f"{'preset':28s} {'data':16s} {'layers':8s} {'blocks':10s} {'latent':12s} training")
        for key, run in all_presets().items():
            if key in left_out:
                continue
            model = run.model
            kinds = {
                "gaussian": f"Gaussian {model.latent.dim}",
                "categorical": f"{model.latent.codes} codes",
                "chain": f"chain of {model.latent.codes} codes",
                "none": f"draft {model.draft}" if model.draft else "no latent",
            }
            latent = kinds[model.latent.kind]
            block = f"block {model.block_size}" if model.block_size else "one block"
            size = f"{model.layers} x {model.width}"
            training = f"{run.training.steps} steps of {run.training.batch_size}"
            print(f"{key:28s} {run.data.name or 'your data':16s} {size:8s} {block:10s} {latent:12s} {training}")
        if left_out:
            say(f"and {len(left_out)} of the controlled experiments, such as {left_out[0]}: --all lists them, too")
        return
    for field, value in flatten(to_dict(preset(name))).items():
        value = ",".join(map(str, value)) if isinstance(value, list) else value
        print(f"{field}={value}")


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, as written by `vmd train`, or their metrics.jsonl.")],
    metric: Annotated[
        str | None,
        typer.Option(help="Fields of the log, as in total,kl. [default: loss, KL, what z says, bits of validation text]"),
    ] = None,
    out: Annotated[Path, path_option(help="Where the picture goes, a .png.")] = Path("curves.png"),
    against: Annotated[str, typer.Option(help="step or seconds.")] = "step",
) -> None:
    """Draw the training curves of runs over each other."""
    from vmd.plotting import draw_curves

    require_choice("--against", against, ("step", "seconds"))
    require(out.suffix == ".png", f"--out {out}: expected a path ending in .png")
    require(out.parent.is_dir(), f"--out {out}: no such folder {out.parent}")
    logs = {str(run): read_log(run) for run in runs}
    known = sorted(
        {key for log in logs.values() for record in log for key, v in record.items() if isinstance(v, int | float)}
    )
    usual = ["total", "kl", "latent_information", *(name for name in known if name.startswith("bits_"))]
    wanted = [name.strip() for name in metric.split(",") if name.strip()] if metric is not None else usual
    shown = [name for name in wanted if name in known]
    require(bool(shown), f"--metric {metric}: expected fields of the log: {', '.join(known)}")
    draw_curves(logs, shown, against, out)
    missing = [name for name in wanted if name not in known and metric is not None]
    say(f"picture: {out}" + (f" (no such field: {', '.join(missing)})" if missing else ""))


@app.command(short_help="Make Sudoku puzzles with their solutions.")
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


@app.command(short_help="Solve Sudoku puzzles, and check the solutions.")
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


def without(option: str, words: list[str]) -> list[str]:
    """A command without an option and its value."""
    after = [False, *(word == option for word in words)]
    return [
        word
        for word, is_value in zip(words, after, strict=False)
        if not is_value and word != option and not word.startswith(f"{option}=")
    ]


@app.command(short_help="Measure speed and memory of a preset.")
def bench(
    what: Annotated[str, typer.Argument(help="train or sample.")],
    preset: Annotated[str, typer.Argument(help="A preset (`vmd presets`).")] = "text",
    batch: Annotated[
        str | None, typer.Option(help="Of sampling: rows, as in 1,64,1024. [default: 64] Training has training.batch_size.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Of sampling: steps per block, as in 1,4. [default: 1]")] = None,
    vary: Annotated[
        str, typer.Option(help="How cost grows: FIELD=VALUES as in model.length=256,1024,4096, batch=1,64 or steps=1,2,4.")
    ] = "",
    naive: Annotated[
        bool, typer.Option(help="Also measure the naive path, for the ratio: without --vary, of samples up to batch 64.")
    ] = True,
    latent: Annotated[
        bool, typer.Option(help="Also measure the same model without its latent or draft, for the ratio: without --vary.")
    ] = True,
    json_out: Annotated[Path | None, path_option("--json", help="Also write everything as JSON.")] = None,
    device: Device = "auto",
    settings: Settings = None,
) -> None:
    """Measure speed, memory and use of the hardware for a preset on random tokens: tokens/s, the share of a measured
    matrix-product ceiling that does useful work, and ratios to a naive path and to the model without latent, in one run."""
    import torch

    from vmd import __version__
    from vmd.bench import NAIVE_SAMPLING, NAIVE_TRAINING, run_bench, to_count
    from vmd.experiments.tables import bench_table
    from vmd.files import write_atomically
    from vmd.presets import preset as preset_of
    from vmd.progress import progress_bar

    require_choice("WHAT", what, ("train", "sample"))
    require(not several_processes(), "vmd bench runs in one process: start it without torchrun")
    for option, value in (("batch", batch), ("steps", steps)):
        free = what == "sample" and vary.partition("=")[0] != option
        require(value is None or free, f"--{option} {value}: expected with `vmd bench sample`, where --vary does not set it")
    if json_out is not None:
        require(json_out.suffix == ".json", f"--json {json_out}: expected a path ending in .json")
        require(json_out.parent.is_dir(), f"--json {json_out}: no such folder {json_out.parent}")
        require(not json_out.is_dir(), f"--json {json_out}: expected a file, found a folder")
        require(os.access(json_out.parent, os.W_OK), f"--json {json_out}: the folder is not writable")
    run, where = override_all(preset_of(preset), settings or []), pick_device(device)
    fewer = "--set training.batch_size=8" if what == "train" else "--batch 8"
    notes = [f"note: presets have sizes for a GPU; on a CPU try {fewer}, or a smaller model"]
    bars: dict[str, Any] = {}
    with ExitStack() as stack:

        def on_row(label: str) -> None:
            if where == "cpu" and notes:
                say(notes.pop())
            say(label)

        def on_step(part: str, done: int, total: int) -> None:
            if done == 1 or part not in bars:
                stack.close()
                bars[part] = stack.enter_context(progress_bar(f"measuring {part}", total))
            bars[part](done, "")

        found = run_bench(
            what,
            run,
            where,
            chosen={setting.partition("=")[0].strip() for setting in settings or []},
            batches=[to_count("--batch", str(count)) for count in parse_counts("--batch", batch or "64")],
            steps=parse_counts("--steps", steps or "1"),
            vary=vary,
            naive=naive,
            compare=latent,
            on_row=on_row,
            on_step=on_step,
        )
    versions = {"vmd": __version__, "torch": torch.__version__}
    record = {
        "command": shlex.join(["vmd", *without("--json", sys.argv[1:])]),
        "preset": preset,
        "versions": versions,
    } | found
    print_table(*bench_table(record), title=f"vmd bench {what} {preset}, {record['hardware']['name']}")
    if json_out is not None:
        write_atomically(json_out, json.dumps(record, indent=1))
    if "exponent" in record:
        say(f"time grows as {record['vary']} to the power {record['exponent']:.2f}")
    if "ceiling_flops" in record["rows"][0]:
        row = record["rows"][0]
        memory = f"; memory {row['bandwidth_bytes'] / 1e12:.3g} TB/s, a copy" if "bandwidth_bytes" in row else ""
        say(f"ceiling: {row['ceiling_flops'] / 1e12:.4g} TFLOP/s, a matrix product{memory}, measured in this run")
    if what == "train" and naive and not vary and "naive" not in record["rows"][0]:
        say("naive: the same path, on this device and with these settings")
    if any("naive" in row for row in record["rows"]):
        say(f"naive: {NAIVE_TRAINING if what == 'train' else NAIVE_SAMPLING}")


@app.command(short_help="Renew the tables of a README from results.")
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


def main() -> None:
    """Errors of the user are one line and exit code 2."""
    words = sys.argv[1:]
    try:
        code = app(words or ["--help"], standalone_mode=False)
        print(end="", flush=True)  # also where there is no output: whoever called may have closed it
        if code == 130:  # how typer reports an interruption
            say("vmd: interrupted")
        if several_processes():
            from vmd.distributed import leave

            leave()
    except InvalidInput as error:
        if first_process() or type(error).__name__ != "FailedTogether":
            complain(str(error))
        code = 2
    except KeyboardInterrupt:
        say("vmd: interrupted")
        code = 130
    except Exception as error:
        if type(error).__name__ == "TrainingDiverged":
            say(f"vmd: {error}")  # all processes find it together
            code = 1
        elif several_processes() and lost_others(error):
            complain(f"lost the other processes: {str(error).splitlines()[0]}")
            code = 1
        elif type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "allocate memory" in str(error):
            complain("out of memory: try training.accumulate, a smaller batch, fewer --rows or model.latent.code_chunk")
            code = 1
        elif type(error).__name__ == "Stopped":
            again = [word for word in words if word not in ("--resume", "--overwrite")]
            command = shlex.join(["vmd", *again, "--resume"])
            if several_processes():
                command = f"the same torchrun line, on any number of processes, and --resume: torchrun ... -m {command}"
            say(f"vmd: {error}; everything is saved; go on with: {command}")
            code = 128 + error.number  # type: ignore[attr-defined]
        elif type(error).__name__ == "Abort":
            say("vmd: interrupted")
            code = 130
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:  # files say so themselves: this is the terminal
            complain("cannot write the output: no space left on device")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries again at its end
            code = 2
        elif hasattr(error, "format_message"):  # a usage error of the command line
            commands = [command.callback.__name__ for command in app.registered_commands if command.callback]
            say(f"vmd: {usage_line(error, words, commands)}")
            code = 2
        else:
            raise
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
