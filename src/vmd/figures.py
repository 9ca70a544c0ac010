"""Pictures of results. Needs matplotlib (the extra `plots`)."""

import contextlib
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vmd.config import InvalidInput
from vmd.files import write_atomically
from vmd.report import read_results
from vmd.tables import as_trained, best_bits, data_name, find, plain_rows, sorted_places

INK, GRID = "#222222", "#dddddd"
SHADES = ("#1f5fa8", "#e8a33d", "#7a4fa3", "#c0504d", "#5b8c5a")
COLOURS = {"MDM": "#b0b0b0", "VMD, printed": "#e8a33d", "VMD argmax": "#1f5fa8", "VMD sample": "#7fb2e5"}


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


def draw_figures(folder: Path) -> list[Path]:
    """All figures of a results folder, from its JSON files alone."""
    results = read_results(folder / "results.json")
    made = []
    if (folder / "heatmaps.json").exists():
        heatmaps = json.loads((folder / "heatmaps.json").read_text())
        made += [draw_heatmaps(data, tables, results, folder / f"heatmap-{data}.png") for data, tables in heatmaps.items()]
    if results["name"] == "four-token":
        made.append(draw_bars(results, folder / "four-token.png"))
    if results["name"] == "ablations":
        made.append(draw_bits(results, folder / "bits.png"))
    if results["name"] == "sudoku":
        made += draw_sudoku(results, folder)
    if results["name"] == "text" and not all(about["judge"] for about in results["systems"].values()):
        made.append(draw_text(results, folder / "few-steps.png"))
        if len(HEADLINE.keys() & results["systems"].keys()) > 2:
            made.append(draw_headline(results, folder / "headline.png"))
    if results["name"] == "text-scan" and results["systems"]:
        made.append(draw_scan(results, folder / "scan.png"))
    return made


def draw_heatmaps(data: str, tables: dict, results: dict, path: Path) -> Path:
    """Truth, MDM and VMD side by side: the share of each pair of tokens in one-step samples."""
    plt = pyplot()
    family = results["preset"]
    panels = [("truth", "data"), (f"MDM {family} sample", "MDM"), (f"VMD {family} argmax", "VMD, argmax")]
    panels.append((f"VMD {family} sample", "VMD, sample"))
    top = max(max(row) for row in tables["truth"])
    figure, axes = plt.subplots(1, len(panels), figsize=(12.4, 3.4), layout="constrained")
    image = None
    for axis, (key, title) in zip(axes, panels, strict=True):
        image = axis.imshow(tables[key], cmap="Blues", vmin=0, vmax=top)
        axis.set_xticks(range(len(tables["truth"])))
        axis.set_yticks(range(len(tables["truth"])))
        axis.tick_params(length=0, labelsize=8)
        axis.set_xlabel("second token")
        axis.set_title(title + caption(results, data, key))
        for spine in axis.spines.values():
            spine.set_visible(False)
    axes[0].set_ylabel("first token")
    figure.colorbar(image, ax=axes, shrink=0.85, label="probability")
    figure.suptitle(f"{data_name(data)}: both tokens in one step", fontsize=11)
    return save(figure, path)


LATENT_COLOURS = {
    "no z": "#8c8c8c",
    "Gaussian": "#e8a33d",
    "Gaussian, learned prior": "#c0504d",
    "Gaussian, importance-weighted": "#7a4fa3",
    "categorical": "#1f5fa8",
}


def draw_bits(results: dict, path: Path) -> Path:
    """Certified bits per token against steps per block: one panel for each data set, one line for each latent."""
    plt = pyplot()
    rows = results["rows"]
    data = list(results["entropy"])
    columns = min(4, len(data))
    lines = -(-len(data) // columns)
    size = (3.1 * columns + 0.4, 2.7 * lines + 0.8)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axis, name in zip(axes.flat, data, strict=False):
        block = next(row["setting"]["block"] for row in rows if row["setting"]["data"] == name)
        counts = sorted({1, 2, block})
        for system, colour in LATENT_COLOURS.items():
            points = []
            for steps in counts:
                z = "fresh" if steps > 1 and system != "no z" else "once"
                here = {"system": system, "objective": "N-step bound, z fresh", "data": name, "steps": steps, "z": z}
                row = best_bits(rows, **here)
                if row is not None:
                    points.append((steps, row["value"], row["stderr"] or 0.0))
            if points:
                x, y, error = zip(*points, strict=True)
                axis.errorbar(x, y, error, color=colour, marker="o", markersize=4, linewidth=1.6, label=system)
        surrogate = find(rows, system="categorical", metric="surrogate", data=name)
        if surrogate is not None:
            axis.plot([1], [surrogate["value"]], "x", color=INK, label="categorical, surrogate: not a bound")
        axis.axhline(results["entropy"][name], color=INK, linestyle="--", linewidth=1, label="entropy of the data")
        axis.set_title(data_name(name))
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        axis.grid(axis="y", color=GRID)
    for axis in axes.flat[len(data) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("steps per block")
    for axis in axes[:, 0]:
        axis.set_ylabel("bits per token")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=min(4, len(labels)), loc="outside upper center")
    return save(figure, path)


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


def caption(results: dict, data: str, key: str) -> str:
    if key == "truth":
        return ""
    system, _, rule = key.split(" ")
    kl = find(results["rows"], system=system, data=data, rule=rule, steps=1, metric="kl")
    return "" if kl is None else f"   KL {kl['values'][0]:.3f}"  # of the first seed, whose samples the picture shows


def draw_bars(results: dict, path: Path) -> Path:
    """Accuracy of the four-token table: MDM, the paper's VMD, ours by both rules, for every column of the table."""
    plt = pyplot()
    rows = results["rows"]
    places = sorted_places(rows)
    series = [
        ("MDM", {"system": "MDM", "rule": "sample"}, "value"),
        ("VMD, printed", {"system": "VMD", "rule": "argmax", "z": "once"}, "paper"),
        ("VMD argmax", {"system": "VMD", "rule": "argmax", "z": "once"}, "value"),
        ("VMD sample", {"system": "VMD", "rule": "sample", "z": "once"}, "value"),
    ]
    figure, axis = plt.subplots(figsize=(11, 3.8), layout="constrained")
    for number, (name, wanted, field) in enumerate(series):
        heights, errors = [], []
        for data, block, steps, _ in places:
            row = find(rows, metric="accuracy", data=data, block=block, steps=steps, **wanted)
            heights.append((row or {}).get(field) or 0.0)
            errors.append(((row or {}).get("stderr") or 0.0) if field == "value" else 0.0)
        at = [index + (number - 1.5) * 0.2 for index in range(len(places))]
        axis.bar(at, heights, 0.19, label=name, color=COLOURS[name], yerr=errors, error_kw={"elinewidth": 1, "ecolor": INK})
    labels = [f"{data_name(d)}\nB = {nfe // steps}, NFE {nfe}" for d, _, steps, nfe in places]
    axis.set_xticks(range(len(places)), labels)
    axis.set_ylabel("valid sequences, %")
    axis.set_ylim(0, 105)
    axis.grid(axis="y", color=GRID)
    axis.set_axisbelow(True)
    axis.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return save(figure, path)


def draw_sudoku(results: dict, folder: Path) -> list[Path]:
    """Training curves, one puzzle filling in, and what latents do where there are several answers."""
    made = []
    systems = results["systems"]
    on = {name: "" if (kind := about["trained_on"]) == "logic" else f", tested on {kind}" for name, about in systems.items()}
    curves = {name + on[name]: about["curve"] for name, about in systems.items() if about["curve"]}
    if curves:
        counts = [r["setting"]["steps"] for r in plain_rows(results) if r["setting"]["order"] == "prob"]
        made.append(draw_accuracy_curves(curves, max(c for c in counts if c <= 20), folder / "curves.png"))
    filling = next((about["filling"] for about in systems.values() if about.get("filling")), None)
    if filling:
        made.append(draw_filling(filling, folder / "filling.png"))
    several = [row for row in results["rows"] if row["setting"]["data"] in ("multi", "grid")]
    if several:
        made.append(draw_several(several, folder / "several.png"))
    return made


def look_of_system(run: dict) -> dict:
    """Colour: what makes tokens agree. Marker: the size of blocks, hollow if trained for one number of steps alone; large
    ones have thin lines.

    Dashes: another objective than others of its colour; dots: a wider network. Dark: many codes.
    """
    model, objective = run["model"], run["objective"]
    latent, r = model["latent"], model["block_size"]
    many = latent["kind"] == "categorical" and latent["codes"] > 1_000
    colours = {
        "categorical": "navy" if many else "tab:blue",
        "chain": "tab:cyan",
        "gaussian": "tab:red" if latent["on_clean"] else "tab:orange",
    }
    colour = "tab:green" if model["draft"] else colours.get(latent["kind"], "black" if r == 1 else "tab:gray")
    marker = {1: "*", 4: "o", 8: "s", 16: "D"}.get(r, "^")
    look = {"color": colour, "marker": marker, "markersize": 8 if r == 1 else 4, "linewidth": 2 if r <= 4 else 1}
    if objective["masking"] == "steps":
        return look | {"linestyle": "", "markersize": 7, "fillstyle": "none"}
    return look | {"linestyle": "--" if objective["score_entropy"] else ":" if model["mlp_ratio"] != 4 else "-"}


def draw_text(results: dict, path: Path) -> Path:
    """Certified bits, real words and a judge's bits against evaluations, and against speed; one line for each system.

    A system that was trained for one number of steps is shown at that number alone: the table has the others.
    """
    plt = pyplot()
    present = {row["metric"] for row in results["rows"]}
    judge = ("judged_bits", "judge's bits") if "judged_bits" in present else ("counted_bits", "n-gram judge's bits")
    panels = [("bits", "certified bits per character"), ("real_words", "real words, %"), judge]
    panels = [panel for panel in panels if panel[0] in present]
    rows = as_trained(results)
    names = [name for name, about in results["systems"].items() if not about["judge"]]
    values = {(row["system"], row["metric"], row["setting"]["nfe"]): row["value"] for row in rows}
    length = next(iter(results["configurations"].values()))["model"]["length"]
    across = [f"network evaluations for {length} characters"]
    across += ["characters per second, sampled in a batch"] if "characters_per_second" in present else []
    size = (4.6 * len(panels), 3.9 * len(across))
    figure, axes = plt.subplots(len(across), len(panels), figsize=size, layout="constrained", squeeze=False)
    for by_speed, line in enumerate(axes):
        for axis, (metric, label) in zip(line, panels, strict=True):
            for name in names:
                found = [(nfe, value) for (system, m, nfe), value in values.items() if (system, m) == (name, metric)]
                if by_speed:
                    speed = [values.get((name, "characters_per_second", nfe)) for nfe, _ in found]
                    found = [(fast, value) for fast, (_, value) in zip(speed, found, strict=True) if fast is not None]
                if found:
                    x, y = zip(*sorted(found), strict=True)
                    look = look_of_system(results["configurations"][name])
                    axis.plot(x, y, label=name, alpha=0.4 if name.endswith("second seed") else 1.0, **look)
            if (level := results.get("test_text", {}).get(metric)) is not None:
                axis.axhline(level, color=INK, linestyle="--", linewidth=1, label="the test text")
            axis.set_xscale("log", base=10 if by_speed else 2)
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
            axis.xaxis.set_minor_formatter(lambda x, _: f"{x:,.0f}" if f"{x:.0e}"[0] in "25" else "")
            axis.set_xlabel(across[by_speed])
            axis.set_ylabel(label)
            axis.grid(color=GRID)
    drawn = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(drawn.values(), drawn.keys(), frameon=False, ncols=4, loc="outside upper center", fontsize=9)
    return save(figure, path)


HEADLINE = {"BD3-LM, r = 4": "no latent (BD3-LM)", "codes, r = 4": "", "2048 codes, r = 4": "", "AR": "letter by letter"}


def draw_headline(results: dict, path: Path) -> Path:
    """What a latent is for, at a glance: blocks of four letters in one, two and four evaluations."""
    plt = pyplot()
    panels = [("bits", "certified bits per character"), ("real_words", "real words in samples, %")]
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 3.4), layout="constrained")
    for axis, (metric, label) in zip(axes, panels, strict=True):
        for name in (name for name in HEADLINE if name in results["systems"]):
            run = results["configurations"][name]
            rows = [row for row in as_trained(results) if (row["system"], row["metric"]) == (name, metric)]
            points = sorted((4 * row["setting"]["nfe"] / run["model"]["length"], row["value"]) for row in rows)
            if points:
                label_of = HEADLINE[name] or f"one of {run['model']['latent']['codes']:,} codes"
                look = look_of_system(run) | {"markersize": 10 if run["model"]["block_size"] == 1 else 6}
                axis.plot(*zip(*points, strict=True), label=label_of, **look)
        if (level := results.get("test_text", {}).get(metric)) is not None:
            axis.axhline(level, color=INK, linestyle="--", linewidth=1)
            axis.annotate(
                "other test text", (1, level), (0, -4), textcoords="offset points", va="top", color=INK, fontsize=9
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 2, 4], ["1", "2", "4"])
        axis.minorticks_off()
        axis.set_xlabel("evaluations of the network for four letters")
        axis.set_ylabel(label)
        axis.grid(color=GRID)
    axes[0].legend(frameon=False)
    return save(figure, path)


ONLY_CODES_DIFFER = r"(no latent|\d+ codes), r = \d+"


def scan_curves(results: dict) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """{(r, N): (codes, bits)} of systems that differ in nothing but blocks and codes; one code is no latent."""
    bits = {(r["system"], r["setting"]["steps"]): r["value"] for r in results["rows"] if r["metric"] == "bits"}
    curves: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for name, run in results["configurations"].items():
        if re.fullmatch(ONLY_CODES_DIFFER, name):
            r, latent = run["model"]["block_size"], run["model"]["latent"]
            for steps in {1, 2, r}:
                if (name, steps) in bits:
                    count = 1 if latent["kind"] == "none" else latent["codes"]
                    curves.setdefault((r, steps), []).append((count, bits[name, steps]))
    return {which: sorted(points) for which, points in sorted(curves.items())}


def scan_groups(results: dict) -> list[str]:
    """The systems that have variants, each followed by its variants; and those that stand alone, such as draft heads."""
    names = list(results["systems"])
    base = {name: next((other for other in names if name.startswith(f"{other}, ")), name) for name in names}
    plain = [name for name in names if base[name] == name]
    listed = [
        name
        for name in plain
        if name in {base[other] for other in names if other != name} or not re.fullmatch(ONLY_CODES_DIFFER, name)
    ]
    return [name for head in listed for name in names if base[name] == head]


def draw_scan(results: dict, path: Path) -> Path:
    """Certified bits by the number of codes and the size of blocks; beside, what else was tried."""
    plt = pyplot()
    colour = plt.get_cmap("tab10")
    groups = scan_groups(results)
    size = (13.5, max(4.4, 0.25 * len(groups) + 1.2))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained", width_ratios=(1, 1.3))
    curves = scan_curves(results)
    blocks = sorted({r for r, _ in curves})
    for (r, steps), points in curves.items():
        style = {1: "o-", 2: "o--"}.get(steps, "o:")
        x, y = zip(*points, strict=True)
        left.plot(x, y, style, markersize=4, color=colour(blocks.index(r)), label=f"r = {r}, N = {steps}")
    left.set_xscale("log", base=2)
    ticks = sorted({codes for points in curves.values() for codes, _ in points})
    left.set_xticks(ticks, ["none" if k == 1 else str(k) for k in ticks])
    left.minorticks_off()
    left.set_xlabel("codes")
    left.set_ylabel("certified bits per character")
    figure.suptitle(f"validation text of {results['data']}, one seed a row", fontsize=10)
    bits = {(r["system"], r["setting"]["steps"]): r["value"] for r in results["rows"] if r["metric"] == "bits"}
    vocabulary = max((run["model"]["vocab_size"] for run in results["configurations"].values()), default=2)
    worst = math.log2(vocabulary)  # of tokens drawn blindly; what is beyond is written at the edge
    for order, (steps, marker) in enumerate(((1, "o"), (2, "s"), (0, "^"))):
        found = [bits.get((name, steps or results["systems"][name]["block"]), math.nan) for name in groups]
        inside = [value if value <= worst else math.nan for value in found]
        label = f"N = {steps}" if steps else "N = r"
        heights = range(0, -len(groups), -1)
        right.plot(inside, heights, marker, markersize=5, color=colour(6 + order), label=label)
        for value, height in zip(found, heights, strict=True):
            if value > worst:
                place = {"xy": (1 - 0.09 * (2 - order), height), "xycoords": ("axes fraction", "data")}
                right.annotate(f"{value:.1f} \u2192", **place, ha="right", va="center", fontsize=7, color=colour(6 + order))
    heads = [name for name in groups if not any(name.startswith(f"{other}, ") for other in groups)]
    for name in heads[1:]:
        right.axhline(0.5 - groups.index(name), color=INK, linewidth=0.6)
    heads_of = {name: next(head for head in heads if name == head or name.startswith(f"{head}, ")) for name in groups}
    shown = [name if name == head else "   " + name.removeprefix(f"{head}, ") for name, head in heads_of.items()]
    right.set_yticks([-line for line in range(len(groups))], shown, fontsize=8)
    right.set_xlabel("certified bits per character")
    for axis in (left, right):
        axis.grid(color=GRID)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return save(figure, path)


def draw_accuracy_curves(curves: dict[str, list[dict]], nfe: int, path: Path) -> Path:
    """On a scale on which 90, 99 and 99.9 % are as far apart as 10, 1 and 0.1 %."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8.5, 3.8), layout="constrained")
    ticks = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
    for number, (name, points) in enumerate(curves.items()):
        x, y = [p["step"] for p in points], [min(max(p["solved"] / 100, ticks[0]), ticks[-1]) for p in points]
        style = "-" if name.startswith("ours") else "--"
        axis.plot(x, y, style, label=name, color=plt.get_cmap("tab10")(number), linewidth=1.6)
    axis.set_yscale("logit")
    axis.set_ylim(ticks[0] / 1.5, 1 - ticks[0] / 1.5)
    axis.set_yticks(ticks, ["\u2264 0.1", "1", "10", "50", "90", "99", "\u2265 99.9"])
    axis.minorticks_off()
    axis.set_xlabel("training steps")
    axis.set_ylabel("puzzles solved, %")
    axis.set_title(f"tested on logic puzzles unless said; order prob, NFE {nfe}, argmax", fontsize=10)
    axis.grid(color=GRID)
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save(figure, path)


def draw_filling(filling: dict, path: Path, panels: int = 6) -> Path:
    """Some steps of one puzzle side by side, with how sure the model was as colour."""
    import numpy as np

    plt = pyplot()
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    steps = [SimpleNamespace(**{k: np.array([v]) for k, v in frame.items()}) for frame in filling["frames"]]
    frames = board_frames(filling["puzzle"], steps)
    shown = sorted({round(i * (len(frames) - 1) / (panels - 1)) for i in range(panels)})
    figure, axes = plt.subplots(1, len(shown), figsize=(2.6 * len(shown), 2.9), layout="constrained", squeeze=False)
    for axis, index in zip(axes[0], shown, strict=True):
        canvas, guess, sure, new, title = frames[index]
        draw_board(axis, np.array(filling["puzzle"]), canvas, guess, sure, new, title, size=62)
    bar = figure.colorbar(ScalarMappable(Normalize(0, DARKEST), "Blues"), ax=axes[0], shrink=0.8, pad=0.01)
    bar.ax.set_ylim(0, NINES)
    bar.set_ticks([-np.log10(1 - p) for p in SURE], labels=[f"{p:.2%}".replace(".00", "") for p in SURE], fontsize=8)
    bar.set_label("how sure of a cell\nred frame: just written, gray: not yet", fontsize=8)
    return save(figure, path)


NINES, DARKEST = 4.0, 7.5  # as sure as colours tell apart, and beyond: digits must be seen on them
SURE = (0.5, 0.9, 0.99, 0.999, 0.9999)


def draw_several(rows: list[dict], path: Path) -> Path:
    """Valid grids in one draw against evaluations: puzzles with several solutions, and grids from nothing."""
    plt = pyplot()
    kinds = [k for k in ("multi", "grid") if any(row["setting"]["data"] == k for row in rows)]
    figure, axes = plt.subplots(1, len(kinds), figsize=(4.8 * len(kinds) + 2.4, 3.6), layout="constrained", squeeze=False)
    titles = {"multi": "puzzles with 2 to 50 solutions", "grid": "whole grids from nothing"}
    latents = list(dict.fromkeys(row["system"].partition(", ")[2] for row in rows))
    labels: dict[str, Any] = {}
    for axis, kind in zip(axes[0], kinds, strict=True):
        here = [row for row in rows if row["setting"]["data"] == kind and row["metric"] == "valid"]
        for number, latent in enumerate(latents):
            of_it = [row for row in here if row["system"].partition(", ")[2] == latent]
            if not of_it:
                continue
            fresh = any(row["setting"]["z"] == "fresh" for row in of_it)
            for z, line in (("fresh", "-"), ("once", "--")) if fresh else (("once", "-"),):
                shown = [row for row in of_it if row["setting"]["z"] == z or row["setting"]["nfe"] == 1]  # in one step alike
                shown.sort(key=lambda row: row["setting"]["nfe"])
                x, y, error = zip(*((r["setting"]["nfe"], r["value"], r["stderr"]) for r in shown), strict=True)
                colour = plt.get_cmap("tab10")(number)
                wide = max(1.2, 3 - 0.6 * number)  # so that curves that coincide are all seen
                style = {"linestyle": line, "linewidth": wide, "elinewidth": 1.2, "marker": "o", "markersize": 4}
                drawn = axis.errorbar(x, y, error, color=colour, **style)
                labels.setdefault(latent + (f", z {z}" if fresh else ""), drawn)
        ticks = sorted({row["setting"]["nfe"] for row in here})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("network evaluations")
        axis.set_ylabel("valid grids in one draw, %")
        axis.set_title(f"{titles[kind]}; rule sample, order prob", fontsize=10)
        axis.grid(color=GRID)
    figure.legend(list(labels.values()), list(labels), frameon=False, fontsize=9, loc="outside right upper", handlelength=4)
    return save(figure, path)


def draw_board(
    axis: Any, puzzle: Any, canvas: Any, guess: Any, confidence: Any, new: Any, title: str, size: float = 90
) -> None:
    """A board: clues in black, digits on a colour that says how sure the model was, the newest outlined.

    Those that are not written yet are gray, those that break a rule are red.
    """
    import numpy as np

    from vmd.data.sudoku_engine import clashing

    side = round(len(puzzle) ** 0.5)
    box = round(side**0.5)
    nines = np.clip(-np.log10(np.maximum(1 - confidence, 1e-9)), 0, NINES)  # 90 %, 99 %, 99.9 % ...: 1, 2, 3 ...
    axis.imshow(nines.reshape(side, side), cmap="Blues", vmin=0, vmax=DARKEST, extent=(0, side, side, 0))
    for line in range(side + 1):
        width = 2.0 if line % box == 0 else 0.5
        axis.plot([0, side], [line, line], color=INK, linewidth=width, clip_on=False)
        axis.plot([line, line], [0, side], color=INK, linewidth=width, clip_on=False)
    clash = clashing(canvas)
    for cell, digit in enumerate(canvas):
        row, column = divmod(cell, side)
        if new[cell]:
            axis.add_patch(pyplot().Rectangle((column + 0.07, row + 0.07), 0.86, 0.86, fill=False, color="#c0504d"))
        if digit > 0:
            colour = "#d00000" if clash[cell] else INK if puzzle[cell] else "#123a66"
            look = {"color": colour, "weight": "bold" if puzzle[cell] else "normal"}
        else:
            digit, look = guess[cell], {"color": "#7a7a7a"}
        if digit > 0:
            axis.text(column + 0.5, row + 0.54, str(int(digit)), ha="center", va="center", fontsize=size / side, **look)
    axis.set_axis_off()
    axis.set_title(title, fontsize=9)


def board_frames(puzzle: Any, steps: list) -> list[tuple]:
    """(canvas, guess, confidence, new, title) before the first step and after each, of the first row of a batch."""
    import numpy as np

    from vmd.data.sudoku_engine import clashing

    clues = np.asarray(puzzle)
    sure = np.full(len(clues), np.nan)
    frames = [(clues, clues, sure, np.zeros(len(clues), bool), f"{(clues > 0).sum()} clues")]
    for number, step in enumerate(steps, start=1):
        shown = step.guess if number == len(steps) else step.canvas  # the last grid is what the model would write
        digits, masked = np.asarray(shown[0]), np.asarray(step.masked[0])
        new = masked & (digits > 0)
        score = np.clip(np.asarray(step.score[0]), 0, 1)
        sure = np.where(masked, score, sure)
        filled, broken = (digits > 0).sum(), clashing(digits).sum()
        told = "the rules hold" if filled == len(digits) else f"{filled} of {len(digits)} cells"
        told = f"{broken} cells break the rules" if broken else told
        frames.append((digits, np.asarray(step.guess[0]), sure, new, f"evaluation {number}: {told}"))
    return frames


def animate_board(puzzle: Any, steps: list, path: Path, on_frame: Callable[[int, int], object] | None = None) -> Path:
    """A .gif of a board filling in. `on_frame(done, total)` is called for each picture."""
    plt = pyplot()
    from matplotlib.animation import FuncAnimation, PillowWriter

    frames = board_frames(puzzle, steps)
    figure, axis = plt.subplots(figsize=(4, 4.3), layout="constrained")

    def show(number: int) -> None:
        axis.clear()
        draw_board(axis, puzzle, *frames[min(number, len(frames) - 1)])

    partial = path.with_name(path.name + ".making.gif")
    try:
        movie = FuncAnimation(figure, show, frames=len(frames) + 4)  # the end stays a while
        movie.save(partial, writer=PillowWriter(fps=2), progress_callback=on_frame)
        write_atomically(path, partial.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path}: cannot write: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
        plt.close(figure)
    return path
