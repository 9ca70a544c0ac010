"""Sudoku as data: files of puzzles read and made, random symmetries, and batches of solutions with their clues."""

import csv
import functools
import hashlib
import math
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tokenize import TokenError
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vmd.config import InvalidInput, require, require_choice, require_range
from vmd.data import sudoku_engine as engine
from vmd.data.arrays import ArrayData
from vmd.files import claimed, make_folder, write_atomically
from vmd.masking import Rows

# Solved by the seven strategies, not solved by them, either, with several solutions, without any clues.
KINDS = ("logic", "hard", "any", "multi", "grid")
SOLUTIONS = (2, 50)  # fewest and most of a multi puzzle; the other kinds have one
TEST_SHARE = 20  # one in so many classes of grids belongs to the test side
UNIT = 100  # puzzles drawn from one random state
CHUNK = 2**15  # puzzles checked at a time, to bound memory


@dataclass(frozen=True, eq=False)
class Puzzles:
    puzzle: np.ndarray  # (n, cells) uint8: 0 for a blank
    solution: np.ndarray  # (n, cells) uint8: all 0 where it is not known
    name: str = "puzzles"
    kind: str = ""  # one of KINDS where it is known

    def __len__(self) -> int:
        return len(self.puzzle)


def solve_missing(puzzles: Puzzles) -> Puzzles:
    """With a solution for every puzzle; of several solutions, the first that the search finds."""
    solution = puzzles.solution.copy()
    for row in np.flatnonzero(~solution.any(1)):
        found = engine.solve(puzzles.puzzle[row], limit=1)
        require(len(found) > 0, f"{puzzles.name}: puzzle {row + 1} has no solution")
        solution[row] = found[0]
    return replace(puzzles, solution=solution)


def check_digits(puzzle: np.ndarray, solution: np.ndarray, where: Callable[[int], str]) -> None:
    """Clues do not contradict each other; solutions, where known, are valid and keep the clues."""
    units = engine.BOARDS[puzzle.shape[1]].units
    side = units.shape[1]

    def unit_name(unit: int) -> str:
        return f"{('row', 'column', 'box')[unit // side]} {unit % side + 1}"

    for start in range(0, len(puzzle), CHUNK):
        clues, full = puzzle[start : start + CHUNK], solution[start : start + CHUNK]
        bits = (1 << clues.astype(np.int16) & ~1)[:, units]  # (n, units, side), blanks 0
        twice = np.argwhere(bits.sum(-1) != np.bitwise_or.reduce(bits, axis=-1))
        if len(twice):
            row, unit = twice[0]
            digit = np.bincount(clues[row, units[unit]], minlength=side + 1)[1:].argmax() + 1
            raise InvalidInput(f"{where(start + row)}: clues contradict each other: {digit} twice in {unit_name(unit)}")
        known = (full > 0).any(1, keepdims=True)
        # As many powers of two as bits are set in the sum: each is there once.
        wrong = np.argwhere(((1 << full.astype(np.int16))[:, units].sum(-1) != 2 ** (side + 1) - 2) & known)
        if len(wrong):
            row, unit = wrong[0]
            raise InvalidInput(
                f"{where(start + row)}: the solution is not valid: {unit_name(unit)} does not hold every digit once"
            )
        changed = np.argwhere((clues > 0) & (clues != full) & known)
        if len(changed):
            row, cell = changed[0]
            raise InvalidInput(
                f"{where(start + row)}: the solution has {full[row, cell]} in row {cell // side + 1}, "
                f"column {cell % side + 1}: expected the clue {clues[row, cell]}"
            )


# Reading files


def load_puzzles(path: str | Path) -> Puzzles:
    """Our own files, lines of 81 characters, CSV with a header, or the .npy files of Shah et al., told by their content."""
    path = Path(path)
    require(path.is_file(), f"{path}: no such file: expected a file of Sudoku puzzles")
    try:
        with open(path, "rb") as file:
            start = file.read(8)
        if start[:6] == b"\x93NUMPY":
            return _read_steps(path)
        if start == MAGIC:
            return _read_packed(path, path.read_bytes())
        return _read_text(path, path.read_text(encoding="latin-1"))
    except OSError as error:
        raise InvalidInput(f"{path}: cannot read: {error.strerror}") from None


PUZZLE_COLUMNS = ("puzzle", "puzzles", "quiz", "quizzes", "question", "sudoku")
SOLUTION_COLUMNS = ("solution", "solutions", "answer", "answers")
DIGIT_OF = np.full(256, 255, dtype=np.uint8)  # of a character
DIGIT_OF[np.frombuffer(b"0._123456789", dtype=np.uint8)] = [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def _read_text(path: Path, text: str) -> Puzzles:
    lines = text.removeprefix("\xef\xbb\xbf").split("\n")  # a byte order mark, read as Latin-1
    first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    require(bool(first), f"{path}: no puzzles: expected a line of 81 characters for each")
    drawn = len("".join(first.split())) == 9
    fields = (_csv_fields if re.search("[A-Za-z]{4}", first) else _board_fields if drawn else _line_fields)(path, lines)
    numbers, puzzles, solutions = [list(column) for column in zip(*fields, strict=True)] or ([], [], [])
    require(bool(numbers), f"{path}: no puzzles: expected a line of 81 characters for each below the header")

    def where(row: int) -> str:
        return f"{path}, line {numbers[row]}"

    puzzle = _digits(puzzles, "puzzle", where)
    solution = _digits([text or "0" * 81 for text in solutions], "solution", where)
    check_digits(puzzle, solution, where)
    return Puzzles(puzzle, solution, str(path))


def _line_fields(path: Path, lines: list[str]) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(lines, start=1):
        words = re.split(r"[,;\s]+", line.strip())
        if words == [""] or line.startswith("#"):
            continue
        require(
            len(words) <= 2, f"{path}, line {number}: {len(words)} words: expected a puzzle, and its solution if it is known"
        )
        yield number, words[0], words[1] if len(words) == 2 else ""


def _board_fields(path: Path, lines: list[str]) -> Iterator[tuple[int, str, str]]:
    """Boards as they are drawn: nine lines of nine characters each."""
    rows = [(number, "".join(line.split())) for number, line in enumerate(lines, start=1) if not line.startswith("#")]
    rows = [(number, row) for number, row in rows if row]
    for number, row in rows:
        require(len(row) == 9, f"{path}, line {number}: {len(row)} characters: expected 9, as in the first line")
    require(len(rows) % 9 == 0, f"{path}: {len(rows)} lines of 9 characters: expected nine for each board")
    for start in range(0, len(rows), 9):
        yield rows[start][0], "".join(row for _, row in rows[start : start + 9]), ""


def _csv_fields(path: Path, lines: list[str]) -> Iterator[tuple[int, str, str]]:
    reader = csv.reader(lines)
    header: list[str] = []
    puzzle_column, solution_column = 0, None
    try:
        for row in reader:
            row = [word.strip() for word in row]
            if not any(row) or row[0].startswith("#"):
                continue
            if not header:
                header = [name.lower() for name in row]
                found = [header.index(name) for name in PUZZLE_COLUMNS if name in header]
                require(
                    bool(found),
                    f"{path}: columns {', '.join(row)[:60]!r}: expected one named {' or '.join(PUZZLE_COLUMNS)}, "
                    "or lines of 81 characters without a header",
                )
                puzzle_column = found[0]
                solution_column = next((header.index(name) for name in SOLUTION_COLUMNS if name in header), None)
                continue
            require(len(row) == len(header), f"{path}, line {reader.line_num}: {len(row)} columns: expected {len(header)}")
            yield reader.line_num, row[puzzle_column], "" if solution_column is None else row[solution_column]
    except csv.Error as error:
        raise InvalidInput(f"{path}, line {reader.line_num}: expected CSV: {error}") from None


def _digits(texts: list[str], what: str, where: Callable[[int], str]) -> np.ndarray:
    for row, text in enumerate(texts):
        require(len(text) == 81, f"{where(row)}: a {what} of {len(text)} characters: expected 81")
    digits = DIGIT_OF[np.frombuffer("".join(texts).encode("latin-1"), dtype=np.uint8)].reshape(-1, 81)
    bad = np.argwhere(digits == 255)
    if len(bad):
        row, cell = bad[0]
        raise InvalidInput(
            f"{where(row)}: {texts[row][cell]!r} at character {cell + 1} of the {what}: "
            "expected digits, and . or 0 or _ for blanks"
        )
    return digits


def _read_steps(path: Path) -> Puzzles:
    """Rows of 325: the number of clues, then row, column, digit and strategy of each cell in the order it was filled."""
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, SyntaxError, TokenError):  # numpy parses the header as Python
        raise InvalidInput(f"{path}: truncated or not an .npy array of integers") from None
    require(np.issubdtype(table.dtype, np.integer), f"{path}: an array of {table.dtype}: expected integers")
    require(
        table.ndim == 2 and table.shape[1] == 325 and len(table) > 0,
        f"{path}: an array of shape {table.shape}: expected rows of 325, the number of clues and "
        "row, column, digit and strategy of 81 cells",
    )

    def where(row: int) -> str:
        return f"{path}, row {row + 1}"

    puzzle, solution = np.zeros((2, len(table), 81), dtype=np.uint8)
    for start in range(0, len(table), CHUNK):
        part = table[start : start + CHUNK].astype(np.int64)
        clues, (row, column, digit, _) = part[:, 0], part[:, 1:].reshape(-1, 81, 4).transpose(2, 0, 1)
        row, column = (line - line.min(1, keepdims=True).clip(0, 1) for line in (row, column))  # counted from 0 or from 1
        inside = ((row >= 0) & (row < 9) & (column >= 0) & (column < 9)).all(1)
        cell = np.where(inside[:, None], 9 * row + column, 0)
        for good, expected in (
            ((clues >= 0) & (clues <= 81), "the number of clues first, 0 to 81"),
            (inside & (np.sort(cell, axis=1) == np.arange(81)).all(1), "row and column of each of 81 cells once"),
            (((digit >= 1) & (digit <= 9)).all(1), "digits 1 to 9"),
        ):
            require(bool(good.all()), f"{where(start + int(good.argmin()))}: expected {expected}")
        np.put_along_axis(solution[start : start + CHUNK], cell, digit.astype(np.uint8), axis=1)
        given = np.where(np.arange(81) < clues[:, None], digit, 0).astype(np.uint8)
        np.put_along_axis(puzzle[start : start + CHUNK], cell, given, axis=1)
    check_digits(puzzle, solution, where)
    return Puzzles(puzzle, solution, str(path))


MAGIC, VERSION = b"vmdsudok", 1
HEADER = struct.Struct("<8sIIQQ32s")  # magic, version, kind, number of puzzles, seed, SHA-256 of all the rest


def write_packed(path: Path, records: np.ndarray, kind: str, seed: int) -> None:
    """Records of `pack`, 24 bytes each, behind a header of 64 bytes."""
    fields = (MAGIC, VERSION, KINDS.index(kind), len(records), seed)
    payload = records.tobytes()
    write_atomically(path, HEADER.pack(*fields, _checksum(fields, payload)) + payload)


def _checksum(fields: tuple, payload: bytes) -> bytes:
    return hashlib.sha256(HEADER.pack(*fields, b"") + payload).digest()


def _read_packed(path: Path, content: bytes) -> Puzzles:
    require(len(content) >= HEADER.size, f"{path}: truncated: {len(content)} bytes, less than a header")
    *fields, checksum = HEADER.unpack_from(content)
    _, version, kind, count, _ = fields
    require(version == VERSION, f"{path}: version {version} of the file format: expected {VERSION}")
    payload = content[HEADER.size :]
    require(
        len(payload) == count * engine.RECORD,
        f"{path}: truncated: {len(payload)} bytes of puzzles: expected {count * engine.RECORD}",
    )
    require(_checksum(tuple(fields), payload) == checksum, f"{path}: damaged: the checksum does not match")
    require(count > 0, f"{path}: no puzzles")
    require(kind < len(KINDS), f"{path}: kind {kind} of puzzles: expected 0 to {len(KINDS) - 1}")
    puzzle, solution = engine.unpack(np.frombuffer(payload, dtype=np.uint8).reshape(count, engine.RECORD))
    check_digits(puzzle, solution, lambda row: f"{path}, puzzle {row + 1}")
    return Puzzles(puzzle, solution, str(path), KINDS[kind])


# Making puzzles


class Drawn(NamedTuple):
    puzzle: np.ndarray  # (n, cells) uint8
    solution: np.ndarray
    tried: int  # puzzles made, kept or not
    logic: int  # of these, how many the seven strategies solve


def in_test(solution: np.ndarray) -> bool:
    """Which side a grid is on. Grids that are equal up to symmetry are on the same."""
    return engine.invariant(solution) % TEST_SHARE == 0


def draw_puzzles(count: int, kind: str = "any", seed: int = 0, box: int = 3) -> Puzzles:
    """Puzzles in memory, 9x9 or 4x4 (box=2), of both sides."""
    _check_draw(count, kind, seed)
    require(box in (2, 3), f"box={box}: expected 3 for 9x9 boards or 2 for 4x4 boards")
    require(not (kind == "hard" and box == 2), "kind=hard: expected 9x9 boards: the strategies solve all smaller ones")
    drawn = _draw(count, kind, engine.random_state(seed), engine.BOARDS[box**4])
    return Puzzles(drawn.puzzle, drawn.solution, f"{kind} puzzles", kind)


def _check_draw(count: int, kind: str, seed: int, name: str = "count") -> None:
    require_range(name, count, 1)
    require_choice("kind", kind, KINDS)
    require_range("seed", seed, 0, 2**62)


def _draw(count: int, kind: str, state: np.ndarray, board: engine.Board, test: bool | None = None) -> Drawn:
    low, high = SOLUTIONS if kind == "multi" else (1, 1)
    puzzle, solution = np.zeros((2, count, len(board.peers)), dtype=np.uint8)
    kept = tried = logic = 0
    while kept < count:
        engine.random_grid(board, state, solution[kept])
        if test is not None and in_test(solution[kept]) != test:
            continue
        if kind == "grid":
            kept, tried = kept + 1, tried + 1
            continue
        puzzle[kept] = solution[kept]
        if engine.random_puzzle(board, state, low, high, puzzle[kept]) == 0:
            continue
        tried += 1
        if kind == "multi":
            kept += 1
            continue
        solved = engine.grade(puzzle[kept]).solved
        logic += solved
        kept += kind == "any" or solved == (kind == "logic")
    return Drawn(puzzle, solution, tried, logic)


class Unit(NamedTuple):
    """A piece of work that is the same wherever it is done."""

    seed: int
    test: bool
    number: int
    size: int
    kind: str


def draw_unit(unit: Unit) -> Drawn:
    state = engine.random_state(unit.seed, int(unit.test), unit.number)
    return _draw(unit.size, unit.kind, state, engine.BOARD9, unit.test)


@contextmanager
def _processes(workers: int) -> Iterator[Callable]:
    """Yields a `map` over this many processes."""
    if workers == 1:
        yield map
        return
    draw_unit(Unit(0, False, 0, 1, "any"))  # compiled here once: the workers find it in the cache
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            yield pool.map
        except BrokenProcessPool:
            raise InvalidInput(
                f"workers={workers}: a worker process died: expected enough memory, "
                "and a script that does its work under if __name__ == '__main__'"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _cores() -> int:
    """Those this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_puzzles(
    train: int,
    test: int,
    kind: str = "logic",
    seed: int = 0,
    out: str | Path = "sudoku",
    workers: int = 0,
    on_progress: Callable[[int, str], None] | None = None,
) -> dict:
    """Write OUT/train.sudoku and OUT/test.sudoku, and return a summary. The files depend on sizes, kind and seed alone.

    Train and test share no solution, not even up to symmetry, and no puzzle comes twice. Of a puzzle with one solution no
    clue can go; of one with several, one solution is kept, and it is this one that decides between train and test.
    """
    _check_draw(train, kind, seed, "train")
    _check_draw(test, kind, seed, "test")
    require_range("workers", workers, 0, 1_000)
    workers = min(workers or _cores(), -(-max(train, test) // UNIT))
    folder = Path(out)
    make_folder(folder)
    started, tried, logic = time.perf_counter(), 0, 0
    seen: set[bytes] = set()
    sides: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    with claimed(folder), _processes(workers) as run:
        for side, wanted in (("train", train), ("test", test)):
            missing, number = wanted, 0
            while missing:  # once, unless a puzzle came twice
                sizes = [min(UNIT, missing - start) for start in range(0, missing, UNIT)]
                units = [Unit(seed, side == "test", number + i, size, kind) for i, size in enumerate(sizes)]
                number += len(units)
                for drawn in run(draw_unit, units):
                    tried, logic = tried + drawn.tried, logic + drawn.logic
                    new = []
                    for row, puzzle in enumerate(drawn.solution if kind == "grid" else drawn.puzzle):
                        key = hashlib.blake2b(puzzle.tobytes(), digest_size=16).digest()
                        if key not in seen:
                            seen.add(key)
                            new.append(row)
                    missing -= len(new)
                    sides[side].append(engine.pack(drawn.puzzle[new], drawn.solution[new]))
                    if on_progress:
                        on_progress(len(seen), f"{len(seen) / (time.perf_counter() - started):.0f} puzzles/s")
        for side, records in sides.items():
            write_packed(folder / f"{side}.sudoku", np.concatenate(records), kind, seed)
    seconds = time.perf_counter() - started
    return {
        "train": train,
        "test": test,
        "kind": kind,
        "seed": seed,
        "workers": workers,
        "compiled": engine.COMPILED,
        "made": tried,  # before those of another kind were left out
        "logic_share": None if kind in ("multi", "grid") else logic / tried,
        "seconds": seconds,
        "per_second": (train + test) / seconds,
    }


# Training


class Symmetry(NamedTuple):
    """A symmetry of the board for each row of a batch. Blanks stay blank."""

    cell: Tensor  # (B, cells): which cell comes here
    digit: Tensor  # (B, side + 1): what becomes of a digit; 0 -> 0

    def apply(self, grids: Tensor) -> Tensor:
        """(B, ..., cells) digits -> the same boards, seen in another way."""
        grids = grids.long()
        between = [1] * (grids.dim() - 2)
        moved = grids.gather(-1, self.cell.view(len(grids), *between, -1).expand_as(grids))
        return self.digit.gather(1, moved.flatten(1)).view_as(moved)

    def undo(self, grids: Tensor) -> Tensor:
        return Symmetry(self.cell.argsort(-1), self.digit.argsort(-1)).apply(grids)


def random_symmetry(
    count: int, cells: int, *, generator: torch.Generator | None = None, rows: Rows | None = None, device=None
) -> Symmetry:
    """Uniform over all of them: digits, bands, stacks, rows in bands and columns in stacks change places, and half the
    boards are transposed. With `rows` these are rows of a larger batch."""
    rows, box = rows or Rows(0, count, count), engine.BOARDS[cells].box
    side = box * box

    def uniforms(*shape: int) -> Tensor:
        return rows.of(torch.rand(rows.total, *shape, generator=generator, device=device))

    def shuffled_lines() -> Tensor:  # (B, side): bands in any order, and lines in any order within each
        return (box * uniforms(box).argsort(-1).unsqueeze(-1) + uniforms(box, box).argsort(-1)).flatten(1)

    row, column = shuffled_lines(), shuffled_lines()
    cell = side * row.unsqueeze(2) + column.unsqueeze(1)  # (B, side, side)
    turned = uniforms(1, 1) < 0.5
    cell = torch.where(turned, cell.transpose(1, 2), cell).flatten(1)
    digit = torch.nn.functional.pad(uniforms(side).argsort(-1) + 1, (1, 0))
    return Symmetry(cell, digit)


def augment(pairs: Tensor, *, generator: torch.Generator | None = None, rows: Rows | None = None) -> Tensor:
    """(B, 2, cells) puzzles and solutions -> the same under a random symmetry of each row."""
    return random_symmetry(*pairs.shape[::2], generator=generator, rows=rows, device=pairs.device).apply(pairs)


class Layout(NamedTuple):
    """How a puzzle and its solution are a sequence of tokens.

    In place: the cells of the solution, digit - 1, of which clues are given. As a pair, the paper's 164 tokens: the puzzle,
    0 for blanks, [SEP], the solution, [EOS]; all of the solution is to be written, clues too.
    """

    cells: int
    pair: bool

    @property
    def side(self) -> int:
        return math.isqrt(self.cells)

    @property
    def length(self) -> int:
        return 2 * self.cells + 2 if self.pair else self.cells

    @property
    def symbols(self) -> tuple[str, ...]:
        digits = tuple(map(str, range(1, self.side + 1)))
        return ("0", *digits, "[SEP]", "[EOS]") if self.pair else digits

    def prompt(self, puzzle: Tensor) -> Tensor:
        """(B, cells) digits, 0 for blanks -> (B, length) tokens, -1 where the model is to write."""
        puzzle = puzzle.long()
        if not self.pair:
            return puzzle - 1
        separator = torch.full_like(puzzle[:, :1], self.side + 1)
        return torch.cat([puzzle, separator, puzzle.new_full((len(puzzle), self.cells + 1), -1)], dim=1)

    def tokens(self, puzzle: Tensor, solution: Tensor) -> Tensor:
        """(B, cells) digits both -> (B, length)."""
        if not self.pair:
            return solution.long() - 1
        end = torch.full_like(solution[:, :1], self.side + 2, dtype=torch.long)
        return torch.cat([self.prompt(puzzle)[:, : self.cells + 1], solution.long(), end], dim=1)

    def grids(self, tokens: Tensor) -> Tensor:
        """(B, length) tokens -> (B, cells): what the model wrote. No digit where it wrote none."""
        return tokens[:, self.cells + 1 : -1] if self.pair else tokens + 1


def layout_of(length: int) -> Layout | None:
    """The layout of sequences of that length, if they can be puzzles."""
    found = (Layout(cells, pair) for cells in engine.BOARDS for pair in (False, True))
    return next((layout for layout in found if layout.length == length), None)


class SudokuData:
    """Puzzles with their solutions as tokens, and what is given. Rows are shuffled anew every epoch, as an array's are."""

    def __init__(self, puzzles: Puzzles, seed: int = 0, augmented: bool = True, pair: bool = False):
        unsolved = np.flatnonzero(~puzzles.solution.any(1))
        require(len(puzzles) > 0, f"{puzzles.name}: no puzzles")
        require(
            len(unsolved) == 0,
            f"{puzzles.name}: no solution given for {len(unsolved)} of {len(puzzles)} puzzles: expected one for each "
            "(`vmd solve` needs none)",
        )
        self.puzzles, self.name, self.augmented = puzzles, puzzles.name, augmented
        self.layout = Layout(puzzles.solution.shape[1], pair)
        self.length, self.symbols = self.layout.length, self.layout.symbols
        self.vocab_size = len(self.symbols)
        self._pairs = ArrayData(np.concatenate([puzzles.puzzle, puzzles.solution], axis=1), puzzles.name, seed)

    def batch(
        self, step: int, size: int, *, rows: Rows | None = None, generator: torch.Generator | None = None, device=None
    ) -> Tensor:
        """(size, L) tokens, or these rows of them."""
        return self.puzzle_batch(step, size, rows=rows, generator=generator, device=device)[0]

    def puzzle_batch(
        self, step: int, size: int, *, rows: Rows | None = None, generator: torch.Generator | None = None, device=None
    ) -> tuple[Tensor, Tensor]:
        """The same, and (size, L) bool: what is given. The step decides on puzzles, the generator on symmetries."""
        pairs = self._pairs.batch(step, size, rows=rows, device=device).unflatten(1, (2, -1))
        if self.augmented:
            pairs = augment(pairs, generator=generator, rows=rows)
        puzzle, solution = pairs.unbind(1)
        return self.layout.tokens(puzzle, solution), self.layout.prompt(puzzle) >= 0


# Judging grids


@functools.lru_cache
def _units(cells: int, device: torch.device) -> Tensor:
    return torch.from_numpy(engine.BOARDS[cells].units).to(device)


def valid(grids: Tensor) -> Tensor:
    """(..., cells) digits from 1 -> (...) bool: every row, column and box holds every digit once."""
    units = _units(grids.shape[-1], grids.device)
    side = units.shape[1]
    known = (grids >= 1) & (grids <= side)
    bits = torch.where(known, 1 << grids.long().clamp(0, side), 0)
    # As many powers of two as bits are set in the sum: each is there once.
    return (bits[..., units].sum(-1) == 2 ** (side + 1) - 2).all(-1)


def keeps_clues(grids: Tensor, puzzle: Tensor) -> Tensor:
    """(..., cells) both -> (...) bool: every clue is where it was."""
    return ((puzzle == 0) | (grids == puzzle)).all(-1)
