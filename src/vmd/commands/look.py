"""`vmd presets` and `vmd plot`: what can be trained, and how training went."""

from pathlib import Path
from typing import Annotated

import typer

from vmd.commands.options import path_option
from vmd.config import flatten, require, require_choice, to_dict
from vmd.runs import read_log
from vmd.terminal import say


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
