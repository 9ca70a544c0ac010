"""Sudoku itself: solving, making and grading puzzles, what is equal up to symmetry, and 24 bytes per puzzle.

Numba compiles the functions marked `compiled` where it is installed; without it they run as they stand, some hundred
times slower, with the same results: integers stay below 2^63 and every random choice comes from a state that is passed in.

A puzzle is a row of digits, cell by cell, 0 for a blank. Inside, a cell's candidates are the bits of one integer.
"""

import hashlib
import importlib
import os
from typing import NamedTuple

import numpy as np


def find_compiler():
    """Numba's, or None. VMD_PLAIN_SUDOKU=1 does without it."""
    if os.environ.get("VMD_PLAIN_SUDOKU", "0") not in ("", "0"):
        return None
    try:
        return importlib.import_module("numba").njit
    except ImportError:  # not installed, or not made for this numpy
        return None


NJIT = find_compiler()
COMPILED = NJIT is not None


def compiled(function):
    if NJIT is None:
        return function
    try:
        return NJIT(cache=True)(function)
    except RuntimeError:  # no folder to keep the compiled code in
        return NJIT(function)


# Boards


class Board(NamedTuple):
    box: int  # 3 on a 9x9 board, 2 on a 4x4 board
    units: np.ndarray  # (3 side, side): the cells of each row, then of each column, then of each box
    unit_of: np.ndarray  # (cells, 3): the row, the column and the box of a cell, as units
    peers: np.ndarray  # (cells, peers): the cells that share a unit with a cell
    sees: np.ndarray  # (cells, cells) bool: whether two different cells share a unit


def make_board(box: int) -> Board:
    side = box * box
    cell = np.arange(side * side)
    row, column = cell // side, cell % side
    unit_of = np.stack([row, side + column, 2 * side + row // box * box + column // box], axis=1)
    units = np.array([np.flatnonzero((unit_of == unit).any(1)) for unit in range(3 * side)])
    sees = (unit_of[:, None] == unit_of[None]).any(-1) & (cell[:, None] != cell[None])
    peers = np.array([np.flatnonzero(others) for others in sees])
    return Board(box, units, unit_of, peers, sees)


BOARDS = {box**4: make_board(box) for box in (2, 3)}  # by number of cells
BOARD4, BOARD9 = BOARDS[16], BOARDS[81]
COUNT = np.array([mask.bit_count() for mask in range(512)])  # candidates in a mask
DIGITS_OF = np.zeros((512, 9), dtype=np.uint8)  # the digits of a mask, in order, then zeros
for _mask in range(512):
    DIGITS_OF[_mask, : COUNT[_mask]] = [digit for digit in range(1, 10) if _mask >> (digit - 1) & 1]


# Random numbers


def random_state(*numbers: int) -> np.ndarray:
    """Four 32-bit words that depend on all of the numbers."""
    digest = hashlib.blake2b(repr(tuple(map(int, numbers))).encode(), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u4").astype(np.int64)


@compiled
def draw_below(state, bound):
    """A number in 0..bound-1 by Marsaglia's xorshift128; the scaling's bias is below bound / 2^32."""
    t = state[0] ^ ((state[0] << 11) & 0xFFFFFFFF)
    state[0], state[1], state[2] = state[1], state[2], state[3]
    state[3] = state[3] ^ (state[3] >> 19) ^ t ^ (t >> 8)
    return (state[3] * bound) >> 32


@compiled
def shuffle(state, order):
    for last in range(order.shape[0] - 1, 0, -1):
        other = draw_below(state, last + 1)
        kept = order[last]
        order[last] = order[other]
        order[other] = kept


# Solving


@compiled
def place_clues(board, puzzle, candidates, queue):
    """Fill in the candidates, strike nothing yet; the clues' cells wait in the queue. Returns how many."""
    full = (1 << board.units.shape[1]) - 1
    waiting = 0
    for cell in range(puzzle.shape[0]):
        digit = int(puzzle[cell])
        candidates[cell] = full
        if digit:
            candidates[cell] = 1 << (digit - 1)
            queue[waiting] = cell
            waiting += 1
    return waiting


@compiled
def propagate(board, candidates, queue, waiting):
    """Naked and hidden singles until nothing changes. The queue holds settled cells whose peers do not know it yet.

    Returns False when a cell has no digit left or a unit has no cell left for a digit.
    """
    units, peers = board.units, board.peers
    side = units.shape[1]
    full = (1 << side) - 1
    while True:
        while waiting:
            waiting -= 1
            cell = queue[waiting]
            bit = candidates[cell]
            for i in range(peers.shape[1]):
                peer = peers[cell, i]
                mask = candidates[peer]
                if mask & bit:
                    mask ^= bit
                    if mask == 0:
                        return False
                    candidates[peer] = mask
                    if mask & (mask - 1) == 0:
                        queue[waiting] = peer
                        waiting += 1
        for unit in range(units.shape[0]):
            once, twice, settled = 0, 0, 0
            for i in range(side):
                mask = candidates[units[unit, i]]
                twice |= once & mask
                once |= mask
                if mask & (mask - 1) == 0:
                    settled |= mask
            if once != full:
                return False
            hidden = once & ~twice & ~settled
            if hidden:
                for i in range(side):
                    cell = units[unit, i]
                    mask = candidates[cell] & hidden
                    if mask & (mask - 1):
                        return False  # two digits have this cell alone
                    if mask:
                        candidates[cell] = mask
                        queue[waiting] = cell
                        waiting += 1
        if waiting == 0:
            return True


@compiled
def most_constrained(candidates):
    """The first open cell with the fewest candidates; -1 when all are settled."""
    best, fewest = -1, 10
    for cell in range(candidates.shape[0]):
        count = COUNT[candidates[cell]]
        if 1 < count < fewest:
            best, fewest = cell, count
            if count == 2:
                break
    return best


@compiled
def search(board, puzzle, barred_cell, barred_digit, found, limit, guesses=2**62):
    """The number of solutions, at most `limit`; the first of them are written to `found` while it has rows. -1: not decided.

    Only those count that do not have the barred digit in the barred cell, a blank; -1: no cell is barred.
    """
    cells = puzzle.shape[0]
    stack = np.empty((cells + 1, cells), np.int64)  # candidates, one row per guess
    guessed = np.empty(cells, np.int64)  # the cell of each guess, and the digits it has left to try
    left = np.empty(cells, np.int64)
    queue = np.empty(2 * cells, np.int64)
    waiting = place_clues(board, puzzle, stack[0], queue)
    if barred_cell >= 0:
        stack[0, barred_cell] &= ~(1 << (barred_digit - 1))
    if not propagate(board, stack[0], queue, waiting):
        return 0
    count, level = 0, 0
    while level >= 0:
        cell = most_constrained(stack[level])
        if cell >= 0:
            guessed[level], left[level] = cell, stack[level, cell]
        else:
            if count < found.shape[0]:
                for i in range(cells):
                    found[count, i] = DIGITS_OF[stack[level, i], 0]
            count += 1
            if count >= limit:
                return count
            level -= 1
        while level >= 0:  # the next guess that is not refuted at once
            if left[level] == 0:
                level -= 1
                continue
            if guesses == 0:
                return -1
            guesses -= 1
            bit = left[level] & -left[level]
            left[level] ^= bit
            cell = guessed[level]
            for i in range(cells):
                stack[level + 1, i] = stack[level, i]
            stack[level + 1, cell] = bit
            queue[0] = cell
            if propagate(board, stack[level + 1], queue, 1):
                level += 1
                break
    return count


def solve(puzzle: np.ndarray, limit: int = 2) -> np.ndarray:
    """(k, cells): all solutions if there are fewer than `limit`, else the first `limit` that the search meets."""
    puzzle = np.array(puzzle, dtype=np.uint8)  # a copy: numba compiles anew for arrays that cannot be written
    found = np.zeros((limit, len(puzzle)), dtype=np.uint8)
    return found[: search(BOARDS[len(puzzle)], puzzle, -1, 0, found, limit)]


PATIENCE = 10_000_000 if COMPILED else 2_000  # guesses: some seconds


def solvable(puzzle: np.ndarray) -> bool | None:
    """Whether there is a solution; None if that takes too long to say."""
    puzzle = np.array(puzzle, dtype=np.uint8)
    none = np.zeros((0, len(puzzle)), dtype=np.uint8)
    count = search(BOARDS[len(puzzle)], puzzle, -1, 0, none, 1, PATIENCE)
    return None if count < 0 else count > 0


def clashing(grid: np.ndarray) -> np.ndarray:
    """(cells,) bool: digits that stand more than once in a row, a column or a box; blanks (0) do not clash."""
    digits = np.asarray(grid)
    clash = np.zeros(len(digits), dtype=bool)
    for unit in BOARDS[len(digits)].units:
        here = digits[unit]
        clash[unit] |= (here > 0) & ((here[:, None] == here).sum(1) > 1)
    return clash


# Making puzzles


@compiled
def random_grid(board, state, grid):
    """A full grid: guess a random candidate of a random cell among the most constrained, propagate, and so on.

    A contradiction starts it all over. The law: every grid can come, with probability proportional to the sum, over the
    ways to guess it, of prod 1/(cells to choose from x candidates). Nothing here tells one digit, row or column from
    another, so grids that are equal up to symmetry are equally likely; it is not uniform from one class to the next.
    Returns log prod candidates and the number of starts: the mean of the product over all starts is the number of grids.
    """
    cells = grid.shape[0]
    candidates, queue = np.empty(cells, np.int64), np.empty(2 * cells, np.int64)
    starts = 0
    while True:
        starts += 1
        for cell in range(cells):
            candidates[cell] = (1 << board.units.shape[1]) - 1
        log_weight, consistent = 0.0, True
        while consistent:
            chosen, fewest, ties = -1, 10, 0
            for cell in range(cells):
                count = COUNT[candidates[cell]]
                if 1 < count <= fewest:
                    if count < fewest:
                        fewest, ties = count, 0
                    ties += 1
                    if draw_below(state, ties) == 0:
                        chosen = cell
            if chosen < 0:
                for cell in range(cells):
                    grid[cell] = DIGITS_OF[candidates[cell], 0]
                return log_weight, starts
            log_weight += np.log(fewest)
            mask = candidates[chosen]
            for _ in range(draw_below(state, fewest)):
                mask &= mask - 1
            candidates[chosen] = mask & -mask
            queue[0] = chosen
            consistent = propagate(board, candidates, queue, 1)


@compiled
def remove_clues(board, state, puzzle, most):
    """Blank cells of a full grid, in random order, each that leaves at most `most` solutions. Returns how many there are.

    Every cell is tried once: what could not go then cannot go later, for with fewer clues there are only more solutions.
    """
    cells = puzzle.shape[0]
    none = np.empty((0, cells), np.uint8)
    order = np.arange(cells)
    shuffle(state, order)
    count = 1
    for i in range(cells):
        cell = order[i]
        digit = np.int64(puzzle[cell])
        puzzle[cell] = 0
        more = search(board, puzzle, cell, digit, none, most - count + 1)  # the old ones all have this digit here
        if count + more <= most:
            count += more
        else:
            puzzle[cell] = digit
    return count


@compiled
def random_puzzle(board, state, low, high, puzzle):
    """Turn a full grid into a puzzle with `low` to `high` solutions, of which no clue can go; 1, 1: a minimal puzzle.

    The most that are allowed is uniform in low..high, so that few solutions are as welcome as many. Returns how many there
    are, or 0 if it came out with fewer than `low`: then draw another grid.
    """
    count = remove_clues(board, state, puzzle, low + draw_below(state, high - low + 1))
    return count if count >= low else 0


# Grading

STRATEGIES = (
    "lone single",
    "hidden single",
    "naked pair",
    "naked triplet",
    "locked candidate",
    "XY-wing",
    "unique rectangle",
)


@compiled
def strike(candidates, cell, mask):
    """Take candidates from a cell; True if it had any of them."""
    had = candidates[cell] & mask
    candidates[cell] ^= had
    return had != 0


@compiled
def lone_single(board, candidates, placed):
    """A cell with one candidate: place it."""
    changed = False
    for cell in range(candidates.shape[0]):
        if not placed[cell] and COUNT[candidates[cell]] == 1:
            placed[cell] = changed = True
            for i in range(board.peers.shape[1]):
                strike(candidates, board.peers[cell, i], candidates[cell])
    return changed


@compiled
def hidden_single(board, candidates):
    """A digit with one cell in a unit: nothing else goes there."""
    changed = False
    for unit in range(board.units.shape[0]):
        once, twice = 0, 0
        for i in range(board.units.shape[1]):
            mask = candidates[board.units[unit, i]]
            twice |= once & mask
            once |= mask
        for i in range(board.units.shape[1]):
            cell = board.units[unit, i]
            mask = candidates[cell] & once & ~twice
            if mask and strike(candidates, cell, ~mask):
                changed = True
    return changed


@compiled
def strike_others(board, candidates, unit, mask):
    """Take the digits from the cells of a unit that could hold another one, too."""
    changed = False
    for i in range(board.units.shape[1]):
        cell = board.units[unit, i]
        if candidates[cell] & ~mask and strike(candidates, cell, mask):
            changed = True
    return changed


@compiled
def naked_pair(board, candidates):
    """Two cells of a unit with the same two candidates: no other cell of it has them."""
    changed = False
    for unit in range(board.units.shape[0]):
        for i in range(board.units.shape[1]):
            mask = candidates[board.units[unit, i]]
            if COUNT[mask] == 2:
                for j in range(i):
                    if candidates[board.units[unit, j]] == mask and strike_others(board, candidates, unit, mask):
                        changed = True
    return changed


@compiled
def naked_triplet(board, candidates):
    """Three cells of a unit with three candidates between them: no other cell of it has them."""
    changed = False
    for unit in range(board.units.shape[0]):
        for i in range(board.units.shape[1]):
            first = candidates[board.units[unit, i]]
            if not 2 <= COUNT[first] <= 3:
                continue
            for j in range(i):
                second = candidates[board.units[unit, j]]
                if COUNT[second] < 2 or COUNT[first | second] > 3:
                    continue
                for k in range(j):
                    third = candidates[board.units[unit, k]]
                    mask = first | second | third
                    if COUNT[third] > 1 and COUNT[mask] == 3 and strike_others(board, candidates, unit, mask):
                        changed = True
    return changed


@compiled
def locked_candidate(board, candidates):
    """Where a box and a line cross: a digit that is nowhere else in the one cannot be elsewhere in the other."""
    side = board.units.shape[1]
    changed = False
    for box in range(2 * side, 3 * side):
        for line in range(2 * side):
            axis = line // side
            crossing, box_rest, line_rest = 0, 0, 0
            for i in range(side):
                cell = board.units[box, i]
                if board.unit_of[cell, axis] == line:
                    crossing |= candidates[cell]
                else:
                    box_rest |= candidates[cell]
                if board.unit_of[board.units[line, i], 2] != box:
                    line_rest |= candidates[board.units[line, i]]
            pointing, claiming = crossing & ~box_rest & line_rest, crossing & ~line_rest & box_rest
            if pointing or claiming:
                changed = True
                for i in range(side):
                    if board.unit_of[board.units[line, i], 2] != box:
                        strike(candidates, board.units[line, i], pointing)
                    if board.unit_of[board.units[box, i], axis] != line:
                        strike(candidates, board.units[box, i], claiming)
    return changed


@compiled
def xy_wing(board, candidates):
    """A cell {x, y} that sees a cell {x, z} and a cell {y, z}: one of the two is z, so no cell that sees both is."""
    changed = False
    for pivot in range(candidates.shape[0]):
        if COUNT[candidates[pivot]] != 2:
            continue
        for i in range(board.peers.shape[1]):
            one = board.peers[pivot, i]
            if COUNT[candidates[one]] != 2:
                continue
            for j in range(i):
                other = board.peers[pivot, j]
                z = candidates[one] & candidates[other]
                wing = candidates[one] ^ candidates[other] == candidates[pivot]
                if COUNT[z] == 1 and wing:  # then the other has two candidates, too
                    for cell in range(candidates.shape[0]):
                        if board.sees[one, cell] and board.sees[other, cell] and strike(candidates, cell, z):
                            changed = True
    return changed


@compiled
def unique_rectangle(board, candidates):
    """Type 1: four cells in two rows, two columns and two boxes, three of them {x, y}: the fourth is neither.

    Else the two digits could change places, and the puzzle, taken to have one solution, would have two.
    """
    side, box = board.units.shape[1], board.box
    corners = np.empty(4, np.int64)
    changed = False
    for top in range(side):
        for bottom in range(top + 1, side):
            for left in range(side):
                for right in range(left + 1, side):
                    if (top // box == bottom // box) == (left // box == right // box):
                        continue
                    corners[0], corners[1] = top * side + left, top * side + right
                    corners[2], corners[3] = bottom * side + left, bottom * side + right
                    for fourth in range(4):
                        mask = candidates[corners[(fourth + 1) % 4]]
                        if (
                            COUNT[mask] == 2
                            and candidates[corners[(fourth + 2) % 4]] == mask
                            and candidates[corners[(fourth + 3) % 4]] == mask
                            and candidates[corners[fourth]] != mask
                            and COUNT[candidates[corners[fourth]]] > 1  # a settled cell may be a clue
                            and strike(candidates, corners[fourth], mask)
                        ):
                            changed = True
    return changed


@compiled
def apply_strategy(board, strategy, candidates, placed):
    """One round of one of the STRATEGIES over the whole board; True if it changed anything."""
    if strategy == 0:
        return lone_single(board, candidates, placed)
    if strategy == 1:
        return hidden_single(board, candidates)
    if strategy == 2:
        return naked_pair(board, candidates)
    if strategy == 3:
        return naked_triplet(board, candidates)
    if strategy == 4:
        return locked_candidate(board, candidates)
    if strategy == 5:
        return xy_wing(board, candidates)
    return unique_rectangle(board, candidates)


@compiled
def apply_strategies(board, puzzle, candidates):
    """Always the easiest strategy that does anything. Returns the hardest one used, -1 if none was; fills in candidates."""
    placed = np.zeros(puzzle.shape[0], np.bool_)
    clues = np.empty(puzzle.shape[0], np.int64)
    for i in range(place_clues(board, puzzle, candidates, clues)):
        placed[clues[i]] = True
        for j in range(board.peers.shape[1]):
            strike(candidates, board.peers[clues[i], j], candidates[clues[i]])
    hardest, strategy = -1, 0
    while strategy < 7:
        if apply_strategy(board, strategy, candidates, placed):
            hardest, strategy = max(hardest, strategy), 0
        else:
            strategy += 1
    return hardest


class Grade(NamedTuple):
    solved: bool  # by the STRATEGIES alone
    hardest: int  # index of the hardest strategy used; -1: none
    grid: np.ndarray  # (cells,) uint8: the digits found, 0 where more than one is left


def grade(puzzle: np.ndarray) -> Grade:
    """What the seven strategies make of a puzzle that has one solution. The last of them takes that for granted."""
    puzzle = np.array(puzzle, dtype=np.uint8)  # a copy: numba compiles anew for arrays that cannot be written
    board, candidates = BOARDS[len(puzzle)], np.empty(len(puzzle), dtype=np.int64)
    hardest = int(apply_strategies(board, puzzle, candidates))
    grid = np.where(COUNT[candidates] == 1, DIGITS_OF[candidates, 0], 0)
    complete = (np.bitwise_or.reduce(candidates[board.units], axis=1) == 2 ** board.units.shape[1] - 1).all()
    return Grade(bool(complete and (grid > 0).all()), hardest, grid)


# What does not change under symmetry


@compiled
def cycle_types(board, grid, types):
    """For two rows of a band: the cycle type of the permutation that takes each digit to the one in the same column.

    Fills in types[0, band, pair] with the sum of the squared lengths of its cycles, which differs from type to type, and
    types[1, stack, pair] for the columns.
    """
    side, box = board.units.shape[1], board.box
    follower = np.empty(side + 1, np.int64)
    for axis in range(2):
        for band in range(box):
            pair = 0
            for i in range(box):
                for j in range(i):
                    first, second = axis * side + band * box + i, axis * side + band * box + j
                    for k in range(side):
                        follower[int(grid[board.units[first, k]])] = int(grid[board.units[second, k]])
                    total = 0
                    for digit in range(1, side + 1):
                        length, at = 0, digit
                        while follower[at] > 0:
                            after = follower[at]
                            follower[at] = 0  # been there
                            length, at = length + 1, after
                        total += length * length
                    types[axis, band, pair] = total
                    pair += 1


def invariant(grid: np.ndarray) -> int:
    """64 bits that are equal for full grids that are equal up to digits, bands, stacks, rows, columns and transposition.

    Relabelling the digits conjugates the permutations, other moves of the columns leave them as they are, and swapping two
    rows inverts one: the cycle types stay, in another order. Different grids may share it.
    """
    grid = np.array(grid, dtype=np.uint8)
    board = BOARDS[len(grid)]
    types = np.empty((2, board.box, board.box * (board.box - 1) // 2), dtype=np.int64)
    cycle_types(board, grid, types)
    sides = sorted(sorted(sorted(band) for band in side) for side in types.tolist())
    return int.from_bytes(hashlib.blake2b(repr(sides).encode(), digest_size=8).digest(), "little")


# A 9x9 puzzle and its solution in 24 bytes: 81 bits for where the clues are, 111 for the solution, cell by cell as the
# rank of its digit among those not yet used in its row, column and box. Every grid fits: a cell has at most 9 less the
# cells before it in its row, or its column, or its box, and the product of these bounds is below 2^104.

RECORD = 24
LOW_BITS = 56  # of two limbs: times 9 they stay below 2^63
HIGH_BITS = 111 - LOW_BITS
CHUNK = 2**15  # puzzles at a time, to bound memory


def pack(puzzle: np.ndarray, solution: np.ndarray) -> np.ndarray:
    """(n, 81) puzzles and their solutions, which must be valid -> (n, 24) bytes."""
    records = np.zeros((len(puzzle), RECORD), dtype=np.uint8)
    for start in range(0, len(puzzle), CHUNK):
        part = slice(start, start + CHUNK)
        records[part] = _pack(puzzle[part], solution[part].astype(np.int64))
    return records


def _pack(puzzle: np.ndarray, solution: np.ndarray) -> np.ndarray:
    count = len(puzzle)
    used = np.zeros((27, count), dtype=np.int64)
    radix, rank = np.empty((81, count), dtype=np.int64), np.empty((81, count), dtype=np.int64)
    for cell, units in enumerate(BOARD9.unit_of):
        bit = 1 << (solution[:, cell] - 1)
        free = 511 & ~(used[units[0]] | used[units[1]] | used[units[2]])
        radix[cell], rank[cell] = COUNT[free], COUNT[free & (bit - 1)]
        used[units] |= bit
    low, high = np.zeros((2, count), dtype=np.int64)
    for cell in reversed(range(81)):  # so that reading begins with the first cell, whose radix is known
        low = low * radix[cell] + rank[cell]
        high = high * radix[cell] + (low >> LOW_BITS)
        low &= 2**LOW_BITS - 1
    bits = np.concatenate([puzzle > 0, _bits(low, LOW_BITS), _bits(high, HIGH_BITS)], axis=1)
    return np.packbits(bits, axis=1, bitorder="little")


def _bits(numbers: np.ndarray, count: int) -> np.ndarray:
    return (numbers[:, None] >> np.arange(count) & 1).astype(bool)


def unpack(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, 24) bytes -> (n, 81) puzzles and solutions. Bytes that `pack` did not write may give grids that are not valid."""
    puzzle, solution = np.zeros((2, len(records), 81), dtype=np.uint8)
    for start in range(0, len(records), CHUNK):
        part = slice(start, start + CHUNK)
        puzzle[part], solution[part] = _unpack(records[part])
    return puzzle, solution


def _unpack(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = np.unpackbits(records, axis=1, bitorder="little")
    low = bits[:, 81 : 81 + LOW_BITS].astype(np.int64) @ (1 << np.arange(LOW_BITS))
    high = bits[:, 81 + LOW_BITS :].astype(np.int64) @ (1 << np.arange(HIGH_BITS))
    used = np.zeros((27, len(records)), dtype=np.int64)
    solution = np.empty((len(records), 81), dtype=np.uint8)
    for cell, units in enumerate(BOARD9.unit_of):
        free = 511 & ~(used[units[0]] | used[units[1]] | used[units[2]])
        radix = np.maximum(COUNT[free], 1)  # 0 only in damaged records, which end up with a blank
        low += (high % radix) << LOW_BITS
        high //= radix
        solution[:, cell] = DIGITS_OF[free, low % radix]
        low //= radix
        used[units] |= (1 << solution[:, cell].astype(np.int64)) >> 1
    return bits[:, :81] * solution, solution
