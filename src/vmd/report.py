"""Writes the README's tables and pictures from the results folder, between its markers. Imports no torch."""

import os
import re
from pathlib import Path

from vmd.config import require
from vmd.files import read_json, write_atomically
from vmd.tables import WITH_OWN_TABLES, bench_table, merged_table, provenance, summary_table, to_markdown

MARKER = re.compile(r"(<!-- results:(?P<name>[\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def read_results(path: Path) -> dict:
    results = read_json(path)
    wanted = {"name", "preset", "command", "seeds", "hardware", "seconds", "rows"}
    require(isinstance(results, dict) and results.keys() >= wanted, f"{path}: expected the output of `vmd reproduce`")
    return results


def load_results(folder: Path, name: str) -> list[dict]:
    """The results of a table: ours, and the paper's settings where they have been run."""
    paths = [folder / name / "results.json", folder / f"{name}-paper" / "results.json"]
    found = [read_results(path) for path in paths if path.exists()]
    require(bool(found), f"{paths[0]}: no such results: expected the output of `vmd reproduce {name}`")
    return found


def bench_section(folder: Path) -> str:
    """A table for each file that `vmd bench --json` wrote there."""
    paths = sorted(folder.glob("*.json"))
    require(bool(paths), f"{folder}: no results: expected the output of `vmd bench --json`")
    text = ""
    for record in map(read_json, paths):
        grows = f"; time grows as {record['vary']} to the power {record['exponent']:.2f}" if "exponent" in record else ""
        text += f"`{record['command']}`: {record['hardware']['name']}, torch {record['versions']['torch']}{grows}\n\n"
        text += to_markdown(*bench_table(record)) + "\n"
    return text


def section(folder: Path, name: str, readme: Path) -> str:
    """Table, provenance and pictures of one table, as markdown."""
    if name.startswith("bench"):
        return bench_section(folder / name)
    runs = load_results(folder, name)
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
    shown = [p for p in pictures if (folder / name / p).exists()]
    return text + "".join(f"\n![{picture.removesuffix('.png')}]({where}/{picture})\n" for picture in shown)


def update_readme(readme: Path, folder: Path) -> bool:
    """Replace the text between the markers; True if anything changed."""
    require(readme.is_file(), f"{readme}: no such file: expected a README with result markers")
    before = readme.read_text()
    after = MARKER.sub(lambda m: m.group(1) + section(folder, m.group("name"), readme) + m.group(3), before)
    if after != before:
        write_atomically(readme, after)
    return after != before
