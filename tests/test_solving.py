"""Puzzles solved by models that know the answer, by some that know it now and then, and by some that know nothing."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from command import refused, succeeds, vmd
from helpers import NO_LATENT, codes, latent, learned_prior, tiny_config
from vmd import solving
from vmd.board_figures import animate_board, board_frames, draw_board
from vmd.config import InvalidInput, ModelConfig, RunConfig, from_dict
from vmd.data import sudoku_engine as engine
from vmd.data.sudoku import draw_puzzles, in_test, random_symmetry, valid
from vmd.model import VMD
from vmd.plotting import pyplot
from vmd.predictor import Predictor
from vmd.presets import preset
from vmd.solving import broken_rule, parse_puzzle, solve_puzzles

KINDS = {"none": NO_LATENT, "gaussian": latent(), "learned": learned_prior(), "codes": codes(8), "layered": codes(layers=1)}
GRIDS = torch.from_numpy(engine.solve(np.zeros(16, dtype=np.uint8), limit=288)).long()  # all 4x4 boards
SMALL, LARGE = draw_puzzles(24, "any", 0, box=2), draw_puzzles(3, "any", 0)
PUZZLE, SOLUTION = (torch.from_numpy(x).long() for x in (SMALL.puzzle, SMALL.solution))
seeds, early_or_not = st.integers(0, 2**32), pytest.mark.parametrize("early", [True, False])


def untrained(z=NO_LATENT, cells: int = 16, kind=VMD) -> VMD:
    side = round(cells**0.5)
    return kind(ModelConfig(side, cells, cells, layers=2, width=16, heads=2, board=True, latent=z), seed=3)


class Oracle(VMD):
    """Sure of the solution, or of something else where `wrong` says so of the boards it sees."""

    def predictor(self, batch, **options):
        return SimpleNamespace(predict=self.predict)

    def predict(self, canvas: Tensor, block, z, noise=None) -> Tensor:
        side, boards = self.mask_id, (torch.where(canvas == self.mask_id, -1, canvas) + 1).numpy()
        found = [next(iter(engine.solve(board, limit=1)), np.ones_like(board)) for board in boards]
        wrong = torch.as_tensor(self.wrong(canvas)).view(-1, 1).expand_as(canvas)
        self.seen.append(len(canvas))
        return 30 * torch.nn.functional.one_hot((torch.tensor(np.array(found)) - 1 + wrong).long() % side, side).float()


def oracle(wrong=lambda canvas: False, cells: int = 16) -> Oracle:
    model = untrained(cells=cells, kind=Oracle)
    model.wrong, model.seen = wrong, []
    return model


def unless_it_begins_with_one(canvas: Tensor) -> Tensor:
    """A view in four is understood. In the others the first step spoils the board."""
    first = canvas.gather(1, (canvas < 4).int().argmax(1, keepdim=True))[:, 0]
    return (first > 0) & ((canvas == 4).sum(1) > 9)


def units(grid: Tensor) -> dict[str, Tensor]:
    board = grid.view(4, 4)
    return {"row": board, "column": board.T, "box": board.view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)}


def obeys(grid: Tensor, puzzle: Tensor) -> bool:
    """Rules and clues, written down again."""
    rules = all(sorted(unit.tolist()) == [1, 2, 3, 4] for kind in units(grid).values() for unit in kind)
    return rules and all(clue in (0, digit) for clue, digit in zip(puzzle.tolist(), grid.tolist(), strict=True))


def nearly_full(count: int, most: int = 5) -> Tensor:
    """Grids with 1 to `most` blanks, which a model may well guess."""
    draw = torch.Generator().manual_seed(0)
    blank = torch.rand(count, 16, generator=draw).argsort(-1) <= torch.arange(count).unsqueeze(1) % most
    return GRIDS[torch.randint(288, (count,), generator=draw)].masked_fill(blank, 0)


def text(digits) -> str:
    return "".join(map(str, digits.tolist()))


# Solving


@given(seed=seeds, cells=st.sampled_from([16, 81]), between=st.sampled_from([(), (2,), (3, 2)]))
def test_a_symmetry_can_be_undone(seed, cells, between):
    draw = torch.Generator().manual_seed(seed)
    view = random_symmetry(5, cells, generator=draw)
    grids = torch.randint(round(cells**0.5) + 1, (5, *between, cells), generator=draw)
    assert torch.equal(view.undo(view.apply(grids)), grids)
    assert torch.equal((view.apply(grids) == 0).sum(-1), (grids == 0).sum(-1))
    moved = random_symmetry(24, 16, generator=draw).apply(torch.stack([PUZZLE, SOLUTION], 1))
    assert all(engine.solve(p.numpy()).tolist() == [s.tolist()] for p, s in moved)


@early_or_not
@pytest.mark.parametrize("puzzles", [SMALL, LARGE])
def test_one_who_knows_solves_all_in_one_evaluation(puzzles, early):
    puzzle = np.concatenate([puzzles.puzzle, puzzles.solution[:1]])  # the last leaves nothing to write
    found = solve_puzzles(oracle(cells=puzzle.shape[1]), torch.from_numpy(puzzle), steps=5, early=early, tries=4)
    assert found.right.all()
    assert found.grids.tolist() == [*puzzles.solution.tolist(), puzzles.solution[0].tolist()]
    assert set(found.evaluations.tolist()) == {1 if early else 5}
    assert set(found.tries.tolist()) == {1}


@early_or_not
@pytest.mark.parametrize("z", KINDS.values(), ids=KINDS)
def test_right_means_by_the_rules_with_the_clues_kept(z, early):
    puzzle, model = torch.cat([nearly_full(100), PUZZLE]), untrained(z).train()
    found, first = (solve_puzzles(model, puzzle, steps=4, tries=tries, early=early) for tries in (3, 1))
    assert model.training
    assert found.right.tolist() == [obeys(g, p) for g, p in zip(found.grids, puzzle, strict=True)]
    assert 0 < int(first.right.sum()) < int(found.right.sum()) < 110
    assert (((found.grids == puzzle) | (puzzle == 0)) & (found.grids >= 1) & (found.grids <= 4)).all()
    assert (found.evaluations <= 4 * found.tries).all()
    assert (found.evaluations[~found.right] == 12).all()
    assert (found.tries[~found.right] == 3).all()
    assert torch.equal(found.tries == 1, first.right)
    same = ~found.right | first.right  # what was not solved is as the first try left it
    assert torch.equal(found.grids[same], first.grids[same])


@early_or_not
@pytest.mark.parametrize("batch_size", [1, 7, 256])
def test_rows_that_are_solved_stop_and_the_others_are_seen_otherwise(batch_size, early):
    model, done = oracle(unless_it_begins_with_one), []
    options = {"steps": 4, "tries": 6, "early": early, "seed": 2, "batch_size": batch_size}
    found = solve_puzzles(model, PUZZLE, on_rows=done.append, **options)
    assert torch.equal(found.evaluations, 4 * found.tries - (3 * found.right if early else 0))
    assert sum(model.seen) == int(found.evaluations.sum())
    assert max(model.seen) == min(batch_size, 24)
    assert torch.equal(found.tries == 1, ~unless_it_begins_with_one(torch.where(PUZZLE > 0, PUZZLE - 1, 4)))
    assert len(found.tries[found.right].unique()) > 3
    assert torch.equal(found.right, (found.grids == SOLUTION).all(1))
    assert done == sorted(done)
    assert (done[-(-24 // batch_size) - 1], done[-1]) == (int((found.tries == 1).sum()), 24)


@pytest.mark.parametrize("how", [{"order": "random"}, {"rule": "sample"}, {"revise": True}], ids=str)
@pytest.mark.parametrize("z", KINDS.values(), ids=KINDS)
def test_stopping_early_changes_nothing_for_the_others(z, how, monkeypatch):
    model, puzzle, predict, latents = untrained(z), torch.cat([nearly_full(60), PUZZLE]), Predictor.predict, []
    soon, late = (solve_puzzles(model, puzzle, steps=4, early=early, **how) for early in (True, False))
    monkeypatch.setattr(Predictor, "predict", lambda *args: (predict(*args), latents.append(args[3]))[0])
    solve_puzzles(model, puzzle, steps=4, tries=2, early=False, **how)
    assert soon.right[late.right].all()
    assert 0 < int(soon.right.sum()) < 84
    assert torch.equal(soon.grids[~soon.right], late.grids[~soon.right])
    if z.kind != "none":  # in the second try drawn once, for each row
        assert len(latents) == 8
        assert all(torch.equal(x, latents[4]) for x in latents[4:])
        assert len(latents[4].unique()) > 1


def test_batches_change_nothing_where_there_is_no_chance():
    puzzle, model = torch.cat([nearly_full(40), PUZZLE]), untrained()
    whole, *others = (solve_puzzles(model, puzzle, steps=6, batch_size=size) for size in (256, 5, 1))
    assert all(torch.equal(a, b) for part in others for a, b in zip(part, whole, strict=True))
    assert [len(part) for part in solve_puzzles(model, puzzle[:0], steps=6)] == [0, 0, 0, 0]


@pytest.mark.parametrize("rule", ["argmax", "sample"])
@pytest.mark.parametrize("order", ["random", "prob", "margin", "entropy", "prob revise", "margin revise", "entropy revise"])
def test_steps_are_shown_as_the_puzzle_stands(order, rule):
    puzzle, frames = PUZZLE[0], []
    how = {"order": order.split()[0], "rule": rule, "revise": "revise" in order, "early": False, "steps": 4, "tries": 3}
    for model in (oracle(lambda canvas: True), untrained(latent()), oracle()):
        solve_puzzles(model, PUZZLE[:1], on_step=lambda attempt, frame: frames.append((attempt, frame)), **how)
    assert [attempt for attempt, _ in frames] == 2 * [*[0] * 4, *[1] * 4, *[2] * 4] + [0] * 4
    blanks, canvas = int((puzzle == 0).sum()), puzzle
    for number, (_, frame) in enumerate(frames):
        before = canvas if number % 4 else puzzle
        canvas, guess, score, masked = (part[0] for part in frame)
        assert torch.equal(masked, before == 0)
        assert all(torch.equal(x[puzzle > 0], puzzle[puzzle > 0]) for x in (canvas, guess))
        assert torch.equal(canvas[canvas > 0], guess[canvas > 0])
        assert int((canvas == 0).sum()) == blanks - -(-(number % 4 + 1) * blanks // 4)
        assert (score[masked] > -torch.inf).all()
    assert torch.equal(canvas, SOLUTION[0])


@pytest.mark.parametrize("revise", [True, False])
def test_only_who_revises_gets_over_a_wrong_beginning(revise):
    clues = torch.where(PUZZLE[:1] > 0, PUZZLE[:1] - 1, 4)
    model = oracle(lambda canvas: not model.seen)
    model.predict = lambda canvas, *rest: Oracle.predict(model, clues, *rest)
    assert solve_puzzles(model, PUZZLE[:1], steps=6, revise=revise).right.tolist() == [revise]


def test_one_who_knows_nothing_draws_any_digit():
    model, puzzle = untrained(), nearly_full(400, most=1)
    with torch.no_grad():
        model.decoder.head.weight.zero_()
    found, again, other = (solve_puzzles(model, puzzle, steps=1, rule="sample", tries=2, seed=s) for s in (0, 0, 1))
    assert 70 < int((found.tries == 1).sum()) < 130  # a quarter
    assert 135 < int(found.right.sum()) < 215  # 7 in 16
    assert torch.equal(found.grids, again.grids)
    assert not torch.equal(found.grids, other.grids)


@pytest.mark.parametrize("shape", [(16, 4, 4), (16, 16, 2), (9, 9, 3)])
def test_only_models_of_whole_boards_are_asked(shape):
    with pytest.raises(InvalidInput, match="expected one of whole Sudoku boards"):
        solve_puzzles(VMD(tiny_config(*shape)), PUZZLE, steps=4)


@pytest.mark.parametrize("puzzle", [PUZZLE[0], PUZZLE[:, :9], PUZZLE + 4, PUZZLE - 1], ids=["flat", "short", "high", "low"])
def test_only_boards_are_solved(puzzle):
    with pytest.raises(InvalidInput, match=r"expected \(n, 16\)|expected 16|expected digits 1 to 4"):
        solve_puzzles(untrained(), puzzle, steps=4)


# Words


@given(st.sampled_from(GRIDS.tolist()), st.dictionaries(st.integers(0, 15), st.integers(1, 4), max_size=3), st.data())
@settings(max_examples=300)
def test_what_is_broken_is_named(grid, changes, data):
    grid = torch.tensor(grid)
    puzzle = torch.where(torch.tensor(data.draw(st.lists(st.booleans(), min_size=16, max_size=16))), grid, 0)
    if data.draw(st.booleans()):  # only rules are broken
        puzzle[list(changes)] = 0
    grid[list(changes)] = torch.tensor(list(changes.values()), dtype=torch.long)
    said = broken_rule(grid, puzzle)
    assert (said == "") == obeys(grid, puzzle) == bool(valid(grid) & ((puzzle == 0) | (grid == puzzle)).all())
    if "clue" in said:
        clue, row, column = map(int, re.findall(r"\d", said))
        assert puzzle.view(4, 4)[row - 1, column - 1] == clue != grid.view(4, 4)[row - 1, column - 1]
    elif said:
        digit, times, unit, number = re.fullmatch(r"(\d) stands (\d) times in (row|column|box) (\d)", said).groups()
        assert int((units(grid)[unit][int(number) - 1] == int(digit)).sum()) == int(times) > 1


@given(st.sampled_from(PUZZLE.tolist()), st.lists(st.sampled_from("._0"), min_size=16, max_size=16), seeds)
def test_puzzles_are_read_in_any_spelling(row, blanks, space):
    words = [str(digit) if digit else blank for digit, blank in zip(row, blanks, strict=True)]
    spelled = "".join(word + ["", " ", "\n", "\t "][space >> 2 * i & 3] for i, word in enumerate(words))
    assert parse_puzzle(spelled, 16).tolist() == [row]


@pytest.mark.parametrize(
    ("puzzle", "words"),
    [
        ("", "0 characters: expected the 16 cells"),
        ("a\nb" * 200, "400 characters: expected the 16 cells"),
        ("..5" + "." * 13, "'5' at character 3 of the puzzle: expected 1 to 4"),
        ("." * 15 + "²", "'²' at character 16"),
        ("1..1" + "." * 12, "1 twice in row 1"),
        ("3....3.." + "." * 8, "3 twice in box 1"),
    ],
)
def test_what_is_no_puzzle_is_refused(puzzle, words):
    with pytest.raises(InvalidInput, match=re.escape(words)) as told:
        parse_puzzle(puzzle, 16)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 150


# The command

LINE = text(SMALL.puzzle[0])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Models that know nothing of small boards, of whole ones and of boards at all; and puzzles."""
    monkeypatch.chdir(tmp_path)
    untrained().save_pretrained("small")
    untrained(cells=81).save_pretrained("large")
    VMD(tiny_config(16, 16, 2)).save_pretrained("other")
    lines = [f"{text(p)} {text(s)}\n" for p, s in zip(LARGE.puzzle, LARGE.solution, strict=True)]
    (tmp_path / "puzzles").write_text("".join(lines))
    return tmp_path


def solve(what, *words, model="small"):
    return ("solve", what, "--model", model, "--device", "cpu", "--steps", 4, *words)


def load(monkeypatch, model: VMD) -> None:
    """Make the command load this one."""
    monkeypatch.setattr(VMD, "from_pretrained", lambda *where, **device: model)


def test_one_puzzle_and_its_exit_codes(folder):
    done = succeeds(*solve(text(SMALL.solution[0])))
    assert "solved with 1 evaluation in 1 try" in done.out
    done = vmd(*solve(LINE, "--tries", 2))
    assert (done.code, done.err) == (1, "")
    assert re.search(r"NOT solved with 8 evaluations in 2 tries, .*: \d stands \d times in \w+ \d\n", done.out)
    nothing_fits = "123....4" + "." * 8
    assert "has no solution" in refused(*solve(nothing_fits, "--tries", 1), folder=folder)


def test_a_file_of_puzzles_gives_a_table_and_lines(folder, monkeypatch, capsys):
    words, out = solve("puzzles", "--out", "grids", "--batch", 2, "--tries", 2, model="large"), folder / "grids"
    done = vmd(*words)
    assert done.code == 1
    assert re.search(r"solved, by the rules[ |]+0 of 3[ |]+0.00 %", done.out)
    assert re.search(r"evaluations per puzzle[ |]+8.0[ |]+at most 8", done.out)
    assert out.read_text() == 3 * ("0" * 81 + "\n")
    load(monkeypatch, oracle(cells=81))
    done = succeeds(*words)
    assert re.search(r"solved, by the rules[ |]+3 of 3[ |]+100.00 %", done.out)
    assert re.search(r"as the solution given[ |]+3 of 3", done.out)
    assert out.read_text().split() == [text(s) for s in LARGE.solution]
    assert "as the solution given" not in succeeds(*solve("grids")).out
    options = {"steps": 4, "order": "prob", "tries": 30}
    assert solving.solve_file(oracle(unless_it_begins_with_one), SMALL, 64, None, options)
    first = int((~unless_it_begins_with_one(torch.where(PUZZLE > 0, PUZZLE - 1, 4))).sum())
    assert re.search(rf"in the first try[ |]+{first} of 24", capsys.readouterr().out)


def test_boards_of_a_short_file_are_shown_where_no_file_is_to_hold_them(folder, monkeypatch):
    load(monkeypatch, oracle(cells=81))
    done = succeeds(*solve("puzzles", model="large"))
    boards = re.sub(r"\D", "", done.out.split("of the puzzles")[0])
    assert boards == "".join(text(s) for s in LARGE.solution)
    monkeypatch.setattr(solving, "SHOWN", 2)
    done = succeeds(*solve("puzzles", model="large"))
    assert done.out.startswith("| of the puzzles")
    assert "--out FILE writes the grids" in done.err


def test_puzzles_of_a_file_without_a_solution_are_told_apart(folder):
    (folder / "two").write_text(f"{text(LARGE.puzzle[0])}\n12345678.{'.' * 8}9{'.' * 63}\n")
    done = vmd(*solve("two", model="large"))
    assert done.code == 1
    assert re.search(r"have no solution[ |]+1 of 2", done.out)


def test_only_puzzles_that_were_not_solved_are_searched_and_what_is_not_known_is_said(monkeypatch, capsys):
    asked = []

    def solvable(puzzle):
        asked.append(puzzle)
        return (False, None, True, False)[(len(asked) - 1) % 4]

    monkeypatch.setattr(engine, "solvable", solvable)
    assert solving.unsolvable(SMALL.puzzle[:8]) == (4, 6)
    assert solving.unsolvable(SMALL.puzzle[:8], patience=-1.0) == (1, 1)
    options = {"steps": 4, "order": "prob", "tries": 1}
    asked.clear()
    assert not solving.solve_file(oracle(unless_it_begins_with_one), SMALL, 64, None, options)
    unsolved = int(unless_it_begins_with_one(torch.where(PUZZLE > 0, PUZZLE - 1, 4)).sum())
    assert len(asked) == unsolved
    assert re.search(rf"have no solution[ |]+at least \d+ of {len(PUZZLE)}", capsys.readouterr().out)
    assert solving.solve_file(oracle(), SMALL, 64, None, options)
    assert len(asked) == unsolved


def test_digits_that_clash_are_found():
    grid = SMALL.solution[0].copy()
    assert not engine.clashing(grid).any()
    for one, other in ((0, 3), (0, 12), (0, 5)):  # of a row, of a column, of a box
        pair = np.zeros_like(grid)
        pair[[one, other]] = 3
        assert engine.clashing(pair).nonzero()[0].tolist() == [one, other]
    pair[[0, 5, 11]] = 1, 2, 1  # neither
    assert not engine.clashing(pair).any()


@pytest.mark.parametrize("broken", [False, True])
def test_digits_that_clash_are_red(broken):
    plt = pyplot()
    figure, axis = plt.subplots()
    grid = SMALL.solution[0].astype(int)
    if broken:
        grid = np.where(np.arange(16) == 1, grid[0], grid)
    draw_board(axis, SMALL.puzzle[0], grid, grid, np.zeros(16), np.zeros(16, bool), "")
    colours = [text.get_color() for text in axis.texts if text.get_text().isdigit()]
    plt.close(figure)
    assert [colour == "#d00000" for colour in colours] == engine.clashing(grid).tolist()


@pytest.mark.parametrize(("code", "wrong"), [(1, lambda canvas: True), (0, unless_it_begins_with_one)])
def test_an_animation_shows_the_grid(tmp_path, monkeypatch, code, wrong):
    drawn = []
    monkeypatch.setattr("vmd.board_figures.board_frames", lambda *args: drawn.append(board_frames(*args)) or drawn[-1])
    load(monkeypatch, oracle(wrong))
    done = vmd(*solve(text(SMALL.puzzle[1]), "--animate", tmp_path / "a.gif", "--tries", 30))
    assert done.code == code
    assert [path.name for path in tmp_path.iterdir()] == ["a.gif"]
    with Image.open(tmp_path / "a.gif") as picture:
        picture.load()
        assert (picture.format, picture.n_frames > 1) == ("GIF", True)
    (first, *_), *between, (last, _, sure, _, title) = drawn[0]
    assert [int((canvas > 0).sum()) for canvas, *_ in between] == sorted({int((canvas > 0).sum()) for canvas, *_ in between})
    assert len(between) > 1  # also where the first evaluation would do
    assert ("the rules hold" in title, "break the rules" in title) == (code == 0, code == 1)
    assert text(first) == text(SMALL.puzzle[1])
    assert text(last) == re.sub(r"\D", "", re.split("solved|NOT", done.out)[0])
    assert (np.isnan(sure) == (SMALL.puzzle[1] > 0)).all()


@pytest.mark.parametrize("name", ["no/a.gif", "file/a.gif", "folder.gif", "x" * 300 + ".gif"])
def test_nothing_is_left_of_an_animation_that_cannot_be_written(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.gif").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidInput, match="cannot write"):
        animate_board(PUZZLE[0], [], tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((LINE, "--animate", "a.png"), "ends in .gif"),
        ((LINE, "--animate", "no/a.gif"), "no such folder"),
        ((LINE, "--out", "grids.txt"), "expected with a file"),
        (("puzzles", "--animate", "a.gif"), "expected with one puzzle"),
        (("puzzles", "--out", "no/grids.txt"), "no such folder"),
        (("puzzles", "--out", "small"), "found a folder"),
        ((LINE, "--batch", -1), "--batch=-1"),
        (("puzzles",), "81 cells: expected 16"),
        (("no.txt",), "an existing file"),
        (("9" * 300,), "300 characters"),
        ((LINE, "--tries", 0), "tries=0"),
        (("puzzles", "--batch", 0, "--model", "large"), "--batch=0"),
        ((LINE, "--seed", 2**64), "seed="),
        ((LINE, "--order", "random", "--revise"), "revise"),
        ((LINE, "--model", "nowhere"), "nowhere: expected a model folder"),
        ((LINE, "--model", "other"), "whole Sudoku boards"),
    ],
)
def test_mistakes_are_one_line(folder, words, said):
    assert said in refused(*solve(*words), folder=folder)


def test_a_missing_solver_is_one_line(folder, monkeypatch):
    monkeypatch.setattr(solving, "SHIPPED", folder / "none")
    assert "--model" in refused("solve", LINE, "--device", "cpu", folder=folder)
    (folder / "weights").mkdir()
    (folder / "small").rename(folder / "weights" / "sudoku")
    monkeypatch.setattr(solving, "SHIPPED", folder / "weights")
    assert vmd("solve", LINE, "--device", "cpu", "--steps", 4).code == 1


README_PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"


def test_the_solver_that_comes_along_is_small_and_solves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (solving.SHIPPED / "sudoku" / "model.safetensors").stat().st_size <= 12e6
    said = vmd("solve", README_PUZZLE, "--device", "cpu", "--animate", "board.gif")
    assert (said.code, (tmp_path / "board.gif").exists()) == (0, True)
    assert "every row, column and box holds every digit once" in said.out
    board = "".join(c for c in said.out.split("solved")[0] if c.isdigit())
    assert board == "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def test_the_solver_that_comes_along_solves_puzzles_it_has_not_seen():
    """Of the test side, to which no grid that was trained on belongs, not even turned."""
    drawn = draw_puzzles(600, "logic", seed=99)
    unseen = np.array([in_test(solution) for solution in drawn.solution])
    puzzle, solution = (torch.from_numpy(x[unseen].astype("int64")) for x in (drawn.puzzle, drawn.solution))
    assert len(puzzle) >= 20
    found = solving.solve_puzzles(VMD.from_pretrained("sudoku"), puzzle, steps=10, tries=1)
    assert float(found.right.double().mean()) >= 0.9
    assert (found.grids[found.right] == solution[found.right]).all()


def test_the_solver_that_comes_along_is_the_preset_and_the_row_of_the_table():
    shipped = VMD.from_pretrained("sudoku").config
    wanted = preset("sudoku-mdm").model.resolved(81, 9, shipped.symbols)
    assert shipped == wanted
    results = json.loads((Path(__file__).parents[1] / "results/sudoku/results.json").read_text())
    ran = from_dict(RunConfig, results["configurations"]["ours, no z"])
    assert ran.model == shipped
    chosen = {name: getattr(ran.training, name) for name in ("precision", "compile", "attention", "capture")}
    assert replace(preset("sudoku-mdm").training, **chosen) == ran.training


@pytest.mark.parametrize("kind", ["puzzles.txt", "puzzles.csv"])
def test_the_solver_that_comes_along_is_scored_on_the_files_of_others(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    between, first = {"puzzles.txt": (" ", ""), "puzzles.csv": (",", "puzzle,solution\n")}[kind]
    pairs = zip(map(text, LARGE.puzzle), map(text, LARGE.solution), strict=True)
    Path(kind).write_text(first + "".join(f"{p}{between}{s}\n" for p, s in pairs))
    done = succeeds("evaluate", "sudoku", "--data", kind, "--steps", 5, "--device", "cpu", "--json", "scores.json")
    assert "solved" in done.out
    record = json.loads(Path("scores.json").read_text())
    assert (record["seed"], record["hardware"]["device"]) == (0, "cpu")
    refused("evaluate", "sudoku", "--data", kind, "--device", "cpu", "--plot", "x.png", folder=tmp_path)


def test_whether_a_puzzle_can_be_solved_is_said_or_left_open(monkeypatch):
    impossible = np.zeros(81, dtype=np.uint8)
    impossible[[*range(8), 17]] = [*range(1, 9), 9]  # row 1 needs a 9 where column 9 has one
    assert engine.solvable(impossible) is False
    assert engine.solvable(LARGE.puzzle[0]) is True
    monkeypatch.setattr(engine, "PATIENCE", 0)
    empty = np.zeros(81, dtype=np.uint8)
    assert engine.solvable(empty) is None


def test_a_puzzle_that_is_not_solved_and_takes_long_to_search_says_so(folder, monkeypatch):
    monkeypatch.setattr(engine, "PATIENCE", 0)
    done = vmd(*solve(text(SMALL.puzzle[0] * 0)))
    assert (done.code, "would take longer to say" in done.out) == (1, True)


@pytest.mark.parametrize("clash", ["55", "5.......5"])
def test_the_solver_that_comes_along_refuses_clues_that_clash(clash, tmp_path):
    assert "twice" in refused("solve", clash + "." * (81 - len(clash)), "--device", "cpu", folder=tmp_path)
