"""What tables of several systems share: what is done already, the loop over the rest, and the results.

Every system is trained in a folder of its own; OUT/results.json holds all that are done, and a table goes on from there.
"""

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vmd import __version__
from vmd.checkpoints import checkpoint_files, require_same_config
from vmd.config import InvalidInput, RunConfig, require, to_dict, with_new_fields
from vmd.experiments.tables import render
from vmd.files import hardware, read_json, write_atomically

RESULTS_FILE = "results.json"


def chosen_names(every: list[str], only: tuple[str, ...]) -> list[str]:
    """In the order of the table."""
    for name in only:
        require(name in every, f"--only {name!r}: expected one of {'; '.join(map(repr, every))}")
    return [name for name in every if not only or name in only]


def read_done(out: Path, resume: bool, table: str) -> dict[str, dict]:
    """{system: its rows, its configuration and what else is known of it}: what was done here before."""
    path = out / RESULTS_FILE
    require(
        resume or not path.exists(),
        f"{out} holds a run: --resume keeps what is done there and adds to it; or give another --out",
    )
    if not path.exists():
        return {}
    results, expected = read_json(path), f"{path}: expected results of `vmd reproduce {table}`"
    name = results.get("name") if isinstance(results, dict) else None
    require(isinstance(name, str), expected)
    require(name == table, f"{out} holds a run of {name}: expected another --out for {table}")
    try:
        done = {
            system: about
            | {"configuration": dict(results["configurations"][system])}
            | {"rows": [row for row in results["rows"] if row["system"] == system]}
            for system, about in results["systems"].items()
        }
        render(collect(table, list(done), done, made_by("", "cpu")))  # what is missing is missed before anything is trained
        whole = all(
            part["rows"]
            and isinstance(part.get("base", {}), dict)
            and isinstance(part["configuration"]["training"]["seed"], int)
            and isinstance(part["configuration"]["model"]["length"], int)
            and isinstance(part["configuration"]["data"]["name"], str)
            for part in done.values()
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        whole = False
    require(whole, expected)
    return done


# Fields of training that decide how fast a result comes, or where a folder is, and nothing else about it.
HOW_IT_RUNS = ("precision", "compile", "capture", "attention", "parallel", "accumulate", "log_every", "checkpoint_every")
NO_PART_OF_IT = ("init", *HOW_IT_RUNS)


def is_of(saved: dict, run: RunConfig) -> bool:
    """Whether a configuration is this run's, be it from before some fields were there, or of one computed otherwise."""

    def what_counts(settings: dict) -> dict:
        training = {name: value for name, value in settings.get("training", {}).items() if name not in NO_PART_OF_IT}
        data = settings.get("data", {})
        return settings | {"training": training, "data": data | {"name": Path(data.get("name", "")).name}}

    return what_counts(with_new_fields(saved)) == what_counts(to_dict(run))


def is_done(done: dict[str, dict], name: str, run: RunConfig) -> bool:
    return name in done and is_of(done[name]["configuration"], run)


def goes_on(folder: Path, run: RunConfig, resume: bool) -> bool:
    """Whether a system was begun here, be it without a checkpoint, and is to go on: with the very settings of its row.

    Not even for more steps: rates that fall over a run's length would have fallen otherwise.
    """
    begun = folder / "run.json"
    if resume and begun.exists():
        saved, current = read_json(begun), to_dict(run)
        require(isinstance(saved, dict), f"{begun}: expected the configuration of a run")
        saved = {section: saved[section] for section in current if section in saved}
        for settings in (saved, current):  # wherever it lies: tables compare texts by their content
            data = settings.get("data", {})
            settings["data"] = data | {"name": Path(data.get("name", "")).name}
        try:
            require_same_config(begun, saved, current, NO_PART_OF_IT)
        except InvalidInput as error:
            raise InvalidInput(f"{error}: remove {folder} to train it anew, or give another --out") from None
    return resume and (bool(checkpoint_files(folder)) or begun.exists())


def run_systems(
    runs: dict[str, RunConfig],
    done: dict[str, dict],
    made: dict,
    run_one: Callable[[str], dict],
    write: Callable[[], dict],
    on_note: Callable[[str], None] = lambda text: None,
) -> dict:
    """Those that are not done with these very settings, one after the other; the results are written after each."""
    missing = [name for name, run in runs.items() if not is_done(done, name, run)]
    started = time.perf_counter()
    for number, name in enumerate(missing):
        minutes = (time.perf_counter() - started) / 60 / max(1, number) * (len(missing) - number)
        left = f", some {minutes:.0f} minutes left if all take as long" if minutes >= 1 else ""
        if len(missing) > 1:
            on_note(f"{number + 1} of {len(missing)}: {name}{left}")
        done[name] = run_one(name) | made | {"configuration": to_dict(runs[name])}  # several goes, and machines
        write()
    return write()


def made_by(command: str, device: str) -> dict:
    versions = {"vmd": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"command": command, "hardware": hardware(device), "versions": versions}


def last_made(out: Path, command: str, device: str) -> dict:
    """Of results that nothing is trained for: looking at them on another machine does not change where they are from."""
    before = read_json(out / RESULTS_FILE) if (out / RESULTS_FILE).exists() else {}
    return {key: before.get(key) if before else now for key, now in made_by(command, device).items()}


def collect(table: str, every: list[str], done: dict[str, dict], made: dict) -> dict:
    """The results of all systems that are done, in the order of the table, each with its settings as it ran.

    Those that the table has no more come last.
    """
    parts = {name: done[name] for name in (*every, *done) if name in done}
    configurations = {name: part["configuration"] for name, part in parts.items()}
    return {
        "name": table,
        "preset": "ours",
        "command": made["command"],
        "seeds": sorted({run["training"]["seed"] for run in configurations.values()}),
        "hardware": made["hardware"],
        "versions": made["versions"],
        "seconds": round(sum(p["training_seconds"] + p["measuring_seconds"] for p in parts.values()), 1),
        "configurations": configurations,
        "systems": {
            name: {key: value for key, value in part.items() if key not in ("configuration", "rows")}
            for name, part in parts.items()
        },
        "rows": [row for part in parts.values() for row in part["rows"]],
    }


def write_results(results: dict, out: Path) -> dict:
    tables = render(results)  # before anything is written: results that no table can be made of are of no use
    write_atomically(out / RESULTS_FILE, json.dumps(results, indent=1))
    write_atomically(out / "table.md", tables)
    return results
