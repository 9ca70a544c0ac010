import hashlib
import itertools
import math
import os
import re
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from command import refused, succeeds
from helpers import chi_square_p
from vmd.config import InvalidInput
from vmd.data import ArrayData, Dataset, sudoku
from vmd.data import sudoku_engine as engine
from vmd.data.sudoku import Puzzles, SudokuData, augment, draw_puzzles, keeps_clues, load_puzzles, make_puzzles, valid
from vmd.masking import Rows

KNOWN = {
    "seventeen": (
        "000000010400000000020000000000050407008000300001090000300400200050100000000806000",
        "693784512487512936125963874932651487568247391741398625319475268856129743274836159",
    ),
    "inkala": (
        "800000000003600000070090200050007000000045700000100030001000068008500010090000400",
        "812753649943682175675491283154237896369845721287169534521974368438526917796318452",
    ),
}


def digits(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8) - ord("0")


def text(grid: np.ndarray) -> str:
    return "".join(map(str, grid.tolist()))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def minimal() -> Puzzles:
    return draw_puzzles(12, seed=1)


@pytest.fixture(scope="module")
def several() -> Puzzles:
    return draw_puzzles(4, "multi", seed=2)


def brute_force(puzzle: np.ndarray) -> set[str]:
    """All solutions, by trying every digit of the blank with the fewest."""
    side = math.isqrt(len(puzzle))
    box = math.isqrt(side)

    def seen_from(cell: int) -> set[int]:
        row, column = divmod(cell, side)
        top, left = row // box * box, column // box * box
        return {
            other
            for other in range(len(puzzle))
            if other // side == row
            or other % side == column
            or (other // side // box * box == top and other % side // box * box == left)
        } - {cell}

    peers = [seen_from(cell) for cell in range(len(puzzle))]
    grid, found = puzzle.tolist(), set()
    for cell, digit in enumerate(grid):
        if digit and any(grid[other] == digit for other in peers[cell]):
            return found

    def fill() -> None:
        options = [
            (set(range(1, side + 1)) - {grid[other] for other in peers[cell]}, cell)
            for cell in range(len(grid))
            if not grid[cell]
        ]
        if not options:
            found.add("".join(map(str, grid)))
            return
        free, cell = min(options, key=lambda option: len(option[0]))
        for digit in free:
            grid[cell] = digit
            fill()
        grid[cell] = 0

    fill()
    return found


@pytest.fixture(scope="module")
def small_grids() -> np.ndarray:
    """All 288 full 4x4 boards."""
    return np.array([digits(grid) for grid in sorted(brute_force(np.zeros(16, dtype=np.uint8)))])


# Solving


def test_there_are_288_small_grids(small_grids):
    assert len(small_grids) == 288
    found = engine.solve(np.zeros(16, dtype=np.uint8), limit=1_000)
    assert sorted(map(text, found)) == sorted(map(text, small_grids))


def test_solutions_of_small_boards_are_all_found(small_grids):
    """Against the list of all grids; the clues may contradict each other."""
    random = np.random.default_rng(0)
    for _ in range(150):
        puzzle = small_grids[random.integers(288)] * (random.random(16) < random.random())
        if random.random() < 0.3:
            puzzle[random.integers(16)] = random.integers(1, 5)
        puzzle = puzzle.astype(np.uint8)
        expected = small_grids[((puzzle == 0) | (small_grids == puzzle)).all(1)]
        assert sorted(map(text, engine.solve(puzzle, limit=300))) == sorted(map(text, expected))
        assert len(engine.solve(puzzle, limit=2)) == min(2, len(expected))


@pytest.mark.parametrize("name", KNOWN)
def test_known_puzzles_have_their_one_solution(name):
    puzzle, solution = map(digits, KNOWN[name])
    assert [text(found) for found in engine.solve(puzzle, limit=9)] == [text(solution)]


def test_all_solutions_of_a_puzzle_with_several_are_found(several):
    for puzzle in several.puzzle:
        assert {text(found) for found in engine.solve(puzzle, limit=51)} == brute_force(puzzle)


def test_two_digits_that_can_change_places_give_two_solutions():
    grid = digits(KNOWN["inkala"][1]).copy()
    rectangles = [
        (a, b, c, d)
        for top, bottom in itertools.combinations(range(9), 2)
        for left, right in itertools.combinations(range(9), 2)
        if (top // 3 == bottom // 3) != (left // 3 == right // 3)
        for a, b, c, d in [(9 * top + left, 9 * top + right, 9 * bottom + left, 9 * bottom + right)]
        if grid[a] == grid[d] and grid[b] == grid[c]
    ]
    assert rectangles
    for corners in rectangles:
        puzzle = grid.copy()
        puzzle[list(corners)] = 0
        assert len(engine.solve(puzzle, limit=9)) == 2


def test_puzzles_without_solutions_have_none():
    puzzle = digits(KNOWN["seventeen"][0]).copy()
    puzzle[0] = 1  # as in its row
    assert len(engine.solve(puzzle)) == 0
    puzzle[0] = 5  # in no row, column or box of a 5, but the solution has a 6 there
    assert len(engine.solve(puzzle)) == 0


def propagated(candidates: np.ndarray, *settled: str) -> bool:
    queue = np.zeros(162, dtype=np.int64)
    queue[: len(settled)] = [place(name) for name in settled]
    return bool(engine.propagate(engine.BOARD9, candidates, queue, len(settled)))


def test_propagation_settles_naked_and_hidden_singles():
    position = one_place_left()  # a hidden single
    position[place("r9c9")] = mask_of("56")
    position[place("r9c8")] = mask_of("5")  # it leaves 6 in r9c9
    assert propagated(position, "r9c8")
    assert [int(position[place(name)]) for name in ("r1c1", "r9c9", "r9c8")] == [mask_of("1"), mask_of("6"), mask_of("5")]
    assert not any(position[engine.BOARD9.peers[place("r9c9")]] & mask_of("6"))


@pytest.mark.parametrize(
    "digits_by_cell",
    [{"r1c1": "5", "r1c9": "5"}, dict.fromkeys([f"r1c{column}" for column in range(1, 10)], "12345678")],
    ids=["a cell without a digit", "a digit without a cell"],
)
def test_propagation_sees_contradictions(digits_by_cell):
    settled = [name for name, kept in digits_by_cell.items() if len(kept) == 1]
    assert not propagated(blank_position(**digits_by_cell), *settled)


def test_propagation_sees_two_digits_in_need_of_one_cell():
    position = blank_position()
    position[engine.BOARD9.units[0][1:]] &= ~mask_of("12")
    assert not propagated(position)


def test_a_search_stops_at_its_limit():
    found = engine.solve(np.zeros(81, dtype=np.uint8), limit=7)
    assert len({text(grid) for grid in found}) == 7
    assert valid(torch.from_numpy(found)).all()


# Making puzzles


def test_minimal_puzzles_have_one_solution_and_no_clue_to_spare(minimal):
    for puzzle, solution in zip(minimal.puzzle, minimal.solution, strict=True):
        found = engine.solve(puzzle)
        assert len(found) == 1
        assert text(found[0]) == text(solution)
        for cell in np.flatnonzero(puzzle):
            without = puzzle.copy()
            without[cell] = 0
            assert len(engine.solve(without)) == 2


@pytest.mark.parametrize(("low", "high"), [(2, 2), (2, 50), (5, 9)])
def test_puzzles_have_as_many_solutions_as_wanted(low, high):
    state, puzzle = engine.random_state(low, high), np.zeros(81, dtype=np.uint8)
    counts = []
    for _ in range(4):
        engine.random_grid(engine.BOARD9, state, puzzle)
        grid = puzzle.copy()
        counts.append(int(engine.random_puzzle(engine.BOARD9, state, low, high, puzzle)))
        found = [text(solution) for solution in engine.solve(puzzle, limit=high + 1)]
        assert text(grid) in found
        assert len(found) == counts[-1] or (counts[-1] == 0 and len(found) < low)
        assert counts[-1] == 0 or low <= counts[-1] <= high
    assert any(counts)


def test_few_solutions_are_as_welcome_as_many():
    state, puzzle, counts = engine.random_state(6), np.zeros(16, dtype=np.uint8), []
    for _ in range(200):
        engine.random_grid(engine.BOARD4, state, puzzle)
        counts.append(engine.random_puzzle(engine.BOARD4, state, 2, 50, puzzle))
    assert 0.1 < np.mean(np.array(counts) <= 9) < 0.4


def test_small_minimal_puzzles_are_minimal_too():
    drawn = draw_puzzles(30, box=2)
    assert drawn.puzzle.shape == (30, 16)
    for puzzle, solution in zip(drawn.puzzle, drawn.solution, strict=True):
        assert brute_force(puzzle) == {text(solution)}
        for cell in np.flatnonzero(puzzle):
            without = puzzle.copy()
            without[cell] = 0
            assert len(brute_force(without)) > 1


def test_random_grids_are_valid_and_equivalent_ones_equally_likely(small_grids):
    state, grid = engine.random_state(3), np.zeros(16, dtype=np.uint8)
    names = [text(known) for known in small_grids]
    counts, weights, starts = dict.fromkeys(names, 0), 0.0, 0
    for _ in range(2_500):
        log_weight, tries = engine.random_grid(engine.BOARD4, state, grid)
        counts[text(grid)] += 1
        weights, starts = weights + math.exp(log_weight), starts + tries
    assert weights / starts == pytest.approx(288, rel=0.05)
    classes = [engine.invariant(known) for known in small_grids]
    assert len(set(classes)) == 2
    for kind in set(classes):
        members = torch.tensor([counts[name] for name, its in zip(names, classes, strict=True) if its == kind])
        assert chi_square_p(members, torch.full((len(members),), 1 / len(members))) > 1e-4


def test_random_grids_estimate_the_number_of_all_grids():
    state, grid = engine.random_state(4), np.zeros(81, dtype=np.uint8)
    weights = []
    for _ in range(4_000 if engine.COMPILED else 100):
        log_weight, starts = engine.random_grid(engine.BOARD9, state, grid)
        weights += [math.exp(log_weight), *[0.0] * (starts - 1)]
    assert bool(valid(torch.from_numpy(grid)))
    error = np.std(weights) / len(weights) ** 0.5
    assert abs(np.mean(weights) - 6_670_903_752_021_072_936_960) < 4 * error


def test_shuffles_and_draws_are_uniform():
    state = engine.random_state(5)
    orders = torch.zeros(24)
    names = {order: index for index, order in enumerate(itertools.permutations(range(4)))}
    for _ in range(2_000):
        order = np.arange(4)
        engine.shuffle(state, order)
        orders[names[tuple(order.tolist())]] += 1
    assert chi_square_p(orders, torch.full((24,), 1 / 24)) > 1e-4


def test_states_depend_on_every_number():
    numbers = [(1,), (1, 0), (1, 0, 0), (2**32 + 1,), (1, 1), (0, 1), (2**62, 1, 3)]
    states = {tuple(engine.random_state(*each).tolist()) for each in numbers}
    assert len(states) == len(numbers)
    assert all(0 <= word < 2**32 for state in states for word in state)


# Grading


def blank_position(**cells: str) -> np.ndarray:
    """Candidates of a board where everything is possible but in cells such as r1c4="12"."""
    candidates = np.full(81, 511)
    for name, kept in cells.items():
        candidates[place(name)] = mask_of(kept)
    return candidates


def mask_of(digits: str) -> int:
    return sum(1 << (int(digit) - 1) for digit in digits)


def place(name: str) -> int:
    return 9 * (int(name[1]) - 1) + int(name[3]) - 1


def struck(candidates: np.ndarray, digits: str, *units: str) -> np.ndarray:
    """Without these digits in all cells of units such as "row 1" that have another digit, too."""
    mask = mask_of(digits)
    names = [f"{kind} {number}" for kind in ("row", "column", "box") for number in range(1, 10)]
    for unit in units:
        for cell in engine.BOARD9.units[names.index(unit)]:
            if candidates[cell] & ~mask:
                candidates[cell] &= ~mask
    return candidates


def without(candidates: np.ndarray, digits: str, *cells: str) -> np.ndarray:
    candidates[[place(name) for name in cells]] &= ~mask_of(digits)
    return candidates


def one_place_left() -> np.ndarray:
    position = blank_position()
    position[engine.BOARD9.peers[0]] &= ~1
    return position


# A position in which one strategy alone does anything, and what it takes away: digits from cells.
POSITIONS = {
    "lone single": (
        blank_position(r5c5="7"),
        {"7": [f"r5c{c}" for c in "12346789"] + [f"r{r}c5" for r in "12346789"] + ["r4c4", "r4c6", "r6c4", "r6c6"]},
    ),
    "hidden single": (one_place_left(), {"23456789": ["r1c1"]}),
    "naked pair": (
        blank_position(r1c1="12", r1c5="12"),
        {"12": ["r1c2", "r1c3", "r1c4", "r1c6", "r1c7", "r1c8", "r1c9"]},
    ),
    "naked triplet": (
        blank_position(r1c1="123", r5c1="123", r9c1="123"),
        {"123": ["r2c1", "r3c1", "r4c1", "r6c1", "r7c1", "r8c1"]},
    ),
    "locked candidate": (  # pointing
        without(blank_position(), "1", "r2c1", "r2c2", "r2c3", "r3c1", "r3c2", "r3c3"),
        {"1": ["r1c4", "r1c5", "r1c6", "r1c7", "r1c8", "r1c9"]},
    ),
    "locked candidate, claiming": (
        without(blank_position(), "1", "r1c4", "r2c4", "r3c4", "r7c4", "r8c4", "r9c4"),
        {"1": ["r4c5", "r4c6", "r5c5", "r5c6", "r6c5", "r6c6"]},
    ),
    "XY-wing": (blank_position(r1c1="12", r1c5="13", r5c1="23"), {"3": ["r5c5"]}),
    "XY-wing, in a box": (
        blank_position(r1c1="12", r2c2="13", r1c7="23"),
        {"3": ["r1c2", "r1c3", "r2c7", "r2c8", "r2c9"]},
    ),
    "unique rectangle": (
        struck(blank_position(r1c1="12", r1c2="12", r4c1="12"), "12", "row 1", "column 1", "box 1"),
        {"12": ["r4c2"]},
    ),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_each_strategy_sees_what_no_other_does(name):
    position, taken = POSITIONS[name]
    for strategy, known in enumerate(engine.STRATEGIES):
        candidates = position.copy()
        changed = engine.apply_strategy(engine.BOARD9, strategy, candidates, np.zeros(81, dtype=bool))
        if known != name.split(",")[0]:
            assert not changed, known
            assert (candidates == position).all(), known
            continue
        assert changed
        expected = position.copy()
        for digits_taken, cells in taken.items():
            expected = without(expected, digits_taken, *cells)
        assert np.flatnonzero(candidates != position).tolist() == np.flatnonzero(expected != position).tolist()
        assert (candidates == expected).all()


def test_every_position_is_covered():
    assert {name.split(",")[0] for name in POSITIONS} == set(engine.STRATEGIES)


def test_a_settled_corner_is_no_unique_rectangle():
    """It may be a clue, and then the digits cannot change places."""
    position = struck(blank_position(r1c1="12", r1c2="12", r4c1="12", r4c2="1"), "12", "row 1", "column 1", "box 1")
    before = position.copy()
    assert not engine.apply_strategy(engine.BOARD9, 6, position, np.zeros(81, dtype=bool))
    assert (position == before).all()


@pytest.mark.parametrize("kept", [("12", "12", "3"), ("12", "3", "12"), ("3", "12", "12")])
def test_a_pair_beside_a_settled_cell_is_no_triplet(kept):
    position = blank_position(**dict(zip(("r1c1", "r1c5", "r1c9"), kept, strict=True)))
    assert not engine.apply_strategy(engine.BOARD9, 3, position, np.zeros(81, dtype=bool))


def test_rectangles_in_four_boxes_or_one_are_left_alone():
    for corners in (("r1c1", "r1c4", "r4c1"), ("r1c1", "r1c2", "r2c1")):
        position = blank_position(**dict.fromkeys(corners, "12"))
        before = position.copy()
        assert not engine.apply_strategy(engine.BOARD9, 6, position, np.zeros(81, dtype=bool))
        assert (position == before).all()


def test_no_strategy_takes_the_digit_of_the_solution(minimal):
    for puzzle, solution in zip(minimal.puzzle, minimal.solution, strict=True):
        candidates = np.empty(81, dtype=np.int64)
        engine.apply_strategies(engine.BOARD9, puzzle, candidates)
        assert (candidates >> (solution.astype(np.int64) - 1) & 1).all()


def test_grades_are_right_and_no_harder_than_needed(minimal):
    """Without its hardest strategy the same puzzle is not solved."""
    solved = 0
    for puzzle, solution in zip(minimal.puzzle, minimal.solution, strict=True):
        found = engine.grade(puzzle)
        settled = found.grid > 0
        assert (found.grid[settled] == solution[settled]).all()
        assert found.solved == settled.all()
        for top in (found.hardest, found.hardest - 1):
            candidates, placed = np.full(81, 511), puzzle > 0
            for cell in np.flatnonzero(placed):
                bit = 1 << (int(puzzle[cell]) - 1)
                candidates[cell] = bit
                candidates[engine.BOARD9.peers[cell]] &= ~bit
            while any(engine.apply_strategy(engine.BOARD9, s, candidates, placed) for s in range(top + 1)):
                pass
            assert bool((engine.COUNT[candidates] == 1).all()) == (found.solved and top == found.hardest)
        solved += found.solved
    assert 0 < solved < len(minimal)


def test_known_puzzles_are_graded():
    assert not engine.grade(digits(KNOWN["inkala"][0])).solved
    full = engine.grade(digits(KNOWN["inkala"][1]))
    assert (full.solved, full.hardest) == (True, -1)
    one_blank = digits(KNOWN["inkala"][1]).copy()
    one_blank[40] = 0
    assert engine.grade(one_blank)[:2] == (True, 0)


# Symmetry


def transformed(grid: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A random symmetry, written down again and otherwise than in `augment`."""
    side = math.isqrt(len(grid))
    box = math.isqrt(side)
    table = np.concatenate([[0], random.permutation(side) + 1])[grid].reshape(side, side)
    for _ in range(2):
        table = table.T if random.random() < 0.5 else table
        bands = [table[box * band : box * (band + 1)][random.permutation(box)] for band in random.permutation(box)]
        table = np.concatenate(bands).T
    return table.flatten().astype(np.uint8)


def test_the_invariant_does_not_change_under_symmetries(minimal, small_grids):
    random = np.random.default_rng(0)
    for grid in [*minimal.solution[:8], *small_grids[::40]]:
        expected = engine.invariant(grid)
        assert 0 <= expected < 2**64
        for _ in range(8):
            assert engine.invariant(transformed(grid, random)) == expected


def test_the_invariant_tells_other_grids_apart(minimal):
    assert len({engine.invariant(grid) for grid in minimal.solution}) == len(minimal)


# Packing


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_packing_loses_nothing(minimal, seed, count):
    random = np.random.default_rng(seed)
    solution = np.array([transformed(minimal.solution[random.integers(12)], random) for _ in range(count)])
    puzzle = solution * (random.random((count, 81)) < random.random((count, 1)))
    records = engine.pack(puzzle, solution)
    assert records.shape == (count, 24)
    assert records.dtype == np.uint8
    for given_back, expected in zip(engine.unpack(records), (puzzle, solution), strict=True):
        assert (given_back == expected).all()


def test_every_grid_fits():
    """At each cell the digits before it in its row, its column, or its box are gone: a bound that holds for all grids."""
    product = 1
    for row, column in itertools.product(range(9), repeat=2):
        product *= 9 - max(row, column, 3 * (row % 3) + column % 3)
    assert product < 2 ** (engine.LOW_BITS + engine.HIGH_BITS)
    assert 81 + engine.LOW_BITS + engine.HIGH_BITS == 8 * engine.RECORD
    assert 9 * 2**engine.LOW_BITS < 2**63


def test_more_puzzles_than_a_chunk_are_packed(minimal, monkeypatch):
    whole = engine.pack(minimal.puzzle, minimal.solution)
    monkeypatch.setattr(engine, "CHUNK", 5)
    assert (engine.pack(minimal.puzzle, minimal.solution) == whole).all()
    assert (engine.unpack(whole)[1] == minimal.solution).all()


# Files of our own


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    seen = []
    summary = make_puzzles(8, 3, "any", 5, folder, 1, lambda done, text: seen.append((done, text)))
    return folder, summary, seen


def test_what_is_made_is_read_back(made):
    folder, summary, seen = made
    train, test = load_puzzles(folder / "train.sudoku"), load_puzzles(folder / "test.sudoku")
    assert (len(train), len(test)) == (8, 3) == (summary["train"], summary["test"])
    assert train.kind == "any"
    assert 0 < summary["logic_share"] <= 1
    assert summary["made"] == 11
    assert summary["seconds"] > 0
    assert seen[-1][0] == 11
    assert "puzzles/s" in seen[-1][1]
    everything = [text(row) for row in (*train.puzzle, *test.puzzle)]
    assert len(set(everything)) == 11
    assert all(len(engine.solve(digits(row))) == 1 for row in everything)
    assert sorted(path.name for path in folder.iterdir()) == ["test.sudoku", "train.sudoku"]
    assert (folder / "train.sudoku").stat().st_size == 64 + 8 * 24


def test_train_and_test_share_no_solution_even_up_to_symmetry(made):
    folder, _, _ = made
    train, test = (
        {engine.invariant(row) for row in load_puzzles(folder / f"{side}.sudoku").solution} for side in ("train", "test")
    )
    assert not train & test
    assert all(value % sudoku.TEST_SHARE for value in train)
    assert not any(value % sudoku.TEST_SHARE for value in test)


def test_the_files_are_the_same_with_two_workers(made, tmp_path, monkeypatch):
    monkeypatch.setattr(sudoku, "UNIT", 3)
    one, two = tmp_path / "one", tmp_path / "two"
    make_puzzles(7, 2, "any", 5, one, 1)
    assert make_puzzles(7, 2, "any", 5, two, 2)["workers"] == 2
    make_puzzles(7, 2, "any", 6, tmp_path / "other", 1)
    for name in ("train.sudoku", "test.sudoku"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
        assert (one / name).read_bytes() != (tmp_path / "other" / name).read_bytes()


def test_units_of_work_differ():
    units = [sudoku.Unit(*numbers, 1, "any") for numbers in ((1, False, 0), (1, False, 1), (2, False, 0))]
    assert len({text(sudoku.draw_unit(unit).puzzle[0]) for unit in units}) == 3


@pytest.mark.parametrize("kind", ["logic", "hard", "multi"])
def test_puzzles_are_of_their_kind(kind, tmp_path):
    summary = make_puzzles(3, 1, kind, 1, tmp_path, 1)
    for side in ("train", "test"):
        puzzles = load_puzzles(tmp_path / f"{side}.sudoku")
        assert puzzles.kind == kind
        for puzzle in puzzles.puzzle:
            count = len(engine.solve(puzzle, limit=51))
            if kind == "multi":
                assert 2 <= count <= 50
            else:
                assert count == 1
                assert engine.grade(puzzle).solved == (kind == "logic")
    assert summary["made"] >= 4
    assert (summary["logic_share"] is None) == (kind == "multi")


def test_a_puzzle_that_comes_twice_is_kept_once(tmp_path, minimal, monkeypatch):
    """The second unit repeats the first, and a test unit repeats a training puzzle: more units make up for it."""

    def repeat(unit: sudoku.Unit) -> sudoku.Drawn:
        start = 6 + 2 * (unit.number - 1) if unit.test else 2 * max(unit.number - 1, 0)
        rows = slice(start - (unit.test and unit.number == 1), start + 2)
        return sudoku.Drawn(minimal.puzzle[rows][: unit.size], minimal.solution[rows][: unit.size], unit.size, 0)

    monkeypatch.setattr(sudoku, "draw_unit", repeat)
    monkeypatch.setattr(sudoku, "UNIT", 2)
    make_puzzles(4, 3, "any", 0, tmp_path, 1)
    train, test = (load_puzzles(tmp_path / f"{side}.sudoku").puzzle for side in ("train", "test"))
    assert (len(train), len(test)) == (4, 3)
    assert len({text(row) for row in (*train, *test)}) == 7


@pytest.mark.skipif(not engine.COMPILED, reason="numba is not installed: there is nothing to compare")
def test_results_are_the_same_without_numba():
    script = "import test_sudoku_data as t; assert not t.engine.COMPILED; print(t.fingerprint())"
    environment = os.environ | {"VMD_PLAIN_SUDOKU": "1", "PYTHONPATH": os.path.dirname(__file__), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == fingerprint(), done.stderr


def fingerprint() -> str:
    """Of everything that numba compiles."""
    drawn = [draw_puzzles(4), draw_puzzles(1, "multi"), draw_puzzles(1, "hard"), draw_puzzles(5, box=2)]
    found = [text(row) for puzzles in drawn for row in (*puzzles.puzzle, *puzzles.solution)]
    for puzzles in drawn:
        found += [text(grid) for puzzle in puzzles.puzzle for grid in engine.solve(puzzle, limit=51)]
        found += [str(engine.invariant(grid)) for grid in puzzles.solution]
    for puzzle in drawn[0].puzzle:
        solved, hardest, grid = engine.grade(puzzle)
        found.append(f"{solved} {hardest} {text(grid)}")
    return hashlib.sha256(" ".join(found).encode()).hexdigest()


def test_workers_that_die_are_reported():
    with pytest.raises(InvalidInput, match="workers=2: a worker process died"), sudoku._processes(2):
        raise BrokenProcessPool


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"train": 0}, "train=0: expected a number at least 1"),
        ({"test": 0}, "test=0: expected a number at least 1"),
        ({"kind": "easy"}, "kind='easy': expected one of logic, hard, any, multi"),
        ({"seed": -1}, "seed=-1: expected a number between 0"),
        ({"workers": -1}, "workers=-1: expected a number between 0"),
    ],
)
def test_orders_that_make_no_sense_are_refused(tmp_path, wrong, says):
    with pytest.raises(InvalidInput, match=says):
        make_puzzles(**{"train": 1, "test": 1, "kind": "any", "seed": 0, "out": tmp_path / "out", "workers": 1} | wrong)
    assert not (tmp_path / "out").exists()


def test_small_boards_are_drawn_only_where_there_are_any():
    with pytest.raises(InvalidInput, match="kind=hard: expected 9x9 boards"):
        draw_puzzles(1, "hard", box=2)
    with pytest.raises(InvalidInput, match="box=4: expected 3"):
        draw_puzzles(1, box=4)


def damaged(content: bytes, how: str) -> bytes:
    if how == "flipped":
        return content[:100] + bytes([content[100] ^ 1]) + content[101:]
    if how == "other seed":
        return content[:24] + bytes([content[24] ^ 1]) + content[25:]
    if how == "version":
        return content[:8] + b"\x09" + content[9:]
    return content[: {"half a header": 30, "half a puzzle": -10, "one less": -24}[how]]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("flipped", "damaged: the checksum does not match"),
        ("other seed", "damaged: the checksum does not match"),
        ("version", "version 9 of the file format: expected 1"),
        ("half a header", "truncated: 30 bytes, less than a header"),
        ("half a puzzle", "truncated: 182 bytes of puzzles: expected 192"),
        ("one less", "truncated: 168 bytes of puzzles: expected 192"),
    ],
)
def test_damaged_files_are_refused(made, tmp_path, how, says):
    path = tmp_path / "damaged.sudoku"
    path.write_bytes(damaged((made[0] / "train.sudoku").read_bytes(), how))
    with pytest.raises(InvalidInput, match=rf"damaged\.sudoku: {says}"):
        load_puzzles(path)


def test_forged_files_are_refused(tmp_path):
    """Checksums are right but the records are noise."""
    path = tmp_path / "forged.sudoku"
    records = np.random.default_rng(0).integers(0, 256, (50, 24), dtype=np.uint8)
    sudoku.write_packed(path, records, "any", 0)
    with pytest.raises(InvalidInput, match=r"forged\.sudoku, puzzle \d+: "):
        load_puzzles(path)
    sudoku.write_packed(path, records[:0], "any", 0)
    with pytest.raises(InvalidInput, match=r"forged\.sudoku: no puzzles"):
        load_puzzles(path)


# Files of others

PUZZLE, SOLUTION = KNOWN["seventeen"]
OTHER, OTHER_SOLUTION = KNOWN["inkala"]


@pytest.mark.parametrize(
    "content",
    [
        f"{PUZZLE}\n{OTHER}\n",
        f"{PUZZLE.replace('0', '.')}\n{OTHER.replace('0', '_')}",
        f"{PUZZLE},{SOLUTION}\n{OTHER},{OTHER_SOLUTION}\n",
        f"# a comment\n\n{PUZZLE} {SOLUTION}\r\n\r\n{OTHER}\t{OTHER_SOLUTION}\r\n",
        f"{PUZZLE}\n{OTHER};{OTHER_SOLUTION}\n",
        f"quizzes,solutions\n{PUZZLE},{SOLUTION}\n{OTHER},{OTHER_SOLUTION}\n",
        f"\ufeffPuzzle,Solution\n{PUZZLE},{SOLUTION}\n{OTHER},{OTHER_SOLUTION}\n",
        f'source,question,answer,rating\nme,{PUZZLE},{SOLUTION},3\n"you, too",{OTHER},{OTHER_SOLUTION},5\n\n',
        f"id,puzzle\n1,{PUZZLE}\n2,{OTHER}\n",
    ],
)
def test_text_is_read(tmp_path, content):
    path = tmp_path / "puzzles.txt"
    path.write_text(content, encoding="utf-8", newline="")
    puzzles = load_puzzles(path)
    assert [text(row) for row in puzzles.puzzle] == [PUZZLE, OTHER]
    assert puzzles.puzzle.dtype == puzzles.solution.dtype == np.uint8
    for row, full in zip(puzzles.solution, (SOLUTION, OTHER_SOLUTION), strict=True):
        assert text(row) == (full if full in content else "0" * 81)
    assert [text(row) for row in sudoku.solve_missing(puzzles).solution] == [SOLUTION, OTHER_SOLUTION]


TWICE = "11" + "0" * 79  # in row 1
SWAPPED = SOLUTION[1] + SOLUTION[0] + SOLUTION[2:]  # two digits of row 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", ": no puzzles: expected a line of 81 characters"),
        ("\n  \n# nothing\n", ": no puzzles: expected a line of 81 characters"),
        ("puzzle,solution\n", ": no puzzles: expected a line of 81 characters for each below the header"),
        (f"{PUZZLE}\n\n{PUZZLE}0\n", ", line 3: a puzzle of 82 characters: expected 81"),
        (f"{PUZZLE},{SOLUTION[:-1]}\n", ", line 1: a solution of 80 characters: expected 81"),
        (f"{PUZZLE}\n{PUZZLE[:-1]}x\n", ", line 2: 'x' at character 81 of the puzzle: expected digits, and . or 0 or _"),
        (f"{PUZZLE},{SOLUTION[:-1]}?\n", r", line 1: '\?' at character 81 of the solution: expected digits"),
        (f"{PUZZLE}\n{TWICE}\n", ", line 2: clues contradict each other: 1 twice in row 1"),
        (f"{'7' + '0' * 71 + '7' + '0' * 8}", ", line 1: clues contradict each other: 7 twice in column 1"),
        (f"{'0' * 60 + '4' + '0' * 19 + '4'}", ", line 1: clues contradict each other: 4 twice in box 9"),
        (f"{PUZZLE},{SWAPPED}\n", ", line 1: the solution is not valid: column 1 does not hold every digit once"),
        (f"{PUZZLE},{'0' + SOLUTION[1:]}\n", ", line 1: the solution is not valid: row 1 does not hold every digit once"),
        (f"{PUZZLE},{OTHER_SOLUTION}\n", ", line 1: the solution has 4 in row 1, column 8: expected the clue 1"),
        (f"{PUZZLE} {SOLUTION} 3\n", ", line 1: 3 words: expected a puzzle, and its solution"),
        (f"quizzes,solutions\n{PUZZLE},{SOLUTION}\n{PUZZLE}\n", ", line 3: 1 columns: expected 2"),
        (f"quizzes,solutions\n{PUZZLE},{SOLUTION}\n{TWICE},\n", ", line 3: clues contradict each other"),
        (f"grid,solved\n{PUZZLE},{SOLUTION}\n", ": columns 'grid, solved': expected one named puzzle or "),
        (f"puzzle\n{PUZZLE}{'0' * 200_000}\n", ", line 2: expected CSV: field larger"),
    ],
)
def test_text_that_is_no_puzzles_is_refused(tmp_path, content, says):
    path = tmp_path / "puzzles.txt"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=rf"puzzles\.txt{says}") as refusal:
        load_puzzles(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_files_that_are_not_there_are_refused(tmp_path, name):
    with pytest.raises(InvalidInput, match="no such file: expected a file of Sudoku puzzles"):
        load_puzzles(tmp_path / name)


def test_puzzles_without_a_solution_cannot_be_solved():
    impossible = digits(PUZZLE).copy()
    impossible[0] = 5
    puzzles = Puzzles(np.stack([digits(OTHER), impossible]), np.zeros((2, 81), dtype=np.uint8), "mine")
    with pytest.raises(InvalidInput, match="mine: puzzle 2 has no solution"):
        sudoku.solve_missing(puzzles)


def steps_row(puzzle: str, solution: str, first: int = 0, seed: int = 0) -> np.ndarray:
    """As in the files of Shah et al.: clues first, then the other cells in some order."""
    order = np.random.default_rng(seed).permutation(81)
    order = np.concatenate([[c for c in order if puzzle[c] != "0"], [c for c in order if puzzle[c] == "0"]]).astype(int)
    cells = np.stack([order // 9 + first, order % 9 + first, digits(solution)[order], order % 8], axis=1)
    return np.concatenate([[81 - puzzle.count("0")], cells.flatten()])


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint16])
def test_arrays_of_solving_steps_are_read(tmp_path, first, dtype, monkeypatch):
    monkeypatch.setattr(sudoku, "CHUNK", 2)
    rows = [
        steps_row(PUZZLE, SOLUTION, first),
        steps_row(OTHER, OTHER_SOLUTION, first),
        steps_row(SOLUTION, SOLUTION, first),
    ]
    np.save(tmp_path / "steps.npy", np.array(rows, dtype=dtype))
    puzzles = load_puzzles(tmp_path / "steps.npy")
    assert [text(row) for row in puzzles.puzzle] == [PUZZLE, OTHER, SOLUTION]
    assert [text(row) for row in puzzles.solution] == [SOLUTION, OTHER_SOLUTION, SOLUTION]


def changed(index: int, value: int) -> np.ndarray:
    row = steps_row(PUZZLE, SOLUTION)
    row[index] = value
    return np.stack([steps_row(OTHER, OTHER_SOLUTION), row])


def swapped_digits() -> np.ndarray:
    table = changed(0, 17)
    a, b = 3 + 4 * 40, 3 + 4 * 41
    assert table[1, a] != table[1, b]
    table[1, [a, b]] = table[1, [b, a]]
    return table


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (np.zeros((2, 324), dtype=int), r": an array of shape \(2, 324\): expected rows of 325"),
        (np.zeros(325, dtype=int), r": an array of shape \(325,\): expected rows of 325"),
        (np.zeros((0, 325), dtype=int), r": an array of shape \(0, 325\): expected rows of 325"),
        (np.zeros((2, 325)), ": an array of float64: expected integers"),
        (changed(0, 82), ", row 2: expected the number of clues first, 0 to 81"),
        (changed(0, -1), ", row 2: expected the number of clues first, 0 to 81"),
        (changed(1, 9), ", row 2: expected row and column of each of 81 cells once"),
        (changed(2, -1), ", row 2: expected row and column of each of 81 cells once"),
        (changed(3, 0), ", row 2: expected digits 1 to 9"),
        (changed(3, 10), ", row 2: expected digits 1 to 9"),
        (swapped_digits(), ", row 2: the solution is not valid"),
    ],
)
def test_arrays_that_are_no_solving_steps_are_refused(tmp_path, table, says):
    np.save(tmp_path / "steps.npy", table)
    with pytest.raises(InvalidInput, match=rf"steps\.npy{says}"):
        load_puzzles(tmp_path / "steps.npy")


class Bomb:
    """Unpickling this would be noticed."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def test_pickled_and_truncated_arrays_are_refused_unread(tmp_path):
    np.save(tmp_path / "bomb.npy", np.array([[Bomb()]], dtype=object), allow_pickle=True)
    np.save(tmp_path / "whole.npy", changed(0, 17))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:-8])
    (tmp_path / "start.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i8' ")
    for name in ("bomb.npy", "cut.npy", "start.npy"):
        with pytest.raises(InvalidInput, match=rf"{name}: truncated or not an \.npy array of integers"):
            load_puzzles(tmp_path / name)


# Augmentation


def pairs_of(puzzles: Puzzles) -> torch.Tensor:
    return torch.from_numpy(np.stack([puzzles.puzzle, puzzles.solution], axis=1)).long()


def test_symmetries_map_puzzles_to_puzzles(minimal):
    pairs = pairs_of(minimal).repeat(4, 1, 1)
    moved = augment(pairs, generator=generator())
    puzzle, solution = moved.unbind(1)
    assert valid(solution).all()
    assert keeps_clues(solution, puzzle).all()
    assert torch.equal((puzzle > 0).sum(1), (pairs[:, 0] > 0).sum(1))
    for before, after in zip(pairs[:, 0], puzzle, strict=True):  # as many of the most frequent digit, and so on
        assert sorted(before.bincount(minlength=10)[1:].tolist()) == sorted(after.bincount(minlength=10)[1:].tolist())
    assert not torch.equal(moved, pairs)
    for row, (one, other) in enumerate(zip(solution, pairs[:, 1], strict=True)):
        assert engine.invariant(one.numpy()) == engine.invariant(other.numpy()), row
    assert len(engine.solve(puzzle[0].numpy())) == 1


def test_all_symmetries_of_a_small_board_are_equally_likely():
    """4! relabellings, 2^3 orders of rows, as many of columns, transposed or not: 3072 images of a lopsided board."""
    grid = torch.tensor([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1])
    clues = torch.tensor([1, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])
    pairs = torch.stack([grid * clues, grid]).expand(60_000, 2, 16)
    images, counts = augment(pairs, generator=generator()).flatten(1).unique(dim=0, return_counts=True)
    assert len(images) == 24 * 8 * 8 * 2
    assert valid(images[:, 16:]).all()
    assert chi_square_p(counts, torch.full((3072,), 1 / 3072)) > 1e-4


def test_symmetries_of_the_large_board_are_spread_evenly(minimal):
    """Two clues in the same row and box: each comes to every cell and digit, and half the time they end up in a column."""
    puzzle = torch.zeros(81, dtype=torch.long)
    puzzle[:2] = torch.tensor([1, 2])
    pairs = torch.stack([puzzle, torch.from_numpy(minimal.solution[0]).long()]).expand(20_000, 2, 81)
    moved = augment(pairs, generator=generator())[:, 0]
    cells, digit = moved.nonzero()[:, 1].view(-1, 2), moved[moved > 0]
    assert chi_square_p(cells.flatten().bincount(minlength=81), torch.full((81,), 1 / 81)) > 1e-4
    assert chi_square_p(digit.bincount(minlength=10)[1:], torch.full((9,), 1 / 9)) > 1e-4
    row, column = cells // 9, cells % 9
    in_row = (row[:, 0] == row[:, 1]) & (column[:, 0] // 3 == column[:, 1] // 3)
    in_column = (column[:, 0] == column[:, 1]) & (row[:, 0] // 3 == row[:, 1] // 3)
    assert (in_row ^ in_column).all()
    assert 0.48 < float(in_row.double().mean()) < 0.52


def test_a_part_of_a_batch_has_its_symmetries(minimal):
    pairs = pairs_of(minimal)
    whole = augment(pairs, generator=generator(3))
    part = augment(pairs[5:9], generator=generator(3), rows=Rows(5, 9, 12))
    assert torch.equal(part, whole[5:9])
    assert not torch.equal(augment(pairs, generator=generator(4)), whole)


# Batches


def test_sudoku_is_a_data_set(minimal):
    data: Dataset = SudokuData(minimal)
    assert (data.length, data.vocab_size) == (81, 9)
    assert data.symbols == tuple("123456789")
    small: Dataset = SudokuData(draw_puzzles(2, box=2))
    assert (small.length, small.vocab_size, small.symbols) == (16, 4, tuple("1234"))


def test_batches_come_in_the_order_of_an_array(minimal):
    data = SudokuData(minimal, seed=3, augmented=False)
    array = ArrayData(np.concatenate([minimal.puzzle, minimal.solution], axis=1), seed=3)
    for step in (4, 0, 1):
        tokens, clues = data.puzzle_batch(step, 5)
        expected = array.batch(step, 5)
        assert tokens.dtype == torch.int64
        assert clues.dtype == torch.bool
        assert torch.equal(tokens + 1, expected[:, 81:])
        assert torch.equal((tokens + 1) * clues, expected[:, :81])
        assert torch.equal(data.batch(step, 5), tokens)


def test_augmented_batches_keep_puzzle_and_solution_together(minimal):
    data = SudokuData(minimal, seed=1)
    plain = SudokuData(minimal, seed=1, augmented=False)
    tokens, clues = data.puzzle_batch(2, 12, generator=generator(5))
    assert valid(tokens + 1).all()
    assert torch.equal(data.batch(2, 12, generator=generator(5)), tokens)
    assert not torch.equal(data.batch(2, 12, generator=generator(6)), tokens)
    expected, expected_clues = plain.puzzle_batch(2, 12)
    assert torch.equal(clues.sum(1), expected_clues.sum(1))
    for moved, mask, original in zip(tokens + 1, clues, expected + 1, strict=True):
        assert engine.invariant(moved.numpy()) == engine.invariant(original.numpy())
        assert len(engine.solve((moved * mask).numpy())) == 1


@pytest.mark.parametrize("augmented", [False, True])
def test_processes_share_a_batch(minimal, augmented):
    data = SudokuData(minimal, augmented=augmented)
    whole = data.puzzle_batch(1, 10, generator=generator(2))
    parts = [data.puzzle_batch(1, 10, rows=Rows(a, b, 10), generator=generator(2)) for a, b in ((0, 4), (4, 10))]
    for expected, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(pieces), expected)


def test_puzzles_without_solutions_are_no_training_data(minimal):
    solution = minimal.solution.copy()
    solution[3] = 0
    with pytest.raises(InvalidInput, match="mine: no solution given for 1 of 12 puzzles"):
        SudokuData(Puzzles(minimal.puzzle, solution, "mine"))
    with pytest.raises(InvalidInput, match="mine: no puzzles"):
        SudokuData(Puzzles(minimal.puzzle[:0], solution[:0], "mine"))


# Judging


def holds_every_digit(grid: list[int]) -> bool:
    rows = [grid[9 * i : 9 * i + 9] for i in range(9)]
    columns = [grid[i::9] for i in range(9)]
    boxes = [[rows[3 * (i // 3) + k // 3][3 * (i % 3) + k % 3] for k in range(9)] for i in range(9)]
    return all(sorted(unit) == list(range(1, 10)) for unit in rows + columns + boxes)


def test_grids_are_valid_or_not(minimal):
    random = np.random.default_rng(0)
    grids = np.repeat(minimal.solution, 10, axis=0).astype(np.int64)
    for grid in grids[::2]:
        a, b = random.choice(81, 2, replace=False)
        if random.random() < 0.5:
            grid[[a, b]] = grid[[b, a]]
        else:
            grid[a] = random.choice([-1, 0, 1, 5, 9, 10, 64, 1_000])
    found = valid(torch.from_numpy(grids))
    assert found.tolist() == [holds_every_digit(grid.tolist()) for grid in grids]
    assert 0 < int(found.sum()) < len(grids)
    assert valid(torch.from_numpy(grids).view(12, 10, 81)).shape == (12, 10)


def test_latin_squares_are_not_enough():
    """Every row and column holds every digit, the boxes do not; and the other way round."""
    latin = torch.tensor([[(row + column) % 9 + 1 for column in range(9)] for row in range(9)])
    boxes = torch.tensor([[3 * (row % 3) + column % 3 + 1 for column in range(9)] for row in range(9)])
    assert not valid(latin.flatten())
    assert not valid(boxes.flatten())


def test_clues_are_kept_or_not(minimal):
    solution, puzzle = torch.from_numpy(minimal.solution), torch.from_numpy(minimal.puzzle)
    assert keeps_clues(solution, puzzle).all()
    assert not keeps_clues(solution.roll(1, 0), puzzle).any()
    changed = solution.clone()
    changed[0, int((puzzle[0] == 0).nonzero()[0])] = 0  # a blank
    changed[1, int((puzzle[1] > 0).nonzero()[0])] = 0  # a clue
    assert keeps_clues(changed, puzzle).tolist() == [True, False] + [True] * 10


def test_the_command_makes_files_that_load(tmp_path):
    words = ("data", "sudoku", "--train", 12, "--test", 4, "--seed", 3, "--workers", 1)
    succeeds(*words, "--out", tmp_path / "a")
    again = succeeds(*words, "--out", tmp_path / "b").err
    assert "12 to train, 4 to test, kind logic, seed 3" in again
    for side, count in (("train", 12), ("test", 4)):
        files = [tmp_path / name / f"{side}.sudoku" for name in "ab"]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert len(load_puzzles(files[0]).puzzle) == count
    few = ("data", "sudoku", "--train", 2, "--test", 1, "--workers", 1, "--out", tmp_path / "a")
    told = refused(*few, folder=tmp_path / "a")
    assert "holds puzzles (train.sudoku, test.sudoku): use --overwrite or another --out" in told
    succeeds(*few, "--overwrite")
    assert len(load_puzzles(tmp_path / "a/train.sudoku").puzzle) == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [(["chess"], "chess"), (["sudoku", "--kind", "easy"], "easy"), (["sudoku", "--train", "0"], "train=0")],
)
def test_bad_requests_for_puzzles_are_one_line(words, named, tmp_path):
    assert named in refused("data", *words, "--out", tmp_path / "out", folder=tmp_path)


# Grids without clues


def test_whole_grids_are_made_once_each_and_split_by_symmetry(tmp_path):
    summary = make_puzzles(20, 5, "grid", 4, tmp_path, 1)
    train, test = (load_puzzles(tmp_path / f"{side}.sudoku") for side in ("train", "test"))
    assert (len(train), len(test)) == (20, 5)
    assert train.kind == test.kind == "grid"
    assert summary["logic_share"] is None
    for puzzles, tested in ((train, False), (test, True)):
        assert not puzzles.puzzle.any()
        assert bool(valid(torch.from_numpy(puzzles.solution.astype(np.int64))).all())
        assert all((engine.invariant(grid) % sudoku.TEST_SHARE == 0) is tested for grid in puzzles.solution)
    assert len({text(grid) for grid in (*train.solution, *test.solution)}) == 25
    make_puzzles(20, 5, "grid", 4, tmp_path / "again", 1)
    assert (tmp_path / "again/train.sudoku").read_bytes() == (tmp_path / "train.sudoku").read_bytes()


def test_a_grid_that_comes_twice_is_kept_once(tmp_path, minimal, monkeypatch):
    """All puzzles are equal, blank ones: it is the grids that must differ."""

    def repeat(unit: sudoku.Unit) -> sudoku.Drawn:
        assert unit.number < 5
        start = 6 if unit.test else 2 * max(unit.number - 1, 0)
        solution = minimal.solution[start : start + unit.size]
        return sudoku.Drawn(np.zeros_like(solution), solution, unit.size, 0)

    monkeypatch.setattr(sudoku, "draw_unit", repeat)
    monkeypatch.setattr(sudoku, "UNIT", 2)
    make_puzzles(4, 2, "grid", 0, tmp_path, 1)
    train, test = (load_puzzles(tmp_path / f"{side}.sudoku").solution for side in ("train", "test"))
    assert [text(row) for row in (*train, *test)] == [text(row) for row in minimal.solution[[0, 1, 2, 3, 6, 7]]]


def test_small_grids_without_clues_are_all_drawn(small_grids):
    drawn = draw_puzzles(4_000, "grid", 0, box=2)
    assert not drawn.puzzle.any()
    assert {text(grid) for grid in drawn.solution} == {text(grid) for grid in small_grids}


def test_boards_as_they_are_drawn_are_read(tmp_path):
    puzzles = draw_puzzles(3, "any", seed=5)
    boards = ["".join(map(str, row)) for row in puzzles.puzzle]
    spaced = "\n\n".join("\n".join(" ".join(b[9 * i : 9 * i + 9]) for i in range(9)) for b in boards)
    plain = "# three boards\n" + "\n".join("\n".join(b[9 * i : 9 * i + 9] for i in range(9)) for b in boards) + "\n"
    for number, content in enumerate((spaced, plain.replace("0", "."), plain.replace("\n", "\r\n"))):
        path = tmp_path / str(number)
        path.write_bytes(content.encode())
        assert (load_puzzles(path).puzzle == puzzles.puzzle).all()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("123456789\n" * 8, "8 lines of 9 characters: expected nine for each board"),
        (".........\n" * 8 + "....\n", "line 9: 4 characters: expected 9, as in the first line"),
        (".........\n" * 8 + "........x\n", "'x' at character 81"),
        ("11.......\n" + ".........\n" * 8, "line 1"),
    ],
)
def test_boards_that_are_drawn_wrongly_are_one_line(content, said, tmp_path):
    (tmp_path / "boards").write_text(content)
    with pytest.raises(InvalidInput, match=re.escape(said)):
        load_puzzles(tmp_path / "boards")
