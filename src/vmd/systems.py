"""What tables of several systems share: their record of what is done, the loop over the rest, and the results.

Every system is trained in a folder of its own; its rows are kept in OUT/partial.json when it is done.
"""

import json
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from vmd import __version__
from vmd.checkpoints import checkpoint_files
from vmd.config import RunConfig, require, to_dict, with_new_fields
from vmd.files import hardware, read_json, write_atomically
from vmd.tables import render

ORIGIN = ("command", "hardware")


def chosen_names(every: list[str], only: tuple[str, ...]) -> list[str]:
    """In the order of the table."""
    for name in only:
        require(name in every, f"--only {name!r}: expected one of {'; '.join(map(repr, every))}")
    return [name for name in every if not only or name in only]


def read_done(out: Path, resume: bool) -> dict[str, dict]:
    """{system: its part of the results, and the signature of its run}: what was done here before."""
    partial = out / "partial.json"
    require(resume or not partial.exists(), f"{out} holds a run: go on with --resume, or give another --out")
    done = read_json(partial) if partial.exists() else {}
    whole = isinstance(done, dict) and all(
        isinstance(part, dict) and is_json(part.get("signature")) for part in done.values()
    )
    require(whole, f"{partial}: expected the record of a stopped run")
    return done


def is_json(text: object) -> bool:
    try:
        json.loads(text)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return False
    return True


def signature(run: RunConfig) -> str:
    return json.dumps(to_dict(run), sort_keys=True)


# Fields of training that decide how fast a result comes, or where a folder is, and nothing else about it.
NO_PART_OF_IT = ("init", "compile", "capture", "attention", "parallel", "accumulate", "log_every", "checkpoint_every")


def is_of(saved: str, run: RunConfig) -> bool:
    """Whether a signature is this run's, be it from before some fields were there, or of one that was computed otherwise."""

    def what_counts(settings: dict) -> dict:
        training = {name: value for name, value in settings.get("training", {}).items() if name not in NO_PART_OF_IT}
        return settings | {"training": training}

    return what_counts(with_new_fields(json.loads(saved))) == what_counts(to_dict(run))


def goes_on(folder: Path, resume: bool) -> bool:
    """Whether a system was begun here, be it without a checkpoint, and is to go on."""
    return resume and (bool(checkpoint_files(folder)) or (folder / "run.json").exists())


def run_systems(
    runs: dict[str, RunConfig], done: dict[str, dict], out: Path, command: str, device: str, run_one: Callable[[str], dict]
) -> None:
    """Those that are not done with these very settings, one after the other; each is kept when it is done."""
    for name, run in runs.items():
        if name not in done or not is_of(done[name]["signature"], run):
            origin = {"command": command, "hardware": hardware(device)}  # a table may be made in several goes
            done[name] = run_one(name) | origin | {"signature": signature(run)}
            write_atomically(out / "partial.json", json.dumps(done))


def training_seconds(log: list[dict]) -> float:
    """Of all pieces of a run that was stopped: each counts its own seconds."""
    total, before = 0.0, 0.0
    for record in log:
        if record["seconds"] < before:
            total += before
        before = record["seconds"]
    return total + before


def collect(table: str, every: list[str], done: dict[str, dict], about: tuple[str, ...], command: str, device: str) -> dict:
    """The results of all systems that are done, in the order of the table, each with its settings as it ran."""
    parts = {name: done[name] for name in every if name in done}
    configurations = {name: json.loads(part["signature"]) for name, part in parts.items()}
    return {
        "name": table,
        "preset": "ours",
        "command": command,
        "seeds": sorted({run["training"]["seed"] for run in configurations.values()}),
        "hardware": hardware(device),
        "versions": {"vmd": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(sum(p["training_seconds"] + p["measuring_seconds"] for p in parts.values()), 1),
        "configurations": configurations,
        "systems": {
            name: {key: part.get(key) for key in about} | {key: part[key] for key in ORIGIN if key in part}
            for name, part in parts.items()
        },
        "rows": [row for part in parts.values() for row in part["rows"]],
    }


def write_results(results: dict, out: Path) -> dict:
    write_atomically(out / "results.json", json.dumps(results, indent=1))
    write_atomically(out / "table.md", render(results))
    return results
