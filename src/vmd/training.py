"""The training loop, for one model or an ensemble of models.

All chance of step s is a function of (seed, s), so a resumed run repeats an undisturbed one without saving any
generator's state.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from vmd.attention import attention_by, kernels_known_here, whole_fits
from vmd.checkpoints import checkpoint_files, learning, load_newest_checkpoint, save_checkpoint
from vmd.config import InvalidInput, ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig, require, to_dict
from vmd.data import Dataset, Puzzles, TextData
from vmd.data.arrays import parse_positions
from vmd.diagnostics import code_posterior, diagnose
from vmd.distributed import (
    by_the_first,
    forget_whole_weights,
    full,
    gradients_kept_local,
    highest_of_all,
    local,
    mean_of_all,
    my_rows,
    parallel,
    rank,
    sum_over_shards,
    take_shard,
    wait_for_all,
    world_size,
)
from vmd.ensemble import Ensemble
from vmd.files import claimed, make_folder, read_json, read_text, to_path, write_atomically
from vmd.flops import forward_flops
from vmd.masking import Masks, Rows, draw_masks, draw_steps
from vmd.model import VMD, of_backbone, require_same_tokens, start_from
from vmd.objective import Loss
from vmd.optimizers import Optimizers, make_optimizer
from vmd.progress import progress_bar


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


class Batch(NamedTuple):
    x0: Tensor  # (..., B, L)
    masks: Masks
    noise: Tensor | None  # (..., B, blocks, dim), or (..., S, B, blocks, dim) for S importance samples
    given: Tensor | None = None  # (B, L) bool: what is given, where that differs from row to row


def step_seed(seed: int, step: int) -> int:
    """A well-mixed 63-bit seed for each (seed, step): SplitMix64's finaliser."""
    x = (seed * 0x9E3779B97F4A7C15 + step + 1) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 31) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 29) >> 1


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Linear warm-up, then constant, cosine to zero or linear to zero."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "linear":
        return config.learning_rate * (1 - done)
    return config.learning_rate


def kl_warmup(config: ObjectiveConfig, step: int) -> float:
    """The factor of the KL weight at a step: it warms up linearly."""
    return min(1.0, (step + 1) / config.kl_warmup_steps) if config.kl_warmup_steps else 1.0


def draw_batch(
    model: VMD | Ensemble,
    data: Dataset,
    objective: ObjectiveConfig,
    step: int,
    size: int,
    fixed: Tensor | None,
    generator: torch.Generator,
    rows: Rows | None = None,
) -> Batch:
    """Algorithms 1 and 3, the sampling lines: data, masks and the encoder's noise. Leading dimensions are models.

    With `rows`, these rows of the batch: their chance does not depend on who draws the others.
    """
    config, given = model.config, None
    share = {} if rows is None else {"rows": rows}
    if isinstance(data, Puzzles):
        x0, given = data.puzzle_batch(step, size, generator=generator, device=generator.device, **share)
        fixed = given
    else:
        x0 = data.batch(step, size, generator=generator, device=generator.device, **share)
    flat, r = x0.flatten(0, -2), config.block_size
    if objective.masking == "steps":
        whole = objective.z == "once" and config.has_latent and max(objective.steps) > 1
        masks = draw_steps(flat, r, objective.steps, whole=whole, fixed=fixed, generator=generator, rows=rows)
    else:
        masks = draw_masks(
            flat, r, kind=objective.masking, whole=objective.whole, fixed=fixed, generator=generator, rows=rows
        )
    masks = masks.map(lambda part: part.view(*x0.shape[:-1], *part.shape[1:]))
    noise = None
    if config.latent.kind == "gaussian":
        draws = [objective.samples] if objective.samples > 1 else []
        shape = (*x0.shape[:-2], *draws, size, config.blocks, config.latent.dim)
        noise = torch.randn(shape, generator=generator, device=generator.device)
        noise = noise if rows is None else rows.of(noise, dim=-3)
    return Batch(x0, masks, noise, given)


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """The batch of one model in equal parts, whose gradients are added up."""
    if count == 1:
        return [batch]
    noises = [None] * count if batch.noise is None else batch.noise.chunk(count, dim=-3)
    masks = [batch.masks.map(lambda part, place=place: part.chunk(count)[place]) for place in range(count)]  # type: ignore[misc]
    return [Batch(x0, m, noise) for x0, m, noise in zip(batch.x0.chunk(count), masks, noises, strict=True)]


def mean_loss(
    model: nn.Module,
    batch: Batch,
    kl_weight: Tensor,
    free_bits: float,
    focal: float = 0.0,
    score_entropy: bool = False,
    together: float = 0.0,
) -> Loss:
    """Nats per token, (): of one model, or (M,): of each model of an ensemble. Pure: this is what gets compiled."""
    loss = model(batch.x0, batch.masks, batch.noise, kl_weight, free_bits, focal, score_entropy, together)
    return Loss(*(part.mean(-1) / batch.x0.shape[-1] for part in loss))


def clip_gradients(parameters: list[Tensor], largest: float, *, per_model: bool) -> Tensor:
    """Scale the gradients down to the largest norm allowed; an ensemble's models are scaled each by its own norm."""
    sharded = any(isinstance(p, DTensor) for p in parameters)
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients and gradients[0].is_cuda and not per_model:
        squares = list(torch._foreach_norm(gradients))  # one launch for many; on a CPU it would lose digits of large ones
        squares = [torch.stack(squares).square().sum()]
    else:
        squares = [g.reshape(len(g), -1).square().sum(1) if per_model else g.square().sum() for g in gradients]
    norm = sum_over_shards(torch.stack(squares).sum(0), sharded=sharded).sqrt()
    if largest > 0:
        scale = (largest / (norm + 1e-6)).clamp(max=1.0)
        if per_model:
            for g in gradients:
                g.mul_(scale.view(-1, *[1] * (g.dim() - 1)))
        else:
            torch._foreach_mul_(gradients, scale)
    return norm


@contextmanager
def precision(name: str) -> Iterator[None]:
    """float32 throughout, float32 with TF32 matrix products, or bf16 autocast."""
    if name == "bf16":
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):  # a cache would outlive a recorded step
            yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_precision(training: TrainingConfig, device: str) -> None:
    require(
        training.attention != "tiles" or (training.compile and device == "cuda"),
        f"training.attention=tiles on {device}: expected dense: tiles need a GPU and training.compile",
    )
    require(
        training.attention != "fused" or (training.precision != "float32" and device == "cuda"),
        f"training.attention=fused on {device} in {training.precision}: expected dense: it needs a GPU, and bf16 or tf32",
    )
    require(not training.capture or device == "cuda", f"training.capture=true: expected false on {device}: it needs a GPU")
    require(not training.capture or world_size() == 1, "training.capture=true: expected false with several processes")
    shares = world_size() * training.accumulate
    require(
        training.batch_size % shares == 0,
        f"training.batch_size={training.batch_size}: expected a multiple of {shares}, processes x training.accumulate",
    )
    require(
        training.precision == "float32" or device == "cuda",
        f"training.precision={training.precision}: expected float32 on {device}",
    )


def check_attention(training: TrainingConfig, model: ModelConfig) -> None:
    head, known = model.width // model.heads, ", ".join(map(str, KERNEL_HEADS))
    require(
        training.attention != "fused" or head in KERNEL_HEADS,
        f"training.attention=fused with heads of size {head}: expected one of {known}, or another attention",
    )


KERNEL_HEADS = (32, 64, 128)  # sizes of a head that the kernels know


def fast_settings(run: RunConfig, device: str) -> dict[str, Any]:
    """Fields of the training section that make this run fast on the device, for those who did not choose.

    A recorded step costs nothing to make. Compiling takes about a minute, so the run must be worth some minutes; bf16 pays
    where matrix products are large, and the kernels where sequences are longer than a tile.
    """
    if device != "cuda":
        return {}
    model = run.model
    head = model.width // model.heads
    pays = model.length >= 64 and (model.blocks > 1 or whole_fits(model.length, head))
    fused = pays and head in KERNEL_HEADS and kernels_known_here()
    return {
        "capture": world_size() == 1,
        "compile": 3 * forward_flops(model) * run.training.batch_size * run.training.steps > 1e16,
        "precision": "bf16" if model.width >= 128 else "tf32",
        "attention": "fused" if fused else "dense",
    }


def uncompiled(way: str) -> str:
    """Tiles outside a compiled pass would make all scores."""
    return "dense" if way == "tiles" else way


class Step:
    """One optimisation step. Recorded as a CUDA graph after its first run if the configuration says so."""

    def __init__(
        self, model: VMD | Ensemble, run: RunConfig, optimizer: Optimizers, average: dict | None, network: nn.Module
    ):
        """`network` is what is called: the model, or the model in step with other processes'."""
        self.network, self.run, self.optimizer = network, run, optimizer
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.per_model = isinstance(model, Ensemble)
        self.average = None if average is None else [local(a) for a in average.values()]
        whole = run.training.compile and not any(isinstance(p, DTensor) for p in self.parameters)
        if whole:
            torch.compiler.reset()  # it compiles a function for eight models of a process, and no more
        self.loss_function = torch.compile(mean_loss) if whole else mean_loss
        device = self.parameters[0].device
        self.follow = torch.zeros((), device=device)  # how far the average moves towards the weights
        self.ran = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Batch, kl_weight: Tensor, step: int) -> tuple[Loss, Tensor]:
        training = self.run.training
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate(training, step))
            else:
                group["lr"] = learning_rate(training, step)
        # Early on a long average would remember the initial weights: start short and grow to the full decay.
        self.follow.fill_(1 - min(training.ema, (1 + step) / (10 + step)))
        if not training.capture or not self.ran:
            self.ran = True  # the first run fills the optimiser's state, which a recording must not do
            return self.take(batch, kl_weight)
        if self.graph is None:
            self.inputs = (batch, kl_weight.clone())
            self.optimizer.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self.take(*self.inputs)
        for ours, theirs in zip(tree_leaves(self.inputs), tree_leaves((batch, kl_weight)), strict=True):
            if ours is not None:
                ours.copy_(theirs)
        self.graph.replay()
        return self.outputs

    def take(self, batch: Batch, kl_weight: Tensor) -> tuple[Loss, Tensor]:
        parts = micro_batches(batch, self.run.training.accumulate)
        losses: list[Loss] = []
        self.optimizer.zero_grad(set_to_none=True)
        for index, part in enumerate(parts):
            last = index + 1 == len(parts)
            with gradients_kept_local(self.network, not last), precision(self.run.training.precision):
                objective = self.run.objective
                ways = (objective.free_bits, objective.focal, objective.score_entropy, objective.together)
                loss = self.loss_function(self.network, part, kl_weight, *ways)
                (loss.total.sum() / len(parts)).backward()
            losses.append(Loss(*(value.detach() for value in loss)))
        norm = clip_gradients(self.parameters, self.run.training.clip, per_model=self.per_model)
        self.optimizer.step()
        if self.average is not None:
            change = torch._foreach_sub([local(p.detach()) for p in self.parameters], self.average)
            torch._foreach_mul_(change, self.follow)
            torch._foreach_add_(self.average, change)
        return Loss(*(torch.stack(values).mean(0) for values in zip(*losses, strict=True))), norm


@torch.no_grad()
def split_codes(model: VMD | Ensemble, batch: Batch, generator: torch.Generator, fixed: Tensor | None = None) -> None:
    """Let codes that are hardly missed take over half of costly ones: a copy with a little noise, and half of the prior.

    Two modes of the data that share a code stay together for ever, because a code that is unused, or one of several for
    another mode, has no gradient towards them. After a split the halves grow apart. Every process splits the same codes.
    """
    if isinstance(model, Ensemble):
        for index in range(len(model)):
            member, parameters = model.member(index)
            split_member(member, parameters, batch.x0[index], fixed, generator)
    else:
        given = fixed if batch.given is None else batch.given
        split_member(model, dict(model.named_parameters()), batch.x0, given, generator)


def split_member(
    model: VMD, parameters: dict[str, Tensor], x0: Tensor, fixed: Tensor | None, generator: torch.Generator
) -> None:
    every = math.ceil(len(x0) * world_size() / 1024)  # of some thousand rows of all processes
    fixed = fixed[::every] if fixed is not None and fixed.dim() == 2 else fixed
    posterior, _, log_likelihood = code_posterior(model, x0[::every], fixed)  # (blocks of all rows, K)
    usage = mean_of_all(posterior.mean(0))
    cost = mean_of_all(-(posterior * log_likelihood).mean(0))  # nats per block that each code leaves to its tokens
    worth = mean_of_all(
        -torch.log1p(-posterior.clamp(max=1 - 1e-6)).mean(0)
    )  # nats that the data would cost more without it
    few = max(1, len(usage) // 16)  # at a time: the others must keep up
    source, spare = cost.argsort(descending=True)[:few], worth.argsort()[:few]
    pays = (worth[spare] < 0.5 * cost[source]) & (cost[source] > 0.1 * usage[source]) & ~torch.isin(spare, source)
    if not bool(pays.any()):
        return
    source, spare = source[pays], spare[pays]
    forget_whole_weights(model)
    codes = ("code_scale.weight", "code_shift.weight", "code_table.weight", "code_next.weight", "code.weight")
    names = (*codes, "prior.weight", "prior.bias")
    for name in names:
        kept = parameters.get(f"decoder.pathway.{name}")
        if kept is None:
            continue
        rows = full(kept).clone()
        if name == "code_next.weight":  # what comes before a code is copied too; half of each by the prior's bias
            rows[:, spare] = rows[:, source]
        if name == "prior.bias":
            rows[source] -= math.log(2)
        rows[spare] = rows[source]
        if not name.startswith("prior"):
            noise = torch.randn(rows[source].shape, generator=generator, device=rows.device)
            rows[spare] += 0.3 * rows[source].std(-1, keepdim=True) * noise
        kept.copy_(take_shard(rows, kept))


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
    `on_note(text)` is told where a resumed run goes on
    from. `on_look(done)` is called every `look_every` steps and at the end, while the model has its averaged weights; what
    it returns stands in the next log line. With `out`, SIGINT and SIGTERM end the run by `Stopped` after the current step
    was saved.
    """
    known = isinstance(model, (VMD, Ensemble)) and hasattr(data, "batch") and isinstance(config, RunConfig)
    given = ", ".join(type(part).__name__ for part in (model, data, config))
    require(known, f"train({given}): expected a model, data such as vmd.load_data gives, and a RunConfig")
    objective, training = config.objective, config.training
    out = None if out is None else to_path(out, "the run")
    device, way = next(model.parameters()).device, training.attention
    require(isinstance(model, VMD) or way == "dense", f"training.attention={way}: expected dense in an ensemble")
    check_precision(training, device.type)
    objective.check(model.config)
    fixed = parse_positions(config.data.fixed, model.config.length)
    fixed = None if fixed is None else fixed.to(device)
    require(
        data.length == model.config.length and data.vocab_size <= model.config.vocab_size,
        f"data of length {data.length} with {data.vocab_size} symbols: expected length {model.config.length} "
        f"and at most {model.config.vocab_size} symbols, the model's",
    )
    require(
        isinstance(model, VMD) or (world_size() == 1 and training.accumulate == 1),
        "an ensemble: expected one process and training.accumulate=1",
    )
    check_attention(training, model.config)
    if isinstance(data, TextData) and isinstance(model, VMD):  # what it learns to write, it can be read with
        require_same_tokens(model, data.tokenizer, data.name)
        model.tokenizer = data.tokenizer
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
        first, log = 0, []
        if out is not None:
            by_the_first(lambda: take_folder(out, resume, stack))
        if resume:
            require(out is not None, "resume: expected an output folder to resume from")
            require_same_text(Path(out or ""), data)
            first, told = load_newest_checkpoint(Path(out or ""), parameters, average, optimizer, to_dict(config))
            require(first <= training.steps, f"training.steps={training.steps}: expected at least {first}, where the run is")
            on_note(f"resuming {told}")
            wait_for_all()  # until every process has read what the first may now change
            log = trim_log(Path(out or ""), first) if leads else []
        if out is not None and leads:
            text = {"text_sha256": data.sha256} if isinstance(data, TextData) else {}
            write_atomically(out / "run.json", json.dumps(to_dict(config) | text, indent=2))
        if on_step is None:
            on_step = step_bar(stack, training.steps)
        stack.enter_context(attention_by(model, way))
        stop = stack.enter_context(StopSignals(out is not None))
        good = torch.ones((), dtype=torch.bool, device=device)  # read at log lines only: reading waits for the device
        bad_step = torch.zeros((), dtype=torch.long, device=device)
        model.train()
        seen: dict[str, float] = {}  # by looks since the last log line
        last_time, last_step = time.perf_counter(), first
        started = last_time - (log[-1].get("seconds", 0.0) if log else 0.0)  # a resumed run goes on counting
        for step in range(first, training.steps):
            generator.manual_seed(step_seed(training.seed, step))
            batch = draw_batch(model, data, objective, step, training.batch_size, fixed, generator, rows)
            loss, norm = take_step(batch, weights * kl_warmup(objective, step), step)
            finite = loss.total.isfinite().all() & norm.isfinite().all()
            bad_step = torch.where(good & ~finite, step, bad_step)
            good = good & finite
            if splits and (step + 1) % splits == 0 and step + 1 <= 0.75 * training.steps:
                with attention_by(model, uncompiled(way)):
                    split_codes(model, batch, generator, fixed)
            done, record = step + 1, None
            stopped_by = stop.received  # read once: a signal that comes later in this step waits for the next
            if world_size() > 1:  # all processes must stop after the same step
                stopped_by = highest_of_all(stopped_by or 0) or None
            saving = out is not None and (
                done % training.checkpoint_every == 0 or done == training.steps or stopped_by is not None
            )
            logging = done % training.log_every == 0 or done == training.steps or done == 1
            looking = on_look is not None and ((look_every and done % look_every == 0) or done == training.steps)
            if saving:  # weights that are no numbers must not take the place of good ones
                whole = torch.stack([local(p.detach()).isfinite().all() for p in parameters.values()]).all()
                bad_step = torch.where(good & ~whole, step, bad_step)
                good = good & whole
            if (logging or saving or looking) and highest_of_all(int(not good)):
                where = training.steps - highest_of_all(0 if good else training.steps - int(bad_step))
                raise TrainingDiverged(divergence(where, training, out))
            if saving and out is not None:  # before anything else that may fail
                save_checkpoint(out, done, parameters, average, optimizer, to_dict(config), write=leads)
            if looking and on_look is not None:
                looked = time.perf_counter()
                with averaged(parameters, average), attention_by(model, uncompiled(way)):
                    seen |= on_look(done) or {}
                looked = time.perf_counter() - looked  # which is not training
                started, last_time = started + looked, last_time + looked
            if logging:
                now = time.perf_counter()
                tokens = (done - last_step) * batch.x0.numel() * world_size()
                values = torch.stack([value.float().mean() for value in (*loss, norm)])
                record = {"step": done} | dict(
                    zip((*Loss._fields, "gradient_norm"), mean_of_all(values).tolist(), strict=True)
                )
                if model.config.latent.kind == "chain":  # its loss is not split
                    record |= {"reconstruction": None, "kl": None}
                record |= {"learning_rate": learning_rate(training, step), "tokens_per_second": tokens / (now - last_time)}
                record |= {"seconds": now - started}
                every = max(training.log_every, training.steps // 20)  # some twenty times in a run
                if isinstance(model, VMD) and (done % every < training.log_every or done == training.steps):
                    with attention_by(model, uncompiled(way)):
                        record |= latent_record(model, batch, fixed, generator)
                record, seen = record | seen, {}
                last_time, last_step = time.perf_counter(), done
                log.append(record)
                if out is not None and leads:
                    append_line(out / "metrics.jsonl", record)
            on_step(done, record)
            if stopped_by is not None and done < training.steps:
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
    return log


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
    used = (out / "metrics.jsonl").exists() or bool(checkpoint_files(out))
    require(resume or not used, f"{out} holds a run: resume it, or train into another folder")


def require_same_text(out: Path, data: Dataset) -> None:
    """A resumed run must be the same run: a file may have changed under its name. Older runs did not keep what they read."""
    if isinstance(data, TextData) and (out / "run.json").is_file():
        begun = read_json(out / "run.json")
        same = not isinstance(begun, dict) or begun.get("text_sha256", data.sha256) == data.sha256
        require(same, f"{data.name}: not the text that {out} was begun with: expected that, or another folder")


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
