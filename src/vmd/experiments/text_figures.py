"""Pictures of text tables: bits, words and judges by evaluations, and what decides how much codes gain."""

import math
import re
from pathlib import Path

from vmd.experiments.tables import as_trained
from vmd.plotting import GRID, INK, pyplot, save


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
