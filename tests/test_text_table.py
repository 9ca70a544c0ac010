"""`vmd reproduce text`: every system trained on next to nothing, its rows computed apart, and what is kept and resumed."""

import json
import lzma
import math
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from command import refused, settings, succeeds, vmd
from helpers import close
from vmd.config import DataConfig, InvalidInput, RunConfig, flatten, from_dict, to_dict
from vmd.data import TextData
from vmd.experiments import figures, text_figures, text_samples, text_systems, text_table
from vmd.experiments.counting import counted_bits, counted_nats
from vmd.experiments.figures import draw_figures
from vmd.experiments.paired import NATS_FILE, write_nats
from vmd.experiments.report import section, update_readme
from vmd.experiments.systems import goes_on, is_of, read_done
from vmd.experiments.tables import model_size, render, text_bits_table, text_samples_table, text_summary, text_tables
from vmd.experiments.text_figures import scan_curves, scan_groups
from vmd.experiments.text_quality import Quality, judged_bits, random_letters, text_quality
from vmd.experiments.text_samples import SAMPLES_FILE, known, vocabulary
from vmd.experiments.text_systems import (
    FULL,
    PAPER,
    QUICK,
    SCAN,
    SCAN_FULL,
    SCAN_QUICK,
    SYSTEMS,
    folder_of,
    planned,
    quick_text,
    read_text,
    step_counts,
)
from vmd.experiments.text_table import objective_nats
from vmd.files import write_atomically
from vmd.likelihood import in_bits, nll_bound
from vmd.model import VMD

PNG = b"\x89PNG\r\n\x1a\n"
NAMES = [system.name for system in SYSTEMS if not system.second_seed and not system.slow]  # of a quick table
JUDGE = next(system.name for system in SYSTEMS if system.judge)
BY_NAME = {system.name: system for system in SYSTEMS}
LENGTH, ROWS = 16, 8
TINY = replace(
    QUICK,
    length=LENGTH,
    settings=(
        "model.layers=1",
        "model.heads=2",
        "model.width=16",
        "model.latent.encoder_layers=1",
        "model.latent.dim=2",
        "model.latent.codes=3",
        "training.steps=2",
        "training.batch_size=4",
        "training.log_every=1",
        "training.checkpoint_every=1",
    ),
    judge=("model.layers=2",),
    rows=ROWS,
    draws=3,
    iwae=2,
)


def some_text() -> str:
    """Short words; those of the last part are known, or end in z and were never seen before."""
    words = random.Random(0).choices(["a", "an", "is", "it", "on", "the", "cat", "sat", "mat"], k=1_000)
    words[-40::2] = [word + "z" for word in words[-40::2]]
    return " ".join(words)


TEXT = some_text()
CUT = round(0.9 * len(TEXT)), round(0.95 * len(TEXT))


def chunks(text: str) -> list[str]:
    return [text[start : start + LENGTH] for start in range(0, len(text) - LENGTH + 1, LENGTH)]


def spread(rows: list[str]) -> list[str]:
    """ROWS of them, all over the text."""
    assert len(rows) > ROWS
    return [rows[i * (len(rows) - 1) // (ROWS - 1)] for i in range(ROWS)]


TRAINED, TESTED = chunks(TEXT[: CUT[0]]), spread(chunks(TEXT[CUT[1] :]))


def encoded(texts: list[str]) -> np.ndarray:
    return np.array([[sorted(set(TEXT)).index(c) for c in text] for text in texts])


X0 = torch.from_numpy(encoded(TESTED))
LEARNED = encoded([TEXT[: CUT[0]]])[0]
VOCABULARY = {word for row in TRAINED for word in row.split(" ")[1:-1] if word}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A text, and a cache for what is made of texts."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "cats.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VMD_CACHE", str(folder / "cache"))
        yield folder / "cats.txt"


def words_for(source, out, *words, only: tuple[str, ...] = ()) -> tuple:
    chosen = [word for name in only for word in ("--only", name)]
    return ("reproduce", "text", "--quick", "--data", source, "--device", "cpu", "--out", out, *chosen, *words)


def run_table(source, out, *words: object, only: tuple[str, ...] = (), code: int = 0):
    """`vmd reproduce text --quick`, on a budget of almost nothing; of some systems alone without pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_table, "QUICK", TINY)
        if only:
            patch.setattr(figures, "draw_figures", lambda folder: [])
        done = vmd(*words_for(source, out, *words, only=only))
    assert done.code == code, done.err
    return done


def read(folder) -> dict:
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "results.json").read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """All systems: their folder, and what was printed. Copy it to change it."""
    out = tmp_path_factory.mktemp("table") / "out"
    done = run_table(source, out)
    return SimpleNamespace(out=out, done=done, results=read(out), source=source)


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole.out, tmp_path / "out")


def model_of(whole, name: str) -> VMD:
    return VMD.from_pretrained(folder_of(whole.out, BY_NAME[name]), "cpu").eval()


def rows_of(results: dict, *names: str) -> list[dict]:
    return [row for row in results["rows"] if row["system"] in names]


def timeless(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["metric"] != "characters_per_second"]


def unpaired(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["metric"] != "bits_apart"]


# Plans


@pytest.fixture(scope="module")
def plans(source):
    """{budget's length: {system: its run}}"""
    budgets = (FULL, QUICK, replace(TINY, length=8))
    data = {b.length: SimpleNamespace(length=b.length, vocab_size=27, symbols=()) for b in budgets}
    return {b.length: {s.name: planned(s, b, "x", [], data[b.length], "cpu") for s in SYSTEMS} for b in budgets}


def test_every_system_is_planned_as_its_name_says(plans):
    for length, runs in plans.items():
        for name, run in runs.items():
            assert (run.model.length, run.model.vocab_size, run.data.name) == (length, 27, "x")
            if " r = " in name:
                assert run.model.block_size == min(length, int(re.search(r"r = (\d+)", name)[1]))
            assert run.training.seed == (1 if name.endswith("second seed") else 0)
            assert (run.model.latent.kind == "chain") is name.startswith("chain")
            assert (run.model.latent.kind == "categorical") is ("codes" in name and not name.startswith("chain"))
            assert (run.model.draft > 0) is name.startswith("draft")
            assert (run.objective.masking == "steps") is ("for one step" in name)
            assert run.objective.steps == (1,)
            alone = "for one step" in name or name.endswith("r = 1")
            twice = any(kind in name for kind in ("codes", "draft", "chain")) and not alone
            assert (run.objective.together > 0) is twice
            assert run.objective.score_entropy is (name == "SEDD")
            paper = name.startswith("the paper")
            assert run.model.latent.on_clean is paper
            assert (run.model.latent.encoder_stream == "doubled") is paper
            assert (run.model.latent.prior == "learned") is ("learned prior" in name)
            assert run.objective.kl_weight == 1
        assert runs["MDLM"].model.blocks == runs["SEDD"].model.blocks == 1
        assert runs["AR"].model.block_size == runs[JUDGE].model.block_size == 1
        assert runs["the paper's VMD, r = 4"].model.z_reaches_later_blocks
    assert len({folder_of(Path("out"), system) for system in SYSTEMS}) == len(SYSTEMS) == len(BY_NAME)


def test_a_second_seed_is_another_than_the_first_whatever_that_is():
    data = SimpleNamespace(length=8, vocab_size=27, symbols=())
    for name, seed in (("codes, r = 4", 5), ("codes, r = 4, second seed", 6)):
        run = planned(BY_NAME[name], replace(TINY, length=8), "x", ["training.seed=5"], data, "cpu")
        assert run.training.seed == seed


def test_second_seeds_and_misfits_are_named(tmp_path):
    words = ("reproduce", "text", "--quick", "--out", tmp_path / "out")
    both = ("--only", "codes, r = 4", "--only", "codes, r = 4, second seed")
    assert "codes, r = 4, second seed: expected without --quick" in refused(*words, *both, folder=tmp_path)
    told = refused(*words, "--only", "BD3-LM, r = 4", *settings("objective.together=0.5"), folder=tmp_path)
    assert told.startswith(
        "vmd: BD3-LM, r = 4: objective.together=0.5: expected 0 (--set objective.together=0) without codes"
    )


def test_the_judge_is_larger_than_all_it_judges(plans):
    for runs in plans.values():
        sizes = {name: (run.model.layers, run.model.width) for name, run in runs.items()}
        judge = sizes.pop(JUDGE)
        assert all(judge > size and judge[1] >= size[1] for size in sizes.values())


def test_systems_differ_in_what_they_are_alone(plans):
    """The network around z, and the training, are those of all others."""
    for runs in plans.values():
        shapes = {(r.model.layers, r.model.width, r.model.heads) for name, r in runs.items() if name != JUDGE}
        assert len(shapes) == 1
        assert len({replace(run.training, seed=0) for name, run in runs.items() if name != JUDGE}) == 1


def test_one_system_without_a_latent_has_more_parameters_than_any_with_codes_in_blocks_of_four(plans):
    sizes = {
        name: sum(VMD(run.model).parameter_counts().values()) for name, run in plans[FULL.length].items() if "r = 4" in name
    }
    larger = sizes["BD3-LM, r = 4, larger"]
    assert all(size < larger for name, size in sizes.items() if "codes" in name)
    assert sizes["BD3-LM, r = 4"] < larger


def test_steps_are_few_and_all(plans):
    runs = plans[FULL.length]
    assert step_counts(runs["AR"]) == [1]
    assert step_counts(runs["codes, r = 4"]) == [1, 2, 4]
    assert step_counts(runs["chain of codes, r = 16"]) == [1, 2, 4, 8, 16]
    assert step_counts(runs["MDLM"]) == [64, 128, 256]


# What all systems are measured by


def test_results_hold_every_system_by_its_name(whole):
    results = whole.results
    assert list(results["systems"]) == list(results["configurations"]) == NAMES
    assert (results["name"], results["data"], results["seeds"]) == ("text", "cats.txt", [0])
    for system in map(BY_NAME.get, NAMES):
        about, run = results["systems"][system.name], from_dict(RunConfig, results["configurations"][system.name])
        model = model_of(whole, system.name)
        assert model.config == run.model
        assert (about["block"], about["judge"]) == (min(system.block, LENGTH), system.judge)
        assert about["characters"] == 2 * 4 * LENGTH
        assert sum(about["parameters"].values()) == sum(p.numel() for p in model.parameters())
    settings_seen = [json.dumps([r["system"], r["metric"], r["setting"]], sort_keys=True) for r in results["rows"]]
    assert len(set(settings_seen)) == len(settings_seen)
    assert all(math.isfinite(row["value"]) for row in results["rows"])


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_the_bound_on_the_test_text(whole, name):
    model = model_of(whole, name)
    gaussian = model.config.latent.kind == "gaussian"
    z = "once" if name.startswith("the paper") else "fresh"
    rows = [row for row in rows_of(whole.results, name) if row["metric"] == "bits"]
    expected_steps = sorted({n for n in (1, 2, 4, 8) if n <= model.config.block_size})
    if model.config.blocks == 1:
        expected_steps = [1, 4, 8, 16] if "for one step" in name else [4, 8, 16]  # and those it was trained for
    assert [row["setting"]["steps"] for row in rows] == expected_steps
    for row in rows:
        steps, setting = row["setting"]["steps"], row["setting"]
        samples = 2 if gaussian else 1
        nats = nll_bound(model, X0, steps, z=z, samples=samples, generator=torch.Generator().manual_seed(0))
        bits = in_bits(nats, LENGTH)
        assert close(row["value"], bits.value, 1e-5)
        assert close(row["stderr"], bits.stderr, 1e-4)
        assert (setting["n"], setting["nfe"], setting["iwae"]) == (ROWS, steps * model.config.blocks, samples)
        assert setting["z"] == (z if model.config.has_latent else "none")


@torch.no_grad()
def test_bits_from_left_to_right_are_the_exact_likelihood(whole):
    model = model_of(whole, "AR")
    log_p = model.denoise(torch.full_like(X0, model.config.vocab_size), X0, None).log_softmax(-1)
    exact = -float(log_p.gather(-1, X0.unsqueeze(-1)).mean()) / math.log(2)
    found = {row["metric"]: row["value"] for row in rows_of(whole.results, "AR")}
    assert close(found["bits"], exact, 1e-5)
    assert close(found["own_bound"], exact, 1e-5)


def test_what_was_trained_is_called_a_surrogate_with_z_and_a_bound_without(whole):
    headers, lines = text_bits_table(whole.results)
    assert headers[-2:] == ["KL of z, nats a block", "objective"]
    for name, line in zip(NAMES, lines, strict=True):
        no_bound = BY_NAME[name].preset != "text-mdm" and "for one step" not in name and BY_NAME[name].block > 1
        (row,) = (r for r in rows_of(whole.results, name) if r["metric"] in ("surrogate", "own_bound"))
        assert row["metric"] == ("surrogate" if no_bound else "own_bound")
        assert line[0] == name
        told = "bound"
        if no_bound:
            (apart,) = (r for r in rows_of(whole.results, name) if r["metric"] == "surrogate_apart")
            bits = next(r["value"] for r in reversed(rows_of(whole.results, name)) if r["metric"] == "bits")
            assert close(apart["value"], row["value"] - bits, 1e-6)
            assert apart["stderr"] > 0
            told = f"surrogate, {apart['value']:+.4f} ± {apart['stderr']:.4f} of N = r"
        assert line[-1] == f"{row['value']:.4f} ({told})"
        if "for one step" in name:  # the certified bits themselves
            bits = {r["setting"]["steps"]: r["value"] for r in rows_of(whole.results, name) if r["metric"] == "bits"}
            assert close(row["value"], bits[1])


def test_the_summary_compares_blocks_of_any_size_by_evaluations(whole):
    """Each cell is the bits and words of its own row; a system for one step stands where it was trained alone."""
    headers, lines = text_summary(whole.results)
    counts = [int(header.removesuffix(" evaluations")) for header in headers[3:]]
    assert counts == sorted(set(counts))
    assert [line[0] for line in lines] == [name for name in NAMES if name != JUDGE]
    for name, _, _, *cells in lines:
        rows = [r for r in rows_of(whole.results, name) if r["setting"].get("rule") == "sample"]
        steps = {r["setting"]["steps"] for r in rows if r["metric"] == "bits"}
        steps = {1} if "for one step" in name else steps
        by_evaluations = {steps_ * LENGTH // whole.results["systems"][name]["block"]: steps_ for steps_ in steps}
        for nfe, cell in zip(counts, cells, strict=True):
            assert bool(cell) is (nfe in by_evaluations)
            if cell:
                of = {r["metric"]: r for r in rows if r["setting"]["steps"] == by_evaluations[nfe]}
                parts = cell.split(" · ")
                assert abs(float(parts[0].split(" ± ")[0]) - of["bits"]["value"]) < 6e-4
                assert parts[1:] == ([f"{of['real_words']['value']:.1f} %"] if "real_words" in of else [])


def objective_bits(model: VMD, **how):
    return in_bits(objective_nats(model, X0, **how), LENGTH)


def test_score_entropy_is_not_below_the_bound_of_normalised_outputs(whole):
    model = model_of(whole, "SEDD")
    draws = TINY.steps_scored  # a mask of one block says little of the others
    own, normalised = (objective_bits(model, score_entropy=flag, draws=draws) for flag in (True, False))
    (row,) = (r for r in rows_of(whole.results, "SEDD") if r["metric"] == "own_bound")
    assert close(row["value"], own.value, 1e-5)
    assert own.value > normalised.value + 0.1  # of outputs that have not learned to sum to one
    (other,) = (r for r in rows_of(whole.results, "MDLM") if r["metric"] == "own_bound")
    assert close(other["value"], objective_bits(model_of(whole, "MDLM"), draws=draws).value, 1e-5)


def test_the_test_text_is_judged_by_the_words_of_the_training_text(whole):
    letters = random_letters(TESTED, 3)
    for name, texts in {"test_text": others_of_the_test_text(), "random_letters": letters}.items():
        figures = {metric: value for metric, value in whole.results[name].items() if metric != "counted_bits"}
        assert figures == pytest.approx(known(text_quality(texts, TESTED, VOCABULARY)))
    _, lines = text_samples_table(whole.results)
    for line, (name, which) in zip(
        lines, {"other rows": "test_text", "letters drawn": "random_letters"}.items(), strict=False
    ):
        assert line[0].startswith(name)
        assert line[1:5] == ["", "", "", f"{whole.results[which]['real_words']:.1f}"]


def test_a_text_all_of_which_is_the_reference_has_no_other_rows(source, tmp_path):
    """So nothing can be said of text that is as new as samples are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_table, "QUICK", replace(TINY, rows=10_000))
        patch.setattr(figures, "draw_figures", lambda folder: [])
        succeeds(*words_for(source, tmp_path / "out", only=("AR",)))
    assert read(tmp_path / "out")["test_text"] == {}
    assert text_samples_table(read(tmp_path / "out"))[1][0][0].startswith("letters drawn")


def test_words_are_those_of_the_whole_training_text(whole):
    data = read_text(str(whole.source), TINY, "train")
    assert len(data) > 7
    assert all(vocabulary(data, at_once=count) == VOCABULARY for count in (2, 7, 10_000))


def test_budgets_score_the_split_they_are_for():
    """The scan chooses, so it never sees the test text."""
    assert {b.split for b in (SCAN_FULL, SCAN_QUICK)} == {"validation"}
    assert {b.split for b in (FULL, QUICK)} == {"test"}


def test_more_draws_of_the_objective_are_other_draws(whole):
    model = model_of(whole, "MDLM")
    one, two = (objective_nats(model, X0, draws=count) for count in (1, 2))
    assert not torch.allclose(one, two)


def test_what_was_scored_of_a_bound_is_written_down(whole):
    for name in NAMES:
        for row in rows_of(whole.results, name):
            setting = row["setting"]
            if row["metric"] == "bits" and setting["z"] != "once":
                assert setting["steps_scored"] == min(setting["steps"], TINY.steps_scored)
            if row["metric"] == "surrogate":
                assert setting["draws"] == (4 if BY_NAME[name].block < LENGTH else TINY.steps_scored)


def test_perplexities_and_minutes_are_those_of_the_rows(whole):
    parts = {name: part | {"training_seconds": 75.0 + i} for i, (name, part) in enumerate(whole.results["systems"].items())}
    headers, lines = text_bits_table(whole.results | {"systems": parts})
    assert [line[2] for line in text_summary(whole.results | {"systems": parts})[1]] == [
        f"{part['training_seconds'] / 60:.1f}" for part in parts.values() if not part["judge"]
    ]
    for line in lines:
        cells = dict(zip(headers, line, strict=True))
        about = parts[line[0]]
        (bits,) = (
            r["value"]
            for r in rows_of(whole.results, line[0])
            if r["metric"] == "bits" and r["setting"]["steps"] == about["block"]
        )
        assert cells["perplexity"] == f"{2**bits:.3f}"
        assert cells["minutes"] == f"{about['training_seconds'] / 60:.1f}"


def test_the_paper_s_perplexities_stand_beside_the_bits_at_all_steps_of_text8_alone(whole):
    assert {row["paper"] for row in whole.results["rows"]} == {None}  # of another text, in short rows
    assert {line[text_bits_table(whole.results)[0].index("printed")] for line in text_bits_table(whole.results)[1]} == {""}
    for name, perplexity in PAPER.items():
        block = BY_NAME[name].block
        rows = [{"system": name, "metric": m, "setting": {"steps": n}} for m in ("bits", "real_words") for n in (block, 0)]
        assert [text_table.printed(row, BY_NAME[name]) for row in rows] == [math.log2(perplexity), None, None, None]
    rows = [row | {"paper": text_table.printed(row, BY_NAME[row["system"]])} for row in whole.results["rows"]]
    headers, lines = text_bits_table(whole.results | {"rows": rows})
    shown = {line[0]: line[headers.index("printed")] for line in lines if line[headers.index("printed")]}
    expected = {name: value for name, value in PAPER.items() if BY_NAME[name].block < 256}  # rows here are of 16 letters
    assert shown == {name: f"{value:.3f}" for name, value in expected.items()}


def test_parameters_are_all_that_sampling_needs_and_an_encoder_apart():
    counts = {"backbone": 6_400_000, "pathway": 1_000_000, "encoder": 3_300_000, "prior": 900_000}
    assert model_size({"parameters": counts}) == "8.3 M + 3.3 M encoder"
    assert model_size({"parameters": counts | {"encoder": 0}}) == "8.3 M"


def test_samples_are_drawn_by_argmax_only_with_a_latent(whole):
    for system in map(BY_NAME.get, NAMES):
        rows = [row for row in rows_of(whole.results, system.name) if "temperature" in row["setting"]]
        rules = {row["setting"]["rule"] for row in rows}
        with_latent = {"sample"} if system.preset in ("text-mdm", "text-draft") else {"argmax", "sample"}
        assert rules == (set() if system.judge else with_latent)
        assert all(row["setting"]["n"] == 3 for row in rows)


@pytest.mark.parametrize(
    ("name", "rule", "steps", "z"),
    [
        ("AR", "sample", 1, "fresh"),
        ("the paper's VMD, r = 4", "argmax", 2, "once"),
        ("codes, r = 4", "sample", 1, "fresh"),
        ("codes, r = 4", "sample", 2, "fresh"),
        ("SEDD", "sample", 4, "fresh"),
    ],
)
def test_figures_of_samples_are_those_of_the_same_samples(whole, name, rule, steps, z):
    model = model_of(whole, name)
    generator = torch.Generator().manual_seed(0)
    drawn = model.sample(3, steps=steps, order="random", rule=rule, z=z, generator=generator)
    letters = sorted(set(TEXT))
    texts = ["".join(letters[i] for i in row) for row in drawn.tokens.tolist()]
    expected = known(text_quality(texts, TESTED, VOCABULARY))
    expected["judged_bits"] = judged_bits(model_of(whole, JUDGE), drawn.tokens)[0]
    wanted = {"rule": rule, "steps": steps, "temperature": 1}.items()
    here = [row for row in rows_of(whole.results, name) if wanted <= row["setting"].items()]
    found = {row["metric"]: row["value"] for row in here}
    assert found.pop("characters_per_second") > 0
    expected["counted_bits"] = counted_bits(counted_nats(LEARNED, encoded(texts), len(letters), 13))[0]
    assert found.keys() == expected.keys()
    assert all(close(found[metric], expected[metric], 1e-5) for metric in expected)
    assert {row["setting"]["nfe"] for row in here} == {drawn.nfe} == {steps * model.config.blocks}


def test_without_words_there_is_no_share_of_real_ones():
    assert known(Quality(math.nan, None, 0.5, 0.25, 1.0)) == {"divergence": 0.5, "distinct": 0.25, "entropy": 1.0}
    assert known(Quality(0.0, 0.1, 0.5, 0.25, 1.0))["real_words"] == 0


def test_a_system_of_the_table_writes_text(whole):
    (line,) = succeeds("sample", folder_of(whole.out, BY_NAME["codes, r = 4"]), "-n", 1).out.splitlines()
    assert len(line) == LENGTH
    assert set(line) <= set(TEXT)


# Against the reference, row by row


REFERENCE = "BD3-LM, r = 4"


def apart_of(results: dict, *names: str) -> list[dict]:
    return [row for row in rows_of(results, *(names or NAMES)) if row["metric"] == "bits_apart"]


def nats_file(out: Path, name: str) -> Path:
    return folder_of(out, BY_NAME[name]) / NATS_FILE


def without_pairs(out: Path, *names: str) -> dict:
    """As from before there were such rows: those of these systems, or all, are taken from the results."""
    results = read(out)
    gone = apart_of(results, *names)
    results["rows"] = [row for row in results["rows"] if row not in gone]
    (out / "results.json").write_text(json.dumps(results))
    return results


@pytest.mark.parametrize("name", NAMES)
def test_differences_are_those_of_the_same_rows_of_text(whole, name):
    def nats(system: str, steps: int) -> torch.Tensor:
        model = model_of(whole, system)
        how = {
            "z": "once" if model.config.z_reaches_later_blocks else "fresh",
            "generator": torch.Generator().manual_seed(0),
        }
        return nll_bound(model, X0, steps, samples=2 if model.config.latent.kind == "gaussian" else 1, **how).double()

    rows, base = apart_of(whole.results, name), nats(REFERENCE, 4)
    steps = [row["setting"]["steps"] for row in rows_of(whole.results, name) if row["metric"] == "bits"]
    expected = [count for count in steps if (name, count) != (REFERENCE, 4)]
    assert [row["setting"]["steps"] for row in rows] == expected
    for row in rows:
        count = row["setting"]["steps"]
        each = (nats(name, count) - base) / (LENGTH * math.log(2))
        assert abs(row["value"] - float(each.mean())) < 1e-5
        assert abs(row["stderr"] - float(each.std()) / ROWS**0.5) < 1e-5
        assert row["setting"]["from"] == {"system": REFERENCE, "steps": 4}
        assert (row["setting"]["n"], row["setting"]["nfe"]) == (ROWS, count * model_of(whole, name).config.blocks)


def test_differences_are_a_table_where_there_are_some(whole):
    title, (headers, lines) = text_tables(whole.results)[2]
    assert title == f"Against the four steps of {REFERENCE}: paired difference, bits per character"
    assert headers == ["system", "against", *(f"N = {count}" for count in (1, 2, 4, 8, 16))]
    assert [line[:2] for line in lines] == [[name, f"{REFERENCE}, N = 4"] for name in NAMES]
    shown = {(line[0], n): cell for line in lines for n, cell in zip((1, 2, 4, 8, 16), line[2:], strict=True) if cell}
    assert shown == {
        (row["system"], row["setting"]["steps"]): f"{row['value']:+.4f} ± {row['stderr']:.4f}"
        for row in apart_of(whole.results)
    }
    assert "paired" not in render(whole.results | {"rows": unpaired(whole.results["rows"])})


def test_a_table_grows_by_the_differences_of_systems_whose_nats_are_kept(whole, copied):
    """Those that were done before there were such files are left as they are."""
    without_pairs(copied)
    for name in NAMES:
        if name not in ("AR", REFERENCE):
            nats_file(copied, name).unlink()
    done = run_table(whole.source, copied, "--resume", only=("MDLM",))
    assert apart_of(read(copied)) == apart_of(whole.results, "AR", REFERENCE)
    assert NATS_FILE not in done.err
    assert "paired difference" in (copied / "table.md").read_text()
    assert unpaired(read(copied)["rows"]) == unpaired(whole.results["rows"])


def test_differences_are_computed_once_and_outlive_their_files(whole, copied, monkeypatch):
    monkeypatch.setattr("vmd.experiments.paired.read_nats", lambda *rest: 1 / 0)
    run_table(whole.source, copied, "--resume", only=("AR",))
    assert read(copied)["rows"] == whole.results["rows"]
    for gone in ("AR", REFERENCE):
        nats_file(copied, gone).unlink()
        run_table(whole.source, copied, "--resume", only=("AR",))
        assert read(copied)["rows"] == whole.results["rows"]


def test_no_difference_is_from_a_reference_that_was_trained_anew(whole, copied):
    nats_file(copied, "AR").unlink()
    shutil.rmtree(folder_of(copied, BY_NAME[REFERENCE]))
    run_table(whole.source, copied, "--resume", *settings("training.steps=3"), only=(REFERENCE,))
    results = read(copied)
    bits = {(r["system"], r["setting"]["steps"]): r["value"] for r in results["rows"] if r["metric"] == "bits"}
    assert {row["system"] for row in apart_of(results)} == {*NAMES} - {"AR"}
    for row in apart_of(results):
        assert abs(row["value"] - bits[row["system"], row["setting"]["steps"]] + bits[REFERENCE, 4]) < 1e-5


@pytest.mark.parametrize("name", ["AR", REFERENCE])
def test_nats_of_other_rows_are_one_line(whole, copied, monkeypatch, name):
    monkeypatch.setattr(text_table, "QUICK", TINY)
    without_pairs(copied, "AR")
    write_nats(nats_file(copied, name), {count: X0[:, 0] * 1.0 for count in (1, 2, 4)}, "0" * 64)
    done = vmd(*words_for(whole.source, copied, "--resume", only=("AR",)))
    assert done.code == 2
    assert f"{nats_file(copied, name)}: nats of other rows of the text" in done.err.splitlines()[-1]


# Tables and pictures


def test_tables_and_the_picture_are_written_and_said(whole):
    assert (whole.out / "table.md").read_text() == render(whole.results)
    assert {path.name for path in whole.out.glob("*.png")} == {"few-steps.png", "headline.png"}
    assert (whole.out / "few-steps.png").read_bytes().startswith(PNG)
    for name in ("few-steps.png", "table.md"):
        assert str(whole.out / name) in whole.done.err
    assert whole.done.out.startswith("| system | parameters |")
    for _, (headers, lines) in text_tables(whole.results):
        assert lines
        assert all(len(line) == len(headers) for line in lines)


@pytest.mark.parametrize(
    "names", [[], [JUDGE], ["AR"], ["MDLM", "the paper's VMD, r = 8"]], ids=["none", "judge", "AR", "two"]
)
@pytest.mark.parametrize("judged", [True, False], ids=["judged", "unjudged"])
def test_parts_of_the_results_are_shown(whole, names, judged, tmp_path):
    some = {key: {name: whole.results[key][name] for name in names} for key in ("systems", "configurations")}
    rows = [row for row in rows_of(whole.results, *names) if judged or row["metric"] != "judged_bits"]
    results = whole.results | some | {"rows": rows}
    text = render(results)
    assert all(f"| {name} |" in text for name in names)
    assert all(len(line) == len(headers) for _, (headers, lines) in text_tables(results) for line in lines)
    (tmp_path / "results.json").write_text(json.dumps(results))
    drawn = draw_figures(tmp_path)
    assert [path.name for path in drawn] == ([] if names in ([], [JUDGE]) else ["few-steps.png"])


def test_rows_that_are_missing_leave_empty_cells(whole):
    for metric in ("bits", "surrogate", "real_words", "judged_bits"):
        rows = [row for row in whole.results["rows"] if row["metric"] != metric]
        for _, (headers, lines) in text_tables(whole.results | {"rows": rows, "test_text": {}}):
            assert all(len(line) == len(headers) for line in lines)


def test_a_report_shows_the_table_and_its_picture(whole, tmp_path):
    shutil.copytree(whole.out, tmp_path / "results/text")
    text = section(tmp_path / "results", "text", tmp_path / "README.md")
    assert "| the paper's VMD, r = 4 |" in text
    assert whole.results["command"] in text
    assert "(results/text/few-steps.png)" in text


def test_a_report_of_some_systems_shows_these_in_the_order_they_are_named(whole, tmp_path):
    shutil.copytree(whole.out, tmp_path / "results/text")
    readme = tmp_path / "README.md"
    marker = "<!-- results:text of the paper's VMD, r = 4; AR -->"
    readme.write_text(f"{marker}\n<!-- end of results -->\n")
    assert update_readme(readme, tmp_path / "results")
    text = readme.read_text()
    assert text.startswith(f"{marker}\n| system |")
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")][2:] == [
        "| the paper's VMD, r = 4",
        "| AR",
    ]
    two = [whole.results["systems"][name] for name in PAIR]
    assert f"{sum(s['training_seconds'] + s['measuring_seconds'] for s in two):.0f} s of training and measuring" in text
    readme.write_text(f"{marker.replace('AR', 'ARR')}\n<!-- end of results -->\n")
    with pytest.raises(InvalidInput, match="'ARR': no such system in the results: expected one of "):
        update_readme(readme, tmp_path / "results")


# Stopped, resumed, and run one by one


PAIR = ("AR", "the paper's VMD, r = 4")
FOLDERS = tuple(folder_of(Path(), BY_NAME[name]).name for name in PAIR)


def watch(monkeypatch, stop_at: tuple[str, int] | None = None) -> list[tuple[str, int]]:
    """The (folder, step) of all training steps from now on; stops at one of them."""
    seen, train = [], text_table.train

    def watched(model, data, run, *, on_step, out, **options):
        assert data.seed == run.training.seed

        def step(done, record):
            seen.append((out.name, done))
            on_step(done, record)
            if (out.name, done) == stop_at:
                raise KeyboardInterrupt

        return train(model, data, run, on_step=step, out=out, **options)

    monkeypatch.setattr(text_table, "train", watched)
    return seen


@pytest.mark.parametrize(("every", "again"), [(1, [2]), (100, [1, 2])], ids=["checkpoint", "no checkpoint"])
def test_a_stopped_run_goes_on_to_the_same_results(whole, tmp_path, monkeypatch, every, again):
    rare = settings(f"training.checkpoint_every={every}")
    with monkeypatch.context() as patch:
        watch(patch, (FOLDERS[1], 1))
        assert run_table(whole.source, tmp_path / "out", *rare, only=PAIR, code=130).out == ""
    assert list(read(tmp_path / "out")["systems"]) == [PAIR[0]]  # what is done is there to see
    seen = watch(monkeypatch)
    done = run_table(whole.source, tmp_path / "out", "--resume", *rare, only=PAIR)
    assert seen == [(FOLDERS[1], step) for step in again]  # and nothing of the finished one
    rows = rows_of(read(tmp_path / "out"), *PAIR)
    unjudged = [row for row in rows_of(whole.results, *PAIR) if row["metric"] != "judged_bits"]
    assert timeless(rows) == timeless(unpaired(unjudged))
    assert "judged_bits" not in {row["metric"] for row in rows}
    assert "no judge" in done.err


def test_the_names_of_systems_are_not_left_for_torch_to_read(whole, tmp_path, monkeypatch):
    """It writes the word after an --only into the code that it compiles: "the paper's VMD" ended a string there."""
    left, train = [], text_table.train

    def watched(*args, **options):
        left.append(list(sys.argv))
        return train(*args, **options)

    monkeypatch.setattr(text_table, "train", watched)
    run_table(whole.source, tmp_path / "out", only=PAIR)
    assert left == [["vmd"], ["vmd"]]
    assert "--only AR --only 'the paper'\"'\"'s VMD, r = 4'" in read(tmp_path / "out")["command"]


def test_a_stop_while_measuring_loses_no_training(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(text_table, "bits_rows", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_table(whole.source, tmp_path / "out", only=PAIR[:1])
    seen = watch(monkeypatch)
    run_table(whole.source, tmp_path / "out", "--resume", only=PAIR[:1])
    assert seen == []
    assert list(read(tmp_path / "out")["systems"]) == ["AR"]


def test_systems_run_one_by_one_stand_in_one_table(whole, tmp_path):
    """In the order of the table, and judged whether the judge comes before or after them."""
    for name in ("codes, r = 4", JUDGE, "AR"):
        done = run_table(whole.source, tmp_path / "out", "--resume", only=(name,))
        assert ("no judge" in done.err) is (name == "codes, r = 4")
    results = read(tmp_path / "out")
    assert list(results["systems"]) == [JUDGE, "codes, r = 4", "AR"]
    for name in ("AR", "codes, r = 4"):
        assert timeless(rows_of(results, name)) == timeless(unpaired(rows_of(whole.results, name)))
    assert "codes, r = 4" in done.out


def test_samples_are_kept_to_be_read_and_judged_anew(whole, copied):
    """By the judge that is there; one of other samples gives other figures."""
    name = "codes, r = 4"
    kept = folder_of(copied, BY_NAME[name]) / SAMPLES_FILE
    samples = [json.loads(line) for line in lzma.decompress(kept.read_bytes()).decode().splitlines()]
    assert len(samples) == 3 * 2 * 3  # steps, rules, draws
    assert all(len(sample["text"]) == LENGTH and set(sample["text"]) <= set(TEXT) for sample in samples)
    others = "".join(json.dumps(sample | {"text": TESTED[0]}) + "\n" for sample in samples)
    kept.write_bytes(lzma.compress(others.encode()))
    run_table(whole.source, copied, "--resume", only=(name,))
    expected = judged_bits(model_of(whole, JUDGE), X0[:1])[0]
    judged = [row for row in rows_of(read(copied), name) if row["metric"] == "judged_bits"]
    assert len(judged) == 3 * 2
    assert all(close(row["value"], expected, 1e-5) for row in judged)
    others = [other for other in NAMES if other != name]
    assert rows_of(read(copied), *others) == rows_of(whole.results, *others)


def test_samples_are_judged_once(whole, copied, monkeypatch):
    asked, judged_rows = [], text_samples.judged_rows

    def watched(judge, data, path):
        asked.append(path.parent.name)
        return judged_rows(judge, data, path)

    monkeypatch.setattr(text_samples, "judged_rows", watched)
    run_table(whole.source, copied, "--resume", only=("AR",))
    assert asked == []
    (folder_of(copied, BY_NAME["MDLM"]) / SAMPLES_FILE).unlink()
    shutil.rmtree(folder_of(copied, BY_NAME[JUDGE]))
    done = run_table(whole.source, copied, "--resume", *settings("training.steps=3"), only=(JUDGE,))  # another judge
    assert len(asked) == len(NAMES) - 2
    assert f"MDLM: no {SAMPLES_FILE} is kept" in done.err


def by_counts(results: dict, *names: str) -> list[dict]:
    return [row for row in rows_of(results, *(names or results["systems"])) if row["metric"] == "counted_bits"]


def test_samples_are_judged_by_ngrams_of_the_training_text(whole):
    """It takes no other model: one that repeats what was trained on costs little, letters by chance much."""
    letters = len(set(TEXT))
    for name in NAMES[1:]:
        kept = folder_of(whole.out, BY_NAME[name]) / SAMPLES_FILE
        samples = [json.loads(line) for line in lzma.decompress(kept.read_bytes()).decode().splitlines()]
        rows = by_counts(whole.results, name)
        assert len(rows) == len({json.dumps(sample["setting"]) for sample in samples})
        for row in rows:
            texts = [sample["text"] for sample in samples if sample["setting"] | {"ngram": 13} == row["setting"]]
            assert len(texts) == row["setting"]["n"]
            value, error = counted_bits(counted_nats(LEARNED, encoded(texts), letters, 13))
            assert (row["value"], row["stderr"]) == (pytest.approx(value), pytest.approx(error))
    assert by_counts(whole.results, JUDGE) == []
    bits = [whole.results[name]["counted_bits"] for name in ("test_text", "random_letters")]
    assert bits[0] < bits[1] - 1
    others = encoded(others_of_the_test_text())
    assert bits[0] == pytest.approx(counted_bits(counted_nats(LEARNED, others, letters, 13))[0])


def test_ngrams_are_no_longer_than_rows():
    lengths = [text_samples.ngram_of(SimpleNamespace(vocab_size=27, length=length)) for length in (5, 13, 256)]
    assert lengths == [5, 13, 13]


def others_of_the_test_text() -> list[str]:
    """As many as there are samples, none of which is in the reference."""
    others = [row for row in chunks(TEXT[CUT[1] :]) if row not in TESTED]
    assert 1 < len(others) <= TINY.draws
    return others


def test_ngrams_are_counted_for_new_samples_alone(whole, copied, monkeypatch):
    """Those of before stay, with the figures of the texts beside them."""
    asked = []

    def watched(text, rows, *rest, **how):
        asked.append(len(rows))
        return counted_nats(text, rows, *rest, **how)

    monkeypatch.setattr(text_samples, "counted_nats", watched)
    (folder_of(copied, BY_NAME["MDLM"]) / SAMPLES_FILE).unlink()  # fetched without its samples
    run_table(whole.source, copied, "--resume", only=("AR",))
    assert asked == []
    assert by_counts(read(copied)) == by_counts(whole.results)
    assert read(copied)["test_text"] == whole.results["test_text"]
    kept = folder_of(copied, BY_NAME["AR"]) / SAMPLES_FILE
    samples = [json.loads(line) for line in lzma.decompress(kept.read_bytes()).decode().splitlines()]
    kept.write_bytes(lzma.compress("".join(json.dumps(s | {"text": TESTED[0]}) + "\n" for s in samples).encode()))
    run_table(whole.source, copied, "--resume", only=("AR",))
    assert asked == [len(samples) + len(others_of_the_test_text()) + TINY.draws]
    assert by_counts(read(copied), "AR") != by_counts(whole.results, "AR")
    others = [name for name in NAMES if name != "AR"]
    assert by_counts(read(copied), *others) == by_counts(whole.results, *others)


@pytest.mark.parametrize("lost", ["rows", "texts", "the text they were counted in"])
def test_ngrams_are_counted_anew_where_their_figures_are_gone(whole, copied, lost):
    """Or are of another text. They end up in the place they had."""
    results = read(copied)
    if lost == "rows":
        results["rows"] = [row for row in results["rows"] if (row["system"], row["metric"]) != ("AR", "counted_bits")]
    elif lost == "texts":
        results["test_text"] = "gone"
        del results["random_letters"]["counted_bits"]
    else:
        results["systems"]["AR"]["counted"][1] = "another"
        results["test_text"]["counted_bits"] = 0.5
    write_atomically(copied / "results.json", json.dumps(results))
    run_table(whole.source, copied, "--resume", only=("AR",))
    assert read(copied) == whole.results


def test_the_picture_at_a_glance_counts_evaluations_for_four_letters(whole, tmp_path):
    from matplotlib import pyplot as plt

    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_figures, "save", lambda figure, path: drawn.append(figure))
        text_figures.draw_headline(whole.results, tmp_path)
    lines = {line.get_label(): line for line in drawn[0].axes[0].lines}
    assert lines["no latent (BD3-LM)"].get_xdata().tolist() == [1, 2, 4]
    assert lines["letter by letter"].get_xdata().tolist() == [4]
    codes = whole.results["configurations"]["codes, r = 4"]["model"]["latent"]["codes"]
    bits = [row for row in whole.results["rows"] if (row["system"], row["metric"]) == ("codes, r = 4", "bits")]
    assert lines[f"one of {codes} codes"].get_ydata().tolist() == [row["value"] for row in bits]
    plt.close("all")


def test_pictures_show_the_judge_that_is_there(whole, tmp_path):
    from matplotlib import pyplot as plt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_figures, "save", lambda figure, path: [axis.get_ylabel() for axis in figure.axes][:3])
        assert text_figures.draw_text(whole.results, tmp_path)[2] == "judge's bits"
        rows = [row for row in whole.results["rows"] if row["metric"] != "judged_bits"]
        assert text_figures.draw_text(whole.results | {"rows": rows}, tmp_path)[2] == "n-gram judge's bits"
    plt.close("all")


HOW = {"steps": 1, "nfe": 1, "n": 1, "rule": "sample"}
ROW = "a cat sat on the"
NO_SAMPLES = {
    "no JSON": "{",
    "a list": "[]",
    "nested": "[" * 100_000,
    "nothing": "",
    "no setting": '{"text": "a cat sat on the"}',
    **{f"setting {how}": json.dumps({"setting": how, "text": ROW}) for how in (3, None, "x", [1], {}, {"temperature": 1})},
    "another rule": json.dumps({"setting": HOW | {"rule": "x"}, "text": ROW}),
    "no number of steps": json.dumps({"setting": HOW | {"steps": "1"}, "text": ROW}),
    "other letters": json.dumps({"setting": HOW, "text": ROW.upper()}),
    "no text": json.dumps({"setting": HOW, "text": 1}),
    "a short text": json.dumps({"setting": HOW, "text": ROW[1:]}),
    "one of two": json.dumps({"setting": HOW | {"n": 2}, "text": ROW}),
}


def test_a_sample_is_what_is_expected(whole, tmp_path):
    """Of which each of those below is a damaged one."""
    (tmp_path / SAMPLES_FILE).write_bytes(lzma.compress(json.dumps({"setting": HOW, "text": ROW}).encode()))
    data = read_text(whole.source, TINY, "train")
    ((how, tokens),) = text_samples.kept_samples(tmp_path / SAMPLES_FILE, data).items()
    assert (json.loads(how), tokens.shape) == (HOW, (1, LENGTH))


@pytest.mark.parametrize(
    ("content", "packed"),
    [*((content, True) for content in NO_SAMPLES.values()), ("{}", False), ("", False)],
    ids=[*NO_SAMPLES, "not packed", "an empty file"],
)
def test_damaged_samples_are_one_line_before_anything_is_trained(whole, copied, content, packed, monkeypatch):
    path = folder_of(copied, BY_NAME["AR"]) / SAMPLES_FILE
    path.write_bytes(lzma.compress(content.encode()) if packed else content.encode())
    shutil.rmtree(folder_of(copied, BY_NAME["MDLM"]))
    monkeypatch.setattr(text_table, "QUICK", TINY)
    monkeypatch.setattr(text_table, "train_system", lambda *rest: 1 / 0)
    again = settings("training.steps=3")
    told = refused(*words_for(whole.source, copied, "--resume", *again, only=("MDLM",)), folder=copied)
    assert f"{SAMPLES_FILE}: expected samples" in told


def test_a_finished_run_is_not_run_again(whole, copied, monkeypatch):
    before, seen = read(copied), watch(monkeypatch)
    run_table(whole.source, copied, "--resume", only=tuple(NAMES))
    assert seen == []
    assert read(copied) == before


def test_results_stay_of_the_machine_that_trained_them(whole, copied):
    """Their samples may be judged on another."""
    before = read(copied) | {"hardware": {"name": "a large one"}, "versions": {"torch": "x"}}
    write_atomically(copied / "results.json", json.dumps(before))
    run_table(whole.source, copied, "--resume", only=("AR",))
    assert {key: read(copied)[key] for key in before} == before
    shutil.rmtree(folder_of(copied, BY_NAME["AR"]))
    run_table(whole.source, copied, "--resume", *settings("training.steps=3"), only=("AR",))
    now = read(copied)
    assert now["hardware"] == now["systems"]["AR"]["hardware"] == whole.results["hardware"]
    assert now["versions"] == now["systems"]["AR"]["versions"] == whole.results["versions"]
    assert now["command"] == now["systems"]["AR"]["command"] != before["command"]
    assert whole.results["versions"]["torch"] == torch.__version__


def test_longer_training_runs_a_system_anew_and_says_which_settings_it_had(whole, copied, monkeypatch):
    """Not from its checkpoints, which are of rates that fell faster."""
    before, seen = read(copied), watch(monkeypatch)
    longer = ("--resume", *settings("training.steps=3"))
    with monkeypatch.context() as patch:
        patch.setattr(text_table, "QUICK", TINY)
        told = refused(*words_for(whole.source, copied, *longer), folder=copied)  # the first and the others
        assert "cannot resume with training.steps=3: the run has 2: remove " in told
        assert "AR to train it anew" in refused(*words_for(whole.source, copied, *longer, only=PAIR[:1]), folder=copied)
    assert seen == []
    shutil.rmtree(copied / FOLDERS[0])
    run_table(whole.source, copied, *longer, only=PAIR[:1])
    assert seen == [(FOLDERS[0], step) for step in (1, 2, 3)]
    after = read(copied)
    steps = {name: run["training"]["steps"] for name, run in after["configurations"].items()}
    assert steps == {name: 3 if name == "AR" else 2 for name in NAMES}
    assert after["systems"]["AR"]["characters"] == 3 * 4 * LENGTH
    kept = [name for name in NAMES if name != "AR"]
    assert rows_of(after, *kept) == rows_of(before, *kept)


def test_a_text_may_lie_elsewhere_when_a_system_goes_on(tmp_path):
    run = RunConfig(data=DataConfig(name="elsewhere/x.txt"))
    write_atomically(tmp_path / "run.json", json.dumps(to_dict(run)))
    assert goes_on(tmp_path, RunConfig(data=DataConfig(name="x.txt")), True)
    with pytest.raises(InvalidInput, match=r"cannot resume with data.name='y.txt': the run has 'x.txt'"):
        goes_on(tmp_path, RunConfig(data=DataConfig(name="y.txt")), True)


def test_one_system_needs_only_its_own_settings_to_fit_and_keeps_them(whole, tmp_path, monkeypatch):
    """Importance weights, which codes and the paper's z cannot have; another seed, also of the order of the text."""
    seen = watch(monkeypatch)
    chosen = settings("objective.samples=2", "training.seed=3")
    run_table(whole.source, tmp_path / "out", *chosen, only=("Gaussian, learned prior, r = 4",))
    results = read(tmp_path / "out")
    assert len(seen) == 2
    assert results["seeds"] == [3]
    assert results["configurations"]["Gaussian, learned prior, r = 4"]["objective"]["samples"] == 2
    assert "objective.samples=2" in refused(*words_for(whole.source, tmp_path / "all", *chosen), folder=tmp_path)


def test_other_runs_are_not_mixed_into_a_table(whole, copied, tmp_path, monkeypatch):
    monkeypatch.setattr(text_table, "QUICK", TINY)

    def no(*words, text=whole.source):
        return refused(*words_for(text, copied, *words), folder=copied)

    assert "--resume" in no()
    assert "--resume" in no("--only", "AR")
    assert "training.learning_rate=0.5" in no("--resume", "--only", "AR", *settings("training.learning_rate=0.5"))
    (tmp_path / "dogs.txt").write_text(TEXT.replace("cat", "dog"))
    assert "cats.txt" in no("--resume", "--only", "AR", text=tmp_path / "dogs.txt")
    (tmp_path / "cats.txt").write_text(TEXT.replace("cat", "act"))
    assert "another cats.txt" in no("--resume", "--only", "AR", text=tmp_path / "cats.txt")
    monkeypatch.setattr(text_table, "QUICK", replace(TINY, rows=ROWS - 1))
    assert "measured on other rows of the text: expected another --out" in no("--resume", "--only", "AR")
    monkeypatch.setattr(text_table, "QUICK", replace(TINY, length=8))
    assert "rows of 16" in no("--resume", "--only", "AR")


def damage(results: dict, path: str, value: object) -> None:
    *inner, last = path.split("/")
    for key in inner:
        results = results[int(key) if isinstance(results, list) else key]
    if value is None:
        del results[last]
    else:
        results[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("systems/AR/training_seconds", None),
        ("systems/AR/training_seconds", "long"),
        ("systems/AR/parameters", None),
        ("systems/AR/base", "x"),
        ("configurations/AR", {}),
        ("configurations/AR", []),
        ("configurations/AR/training/seed", None),
        ("configurations/AR/model", 3),
        ("configurations/AR/data/name", 3),
        ("rows", []),
        ("rows/0/metric", None),
        ("rows/0/setting", None),
        ("rows/0/value", "x"),
        ("rows/0/metric", "bits_apart"),  # from nothing
    ],
)
def test_damaged_results_are_one_line_before_anything_is_trained(whole, copied, path, value, monkeypatch):
    monkeypatch.setattr(text_table, "QUICK", TINY)
    monkeypatch.setattr(text_table, "train_system", lambda *rest: 1 / 0)
    results = read(copied)
    damage(results, path.replace("AR", NAMES[1]), value)
    (copied / "results.json").write_text(json.dumps(results))
    assert "results.json" in refused(*words_for(whole.source, copied, "--resume", only=("AR",)), folder=copied)


@pytest.mark.parametrize("which", ["text", "text-scan"])
def test_a_whole_table_that_was_fetched_without_its_folders_has_nothing_to_train(whole, tmp_path, monkeypatch, which):
    """Not even those whose weights others took, or judged by."""
    out = tmp_path / "out"
    if which == "text":
        monkeypatch.setattr(text_table, "QUICK", TINY)
        out.mkdir()
        shutil.copy(whole.out / "results.json", out)
        words = words_for(whole.source, out, "--resume")
    else:
        added = ("--only", "no latent, r = 4", "--only", "draft added, r = 4")
        run_scan(whole.source, tmp_path / "first", *added)
        out.mkdir()
        shutil.copy(tmp_path / "first/results.json", out)
    monkeypatch.setattr(text_table, "train_system", lambda *rest: 1 / 0)
    before = read(out)["rows"]
    if which == "text":
        succeeds(*words)
    else:
        run_scan(whole.source, out, "--resume", *added)
    assert read(out)["rows"] == before


def test_a_system_that_is_no_more_in_the_table_is_kept(whole, copied, monkeypatch):
    monkeypatch.setattr(text_table, "QUICK", TINY)
    results = json.loads((copied / "results.json").read_text().replace(json.dumps("AR"), '"AR of old"'))
    (copied / "results.json").write_text(json.dumps(results))
    run_table(whole.source, copied, "--resume", only=NAMES[1:2])
    assert list(read(copied)["systems"]) == [*(name for name in NAMES if name != "AR"), "AR of old"]


def test_a_judge_whose_weights_are_gone_is_trained_again_and_no_bits_of_two_judges_stand_in_a_table(
    whole, tmp_path, monkeypatch
):
    """As where results.json was fetched without the folders: a part of the samples is there, and no judge."""
    monkeypatch.setattr(text_table, "QUICK", TINY)
    (tmp_path / "out").mkdir()
    shutil.copy(whole.out / "results.json", tmp_path / "out")
    kept = folder_of(whole.out, BY_NAME["AR"]).name
    shutil.copytree(whole.out / kept, tmp_path / "out" / kept)
    other = settings("training.seed=7")
    run_table(whole.source, tmp_path / "out", "--resume", *other, only=(JUDGE,))
    rows = read(tmp_path / "out")["rows"]
    assert {row["system"] for row in rows if row["metric"] == "judged_bits"} == {"AR"}
    found, before = (
        [row["value"] for row in rows if row["metric"] == "judged_bits" and row["system"] == "AR"]
        for rows in (rows, whole.results["rows"])
    )
    assert found != before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"systems": {"AR": 1}}', '{"name": "text", "systems": {"AR": {}}}'])
def test_a_damaged_record_of_a_stopped_run_is_one_line(source, content, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/results.json").write_text(content)
    assert "results.json" in refused(*words_for(source, tmp_path / "out", "--resume"), folder=tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "autoregression"], "--only"),
        (["--only", "AR", "--only", "theirs"], "theirs"),
        (["--preset", "paper"], "--preset paper"),
        (["--seeds", "3"], "--seeds"),
        (["--set", "model.layers=0"], "model.layers=0"),
        (["--set", "model.length=32"], "model.length=32"),
        (["--set", "training.nonsense=1"], "nonsense"),
        (["--set", "data.tokenizer=byte"], "data.tokenizer=byte"),
        (["--set", "training.precision=bf16"], "training.precision=bf16"),
    ],
)
def test_wrong_orders_are_one_line(source, words, says, tmp_path):
    assert says in refused(*words_for(source, tmp_path / "out", *words), folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, "no such text"),
        ("tiny.txt", "abc", "too short"),
        ("short.txt", "a word " * 40, "too short"),  # to fill a row of the test text
        ("empty.txt", "", "empty.txt"),
        ("deterministic", None, "no such text"),
        ("array.npy", None, "array.npy"),
    ],
)
def test_what_is_no_text_of_some_length_is_one_line(source, name, content, says, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    given = name if name == "deterministic" else path
    assert says in refused(*words_for(given, tmp_path / "out"), folder=tmp_path)


def test_an_array_is_no_text(source, tmp_path):

    np.save(tmp_path / "rows.npy", np.zeros((4, LENGTH), dtype=np.int64))
    assert "expected a text" in refused(*words_for(tmp_path / "rows.npy", tmp_path / "out"), folder=tmp_path)


def test_the_full_table_needs_a_text(source, tmp_path):
    assert "--data" in refused("reproduce", "text", "--device", "cpu", "--out", tmp_path / "out", folder=tmp_path)


def test_a_quick_run_brings_a_text_that_is_made_once(source, tmp_path, monkeypatch):
    path = quick_text()
    made = path.stat().st_mtime_ns
    assert quick_text() == path
    assert path.stat().st_mtime_ns == made
    text = path.read_text()
    assert set(text) == set("abcdefghijklmnopqrstuvwxyz ")
    assert "  " not in text
    data = read_text(str(path), QUICK, "train")
    assert isinstance(data, TextData)
    assert len(data) > 1_000
    bad = ("reproduce", "text", "--quick", "--device", "cpu", "--out", tmp_path / "out", "--set", "model.layers=0")
    assert "model.layers=0" in refused(*bad, folder=tmp_path)
    monkeypatch.setattr(text_table, "QUICK", TINY)
    monkeypatch.setattr(figures, "draw_figures", lambda folder: [])
    assert "text: Python's own documentation" in succeeds(*bad[:-2], "--only", "AR").err
    assert read(tmp_path / "out")["data"] == "quick.txt"


def test_seconds_are_those_of_the_log(whole):
    for name in PAIR:
        log = [json.loads(line) for line in (folder_of(whole.out, BY_NAME[name]) / "metrics.jsonl").read_text().splitlines()]
        assert close(whole.results["systems"][name]["training_seconds"], log[-1]["seconds"], 1e-6)
        assert close(whole.results["systems"][name]["latent_kl"] or 0, log[-1].get("latent_kl") or 0)
    parts = whole.results["systems"].values()
    assert close(whole.results["seconds"], sum(p["training_seconds"] + p["measuring_seconds"] for p in parts), 0.1)


# The scan


SCANNED = ("no latent, r = 4", "16 codes, r = 4", "no latent, r = 8", "draft, r = 4, for one step")


def run_scan(source, out, *words: object, quick: bool = True):
    budget = replace(TINY, draws=0, split="validation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_table, "SCAN_QUICK", budget)
        patch.setattr(text_table, "SCAN_FULL", budget)
        chosen = ("--quick",) if quick else ()
        return succeeds("reproduce", "text-scan", *chosen, "--data", source, "--device", "cpu", "--out", out, *words)


def refused_scan(source, out, *words: object) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_table, "SCAN_QUICK", replace(TINY, draws=0, split="validation"))
        options = ("--quick", "--data", source, "--device", "cpu", "--out", out)
        return refused("reproduce", "text-scan", *options, *words, folder=out)


@pytest.fixture(scope="module")
def scanned(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("scan") / "out"
    done = run_scan(source, out, *(word for name in SCANNED for word in ("--only", name)))
    return SimpleNamespace(out=out, done=done, results=read(out))


def test_a_scan_scores_validation_text_and_draws_nothing(scanned):
    """The test text is for the systems that were chosen."""
    rows = spread(chunks(TEXT[CUT[0] : CUT[1]]))
    x0 = torch.tensor([[sorted(set(TEXT)).index(c) for c in row] for row in rows])
    assert list(scanned.results["systems"]) == list(SCANNED)
    assert not any("temperature" in row["setting"] for row in scanned.results["rows"])
    assert "test_text" not in scanned.results
    for name in SCANNED:
        model = VMD.from_pretrained(folder_of(scanned.out, next(s for s in SCAN if s.name == name)))
        for row in rows_of(scanned.results, name):
            if row["metric"] == "bits":
                generator = torch.Generator().manual_seed(0)
                expected = in_bits(nll_bound(model, x0, row["setting"]["steps"], generator=generator), LENGTH)
                assert close(row["value"], expected.value, 1e-5), (name, row)


def test_a_scan_is_shown_as_a_table_and_a_picture(scanned, tmp_path):
    assert (scanned.out / "scan.png").read_bytes().startswith(PNG)
    assert str(scanned.out / "scan.png") in scanned.done.err
    assert "validation text" in (scanned.out / "table.md").read_text()
    assert "Samples" not in (scanned.out / "table.md").read_text()
    shutil.copytree(scanned.out, tmp_path / "results/text-scan")
    text = section(tmp_path / "results", "text-scan", tmp_path / "README.md")
    assert "| draft, r = 4, for one step |" in text
    assert "(results/text-scan/scan.png)" in text
    for names in ([], [SCANNED[-1]], [SCANNED[0]]):  # nothing, no codes to count, nothing but codes
        some = {key: {name: scanned.results[key][name] for name in names} for key in ("systems", "configurations")}
        results = scanned.results | some | {"rows": rows_of(scanned.results, *names)}
        (tmp_path / "results.json").write_text(json.dumps(results))
        assert [path.name for path in draw_figures(tmp_path)] == (["scan.png"] if names else [])


def changed(run: RunConfig, other: RunConfig) -> dict[str, object]:
    """{field: its value in the first} where two runs differ."""
    one, two = (flatten(to_dict(r)) for r in (run, other))
    assert one.keys() == two.keys()
    return {name: value for name, value in one.items() if two[name] != value}


@pytest.fixture(scope="module")
def scans(source):
    """{budget: {system: its run}}, on a machine with and without a GPU."""
    data = {b.length: SimpleNamespace(length=b.length, vocab_size=27, symbols=()) for b in (SCAN_FULL, SCAN_QUICK)}
    budgets = [(SCAN_FULL, "cpu"), (SCAN_FULL, "cuda"), (SCAN_QUICK, "cpu")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_systems, "check_precision", lambda *args: None)
        return [{s.name: planned(s, b, "x", [], data[b.length], device) for s in SCAN} for b, device in budgets]


CHANGES = {
    "additive head": {"model.latent.head": "additive"},
    "head of rank 16": {"model.latent.head_dim": 16},
    "head of rank 512": {"model.latent.head_dim": 512},
    "places alike": {"model.latent.by_place": False},
    "last layer too": {"model.latent.code_layers": 1},
    "head of 1024": {"model.draft": 1024},
    "half together": {"objective.together": 0.5},
    "0.9 together": {"objective.together": 0.9},
    "by counts": {"objective.together": 0},
    "half whole": {"objective.whole": 0.5},
    "for one step": {"objective.masking": "steps"},  # of one step is the default
    "four draws": {"objective.samples": 4},
    "a chain": {"model.latent.kind": "chain"},
    "a chain of two": {"model.latent.kind": "chain"},
    "a chain of four": {"model.latent.kind": "chain"},
    "KL weight r/128": {"objective.kl_weight": 4 / 128},
    "rate 0.004": {"training.learning_rate": 0.004},
    "rate 0.016": {"training.learning_rate": 0.016},
    "second seed": {"training.seed": 1},
}


def test_every_system_of_the_scan_changes_one_thing(scans):
    """Each variant differs from the system it is named after in what its name says, and no two are the same."""
    for runs in scans:
        assert len(runs) == len(SCAN)
        alone = [system.name for system in SCAN if not system.added_to]
        assert len({repr(runs[name]) for name in alone}) == len(alone)
        seen = set()
        for name, run in runs.items():
            base = max((other for other in runs if name.startswith(f"{other}, ")), key=len, default=None)
            if base is None:
                continue
            what = name.removeprefix(f"{base}, ")
            expected = CHANGES.get(what, {"training.steps": 4 * runs[base].training.steps})
            if runs[base].objective.together and what in ("half whole", "for one step"):  # with which it does not go
                expected = expected | {"objective.together": 0}
            if what in ("a chain of two", "a chain of four"):
                expected = expected | {"model.latent.span": run.model.block_size // (2 if what == "a chain of two" else 4)}
            found = changed(run, runs[base])
            found.pop("training.compile", None)  # which does not change results
            assert found == expected, name
            seen.add(what)
        assert seen == {*CHANGES, "four times as long"}


def test_codes_and_blocks_of_the_scan_are_as_named(scans):
    for runs in scans:
        for name, run in runs.items():
            assert run.model.block_size == int(re.search(r"r = (\d+)", name)[1])
            if found := re.match(r"(\d+) codes", name):
                assert run.model.latent.codes == int(found[1])
            assert (run.model.latent.kind == "none") is name.startswith(("no latent", "draft"))
            assert (run.model.draft > 0) is name.startswith("draft")


def test_a_part_is_added_to_a_system_that_stays_as_it_is(source, scanned, tmp_path):
    by_name = {system.name: system for system in SCAN}
    for name in ("64 codes added, r = 4", "draft added, r = 4"):
        words = ("reproduce", "text-scan", "--quick", "--data", source, "--device", "cpu", "--out", tmp_path / "none")
        told = refused(*words, "--only", name, folder=tmp_path / "none")
        assert f"{name}: it begins with no latent, r = 4: expected that to be done" in told
        trained = shutil.copytree(scanned.out, tmp_path / f"{name}, base trained alone")
        (trained / "results.json").unlink()  # its weights are there, but it was never measured
        assert "expected that to be done" in refused_scan(source, trained, "--resume", "--only", name)
        run_scan(source, tmp_path / name, "--only", "no latent, r = 4", "--only", name)
        run_scan(source, tmp_path / name, "--resume", "--only", name)  # nothing to do
        before, after = (
            VMD.from_pretrained(folder_of(tmp_path / name, by_name[which])).state_dict()
            for which in ("no latent, r = 4", name)
        )
        assert before.keys() < after.keys()
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
        moved = shutil.move(tmp_path / name, tmp_path / f"{name}, elsewhere")
        run_scan(source, moved, "--resume", "--only", name)  # nothing to do there either
        told = refused_scan(source, moved, "--resume", "--only", "no latent, r = 4", *settings("training.steps=3"))
        assert f"{name} began with another 'no latent, r = 4'" in told


def test_curves_are_of_systems_that_differ_in_codes_alone(scanned):
    bits = {(r["system"], r["setting"]["steps"]): r["value"] for r in scanned.results["rows"] if r["metric"] == "bits"}
    plain, coded, eight, _ = SCANNED
    assert scan_curves(scanned.results) == {(4, n): [(1, bits[plain, n]), (16, bits[coded, n])] for n in (1, 2, 4)} | {
        (8, n): [(1, bits[eight, n])] for n in (1, 2, 8)
    }
    assert scan_groups(scanned.results) == [SCANNED[-1]]
    systems = dict.fromkeys([*SCANNED, f"{plain}, half whole", f"{SCANNED[-1]}, four times as long"])
    groups = scan_groups(scanned.results | {"systems": systems})
    assert groups == [plain, f"{plain}, half whole", SCANNED[-1], f"{SCANNED[-1]}, four times as long"]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("codes, r = 4", ("model.latent.kind=none", "objective.together=0")),
        ("draft for one step, r = 4", ("model.draft=0",)),
        ("AR", ("model.latent.kind=categorical",)),
    ],
)
def test_a_system_keeps_what_it_is_named_after(source, tmp_path, name, overrides):
    told = refused(*words_for(source, tmp_path / "out", *settings(*overrides), only=(name,)), folder=tmp_path)
    assert f"{name}: --set" in told
    assert "expected the latent and the draft head that this system has" in told


@pytest.mark.parametrize("block", [1, 16])
def test_blocks_that_are_set_for_all_are_refused(source, tmp_path, block):
    words = ("reproduce", "text-scan", "--quick", "--data", source, "--device", "cpu", "--out", tmp_path / "out")
    for name, setting in ((SCANNED[0], f"model.block_size={block}"), (SCANNED[1], "model.latent.codes=8")):
        told = refused(*words, "--only", name, "--set", setting, folder=tmp_path)
        assert f"{name}: --set {setting}: expected no {setting.partition('=')[0]}" in told


def test_the_scan_and_the_table_do_not_share_a_folder(source, scanned, tmp_path, monkeypatch):
    """Their systems may have the same names, and are scored on other text."""
    copied = shutil.copytree(scanned.out, tmp_path / "out")
    monkeypatch.setattr(text_table, "QUICK", TINY)
    told = refused(*words_for(source, copied, "--resume", only=("AR",)), folder=copied)
    assert "holds a run of text-scan: expected another --out for text" in told


def test_slow_systems_of_a_quick_scan_run_only_if_they_are_named(source, tmp_path, monkeypatch):
    trained: list[str] = []

    def no_training(system, *rest):
        trained.append(system.name)
        return None, {"training_seconds": 0}

    monkeypatch.setattr(text_table, "train_system", no_training)
    monkeypatch.setattr(text_table, "bits_rows", lambda *rest: ([], {}))
    monkeypatch.setattr(text_table, "collect", lambda *rest: {"systems": {}, "rows": []})
    monkeypatch.setattr(text_table, "write_results", lambda results, out: results)
    options = {"table": "text-scan", "command": "", "data": str(source), "quick": True}
    text_table.reproduce_text(out=tmp_path / "quick", **options)
    slow = {system.name for system in SCAN if system.slow}
    assert slow
    assert trained == [system.name for system in SCAN if not system.slow and not system.second_seed]
    trained.clear()
    text_table.reproduce_text(out=tmp_path / "one", only=("1024 codes, r = 4",), **options)
    assert trained == ["1024 codes, r = 4"]


def test_the_committed_scan_is_of_the_systems_as_they_are_now():
    """But for its size: so that it can go on, and so that its names mean what they say."""
    done = read_done(Path(__file__).parents[1] / "results/text-scan-small", True, "text-scan")
    letters = tuple(" abcdefghijklmnopqrstuvwxyz")
    data = SimpleNamespace(length=SCAN_QUICK.length, vocab_size=27, symbols=letters)
    size = ["model.layers=3", "model.width=96", "training.steps=600"]
    for system in SCAN:
        if system.name in done:
            run = planned(system, SCAN_QUICK, "text8-70M.xz", size, data, "cpu")
            if system.added_to:
                run = replace(run, training=replace(run.training, freeze=True))
            assert is_of(done[system.name]["configuration"], run), system.name
    assert len(done) >= 30


def test_a_variant_is_drawn_without_what_it_is_a_variant_of():
    """As a row of its own; systems that differ in codes alone are in the other panel."""
    names = ["no latent, r = 4", "16 codes, r = 4", "64 codes, r = 4, places alike", "draft, r = 4"]
    assert scan_groups({"systems": dict.fromkeys(names)}) == names[2:]
    names.insert(2, "64 codes, r = 4")
    assert scan_groups({"systems": dict.fromkeys(names)}) == names[2:]


@pytest.mark.parametrize("content", ["[]", "{", "3"])
def test_a_system_whose_configuration_is_damaged_is_one_line(whole, copied, content, monkeypatch):
    monkeypatch.setattr(text_table, "QUICK", TINY)
    results = read(copied)
    damage(results, "systems/AR", None)
    (copied / "results.json").write_text(json.dumps(results))
    (copied / FOLDERS[0] / "run.json").write_text(content)
    assert "run.json: expected" in refused(*words_for(whole.source, copied, "--resume", only=("AR",)), folder=copied)
