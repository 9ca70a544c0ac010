import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from command import ROOT, refused, settings, succeeds, vmd
from helpers import LawOracle, chi_square_p, close, exact_denoiser, gaps, random_tokens, sequence_counts, tiny_config
from vmd.config import RunConfig, from_dict, override_all, to_dict
from vmd.data import Law, law
from vmd.experiments import controlled
from vmd.experiments.controlled import (
    FULL,
    PAPER,
    QUICK,
    Cell,
    StackedLaws,
    aggregate,
    cells_of,
    evaluate_cell,
    groups_of,
    render,
    settings_of,
    train_group,
    truth_table,
)
from vmd.metrics import FLOOR, kl_to
from vmd.presets import FOUR_TOKEN, TWO_TOKEN, preset, synthetic
from vmd.sampling import sample

FAST = settings("training.steps=2", "training.batch_size=8", "model.layers=1", "model.width=16")
PAIRS = ("two-token", "two-token-paper", "four-token", "four-token-paper")  # the others have tests of their own
COMMITTED = sorted(path for path in (ROOT / "results").glob("*/results.json") if path.parent.name in PAIRS)
PNG = b"\x89PNG\r\n\x1a\n"


def run_table(name: str, out, *words: str, data: tuple[str, ...] | None = None, code: int = 0):
    """`vmd reproduce NAME --quick`, on a budget of almost nothing."""
    tiny = replace(QUICK[name], draws=60, z_draws=40, data=data or QUICK[name].data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controlled, "QUICK", {name: tiny})
        done = vmd("reproduce", name, "--quick", "--device", "cpu", "--out", out, *FAST, *words)
    assert done.code == code, done.err
    return done


@pytest.fixture(scope="module", params=["two-token", "four-token"])
def table(request, tmp_path_factory):
    """A table run with two seeds: its name, its folder, and what was printed."""
    out = tmp_path_factory.mktemp("table") / "out"
    done = run_table(request.param, out, "--seeds", "2")
    return SimpleNamespace(name=request.param, out=out, done=done, results=json.loads((out / "results.json").read_text()))


@pytest.fixture(scope="module", params=COMMITTED, ids=lambda path: path.parent.name)
def committed(request):
    results = json.loads(request.param.read_text())
    return SimpleNamespace(name=results["name"], out=request.param.parent, results=results)


def cell(data: str, block: int, system: str = "VMD", family: str = "ours") -> Cell:
    return Cell(system, family, synthetic(data, block, latent=system == "VMD", family=family))


def resolved(run: RunConfig) -> RunConfig:
    """With what the data decide filled in."""
    truth = law(run.data.name)
    return replace(run, model=run.model.resolved(truth.length, truth.vocab_size))


def place(row: dict) -> tuple:
    return (row["system"], *(row["setting"][key] for key in ("data", "block", "steps", "rule", "z")), row["metric"])


def one_step_kl(truth: Law, block: int) -> float:
    """What a perfect MDM shows with one step per block: tokens of a block independent given the blocks before."""
    log_p = exact_denoiser(truth, block)(torch.full_like(truth.sequences, truth.vocab_size), truth.sequences, None)
    q = log_p.gather(-1, truth.sequences.unsqueeze(-1)).squeeze(-1).sum(-1).exp()
    return kl_to(truth, q)


# The contract of results.json


def check_contract(results: dict) -> None:
    assert results.keys() >= {"name", "command", "seeds", "hardware", "versions", "seconds", "rows"}
    assert results["hardware"].keys() >= {"device", "name"}
    assert results["versions"].keys() >= {"vmd", "torch", "python"}
    assert results["seconds"] >= 0
    for row in results["rows"]:
        assert row.keys() >= {"system", "setting", "metric", "value", "stderr", "paper"}
        assert row["setting"].keys() >= {"data", "block", "steps", "nfe", "order", "rule", "z", "n"}
        assert row["system"] in ("MDM", "VMD")
        assert row["metric"] in ("accuracy", "kl", "kl_exact")
        assert math.isfinite(row["value"])
        assert len(row["values"]) == len(results["seeds"])
        assert close(row["value"], sum(row["values"]) / len(row["values"]))
        assert row["metric"] != "accuracy" or 0 <= row["value"] <= 100 + 1e-9
        assert (
            row["setting"]["nfe"] == row["setting"]["steps"] * law(row["setting"]["data"]).length // row["setting"]["block"]
        )
        assert (row["setting"]["z"] == "none") is (row["system"] == "MDM")
    assert len({place(row) for row in results["rows"]}) == len(results["rows"])


def check_paper_column(results: dict) -> None:
    for row in results["rows"]:
        setting = row["setting"]
        printed = PAPER.get((row["system"], setting["data"], setting["block"], setting["steps"]), (None, None))
        assert row["paper"] == printed[0 if row["metric"] == "accuracy" else 1]


def check_rules(results: dict) -> None:
    """Every VMD row by both rules; MDM by the sample rule, and by argmax in one step of uniform pairs and D1."""
    found = {place(row) for row in results["rows"]}
    for system, data, block, steps, rule, z, metric in found:
        if metric == "kl_exact":
            assert (rule, steps) == ("sample", 1)
        elif system == "VMD":
            assert all((system, data, block, steps, other, z, metric) in found for other in ("argmax", "sample"))
        else:
            assert (system, data, block, steps, "sample", z, metric) in found
            assert rule == "sample" or (steps == 1 and data in ("deterministic", "d1"))
    for system, data, block, steps, rule, z, metric in found:
        if metric == "kl" and (rule, steps) == ("sample", 1):
            assert (system, data, block, steps, rule, z, "kl_exact") in found
        if metric == "kl":
            assert ((system, data, block, steps, rule, z, "accuracy") in found) is law(data).constrains


def check_accuracy_bounds_kl(results: dict) -> None:
    """KL >= -ln(accuracy), for every seed: the mass outside the support is lost."""
    rows = {place(row): row for row in results["rows"]}
    for key, row in rows.items():
        if key[-1] != "accuracy":
            continue
        floor = FLOOR * len(law(row["setting"]["data"]).sequences)
        for accuracy, kl in zip(row["values"], rows[*key[:-1], "kl"]["values"], strict=True):
            assert kl >= -math.log(accuracy / 100 + floor) - 1e-9


def check_heatmaps(out) -> None:
    for data, tables in json.loads((out / "heatmaps.json").read_text()).items():
        assert torch.allclose(torch.tensor(tables["truth"]), torch.tensor(truth_table(law(data))), atol=1e-6)
        assert {name.split()[0] for name in tables} == {"truth", "MDM", "VMD"}
        for shares in tables.values():
            assert close(sum(map(sum, shares)), 1, 1e-6)
            assert all(share >= 0 for line in shares for share in line)


def test_results_obey_the_contract(table):
    check_contract(table.results)
    check_paper_column(table.results)
    assert table.results["name"] == table.name
    assert table.results["seeds"] == [0, 1]
    assert table.results["command"].startswith(f"vmd reproduce {table.name} --quick --device cpu --out ")


def test_every_row_is_there_by_its_rules(table):
    check_rules(table.results)
    wanted = {(c.system, c.data, c.block) for c in cells_of(table.name, QUICK[table.name].data, "ours")}
    assert {place(row)[:3] for row in table.results["rows"]} == wanted


def test_accuracy_bounds_kl_from_below(table):
    check_accuracy_bounds_kl(table.results)


def test_each_row_is_drawn_as_often_as_it_says(table):
    for row in table.results["rows"]:
        if row["metric"] != "kl_exact":
            assert row["setting"]["n"] == 60
            share = row["value"] * 2 * 60 / 100
            assert row["metric"] != "accuracy" or close(share, round(share), 1e-6)
        elif row["system"] == "MDM":
            assert row["setting"]["n"] == 1  # no latent to integrate over


def test_the_configuration_of_each_row_is_kept(table):
    kept = table.results["configurations"]
    assert kept.keys() == {
        f"{c.system} ours {c.data} block {c.block}" for c in cells_of(table.name, QUICK[table.name].data, "ours")
    }
    assert all(run["training"]["steps"] == 2 and run["model"]["width"] == 16 for run in kept.values())


def test_tables_and_figures_are_written(table):
    assert (table.out / "table.md").read_text() == render(table.results)
    pictures = {path.name for path in table.out.glob("*.png")}
    heatmaps = {f"heatmap-{data}.png" for data in QUICK["two-token"].data}
    assert pictures == (heatmaps if table.name == "two-token" else {"four-token.png"})
    assert all((table.out / name).read_bytes().startswith(PNG) for name in pictures)
    assert not list(table.out.glob("*.partial"))


def test_heat_maps_sum_to_one(table):
    if table.name == "two-token":
        check_heatmaps(table.out)
    else:
        assert not (table.out / "heatmaps.json").exists()


def test_the_table_is_printed_and_the_rest_is_said(table):
    assert table.done.out.startswith("| data | blocks | NFE | ")
    assert len(table.done.out.splitlines()) == 2 + len({place(row)[1:4] for row in table.results["rows"]})
    assert f"vmd reproduce {table.name}" in table.done.err
    assert all(str(path) in table.done.err for path in table.out.glob("*.png"))


def test_the_same_seeds_give_the_same_rows(tmp_path):
    values = []
    for number in range(2):
        run_table("four-token", tmp_path / str(number), data=("d1",))
        values.append(json.loads((tmp_path / str(number) / "results.json").read_text())["rows"])
    assert values[0] == values[1]
    assert all(row["stderr"] is None for row in values[0])


def test_a_stopped_run_is_resumed_to_the_same_rows(tmp_path, monkeypatch):
    """The second of four groups fails; resumed, the first is not trained again."""
    trained, train = [], controlled.train_group

    def failing_at(count):
        def train_some(cells, *rest):
            if len(trained) == count:
                raise KeyboardInterrupt
            trained.append((cells[0].system, cells[0].block))
            return train(cells, *rest)

        return train_some

    whole = run_table("four-token", tmp_path / "whole", data=("d1",))
    monkeypatch.setattr(controlled, "train_group", failing_at(1))
    stopped = run_table("four-token", tmp_path / "resumed", data=("d1",), code=130)
    assert stopped.out == ""
    monkeypatch.setattr(controlled, "train_group", failing_at(9))
    resumed = run_table("four-token", tmp_path / "resumed", "--resume", data=("d1",))
    assert trained == [("MDM", 2), ("MDM", 4), ("VMD", 2), ("VMD", 4)]
    assert resumed.out == whole.out
    rows = [json.loads((tmp_path / name / "results.json").read_text())["rows"] for name in ("whole", "resumed")]
    assert rows[0] == rows[1]
    assert {path.name for path in (tmp_path / "resumed").iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}


def test_results_are_not_lost_by_chance(tmp_path, monkeypatch):
    out = tmp_path / "out"
    run_table("four-token", out, data=("d1",))
    made = (out / "results.json").read_bytes()
    for words in ((), ("--resume",)):
        told = run_table("four-token", out, *words, data=("d1",), code=2).err
        assert "out holds results: expected --overwrite, or another --out" in told
    assert (out / "results.json").read_bytes() == made
    run_table("four-token", out, "--overwrite", *settings("training.steps=1"), data=("d1",))
    assert (out / "results.json").read_bytes() != made
    (out / "partial.json").write_text("{}")
    assert "out holds a stopped run: expected --resume" in run_table("four-token", out, data=("d1",), code=2).err


def test_other_settings_are_not_resumed(tmp_path, monkeypatch):
    run_table("four-token", tmp_path / "new", *settings("training.steps=1"), data=("d1",))
    with monkeypatch.context() as patch:
        patch.setattr(controlled, "render", lambda results: 1 / 0)  # stopped before the last file
        with pytest.raises(ZeroDivisionError):
            run_table("four-token", tmp_path / "old", data=("d1",))
    run_table("four-token", tmp_path / "old", "--resume", *settings("training.steps=1"), data=("d1",))
    rows = [json.loads((tmp_path / name / "results.json").read_text())["rows"] for name in ("new", "old")]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}'])
def test_a_damaged_record_of_a_stopped_run_is_one_line_or_ignored(content, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "partial.json").write_text(content)
    if content == '{"a": 1}':
        run_table("four-token", tmp_path / "out", "--resume", data=("d1",))
    else:
        words = ("reproduce", "four-token", "--quick", "--resume", "--out", tmp_path / "out", *FAST)
        assert "partial.json" in refused(*words, folder=tmp_path)


def test_the_papers_settings_are_run_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        controlled, "QUICK", {"two-token": replace(QUICK["two-token"], draws=20, z_draws=10, data=("non-uniform",))}
    )
    succeeds("reproduce", "two-token", "--quick", "--preset", "paper", "--device", "cpu", *FAST)
    results = json.loads((tmp_path / "runs" / "two-token-paper-quick" / "results.json").read_text())
    assert results["preset"] == "paper"
    assert {row["setting"]["preset"] for row in results["rows"]} == {"paper"}
    weights = {row["setting"]["kl_weight"] for row in results["rows"] if row["system"] == "VMD"}
    assert weights == {preset("non-uniform-paper").objective.kl_weight}


@pytest.mark.parametrize("setting", ["model.block_size=4", "model.latent.kind=none"])
def test_what_makes_a_row_that_row_cannot_be_overridden(setting, tmp_path, monkeypatch):
    """Otherwise rows of different blocks become one, or a model without latent is called VMD."""
    tiny = {"four-token": replace(QUICK["four-token"], draws=20, z_draws=10)}
    monkeypatch.setattr(controlled, "QUICK", tiny)
    field = setting.split("=")[0]
    words = ("reproduce", "four-token", "--quick", "--device", "cpu", "--out", tmp_path / "out", *FAST, "--set", setting)
    assert field in refused(*words, folder=tmp_path)


# The committed results


def test_committed_results_obey_the_contract(committed):
    check_contract(committed.results)
    check_paper_column(committed.results)
    check_rules(committed.results)
    check_accuracy_bounds_kl(committed.results)


def test_committed_results_come_from_full_runs(committed):
    words = committed.results["command"].split()
    assert words[:3] == ["vmd", "reproduce", committed.name]
    assert "--quick" not in words
    assert "--set" not in words
    assert len(committed.results["seeds"]) >= 3
    wanted = {(c.system, c.data, c.block) for c in cells_of(committed.name, FULL[committed.name].data, "ours")}
    assert {place(row)[:3] for row in committed.results["rows"]} == wanted


def test_committed_results_come_from_the_presets_as_they_are(committed):
    family = committed.results["preset"]
    for c in cells_of(committed.name, FULL[committed.name].data, family):
        ran = from_dict(RunConfig, committed.results["configurations"][f"{c.system} {family} {c.data} block {c.block}"])
        machine = {"precision": c.run.training.precision, "compile": c.run.training.compile}
        assert resolved(replace(ran, training=replace(ran.training, **machine))) == resolved(c.run)


def test_committed_baselines_show_what_theory_says(committed):
    """One step per block: the KL of an MDM is the total correlation within blocks; counting adds noise and a bias."""
    seeds = len(committed.results["seeds"])
    for row in committed.results["rows"]:
        setting = row["setting"]
        if row["system"] == "VMD" or setting["steps"] > 1 or setting["rule"] != "sample" or row["metric"] == "accuracy":
            continue
        truth = law(setting["data"])
        theory, tolerance = one_step_kl(truth, setting["block"]), 0.02
        if row["metric"] == "kl" and truth.length == 4:
            counts = setting["n"] * math.exp(-theory) / len(truth.sequences)  # of each sequence
            tolerance = 0.05 + 0.5 / counts + 3 / math.sqrt(counts * len(truth.sequences) * seeds)
        assert abs(row["value"] - theory) < tolerance, place(row)


def test_committed_counts_agree_with_integration(committed):
    rows = {place(row): row for row in committed.results["rows"]}
    for key, row in rows.items():
        if row["system"] == "VMD" and row["metric"] == "kl_exact":
            assert abs(row["value"] - rows[*key[:-1], "kl"]["value"]) < 0.03


def test_committed_latents_beat_the_baseline_in_one_step(committed):
    rows = {place(row): row["value"] for row in committed.results["rows"]}
    for (system, data, block, steps, rule, z, metric), value in rows.items():
        if (system, steps, z, metric) == ("VMD", 1, "once", "kl"):
            assert value < rows["MDM", data, block, 1, "sample", "none", "kl"], (data, block, rule)


def test_committed_tables_and_figures_are_those_of_the_results(committed):
    assert (committed.out / "table.md").read_text() == render(committed.results)
    names = (
        [f"heatmap-{data}.png" for data in FULL["two-token"].data] if committed.name == "two-token" else ["four-token.png"]
    )
    assert all((committed.out / name).read_bytes().startswith(PNG) for name in names)
    if committed.name == "two-token":
        check_heatmaps(committed.out)


# The paper's figures, transcribed once more in the order of its tables


def test_table_one_of_the_paper():
    rows = {  # data, steps: KL and accuracy of MDM, KL and accuracy of VMD
        ("deterministic", 1): (2.3, 10.18, 0.082, 93.2),
        ("deterministic", 2): (0.001, 99.97, 0.012, 100),
        ("non-uniform", 1): (2.2, 11.63, 0.081, 93.04),
        ("non-uniform", 2): (0.023, 99.96, 0.009, 99.98),
    }
    for (data, steps), (mdm_kl, mdm_accuracy, vmd_kl, vmd_accuracy) in rows.items():
        assert PAPER["MDM", data, 2, steps] == (mdm_accuracy, mdm_kl)
        assert PAPER["VMD", data, 2, steps] == (vmd_accuracy, vmd_kl)


def test_table_two_of_the_paper():
    for p, baseline, latent in [(0.3, 0.155, 0.054), (0.5, 0.516, 0.062), (0.7, 1.03, 0.064), (1.0, 2.31, 0.079)]:
        assert PAPER["MDM", f"dependence-{p:g}", 2, 1] == (None, baseline)
        assert PAPER["VMD", f"dependence-{p:g}", 2, 1] == (None, latent)


def test_table_three_of_the_paper():
    columns = [(data, block, steps) for data in ("d1", "d2") for block, steps in ((2, 2), (2, 1), (4, 4), (4, 1))]
    accuracies = {
        "MDM": (99.4, 10.1, 99.3, 0.1, 99.3, 1.1, 99.1, 1.1),
        "VMD": (100, 94.2, 100, 87.3, 100, 88.6, 100, 80.0),
    }
    kls = {
        "MDM": (0.007, 2.298, 0.010, 9.422, 0.018, 7.656, 0.015, 7.493),
        "VMD": (0.012, 0.068, 0.033, 0.165, 0.018, 0.148, 0.475, 0.268),
    }
    for system in ("MDM", "VMD"):
        for column, accuracy, kl in zip(columns, accuracies[system], kls[system], strict=True):
            assert PAPER[system, *column] == (accuracy, kl)


def test_nothing_else_is_printed_in_the_paper():
    assert len(PAPER) == 2 * (4 + 4 + 8)
    assert {data for _, data, _, _ in PAPER} == {*TWO_TOKEN, *FOUR_TOKEN} - {"dependence-0.8"}


# Pieces


def mdm_oracle(truth: Law, block: int) -> SimpleNamespace:
    """What evaluation needs of a model, answering with the law's exact conditionals."""
    return SimpleNamespace(
        config=tiny_config(truth.length, block, truth.vocab_size),
        device=torch.device("cpu"),
        mask_id=truth.vocab_size,
        latent_shape=lambda batch: None,
        denoise=exact_denoiser(truth, block),
        sample=lambda n, batch_size, **options: sample(LawOracle(truth, block), gaps(n, truth.length), **options),
    )


ORACLES = {
    ("deterministic", 2): 2.3026,
    ("non-uniform", 2): 2.1513,
    ("dependence-0.3", 2): 0.1537,
    ("dependence-0.5", 2): 0.5108,
    ("dependence-0.7", 2): 1.0326,
    ("dependence-0.8", 2): 1.3628,
    ("dependence-1", 2): 2.3026,
    ("d1", 2): 2.3026,
    ("d2", 2): 4.6052,
    ("d1", 4): 6.9078,
    ("d2", 4): 4.6052,
}


@pytest.mark.parametrize(("data", "block"), ORACLES)
def test_a_perfect_baseline_scores_what_theory_says(data, block):
    budget = replace(QUICK["two-token"], draws=4_000)
    rows, _ = evaluate_cell(cell(data, block, "MDM"), 0, mdm_oracle(law(data), block), budget)
    value = {place(row)[3:]: row["value"] for row in rows}
    assert abs(value[1, "sample", "none", "kl_exact"] - ORACLES[data, block]) < 1e-4
    assert value[block, "sample", "none", "kl"] < 0.05
    assert close(value.get((block, "sample", "none", "accuracy"), 100), 100)
    if block == law(data).length:
        assert close(value[1, "sample", "none", "kl_exact"], law(data).total_correlation(), 1e-6)


def test_a_perfect_baseline_degenerates_by_argmax():
    rows, pictures = evaluate_cell(
        cell("deterministic", 2, "MDM"), 0, mdm_oracle(law("deterministic"), 2), QUICK["two-token"]
    )
    value = {place(row)[3:]: row["value"] for row in rows}
    assert value[1, "argmax", "none", "kl"] > 14
    assert sorted(share for line in pictures["MDM ours argmax"] for share in line)[-1] == 1


@pytest.mark.parametrize("names", [["deterministic", "non-uniform", "dependence-0.5", "dependence-1"], ["d1", "d2", "d1"]])
def test_stacked_laws_draw_each_member_from_its_own(names, generator):
    laws = [law(name) for name in names]
    batch = StackedLaws(laws).batch(0, 5_000, generator=generator)
    assert batch.shape == (len(laws), 5_000, laws[0].length)
    assert batch.dtype == torch.int64
    for tokens, truth in zip(batch, laws, strict=True):
        assert chi_square_p(sequence_counts(tokens, truth), truth.probabilities) > 1e-3


def test_members_of_one_law_draw_different_batches(generator):
    a, b = StackedLaws([law("d2"), law("d2")]).batch(0, 100, generator=generator)
    assert not torch.equal(a, b)


def test_a_group_differs_in_data_and_kl_weight_only():
    two = cells_of("two-token", TWO_TOKEN, "ours")
    groups = groups_of(two)
    assert [[c.data for c in group] for group in groups] == [list(TWO_TOKEN)] * 2
    assert [{c.system for c in group} for group in groups] == [{"MDM"}, {"VMD"}]
    four = groups_of(cells_of("four-token", FOUR_TOKEN, "paper"))
    assert [(group[0].system, group[0].block) for group in four] == [(s, b) for s in ("MDM", "VMD") for b in (2, 4)]
    for group in [*groups, *four]:
        same = {json.dumps(to_dict(override_all(c.run, ["data.name=x", "objective.kl_weight=1"]))) for c in group}
        assert len(same) == 1


@pytest.mark.parametrize("setting", ["model.layers=3", "training.steps=9", "objective.free_bits=1", "data.fixed=0"])
def test_cells_that_differ_otherwise_are_trained_apart(setting):
    one = cell("d1", 4)
    other = replace(cell("d2", 4), run=override_all(cell("d2", 4).run, [setting]))
    assert len(groups_of([one, other])) == 2


def test_every_cell_is_in_one_group():
    cells = cells_of("four-token", FOUR_TOKEN, "ours")
    assert sorted(map(id, cells)) == sorted(id(c) for group in groups_of(cells) for c in group)


def test_a_group_gives_a_model_for_each_cell_and_seed_and_no_two_are_equal():
    runs = [resolved(override_all(cell(data, 2).run, FAST[1::2])) for data in FOUR_TOKEN]
    cells = [Cell("VMD", "ours", run) for run in runs]
    trained, pace = train_group(cells, (3, 5), "cpu", lambda done, record: None)
    assert pace > 0
    assert [(c.data, seed) for c, seed, _ in trained] == [("d1", 3), ("d1", 5), ("d2", 3), ("d2", 5)]
    x0 = random_tokens(1, 4, 10)
    z = torch.zeros(1, 2, 32)
    logits = [model.denoise(torch.full_like(x0, 10), x0, z) for _, _, model in trained]
    assert all(not torch.allclose(a, b) for i, a in enumerate(logits) for b in logits[:i])
    assert not any(model.training for _, _, model in trained)


def rules_of(c: Cell) -> set[tuple]:
    return {(chosen["steps"], chosen["rule"], chosen["z"]) for chosen in settings_of(c)}


def test_models_with_a_latent_are_sampled_by_both_rules():
    steps_and_z = [(1, "once"), (4, "once"), (4, "fresh")]
    assert rules_of(cell("d1", 4)) == {(steps, rule, z) for steps, z in steps_and_z for rule in ("argmax", "sample")}


def test_fresh_latents_are_left_out_where_they_are_undefined():
    assert not any(z == "fresh" for _, _, z in rules_of(cell("d1", 2, family="paper")))
    assert any(z == "fresh" for _, _, z in rules_of(cell("d1", 4, family="paper")))
    assert any(z == "fresh" for _, _, z in rules_of(cell("d1", 2)))


def test_baselines_are_sampled_by_the_sample_rule_and_shown_degenerate_once():
    sampled = {(1, "sample", "none"), (2, "sample", "none")}
    assert rules_of(cell("d2", 2, "MDM")) == rules_of(cell("non-uniform", 2, "MDM")) == sampled
    assert rules_of(cell("d1", 2, "MDM")) == rules_of(cell("deterministic", 2, "MDM")) == sampled | {(1, "argmax", "none")}


def test_seeds_become_a_mean_and_its_standard_error():
    setting = {"data": "d1", "block": 4, "steps": 1}
    rows = [{"system": "VMD", "setting": dict(setting), "metric": "kl", "value": value} for value in (1.0, 2.0, 6.0)]
    (row,) = aggregate(rows)
    assert row["value"] == 3
    assert close(row["stderr"], math.sqrt(7) / math.sqrt(3))
    assert row["values"] == [1.0, 2.0, 6.0]
    assert row["paper"] == 0.165
    (alone,) = aggregate(rows[:1])
    assert alone["stderr"] is None


def test_rows_of_different_settings_are_not_mixed():
    rows = [
        {"system": system, "setting": {"data": "d1", "block": 4, "steps": steps}, "metric": metric, "value": 1.0}
        for system in ("MDM", "VMD")
        for steps in (1, 4)
        for metric in ("kl", "accuracy")
    ]
    assert len(aggregate(rows)) == 8
    assert [row["paper"] for row in aggregate(rows)] == [9.422, 0.1, 0.010, 99.3, 0.165, 87.3, 0.033, 100.0]


def test_the_table_of_truth_is_the_law():
    table = torch.tensor(truth_table(law("non-uniform")), dtype=torch.float64)
    assert close(float(table.sum()), 1)
    assert close(float(table[9, 0]), 10 / 55)
    assert int((table > 0).sum()) == 10
