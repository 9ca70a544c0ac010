"""One optimisation step: what is drawn for it, how it is computed, compiled and recorded, and what a machine can do of that.

All chance of step s is a function of (seed, s).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from vmd.attention import kernels_known_here, whole_fits
from vmd.config import ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig, require
from vmd.data import Dataset, Puzzles
from vmd.distributed import gradients_kept_local, local, sum_over_shards, world_size
from vmd.ensemble import Ensemble
from vmd.flops import forward_flops
from vmd.masking import Masks, Rows, draw_masks, draw_steps
from vmd.model import VMD
from vmd.objective import Loss
from vmd.optimizers import Optimizers


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


KERNEL_HEADS = (32, 64, 128)  # sizes of a head that the kernels know


def check_attention(training: TrainingConfig, model: ModelConfig) -> None:
    head, known = model.width // model.heads, ", ".join(map(str, KERNEL_HEADS))
    require(
        training.attention != "fused" or head in KERNEL_HEADS,
        f"training.attention=fused with heads of size {head}: expected one of {known}, or another attention",
    )


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
