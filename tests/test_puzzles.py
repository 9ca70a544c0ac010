"""Training on puzzles, whose clues differ from row to row, and counting what is solved."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from command import refused, settings, succeeds
from helpers import NO_LATENT, codes, latent, learned_prior
from vmd.config import InvalidInput, LatentConfig, ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig, override_all
from vmd.data import Puzzles, SudokuData, load_data
from vmd.data.sudoku import Layout, draw_puzzles, layout_of, make_puzzles
from vmd.evaluation import diagnose_model, evaluate_puzzles
from vmd.masking import Rows
from vmd.model import VMD
from vmd.network import board_places
from vmd.presets import preset
from vmd.sampling import Samples
from vmd.splitting import split_codes
from vmd.step import draw_batch
from vmd.training import train

KINDS = {
    "none": NO_LATENT,
    "gaussian": latent(),
    "learned": learned_prior(),
    "codes": codes(8),
    "layers": codes(4, layers=1),
}
all_kinds = pytest.mark.parametrize("z", KINDS.values(), ids=KINDS)


@pytest.fixture(scope="module")
def small() -> SudokuData:
    return SudokuData(draw_puzzles(300, "any", 0, box=2))


def small_run(z: LatentConfig, **training) -> RunConfig:
    model = ModelConfig(4, 16, 16, layers=2, width=32, heads=2, board=True, latent=z)
    return RunConfig(model, ObjectiveConfig(), TrainingConfig(**({"steps": 4, "batch_size": 8, "log_every": 1} | training)))


@all_kinds
def test_clues_are_never_masked_and_differ_from_row_to_row(small, z):
    assert isinstance(small, Puzzles)
    run = small_run(z)
    batch = draw_batch(VMD(run.model), small, run.objective, 0, 64, None, torch.Generator().manual_seed(0))
    assert batch.given is not None
    assert not bool((batch.masks.mask & batch.given).any())
    assert bool(batch.masks.mask.any(1).all())
    assert len(batch.given.unique(dim=0)) > 30
    blanks = (~batch.given).sum(-1)
    assert bool((batch.masks.weight[:, 0] * batch.masks.mask.sum(-1) - blanks).abs().max() < 1e-4)  # m / k times k


def test_rows_of_a_batch_of_puzzles_do_not_depend_on_who_draws_the_others(small):
    run = small_run(latent())

    def drawn(rows: Rows | None):
        return draw_batch(VMD(run.model), small, run.objective, 3, 12, None, torch.Generator().manual_seed(5), rows)

    whole, parts = drawn(None), [drawn(Rows(start, start + 4, 12)) for start in (0, 4, 8)]
    for name in ("x0", "given", "noise"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert torch.equal(torch.cat([part.masks.mask for part in parts]), whole.masks.mask)


@all_kinds
def test_every_latent_trains_on_puzzles(small, z):
    run = small_run(z, steps=6, split_codes_every=2, optimizer="muon")
    model = VMD(run.model)
    log = train(model, small, run)
    assert all(record["total"] > 0 for record in log)
    found = diagnose_model(model, small)
    assert (found is None) is (z.kind == "none")


def test_a_network_learns_the_rules_of_a_small_board(small):
    """It solves most boards it has not seen, a cell at a time."""
    run = small_run(NO_LATENT, steps=120, batch_size=64, learning_rate=1e-2, log_every=10, optimizer="muon", ema=0.9)
    model = VMD(replace(run.model, layers=3, width=64, heads=4))
    train(model, small, replace(run, model=model.config))
    unseen = SudokuData(draw_puzzles(100, "any", 99, box=2), augmented=False)
    assert evaluate_puzzles(model, unseen, [12])[0]["value"] > 60


def test_codes_are_split_by_what_is_given_in_each_row(small):
    run = small_run(codes(32))
    model = VMD(run.model)
    batch = draw_batch(model, small, run.objective, 0, 2_048, None, torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.decoder.pathway.prior.bias[2:] = -60.0
    before = model.decoder.pathway.prior.bias.clone()
    split_codes(model, batch, torch.Generator().manual_seed(0))
    assert not torch.equal(model.decoder.pathway.prior.bias, before)


def test_rows_columns_and_boxes_of_a_board():
    row, column, box = board_places(81).tolist()
    for cell in range(81):
        assert (row[cell], column[cell]) == divmod(cell, 9)
        assert box[cell] == cell // 27 * 3 + cell % 9 // 3


@pytest.mark.parametrize("length", [15, 36, 80])
def test_a_board_is_square(length):
    with pytest.raises(InvalidInput, match=str(length)):
        ModelConfig(length=length, board=True)


class Answers(VMD):
    """Says what it was told to say."""

    def sample(self, *args, **options):
        return Samples(self.grids - 1, None, options["steps"], 0, [])


def answering(puzzles, grids) -> Answers:
    model = Answers(small_run(NO_LATENT).model)
    model.grids = grids
    return model


def test_solved_means_valid_with_the_clues_kept(small):
    puzzles = draw_puzzles(20, "any", 1, box=2)
    data, right = SudokuData(puzzles), torch.from_numpy(puzzles.solution).long()

    def solved(grids) -> float:
        return evaluate_puzzles(answering(puzzles, grids), data, [1])[0]["value"]

    assert solved(right) == 100
    broken = right.clone()
    broken[:5, 0] = broken[:5, 0] % 4 + 1
    assert solved(broken) == 75
    relabelled = right % 4 + 1  # valid boards, but other clues
    assert solved(relabelled) == 0


def test_any_solution_of_several_counts():
    puzzles = draw_puzzles(10, "multi", 0, box=2)
    from vmd.data.sudoku_engine import solve

    others = torch.stack([torch.from_numpy(solve(p, 50)[-1]) for p in puzzles.puzzle]).long()
    assert not bool((others == torch.from_numpy(puzzles.solution)).all())
    rows = evaluate_puzzles(answering(puzzles, others), SudokuData(puzzles), [1])
    assert rows[0]["value"] == 100
    assert rows[1]["value"] < 100


SMALL = settings("training.steps=2", "training.batch_size=4", "model.layers=1", "model.width=16", "model.heads=2")


def test_from_puzzles_to_scores(tmp_path):
    make_puzzles(12, 4, "any", 0, tmp_path / "data", workers=1)
    run, scores = tmp_path / "run", tmp_path / "scores.json"
    succeeds("train", "sudoku", "--data", tmp_path / "data/train.sudoku", "--out", run, "--device", "cpu", *SMALL)
    done = succeeds("evaluate", run, "--data", tmp_path / "data/test.sudoku", "--steps", "1,3", "--json", scores)
    assert "solved, %" in done.out
    rows = json.loads(scores.read_text())["rows"]
    assert [row["metric"] for row in rows].count("solved, %") == 4
    assert "4 puzzles" in rows[0]["about"]
    lines = tmp_path / "puzzles.csv"
    puzzles = load_data(str(tmp_path / "data/test.sudoku")).puzzles
    text = ["".join(map(str, p)) + "," + "".join(map(str, s)) for p, s in zip(puzzles.puzzle, puzzles.solution, strict=True)]
    lines.write_text("puzzle,solution\n" + "\n".join(text) + "\n")
    assert "4 puzzles" in succeeds("evaluate", run, "--data", lines, "--steps", "1").out


def test_a_model_of_other_data_is_not_asked_for_puzzles(tmp_path):
    make_puzzles(4, 2, "any", 0, tmp_path / "data", workers=1)
    run = tmp_path / "run"
    succeeds("train", "poker", "--out", run, "--device", "cpu", *SMALL)
    words = ("evaluate", run, "--data", tmp_path / "data/test.sudoku")
    assert "81 tokens" in refused(*words, folder=tmp_path)


# Puzzle and solution one after the other, as in the paper


BOARDS = {16: draw_puzzles(8, "grid", 0, box=2).solution, 81: draw_puzzles(3, "grid", 0).solution}


@st.composite
def puzzles_with_solutions(draw):
    """Some cells of grids as clues, from none to all."""
    solution = torch.from_numpy(BOARDS[draw(st.sampled_from([16, 81]))]).long()
    draws = torch.rand(solution.shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    return solution * (draws < draw(st.sampled_from([0.0, 0.4, 1.1]))), solution


@given(puzzles_with_solutions(), st.booleans(), st.sampled_from([torch.uint8, torch.int32, torch.int64]))
def test_a_layout_is_read_back_and_prompts_with_what_is_given(pair_of, pair, dtype):
    puzzle, solution = (part.to(dtype) for part in pair_of)
    layout = Layout(solution.shape[1], pair)
    tokens, prompt = layout.tokens(puzzle, solution), layout.prompt(puzzle)
    assert tokens.shape == prompt.shape == (len(puzzle), layout.length)
    assert tokens.dtype == prompt.dtype == torch.int64
    assert bool(((tokens >= 0) & (tokens < len(layout.symbols))).all())
    assert torch.equal(layout.grids(tokens), solution.long())
    given = prompt >= 0
    assert torch.equal(prompt, torch.where(given, tokens, -1))
    if pair:
        assert torch.equal(given, (torch.arange(layout.length) <= layout.cells).expand_as(given))
    else:
        assert torch.equal(given, puzzle > 0)


def test_a_pair_is_the_puzzle_a_separator_the_solution_and_an_end():
    puzzles = draw_puzzles(2, "any", 0)
    layout = SudokuData(puzzles, pair=True).layout
    assert (layout.length, len(layout.symbols)) == (164, 12)
    puzzle, solution = (torch.from_numpy(part).long() for part in (puzzles.puzzle, puzzles.solution))
    for row, p, s in zip(layout.tokens(puzzle, solution), puzzles.puzzle, puzzles.solution, strict=True):
        words = [layout.symbols[token] for token in row]
        assert words == [*map(str, p), "[SEP]", *map(str, s), "[EOS]"]


def test_a_layout_is_known_by_its_length():
    for cells in (16, 81):
        for pair in (False, True):
            assert layout_of(Layout(cells, pair).length) == Layout(cells, pair)
    assert [layout_of(length) for length in (0, 15, 32, 33, 82, 162, 163)] == [None] * 7


@pytest.mark.parametrize("augmented", [False, True])
def test_both_layouts_show_the_same_puzzles(augmented):
    puzzles = draw_puzzles(50, "any", 0, box=2)

    def batch(pair: bool):
        data = SudokuData(puzzles, 1, augmented, pair=pair)
        return data.puzzle_batch(2, 16, generator=torch.Generator().manual_seed(0)), data.layout

    (place, clues), _ = batch(False)
    (tokens, given), layout = batch(True)
    assert torch.equal(layout.grids(tokens), place + 1)
    assert torch.equal(tokens[:, :16], torch.where(clues, place + 1, 0))
    assert torch.equal(given, (torch.arange(34) < 17).expand(16, -1))


def test_of_a_pair_all_of_the_solution_is_to_be_written_and_nothing_else(small):
    data = SudokuData(small.puzzles, pair=True)
    model = VMD(ModelConfig(data.vocab_size, 34, 34, layers=1, width=16, heads=2, latent=NO_LATENT))
    batch = draw_batch(model, data, ObjectiveConfig(), 0, 340, None, torch.Generator().manual_seed(0))
    assert not bool(batch.masks.mask[:, :17].any())
    assert bool(batch.masks.mask[:, 17:].any(0).all())  # clues and [EOS] too
    assert torch.bincount(batch.masks.mask.sum(-1), minlength=18).tolist() == [0] + [20] * 17
    rows = [draw_batch(model, data, ObjectiveConfig(), 0, 12, None, torch.Generator().manual_seed(0), r) for r in thirds(12)]
    whole = draw_batch(model, data, ObjectiveConfig(), 0, 12, None, torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat([part.x0 for part in rows]), whole.x0)
    assert torch.equal(torch.cat([part.given for part in rows]), whole.given)


def thirds(total: int) -> list[Rows]:
    return [Rows(start, start + total // 3, total) for start in range(0, total, total // 3)]


def test_pairs_are_judged_by_the_solution_that_was_written():
    puzzles = draw_puzzles(20, "any", 1, box=2)
    data = SudokuData(puzzles, pair=True)
    puzzle, right = (torch.from_numpy(part).long() for part in (puzzles.puzzle, puzzles.solution))

    class Writes(VMD):
        def sample(self, *args, prompt, **options):
            assert torch.equal(prompt, data.layout.prompt(puzzle))
            return Samples(data.layout.tokens(puzzle, self.grids), None, options["steps"], 0, [])

    model = Writes(ModelConfig(7, 34, 34, layers=1, width=16, heads=2, latent=NO_LATENT))

    def solved(grids) -> float:
        model.grids = grids
        return evaluate_puzzles(model, data, [1])[0]["value"]

    assert solved(right) == 100
    assert solved(right % 4 + 1) == 0  # valid boards, but other clues
    for nothing in (0, 5, 6):  # a blank, [SEP] or [EOS] for a digit
        broken = right.clone()
        broken[:5, 3] = nothing
        assert solved(broken) == 75
    assert solved(torch.full_like(right, 5)) == 0


PAPERS = ("sudoku-paper", "sudoku-mdm-paper", "sudoku-noise-paper", "sudoku-gpt2")


@pytest.mark.parametrize("name", PAPERS)
def test_the_paper_s_systems_train_on_pairs_and_keep_what_is_given(name, small):
    data = SudokuData(small.puzzles, augmented=False, pair=True)
    encoder = min(1, preset(name).model.latent.encoder_layers)
    sizes = [
        "model.heads=2",
        "model.width=16",
        "model.layers=1",
        f"model.latent.encoder_layers={encoder}",
        "model.prompt=17",
    ]
    run = override_all(preset(name), [*sizes, "training.steps=3", "training.batch_size=8", "training.log_every=1"])
    run = replace(run, model=run.model.resolved(34, 7, data.symbols))
    model = VMD(run.model)
    log = train(model, data, run)
    assert all(np.isfinite(record["total"]) and record["gradient_norm"] > 0 for record in log)
    assert (sum(record["kl"] for record in log) > 0) is (name == "sudoku-paper")
    prompt = data.layout.prompt(torch.from_numpy(small.puzzles.puzzle[:5]))
    drawn = model.sample(prompt=prompt, steps=5, rule="argmax", seeds=range(5)).tokens
    assert torch.equal(drawn[:, :17], prompt[:, :17])
    assert evaluate_puzzles(model, data, [2], rows_scored=20)[0]["value"] < 100


def test_from_pairs_to_scores(tmp_path):
    """The layout is kept with the model: `evaluate` lays out any puzzles in the same way; `solve` wants boards."""
    make_puzzles(8, 4, "any", 0, tmp_path / "data", workers=1)
    train_file, test_file = tmp_path / "data/train.sudoku", tmp_path / "data/test.sudoku"
    run = tmp_path / "run"
    sizes = (*settings("model.heads=2"), *SMALL)
    succeeds("train", "sudoku-gpt2", "--data", train_file, "--out", run, "--device", "cpu", *sizes)
    done = succeeds("evaluate", run, "--data", test_file, "--steps", "2")
    assert "4 puzzles" in done.out
    assert "whole Sudoku boards" in refused("solve", "." * 81, "--model", run, "--device", "cpu", folder=tmp_path)
    board = tmp_path / "board"
    succeeds("train", "sudoku-mdm", "--data", train_file, "--out", board, "--device", "cpu", *SMALL)
    assert "4 puzzles" in succeeds("evaluate", board, "--data", test_file, "--steps", "2").out


@pytest.mark.parametrize(
    ("name", "setting", "says"),
    [
        ("sudoku-mdm", "data.layout=pair", "model.board=true with length 164"),
        ("sudoku-gpt2", "data.layout=triple", "data.layout"),
        ("sudoku-gpt2", "objective.focal=0.5", "objective.focal=0.5"),
        ("sudoku-paper", "objective.focal=1", "objective.focal=1.0: expected 0 with a latent"),
        ("sudoku-paper", "model.shifted=true", "model.shifted=true"),
    ],
)
def test_layouts_and_objectives_that_do_not_fit_are_one_line(tmp_path, name, setting, says):
    make_puzzles(2, 1, "any", 0, tmp_path / "data", workers=1)
    words = ("train", name, "--data", tmp_path / "data/train.sudoku", "--out", tmp_path / "run", "--device", "cpu")
    assert says in refused(*words, "--set", setting, folder=tmp_path)
