"""Pictures of results. Needs matplotlib (the extra `plots`)."""

import json
from pathlib import Path

from vmd.experiments.puzzle_figures import draw_sudoku
from vmd.experiments.report import read_results
from vmd.experiments.tables import best_bits, data_name, find, sorted_places
from vmd.experiments.text_figures import HEADLINE, draw_headline, draw_scan, draw_text
from vmd.plotting import GRID, INK, pyplot, save

COLOURS = {"MDM": "#b0b0b0", "VMD, printed": "#e8a33d", "VMD argmax": "#1f5fa8", "VMD sample": "#7fb2e5"}


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
