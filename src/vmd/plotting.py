"""Pictures of a model's scores and of training, and what all pictures share. Needs matplotlib (the extra `plots`)."""

import io
import math
from pathlib import Path
from typing import Any

from vmd.config import InvalidInput
from vmd.files import write_atomically

INK, GRID = "#222222", "#dddddd"
SHADES = ("#1f5fa8", "#e8a33d", "#7a4fa3", "#c0504d", "#5b8c5a")


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise InvalidInput("figures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.edgecolor": INK, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def save(figure: Any, path: Path) -> Path:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    pyplot().close(figure)
    write_atomically(path, buffer.getvalue())
    return path


def draw_scores(rows: list[dict], entropy: float | None, carried: Any, kind: str, title: str, path: Path) -> Path:
    """Certified bits against steps per block, and what the latent carries beside it."""
    plt = pyplot()
    panels = 1 if carried is None else 2
    figure, axes = plt.subplots(1, panels, figsize=(4.6 * panels, 3.4), layout="constrained", squeeze=False)
    axis = axes[0, 0]
    curves: dict[str, list] = {}
    for row in rows:
        if "steps" in row:
            iwae = f", IWAE {row['iwae']}" if kind == "gaussian" else ""
            curves.setdefault(f"order {row['order']}{iwae}", []).append((row["steps"], row["value"], row["stderr"] or 0.0))
    for number, (name, points) in enumerate(curves.items()):
        x, y, error = zip(*sorted(points), strict=True)
        axis.errorbar(x, y, error, marker="o", markersize=4, label=name, color=SHADES[number % len(SHADES)])
    if entropy is not None:
        axis.axhline(entropy, color=INK, linestyle="--", linewidth=1, label="entropy of the data")
    ticks = sorted({row["steps"] for row in rows if "steps" in row})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("steps per block")
    axis.set_ylabel("certified bits per token")
    axis.set_ylim(0, 1.2 * max([entropy or 0.0, *(row["value"] for row in rows if "steps" in row)]))
    axis.grid(axis="y", color=GRID)
    axis.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    if carried is not None:
        axis = axes[0, 1]
        spread = sorted(carried.spread, reverse=True)
        codes = kind in ("categorical", "chain")
        axis.bar(range(1, len(spread) + 1), spread, width=1.0, color=SHADES[0])
        axis.set_xlabel("codes, by use" if codes else "dimensions of z, by KL")
        axis.set_ylabel("share of blocks" if codes else "KL, nats per block")
        what = "codes used" if codes else "dimensions active"
        sign = "≥" if carried.limited else "="  # few rows cannot tell of more
        title = f"{carried.active} of {carried.size} {what}"
        title += f", I(x; z) {sign} {carried.information:.2f} nats" if carried.limit else ""
        axis.set_title(title, fontsize=10)
    return save(figure, path)


CURVE_NAMES = {
    "total": "loss, nats per token",
    "reconstruction": "reconstruction, nats per token",
    "kl": "KL, nats per token",
    "latent_information": "I(x; z), nats per block",
    "latent_kl": "KL of the first step, nats per block",
    "tokens_per_second": "tokens per second",
}


def draw_curves(logs: dict[str, list[dict]], metrics: list[str], against: str, path: Path) -> Path:
    """One panel for each metric, one line for each run."""
    plt = pyplot()
    columns = min(len(metrics), 3 if len(metrics) != 4 else 2)
    rows = -(-len(metrics) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.4 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(metrics) :]:
        axis.set_axis_off()
    for axis, metric in zip(axes.flat, metrics, strict=False):
        settled: list[float] = []  # of long logs, whose first steps would dwarf the rest
        for number, (name, log) in enumerate(logs.items()):
            points = [(r[against], r[metric]) for r in log if is_finite(r.get(metric)) and is_finite(r.get(against))]
            if points:
                x, y = zip(*points, strict=True)
                settled += y[1 + len(y) // 20 :] if len(y) >= 20 else y
                mark = "o" if len(points) < 3 else None
                axis.plot(x, y, label=name, color=SHADES[number % len(SHADES)], marker=mark, linewidth=1.3)
        if settled:
            low, high = min(settled), max(settled)
            axis.set_ylim(low - 0.08 * (high - low or 1), high + 0.08 * (high - low or 1))
        axis.set_xlabel(against)
        axis.set_title(curve_name(metric), fontsize=10)
        axis.grid(color=GRID)
    axes[0, 0].legend(frameon=False, fontsize=9)
    return save(figure, path)


def curve_name(metric: str) -> str:
    steps = metric.removeprefix("bits_")
    return f"validation text, bits per token, N = {steps}" if steps != metric else CURVE_NAMES.get(metric, metric)


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
