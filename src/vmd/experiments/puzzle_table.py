"""`vmd reproduce sudoku`: systems trained on puzzles, and what they solve, by the rules of the board.

Every system is trained in a folder of its own and goes on from its checkpoints; its rows are kept when it is done.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vmd.attention import attention_by
from vmd.config import RunConfig, override_all, require
from vmd.data import sudoku_engine as engine
from vmd.data.sudoku import (
    SOLUTIONS,
    Puzzles,
    SudokuData,
    draw_puzzles,
    keeps_clues,
    layout_of,
    load_puzzles,
    make_puzzles,
    valid,
)
from vmd.evaluation import rows_per_pass
from vmd.experiments.systems import (
    chosen_names,
    collect,
    goes_on,
    is_done,
    last_made,
    made_by,
    read_done,
    run_systems,
    write_results,
)
from vmd.files import make_folder, read_json, write_atomically
from vmd.metrics import share_error
from vmd.model import VMD
from vmd.presets import preset
from vmd.progress import progress_bar
from vmd.sampling import ORDERS
from vmd.solving import Frame, solve_puzzles
from vmd.step import check_precision, fast_settings, precision, uncompiled
from vmd.training import train

NO_Z, GAUSSIAN, LEARNED, CODES = "no z", "Gaussian", "Gaussian, learned prior", "codes"
LATENTS = {
    NO_Z: ("sudoku-mdm", ()),
    GAUSSIAN: ("sudoku-gaussian", ()),
    LEARNED: ("sudoku-gaussian", ("model.latent.prior=learned", "objective.kl_weight=1")),
    CODES: ("sudoku", ()),
}


@dataclass(frozen=True)
class System:
    """One row: a preset with settings, trained on one kind of puzzles."""

    name: str
    trained_on: str
    preset: str
    settings: tuple[str, ...] = ()


SYSTEMS = (
    *(System(f"ours, {name}", "logic", *LATENTS[name]) for name in (NO_Z, CODES, GAUSSIAN)),
    System("the paper's VMD", "logic", "sudoku-paper"),
    System("its control, no z", "logic", "sudoku-mdm-paper"),
    System("its control, z is noise", "logic", "sudoku-noise-paper"),
    System("GPT-2 of Ye et al.", "logic", "sudoku-gpt2"),
    System("ours, no z, any puzzles", "any", "sudoku-mdm"),
    *(System(f"several solutions, {name}", "multi", *LATENTS[name]) for name in LATENTS),
    *(System(f"whole grids, {name}", "grid", *LATENTS[name]) for name in LATENTS),
)

# What the paper prints: percent solved, by system, order and steps.
PAPER = {
    ("GPT-2 of Ye et al.", "prob"): {5: 10.6, 10: 14.7, 20: 20.4},
    ("GPT-2 of Ye et al.", "margin"): {5: 36.2, 10: 78.4, 20: 91.1},
    ("the paper's VMD", "prob"): {5: 67.7, 10: 76.4, 20: 80.9},
    ("the paper's VMD", "margin"): {5: 96.9, 10: 99.0, 20: 99.7},
}


@dataclass(frozen=True)
class Budget:
    steps: dict[str, int]  # of training, by what is trained on; of the paper's 164 tokens apart
    settings: tuple[str, ...]
    sizes: dict[str, tuple[int, int]]  # puzzles to train on and to test on, by kind
    fewer: int  # puzzles for ways to decode that are not the paper's
    steps_per_block: tuple[int, ...]
    looks: int  # points of a training curve
    looked_at: int  # puzzles of each
    draws: int  # grids drawn of each puzzle with several solutions
    grids: int  # drawn without any clue
    tries: int


FULL = Budget(
    steps={"logic": 12_000, "pair": 10_000, "any": 24_000, "multi": 8_000, "grid": 5_000},
    settings=(),
    sizes={
        "logic": (1_800_000, 10_000),
        "any": (1_800_000, 10_000),
        "hard": (100, 5_000),
        "multi": (500_000, 1_000),
        "grid": (500_000, 100),
    },
    fewer=2_000,
    steps_per_block=(1, 2, 5, 10, 20, 40),
    looks=20,
    looked_at=1_000,
    draws=32,
    grids=2_000,
    tries=8,
)
SMALL = ("model.layers=2", "model.heads=4", "model.width=64", "model.latent.encoder_layers=2", "model.latent.dim=32")
QUICK = Budget(  # 4x4 boards
    steps={"logic": 300, "pair": 300, "any": 300, "multi": 300, "grid": 300},
    settings=(*SMALL, "training.batch_size=128", "training.warmup_steps=20", "training.learning_rate=1e-2"),
    sizes={"logic": (2_000, 300), "any": (2_000, 300), "multi": (2_000, 100), "grid": (2_000, 10)},
    fewer=300,
    steps_per_block=(1, 2, 5, 10),
    looks=5,
    looked_at=100,
    draws=32,
    grids=500,
    tries=8,
)


SOLVED = ("logic", "any", "hard")  # what systems that solve puzzles are tested on, whatever they were trained on


def puzzle_sets(folder: Path, budget: Budget, trained: set[str], quick: bool, note: Callable[[str], None]) -> dict:
    """{kind: (to train on, to test on)}: read from the folder, or made there. Small boards are made in memory.

    `trained`: the kinds that systems are trained on. Of others there may be fewer puzzles to train on.
    """
    sets = {}
    tested = trained if trained <= {"multi", "grid"} else trained.union(SOLVED)
    for kind, (train_size, test_size) in budget.sizes.items():
        if kind not in tested:
            continue
        if quick:
            sets[kind] = split_small(draw_puzzles(train_size + 2 * test_size, kind, seed=0, box=2), test_size)
            continue
        here = folder / kind
        if kind not in trained:
            train_size = min(train_size, 100)
        held = [side for side in ("train", "test") if (here / f"{side}.sudoku").is_file()]
        if not held:
            note(f"making {train_size + test_size:,} puzzles of kind {kind}")
            with progress_bar(f"puzzles, {kind}", train_size + test_size) as update:
                make_puzzles(train_size, test_size, kind, 0, here, on_progress=update)
        else:
            require(len(held) == 2, f"{here}: found {held[0]}.sudoku alone: expected both, or none to make them")
        sets[kind] = parts = (load_puzzles(here / "train.sudoku"), load_puzzles(here / "test.sudoku"))
        for part, wanted, side in zip(parts, (train_size, test_size), ("train", "test"), strict=True):
            enough = len(part) >= wanted
            require(
                enough, f"{here / side}.sudoku: {len(part):,} puzzles: expected {wanted:,} or more: remove both to make them"
            )
    return sets


def fingerprints(sets: dict, budget: Budget, trained: set[str]) -> dict[str, str]:
    """{what: sha256} of the puzzles that are tested on, and of those that are trained on."""
    parts = {f"{kind}, test": (tested, budget.sizes[kind][1]) for kind, (_, tested) in sets.items()}
    parts |= {f"{kind}, train": (sets[kind][0], len(sets[kind][0])) for kind in trained}
    return {
        what: hashlib.sha256(puzzles.puzzle[:n].tobytes() + puzzles.solution[:n].tobytes()).hexdigest()
        for what, (puzzles, n) in parts.items()
    }


def split_small(puzzles: Puzzles, test: int) -> tuple[Puzzles, Puzzles]:
    """Small boards have few grids; at least no puzzle that is tested was trained on."""
    keys = puzzles.puzzle if puzzles.kind != "grid" else puzzles.solution
    _, first = np.unique(keys, axis=0, return_index=True)
    first = np.sort(first)
    tested = np.zeros(len(keys), dtype=bool)
    tested[first[:test]] = True
    seen = {row.tobytes() for row in keys[tested]}
    trained = np.array([row.tobytes() not in seen for row in keys])
    parts = (replace(puzzles, puzzle=puzzles.puzzle[at], solution=puzzles.solution[at]) for at in (trained, tested))
    return tuple(parts)  # type: ignore[return-value]


def planned(system: System, budget: Budget, quick: bool, overrides: list[str], device: str) -> RunConfig:
    run = preset(system.preset)
    steps = budget.steps["pair" if run.data.layout == "pair" else system.trained_on]
    run = override_all(run, [f"training.steps={steps}"])
    small = [s for s in budget.settings if run.model.has_latent or not s.startswith("model.latent")]
    if not run.model.latent.encoder_layers:
        small = [s for s in small if not s.startswith("model.latent.encoder_layers")]
    small += ["training.ema=0.98"] if quick and run.training.ema else []
    run = override_all(run, [*small, *system.settings, *overrides])
    cells = 16 if quick else 81
    layout = SudokuData(draw_puzzles(1, "any", 0, 2 if quick else 3), pair=run.data.layout == "pair").layout
    if run.data.layout == "pair":
        run = override_all(run, [f"model.prompt={cells + 1}"])
    run = replace(run, model=run.model.resolved(layout.length, len(layout.symbols), layout.symbols))
    chosen = {setting.partition("=")[0] for setting in overrides}
    fast = {name: v for name, v in fast_settings(run, device).items() if f"training.{name}" not in chosen}
    run = replace(run, training=replace(run.training, **fast), data=replace(run.data, name=system.trained_on))
    check_precision(run.training, device)
    return run


# Measuring


def accuracy_rows(model: VMD, puzzles: Puzzles, data: str, cases: list[dict], n: int, *, name: str = "solved") -> list[dict]:
    """The share of puzzles that are solved, for each way of decoding, with its binomial standard error."""
    layout = layout_of(model.config.length)
    assert layout is not None, "a model of puzzles"
    puzzle = torch.from_numpy(puzzles.puzzle[:n].astype("int64"))
    rows = []
    for case in cases:
        generator = torch.Generator(model.device).manual_seed(0)
        with precision("tf32" if model.device.type == "cuda" else "float32"):
            drawn = model.sample(
                prompt=layout.prompt(puzzle), rule="argmax", generator=generator, batch_size=rows_per_pass(model), **case
            )
        grids = layout.grids(drawn.tokens.cpu())
        share = float((valid(grids) & keeps_clues(grids, puzzle)).double().mean())
        setting = {"data": data, "rule": "argmax", "nfe": drawn.nfe, "n": len(puzzle), "z": "once"} | case
        error = 100 * share_error(share, len(puzzle))
        rows.append({"setting": setting, "metric": name, "value": 100 * share, "stderr": error})
    return rows


def try_rows(model: VMD, puzzles: Puzzles, data: str, n: int, steps: int, tries: int, revise: bool) -> list[dict]:
    """Best of S tries by the rules alone: accuracy against the mean number of evaluations."""
    puzzle = torch.from_numpy(puzzles.puzzle[:n].astype("int64"))
    rows = []
    for early in (False, True):
        with precision("tf32" if model.device.type == "cuda" else "float32"):
            found = solve_puzzles(
                model, puzzle, steps=steps, tries=tries, early=early, revise=revise, batch_size=rows_per_pass(model)
            )
        took, right = found.tries.cpu(), found.right.cpu()
        for count in range(1, tries + 1):
            share = float((right & (took <= count)).double().mean())
            spent = (
                float(found.evaluations.double().mean()) if early else steps * float(took.clamp(max=count).double().mean())
            )
            if early and count < tries:
                continue  # its evaluations are those of all tries
            setting = {"data": data, "order": "margin", "rule": "argmax", "steps": steps, "tries": count, "early": early}
            setting |= {"revise": revise, "n": len(puzzle), "evaluations": spent, "z": "likeliest, then once"}
            setting |= {} if model.config.has_latent else {"z": "once"}
            error = 100 * share_error(share, len(puzzle))
            rows.append({"setting": setting, "metric": "solved", "value": 100 * share, "stderr": error})
    return rows


def all_solutions(puzzles: Puzzles) -> list[np.ndarray]:
    return [engine.solve(puzzle, limit=SOLUTIONS[1] + 1) for puzzle in puzzles.puzzle]


def several_rows(model: VMD, puzzles: Puzzles, n: int, draws: int, counts: tuple[int, ...]) -> list[dict]:
    """Puzzles with several solutions: the share of valid grids in one draw, and how evenly true solutions are hit."""
    puzzles = replace(puzzles, puzzle=puzzles.puzzle[:n], solution=puzzles.solution[:n])
    solutions = all_solutions(puzzles)
    puzzle = torch.from_numpy(puzzles.puzzle.astype("int64")).repeat_interleave(draws, 0)
    rng = np.random.default_rng(0)
    rows = []
    for steps, z in ways_to_draw(model, counts):
        generator = torch.Generator(model.device).manual_seed(0)
        with precision("tf32" if model.device.type == "cuda" else "float32"):
            drawn = model.sample(
                prompt=puzzle - 1,
                z=z,
                steps=steps,
                rule="sample",
                order="prob",
                generator=generator,
                batch_size=rows_per_pass(model),
            )
        grids = drawn.tokens.cpu() + 1
        good = valid(grids).view(-1, draws).numpy()
        kls, ideal = [], []
        for true, hit, drawn_grids in zip(solutions, good, grids.view(len(solutions), draws, -1).numpy(), strict=True):
            if hit.sum() == 0:
                continue
            place = {grid.tobytes(): i for i, grid in enumerate(true.astype(np.int64))}
            hits = np.bincount([place[g.tobytes()] for g in drawn_grids[hit]], minlength=len(true))
            kls.append(kl_to_uniform(hits))
            ideal.append(kl_to_uniform(rng.multinomial(hits.sum(), np.full(len(true), 1 / len(true)))))
        setting = {"data": "multi", "order": "prob", "rule": "sample", "steps": steps, "nfe": drawn.nfe, "z": z}
        setting |= {"n": len(solutions), "draws": draws}
        each = good.mean(1)
        rows.append(row(setting, "valid", 100 * each.mean(), 100 * each.std() / math.sqrt(len(each))))
        if kls:
            rows.append(row(setting | {"n": len(kls)}, "kl_to_uniform", np.mean(kls), np.std(kls) / math.sqrt(len(kls))))
            rows.append(row(setting | {"n": len(kls)}, "kl_to_uniform_ideal", np.mean(ideal), None))
    return rows


def ways_to_draw(model: VMD, counts: tuple[int, ...]) -> list[tuple[int, str]]:
    """Numbers of steps, and how z is drawn: it makes no difference in one step, or without z."""
    latent = model.config.has_latent
    return [(steps, z) for steps in counts for z in (("once", "fresh") if latent and steps > 1 else ("once",))]


def kl_to_uniform(hits: np.ndarray) -> float:
    """KL(share of hits || uniform) in nats: 0 if every solution is hit equally often."""
    share = hits[hits > 0] / hits.sum()
    return float((share * np.log(share)).sum() + math.log(len(hits)))


def grid_rows(model: VMD, n: int, counts: tuple[int, ...]) -> list[dict]:
    """Whole grids from nothing: the share that obeys the rules."""
    rows = []
    for steps, z in ways_to_draw(model, counts):
        generator = torch.Generator(model.device).manual_seed(0)
        with precision("tf32" if model.device.type == "cuda" else "float32"):
            drawn = model.sample(
                n, z=z, steps=steps, rule="sample", order="prob", generator=generator, batch_size=rows_per_pass(model)
            )
        share = float(valid(drawn.tokens.cpu() + 1).double().mean())
        setting = {"data": "grid", "order": "prob", "rule": "sample", "steps": steps, "nfe": drawn.nfe, "n": n, "z": z}
        rows.append(row(setting, "valid", 100 * share, 100 * share_error(share, n)))
    return rows


def row(setting: dict, metric: str, value: Any, stderr: Any) -> dict:
    return {"setting": setting, "metric": metric, "value": float(value), "stderr": None if stderr is None else float(stderr)}


def measure(system: System, model: VMD, sets: dict, budget: Budget) -> list[dict]:
    counts = tuple(c for c in budget.steps_per_block if c <= model.config.block_size)
    most = max(c for c in counts if c <= 20)
    if system.trained_on == "multi":
        tested = sets["multi"][1]
        n = min(len(tested), budget.sizes["multi"][1])
        return several_rows(model, tested, n, budget.draws, tuple(c for c in (1, 5, 20) if c <= max(counts)))
    if system.trained_on == "grid":
        cells = model.config.length
        return grid_rows(model, budget.grids, (*(c for c in (1, 5, 20, 40) if c < cells), cells))
    in_place = system.preset in ("sudoku", "sudoku-mdm", "sudoku-gaussian")
    rows = []
    for kind in SOLVED:
        if kind not in sets:
            continue
        tested = sets[kind][1]
        n = min(len(tested), budget.sizes[kind][1])
        cases = [{"order": o, "steps": c} for o in ORDERS for c in counts]
        wide = in_place or kind == "logic"  # 164 tokens take long
        shown = (5, 10, 20) if wide else (most,)
        main = [case for case in cases if case["order"] in ("prob", "margin") and case["steps"] in shown]
        main += [{"order": o, "steps": most, "revise": True} for o in ("prob", "margin") if wide]
        other = [case for case in cases if case not in main] if kind == "logic" else []
        other += [
            {"order": o, "steps": counts[-1], "revise": True} for o in ("prob", "margin") if wide and counts[-1] > most
        ]
        if model.config.has_latent:
            other += [{"order": o, "steps": most, "z": z} for o in ("prob", "margin") for z in ("fresh", "likeliest")]
        if system.preset == "sudoku-gpt2" and kind == "logic":
            many = min(50, model.config.block_size)
            noisy = {"steps": many, "order_noise": 0.5, "revise": True}  # Ye et al. 2025, Kim et al. 2025
            main += [{"order": o, **noisy} for o in ("prob", "margin")]
        rows += accuracy_rows(model, tested, kind, main, n)
        rows += accuracy_rows(model, tested, kind, other, min(n, budget.fewer))
        if in_place:
            rows += [r for revise in (False, True) for r in try_rows(model, tested, kind, n, most, budget.tries, revise)]
    return rows


# The whole


def reproduce_sudoku(
    *,
    out: Path,
    command: str,
    data: Path = Path("data/sudoku"),
    quick: bool = False,
    device: str = "cpu",
    overrides: list[str] | None = None,
    resume: bool = False,
    only: tuple[str, ...] = (),
    on_note: Callable[[str], None] = lambda text: None,
) -> dict:
    """Train the systems one after the other, each in OUT/SYSTEM, and measure them; write results.json and table.md.

    `resume` keeps the rows of systems that are done and goes on from the checkpoints of the one that was stopped. `only`
    names the systems to run now; the results hold all that are done.
    """
    budget = QUICK if quick else FULL
    systems = {system.name: system for system in SYSTEMS}
    chosen = [systems[name] for name in chosen_names(list(systems), only)]
    if quick:  # small boards are all solved by logic
        chosen = [system for system in chosen if system.trained_on != "any"]
        require(bool(chosen), f"--only {', '.join(only)}: expected without --quick: logic solves all small boards")
    runs = {system.name: planned(system, budget, quick, overrides or [], device) for system in chosen}
    done = read_done(out, resume, "sudoku")
    for name, part in done.items():
        small = part["configuration"]["model"]["length"] not in (81, 164)
        told = f"{out} holds {name!r} of a {'--quick' if small else 'full'} run: expected another --out"
        require(small == quick, told)
    missing = [name for name, run in runs.items() if not is_done(done, name, run)]
    for name in missing:  # before hours of training
        goes_on(folder_of(out, systems[name]), runs[name], resume)
    made = made_by(command, device) if missing else last_made(out, command, device)
    make_folder(out)
    trained = {systems[name].trained_on for name in missing}
    sets = puzzle_sets(data, budget, trained, quick, on_note) if trained else {}
    puzzles = fingerprints(sets, budget, trained)
    for name, part in done.items():  # rows of one table are of the same puzzles
        require_same_puzzles(f"{out} holds {name!r}", part.get("puzzles", {}), puzzles)

    def run_one(name: str) -> dict:
        return run_system(systems[name], runs[name], sets, puzzles, budget, out, device, resume)

    def write() -> dict:
        results = collect("sudoku", list(systems), done, made)
        lengths = {name: run["model"]["length"] for name, run in results["configurations"].items()}
        results["rows"] = [  # small boards are not the paper's
            row | (printed(row) if lengths[row["system"]] in (81, 164) else {"paper": None}) for row in results["rows"]
        ]
        return write_results(results, out)

    return run_systems(runs, done, made, run_one, write, on_note)


def folder_of(out: Path, system: System) -> Path:
    return out / system.name.replace(" ", "-").replace(",", "").replace("'", "").replace(".", "")


def require_same_puzzles(holds: str, before: dict[str, str], now: dict[str, str]) -> None:
    others = ", ".join(what for what, digest in before.items() if now.get(what, digest) != digest)
    require(not others, f"{holds} of other puzzles than these ({others}): expected the same, or another --out")


def run_system(
    system: System,
    run: RunConfig,
    sets: dict,
    puzzles: dict[str, str],
    budget: Budget,
    out: Path,
    device: str,
    resume: bool,
) -> dict:
    trained, tested = sets[system.trained_on]
    kinds = {system.trained_on} if system.trained_on in ("multi", "grid") else {system.trained_on, *SOLVED}
    used = {f"{system.trained_on}, train", *(f"{kind}, test" for kind in kinds)}
    puzzles = {what: digest for what, digest in puzzles.items() if what in used}
    pair = run.data.layout == "pair"
    data = SudokuData(trained, run.training.seed, run.data.augment, pair=pair)
    folder = folder_of(out, system)
    model = VMD(run.model, seed=run.training.seed).to(device)
    curve: list[dict] = []
    looks = folder / "curve.jsonl"

    def look(step: int) -> None:
        if system.trained_on in ("multi", "grid"):
            return
        case = {"order": "prob", "steps": min(20, max(budget.steps_per_block), model.config.block_size)}
        found = accuracy_rows(model, tested, system.trained_on, [case], budget.looked_at)[0]
        curve.append({"step": step, "solved": found["value"], "stderr": found["stderr"]})
        write_atomically(looks, "".join(json.dumps(point) + "\n" for point in curve))

    again, seen = goes_on(folder, run, resume), folder / "puzzles.json"
    if again and looks.exists():
        curve += [json.loads(line) for line in looks.read_text().splitlines()]
    if again and seen.exists():
        require_same_puzzles(f"{folder} was begun with puzzles", read_json(seen), puzzles)
    make_folder(folder)
    write_atomically(seen, json.dumps(puzzles))
    with progress_bar(system.name, run.training.steps) as update:
        log = train(
            model,
            data,
            run,
            out=folder,
            resume=again,
            on_step=lambda step, record: update(step, "" if record is None else f"loss {record['total']:.4f}"),
            on_look=look,
            look_every=max(1, run.training.steps // budget.looks),
        )
    started = time.perf_counter()
    with attention_by(model, uncompiled(run.training.attention)):
        rows = measure(system, model, sets, budget)
    latest = {point["step"]: point for point in curve}  # of points made twice by a resumed run, the last
    return {
        "rows": [{"system": system.name} | r for r in rows],
        "curve": [latest[step] for step in sorted(latest)],
        "training_seconds": log[-1]["seconds"] if log else 0.0,
        "measuring_seconds": time.perf_counter() - started,
        "parameters": model.parameter_counts(),
        "rows_seen": run.training.steps * run.training.batch_size,
        "trained_on": system.trained_on,
        "puzzles": puzzles,
        "filling": filling(model, tested) if system.name == SYSTEMS[0].name else None,
    }


def filling(model: VMD, puzzles: Puzzles, steps: int = 10) -> dict:
    """One puzzle as it fills in, for the picture."""
    puzzle = torch.from_numpy(puzzles.puzzle[:1].astype("int64"))
    frames: list[dict] = []

    def keep(attempt: int, frame: Frame) -> None:
        parts = {name: getattr(frame, name)[0].tolist() for name in ("canvas", "guess", "masked")}
        frames.append(parts | {"score": torch.nan_to_num(frame.score[0], neginf=0.0).tolist()})

    solve_puzzles(model, puzzle, steps=min(steps, model.config.length), order="prob", early=False, on_step=keep)
    return {"puzzle": puzzle[0].tolist(), "frames": frames}


def printed(r: dict) -> dict:
    """The paper's figure for a row of its table."""
    s = r["setting"]
    plain = s["data"] == "logic" and not s.get("revise") and not s.get("order_noise") and "tries" not in s
    return {"paper": PAPER.get((r["system"], s.get("order")), {}).get(s["steps"]) if plain else None}
