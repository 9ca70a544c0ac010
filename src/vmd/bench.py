"""`vmd bench train | sample`: how fast a preset is here, against the hardware's ceiling and a naive path, in one run."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vmd.config import ModelConfig, RunConfig, TrainingConfig, require
from vmd.masking import Rows
from vmd.model import VMD
from vmd.training import train

NAIVE_TRAINING = "eager, dense mask over the doubled sequence, same precision"
NAIVE_SAMPLING = "eager, no cache: the whole doubled sequence at every step"


@dataclass(frozen=True)
class RandomTokens:
    """Uniform tokens, kept on the device: speed does not depend on what they say."""

    length: int
    vocab_size: int
    symbols: tuple[str, ...] = ()

    def batch(
        self, step: int, size: int, *, rows: Rows | None = None, generator: torch.Generator | None = None, device=None
    ) -> Tensor:
        drawn = torch.randint(self.vocab_size, (size, self.length), generator=generator, device=device)
        return drawn if rows is None else rows.of(drawn)


def forward_flops(config: ModelConfig) -> float:
    """Operations of the matrix products of one training sequence's forward pass: useful work only.

    A product of (m, k) and (k, n) counts 2 m k n. Attention counts the pairs that see each other, twice (scores, values).
    Of the last layer the clean stream's keys and values count, since nothing reads the rest.
    """
    c, d, length, r = config, config.width, config.length, config.block_size
    latent = config.latent
    keys_values, rest = 2 * d * 2 * d, 2 * d * (2 * d + 2 * c.mlp_ratio * d)  # per token: k and v; q, out and MLP
    pairs_clean = length * (length + r) / 2  # block-causal
    pairs_noisy = length * r + length * (length - r) / 2  # own block, and the clean blocks before
    doubled = c.blocks > 1
    attention = 4 * d  # per pair

    def trunk(layers: int, noisy_clean_pairs: float = pairs_noisy) -> float:
        """Layers over [xt ; x0], or over one stream if there is one block."""
        noisy = length * (keys_values + rest) + attention * (noisy_clean_pairs if doubled else length * length)
        clean = length * (keys_values + rest) + attention * pairs_clean
        last_clean = length * keys_values
        return layers * noisy + ((layers - 1) * clean + last_clean if doubled else 0)

    total = trunk(c.layers) + 2 * length * d * c.vocab_size
    if latent.kind == "gaussian":
        if latent.encoder_stream == "doubled" or (doubled and latent.encoder_sees_mask):
            total += trunk(latent.encoder_layers)
        else:
            total += latent.encoder_layers * (
                length * (keys_values + rest) + attention * (pairs_clean if doubled else length * length)
            )
        streams = 2 if doubled and latent.on_clean else 1
        total += c.blocks * streams * 2 * (latent.dim * d + d * d + c.layers * 6 * d * d + 2 * d * d)
        if latent.prior == "learned":
            total += trunk(latent.prior_layers)
    if latent.kind == "categorical":
        total += c.blocks * 2 * d * latent.codes  # the prior
        if latent.code_layers:  # the noisy stream once more for every code
            per_code = length * (keys_values + rest) + attention * (pairs_noisy if doubled else length * length)
            total += latent.codes * latent.code_layers * per_code
        if latent.head == "bilinear":
            rank = latent.head_dim or d
            total += 2 * length * d * rank + 2 * length * rank * c.vocab_size * latent.codes
        else:
            total += 2 * length * c.vocab_size * latent.codes
    return float(total)


def measured_ceiling(device: str, size: int = 0) -> float:
    """Operations per second of a large square matrix product, bf16 on a GPU and float32 elsewhere: the best of several."""
    cuda = device == "cuda"
    size = size or (8192 if cuda else 1024)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32) for _ in range(2))
    times = timed(lambda: a @ b, device, repeats=20 if cuda else 5, warmup=5 if cuda else 1)
    return 2 * size**3 / min(times)


def timed(call: Callable[[], object], device: str, *, repeats: int, warmup: int = 1) -> list[float]:
    """Seconds of each call, waiting for the device before and after."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(warmup):
        call()
    seconds = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds


def fast_settings(training: TrainingConfig, device: str) -> TrainingConfig:
    """Everything that makes a step fast on the device."""
    if device == "cuda":
        return replace(training, compile=True, capture=True, precision="bf16")
    return training


def bench_training(run: RunConfig, device: str, *, windows: int = 5, steps_per_window: int = 10, naive: bool = True) -> dict:
    """Clean tokens per second of `vmd.training.train` on random tokens: the median of some windows of steps."""
    require(run.model.length > 0 and run.model.vocab_size > 0, "a bench needs model.length and model.vocab_size: use --set")
    fast = measure_training(replace(run, training=fast_settings(run.training, device)), device, windows, steps_per_window)
    ceiling = measured_ceiling(device)
    flops = 3 * forward_flops(run.model) / run.model.length  # per token; the backward pass costs twice the forward
    fast["flops_per_token"] = flops
    fast["ceiling_flops"] = ceiling
    fast["utilisation"] = flops * fast["tokens_per_second"] / ceiling
    if naive:
        plain = replace(run.training, compile=False, capture=False, attention="dense")
        plain = replace(plain, precision=fast_settings(plain, device).precision)
        slow = measure_training(replace(run, training=plain), device, 3, max(1, steps_per_window // 2))
        fast["naive"] = slow | {"path": NAIVE_TRAINING}
        fast["times_naive"] = fast["tokens_per_second"] / slow["tokens_per_second"]
    return fast


def measure_training(run: RunConfig, device: str, windows: int, steps_per_window: int) -> dict:
    """The first window holds compilation and recording and is left out."""
    training = replace(run.training, steps=(windows + 1) * steps_per_window, log_every=steps_per_window, split_codes_every=0)
    run = replace(run, training=training)
    model = VMD(run.model).to(device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    log = train(model, RandomTokens(run.model.length, run.model.vocab_size), run)
    total = time.perf_counter() - started
    rates = [record["tokens_per_second"] for record in log if record["step"] > steps_per_window]
    rate = statistics.median(rates)
    tokens = training.batch_size * run.model.length
    return {
        "tokens_per_second": rate,
        "spread": (max(rates) - min(rates)) / rate,
        "milliseconds": 1000 * tokens / rate,
        "batch_size": training.batch_size,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "warmup_seconds": total - windows * steps_per_window * tokens / rate,
    }
