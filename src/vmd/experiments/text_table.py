"""`vmd reproduce text`: systems trained on the same characters, their certified bits at every number of steps, and samples.
`vmd reproduce text-scan`: what decides how much codes gain, by short runs and validation text.

Every system is trained in a folder of its own and goes on from its checkpoints; its rows are kept when it is done.
"""

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vmd.config import InvalidInput, RunConfig, require, with_new_fields
from vmd.data import TextData
from vmd.evaluation import rows_per_score
from vmd.experiments.paired import NATS_FILE, pair_all, write_nats
from vmd.experiments.systems import (
    RESULTS_FILE,
    chosen_names,
    collect,
    goes_on,
    is_done,
    is_of,
    last_made,
    made_by,
    read_done,
    run_systems,
    write_results,
)
from vmd.experiments.text_samples import (
    count_all,
    judge_all,
    sample_rows,
    spread_over,
    texts_at,
    uncounted,
    vocabulary,
    yardstick_texts,
    yardsticks,
)
from vmd.experiments.text_systems import (
    FULL,
    JUDGE,
    PAPER,
    QUICK,
    SCAN,
    SCAN_FULL,
    SCAN_QUICK,
    SYSTEMS,
    Budget,
    System,
    folder_of,
    planned,
    quick_text,
    read_text,
    step_counts,
    with_frozen_base,
)
from vmd.files import make_folder, read_json
from vmd.likelihood import Bits, in_bits, nll_bound, random_order_nll
from vmd.masking import draw_masks
from vmd.model import VMD, WEIGHTS_FILE
from vmd.progress import progress_bar
from vmd.training import train


def bits_rows(model: VMD, run: RunConfig, x0: Tensor, budget: Budget) -> tuple[list[dict], dict[int, Tensor]]:
    """Certified bits per character at every number of steps, and the paper's objective, or the bounds that were trained.

    Beside these rows {steps: (n,)}, the nats of every row of text.
    """
    rows: list[dict] = []
    nats: dict[int, Tensor] = {}
    chunk = rows_per_score(model)
    latent, scored = model.config.latent, {}
    z = "once" if model.config.z_reaches_later_blocks else "fresh"
    for steps in step_counts(run):
        samples = budget.iwae if latent.kind == "gaussian" else 1
        generator = torch.Generator(x0.device).manual_seed(0)
        nats[steps] = nll_bound(
            model, x0, steps, z=z, samples=samples, chunk=chunk, generator=generator, steps_scored=budget.steps_scored
        )
        scored[steps] = bits = in_bits(nats[steps], x0.shape[1])
        setting = {"steps": steps, "nfe": steps * model.config.blocks, "order": "random", "rule": "sample", "n": len(x0)}
        setting |= {"z": z if model.config.has_latent else "none", "iwae": samples}
        setting |= {"steps_scored": min(steps, budget.steps_scored)} if z == "fresh" else {}
        rows.append({"setting": setting, "metric": "bits", "value": bits.value, "stderr": bits.stderr})
    rows += order_rows(model, x0, [steps for steps in nats if steps > 1])
    if run.objective.masking == "steps":  # it was these bounds that were trained
        over = [scored[steps] for steps in run.objective.steps]
        value = Bits(sum(b.value for b in over) / len(over), sum(b.stderr or 0.0 for b in over) / len(over))
    else:
        draws = 4 if model.config.blocks > 1 else budget.steps_scored  # a mask of one block says little of the others
        totals = objective_nats(model, x0, score_entropy=run.objective.score_entropy, draws=draws)
        value, apart = in_bits(totals, x0.shape[1]), in_bits(totals - nats[run.model.block_size], x0.shape[1])
    surrogate = not model.config.bounded_by_counts and run.objective.masking != "steps"
    name = "surrogate" if surrogate else "own_bound"
    setting = {"steps": 0, "nfe": 0, "n": len(x0)}
    if run.objective.masking == "steps":
        setting["mean_of"] = list(run.objective.steps)
    else:
        setting["draws"] = draws
    rows.append({"setting": setting, "metric": name, "value": value.value, "stderr": value.stderr})
    if surrogate:  # row by row: what both share is not noise
        setting = {"steps": run.model.block_size, "nfe": 0, "n": len(x0)}
        rows.append({"setting": setting, "metric": "surrogate_apart", "value": apart.value, "stderr": apart.stderr})
    return rows, nats


SUMMED = 4  # tokens of a block whose orders are summed over: each twice as many would take four times as long


def order_rows(model: VMD, x0: Tensor, counts: list[int]) -> list[dict]:
    """How far the bounds of several steps are above the likelihood itself, in which all orders are summed over.

    Of every fourth row: both are without chance, so that the difference is known well.
    """
    if model.config.latent.kind == "gaussian" or model.config.block_size > SUMMED:
        return []
    rows, some = [], x0[::4]
    for steps in counts:
        exact, bound = random_order_nll(model, some, steps, chunk=max(1, rows_per_score(model) // 8))
        slack = in_bits(bound - exact, x0.shape[1])
        setting = {"steps": steps, "nfe": steps * model.config.blocks, "order": "random", "rule": "sample", "n": len(some)}
        rows.append({"setting": setting, "metric": "order_slack", "value": slack.value, "stderr": slack.stderr})
    return rows


@torch.no_grad()
def objective_nats(model: VMD, x0: Tensor, *, score_entropy: bool = False, draws: int = 4) -> Tensor:
    """(n,): the paper's objective, by mask counts: with z a surrogate; without, the usual bound, or SEDD's own."""
    generator = torch.Generator(x0.device).manual_seed(0)
    totals = torch.zeros(len(x0), dtype=torch.float64, device=x0.device)
    for _ in range(draws):
        some_totals = []
        for some in x0.split(rows_per_score(model)):
            masks = draw_masks(some, model.config.block_size, generator=generator)
            shape = model.latent_shape(len(some))
            noise = None if shape is None else torch.randn(shape, generator=generator, device=x0.device)
            some_totals.append(model(some, masks, noise, score_entropy=score_entropy).total)
        totals += torch.cat(some_totals).double() / draws
    return totals


def reproduce_text(
    *,
    out: Path,
    command: str,
    table: str = "text",
    data: str = "",
    quick: bool = False,
    device: str = "cpu",
    overrides: list[str] | None = None,
    resume: bool = False,
    only: tuple[str, ...] = (),
    on_note: Callable[[str], None] = lambda text: None,
) -> dict:
    """Train the systems one after the other, each in OUT/SYSTEM, and measure them; write results.json and table.md.

    `resume` keeps the rows of systems that are done and goes on from the checkpoints of the one that was stopped. `only`
    names the systems to run now; the results hold all that are done. The table text-scan has no samples.
    """
    scan = table == "text-scan"
    budget = (SCAN_QUICK if scan else QUICK) if quick else (SCAN_FULL if scan else FULL)
    systems = {system.name: system for system in (SCAN if scan else SYSTEMS)}
    chosen = chosen_names(list(systems), only)
    if quick:
        twice = [name for name in only if systems[name].second_seed]
        require(not twice, f"--only {', '.join(twice)}: expected without --quick, which has one seed")
        chosen = [name for name in chosen if not systems[name].second_seed and (only or not systems[name].slow)]
    require(bool(data) or quick, "--data: expected a text, such as text8, or the path of a file; --quick brings its own")
    for setting in overrides or []:
        require(not setting.strip().startswith("data."), f"--set {setting}: expected none of data: --data gives characters")
    done = read_done(out, resume, table)
    source = data or str(quick_text())
    trained, tested = (read_text(source, budget, split) for split in ("train", budget.split))
    runs = {}
    for name in chosen:
        try:
            runs[name] = planned(systems[name], budget, source, overrides or [], trained, device)
            if systems[name].added_to:
                runs[name] = with_frozen_base(runs[name], systems[systems[name].added_to], chosen, done, out)
        except InvalidInput as error:
            raise InvalidInput(f"{name}: {error}") from None
    require_same_text(out, done, Path(source).name, trained.sha256, budget.length)
    require_same_base(systems, runs, done, out)
    missing = [name for name in chosen if not is_done(done, name, runs[name])]
    for name in missing:  # before hours of training
        goes_on(folder_of(out, systems[name]), runs[name], resume)
    if budget.draws:
        uncounted(systems, done, trained, tested, out)  # whether samples are whole is better known now
    needed = {systems[name].added_to for name in missing}  # of which others take the weights, not the rows
    needed |= {JUDGE.name} if missing or JUDGE.name in only else set()
    for name in needed.intersection(done, chosen):
        if not (folder_of(out, systems[name]) / WEIGHTS_FILE).is_file():
            del done[name]
    trains = any(not is_done(done, name, run) for name, run in runs.items())
    made = made_by(command, device) if trains else last_made(out, command, device)
    make_folder(out)
    left_out = [name for name in systems if quick and not only and systems[name].slow]
    if left_out:
        on_note(f"left out of --quick, as slow: {', '.join(left_out)} (--only NAME trains one)")
    if not data:
        on_note("text: Python's own documentation, in letters and spaces; --data gives another")
    spread = spread_over(np.arange(len(tested)), budget.rows)
    x0 = tested.rows_at(spread).long().to(device)
    reference = texts_at(tested, spread)
    scored = hashlib.sha256(x0.cpu().numpy().tobytes()).hexdigest()
    for name, part in done.items():
        same = part.get("scored_sha256") == scored
        require(same, f"{out} holds {name!r}, measured on other rows of the text: expected another --out")

    figures: dict[str, dict[str, float]] = {}  # of texts beside samples
    if budget.draws:
        on_note("reading the words of the training text")
        words = vocabulary(trained)
        beside = yardstick_texts(tested, spread, budget.draws)
        figures = yardsticks(beside, reference, words)
        keep_counted_bits(figures, out / RESULTS_FILE)

    def run_system(name: str) -> dict:
        system, run = systems[name], runs[name]
        model, about = train_system(system, run, read_text(source, budget, "train", run.training.seed), out, device, resume)
        sampled = budget.draws > 0 and not system.judge
        started = time.perf_counter()
        rows, nats = bits_rows(model, run, x0, budget)
        if sampled:
            rows += sample_rows(model, run, tested, reference, words, budget.draws, folder_of(out, system))
        if not scan:
            write_nats(folder_of(out, system) / NATS_FILE, nats, scored)
        about["measuring_seconds"] = time.perf_counter() - started
        if system.added_to:
            about["base"] = done[system.added_to]["configuration"]
        about["text_sha256"], about["scored_sha256"] = trained.sha256, scored
        return about | {"rows": [{"system": name} | row for row in rows]}

    def write() -> dict:
        results = collect(table, list(systems), done, made) | {"data": Path(source).name}
        comparable = not (scan or quick) and results["data"].startswith("text8")
        results["rows"] = [
            row | {"paper": printed(row, systems.get(row["system"])) if comparable else None} for row in results["rows"]
        ]
        return write_results(results | figures, out)

    results = run_systems(runs, done, made, run_system, write, on_note)
    if budget.draws and judge_all(systems, done, tested, out, device, on_note):
        results = write()
    if budget.draws and count_all(systems, done, trained, tested, beside, figures, out):
        results = write()
    files = {name: folder_of(out, system) / NATS_FILE for name, system in systems.items()}
    if not scan and pair_all(done, files, scored, budget.length):
        results = write()
    return results


def keep_counted_bits(figures: dict[str, dict[str, float]], path: Path) -> None:
    """As they were: n-grams are counted anew with new samples alone."""
    before = read_json(path) if path.is_file() else {}
    for name, figure in figures.items():
        old = before.get(name)
        if isinstance(old, dict) and isinstance(old.get("counted_bits"), float):
            figure["counted_bits"] = old["counted_bits"]


def printed(row: dict, system: System | None) -> float | None:
    """The paper's perplexity, in bits: of the bound at all steps, or of what it took for one."""
    whole = row["metric"] == "bits" and system is not None and row["setting"]["steps"] == system.block
    return math.log2(PAPER[row["system"]]) if whole and row["system"] in PAPER else None


def require_same_base(systems: dict[str, System], runs: dict[str, RunConfig], done: dict[str, dict], out: Path) -> None:
    """A system that began with another must not outlive its change."""
    for name, part in done.items():
        if name in systems and (base := systems[name].added_to):
            now = part.get("base") or done.get(base, {}).get("configuration", {})
            if base in runs:
                same = is_of(now, runs[base])
            else:
                same = base in done and with_new_fields(now) == with_new_fields(done[base]["configuration"])
            folder = folder_of(out, systems[name])
            told = (
                f"{name} began with another {base!r}: remove {folder} and its part of {out / RESULTS_FILE} to train it anew"
            )
            require(same, told)


def require_same_text(out: Path, done: dict[str, dict], source: str, sha256: str, length: int) -> None:
    """Systems of one table are trained on the same text and measured on the same rows."""
    for part in done.values():
        before = part["configuration"]
        text, characters = Path(before["data"]["name"]).name, before["model"]["length"]
        same = (text, characters) == (source, length)
        require(same, f"{out} holds a run of {text} in rows of {characters}: expected that, or another --out")
        same = part.get("text_sha256", sha256) == sha256
        require(same, f"{out} holds a run of another {text}, of other content: expected that, or another --out")


def train_system(system: System, run: RunConfig, data: TextData, out: Path, device: str, resume: bool) -> tuple[VMD, dict]:
    folder = folder_of(out, system)
    again = goes_on(folder, run, resume)
    model = VMD(run.model, seed=run.training.seed).to(device)
    make_folder(folder)
    with progress_bar(system.name, run.training.steps) as update:
        log = train(
            model,
            data,
            run,
            out=folder,
            resume=again,
            on_step=lambda step, record: update(step, "" if record is None else f"loss {record['total']:.4f}"),
        )
    about = {
        "training_seconds": log[-1]["seconds"] if log else 0.0,
        "latent_kl": log[-1].get("latent_kl") if log else None,
        "parameters": model.parameter_counts(),
        "characters": run.training.steps * run.training.batch_size * run.model.length,
        "block": run.model.block_size,
        "judge": system.judge,
    }
    return model.eval(), about
