"""Tables of categories: a .csv whose first line names the columns, each of which has values of its own.

A token's id is the place of its value among those of its column, (name, value, value, ...).
"""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vmd.config import InvalidInput, require
from vmd.data.arrays import ArrayData

Columns = tuple[tuple[str, ...], ...]
MOST_VALUES = 1_024  # of a column: more are numbers or names, which want bins


class TableData(ArrayData):
    """Rows of a table. `columns`: names and values, which a model of it knows as `model.config.columns`."""

    def __init__(self, tokens: np.ndarray, columns: Columns, name: str = "table", seed: int = 0):
        super().__init__(tokens, name, seed)
        self.columns = columns
        self.vocab_size = max(len(column) - 1 for column in columns)


Lines = list[tuple[int, list[str]]]  # (number of the line, its cells)


def load_csv(path: Path, seed: int = 0, columns: Columns = ()) -> ArrayData:
    """Integers, be it below a line of names; or a table, in the columns of a model if they are given."""
    lines = read_cells(path)
    first = lines[0][1]
    names = [] if any(not cell or is_number(cell) for cell in first) else first
    body = lines[1:] if names else lines
    require(bool(body), f"{path}: no rows: expected integers with commas between, or a table below a line of names")
    other = next(((number, cells) for number, cells in body if not all(map(is_integer, cells))), None)
    if columns or (other is not None and len(names) > 1):
        tokens, columns = read_table(path, names, body, columns)
        return TableData(tokens, columns, str(path), seed)
    number, cells = other or (0, [])
    expected = "expected integers with commas between, or a first line of names, of a table (text: name it .txt)"
    if not names and any(cell and not is_number(cell) for cell in first):
        nameless = next(cell for cell in first if not cell or is_number(cell))
        expected = f"{nameless!r} names no column: {expected}, none of them blank or a number (pandas: index=False)"
    require(other is None, f"{path}: line {number}: {','.join(cells)!r:.60}: {expected}")
    check_widths(path, body, len(body[0][1]), "integers")
    try:
        integers = np.array([list(map(int, cells)) for _, cells in body], dtype=np.int64)
    except (OverflowError, ValueError):  # Python reads no more than some thousand digits
        raise InvalidInput(f"{path}: an integer beyond 64 bits: expected token ids below 65536") from None
    return ArrayData(integers, str(path), seed)


def load_prompts(path: Path, columns: Columns, length: int) -> Tensor:
    """(rows, length): rows of a .csv with _ for each gap, of a table below the names of its columns, or of integers."""
    require(path.is_file(), f"{path}: no such file: expected rows of a .csv, with _ for each gap")
    lines = read_cells(path)
    if columns:
        return torch.from_numpy(read_table(path, lines[0][1], lines[1:], columns, gaps=True)[0]).long()
    named = all(cell and cell != "_" and not is_number(cell) for cell in lines[0][1])
    body = lines[named:]
    check_widths(path, body, length, "tokens")
    for number, cells in body:
        wrong = [cell for cell in cells if cell != "_" and not cell.isdecimal()]
        require(not wrong, f"{path}: line {number}: {''.join(wrong[:1])!r:.60}: expected token ids, or _ for a gap")
        require(all(len(cell) < 6 for cell in cells), f"{path}: line {number}: expected token ids below 65536")
    require(bool(body), f"{path}: no rows: expected token ids, or _ for each gap")
    return torch.tensor([[-1 if cell == "_" else int(cell) for cell in cells] for _, cells in body])


def read_table(
    path: Path, names: list[str], body: Lines, columns: Columns, *, gaps: bool = False
) -> tuple[np.ndarray, Columns]:
    """Tokens (rows, columns), in the columns that are given, or in those of the file; with `gaps`, -1 where there is a _."""
    require(bool(body), f"{path}: no rows: expected a table below a line of names")
    require(bool(names), f"{path}: expected a first line with the names of the columns, {', '.join(n for n, *_ in columns)}")
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    require(not twice, f"{path}: two columns {''.join(twice[:1])!r}: expected names of their own")
    check_widths(path, body, len(names), "values")
    columns = columns or tuple((name, *values_of(path, name, body, place)) for place, name in enumerate(names))
    wanted = [name for name, *_ in columns]
    require(set(names) == set(wanted), f"{path}: columns {', '.join(names)}: expected {', '.join(wanted)}, the model's")
    tokens = np.zeros((len(body), len(columns)), dtype=np.int32)
    for place, (name, *values) in enumerate(columns):
        ids, there = {value: token for token, value in enumerate(values)}, names.index(name)
        for row, (number, cells) in enumerate(body):
            token = ids.get(cells[there], -1 if gaps and cells[there] == "_" else None)
            if token is None:
                raise InvalidInput(f"{path}: line {number}: {no_such(columns[place], cells[there])}")
            tokens[row, place] = token
    return tokens, columns


def read_cells(path: Path) -> Lines:
    """(line, its cells without blanks around) of each line that is not empty, between commas, semicolons or tabs."""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # with Excel's mark, or without
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: byte {error.object[error.start]:#04x} at {error.start}: expected UTF-8") from None
    except OSError as error:
        raise InvalidInput(f"{path}: cannot read: {error.strerror}") from None
    first = re.sub(r'"[^"]*"', "", next((line for line in text.splitlines() if line.strip()), ""))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), skipinitialspace=True)
    try:  # a line of blanks alone is a row, if it has several
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if len(cells) > 1 or any(cells)]
    except csv.Error as error:
        raise InvalidInput(f"{path}: line {reader.line_num}: {error}: expected values with commas between") from None
    lines = [(number, cells) for number, cells in lines if len(cells) > 1 or cells[0]]
    require(bool(lines), f"{path}: no rows: expected integers with commas between, or a table below a line of names")
    return lines


def is_number(cell: str) -> bool:
    """Of those that have an order: nan is a name."""
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def is_integer(cell: str) -> bool:
    return cell.lstrip("+-").isdecimal() and cell.isascii()


def check_widths(path: Path, body: Lines, width: int, what: str) -> None:
    for number, cells in body:
        require(len(cells) == width, f"{path}: line {number}: {len(cells)} {what}: expected {width}, as in the first row")


def values_of(path: Path, name: str, body: Lines, place: int) -> list[str]:
    """In the order of numbers, if they are numbers, then of the alphabet."""
    values = {cells[place] for _, cells in body}
    told = f"{path}: column {name!r} has {len(values):,} different values: expected at most {MOST_VALUES:,}"
    require(len(values) <= MOST_VALUES, f"{told}: leave it out, or put its values in bins")
    return sorted(values, key=lambda value: (0, float(value), value) if is_number(value) else (1, 0.0, value))


def no_such(column: Sequence[str], value: str) -> str:
    name, *values = column
    known = ", ".join(map(repr, values[:8])) + (", ..." if len(values) > 8 else "")
    return f"{name} {value!r:.60}: expected one of {known}"


def cells_of(columns: Columns, tokens: Sequence[int]) -> list[str]:
    """The values of a row; _ for what is not written."""
    return [values[token] if 0 <= token < len(values) else "_" for (_, *values), token in zip(columns, tokens, strict=True)]


def prompt_of(columns: Columns, known: Mapping[str, str]) -> list[int]:
    """Tokens of the columns that are known by name, -1 for the others."""
    names = [name for name, *_ in columns]
    for name in known:
        require(name in names, f"no column {name!r}: expected one of {', '.join(names)}")
    row = []
    for column in columns:
        value = known.get(column[0])
        require(value is None or str(value) in column[1:], no_such(column, str(value)))
        row.append(-1 if value is None else column[1:].index(str(value)))
    return row


def parse_row(columns: Columns, text: str) -> list[int]:
    """ "Rome, _, yes", a value or _ for every column, or "country=Rome, answer=yes", those that are known."""
    try:
        cells = [cell.strip() for cell in next(csv.reader(io.StringIO(text, newline=""), skipinitialspace=True), [])]
    except csv.Error as error:
        raise InvalidInput(f"{text!r:.60}: {error}: expected values with commas between") from None
    names = [name for name, *_ in columns]
    if cells and all(cell.partition("=")[0].strip() in names and "=" in cell for cell in cells):
        known = {name.strip(): value.strip() for name, _, value in (cell.partition("=") for cell in cells)}
        require(len(known) == len(cells), f"{text!r:.60}: expected every column once")
        return prompt_of(columns, known)
    how = f"a value or _ for each of {', '.join(names)}, or NAME=VALUE of those that are known"
    require(len(cells) == len(names), f"{text!r:.60} has {len(cells)} values: expected {how}")
    return prompt_of(columns, {name: cell for name, cell in zip(names, cells, strict=True) if cell != "_"})


def to_csv(columns: Columns, tokens: Tensor) -> str:
    """With the line of names, or of integers if there are no columns."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([[name for name, *_ in columns]] if columns else [])
    writer.writerows(cells_of(columns, row) if columns else row for row in tokens.tolist())
    return out.getvalue()
