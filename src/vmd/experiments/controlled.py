"""Runs a table of the paper: trains its rows, evaluates them, writes results.json, table.md and figures.

Rows whose models have the same shape are trained together, seeds and data sets side by side, in one batched step.
"""

import json
import math
import operator
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vmd import __version__
from vmd.config import RunConfig, override_all, require, require_choice, require_range, to_dict
from vmd.data.synthetic import Law, law
from vmd.ensemble import Ensemble
from vmd.experiments.ablations import ablation_runs, evaluate_ablation
from vmd.experiments.tables import render
from vmd.files import hardware, make_folder, read_json, write_atomically
from vmd.masking import Rows
from vmd.metrics import accuracy, empirical, kl_to, one_step_probabilities
from vmd.model import VMD
from vmd.presets import FAMILIES, FOUR_TOKEN, TWO_TOKEN, synthetic
from vmd.progress import progress_bar
from vmd.step import check_precision
from vmd.training import train

# What the paper prints: (system, data, block size, steps per block) -> accuracy in percent, KL in nats.
PAPER = {
    ("MDM", "deterministic", 2, 1): (10.18, 2.3),
    ("MDM", "deterministic", 2, 2): (99.97, 0.001),
    ("VMD", "deterministic", 2, 1): (93.2, 0.082),
    ("VMD", "deterministic", 2, 2): (100.0, 0.012),
    ("MDM", "non-uniform", 2, 1): (11.63, 2.2),
    ("MDM", "non-uniform", 2, 2): (99.96, 0.023),
    ("VMD", "non-uniform", 2, 1): (93.04, 0.081),
    ("VMD", "non-uniform", 2, 2): (99.98, 0.009),
    ("MDM", "dependence-0.3", 2, 1): (None, 0.155),
    ("VMD", "dependence-0.3", 2, 1): (None, 0.054),
    ("MDM", "dependence-0.5", 2, 1): (None, 0.516),
    ("VMD", "dependence-0.5", 2, 1): (None, 0.062),
    ("MDM", "dependence-0.7", 2, 1): (None, 1.03),
    ("VMD", "dependence-0.7", 2, 1): (None, 0.064),
    ("MDM", "dependence-1", 2, 1): (None, 2.31),
    ("VMD", "dependence-1", 2, 1): (None, 0.079),
    ("MDM", "d1", 2, 2): (99.4, 0.007),
    ("MDM", "d1", 2, 1): (10.1, 2.298),
    ("MDM", "d1", 4, 4): (99.3, 0.010),
    ("MDM", "d1", 4, 1): (0.1, 9.422),
    ("MDM", "d2", 2, 2): (99.3, 0.018),
    ("MDM", "d2", 2, 1): (1.1, 7.656),
    ("MDM", "d2", 4, 4): (99.1, 0.015),
    ("MDM", "d2", 4, 1): (1.1, 7.493),
    ("VMD", "d1", 2, 2): (100.0, 0.012),
    ("VMD", "d1", 2, 1): (94.2, 0.068),
    ("VMD", "d1", 4, 4): (100.0, 0.033),
    ("VMD", "d1", 4, 1): (87.3, 0.165),
    ("VMD", "d2", 2, 2): (100.0, 0.018),
    ("VMD", "d2", 2, 1): (88.6, 0.148),
    ("VMD", "d2", 4, 4): (100.0, 0.475),
    ("VMD", "d2", 4, 1): (80.0, 0.268),
}

TABLES = ("two-token", "four-token", "ablations", "heads")


@dataclass(frozen=True)
class Cell:
    """One row of a table before its seeds: a system trained on one data set."""

    system: str  # MDM or VMD; in the ablations the kind of latent
    family: str  # ours or paper
    run: RunConfig
    objective: str = ""  # in the ablations, what was trained

    @property
    def data(self) -> str:
        return self.run.data.name

    @property
    def block(self) -> int:
        return self.run.model.block_size


@dataclass(frozen=True)
class Budget:
    """How much a run may cost: the full table, or the same code in minutes on two CPU cores."""

    seeds: tuple[int, ...]
    draws: int  # samples per row
    z_draws: int  # latents per exact KL
    settings: tuple[str, ...]  # overrides of the presets
    data: tuple[str, ...]


FULL = {
    "two-token": Budget((0, 1, 2, 3, 4), 100_000, 100_000, (), TWO_TOKEN),
    "four-token": Budget((0, 1, 2, 3, 4), 100_000, 100_000, (), FOUR_TOKEN),
    "ablations": Budget((0, 1, 2, 3, 4), 50_000, 50_000, (), TWO_TOKEN[:-1] + FOUR_TOKEN),  # p = 1 is deterministic
    "heads": Budget((0, 1, 2, 3, 4), 50_000, 50_000, (), ("deterministic", "dependence-0.3", "d1", "d2")),
}
QUICK = {
    "two-token": Budget(
        (0,),
        10_000,
        10_000,
        ("training.steps=1000", "training.batch_size=256", "training.ema=0.99"),
        ("deterministic", "non-uniform"),
    ),
    "four-token": Budget(
        (0,), 10_000, 10_000, ("training.steps=700", "training.batch_size=256", "training.ema=0.99"), FOUR_TOKEN
    ),
    "ablations": Budget(
        (0,), 10_000, 10_000, ("training.steps=400", "training.batch_size=64", "training.ema=0.99"), ("deterministic",)
    ),
    "heads": Budget(
        (0,), 10_000, 10_000, ("training.steps=400", "training.batch_size=64", "training.ema=0.99"), ("deterministic",)
    ),
}


def cells_of(name: str, data: tuple[str, ...], family: str) -> list[Cell]:
    if name in ("ablations", "heads"):
        require(family == "ours", f"--preset {family}: expected ours: {name} has one")
        return [Cell(system, family, run, objective) for system, objective, run in ablation_runs(name, data)]
    blocks = (2,) if name == "two-token" else (2, 4)
    return [
        Cell("VMD" if latent else "MDM", family, synthetic(d, block, latent=latent, family=family))
        for latent in (False, True)
        for block in blocks
        for d in data
    ]


class StackedLaws:
    """A law for each model of an ensemble: batches are (M, B, L)."""

    def __init__(self, laws: list[Law]):
        self.laws = laws
        self.length, self.vocab_size, self.symbols = laws[0].length, laws[0].vocab_size, ()
        pad = torch.nn.utils.rnn.pad_sequence
        self.sequences = pad([law.sequences for law in laws], batch_first=True)  # (M, S, L)
        cumulative = [law.probabilities.cumsum(0) / law.probabilities.sum() for law in laws]
        self.cumulative = pad(cumulative, batch_first=True, padding_value=2.0)  # (M, S)
        self.last = torch.tensor([[len(law.sequences) - 1] for law in laws])

    def batch(
        self, step: int, size: int, *, rows: Rows | None = None, generator: torch.Generator | None = None, device=None
    ) -> Tensor:
        for name in ("sequences", "cumulative", "last"):
            setattr(self, name, getattr(self, name).to(device))
        u = torch.rand(len(self.laws), size, generator=generator, device=device, dtype=torch.float64)
        index = torch.minimum(torch.searchsorted(self.cumulative, u, right=True), self.last)
        drawn = self.sequences.gather(1, index.unsqueeze(-1).expand(-1, -1, self.length))
        return drawn if rows is None else rows.of(drawn, dim=1)


def groups_of(cells: list[Cell]) -> list[list[Cell]]:
    """Cells that can be trained in one batched step: equal but for their data set and KL weight."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        blank = to_dict(cell.run)
        blank["objective"]["kl_weight"], blank["data"]["name"] = None, None
        groups.setdefault(json.dumps([cell.system, blank]), []).append(cell)
    return list(groups.values())


def train_group(
    cells: list[Cell], seeds: tuple[int, ...], device: str, on_step: Callable[[int, dict | None], None]
) -> tuple[list[tuple[Cell, int, VMD]], float]:
    """The models of every cell and seed, and the median milliseconds of a step of all together."""
    members = [(cell, seed) for cell in cells for seed in seeds]
    laws = [law(cell.data) for cell, _ in members]
    run = cells[0].run
    # The seed is mixed with the member's place, so that no two members of a group start from the same weights.
    models = [VMD(run.model, seed=1_000 * seed + place) for place, (_, seed) in enumerate(members)]
    ensemble = Ensemble(models).to(device)
    weights = torch.tensor([cell.run.objective.kl_weight for cell, _ in members])
    run = replace(run, training=replace(run.training, seed=1_000_003 * seeds[0] + run.training.seed))
    log = train(ensemble, StackedLaws(laws), run, kl_weights=weights, on_step=on_step)
    tokens = len(members) * run.training.batch_size * run.model.length
    pace = 1_000 * tokens / statistics.median(record["tokens_per_second"] for record in log)
    models = [model.to(device).eval() for model in ensemble.models()]
    return [(cell, seed, model) for (cell, seed), model in zip(members, models, strict=True)], pace


def settings_of(cell: Cell) -> list[dict]:
    """How a trained cell is sampled. VMD by both rules; MDM by the sample rule, and by argmax once to show it degenerate."""
    r = cell.block
    chosen = []
    for steps in (1, r):
        if cell.system == "MDM":
            rules = ("sample", "argmax") if cell.data in ("deterministic", "d1") and steps == 1 else ("sample",)
            chosen += [{"steps": steps, "rule": rule, "z": "none"} for rule in rules]
            continue
        fresh_defined = cell.run.model.latent.on_clean is False or law(cell.data).length == r
        for z in ("once", "fresh") if steps > 1 and fresh_defined else ("once",):
            chosen += [{"steps": steps, "rule": rule, "z": z} for rule in ("argmax", "sample")]
    return chosen


def evaluate_cell(cell: Cell, seed: int, model: VMD, budget: Budget) -> tuple[list[dict], dict[str, list]]:
    """Rows of one trained model, and its one-step tables of pairs for the heat maps."""
    if cell.objective:
        return evaluate_ablation(cell.system, cell.objective, cell.run, seed, model, budget.draws, budget.z_draws), {}
    truth = law(cell.data)
    blocks = truth.length // cell.block
    rows, pictures = [], {}
    generator = torch.Generator(model.device)
    for setting in settings_of(cell):
        generator.manual_seed(10_000 + seed)
        drawn = model.sample(
            budget.draws,
            steps=setting["steps"],
            rule=setting["rule"],
            order="prob",
            z="once" if setting["z"] == "none" else setting["z"],
            generator=generator,
            batch_size=100_000 if model.device.type == "cuda" else 10_000,
        )
        full = {
            "preset": cell.family,
            "data": cell.data,
            "block": cell.block,
            "steps": setting["steps"],
            "nfe": drawn.nfe,
            "order": "prob",
            "rule": setting["rule"],
            "z": setting["z"],
            "n": budget.draws,
        }
        if cell.system == "VMD":
            full["kl_weight"] = cell.run.objective.kl_weight
        share = empirical(drawn.tokens, truth)
        if truth.constrains:
            rows.append(
                {"system": cell.system, "setting": full, "metric": "accuracy", "value": accuracy(drawn.tokens, truth)}
            )
        rows.append({"system": cell.system, "setting": full, "metric": "kl", "value": kl_to(truth, share)})
        if setting["steps"] == 1 and truth.length == 2:
            table = torch.zeros(truth.vocab_size, truth.vocab_size, dtype=torch.float64)
            tokens = drawn.tokens.cpu()
            table.index_put_((tokens[:, 0], tokens[:, 1]), torch.ones(len(tokens), dtype=torch.float64), accumulate=True)
            pictures[f"{cell.system} {cell.family} {setting['rule']}"] = (table / len(tokens)).tolist()
        if setting["steps"] == 1 and setting["rule"] == "sample":
            z_draws = budget.z_draws if blocks == 1 else budget.z_draws // 10  # for each of ten prefixes
            probabilities = one_step_probabilities(model, truth.sequences, z_draws, generator=generator)
            exact = full | {"n": z_draws if cell.system == "VMD" else 1}
            rows.append(
                {"system": cell.system, "setting": exact, "metric": "kl_exact", "value": kl_to(truth, probabilities)}
            )
    return rows, pictures


def aggregate(rows: list[dict]) -> list[dict]:
    """Mean and standard error over seeds, with the paper's figure beside it."""
    merged: dict[str, list[dict]] = {}
    for row in rows:
        merged.setdefault(json.dumps([row["system"], row["setting"], row["metric"]]), []).append(row)
    out = []
    for same in merged.values():
        values = [row["value"] for row in same]
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else None
        setting = same[0]["setting"]
        place = (same[0]["system"], setting["data"], setting["block"], setting["steps"])
        printed = PAPER.get(place, (None, None))
        out.append(
            same[0]
            | {
                "value": mean,
                "stderr": None if spread is None else spread / math.sqrt(len(values)),
                "values": values,
                **({"errors": [row["error"] for row in same]} if "error" in same[0] else {}),
                "paper": printed[0 if same[0]["metric"] == "accuracy" else 1],
            }
        )
    return out


def planned_cells(name: str, budget: Budget, family: str, settings: list[str], device: str) -> list[Cell]:
    """The cells of a table with all overrides applied and checked."""
    cells = []
    for cell in cells_of(name, budget.data, family):
        run = override_all(cell.run, settings)
        named_after = ["data", "model.block_size", "model.latent.kind"]
        if cell.objective:
            named_after += ["model.latent.prior", "objective.masking", "objective.steps", "objective.z", "objective.samples"]
        if name == "heads":
            named_after += [f"model.latent.{field}" for field in ("codes", "head", "head_dim", "code_layers")]
            named_after += ["training.split_codes_every"]
        for field in named_after:
            same = operator.attrgetter(field)(run) == operator.attrgetter(field)(cell.run)
            require(same, f"--set {field}: fixed in a table: it is what makes a row {cell.system} {cell.data}")
        check_precision(run.training, device)
        truth = law(run.data.name)
        run = replace(run, model=run.model.resolved(truth.length, truth.vocab_size))
        run.objective.check(run.model)
        cells.append(replace(cell, run=run))
    return cells


def reproduce(
    name: str,
    *,
    out: Path,
    command: str,
    quick: bool = False,
    seeds: tuple[int, ...] | None = None,
    family: str = "ours",
    device: str = "cpu",
    overrides: list[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> dict:
    """Train and evaluate one table; write OUT/results.json, table.md and heatmaps.json; return the results.

    After each group of models its rows are kept in OUT/partial.json; `resume` takes them from there. `overwrite` makes
    results anew that are there.
    """
    require_choice("NAME", name, TABLES)
    require_choice("--preset", family, FAMILIES)
    budget = (QUICK if quick else FULL)[name]
    if seeds is not None:
        require_range("--seeds", len(seeds), 1)
        budget = replace(budget, seeds=seeds)
    settings = list(budget.settings)
    if device == "cuda" and name in (
        "ablations",
        "heads",
    ):  # many small groups: compiling each would take longer than training it
        settings += ["training.capture=true", "training.precision=tf32"]
    elif device == "cuda":
        settings += ["training.compile=true", f"training.precision={'bf16' if family == 'paper' else 'tf32'}"]
    cells = planned_cells(name, budget, family, settings + (overrides or []), device)
    groups = groups_of(cells)
    partial = out / "partial.json"
    begun, ended = partial.exists(), (out / "results.json").exists()
    require(overwrite or resume or not begun, f"{out} holds a stopped run: expected --resume, --overwrite or another --out")
    require(overwrite or begun or not ended, f"{out} holds results: expected --overwrite, or another --out")
    finished: dict[str, dict] = read_json(partial) if resume and begun else {}
    require(isinstance(finished, dict), f"{partial}: expected the record of a stopped run")
    make_folder(out)
    total = sum(group[0].run.training.steps for group in groups)
    done_before = 0
    with progress_bar(f"vmd reproduce {name}", total) as update:
        for number, group in enumerate(groups, start=1):
            what = ", ".join(part for part in (group[0].system, group[0].objective) if part)
            label = f"{what}, block {group[0].block} ({number} of {len(groups)})"

            def on_step(done: int, record: dict | None, label: str = label, before: int = done_before) -> None:
                update(before + done, "" if record is None else f"{label}: loss {record['total']:.3f} kl {record['kl']:.3f}")

            done_before += group[0].run.training.steps
            if signature(group, budget) not in finished:
                started = time.perf_counter()
                trained, pace = train_group(group, budget.seeds, device, on_step)
                update(done_before, f"{label}: sampling")
                part = evaluate_group(trained, budget) | {"seconds": time.perf_counter() - started}
                if group[0].objective:
                    part["rows"].append(pace_row(group[0], len(trained), pace))
                finished[signature(group, budget)] = part
                write_atomically(partial, json.dumps(finished))
            update(done_before, f"{label}: done")
    parts = [finished[signature(group, budget)] for group in groups]
    results = {
        "name": name,
        "preset": family,
        "command": command,
        "seeds": list(budget.seeds),
        "hardware": hardware(device),
        "versions": {"vmd": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(sum(part["seconds"] for part in parts), 1),
        "configurations": {
            " ".join(filter(None, (c.system, c.objective, c.family, c.data, f"block {c.block}"))): to_dict(c.run)
            for c in cells
        },
        "entropy": {c.data: law(c.data).entropy / (law(c.data).length * math.log(2)) for c in cells},  # bits per token
        "rows": aggregate([row for part in parts for row in part["rows"]]),
    }
    heatmaps: dict[str, dict] = {}
    for part in parts:
        for data, tables in part["heatmaps"].items():
            heatmaps.setdefault(data, {"truth": truth_table(law(data))}).update(tables)
    write_atomically(out / "results.json", json.dumps(results, indent=1))
    if heatmaps:
        write_atomically(out / "heatmaps.json", json.dumps(heatmaps))
    write_atomically(out / "table.md", render(results))
    partial.unlink(missing_ok=True)
    return results


def signature(group: list[Cell], budget: Budget) -> str:
    """What a group's rows depend on."""
    about = [[cell.system, to_dict(cell.run)] for cell in group]
    return json.dumps([about, budget.seeds, budget.draws, budget.z_draws])


def evaluate_group(trained: list[tuple[Cell, int, VMD]], budget: Budget) -> dict:
    rows: list[dict] = []
    heatmaps: dict[str, dict] = {}
    for cell, seed, model in trained:
        new_rows, pictures = evaluate_cell(cell, seed, model, budget)
        rows += new_rows
        if seed == budget.seeds[0] and pictures:
            heatmaps.setdefault(cell.data, {}).update(pictures)
    return {"rows": rows, "heatmaps": heatmaps}


def pace_row(cell: Cell, models: int, pace: float) -> dict:
    """What a training step of a group costs: the same number of models and sequences in each, so that groups compare."""
    setting = {"objective": cell.objective, "data": "all", "block": cell.block, "steps": 0, "nfe": 0, "z": "none"}
    setting |= {"models": models, "batch": cell.run.training.batch_size}
    return {"system": cell.system, "setting": setting, "metric": "ms_per_step", "value": pace}


def truth_table(truth: Law) -> list:
    table = torch.zeros(truth.vocab_size, truth.vocab_size, dtype=torch.float64)
    table[truth.sequences[:, 0], truth.sequences[:, 1]] = truth.probabilities
    return table.tolist()
