"""The systems of `vmd reproduce text` and `text-scan`: what each is, and what all of them are trained and measured with."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vmd.config import InvalidInput, RunConfig, override_all, require
from vmd.data import TextData, load_data
from vmd.data.text import cache_folder
from vmd.files import make_folder, write_atomically
from vmd.model import WEIGHTS_FILE
from vmd.presets import preset
from vmd.step import check_attention, check_precision, fast_settings

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


BY_COUNTS = ("objective.together=0",)
ONE_STEP = (*BY_COUNTS, "objective.masking=steps", "objective.steps=1")

SYSTEMS = (
    System("judge: AR, larger", "text-mdm", 1, judge=True),
    System("BD3-LM, r = 4", "text-mdm", 4),
    System("codes, r = 4", "text", 4),
    System("codes for one step, r = 4", "text", 4, ONE_STEP),
    System("2048 codes, r = 4", "text", 4, ("model.latent.codes=2048",), slow=True),
    System("draft for one step, r = 4", "text-draft", 4, ONE_STEP),
    System("AR", "text-mdm", 1),
    System("MDLM", "text-mdm", 256),
    System("the paper's VMD, r = 4", "text-gaussian", 4, PAPER_Z),
    System("Gaussian, learned prior, r = 4", "text-gaussian", 4, LEARNED_Z),
    System("BD3-LM, r = 8", "text-mdm", 8),
    System("codes, r = 8", "text", 8),
    System("the paper's VMD, r = 8", "text-gaussian", 8, PAPER_Z),
    System("chain of codes, r = 16", "text", 16, ("model.latent.kind=chain", "model.latent.span=4")),
    System("SEDD", "text-mdm", 256, ("objective.score_entropy=true",)),
    System("BD3-LM, r = 4, larger", "text-mdm", 4, ("model.mlp_ratio=11",)),  # more parameters than with 2,048 codes
    System("draft for one step, r = 16", "text-draft", 16, ONE_STEP),
    System("BD3-LM, r = 4, second seed", "text-mdm", 4, second_seed=True),
    System("codes, r = 4, second seed", "text", 4, second_seed=True),
    System("2048 codes, r = 4, second seed", "text", 4, ("model.latent.codes=2048",), slow=True, second_seed=True),
)

JUDGE = SYSTEMS[0]

PAPER = {  # perplexities of its Table 5, on text8 as a whole
    "AR": 2.603,
    "SEDD": 3.529,
    "MDLM": 3.498,
    "BD3-LM, r = 4": 2.873,
    "BD3-LM, r = 8": 3.126,
    "the paper's VMD, r = 4": 2.858,
    "the paper's VMD, r = 8": 3.125,
}


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
    System("no latent, r = 2", "text-mdm", 2),
    *(coded(codes, 2) for codes in (64, 256)),
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
    variant(coded(256, 8), "a chain of two", "model.latent.kind=chain", "model.latent.span=4"),
    variant(coded(256, 16), "a chain of four", "model.latent.kind=chain", "model.latent.span=4"),
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
    *(variant(System(f"draft, r = {block}", "text-draft", block), "for one step", *ONE_STEP) for block in (8, 16, 64)),
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


def folder_of(out: Path, system: System) -> Path:
    return out / "".join(c if c.isalnum() else "-" for c in system.name)


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
