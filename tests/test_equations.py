"""docs/equations.md and the code say the same: every name can be imported, and a docstring names its equation."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "equations.md"
NAME = re.compile(r"`(vmd(?:\.\w+)+)`")
LABEL = re.compile(r"(?:Eq\.|Algorithm|Section) \d+(?:\.\d+)?")
MENTION = re.compile(r"(Eq|Algorithm|Section)s?\.? (\d+(?:\.\d+)?(?:(?:, | and |, and )\d+(?:\.\d+)?)*)")
IN_THE_PAPER = [f"Eq. {n}" for n in range(1, 12)] + [f"Algorithm {n}" for n in range(1, 5)] + ["Section 3.3"]


def resolve(name: str):
    """The object of a dotted name: the longest module there is, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def labels_in(text: str) -> set[str]:
    """ "Algorithms 2 and 4, Eq. 5" -> {"Algorithm 2", "Algorithm 4", "Eq. 5"}"""
    found = set()
    for kind, numbers in MENTION.findall(text):
        found |= {f"{kind}. {n}" if kind == "Eq" else f"{kind} {n}" for n in re.findall(r"\d+(?:\.\d+)?", numbers)}
    return found


def rows() -> list[tuple[str, str]]:
    """(label, primary function) of every table row that opens with a label of the paper."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) >= 4 and (label := LABEL.match(cells[1])):
            names = NAME.findall(cells[2])
            assert names, f"{cells[1]}: no function given"
            found.append((label[0], names[0]))
    return found


@pytest.mark.parametrize("name", sorted(set(NAME.findall(PAGE.read_text()))))
def test_every_name_can_be_imported(name):
    assert callable(resolve(name))


@pytest.mark.parametrize(("label", "name"), rows())
def test_docstring_names_its_equation(label, name):
    docstring = inspect.getdoc(resolve(name)) or ""
    assert label in labels_in(docstring), f"the docstring of {name} does not mention {label}"


def test_every_equation_and_algorithm_of_the_paper_is_listed():
    listed = {label for label, _ in rows()}
    assert listed == set(IN_THE_PAPER)


def test_labels_are_read_from_prose():
    text = "Algorithms 2 and 4 as one: see Eq. 5, Eqs. 8, 9 and 10 (Section 3.3)."
    assert labels_in(text) == {"Algorithm 2", "Algorithm 4", "Eq. 5", "Eq. 8", "Eq. 9", "Eq. 10", "Section 3.3"}
