"""`vmd reproduce text`: systems trained on the same characters, their certified bits at every number of steps, and samples.
`vmd reproduce text-scan`: what decides how much codes gain, by short runs and validation text.

Every system is trained in a folder of its own and goes on from its checkpoints; its rows are kept when it is done.
"""

import functools
import hashlib
import json
import lzma
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vmd.config import InvalidInput, RunConfig, override_all, require, with_new_fields
from vmd.data import TextData, load_data
from vmd.data.text import cache_folder
from vmd.evaluation import rows_per_pass, rows_per_score
from vmd.files import make_folder, write_atomically
from vmd.likelihood import Bits, in_bits, nll_bound
from vmd.masking import draw_masks
from vmd.model import VMD, WEIGHTS_FILE
from vmd.paired import NATS_FILE, pair_all, write_nats
from vmd.presets import preset
from vmd.progress import progress_bar
from vmd.sampling import RULES
from vmd.systems import (
    RESULTS_FILE,
    chosen_names,
    collect,
    goes_on,
    is_done,
    is_of,
    read_done,
    run_systems,
    write_results,
)
from vmd.text_quality import Quality, judged_bits, random_letters, text_quality, words_of
from vmd.training import check_attention, check_precision, fast_settings, precision, train

# As in the paper: z of earlier blocks is seen through the clean stream, the encoder reads the doubled one.
PAPER_Z = ("model.latent.encoder_stream=doubled", "model.latent.on_clean=true", "objective.kl_weight=1")
LEARNED_Z = ("model.latent.prior=learned", "objective.kl_weight=1")


@dataclass(frozen=True)
class System:
    """One row: a preset with settings. `judge`: only asked for its opinion of the others' samples."""

    name: str
    preset: str
    block: int
    settings: tuple[str, ...] = ()
    judge: bool = False
    second_seed: bool = False
    times: int = 1  # as many training steps as the others
    slow: bool = False  # too slow for a quick table
    added_to: str = ""  # a system whose weights stay as they are: only what is new learns


SAMPLES_FILE = "samples.jsonl.xz"  # small enough to be kept with the results, so that another judge can read them
BY_COUNTS = ("objective.together=0",)
ONE_STEP = (*BY_COUNTS, "objective.masking=steps", "objective.steps=1")

SYSTEMS = (
    System("judge: AR, larger", "text-mdm", 1, judge=True),
    System("BD3-LM, r = 4", "text-mdm", 4),
    System("codes, r = 4", "text", 4),
    System("codes for one step, r = 4", "text", 4, ONE_STEP),
    System("2048 codes, r = 4", "text", 4, ("model.latent.codes=2048",), slow=True),
    System("draft, r = 4", "text-draft", 4),
    System("draft for one step, r = 4", "text-draft", 4, ONE_STEP),
    System("AR", "text-mdm", 1),
    System("draft, r = 1", "text-draft", 1, BY_COUNTS),  # AR: what the head gains by reading the last tokens alone
    System("MDLM", "text-mdm", 256),
    System("the paper's VMD, r = 4", "text-gaussian", 4, PAPER_Z),
    System("Gaussian, learned prior, r = 4", "text-gaussian", 4, LEARNED_Z),
    System("BD3-LM, r = 8", "text-mdm", 8),
    System("codes, r = 8", "text", 8),
    System("draft for one step, r = 8", "text-draft", 8, ONE_STEP),
    System("the paper's VMD, r = 8", "text-gaussian", 8, PAPER_Z),
    System("codes, r = 16", "text", 16),
    System("draft for one step, r = 16", "text-draft", 16, ONE_STEP),
    System("SEDD", "text-mdm", 256, ("objective.score_entropy=true",)),
    System("BD3-LM, r = 4, larger", "text-mdm", 4, ("model.mlp_ratio=6",)),  # 8.5 M: more parameters than with codes
    System("BD3-LM, r = 4, second seed", "text-mdm", 4, second_seed=True),
    System("codes, r = 4, second seed", "text", 4, second_seed=True),
    System("draft for one step, r = 4, second seed", "text-draft", 4, ONE_STEP, second_seed=True),
)

JUDGE = SYSTEMS[0]


def coded(codes: int, block: int, **more: Any) -> System:
    return System(f"{codes} codes, r = {block}", "text", block, (f"model.latent.codes={codes}",), slow=codes > 256, **more)


def variant(system: System, name: str, *settings: str, **more: Any) -> System:
    """The same with one thing changed."""
    name = f"{system.name}, {name}"
    return replace(system, name=name, settings=(*system.settings, *settings), **more)


BLIND, CODES_64 = System("no latent, r = 4", "text-mdm", 4), coded(64, 4)
GAUSSIAN_Z = System("the paper's VMD, r = 4", "text-gaussian", 4, PAPER_Z)
GAUSSIAN_PRIOR = System("Gaussian, learned prior, r = 4", "text-gaussian", 4, LEARNED_Z)
DRAFT = System("draft, r = 4", "text-draft", 4)
CODES_ADDED = replace(CODES_64, name="64 codes added, r = 4", added_to=BLIND.name)
HALF_WHOLE = (*BY_COUNTS, "objective.whole=0.5")
TRAINED_OTHERWISE = {"half whole": HALF_WHOLE, "for one step": ONE_STEP}

SCAN = (
    # How many codes, for how many tokens.
    BLIND,
    *(coded(codes, 4) for codes in (16, 64, 256, 1024, 4096)),
    System("no latent, r = 8", "text-mdm", 8),
    *(coded(codes, 8) for codes in (16, 64, 256, 1024)),
    System("no latent, r = 16", "text-mdm", 16),
    *(coded(codes, 16) for codes in (64, 256, 1024)),
    # Where they enter.
    variant(CODES_64, "additive head", "model.latent.head=additive"),
    variant(CODES_64, "head of rank 16", "model.latent.head_dim=16"),
    variant(CODES_64, "head of rank 512", "model.latent.head_dim=512", slow=True),
    variant(CODES_64, "places alike", "model.latent.by_place=false"),
    variant(coded(16, 4), "last layer too", "model.latent.code_layers=1", slow=True),
    # What is trained. Codes and draft heads: masked tokens scored twice, as their presets have it (0.9 and 0.5 of the weight
    # on those that are written together), or another share, or by mask counts as the paper does; or blocks masked whole
    # more often, or always.
    variant(CODES_64, "half together", "objective.together=0.5"),
    *(variant(coded(64, block), "by counts", *BY_COUNTS) for block in (4, 8, 16)),
    *(variant(system, name, *how) for system in (BLIND, CODES_64) for name, how in TRAINED_OTHERWISE.items()),
    variant(coded(64, 8), "for one step", *ONE_STEP),
    # What else may make tokens agree.
    *(
        variant(coded(64, block), name, "model.latent.kind=chain", *span)
        for block in (4, 8)
        for name, span in (("a chain", ()), ("a chain of two", (f"model.latent.span={block // 2}",)))
    ),
    GAUSSIAN_Z,
    variant(GAUSSIAN_Z, "KL weight r/128", "objective.kl_weight=0.03125"),  # as the paper may have counted it
    GAUSSIAN_PRIOR,
    variant(GAUSSIAN_PRIOR, "for one step", *ONE_STEP),
    variant(GAUSSIAN_PRIOR, "for one step, four draws", *ONE_STEP, "objective.samples=4", slow=True),
    DRAFT,
    variant(DRAFT, "0.9 together", "objective.together=0.9"),
    variant(DRAFT, "by counts", *BY_COUNTS),
    variant(DRAFT, "for one step", *ONE_STEP),
    variant(variant(DRAFT, "for one step", *ONE_STEP), "head of 1024", "model.draft=1024", slow=True),
    *(System(f"draft, r = {block}", "text-draft", block) for block in (8, 16)),
    System("no latent, r = 1", "text-mdm", 1),
    System("draft, r = 1", "text-draft", 1, BY_COUNTS),
    # What a trained model without a latent gains by a part that is added to it.
    CODES_ADDED,
    replace(DRAFT, name="draft added, r = 4", added_to=BLIND.name),
    # Longer training.
    *(variant(system, "four times as long", times=4, slow=True) for system in (BLIND, CODES_64, DRAFT)),
    # Learning rates, beside the presets' 8e-3.
    *(
        variant(system, f"rate {rate:g}", f"training.learning_rate={rate:g}", slow=True)
        for system in (BLIND, CODES_64, GAUSSIAN_Z, DRAFT)
        for rate in (4e-3, 1.6e-2)
    ),
    # How much of all this is luck.
    *(variant(system, "second seed", second_seed=True) for system in (BLIND, CODES_64)),
)


@dataclass(frozen=True)
class Budget:
    length: int
    settings: tuple[str, ...]
    judge: tuple[str, ...]  # larger than the others
    rows: int  # of the text, scored
    draws: int  # samples of each way
    iwae: int
    split: str = "test"
    steps_scored: int = 64  # of a bound with more: a row of one block has as many as it has characters


FULL = Budget(
    256,
    ("training.steps=6000",),
    ("model.width=512", "training.steps=3000"),  # 26 M parameters, within ten minutes too
    2_000,
    1_000,
    16,
)
QUICK = Budget(
    64,
    (
        "model.layers=2",
        "model.heads=4",
        "model.width=64",
        "model.latent.encoder_layers=1",
        "model.latent.dim=16",
        "model.latent.codes=32",
        "model.draft=64",
        "training.steps=300",
        "training.batch_size=32",
        "training.warmup_steps=20",
        "training.learning_rate=5e-3",
        "training.ema=0.98",
    ),
    ("model.layers=3", "model.width=96"),
    200,
    50,
    4,
    steps_scored=8,
)
SHORT = ("training.steps=600", "training.warmup_steps=100", "training.ema=0.99")
SCAN_FULL = Budget(256, SHORT, (), 1_000, 0, 8, "validation")
SCAN_QUICK = replace(QUICK, draws=0, split="validation")


def quick_text() -> Path:
    """Some English that is on every machine with Python: its own documentation, in letters and spaces. Kept in the cache."""
    from pydoc_data.topics import topics

    letters = "".join(c if "a" <= c <= "z" else " " for c in " ".join(topics.values()).lower())
    text, path = " ".join(letters.split()), cache_folder() / "quick.txt"
    if not path.is_file() or path.read_text() != text:
        make_folder(path.parent)
        write_atomically(path, text)
    return path


def read_text(source: str, budget: Budget, split: str, seed: int = 0) -> TextData:
    data = load_data(source, seed, length=budget.length, tokenizer="char", split=split)
    if not isinstance(data, TextData):
        raise InvalidInput(f"--data {source}: expected a text")
    return data


def planned(system: System, budget: Budget, name: str, overrides: list[str], data: TextData, device: str) -> RunConfig:
    """With all overrides applied and checked; those of what makes the system what it is are refused."""
    own = {"model.block_size", *(setting.partition("=")[0] for setting in system.settings)}
    for setting in overrides:
        field = setting.partition("=")[0].strip()
        require(field not in own, f"--set {setting}: expected no {field}, which is this system's own")
    block = min(system.block, budget.length)
    model = preset(system.preset).model
    has = {"model.latent": model.has_latent, "model.draft": model.draft > 0}
    size = [s for s in budget.settings if all(s.startswith(part) <= there for part, there in has.items())]
    size += budget.judge if system.judge else ()
    settings = [f"model.length={budget.length}", f"model.block_size={block}", *size, *system.settings]
    itself = override_all(preset(system.preset), settings).model
    run = override_all(preset(system.preset), [*settings, *overrides])
    same = (run.model.latent.kind, run.model.draft > 0) == (itself.latent.kind, itself.draft > 0)
    require(same, f"--set {' '.join(overrides)}: expected the latent and the draft head that this system has")
    training = replace(run.training, seed=run.training.seed + system.second_seed, steps=run.training.steps * system.times)
    run = replace(run, training=training)
    run = replace(run, model=run.model.resolved(data.length, data.vocab_size, data.symbols))
    chosen = {setting.partition("=")[0].strip() for setting in overrides}
    fast = {field: v for field, v in fast_settings(run, device).items() if f"training.{field}" not in chosen}
    run = replace(run, training=replace(run.training, **fast), data=replace(run.data, name=name))
    check_precision(run.training, device)
    check_attention(run.training, run.model)
    run.objective.check(run.model)
    return run


def with_frozen_base(run: RunConfig, system: System, chosen: list[str], done: dict[str, dict], out: Path) -> RunConfig:
    """With the weights of another system of the table, frozen."""
    folder = folder_of(out, system)
    there = system.name in chosen or (system.name in done and (folder / WEIGHTS_FILE).is_file())
    require(there, f"it begins with {system.name}: expected that to be done, or --only {system.name!r} too")
    return replace(run, training=replace(run.training, init=str(folder), freeze=True))


# Measuring


def step_counts(run: RunConfig) -> list[int]:
    """Steps per block: few, and all. A model of one block is compared at as many evaluations as blocks of four."""
    r, length = run.model.block_size, run.model.length
    few = (length // 4, length // 2) if r == length else (1, 2, 4, 8)
    trained = run.objective.steps if run.objective.masking == "steps" else ()
    return sorted({count for count in (*few, *trained, r) if 1 <= count <= r})


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


def sample_rows(
    model: VMD, run: RunConfig, data: TextData, reference: list[str], words: set[str], draws: int, folder: Path
) -> list[dict]:
    """Samples at temperature 1: real words, n-grams, variety, and how long they took. They are kept in the folder."""
    rows, kept = [], []
    config = model.config
    z = "once" if config.z_reaches_later_blocks else "fresh"
    for steps in step_counts(run):
        for rule in RULES:
            if rule == "argmax" and not config.has_latent:
                continue  # it writes one text for ever
            generator = torch.Generator(model.device).manual_seed(0)
            options: dict[str, Any] = {
                "steps": steps,
                "order": "random",
                "rule": rule,
                "z": z,
                "batch_size": rows_per_pass(model),
            }
            with precision("tf32" if model.device.type == "cuda" else "float32"):
                if model.device.type == "cuda":  # kernels are loaded by the first draw, which is not timed
                    model.sample(min(draws, rows_per_pass(model)), **options)
                started = time.perf_counter()
                drawn = model.sample(draws, generator=generator, **options)
                tokens = drawn.tokens.cpu()
                seconds = time.perf_counter() - started
            texts = [data.tokenizer.decode(row.numpy()) for row in tokens]
            setting = {"steps": steps, "nfe": drawn.nfe, "order": "random", "rule": rule, "n": draws}
            setting |= {"z": z if config.has_latent else "none", "temperature": 1}
            quality = text_quality(texts, reference, words)
            errors = {"real_words": quality.real_words_stderr}
            found = known(quality) | {"characters_per_second": tokens.numel() / seconds}
            rows += [{"setting": setting, "metric": m, "value": v, "stderr": errors.get(m)} for m, v in found.items()]
            kept += [json.dumps({"setting": setting, "text": text}) for text in texts]
    write_atomically(folder / SAMPLES_FILE, lzma.compress("".join(line + "\n" for line in kept).encode()))
    return rows


def judged_rows(judge: VMD, data: TextData, folder: Path) -> list[dict]:
    """What the judge thinks of the samples that are kept in a folder."""
    path = folder / SAMPLES_FILE
    drawn: dict[str, list[Tensor]] = {}
    try:
        for line in lzma.decompress(path.read_bytes()).decode().splitlines():
            sample = json.loads(line)
            tokens = torch.from_numpy(data.tokenizer.encode(sample["text"])).long()
            require(len(tokens) == data.length, "a sample of another length")
            drawn.setdefault(json.dumps(sample["setting"]), []).append(tokens)
    except (lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError, InvalidInput):
        raise InvalidInput(f"{path}: expected samples as `vmd reproduce text` keeps them") from None
    rows = []
    for setting, some in drawn.items():
        bits, error = judged_bits(judge, torch.stack(some))
        rows.append({"setting": json.loads(setting), "metric": "judged_bits", "value": bits, "stderr": error})
    return rows


def spread_over(rows: np.ndarray, count: int) -> np.ndarray:
    """So many of them, from all over the text: neighbours are of one article."""
    return rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64)]


def yardsticks(data: TextData, scored: np.ndarray, words: set[str], count: int) -> dict[str, dict]:
    """The figures of as many texts as samples: rows of the text that are not in the reference, and letters drawn one by one.

    Figures of n-grams depend on how many there are, and no text is as near to the reference as the reference.
    """

    def texts(rows: np.ndarray) -> list[str]:
        return [data.tokenizer.decode(row.numpy()) for row in data.rows_at(rows)] if len(rows) else []

    reference = texts(scored)
    others = spread_over(np.setdiff1d(np.arange(len(data)), scored), count)
    made = {"test_text": texts(others), "random_letters": random_letters(reference, count)}
    return {name: known(text_quality(some, reference, words)) if some else {} for name, some in made.items()}


def known(quality: Quality) -> dict[str, float]:
    """Without the share of real words where there are no words, and without its error."""
    values = quality._replace(real_words_stderr=None)._asdict()
    return {name: value for name, value in values.items() if value is not None and not math.isnan(value)}


# The whole


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
    needed = {systems[name].added_to for name in missing}  # of which others take the weights, not the rows
    needed |= {JUDGE.name} if missing or JUDGE.name in only else set()
    for name in needed.intersection(done, chosen):
        if not (folder_of(out, systems[name]) / WEIGHTS_FILE).is_file():
            del done[name]
    make_folder(out)
    if not data:
        on_note("text: Python's own documentation, in letters and spaces; --data gives another")
    spread = spread_over(np.arange(len(tested)), budget.rows)
    x0 = tested.rows_at(spread).long().to(device)
    reference = [tested.tokenizer.decode(row.numpy()) for row in x0.cpu()]
    scored = hashlib.sha256(x0.cpu().numpy().tobytes()).hexdigest()
    for name, part in done.items():
        same = part.get("scored_sha256") == scored
        require(same, f"{out} holds {name!r}, measured on other rows of the text: expected another --out")

    @functools.cache
    def words() -> set[str]:
        on_note("reading the words of the training text")
        return vocabulary(trained)

    @functools.cache
    def known_figures() -> dict[str, dict]:
        return yardsticks(tested, spread, words(), budget.draws)

    def run_system(name: str) -> dict:
        system, run = systems[name], runs[name]
        model, about = train_system(system, run, read_text(source, budget, "train", run.training.seed), out, device, resume)
        sampled = budget.draws > 0 and not system.judge
        known_words = words() if sampled else set()
        started = time.perf_counter()
        rows, nats = bits_rows(model, run, x0, budget)
        if sampled:
            rows += sample_rows(model, run, tested, reference, known_words, budget.draws, folder_of(out, system))
        if not scan:
            write_nats(folder_of(out, system) / NATS_FILE, nats, scored)
        about["measuring_seconds"] = time.perf_counter() - started
        if system.added_to:
            about["base"] = done[system.added_to]["configuration"]
        about["text_sha256"], about["scored_sha256"] = trained.sha256, scored
        return about | {"rows": [{"system": name} | row for row in rows]}

    def write() -> dict:
        results = collect(table, list(systems), done, command, device) | {"data": Path(source).name}
        if budget.draws:
            results |= known_figures()
        return write_results(results, out)

    results = run_systems(runs, done, command, device, run_system, write)
    if budget.draws and judge_all(systems, done, tested, out, device, on_note):
        results = write()
    files = {name: folder_of(out, system) / NATS_FILE for name, system in systems.items()}
    if not scan and pair_all(done, files, scored, budget.length):
        results = write()
    return results


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


def judge_all(
    systems: dict[str, System], done: dict[str, dict], data: TextData, out: Path, device: str, on_note: Callable[[str], None]
) -> bool:
    """Of all systems whose samples are here, whether the judge was trained before or after them. True: there is news."""
    judge, news = find_judge(out, device), False
    if judge is None:
        on_note(f"no judge is trained here, so that samples are not judged: --only '{JUDGE.name}' trains it")
        return news
    who = hashlib.sha256((folder_of(out, JUDGE) / WEIGHTS_FILE).read_bytes()).hexdigest()
    for name, part in done.items():
        if name not in systems or systems[name].judge:
            continue
        folder = folder_of(out, systems[name])
        kept = (folder / SAMPLES_FILE).is_file()
        which = [who, hashlib.sha256((folder / SAMPLES_FILE).read_bytes()).hexdigest() if kept else ""]
        before = part.get("judged", ["", ""])
        if before == which or (not kept and before[0] == who):  # these samples, by this judge
            continue
        if not kept:
            on_note(f"{name}: no {SAMPLES_FILE} is kept, so that its samples are not judged")
        judged = [{"system": name} | row for row in judged_rows(judge, data, folder)] if kept else []
        part["rows"] = [row for row in part["rows"] if row["metric"] != "judged_bits"] + judged
        part["judged"] = which
        news = True
    return news


def require_same_text(out: Path, done: dict[str, dict], source: str, sha256: str, length: int) -> None:
    """Systems of one table are trained on the same text and measured on the same rows."""
    for part in done.values():
        before = part["configuration"]
        text, characters = Path(before["data"]["name"]).name, before["model"]["length"]
        same = (text, characters) == (source, length)
        require(same, f"{out} holds a run of {text} in rows of {characters}: expected that, or another --out")
        same = part.get("text_sha256", sha256) == sha256
        require(same, f"{out} holds a run of another {text}, of other content: expected that, or another --out")


def vocabulary(data: TextData, at_once: int = 4_096) -> set[str]:
    """The words of the whole training text."""
    words: set[str] = set()
    for start in range(0, len(data), at_once):
        rows = data.in_order(start, min(at_once, len(data) - start))
        words |= set(words_of(data.tokenizer.decode(row.numpy()) for row in rows))
    return words


def folder_of(out: Path, system: System) -> Path:
    return out / "".join(c if c.isalnum() else "-" for c in system.name)


def find_judge(out: Path, device: str) -> VMD | None:
    folder = folder_of(out, JUDGE)
    return VMD.from_pretrained(folder, device).eval() if (folder / "model.safetensors").is_file() else None


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
