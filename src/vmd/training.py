"""The training loop, for one model or an ensemble of models.

All chance of step s is a function of (seed, s) (`vmd.step`), so a resumed run repeats an undisturbed one without saving
any generator's state.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vmd.attention import attention_by
from vmd.checkpoints import checkpoint_files, learning, load_newest_checkpoint, save_checkpoint
from vmd.config import InvalidInput, RunConfig, TrainingConfig, require, to_dict
from vmd.data import ArrayData, Dataset, TextData
from vmd.data.arrays import parse_positions
from vmd.diagnostics import diagnose
from vmd.distributed import (
    by_the_first,
    forget_whole_weights,
    full,
    highest_of_all,
    local,
    mean_of_all,
    my_rows,
    parallel,
    rank,
    wait_for_all,
    world_size,
)
from vmd.ensemble import Ensemble
from vmd.files import TOKENIZER_FILE, claimed, make_folder, read_json, read_text, to_path, write_atomically
from vmd.model import VMD, of_backbone, require_same_tokens, start_from, usual_z
from vmd.objective import Loss
from vmd.optimizers import make_optimizer
from vmd.progress import progress_bar
from vmd.splitting import split_codes
from vmd.step import (
    Batch,
    Step,
    check_attention,
    check_precision,
    draw_batch,
    kl_warmup,
    learning_rate,
    step_seed,
    uncompiled,
)


class TrainingDiverged(RuntimeError):
    """Loss, gradient or weights are no longer numbers."""


class Stopped(RuntimeError):
    """A signal stopped the run, after the current step was finished and saved."""

    def __init__(self, step: int, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.step, self.number = step, number


class StopSignals:
    """Remembers SIGINT and SIGTERM instead of dying of them; in a process alone a second one has its usual effect."""

    def __init__(self, active: bool):
        self.received: int | None = None
        self.active = active and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "StopSignals":
        wanted = (signal.SIGINT, signal.SIGTERM) if self.active else ()
        self.before = {number: signal.signal(number, self.receive) for number in wanted}
        return self

    def receive(self, number: int, frame: Any) -> None:
        self.received = number
        if world_size() == 1:  # torchrun passes on a signal that a process may have got already
            self.restore()

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        self.restore()


class FiniteSoFar:
    """Whether all was numbers so far, and since which step not: kept on the device, since reading waits for it."""

    def __init__(self, device: torch.device):
        self.good = torch.ones((), dtype=torch.bool, device=device)
        self.bad_step = torch.zeros((), dtype=torch.long, device=device)

    def see(self, step: int, whole: Tensor) -> None:
        self.bad_step = torch.where(self.good & ~whole, step, self.bad_step)
        self.good = self.good & whole

    def first_bad(self, steps: int) -> int | None:
        """The first such step of all processes, in a run of so many."""
        if not highest_of_all(int(not self.good)):
            return None
        return steps - highest_of_all(0 if self.good else steps - int(self.bad_step))


class Log:
    """Lines of metrics.jsonl, and how fast training is between two of them, without what is no training."""

    def __init__(self, out: Path | None, lines: list[dict], first: int):
        self.path, self.lines = None if out is None else out / "metrics.jsonl", lines
        self.last_time, self.last_step = time.perf_counter(), first
        self.started = self.last_time - (lines[-1].get("seconds", 0.0) if lines else 0.0)  # a resumed run goes on counting
        self.seen: dict[str, float] = {}  # by looks since the last line

    @contextmanager
    def looking(self) -> Iterator[None]:
        """What happens inside is no training."""
        before = time.perf_counter()
        yield
        took = time.perf_counter() - before
        self.started, self.last_time = self.started + took, self.last_time + took

    def speed(self, done: int, tokens_per_step: int) -> dict[str, float]:
        now = time.perf_counter()
        tokens = (done - self.last_step) * tokens_per_step
        return {"tokens_per_second": tokens / (now - self.last_time), "seconds": now - self.started}

    def write(self, record: dict) -> dict:
        record, self.seen = record | self.seen, {}
        self.lines.append(record)
        if self.path is not None:
            append_line(self.path, record)
        self.last_time, self.last_step = time.perf_counter(), record["step"]
        return record


def train(
    model: VMD | Ensemble,
    data: Dataset,
    config: RunConfig,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    kl_weights: Tensor | None = None,
    on_step: Callable[[int, dict | None], None] | None = None,
    on_note: Callable[[str], None] = lambda text: None,
    on_look: Callable[[int], dict[str, float] | None] | None = None,
    look_every: int = 0,
) -> list[dict]:
    """Algorithms 1 and 3: train in place and return the log. With `out`, metrics, checkpoints and the model go there.

    `kl_weights` (M,) gives each model of an ensemble a KL weight of its own. `on_step(done, record)` is called after
    every step; the record is None except when a log line was written. Without it there is a progress bar on stderr.
    `on_note(text)` is told where a resumed run goes on from. `on_look(done)` is called every `look_every` steps and at the
    end, while the model has its averaged weights; what it returns stands in the next log line. With `out`, SIGINT and
    SIGTERM end the run by `Stopped` after the current step was saved.
    """
    out = None if out is None else to_path(out, "the run")
    require(out is not None or not resume, "resume: expected an output folder to resume from")
    check_run(model, data, config)
    config = replace(config, model=model.config)  # with its sizes, which a preset leaves to the data
    objective, training, steps = config.objective, config.training, config.training.steps
    device, way = next(model.parameters()).device, training.attention
    fixed = parse_positions(config.data.fixed, model.config.length)
    fixed = None if fixed is None else fixed.to(device)
    if isinstance(data, TextData) and isinstance(model, VMD):  # what it learns to write, it can be read with
        require_same_tokens(model, data.tokenizer, data.name)
        model.tokenizer = data.tokenizer
    if isinstance(model, VMD):
        model.usual_z, model.fixed = usual_z(to_dict(objective), model.config), config.data.fixed
    rows = my_rows(training.batch_size) if world_size() > 1 else None
    leads = rank() == 0  # one process writes what all have done
    learned = [(p, p.requires_grad) for p in model.parameters()]

    with ExitStack() as stack:
        stack.callback(lambda: [p.requires_grad_(flag) for p, flag in learned])
        if training.init and not (resume and checkpoint_files(Path(out or ""))):
            require(isinstance(model, VMD), f"training.init={training.init}: expected none in an ensemble")
            on_note(start_from(model, training.init))  # type: ignore[arg-type]
        if training.freeze:
            freeze(model, training)
        network = parallel(model, training.parallel, compiled=training.compile)
        optimizer = make_optimizer(model, training)
        parameters = dict(model.named_parameters())
        average = {name: p.detach().clone() for name, p in learning(parameters).items()} if training.ema else None
        weights = torch.tensor(objective.kl_weight, device=device) if kl_weights is None else kl_weights.to(device)
        if isinstance(model, Ensemble) and weights.dim() == 0:
            weights = weights.expand(len(model))
        generator = torch.Generator(device)
        take_step = Step(model, config, optimizer, average, network)
        splits = training.split_codes_every if model.config.latent.coded else 0
        first, lines = 0, []
        if out is not None:
            by_the_first(lambda: take_folder(out, resume, stack))
        if resume and out is not None:
            require_same_data(out, data)
            first, told = load_newest_checkpoint(out, parameters, average, optimizer, to_dict(config))
            require(first <= steps, f"training.steps={steps}: expected at least {first}, where the run is")
            on_note(f"resuming {told}")
            wait_for_all()  # until every process has read what the first may now change
            lines = trim_log(out, first) if leads else []
        if out is not None and leads:
            write_atomically(out / "run.json", json.dumps(to_dict(config) | what_is_read(data), indent=2))
            if isinstance(data, TextData):
                write_atomically(out / TOKENIZER_FILE, json.dumps(data.tokenizer.to_dict()))
        if on_step is None:
            on_step = step_bar(stack, steps)
        stack.enter_context(attention_by(model, way))
        stop = stack.enter_context(StopSignals(out is not None))
        finite, log = FiniteSoFar(device), Log(out if leads else None, lines, first)
        model.train()
        for step in range(first, steps):
            generator.manual_seed(step_seed(training.seed, step))
            batch = draw_batch(model, data, objective, step, training.batch_size, fixed, generator, rows)
            loss, norm = take_step(batch, weights * kl_warmup(objective, step), step)
            finite.see(step, loss.total.isfinite().all() & norm.isfinite().all())
            if splits and (step + 1) % splits == 0 and step + 1 <= 0.75 * steps:
                with attention_by(model, uncompiled(way)):
                    split_codes(model, batch, generator, fixed)
            done, record = step + 1, None
            stopped_by = stop.received  # read once: a signal that comes later in this step waits for the next
            if world_size() > 1:  # all processes must stop after the same step
                stopped_by = highest_of_all(stopped_by or 0) or None
            last = done == steps
            saving = out is not None and (done % training.checkpoint_every == 0 or last or stopped_by is not None)
            logging = done % training.log_every == 0 or last or done == 1
            looking = on_look is not None and ((look_every and done % look_every == 0) or last)
            if saving:  # weights that are no numbers must not take the place of good ones
                finite.see(step, torch.stack([local(p.detach()).isfinite().all() for p in parameters.values()]).all())
            if (logging or saving or looking) and (bad := finite.first_bad(steps)) is not None:
                raise TrainingDiverged(divergence(bad, training, out))
            if saving and out is not None:  # before anything else that may fail
                save_checkpoint(out, done, parameters, average, optimizer, to_dict(config), write=leads)
            if looking and on_look is not None:
                with log.looking(), averaged(parameters, average), attention_by(model, uncompiled(way)):
                    log.seen |= on_look(done) or {}
            if logging:
                record = log.speed(done, batch.x0.numel() * world_size())
                record = {"step": done} | loss_record(model, loss, norm, learning_rate(training, step)) | record
                every = max(training.log_every, steps // 20)  # some twenty times in a run
                if isinstance(model, VMD) and (done % every < training.log_every or last):
                    with attention_by(model, uncompiled(way)):
                        record |= latent_record(model, batch, fixed, generator)
                record = log.write(record)
            on_step(done, record)
            if stopped_by is not None and not last:
                wait_for_all()  # torchrun ends the others when one has gone, and the first may still be writing
                raise Stopped(done, stopped_by)
        if average is not None:
            with torch.no_grad():
                for name, mean in average.items():
                    parameters[name].copy_(mean)
        forget_whole_weights(model)
        model.eval()
        if out is not None and isinstance(model, VMD):
            weights_now = {name: full(p) for name, p in parameters.items()}
            if leads:
                model.save_pretrained(out, weights_now)
    return log.lines


def check_run(model: VMD | Ensemble, data: Dataset, config: RunConfig) -> None:
    known = isinstance(model, (VMD, Ensemble)) and hasattr(data, "batch") and isinstance(config, RunConfig)
    given = ", ".join(type(part).__name__ for part in (model, data, config))
    require(known, f"train({given}): expected a model, data such as vmd.load_data gives, and a RunConfig")
    training, one = config.training, isinstance(model, VMD)
    require(one or training.attention == "dense", f"training.attention={training.attention}: expected dense in an ensemble")
    same = getattr(data, "columns", ()) in ((), model.config.columns)
    require(same, "a table of other columns than the model's: expected vmd.load_data(..., columns=model.config.columns)")
    check_precision(training, next(model.parameters()).device.type)
    config.objective.check(model.config)
    require(
        data.length == model.config.length and data.vocab_size <= model.config.vocab_size,
        f"data of length {data.length} with {data.vocab_size} symbols: expected length {model.config.length} "
        f"and at most {model.config.vocab_size} symbols, the model's",
    )
    alone = world_size() == 1 and training.accumulate == 1
    require(one or alone, "an ensemble: expected one process and training.accumulate=1")
    check_attention(training, model.config)


def loss_record(model: VMD | Ensemble, loss: Loss, norm: Tensor, rate: float) -> dict:
    values = mean_of_all(torch.stack([value.float().mean() for value in (*loss, norm)])).tolist()
    record = dict(zip((*Loss._fields, "gradient_norm"), values, strict=True)) | {"learning_rate": rate}
    if model.config.latent.kind == "chain":  # its loss is not split
        record |= {"reconstruction": None, "kl": None}
    return record


def step_bar(stack: ExitStack, steps: int) -> Callable[[int, dict | None], None]:
    update = stack.enter_context(progress_bar("training", steps))
    return lambda done, record: update(done, "" if record is None else f"loss {record['total']:.4f}")


def freeze(model: VMD | Ensemble, training: TrainingConfig) -> None:
    """All but the parts of a latent or a draft head."""
    whole = training.parallel == "ddp" or world_size() == 1
    require(isinstance(model, VMD) and whole, "training.freeze=true: expected one model, and training.parallel=ddp")
    parts = [name for name, _ in model.named_parameters() if not of_backbone(name)]
    require(bool(parts), "training.freeze=true: expected a model with a latent or a draft head, which would learn")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not of_backbone(name))


@contextmanager
def averaged(parameters: dict[str, nn.Parameter], average: dict[str, Tensor] | None) -> Iterator[None]:
    """The model has its averaged weights inside, if there are any."""
    own = {name: parameters[name].detach().clone() for name in average or {}}
    with torch.no_grad():
        for name in own:
            parameters[name].copy_(average[name])  # type: ignore[index]
    try:
        yield
    finally:
        with torch.no_grad():
            for name, kept in own.items():
                parameters[name].copy_(kept)


def take_folder(out: Path, resume: bool, stack: ExitStack) -> None:
    make_folder(out)
    stack.enter_context(claimed(out))
    for unfinished in out.glob("*.partial"):  # by a run that was killed
        unfinished.unlink()
    used = (out / "metrics.jsonl").exists() or bool(checkpoint_files(out))
    require(resume or not used, f"{out} holds a run: resume it, or train into another folder")


def what_is_read(data: Dataset) -> dict[str, str]:
    """The digest of a text or an array, in the words of run.json."""
    if isinstance(data, TextData):
        return {"text_sha256": data.sha256}
    return {"data_sha256": data.sha256} if isinstance(data, ArrayData) else {}


def require_same_data(out: Path, data: Dataset) -> None:
    """A resumed run must be the same run: a file may have changed under its name. Older runs did not keep what they read."""
    begun = read_json(out / "run.json") if (out / "run.json").is_file() else {}
    for name, digest in what_is_read(data).items() if isinstance(begun, dict) else ():
        named = f"{getattr(data, 'name', '')}: not the {'text' if isinstance(data, TextData) else 'array'}"
        require(begun.get(name, digest) == digest, f"{named} that {out} was begun with: expected that, or another folder")


def divergence(step: int, training: TrainingConfig, out: Path | None) -> str:
    kept = checkpoint_files(out)[-1:] if out is not None else []
    last = f"last good checkpoint: {kept[0]}" if kept else "no checkpoint was written"
    return (
        f"loss, gradient or weights are no longer numbers at step {step + 1} (batch seed "
        f"{step_seed(training.seed, step)}); {last}; try a lower training.learning_rate"
    )


def latent_record(model: VMD, batch: Batch, fixed: Tensor | None, generator: torch.Generator) -> dict:
    """What the latent carries, for the log: on some rows of the batch."""
    fixed = fixed if batch.given is None else batch.given[:256]
    found = diagnose(model, batch.x0[:256], fixed=fixed, generator=generator)
    if found is None:
        return {}
    active = "codes_used" if model.config.latent.coded else "active_dimensions"
    return {
        "latent_kl": found.kl,
        "latent_information": found.information,
        "latent_marginal_gap": found.marginal_gap,
        "latent_nll_gap": found.nll_gap,
        active: found.active,
    }


def append_line(path: Path, record: dict) -> None:
    try:
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot write: {error.strerror}") from None


def trim_log(out: Path, step: int) -> list[dict]:
    """Drop the log lines behind the checkpoint that training resumes from."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    records = []
    for line in read_text(path).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the line that a crash cut short
        if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step:
            records.append(record)
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
    return records
