"""`vmd reproduce sudoku`: oracles measured, every system trained on next to nothing, and what is kept, resumed and shown."""

import itertools
import json
import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from command import refused, settings, vmd
from helpers import NO_LATENT, close, latent
from test_solving import GRIDS, SMALL, oracle, unless_it_begins_with_one, untrained
from vmd import plotting
from vmd.config import InvalidInput, ModelConfig, RunConfig, from_dict, to_dict
from vmd.data.sudoku import Layout, Puzzles, draw_puzzles, load_puzzles
from vmd.experiments import figures, puzzle_figures, puzzle_table
from vmd.experiments.puzzle_figures import draw_sudoku
from vmd.experiments.puzzle_table import (
    FULL,
    PAPER,
    QUICK,
    SYSTEMS,
    accuracy_rows,
    all_solutions,
    grid_rows,
    kl_to_uniform,
    planned,
    printed,
    puzzle_sets,
    several_rows,
    split_small,
    try_rows,
    ways_to_draw,
)
from vmd.experiments.report import section
from vmd.experiments.systems import is_of, read_done
from vmd.experiments.tables import render, sudoku_table, sudoku_tables
from vmd.metrics import share_error
from vmd.model import VMD
from vmd.sampling import ORDERS, Samples
from vmd.solving import solve_puzzles

BOARD = Layout(16, False)
PNG = b"\x89PNG\r\n\x1a\n"
NAMES = [system.name for system in SYSTEMS]
SMALL_BOARDS = [system for system in SYSTEMS if system.trained_on != "any"]


# Measuring models that are known


class Says(VMD):
    """Answers each prompt, or a number of empty ones, as it was told to."""

    def sample(self, n=None, *, prompt=None, **options):
        prompt = torch.full((n, self.config.length), -1) if prompt is None else prompt
        self.asked.append(options)
        self.prompts.append(prompt)
        return Samples(self.answer(prompt), None, options["steps"], 0, [])


def saying(answer, layout: Layout = BOARD) -> Says:
    shape = {"layers": 1, "width": 16, "heads": 2, "latent": NO_LATENT}
    model = Says(ModelConfig(len(layout.symbols), layout.length, layout.length, **shape))
    model.answer, model.asked, model.prompts = answer, [], []
    return model


@pytest.fixture(scope="module")
def several() -> Puzzles:
    return draw_puzzles(12, "multi", 3, box=2)


def solutions_of(puzzle: torch.Tensor) -> torch.Tensor:
    """By looking through all small boards."""
    return GRIDS[((puzzle == 0) | (puzzle == GRIDS)).all(1)]


def found(rows: list[dict], metric: str, **wanted) -> dict:
    (row,) = (r for r in rows if r["metric"] == metric and wanted.items() <= r["setting"].items())
    return row


def evenly(prompt: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    every = [solutions_of(row + 1) for row in prompt]
    return torch.stack([some[int(torch.randint(len(some), (1,), generator=generator))] for some in every]) - 1


def test_solutions_drawn_evenly_are_as_even_as_chance_allows(several):
    rows = several_rows(saying(evenly), several, 12, 64, (1, 5))
    for steps in (1, 5):
        kl, ideal = (found(rows, name, steps=steps) for name in ("kl_to_uniform", "kl_to_uniform_ideal"))
        valid = found(rows, "valid", steps=steps)
        assert (valid["value"], valid["stderr"]) == (100, 0)
        assert abs(kl["value"] - ideal["value"]) < 4 * math.sqrt(2) * kl["stderr"]
        expected = np.mean([(len(some) - 1) / (2 * 64) for some in all_solutions(several)])  # of chi-squares
        assert abs(ideal["value"] - expected) < 0.5 * expected
        assert kl["setting"]["n"] == 12


def test_always_the_same_solution_has_the_log_of_their_number(several):
    def first(prompt):
        return torch.stack([solutions_of(row + 1)[0] for row in prompt]) - 1

    model = saying(first)
    rows = several_rows(model, several, 9, 16, (1,))
    counts = [len(solutions_of(torch.from_numpy(p).long())) for p in several.puzzle[:9]]
    assert min(counts) > 1
    assert close(found(rows, "kl_to_uniform")["value"], np.mean(np.log(counts)))
    assert found(rows, "kl_to_uniform_ideal")["value"] < found(rows, "kl_to_uniform")["value"] / 3
    assert found(rows, "valid")["value"] == 100
    expected = torch.from_numpy(several.puzzle[:9]).long().repeat_interleave(16, 0) - 1
    assert torch.equal(model.prompts[0], expected)
    assert model.asked[0]["rule"] == "sample"


def test_grids_that_break_the_rules_count_for_no_solution(several):
    """Every second draw is broken, and all of the first puzzle's: the others are judged by what is left."""

    def every_second(prompt):
        tokens = evenly(prompt)
        tokens[::2, 0] = (tokens[::2, 0] + 1) % 4
        tokens[:8] = 0
        return tokens

    rows = several_rows(saying(every_second), several, 5, 8, (1,))
    assert close(found(rows, "valid")["value"], 100 * 4 * 4 / (5 * 8))
    assert close(found(rows, "valid")["stderr"], 100 * np.std([0, 0.5, 0.5, 0.5, 0.5]) / math.sqrt(5))
    assert found(rows, "kl_to_uniform")["setting"]["n"] == 4
    never = several_rows(saying(torch.zeros_like), several, 5, 8, (1,))
    assert [row["metric"] for row in never] == ["valid"]
    assert never[0]["value"] == 0


def test_all_solutions_are_those_of_a_search(several):
    for puzzle, some in zip(several.puzzle, all_solutions(several), strict=True):
        expected = {tuple(grid) for grid in solutions_of(torch.from_numpy(puzzle).long()).tolist()}
        assert {tuple(grid) for grid in some.tolist()} == expected
        assert len(some) == len(expected)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any))
def test_the_kl_to_uniform_is_between_zero_and_the_log_of_the_number(hits):
    value = kl_to_uniform(np.array(hits))
    assert -1e-9 <= value <= math.log(len(hits)) + 1e-9
    assert close(kl_to_uniform(10 * np.array(hits)), value)
    assert (value < 1e-9) == (len(set(hits)) == 1)


def test_the_kl_to_uniform_by_hand():
    assert close(kl_to_uniform(np.array([5, 5, 5])), 0)
    assert close(kl_to_uniform(np.array([0, 7, 0])), math.log(3))
    assert close(kl_to_uniform(np.array([3, 1])), 0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_whole_grids_are_valid_or_not():
    def some(prompt):
        assert bool((prompt == -1).all())
        tokens = GRIDS[torch.arange(len(prompt)) % 288] - 1
        tokens[: len(prompt) // 4, 5] = (tokens[: len(prompt) // 4, 5] + 1) % 4
        return tokens

    rows = grid_rows(saying(some), 200, (1, 16))
    assert [(row["setting"]["steps"], row["setting"]["n"]) for row in rows] == [(1, 200), (16, 200)]
    for row in rows:
        assert close(row["value"], 75)
        assert close(row["stderr"], 100 * share_error(0.75, 200))


def test_z_is_drawn_in_both_ways_where_it_makes_a_difference():
    assert ways_to_draw(untrained(), (1, 5)) == [(1, "once"), (5, "once")]
    assert ways_to_draw(untrained(latent()), (1, 5)) == [(1, "once"), (5, "once"), (5, "fresh")]


@pytest.mark.parametrize("pair", [False, True], ids=["board", "pair"])
def test_accuracy_is_by_the_rules_with_the_clues_kept_in_either_layout(pair):
    layout = Layout(16, pair)
    puzzle, right = (torch.from_numpy(part).long() for part in (SMALL.puzzle[:20], SMALL.solution[:20]))

    def some_right(prompt):
        assert torch.equal(prompt, layout.prompt(puzzle))
        grids = right.clone()
        grids[:5, 0] = grids[:5, 0] % 4 + 1  # broken
        grids[5:8] = grids[5:8] % 4 + 1  # valid, but with other clues
        return layout.tokens(puzzle, grids)

    cases = [{"order": "prob", "steps": 2}, {"order": "margin", "steps": 1, "revise": True}]
    model = saying(some_right, layout)
    rows = accuracy_rows(model, SMALL, "logic", cases, 20)
    assert [row["value"] for row in rows] == [60, 60]
    assert close(rows[0]["stderr"], 100 * share_error(0.6, 20))
    for case, asked, row in zip(cases, model.asked, rows, strict=True):
        assert case.items() <= asked.items()
        assert case.items() <= row["setting"].items()
        assert asked["rule"] == "argmax"
        assert (row["setting"]["n"], row["setting"]["nfe"], row["setting"]["data"]) == (20, case["steps"], "logic")


@pytest.mark.parametrize("revise", [False, True])
def test_tries_and_their_evaluations_add_up(revise):
    """As if the puzzles were solved anew with fewer tries: shares rise, and each costs what was really spent."""
    model, puzzle = oracle(unless_it_begins_with_one), torch.from_numpy(SMALL.puzzle).long()
    rows = try_rows(model, SMALL, "any", 24, steps=3, tries=5, revise=revise)
    plain, early = [r for r in rows if not r["setting"]["early"]], [r for r in rows if r["setting"]["early"]]
    assert [r["setting"]["tries"] for r in plain] == [1, 2, 3, 4, 5]
    assert [r["setting"]["tries"] for r in early] == [5]
    for row in rows:
        how = {name: row["setting"][name] for name in ("tries", "early", "revise")}
        again = solve_puzzles(model, puzzle, steps=3, **how)
        assert close(row["value"], 100 * float(again.right.double().mean()))
        assert close(row["setting"]["evaluations"], float(again.evaluations.double().mean()))
    shares, spent = ([f(r) for r in plain] for f in (lambda r: r["value"], lambda r: r["setting"]["evaluations"]))
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]  # there is something to see
    assert spent[0] == 3
    assert all(0 < b - a <= 3 for a, b in itertools.pairwise(spent))
    assert early[0]["value"] >= shares[-1]
    assert early[0]["setting"]["evaluations"] < spent[-1]


# Data, plans and what is printed


@pytest.mark.parametrize("kind", ["logic", "multi", "grid"])
def test_no_puzzle_that_is_tested_was_trained_on(kind):
    drawn = draw_puzzles(400, kind, 0, box=2)
    train, test = split_small(drawn, 20)
    name = "solution" if kind == "grid" else "puzzle"
    keys = [{row.tobytes() for row in getattr(part, name)} for part in (train, test)]
    assert not keys[0] & keys[1]
    assert len(keys[0]) > 0
    assert len(keys[1]) == 20
    assert keys[0] | keys[1] == {row.tobytes() for row in getattr(drawn, name)}
    for part in (train, test):
        assert part.kind == kind
        assert ((part.puzzle == 0) | (part.puzzle == part.solution)).all()  # still beside each other


def test_puzzles_are_made_once_and_read_from_then_on(tmp_path, monkeypatch):
    budget, notes = replace(FULL, sizes={"any": (6, 2), "grid": (5, 2), "multi": (4, 2)}), []
    assert puzzle_sets(tmp_path / "none", budget, {"multi"}, False, notes.append).keys() == {"multi"}
    notes.clear()
    sets = puzzle_sets(tmp_path / "all", budget, {"any", "grid"}, False, notes.append)
    assert {kind: (len(a), len(b)) for kind, (a, b) in sets.items()} == {"any": (6, 2), "grid": (5, 2)}
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["any", "grid"]
    assert len(notes) == 2
    monkeypatch.setattr(puzzle_table, "make_puzzles", lambda *args, **options: 1 / 0)
    again = puzzle_sets(tmp_path / "all", budget, {"any", "grid"}, False, notes.append)
    assert len(notes) == 2
    for kind, parts in sets.items():
        for before, after in zip(parts, again[kind], strict=True):
            assert np.array_equal(before.puzzle, after.puzzle)
            assert np.array_equal(before.solution, after.solution)
    assert np.array_equal(load_puzzles(tmp_path / "all/any/test.sudoku").puzzle, sets["any"][1].puzzle)


def test_few_puzzles_are_made_of_kinds_that_are_only_tested_and_never_trained_on(tmp_path):
    budget = replace(FULL, sizes={"logic": (150, 3), "any": (200, 2)})
    sets = puzzle_sets(tmp_path, budget, {"logic"}, False, lambda text: None)
    assert {kind: (len(a), len(b)) for kind, (a, b) in sets.items()} == {"logic": (150, 3), "any": (100, 2)}
    with pytest.raises(InvalidInput, match=r"any/train.sudoku: 100 puzzles: expected 200 or more"):
        puzzle_sets(tmp_path, budget, {"any"}, False, lambda text: None)
    more = replace(budget, sizes={"logic": (150, 4)})
    with pytest.raises(InvalidInput, match=r"logic/test.sudoku: 3 puzzles: expected 4 or more"):
        puzzle_sets(tmp_path, more, {"logic"}, False, lambda text: None)
    (tmp_path / "logic/test.sudoku").rename(tmp_path / "kept")
    with pytest.raises(InvalidInput, match=r"logic: found train.sudoku alone: expected both, or none to make them"):
        puzzle_sets(tmp_path, budget, {"logic"}, False, lambda text: None)


PLANS = {quick: {s.name: planned(s, QUICK if quick else FULL, quick, [], "cpu") for s in SYSTEMS} for quick in (False, True)}


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_every_system_has_a_model_of_its_boards(quick):
    for system in SYSTEMS:
        run = PLANS[quick][system.name]
        layout = Layout(16 if quick else 81, "paper" in system.preset or "gpt2" in system.preset)
        assert (run.model.length, run.model.vocab_size) == (layout.length, len(layout.symbols))
        assert run.model.blocks == 1
        assert run.model.prompt == (layout.cells + 1 if layout.pair else 0)
        assert (run.data.layout == "pair") is layout.pair
        assert run.data.name == system.trained_on
        assert (
            run.training.steps
            == (QUICK if quick else FULL).steps["pair" if run.data.layout == "pair" else system.trained_on]
        )
        run.objective.check(run.model)


def test_controls_differ_from_their_system_in_z_alone():
    ours, theirs = ([PLANS[False][name] for name in names] for names in (NAMES[:3], NAMES[3:6]))
    for runs in (ours, theirs):
        kinds = {(run.model.latent.kind, run.model.latent.encoder_layers) for run in runs}
        assert len(kinds) == 3
        common = {json.dumps(to_dict(without_z(run)), sort_keys=True) for run in runs}
        assert len(common) == 1


def without_z(run: RunConfig) -> RunConfig:
    return replace(run, model=replace(run.model, latent=NO_LATENT), objective=replace(run.objective, kl_weight=1.0))


def test_settings_of_the_user_have_the_last_word():
    system = SYSTEMS[2]
    run = planned(system, QUICK, True, ["training.steps=7", "model.layers=3", "model.latent.dim=5"], "cpu")
    assert (run.training.steps, run.model.layers, run.model.latent.dim) == (7, 3, 5)


def test_the_paper_s_figures_stand_on_its_cells_alone():
    shown = {}
    for name in NAMES:
        for order in ORDERS:
            for steps in (1, 2, 5, 10, 20, 40):
                setting = {"data": "logic", "order": order, "steps": steps}
                figure = printed({"system": name, "setting": setting})["paper"]
                if figure is not None:
                    shown[name, order, steps] = figure
                for other in ({"data": "hard"}, {"data": "any"}, {"revise": True}, {"order_noise": 0.5}, {"tries": 1}):
                    assert printed({"system": name, "setting": setting | other})["paper"] is None
    assert shown == {(*place, steps): value for place, row in PAPER.items() for steps, value in row.items()}
    assert len(shown) == 12
    assert shown["the paper's VMD", "margin", 20] == 99.7


# The whole


TINY = replace(
    QUICK,
    steps=dict.fromkeys(QUICK.steps, 4),
    settings=(
        "model.layers=1",
        "model.heads=2",
        "model.width=16",
        "model.latent.encoder_layers=1",
        "model.latent.dim=2",
        "training.batch_size=8",
        "training.log_every=1",
        "training.checkpoint_every=1",
    ),
    sizes={"logic": (40, 8), "any": (40, 6), "multi": (40, 4), "grid": (40, 4)},
    fewer=3,
    steps_per_block=(1, 5),
    looks=2,
    looked_at=5,
    draws=4,
    grids=6,
    tries=2,
)


def run_table(out, *words: object, only: tuple[str, ...] = (), code: int = 0):
    """`vmd reproduce sudoku --quick`, on a budget of almost nothing; of some systems alone without pictures."""
    chosen = [word for name in only for word in ("--only", name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(puzzle_table, "QUICK", TINY)
        if only:
            patch.setattr(figures, "draw_figures", lambda folder: [])
        done = vmd("reproduce", "sudoku", "--quick", "--device", "cpu", "--out", out, *chosen, *words)
    assert done.code == code, done.err
    return done


def read(folder) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All systems: their folder, and what was printed. Copy it to change it."""
    out = tmp_path_factory.mktemp("sudoku") / "out"
    done = run_table(out)
    return SimpleNamespace(out=out, done=done, results=read(out))


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole.out, tmp_path / "out")


def rows_of(results: dict, *names: str) -> list[dict]:
    return [row for row in results["rows"] if row["system"] in names]


def test_results_hold_every_system_by_its_name(whole):
    results = whole.results
    assert list(results["systems"]) == list(results["configurations"]) == [s.name for s in SMALL_BOARDS]
    assert (results["name"], results["preset"], results["seeds"]) == ("sudoku", "ours", [0])
    for system in SMALL_BOARDS:
        about = results["systems"][system.name]
        assert about["trained_on"] == system.trained_on
        assert about["rows_seen"] == 4 * 8
        assert [point["step"] for point in about["curve"]] == ([2, 4] if system.trained_on == "logic" else [])
        assert (about["filling"] is not None) is (system.name == "ours, no z")
        run = from_dict(RunConfig, results["configurations"][system.name])
        assert sum(about["parameters"].values()) == sum(p.numel() for p in VMD(run.model).parameters())
    folders = [path for path in whole.out.iterdir() if path.is_dir()]
    assert len(folders) == len(SMALL_BOARDS)
    assert all((folder / "model.safetensors").exists() for folder in folders)


def test_every_row_names_its_sampler(whole):
    for row in whole.results["rows"]:
        setting = row["setting"]
        assert math.isfinite(row["value"])
        assert setting.keys() >= {"data", "order", "rule", "steps", "n", "z"}
        assert "nfe" in setting or "evaluations" in setting
        assert row["metric"] in ("solved", "valid", "kl_to_uniform", "kl_to_uniform_ideal")
        assert setting["rule"] == ("argmax" if row["metric"] == "solved" else "sample")
        assert row["metric"] not in ("solved", "valid") or 0 <= row["value"] <= 100
        trained_on = whole.results["systems"][row["system"]]["trained_on"]
        assert setting["data"] in {"logic": ("logic", "any"), "multi": ("multi",), "grid": ("grid",)}[trained_on]
    settings_seen = [json.dumps([r["system"], r["metric"], r["setting"]], sort_keys=True) for r in whole.results["rows"]]
    assert len(set(settings_seen)) == len(settings_seen)


def test_what_is_measured_of_a_system_is_what_its_row_is_for(whole):
    def kinds(name: str, key: str) -> set:
        return {row["setting"].get(key) for row in rows_of(whole.results, name)}

    assert kinds("GPT-2 of Ye et al.", "order_noise") == {None, 0.5}
    assert kinds("ours, codes", "order_noise") == {None}
    assert kinds("ours, codes", "tries") == {None, 1, 2}
    assert kinds("the paper's VMD", "tries") == {None}  # its boards cannot be seen under symmetries
    assert kinds("several solutions, codes", "z") == kinds("whole grids, Gaussian", "z") == {"once", "fresh"}
    assert kinds("several solutions, no z", "z") == {"once"}
    assert kinds("whole grids, no z", "steps") == {1, 5, 16}
    assert kinds("the paper's VMD", "z") == {"once", "fresh", "likeliest"}
    for name, several in (("ours, codes", True), ("the paper's VMD", False), ("GPT-2 of Ye et al.", False)):
        unfiltered = [row["setting"] for row in rows_of(whole.results, name) if row["setting"]["data"] == "any"]
        once = [setting for setting in unfiltered if "tries" not in setting and setting["z"] == "once"]
        assert once
        assert any(setting.get("revise") for setting in once) is several
        assert not any(setting.get("order_noise") for setting in unfiltered)
    for setting in (
        row["setting"] for row in rows_of(whole.results, "the paper's VMD") if row["setting"]["data"] == "logic"
    ):
        the_paper_s = setting["order"] in ("prob", "margin") and setting["steps"] == 5 and setting["z"] == "once"
        assert setting["n"] == (8 if the_paper_s else 3)


def test_a_filling_puzzle_keeps_its_clues_and_ends_full(whole):
    filling = whole.results["systems"]["ours, no z"]["filling"]
    puzzle = np.array(filling["puzzle"])
    canvases = np.array([frame["canvas"] for frame in filling["frames"]])
    assert len(canvases) == 10
    assert (canvases[:, puzzle > 0] == puzzle[puzzle > 0]).all()
    filled = (canvases > 0).sum(1)
    assert (np.diff(filled) >= 0).all()
    assert filled[-1] == 16


def test_tables_and_pictures_are_written_and_said(whole):
    assert (whole.out / "table.md").read_text() == render(whole.results)
    pictures = {path.name for path in whole.out.glob("*.png")}
    assert pictures == {"curves.png", "filling.png", "several.png"}
    for name in pictures:
        assert (whole.out / name).read_bytes().startswith(PNG)
        assert str(whole.out / name) in whole.done.err
    assert str(whole.out / "table.md") in whole.done.err
    assert whole.done.out.startswith("| system | parameters |")
    for _, (headers, lines) in sudoku_tables(whole.results):
        assert lines
        assert all(len(line) == len(headers) for line in lines)


def test_the_paper_s_figures_stand_below_its_systems(whole):
    """Although other puzzles are solved by the same orders and steps. Small boards are not the paper's."""
    assert all(row["paper"] is None for row in whole.results["rows"])
    large = whole.results | {"rows": [row | printed(row) for row in whole.results["rows"]]}
    headers, lines = sudoku_table(large)
    names = [line[0] for line in lines]
    for name in ("the paper's VMD", "GPT-2 of Ye et al."):
        assert names[names.index(name) + 1] == "  as the paper prints it"
    assert names.count("  as the paper prints it") == 2
    below = lines[names.index("the paper's VMD") + 1]
    shown = dict(zip(headers, below, strict=True))
    assert (shown["prob, NFE 5"], shown["margin, NFE 5"], shown["prob, NFE 10"]) == ("67.7", "96.9", "")


@pytest.mark.parametrize("name", [s.name for s in SMALL_BOARDS])
def test_tables_of_one_system_are_shown(whole, name):
    one = {name: whole.results["systems"][name]}
    results = whole.results | {"systems": one, "rows": rows_of(whole.results, name)}
    text = render(results)
    assert name in text
    tables = sudoku_tables(results)
    assert all(len(line) == len(headers) for _, (headers, lines) in tables for line in lines)
    assert len(tables) < 6


@pytest.mark.parametrize(
    ("name", "pictures"),
    [("the paper's VMD", {"curves.png"}), ("several solutions, codes", {"several.png"}), ("", set())],
)
def test_pictures_are_drawn_of_what_is_there(whole, name, pictures, tmp_path):
    one = {key: about for key, about in whole.results["systems"].items() if key == name}
    results = whole.results | {"systems": one, "rows": rows_of(whole.results, name)}
    assert {path.name for path in draw_sudoku(results, tmp_path)} == pictures
    assert {path.name for path in tmp_path.iterdir()} == pictures
    assert render(results)


def test_a_report_shows_the_table_and_its_pictures(whole):
    shown = whole.out.parent / "results"
    shutil.copytree(whole.out, shown / "sudoku", dirs_exist_ok=True)
    text = section(shown, "sudoku", whole.out.parent / "README.md")
    assert "| the paper's VMD |" in text
    assert whole.results["command"] in text
    assert "(results/sudoku/curves.png)" in text


# Stopped, resumed, and run one by one


PAIR = ("ours, no z", "the paper's VMD")


def watch(monkeypatch, stop_at: tuple[str, int] | None = None) -> list[tuple[str, int]]:
    """The (folder, step) of all training steps from now on; stops at one of them."""
    seen, train = [], puzzle_table.train

    def watched(*args, on_step, out, **options):
        def step(done, record):
            seen.append((out.name, done))
            on_step(done, record)
            if (out.name, done) == stop_at:
                raise KeyboardInterrupt

        return train(*args, on_step=step, out=out, **options)

    monkeypatch.setattr(puzzle_table, "train", watched)
    return seen


@pytest.mark.parametrize("stop", [1, 4])
def test_a_stopped_run_goes_on_to_the_same_results(whole, tmp_path, monkeypatch, stop):
    with monkeypatch.context() as patch:
        watch(patch, ("the-papers-VMD", stop))
        assert run_table(tmp_path / "out", only=PAIR, code=130).out == ""
    assert list(read(tmp_path / "out")["systems"]) == [PAIR[0]]  # what is done is there to see
    seen = watch(monkeypatch)
    run_table(tmp_path / "out", "--resume", only=PAIR)
    assert seen == [("the-papers-VMD", step) for step in range(stop + 1, 5)]  # and nothing of the finished one
    resumed = read(tmp_path / "out")
    assert resumed["rows"] == rows_of(whole.results, *PAIR)
    for name in PAIR:
        assert resumed["systems"][name]["curve"] == whole.results["systems"][name]["curve"]


def test_a_run_that_died_before_its_first_checkpoint_is_resumed(tmp_path, monkeypatch):
    rare = settings("training.checkpoint_every=100")
    with monkeypatch.context() as patch:
        watch(patch, ("the-papers-VMD", 2))
        run_table(tmp_path / "out", *rare, only=PAIR[1:], code=130)
    seen = watch(monkeypatch)
    run_table(tmp_path / "out", "--resume", *rare, only=PAIR[1:])
    assert [step for _, step in seen] == [1, 2, 3, 4]
    assert list(read(tmp_path / "out")["systems"]) == ["the paper's VMD"]


def test_a_stop_while_measuring_loses_no_training(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(puzzle_table, "measure", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_table(tmp_path / "out", only=PAIR[:1])
    seen = watch(monkeypatch)
    run_table(tmp_path / "out", "--resume", only=PAIR[:1])
    assert seen == []
    about = read(tmp_path / "out")["systems"]["ours, no z"]
    assert [point["step"] for point in about["curve"]] == [2, 4]


def test_systems_run_one_by_one_stand_in_one_table(whole, tmp_path):
    for name in reversed(PAIR):
        done = run_table(tmp_path / "out", "--resume", only=(name,))
    results = read(tmp_path / "out")
    assert list(results["systems"]) == list(PAIR)  # in the order of the table
    assert results["rows"] == rows_of(whole.results, *PAIR)
    assert "the paper's VMD" in done.out


def test_each_system_says_by_which_command_and_where_it_was_made(tmp_path):
    """A table may be made in several goes, on several machines."""
    for name, more in zip(PAIR, ([], ["--resume"]), strict=True):
        run_table(tmp_path / "out", *more, only=(name,))
    systems = read(tmp_path / "out")["systems"]
    for mine, other in (PAIR, PAIR[::-1]):
        words = shlex.split(systems[mine]["command"])
        assert mine in words
        assert other not in words
        assert systems[mine]["hardware"]["device"] == "cpu"


def test_a_system_that_was_computed_another_way_is_the_same():
    """On another machine, or faster; with anything else that training knows it is another system."""
    run = planned(SYSTEMS[0], FULL, False, [], "cpu")
    computed = {"attention": "tiles", "capture": True, "precision": "bf16", "compile": True, "accumulate": 2}
    other = {"steps": 9, "batch_size": 9, "optimizer": "adam", "learning_rate": 0.5, "weight_decay": 0.5, "seed": 9}
    other |= {"schedule": "constant", "warmup_steps": 9, "clip": 9.0, "ema": 0.5, "split_codes_every": 9, "freeze": True}
    for field, value in (computed | other).items():
        saved = json.loads(json.dumps(to_dict(run)))
        assert saved["training"][field] != value
        saved["training"][field] = value
        assert is_of(saved, run) == (field in computed)
    rest = {"init", "parallel", "log_every", "checkpoint_every"}
    assert computed.keys() | other.keys() | rest == to_dict(run)["training"].keys()


def test_a_table_goes_on_from_its_results_alone(whole, tmp_path, monkeypatch):
    """Without the folders of the systems that are done, as when it was fetched from elsewhere."""
    run_table(tmp_path / "first", only=PAIR[:1])
    (tmp_path / "out").mkdir()
    shutil.copy(tmp_path / "first/results.json", tmp_path / "out")
    seen = watch(monkeypatch)
    run_table(tmp_path / "out", "--resume", only=PAIR)
    assert {folder for folder, _ in seen} == {"the-papers-VMD"}
    results = read(tmp_path / "out")
    assert results["rows"] == rows_of(whole.results, *PAIR)
    assert results["systems"]["ours, no z"] == read(tmp_path / "first")["systems"]["ours, no z"]


def test_small_boards_do_not_stand_in_a_table_of_large_ones(tmp_path):
    committed = Path(__file__).parents[1] / "results/sudoku/results.json"
    (tmp_path / "out").mkdir()
    shutil.copy(committed, tmp_path / "out")
    told = refused(*quick_words(tmp_path / "out", "--resume", "--only", "ours, no z"), folder=tmp_path / "out")
    assert "of a full run: expected another --out" in told
    assert (tmp_path / "out/results.json").read_bytes() == committed.read_bytes()


def other_puzzles(patch, kind: str) -> None:
    draw = puzzle_table.draw_puzzles
    seeds = {kind: 1}
    patch.setattr(puzzle_table, "draw_puzzles", lambda n, k, seed, box: draw(n, k, seed=seeds.get(k, seed), box=box))


@pytest.mark.parametrize(
    ("kind", "system", "refused_too", "what"),
    [
        ("logic", "ours, no z", "ours, codes", "logic, test, logic, train"),
        ("any", "ours, no z", "ours, codes", "any, test"),
        ("multi", "several solutions, no z", "several solutions, codes", "multi, test, multi, train"),
    ],
)
def test_rows_of_one_table_are_of_the_same_puzzles(tmp_path, monkeypatch, kind, system, refused_too, what):
    monkeypatch.setattr(puzzle_table, "QUICK", TINY)
    out = tmp_path / "out"
    run_table(out, only=(system,))
    before = (out / "results.json").read_bytes()
    other_puzzles(monkeypatch, kind)
    told = refused(*quick_words(out, "--resume", "--only", refused_too), folder=out)
    assert f"holds {system!r} of other puzzles than these ({what}): expected the same, or another --out" in told
    run_table(out, "--resume", only=(system,))  # is done and asks for none
    assert json.loads(before)["rows"] == read(out)["rows"]
    run_table(out, "--resume", only=("whole grids, no z",))  # has other ones


def test_a_stopped_system_does_not_go_on_with_other_puzzles(tmp_path, monkeypatch):
    monkeypatch.setattr(puzzle_table, "QUICK", TINY)
    with monkeypatch.context() as patch:
        watch(patch, ("ours-no-z", 2))
        run_table(tmp_path / "out", only=PAIR[:1], code=130)
    with monkeypatch.context() as patch:
        other_puzzles(patch, "logic")
        told = refused(*quick_words(tmp_path / "out", "--resume", "--only", PAIR[0]), folder=tmp_path / "out")
    assert "ours-no-z was begun with puzzles" in told
    run_table(tmp_path / "out", "--resume", only=PAIR[:1])


def test_a_fingerprint_is_of_all_puzzles_that_are_used_and_of_no_others():
    sets = {kind: split_small(draw_puzzles(40, kind, seed=0, box=2), 8) for kind in ("logic", "multi")}
    budget = replace(TINY, sizes={"logic": (10, 6), "multi": (10, 6)})

    def prints() -> dict:
        return puzzle_table.fingerprints(sets, budget, {"multi"})

    first = prints()
    assert set(first) == {"logic, test", "multi, test", "multi, train"}
    assert len(set(first.values())) == 3
    for kind, side, place, moved in (
        ("logic", 1, 5, {"logic, test"}),  # the last that is measured
        ("logic", 1, 6, set()),
        ("logic", 0, 0, set()),  # no system was trained on them
        ("multi", 0, -1, {"multi, train"}),
    ):
        for array in (sets[kind][side].puzzle, sets[kind][side].solution):
            kept = array[place].copy()
            array[place, -1] += 1
            now = prints()
            assert {what for what in first if now[what] != first[what]} == moved
            array[place] = kept


def test_every_curve_of_several_solutions_is_that_of_its_rows(monkeypatch, tmp_path):
    values = {("no z", "once"): 1, ("codes", "once"): 2, ("codes", "fresh"): 3}
    rows = [
        {
            "system": f"{group}, {latent}",
            "setting": {"data": data, "z": z, "nfe": nfe},
            "metric": "valid",
            "value": 10 * nfe + value + shift,
            "stderr": 1.0,
        }
        for group, data, shift in (("several solutions", "multi", 0), ("whole grids", "grid", 40))
        for (latent, z), value in values.items()
        for nfe in (5, 1)
        if (data, latent, nfe, z) != ("multi", "codes", 1, "fresh")  # one step has one z
        and (data, latent) != ("grid", "no z")
    ]
    drawn = []
    monkeypatch.setattr(puzzle_figures, "save", lambda figure, path: drawn.append(figure) or path)
    puzzle_figures.draw_several(rows, tmp_path / "x.png")
    left, right = drawn[0].axes

    def curves(axis) -> dict:
        lines = [c.lines[0] for c in axis.containers]
        return {(line.get_color(), line.get_linestyle()): (*line.get_xdata(), *line.get_ydata()) for line in lines}

    blue, orange = plotting.pyplot().get_cmap("tab10")([0, 1]).tolist()
    blue, orange = tuple(blue), tuple(orange)
    assert curves(left) == {
        (blue, "-"): (1, 5, 11, 51),
        (orange, "-"): (1, 5, 12, 53),  # fresh, from the same point
        (orange, "--"): (1, 5, 12, 52),
    }
    assert {key: y[-1] for key, y in curves(right).items()} == {(orange, "-"): 93, (orange, "--"): 92}
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["no z", "codes, z fresh", "codes, z once"]


def test_nothing_is_made_for_a_table_that_is_whole(copied, monkeypatch):
    before = read(copied)["rows"]
    monkeypatch.setattr(puzzle_table, "puzzle_sets", lambda *args: 1 / 0)
    run_table(copied, "--resume", only=PAIR)
    assert read(copied)["rows"] == before


def test_the_committed_table_is_of_the_systems_as_they_are_now():
    """So that it can go on: a preset that changes makes its row another system's."""
    done = read_done(Path(__file__).parents[1] / "results/sudoku", True, "sudoku")
    assert len(done) >= 8
    for system in SYSTEMS:
        if system.name in done:
            assert is_of(done[system.name]["configuration"], planned(system, FULL, False, [], "cuda")), system.name


def test_a_finished_run_is_not_run_again(copied, monkeypatch):
    before, seen = read(copied), watch(monkeypatch)
    run_table(copied, "--resume", only=tuple(before["systems"]))
    assert seen == []
    assert read(copied) == before | {"command": read(copied)["command"], "hardware": read(copied)["hardware"]}


def test_longer_training_runs_a_system_anew_and_says_which_settings_it_had(copied, monkeypatch):
    """Not from its checkpoints, which are of rates that fell faster."""
    before, seen = read(copied), watch(monkeypatch)
    longer = ("--resume", *settings("training.steps=5"))
    with monkeypatch.context() as patch:
        patch.setattr(puzzle_table, "QUICK", TINY)
        told = refused(*quick_words(copied, "--only", PAIR[0], *longer), folder=copied)
    assert "cannot resume with training.steps=5: the run has 4: remove " in told
    shutil.rmtree(copied / "ours-no-z")
    run_table(copied, *longer, only=PAIR[:1])
    assert seen == [("ours-no-z", step) for step in (1, 2, 3, 4, 5)]
    after = read(copied)
    assert {name: run["training"]["steps"] for name, run in after["configurations"].items()} == {
        name: 5 if name == PAIR[0] else 4 for name in before["systems"]
    }
    assert after["systems"][PAIR[0]]["rows_seen"] == 5 * 8
    kept = [name for name in before["systems"] if name != PAIR[0]]
    assert rows_of(after, *kept) == rows_of(before, *kept)


def quick_words(out, *words) -> tuple:
    return ("reproduce", "sudoku", "--quick", "--device", "cpu", "--out", out, *words)


def test_other_settings_are_not_mixed_into_a_run(copied, monkeypatch):
    monkeypatch.setattr(puzzle_table, "QUICK", TINY)
    other = ("--resume", "--only", "ours, no z", *settings("training.learning_rate=0.5"))
    assert "training.learning_rate=0.5" in refused(*quick_words(copied, *other), folder=copied)
    assert "--resume" in refused(*quick_words(copied), folder=copied)
    assert "--resume" in refused(*quick_words(copied, "--only", "ours, codes"), folder=copied)


def test_one_system_needs_only_its_own_settings_to_fit_and_keeps_them(tmp_path):
    """A width that others cannot have, and another seed."""
    chosen = settings("model.heads=1", "model.width=18", "model.heads=3", "training.seed=3")
    run_table(tmp_path / "out", *chosen, only=PAIR[:1])
    results = read(tmp_path / "out")
    assert results["seeds"] == [3]
    assert results["configurations"]["ours, no z"]["model"]["width"] == 18


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_record_of_a_stopped_run_is_one_line(content, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/results.json").write_text(content)
    assert "results.json" in refused(*quick_words(tmp_path / "out", "--resume"), folder=tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "ours"], "--only"),
        (["--only", "ours, no z", "--only", "theirs"], "theirs"),
        (["--only", "ours, no z, any puzzles"], "--quick"),
        (["--preset", "paper"], "--preset paper"),
        (["--seeds", "3"], "--seeds"),
        (["--set", "model.layers=0"], "model.layers=0"),
        (["--set", "training.nonsense=1"], "nonsense"),
    ],
)
def test_wrong_orders_are_one_line(words, says, tmp_path):
    assert says in refused(*quick_words(tmp_path / "out", *words), folder=tmp_path)


def test_systems_are_chosen_of_sudoku_alone(tmp_path):
    words = ("reproduce", "four-token", "--quick", "--out", tmp_path / "out", "--only", "ours, no z")
    assert "--only" in refused(*words, folder=tmp_path)


def test_a_curve_says_what_it_was_tested_on_if_not_logic_puzzles(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(puzzle_figures, "draw_accuracy_curves", lambda curves, nfe, path: drawn.append((list(curves), nfe)))
    point = {"step": 1, "solved": 50.0, "stderr": 1.0}
    systems = {name: {"trained_on": name, "curve": [point], "filling": None} for name in ("logic", "any")}
    setting = {"data": "logic", "order": "prob", "steps": 20, "rule": "argmax", "z": "once"}
    row = {"system": "logic", "metric": "solved", "value": 50.0, "stderr": 1.0, "setting": setting}
    draw_sudoku({"systems": systems, "rows": [row]}, tmp_path)
    assert drawn == [(["logic", "any, tested on any"], 20)]
