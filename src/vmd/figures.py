"""Pictures of results. Needs matplotlib (`pip install vmd[plots]`)."""

import json
from pathlib import Path

from vmd.config import InvalidInput
from vmd.report import read_results
from vmd.tables import data_name, find, sorted_places

INK, GRID = "#222222", "#dddddd"
COLOURS = {"MDM": "#b0b0b0", "VMD, printed": "#e8a33d", "VMD argmax": "#1f5fa8", "VMD sample": "#7fb2e5"}


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise InvalidInput("figures need matplotlib: pip install 'vmd[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.edgecolor": INK, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def draw_figures(folder: Path) -> list[Path]:
    """All figures of a results folder, from its JSON files alone."""
    results = read_results(folder / "results.json")
    made = []
    if (folder / "heatmaps.json").exists():
        heatmaps = json.loads((folder / "heatmaps.json").read_text())
        made += [draw_heatmaps(data, tables, results, folder / f"heatmap-{data}.png") for data, tables in heatmaps.items()]
    if results["name"] == "four-token":
        made.append(draw_bars(results, folder / "four-token.png"))
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
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


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
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
