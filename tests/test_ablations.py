"""`vmd reproduce ablations` and `heads`: every combination trained, scored and shown, and what was committed."""

import json
import math
from dataclasses import replace

import pytest

from command import ROOT, settings, succeeds
from vmd.data.synthetic import law
from vmd.experiments import ablations, controlled
from vmd.experiments.ablations import BOUND_1, BOUND_N, BOUND_ONCE, HEADS, SURROGATE, SYSTEMS, ablation_runs
from vmd.experiments.controlled import FULL, QUICK
from vmd.experiments.tables import ablation_tables, render

PNG = b"\x89PNG"
FAST = settings("training.steps=2", "training.batch_size=4", "model.layers=2", "model.width=16", "model.heads=2")
COMMITTED = [name for name in ("ablations", "heads") if (ROOT / "results" / name / "results.json").exists()]


def read(folder) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module", params=["ablations", "heads"])
def table(request, tmp_path_factory):
    """A run of two steps on D1, with few draws."""
    name, out = request.param, tmp_path_factory.mktemp(request.param) / "out"
    patch = pytest.MonkeyPatch()
    tiny = replace(QUICK[name], draws=100, z_draws=100, data=("d1",))
    patch.setattr(controlled, "QUICK", {name: tiny})
    patch.setattr(ablations, "HEADS", {key: HEADS[key] for key in list(HEADS)[::7]})
    patch.setitem(ablations.SYSTEMS, "Gaussian, importance-weighted", ("objective.samples=3",))
    patch.setattr(ablations, "IWAE", 2)
    succeeds("reproduce", name, "--quick", "--seeds", "2", "--device", "cpu", "--out", out, *FAST)
    patch.undo()
    return out


def test_every_row_names_its_sampler(table):
    for row in read(table)["rows"]:
        setting = row["setting"]
        assert math.isfinite(row["value"])
        if row["metric"] in ("bits", "accuracy", "kl", "kl_exact", "accuracy_exact"):
            assert setting.keys() >= {"objective", "data", "block", "steps", "nfe", "order", "z", "n"}
            assert len(row["values"]) == 2
        if row["metric"] in ("accuracy", "kl", "kl_exact"):
            assert setting["rule"] == "sample"


def test_every_combination_is_there(table):
    found = {(row["system"], row["setting"]["objective"], row["setting"]["data"]) for row in read(table)["rows"]}
    if table.parent.name.startswith("ablations"):
        for system in SYSTEMS:
            for objective in (SURROGATE, BOUND_1, BOUND_N, BOUND_ONCE):
                wanted = not (system == "no z" and objective == BOUND_ONCE)
                assert ((system, objective, "d1") in found) is wanted
    else:
        assert {objective for _, objective, _ in found} == {BOUND_1}
        assert len({system for system, _, _ in found}) == len(list(HEADS)[::7])


def test_bits_are_certified_even_of_models_that_know_nothing(table):
    results = read(table)
    for row in results["rows"]:
        if row["metric"] == "bits":
            assert row["value"] > results["entropy"][row["setting"]["data"]] - 3 * (row["stderr"] or 0)


def test_tables_and_figures_are_written(table):
    results = read(table)
    assert (table / "table.md").read_text() == render(results)
    for _, (headers, lines) in ablation_tables(results):
        assert lines
        assert all(len(line) == len(headers) for line in lines)
    if results["name"] == "ablations":
        assert (table / "bits.png").read_bytes().startswith(PNG)


def test_every_latent_is_trained_by_every_objective_at_the_weight_of_the_bound():
    for system, objective, run in ablation_runs("ablations", FULL["ablations"].data):
        assert run.objective.kl_weight == 1
        assert (run.objective.masking == "counts") is (objective == SURROGATE)
        assert (run.objective.z == "once") is (objective == BOUND_ONCE)
        assert run.model.block_size == law(run.data.name).length
        run.objective.check(run.model.resolved(law(run.data.name).length, 10))
        assert (run.objective.samples > 1) is ("importance" in system)


# What was committed


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_bits_are_not_below_the_entropy(name):
    results = read(ROOT / "results" / name)
    for row in results["rows"]:
        if row["metric"] == "bits":
            assert row["value"] > results["entropy"][row["setting"]["data"]] - 3 * row["stderr"]


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_tables_are_those_of_the_results(name):
    folder = ROOT / "results" / name
    assert (folder / "table.md").read_text() == render(read(folder))
    assert "--quick" not in read(folder)["command"]


@pytest.mark.skipif("ablations" not in COMMITTED, reason="not run yet")
def test_committed_surrogates_of_codes_go_below_the_entropy_where_tokens_determine_each_other():
    results = read(ROOT / "results" / "ablations")
    found = [row for row in results["rows"] if row["metric"] == "surrogate" and row["system"] == "categorical"]
    for row in found:
        if row["setting"]["data"] in ("deterministic", "non-uniform", "d1", "d2"):
            assert row["value"] < results["entropy"][row["setting"]["data"]]


def committed_rows(**wanted) -> list[dict]:
    """Of one step, rule sample where there are samples."""
    rows = []
    for row in read(ROOT / "results" / "ablations")["rows"]:
        flat = row["setting"] | {"system": row["system"], "metric": row["metric"]}
        if flat["steps"] == 1 and all(flat.get(key) == value for key, value in wanted.items()):
            rows.append(row)
    return rows


@pytest.mark.parametrize("objective", [SURROGATE, BOUND_1, BOUND_N, BOUND_ONCE])
@pytest.mark.parametrize(
    ("data", "valid", "kl"),
    [
        ("deterministic", 99.9, 0.003),
        ("non-uniform", 99.9, 0.003),
        *((f"dependence-{p}", None, 0.003) for p in (0.3, 0.5, 0.7, 0.8)),
        ("d1", 99.9, 0.005),
        ("d2", 99.5, 0.02),
    ],
)
def test_committed_codes_get_it_right_in_one_step_and_no_seed_is_stuck(objective, data, valid, kl):
    here = {"system": "categorical", "objective": objective, "data": data}
    (exact,) = committed_rows(metric="kl_exact", **here)
    assert len(exact["values"]) == 5
    assert max(exact["values"]) <= kl
    if valid is not None:
        (share,) = committed_rows(metric="accuracy", rule="sample", **here)
        assert min(share["values"]) >= valid
    if data not in ("d1", "d2"):
        (bits,) = committed_rows(metric="bits", **here)
        entropy = read(ROOT / "results" / "ablations")["entropy"][data]
        assert (bits["value"] - entropy) * 2 * math.log(2) <= 0.01


@pytest.mark.parametrize("p", [0.3, 0.5, 0.7, 0.8])
def test_committed_importance_weights_make_a_gaussian_useful_in_one_step(p):
    here = {"system": "Gaussian, importance-weighted", "objective": BOUND_1, "data": f"dependence-{p}"}
    (exact,) = committed_rows(metric="kl_exact", **here)
    assert exact["value"] <= 0.02
    (bits,) = committed_rows(metric="bits", iwae=64, **here)
    (bare,) = committed_rows(metric="bits", **(here | {"system": "no z"}))
    assert bits["value"] < bare["value"]
