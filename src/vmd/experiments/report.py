"""Writes the README's tables and pictures from the results folder, between its markers. Imports no torch."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from vmd.config import InvalidInput, require
from vmd.experiments.tables import WITH_OWN_TABLES, bench_table, merged_table, provenance, summary_table
from vmd.files import read_json, write_atomically
from vmd.terminal import to_markdown

RESULTS_FILE = "results.json"
# `results:NAME of A; B; C`: only these of the table's systems, as they are called there, in this order.
MARKER = re.compile(
    r"(?P<begin><!--\s*results:(?P<name>[\w-]+)(?: of (?P<only>[^\n]+?))? -->\n).*?(?P<end><!-- end of results -->)",
    re.DOTALL,
)
BEGINNING = re.compile(r"^<!--\s*results:.*-->$", re.MULTILINE)


@contextlib.contextmanager
def as_written(path: Path) -> Iterator[None]:
    """What is made of a file inside cannot be made if it is damaged within."""
    try:
        yield
    except InvalidInput:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:100]
        raise InvalidInput(f"{path}: damaged ({what}): expected what `vmd reproduce` or `vmd bench` wrote") from None


def read_results(path: Path) -> dict:
    results = read_json(path)
    wanted = {"name", "preset", "command", "seeds", "hardware", "seconds", "rows"}
    require(isinstance(results, dict) and results.keys() >= wanted, f"{path}: expected the output of `vmd reproduce`")
    return results


def load_results(folder: Path, name: str) -> list[dict]:
    """The results of a table: ours, and the paper's settings where they have been run."""
    paths = [folder / name / RESULTS_FILE, folder / f"{name}-paper" / RESULTS_FILE]
    found = [read_results(path) for path in paths if path.exists()]
    require(bool(found), f"{paths[0]}: no such results: expected the output of `vmd reproduce {name}`")
    return found


def bench_section(folder: Path) -> str:
    """A table for each file that `vmd bench --json` wrote there."""
    paths = sorted(folder.glob("*.json"))
    require(bool(paths), f"{folder}: no results: expected the output of `vmd bench --json`")
    text = ""
    for path in paths:
        record = read_json(path)
        with as_written(path):
            grows = f"; time grows as {record['vary']} to the power {record['exponent']:.2f}" if "exponent" in record else ""
            text += f"`{record['command']}`: {record['hardware']['name']}, torch {record['versions']['torch']}{grows}\n\n"
            text += to_markdown(*bench_table(record)) + "\n"
    return text


def of_systems(results: dict, only: list[str]) -> dict:
    """The results of some of a table's systems."""
    systems = results.get("systems", {})
    for name in only:
        require(name in systems, f"{name!r}: no such system in the results: expected one of {'; '.join(systems)}")
    kept = {name: systems[name] for name in only}
    return results | {
        "systems": kept,
        "rows": [row for row in results["rows"] if row["system"] in kept],
        "seconds": sum(about["training_seconds"] + about["measuring_seconds"] for about in kept.values()),
    }


def section(folder: Path, name: str, readme: Path, only: str = "") -> str:
    """Table, provenance and pictures of one table, as markdown; or `only` some systems of it, with semicolons between."""
    if name.startswith("bench"):
        return bench_section(folder / name)
    runs = load_results(folder, name)
    with as_written(folder / name / RESULTS_FILE):
        runs = [of_systems(run, [part.strip() for part in only.split(";")]) for run in runs] if only else runs
        text = to_markdown(*(summary_table(runs[0]) if runs[0]["name"] in WITH_OWN_TABLES else merged_table(runs))) + "\n"
        for run in runs:
            text += provenance(run)
    where = Path(os.path.relpath(folder / name, readme.parent)).as_posix()
    pictures = [
        "heatmap-deterministic.png",
        "heatmap-dependence-0.3.png",
        "heatmap-dependence-0.8.png",
        "four-token.png",
        "bits.png",
        "filling.png",
        "curves.png",
        "several.png",
        "few-steps.png",
        "scan.png",
    ]
    shown = [p for p in pictures if not only and (folder / name / p).exists()]
    return text + "".join(f"\n![{picture.removesuffix('.png')}]({where}/{picture})\n" for picture in shown)


def renewed(readme: Path, folder: Path) -> tuple[str, str]:
    """The README as it is, and with what the results say between its markers."""
    require(readme.is_file(), f"{readme}: no such file: expected a README with result markers")
    try:
        before = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{readme}: cannot read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{readme}: expected text in UTF-8") from None
    whole = {match.start(): match.group(0) for match in MARKER.finditer(before)}
    for beginning in BEGINNING.finditer(before):  # one without its end would take the text up to the next end with it
        body = whole.get(beginning.start(), "")
        ends = body and not BEGINNING.search(body, len(beginning.group(0)))
        require(bool(ends), f"{readme}: {beginning.group(0)}: expected an <!-- end of results --> of its own after it")
    return before, MARKER.sub(lambda m: m["begin"] + section(folder, m["name"], readme, m["only"] or "") + m["end"], before)


def update_readme(readme: Path, folder: Path) -> bool:
    """Replace the text between the markers; True if anything changed."""
    before, after = renewed(readme, folder)
    if after != before:
        write_atomically(readme, after)
    return after != before
