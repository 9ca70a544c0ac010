"""Training on puzzles, whose clues differ from row to row, and counting what is solved."""

import json
from dataclasses import replace

import pytest
import torch

from command import refused, settings, succeeds
from helpers import NO_LATENT, codes, latent, learned_prior
from vmd.config import InvalidInput, LatentConfig, ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig
from vmd.data import Puzzles, SudokuData, load_data
from vmd.data.sudoku import draw_puzzles, make_puzzles
from vmd.evaluation import diagnose_model, evaluate_puzzles
from vmd.masking import Rows
from vmd.model import VMD
from vmd.network import board_places
from vmd.sampling import Samples
from vmd.training import draw_batch, split_codes, train

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
