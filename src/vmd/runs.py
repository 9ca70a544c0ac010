"""A training run as the command line starts it: what it begins with, the files of its folder, what is said on the way.

Nothing here imports torch until a run needs it.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vmd.config import InvalidInput, LatentConfig, RunConfig, from_dict, require, to_dict
from vmd.files import TOKENIZER_FILE
from vmd.terminal import (
    CPU_SPEED,
    TEXT8_NOTE,
    days_on_a_cpu,
    describe,
    parts_that_fit,
    saved,
    say,
    short,
    unit_of,
    work_of_codes,
)


def run_as_it_began(path: Path) -> RunConfig:
    from vmd.files import read_json

    kept = read_json(path)
    if isinstance(kept, dict):
        for digest in ("text_sha256", "data_sha256"):
            kept.pop(digest, None)
    return from_dict(RunConfig, kept, str(path))


def sized_as_it_began(run: RunConfig, folder: Path, resume: bool, chosen: set[str]) -> RunConfig:
    """A run that starts from a trained model has its sizes, where the user gave none; one that goes on has its own."""
    from dataclasses import replace

    from vmd.model import SAME_NETWORK, VMD, model_folder

    init = run.training.init or (str(saved(folder, "training").get("init") or "") if resume else "")
    if not init:
        return run
    if resume:
        sizes = saved(folder, "model")
    else:
        itself = model_folder(init).resolve() == folder.resolve()
        require(not itself, f"--init {init}: expected another folder than --out, which is written anew")
        sizes = to_dict(VMD.from_pretrained(init).config)
    fields = [
        field for field in (*SAME_NETWORK, "length", "block_size") if field in sizes and f"model.{field}" not in chosen
    ]
    model = replace(run.model, **{field: sizes[field] for field in fields})
    latent = sizes.get("latent", {})
    if latent.get("kind") == model.latent.kind and not any(field.startswith("model.latent") for field in chosen):
        model = replace(model, latent=from_dict(LatentConfig, latent, "model.latent"))
    return replace(run, model=model, training=replace(run.training, init=init))


def open_data(run: RunConfig, split: str, tokenizer: Any = None, columns: Any = ()) -> Any:
    """The data of a run; text in the tokens, a table in the columns of a model, if they are given.

    What is not prepared yet is, with a bar of its own.
    """
    from vmd.data import load_data
    from vmd.progress import percent_bar

    about = run.data
    with percent_bar(f"preparing {about.name}") as on_progress:
        return load_data(
            about.name,
            run.training.seed,
            length=run.model.length,
            tokenizer=about.tokenizer or tokenizer or "",
            documents=about.documents,
            split=split,
            on_progress=on_progress,
            puzzles=about.puzzles,
            augment=about.augment,
            layout=about.layout,
            columns=columns,
        )


LOOKS, ROWS_LOOKED_AT = 10, 32
BY_HEART = 100  # so often is a text read by who knows all of it
HOW_IT_RUNS = ("accumulate", "precision", "compile", "capture", "attention")  # what a machine, or --no-fast, decides


def look_at_validation(model: Any, run: RunConfig, tokenizer: Any, seen: list[tuple[float, int]]) -> Any:
    """Of text: what a few rows of the validation part cost, up to ten times in a run. None where the text is too short.

    `seen` is told (bits in the fewest steps, training step).
    """
    import numpy as np

    from vmd.data.arrays import parse_positions
    from vmd.evaluation import bits_in_passing

    try:
        held_out = open_data(run, "validation", tokenizer)
    except InvalidInput as error:
        say(f"note: without a look at validation text on the way: {error}")
        return None
    count = min(ROWS_LOOKED_AT, len(held_out))
    rows = held_out.rows_at(np.arange(count) * len(held_out) // count).long().to(model.device)
    fixed = parse_positions(run.data.fixed, model.config.length)
    fixed = None if fixed is None else fixed.to(model.device)
    r = model.config.block_size
    steps = sorted(run.objective.steps if run.objective.masking == "steps" else {1, r} if r <= 16 else {r})

    unit = unit_of(held_out.tokenizer)

    def look(step: int) -> dict[str, float]:
        z = model.usual_z if max(steps) > 1 else "once"
        found = bits_in_passing(model, rows, steps, z, fixed)
        bits = ", ".join(f"{found[f'bits_{n}']:.3f} in {n} step{'s' if n > 1 else ''} per block" for n in steps)
        seen.append((found[f"bits_{steps[0]}"], step))
        say(f"step {step}: validation text takes {bits} (certified bits per {unit}, {count} rows)")
        return found

    return look


def say_what_is_left_out(data: Any) -> None:
    """Of documents much may be: each is cut into chunks, and what does not fill one is not read."""
    lost = 1 - len(data) * data.length / data.tokens.size
    if lost > 0.05:
        told = f"what does not fill a chunk of {data.length} is left out, {lost:.0%} of {data.tokens.size:,} tokens"
        say(f"note: {told}: a smaller model.length leaves out less")


def run_files(folder: Path) -> list[Path]:
    """What a run writes, and what a new run in the same folder would replace."""
    from vmd.checkpoints import checkpoint_files

    names = ("run.json", "metrics.jsonl", "config.json", "model.safetensors", TOKENIZER_FILE)
    return [*(folder / name for name in names), *checkpoint_files(folder)]


def train_run(
    run: RunConfig, folder: Path, resume: bool, device: str, *, fast: bool, chosen: set[str], tensorboard: bool
) -> None:
    """`chosen`: the fields that the user set, which `fast` leaves alone."""
    from dataclasses import replace

    from vmd import presets
    from vmd.boards import BOARD_FOLDER, Board
    from vmd.data import TextData, is_text
    from vmd.data.arrays import parse_positions
    from vmd.data.tokenizers import Text8Tokenizer, model_tokenizer
    from vmd.diagnostics import advice
    from vmd.distributed import by_the_first, one_after_the_first, rank, world_size
    from vmd.evaluation import diagnose_model
    from vmd.files import claimed, make_folder, remove_together
    from vmd.model import VMD, model_folder, start_from
    from vmd.progress import progress_bar
    from vmd.step import check_attention, check_precision, fast_settings
    from vmd.training import freeze, train

    tokens = None
    if run.training.init and is_text(run.data.name):  # of a run that goes on: its own
        tokens = model_tokenizer(folder if resume else model_folder(run.training.init))
    with one_after_the_first():  # who prepares the data for all
        columns = run.model.columns
        if run.training.init and not resume:
            columns = VMD.from_pretrained(run.training.init).config.columns
        data = open_data(run, "train", tokens, columns)
    same = tokens is None or data.tokenizer.to_dict() == tokens.to_dict()
    require(same, f"{run.data.name}: text in other tokens than those of {run.training.init}: expected the same tokenizer")
    run = replace(
        run,
        model=run.model.resolved(
            data.length,
            data.vocab_size,
            data.symbols if data.vocab_size <= 1024 else (),
            getattr(data, "columns", ()),
        ),
    )
    if run.model.columns and not resume:
        named = ", ".join(f"{name} ({len(values)})" for name, *values in run.model.columns[:8])
        named += ", ..." if len(run.model.columns) > 8 else ""
        say(f"a table of {len(data):,} rows; its columns, and how many values each has: {named}")
    parse_positions(run.data.fixed, data.length)
    better = {name: v for name, v in fast_settings(run, device).items() if fast and f"training.{name}" not in chosen}
    if better:
        run = replace(run, training=replace(run.training, **better))
        said = ", ".join(f"{name}={str(value).lower()}" for name, value in better.items())
        say(f"for speed: {said} (--no-fast: the plain path; --set training.FIELD=... for one of them)")
    check_precision(run.training, device)
    check_attention(run.training, run.model)
    run.objective.check(run.model)
    if isinstance(data, TextData) and isinstance(data.tokenizer, Text8Tokenizer) and run.data.name != "text8":
        say(TEXT8_NOTE)
    times = run.training.steps * run.training.batch_size // len(data) if isinstance(data, TextData) else 0
    if times >= BY_HEART and not resume:
        chunks = f"{len(data)} chunk{'s' if len(data) > 1 else ''} of {data.length} tokens"
        say(f"note: {chunks}, read some {times:,} times, will be learned by heart: more text, or fewer training.steps")
    before = saved(folder, "training").get("steps", run.training.steps) if resume else run.training.steps
    parts = parts_that_fit(run, world_size()) if device == "cpu" and "training.accumulate" not in chosen else 1
    if parts > run.training.accumulate:
        run = replace(run, training=replace(run.training, accumulate=parts))
        say(f"training.accumulate={parts}: a step is made in parts, to fit this machine's memory (--set it for another)")
    if isinstance(data, TextData) and not resume:
        say_what_is_left_out(data)
    if device == "cpu" and not resume and (days := days_on_a_cpu(run)) > 1:
        larger = is_text(run.data.name) and run.model.width > presets.preset("text-small").model.width
        smaller = ": preset text-small-draft takes minutes" if larger else ""
        say(f"note: this run is for a GPU; a CPU of {CPU_SPEED / 1e9:.0f} GFLOP/s takes some {days:.1f} days{smaller}")
    if isinstance(data, TextData) and run.model.latent.coded and not resume and (work := work_of_codes(run.model)) > 4:
        small = "-small" if run.model.width <= presets.preset("text-small").model.width else ""
        codes = f"{run.model.latent.codes} codes of {data.vocab_size:,} symbols take {work:.0f} times the work of no latent"
        say(f"note: {codes}: for tokens of several letters preset text{small}-draft is better")
    model = VMD(run.model, seed=run.training.seed).to(device)
    if run.training.init and not resume:
        start_from(model, run.training.init)  # which fails, if it does, before anything is written
    if run.training.freeze:
        freeze(VMD(run.model), run.training)
    boards: list[Board] = []

    def begin() -> None:
        if tensorboard:
            boards.append(Board(folder, model, run.training, on_note=say))
        if resume:
            return
        make_folder(folder)  # a new run, in a new folder or by --overwrite
        with claimed(folder):  # not under the feet of another run
            unfinished = [*folder.glob("*.partial"), *(folder / "checkpoints").glob("*.partial")]
            remove_together([*run_files(folder), *unfinished, folder / BOARD_FOLDER], folder)

    by_the_first(begin)
    looks: dict[str, Any] = {}
    seen: list[tuple[float, int]] = []
    if isinstance(data, TextData) and world_size() == 1:
        every = -(-run.training.steps // (LOOKS * run.training.log_every)) * run.training.log_every
        looks = {"on_look": look_at_validation(model, run, tokens, seen), "look_every": every}
    started = False
    with ExitStack() as stack:
        for board in boards:
            stack.enter_context(board)
        update = stack.enter_context(progress_bar(f"vmd train {run.data.name}", run.training.steps))

        by_paper = not run.model.bounded_by_counts and run.objective.masking != "steps" and not run.objective.together
        loss = "surrogate" if by_paper else "loss"

        def on_step(done: int, record: dict | None) -> None:
            nonlocal started
            if not started:
                say(describe(model.parameter_counts()))
                steps, warmup = run.training.steps, run.training.warmup_steps
                if before != steps and run.training.schedule != "constant":
                    say(f"note: {steps} training steps where the run had {before}: its learning rate now falls over these")
                if warmup > steps:
                    say(f"training.warmup_steps={warmup}: the learning rate does not reach its value in {steps} steps")
                started = True
            text = ""
            if record is not None:
                kl = "" if record["kl"] is None else f" kl {record['kl']:.4f}"
                text = f"{loss} {record['total']:.4f}{kl}, {short(record['tokens_per_second'])} tokens/s"
            update(done, text)
            for board in boards:
                board.show(done, record)

        train(model, data, run, out=folder, resume=resume, on_step=on_step, on_note=say, **looks)
    if seen and seen[-1][0] > 1.02 * min(seen)[0]:
        (least, best), (now, _) = min(seen), seen[-1]
        told = f"note: validation text was best at step {best} ({least:.3f}; now {now:.3f}): the text is learned by heart"
        say(f"{told}: more text, or training.steps={best}")
    if rank() != 0:
        return
    if world_size() > 1:  # whose weights may be spread over processes
        model = VMD.from_pretrained(folder, device)
    carried = diagnose_model(model, data, fixed=run.data.fixed)
    warning = None if carried is None else advice(carried, run.model.latent.kind)
    if warning is not None:
        say(f"warning: {warning}")
    say(f"model: {folder}")


def read_log(run: Path) -> list[dict]:
    """The records of a run, less a last line that is still being written."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    require(path.is_file(), f"{run}: expected a run folder with metrics.jsonl")
    from vmd.files import read_text

    records = []
    for line in read_text(path).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    require(bool(records), f"{path}: no log lines in it: expected the log of `vmd train`")
    return records
