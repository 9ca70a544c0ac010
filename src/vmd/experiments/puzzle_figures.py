"""Pictures of the table of solvers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vmd.board_figures import DARKEST, NINES, SURE, board_frames, draw_board
from vmd.experiments.tables import plain_rows
from vmd.plotting import GRID, pyplot, save


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
