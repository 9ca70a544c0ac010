"""`vmd bench`."""

import json
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from vmd.commands.options import Device, Settings, path_option
from vmd.config import override_all, require, require_choice
from vmd.terminal import parse_counts, pick_device, print_table, say, several_processes


def without(option: str, words: list[str]) -> list[str]:
    """A command without an option and its value."""
    after = [False, *(word == option for word in words)]
    return [
        word
        for word, is_value in zip(words, after, strict=False)
        if not is_value and word != option and not word.startswith(f"{option}=")
    ]


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
