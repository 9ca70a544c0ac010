"""`vmd bench train | sample`: how fast a preset is here, against the hardware's ceiling and a naive path, in one run."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vmd.config import ModelConfig, ObjectiveConfig, RunConfig, override_all, require, to_dict
from vmd.data.synthetic import law
from vmd.files import hardware
from vmd.flops import forward_flops, sampling_flops
from vmd.masking import Rows
from vmd.model import VMD
from vmd.sampling import check_settings
from vmd.step import check_attention, check_precision, fast_settings
from vmd.training import train

SYMBOLS = 27  # different tokens, where a preset takes them from its data
NAIVE_TRAINING = "eager, dense mask over the doubled sequence, same precision"
NAIVE_SAMPLING = "eager, no cache: the whole doubled sequence at every step"


OnStep = Callable[[str, int, int], None]  # what is measured, steps done, steps in all


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


def measured_ceiling(device: str, size: int = 0) -> float:
    """Operations per second of a large square matrix product, bf16 on a GPU and float32 elsewhere: the best of several."""
    cuda = device == "cuda"
    size = size or (8192 if cuda else 1024)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32) for _ in range(2))
    times = timed(lambda: a @ b, device, repeats=20 if cuda else 5, warmup=5 if cuda else 1)
    return 2 * size**3 / min(times)


def measured_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a copy too large for any cache: the best of several."""
    size = 2**28 if device == "cuda" else 2**24
    a, b = (torch.zeros(size, device=device) for _ in range(2))
    times = timed(lambda: b.copy_(a), device, repeats=10 if device == "cuda" else 3)
    return 2 * a.numel() * a.element_size() / min(times)


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


def as_fast_as_it_gets(run: RunConfig, device: str, chosen: set[str]) -> RunConfig:
    """What `vmd train` would choose for a long run, but for fields that were chosen, as in training.compile."""
    fast = fast_settings(run, device) | ({"compile": True} if device == "cuda" else {})
    wanted = {name: value for name, value in fast.items() if f"training.{name}" not in chosen}
    return replace(run, training=replace(run.training, **wanted))


def plain_model(model: ModelConfig) -> ModelConfig:
    """Without what makes tokens of one step agree."""
    return replace(model, latent=replace(model.latent, kind="none"), draft=0)


def without_latent(run: RunConfig) -> RunConfig:
    return replace(run, model=plain_model(run.model), objective=ObjectiveConfig())


def bench_training(
    run: RunConfig,
    device: str,
    *,
    windows: int = 5,
    steps_per_window: int = 10,
    naive: bool = True,
    compare: bool = True,
    on_step: OnStep = lambda what, done, total: None,
) -> dict:
    """Clean tokens per second of `vmd.training.train` on random tokens: the median of some windows of steps.

    compare: also the same model without its latent, for what the latent costs.
    """
    measured = measure_training(run, device, windows, steps_per_window, partial(on_step, "this model"))
    measured["path"] = {name: getattr(run.training, name) for name in ("compile", "capture", "precision", "attention")}
    forward = forward_flops(run.model, together=run.objective.together > 0)
    flops = 3 * forward / run.model.length  # per token; the backward pass costs twice the forward
    ceiling = measured_ceiling(device)
    measured |= {"flops_per_token": flops, "ceiling_flops": ceiling, "bandwidth_bytes": measured_bandwidth(device)}
    measured["utilisation"] = flops * measured["tokens_per_second"] / ceiling
    if compare and run.model.tokens_agree:
        bare = measure_training(without_latent(run), device, windows, steps_per_window, partial(on_step, "without latent"))
        measured["without_latent"] = bare
        measured["speed_of_no_latent"] = measured["tokens_per_second"] / bare["tokens_per_second"]
    plain = replace(run.training, compile=False, capture=False, attention="dense")
    if naive and plain != run.training:
        slow_run, few = replace(run, training=plain), max(1, steps_per_window // 2)
        slow = measure_training(slow_run, device, 3, few, partial(on_step, "the naive path"))
        measured["naive"] = slow | {"path": NAIVE_TRAINING}
        measured["times_naive"] = measured["tokens_per_second"] / slow["tokens_per_second"]
    return measured


def measure_training(
    run: RunConfig, device: str, windows: int, steps_per_window: int, on_step: Callable[[int, int], None]
) -> dict:
    """The first window holds compilation and recording and is left out."""
    training = replace(run.training, steps=(windows + 1) * steps_per_window, log_every=steps_per_window, split_codes_every=0)
    run = replace(run, training=training)
    model = VMD(run.model).to(device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    tokens_of = RandomTokens(run.model.length, run.model.vocab_size)
    log = train(model, tokens_of, run, on_step=lambda done, record: on_step(done, training.steps))
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


def bench_sampling(
    config: ModelConfig, device: str, batch: int, steps: int, *, repeats: int = 5, naive: bool = True, compare: bool = True
) -> dict:
    """Tokens per second of `VMD.sample` with random weights, rule sample, order prob, in float32."""
    measured = measure_sampling(config, device, batch, steps, repeats)
    flops, ceiling = sampling_flops(config, steps) / config.length, measured_ceiling(device)
    measured |= {"flops_per_token": flops, "ceiling_flops": ceiling}
    measured["utilisation"] = flops * measured["tokens_per_second"] / ceiling
    if compare and config.tokens_agree:
        bare = measure_sampling(plain_model(config), device, batch, steps, repeats)
        measured["without_latent"] = bare
        measured["time_of_no_latent"] = measured["seconds"] / bare["seconds"]
    if naive:
        slow = measure_sampling(config, device, batch, steps, 1, fast=False)
        measured["naive"] = slow | {"path": NAIVE_SAMPLING}
        measured["times_naive"] = slow["seconds"] / measured["seconds"]
    return measured


def measure_sampling(config: ModelConfig, device: str, batch: int, steps: int, repeats: int, *, fast: bool = True) -> dict:
    model = VMD(config).to(device).eval()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    desk = model.desk(batch, cache=fast, record=fast and device == "cuda")
    generator = torch.Generator(device).manual_seed(0)
    call = partial(model.sample, batch, steps=steps, desk=desk, cache=fast, generator=generator)
    drawn = call()  # records its steps
    times = timed(call, device, repeats=repeats, warmup=1 if fast else 0)
    seconds = statistics.median(times)
    return {
        "batch": batch,
        "steps": steps,
        "nfe": drawn.nfe,
        "cache_passes": drawn.cache_passes,
        "seconds": seconds,
        "spread": (max(times) - min(times)) / seconds,
        "tokens_per_second": batch * config.length / seconds,
        "milliseconds_per_block": 1000 * seconds / config.blocks,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }


def exponent(sizes: list[float], costs: list[float]) -> float:
    """The slope of log cost against log size: 1 is linear."""
    x, y = torch.tensor(sizes, dtype=torch.float64).log(), torch.tensor(costs, dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


class Case(NamedTuple):
    """One row to be measured."""

    value: str  # of the field that varies
    run: RunConfig
    batch: int
    steps: int


def cases_of(
    what: str,
    run: RunConfig,
    batches: list[int],
    steps: list[int],
    field: str,
    values: list[str],
    device: str = "cpu",
    chosen: set[str] | None = None,
) -> list[Case]:
    """Every value of the field, or every batch and number of steps; all checked before anything is measured."""
    cases = []
    for value in values or [""]:
        own, own_batches, own_steps = run, batches, steps
        if field == "batch":
            own_batches = [to_count("--vary batch", value)]
            own = override_all(run, [f"training.batch_size={value}"])
        elif field == "steps":
            require(what == "sample", "--vary steps: expected with `vmd bench sample`")
            own_steps = [to_count("--vary steps", value)]
        elif field:
            own = override_all(run, [f"{field}={value}"])
        model = own.model
        length, symbols = model.length, model.vocab_size or SYMBOLS
        if own.data.name:  # a preset with data of its own
            length, symbols = law(own.data.name).length, law(own.data.name).vocab_size
        require(length > 0, "model.length: give it by --set")
        own = replace(own, model=model.resolved(length, symbols))
        own.objective.check(own.model)
        if what == "train":
            own = as_fast_as_it_gets(own, device, {field, *(chosen or ())})
            check_precision(own.training, device)
            check_attention(own.training, own.model)
            cases.append(Case(value, own, own.training.batch_size, 0))
            continue
        for count in own_steps:
            check_settings(own.model, count, "prob", "sample", "once", 1.0, 1.0)
        cases += [Case(value, own, batch, count) for batch in own_batches for count in own_steps]
    return cases


def run_bench(
    what: str,
    run: RunConfig,
    device: str,
    *,
    batches: list[int],
    steps: list[int],
    vary: str = "",
    naive: bool = True,
    compare: bool = True,
    chosen: set[str] | None = None,
    on_row: Callable[[str], None] = lambda label: None,
    on_step: OnStep = lambda what, done, total: None,
) -> dict:
    """All rows of `vmd bench`. `vary` is a field and its values, as in model.length=256,1024: one row for each of them.

    Without it, training has one row, and sampling one for each batch and number of steps; the naive path is measured where
    it can be waited for, at batches up to 64.
    """
    field, _, listed = vary.partition("=")
    values = [value for value in listed.split(",") if value]
    several = bool(field) and len(set(values)) == len(values) >= 2
    require(not vary or several, f"--vary {vary!r}: expected FIELD=VALUE,VALUE,... with two different values or more")
    fixed = ("training.steps", "training.log_every", "training.checkpoint_every", "training.split_codes_every")
    require(field not in fixed, f"--vary {field}: expected a field that changes a step: a bench decides on that one itself")
    windows, steps_per_window = (5, 10) if device == "cuda" else (3, 2)
    rows = []
    cases = cases_of(what, run, batches, steps, field, values, device, chosen)
    for case in cases:
        on_row(f"{field}={case.value}" if vary else f"batch {case.batch}" + (f", {case.steps} steps" if case.steps else ""))
        wants_naive = naive and not vary and (what == "train" or case.batch <= 64)
        try:
            if what == "train":
                found = bench_training(
                    case.run,
                    device,
                    windows=windows,
                    steps_per_window=steps_per_window,
                    naive=wants_naive,
                    compare=compare and not vary,
                    on_step=on_step,
                )
            else:
                found = bench_sampling(
                    case.run.model, device, case.batch, case.steps, naive=wants_naive, compare=compare and not vary
                )
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            found = {"error": "out of memory"}
        rows.append(({"value": case.value} if vary else {}) | found)
    record: dict[str, Any] = {
        "what": what,
        "vary": field,
        "configuration": to_dict(cases[0].run),
        "hardware": hardware(device),
    }
    record["rows"] = rows
    good = [row for row in rows if "error" not in row]
    if len(good) >= 2 and all(is_number(row.get("value", "")) for row in good):
        cost = "milliseconds" if what == "train" else "seconds"
        record["exponent"] = exponent([float(row["value"]) for row in good], [row[cost] for row in good])
    return record


def to_count(option: str, value: str) -> int:
    require(value.isdecimal() and 1 <= int(value) <= 10**7, f"{option}={value}: expected an integer of 1 to ten million")
    return int(value)


def is_number(value: str) -> bool:
    try:
        return float(value) > 0
    except ValueError:
        return False
