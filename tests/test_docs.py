"""Every ```python block of the documentation runs; the blocks of a file share a namespace and run in order.

A block of output that follows one under the line "Output:" must be what was printed, numbers up to rounding.
Blocks that are not meant to run are marked ```text or ```sh, or ```py where they want files or minutes.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\nOutput:\n\n```text\n(?P<output>.*?)^```)?", re.MULTILINE | re.DOTALL
)


class Snippet(NamedTuple):
    line: int
    code: str
    output: str | None


def snippets(path: Path) -> list[Snippet]:
    text = path.read_text()
    return [Snippet(text.count("\n", 0, m.start("code")), m["code"], m["output"]) for m in BLOCK.finditer(text)]


def as_number(word: str) -> float | None:
    try:
        return float(word.rstrip("%,:;"))
    except ValueError:
        return None


def assert_same_output(printed: str, expected: str) -> None:
    got, want = printed.split(), expected.split()
    assert len(got) == len(want), f"printed:\n{printed}\ndocumented:\n{expected}"
    for a, b in zip(got, want, strict=True):
        number = as_number(b)
        if number is None:
            assert a == b, f"printed:\n{printed}\ndocumented:\n{expected}"
        else:
            assert as_number(a) == pytest.approx(number, rel=0.01, abs=0.002), (
                f"printed:\n{printed}\ndocumented:\n{expected}"
            )


PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if path.exists() and snippets(path)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_blocks_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__main__"}
    for snippet in snippets(path):
        padded = "\n" * snippet.line + snippet.code  # so that a traceback names the line of the page
        exec(compile(padded, str(path), "exec"), namespace)
        printed = capsys.readouterr().out
        if snippet.output is not None:
            assert_same_output(printed, snippet.output)
