"""Results as tables: one structure (headers, rows of text), shown as markdown or in the terminal. Imports no torch."""

import shlex

from vmd.terminal import to_markdown

Table = tuple[list[str], list[list[str]]]

WITH_OWN_TABLES = ("ablations", "heads", "sudoku", "text", "text-scan")
DATA_NAMES = {
    "deterministic": "deterministic",
    "non-uniform": "non-uniform",
    "d1": "D1",
    "d2": "D2",
}


def data_name(data: str) -> str:
    return DATA_NAMES.get(data, data.replace("dependence-", "p = "))


def number(value: float | None, digits: int, stderr: float | None = None) -> str:
    if value is None:
        return ""
    if stderr is None:
        return f"{value:.{digits}f}"
    while 0 < stderr < 0.95 * 10**-digits and digits < 5:  # enough digits to show the error
        digits += 1
    return f"{value:.{digits}f} ± {stderr:.{digits}f}"


def find(rows: list[dict], **wanted) -> dict | None:
    for row in rows:
        flat = row["setting"] | {"system": row["system"], "metric": row["metric"]}
        if all(flat.get(key) == value for key, value in wanted.items()):
            return row
    return None


def accuracy_and_kl(rows: list[dict], **wanted) -> str:
    """Such as "99.46 ± 0.03 % · 0.0071 ± 0.0003"; without the accuracy where every sequence is valid."""
    accuracy, kl = find(rows, metric="accuracy", **wanted), find(rows, metric="kl", **wanted)
    parts = [] if accuracy is None else [number(accuracy["value"], 2, accuracy["stderr"]) + " %"]
    digits = 4 if kl is not None and kl["value"] < 0.1 else 3
    return " · ".join(parts if kl is None else [*parts, number(kl["value"], digits, kl["stderr"])])


def printed(rows: list[dict], **wanted) -> str:
    accuracy, kl = find(rows, metric="accuracy", **wanted), find(rows, metric="kl", **wanted)
    parts = [f"{accuracy['paper']:g} %"] if accuracy and accuracy["paper"] is not None else []
    return " · ".join([*parts, f"{kl['paper']:g}"] if kl and kl["paper"] is not None else parts)


def summary_table(results: dict) -> Table:
    """Of one run: see `merged_table`; of the ablations, certified bits; of Sudoku, the paper's table; of text, by NFE."""
    special = {"ablations": bits_table, "heads": heads_table, "sudoku": sudoku_table}
    special |= {"text": text_summary, "text-scan": text_bits_table}
    return special[results["name"]](results) if results["name"] in special else merged_table([results])


def merged_table(runs: list[dict]) -> Table:
    """A row for each data set and number of evaluations; in each cell the accuracy and KL(data || samples) in nats."""
    rows = [row for run in runs for row in run["rows"]]
    columns: list[tuple[str, dict]] = [("MDM", {"system": "MDM", "rule": "sample", "preset": runs[0]["preset"]})]
    for run in sorted(runs, key=lambda run: run["preset"], reverse=True):
        which = "ours" if run["preset"] == "ours" else "paper's settings"
        for rule in ("argmax", "sample"):
            columns.append((f"VMD {which}, {rule}", {"system": "VMD", "rule": rule, "preset": run["preset"], "z": "once"}))
    headers = ["data", "blocks", "NFE", "MDM, printed", "MDM", "VMD, printed", *(name for name, _ in columns[1:])]
    lines = []
    for data, block, steps, nfe in sorted_places(rows):
        here = {"data": data, "block": block, "steps": steps}
        cells = [accuracy_and_kl(rows, **here, **wanted) for _, wanted in columns]
        mdm_printed = printed(rows, **here, system="MDM", rule="sample")
        vmd_printed = printed(rows, **here, system="VMD", rule="argmax", z="once")
        lines.append([data_name(data), str(nfe // steps), str(nfe), mdm_printed, cells[0], vmd_printed, *cells[1:]])
    return headers, lines


def sorted_places(rows: list[dict]) -> list[tuple[str, int, int, int]]:
    """(data, block, steps, nfe) in the order of the paper's tables."""
    places = {(r["setting"]["data"], r["setting"]["block"], r["setting"]["steps"], r["setting"]["nfe"]) for r in rows}
    order = list(dict.fromkeys(r["setting"]["data"] for r in rows))
    return sorted(places, key=lambda p: (order.index(p[0]), p[1], p[2]))


def detail_table(results: dict) -> Table:
    """Every row of the results."""
    headers = ["system", "preset", "data", "block", "steps", "NFE", "rule", "z", "N", "metric", "value", "printed"]
    names = {"accuracy": "accuracy, %", "kl": "KL, nats", "kl_exact": "exact KL, nats"}
    lines = []
    for row in results["rows"]:
        s = row["setting"]
        digits = 2 if row["metric"] == "accuracy" else 4
        value = number(row["value"], digits, row["stderr"])
        # The paper draws z once and counts samples; beside other rows its figure would compare unlike things.
        comparable = row["metric"] != "kl_exact" and (s["z"] == "once" or (row["system"], s["rule"]) == ("MDM", "sample"))
        paper = f"{row['paper']:g}" if comparable and row["paper"] is not None else ""
        values = [s["preset"], data_name(s["data"]), s["block"], s["steps"], s["nfe"], s["rule"], s["z"], f"{s['n']:,}"]
        lines.append([row["system"], *map(str, values), names[row["metric"]], value, paper])
    return headers, lines


def render(results: dict) -> str:
    """table.md: a summary and every row."""
    head = f"# {results['name']}\n\n{provenance(results)}\n"
    if results["name"] in WITH_OWN_TABLES:
        makers = {"sudoku": sudoku_tables, "text": text_tables, "text-scan": text_tables}
        tables = makers.get(results["name"], ablation_tables)(results)
        return head + "\n".join(f"## {title}\n\n{to_markdown(*table)}" for title, table in tables)
    return head + f"{to_markdown(*summary_table(results))}\n## Every row\n\n{to_markdown(*detail_table(results))}"


def provenance(results: dict) -> str:
    """By which commands, on which machines, in which time. Systems that were made in several goes say so each."""
    seeds = len(results["seeds"])
    effort = "for everything" if "systems" not in results else "of training and measuring"
    told = "one seed a row" if "systems" in results else f"{seeds} seed{'s' if seeds > 1 else ''}"
    rest = f"{results['seconds']:.0f} s {effort}, {told}."
    systems = results.get("systems", {})
    commands = {name: about.get("command", results["command"]) for name, about in systems.items()}
    if len(set(commands.values())) > 1:
        commands = {name: of_one_system(command) for name, command in commands.items()}
    made: dict[tuple[str, str], list[str]] = {}
    for name, about in systems.items():
        machine = about.get("hardware", results["hardware"])["name"]
        made.setdefault((commands[name], machine), []).append(name)
    if len(made) < 2:
        ((command, machine),) = made or [(results["command"], results["hardware"]["name"])]
        return f"`{command}`: {machine}, {rest}\n"
    return "".join(f"`{command}`: {machine} ({'; '.join(names)}).\n" for (command, machine), names in made.items()) + (
        f"Together {rest}\n"
    )


def of_one_system(command: str) -> str:
    """A command of some systems of a table as one for any of them. results.json has which they were, in how many goes, and
    in which folder."""
    words = shlex.split(command)
    pairs = list(zip(["", *words], words, strict=False))
    kept = [word for before, word in pairs if word != "--resume" and not {"--only", "--out"} & {before, word}]
    return f"{shlex.join(kept)} --only SYSTEM" if "--only" in words else command


def ablation_tables(results: dict) -> list[tuple[str, Table]]:
    if results["name"] == "heads":
        title = "One step, sample rule: valid sequences and exact KL; milliseconds of a training step of all models"
        return [(title, heads_table(results)), ("Every row", ablation_rows(results))]
    return [
        ("Certified bits per token, trained on the N-step bound, z fresh", bits_table(results)),
        ("One step, sample rule: valid sequences and exact KL", one_step_table(results)),
        ("Which training objective: certified bits above the entropy, mean over data", objectives_table(results)),
        ("Every row", ablation_rows(results)),
    ]


def best_bits(rows: list[dict], **wanted) -> dict | None:
    """The certified bits with the most samples of z."""
    counts = sorted({row["setting"]["iwae"] for row in rows if row["metric"] == "bits"}, reverse=True)
    found = [row for s in counts if (row := find(rows, metric="bits", iwae=s, **wanted)) is not None]
    return found[0] if found else None


def ablation_systems(results: dict) -> list[str]:
    return list(dict.fromkeys(row["system"] for row in results["rows"]))


def bits_table(results: dict) -> Table:
    """A row for each data set and number of steps, a column for each latent; the entropy is what nothing can beat."""
    rows, systems = results["rows"], ablation_systems(results)
    lines = []
    for data, _, steps, _ in sorted_places([row for row in rows if row["metric"] == "bits"]):
        cells = []
        for system in systems:
            z = "fresh" if steps > 1 and system != "no z" else "once"
            row = best_bits(rows, system=system, objective="N-step bound, z fresh", data=data, steps=steps, z=z)
            cells.append("" if row is None else number(row["value"], 4, row["stderr"]))
        lines.append([data_name(data), str(steps), f"{results['entropy'][data]:.4f}", *cells])
    return ["data", "N", "entropy", *systems], lines


def exact_cell(rows: list[dict], **wanted) -> str:
    """Share of valid sequences and KL in one step, both by summation or integration over z."""
    share, kl = (find(rows, metric=metric, steps=1, **wanted) for metric in ("accuracy_exact", "kl_exact"))
    parts = [] if share is None else [number(share["value"], 2, share["stderr"]) + " %"]
    return " · ".join(parts if kl is None else [*parts, number(kl["value"], 4, kl["stderr"])])


def one_step_table(results: dict) -> Table:
    rows, systems = results["rows"], ablation_systems(results)
    objectives = list(dict.fromkeys(row["setting"]["objective"] for row in rows))
    lines = []
    for data in results["entropy"]:
        for objective in objectives[:3]:
            cells = []
            for system in systems:
                cells.append(exact_cell(rows, system=system, data=data, objective=objective))
            lines.append([data_name(data), objective, *cells])
    return ["data", "trained on", *systems], lines


def heads_table(results: dict) -> Table:
    """A row for each head and number of codes."""
    rows, data = results["rows"], list(results["entropy"])
    blocks = sorted({row["setting"]["block"] for row in rows})
    lines = []
    for system in ablation_systems(results):
        cells = [exact_cell(rows, system=system, data=name) for name in data]
        for block in blocks:
            pace = find(rows, metric="ms_per_step", system=system, block=block)
            cells.append("" if pace is None else f"{pace['value']:.1f}")
        lines.append([system, *cells])
    return ["head and codes", *map(data_name, data), *(f"{block} tokens, ms" for block in blocks)], lines


def objectives_table(results: dict) -> Table:
    """For each latent and training objective, the mean over data sets of certified bits per token minus the entropy."""
    rows = results["rows"]
    bits = [row for row in rows if row["metric"] == "bits"]
    places = sorted({(r["setting"]["block"], r["setting"]["steps"], r["setting"]["z"]) for r in bits})
    lines = []
    for system, objective in dict.fromkeys((row["system"], row["setting"]["objective"]) for row in bits):
        cells = []
        for block, steps, z in places:
            drawn = z if system != "no z" else "once"  # nothing is drawn
            here = {"system": system, "objective": objective, "block": block, "steps": steps, "z": drawn}
            data = dict.fromkeys(row["setting"]["data"] for row in bits if row["setting"]["block"] == block)
            found = [(d, best_bits(rows, data=d, **here)) for d in data]
            excess = [row["value"] - results["entropy"][d] for d, row in found if row is not None]
            cells.append(f"{sum(excess) / len(excess):.4f}" if excess else "")
        lines.append([system, objective, *cells])
    names = [f"{b} tokens, N = {n}" + (f", {z}" if n > 1 else "") for b, n, z in places]
    return ["latent", "trained on", *names], lines


def ablation_rows(results: dict) -> Table:
    headers = ["latent", "trained on", "data", "N", "NFE", "z", "rule", "order", "IWAE", "n", "metric", "value"]
    names = {
        "bits": "certified bits per token",
        "surrogate": "surrogate (not a bound with z), bits per token",
        "accuracy": "accuracy, %",
        "accuracy_exact": "accuracy, %, by summation",
        "kl": "KL, nats",
        "kl_exact": "exact KL, nats",
        "ms_per_step": "milliseconds of a training step of all models",
    }
    lines = []
    for row in results["rows"]:
        s = row["setting"]
        digits = 2 if row["metric"].startswith(("accuracy", "ms")) else 4
        values = [s.get(key, "") for key in ("objective", "data", "steps", "nfe", "z", "rule", "order", "iwae", "n")]
        lines.append([row["system"], *map(str, values), names[row["metric"]], number(row["value"], digits, row["stderr"])])
    return headers, lines


def sudoku_tables(results: dict) -> list[tuple[str, Table]]:
    tables = [
        ("Solved, % of logic puzzles, argmax", sudoku_table(results)),
        ("Every order and number of evaluations, logic puzzles, argmax, % solved (of so many)", sudoku_orders(results)),
        ("Other puzzles and revising, argmax, % solved", sudoku_kinds(results)),
        ("Best of S tries by the rules, order margin, % solved at evaluations per puzzle", sudoku_tries(results)),
        ("Puzzles with several solutions, rule sample, order prob", sudoku_several(results)),
        ("Whole grids from nothing, rule sample, order prob, % valid", sudoku_grids(results)),
    ]
    return [(title, table) for title, table in tables if table[1]]


def percent(found: dict | None) -> str:
    return "" if found is None else number(found["value"], 1, found["stderr"])


def plain_rows(results: dict) -> list[dict]:
    """One try with one z, nothing revised, a greedy order."""
    marks = ("revise", "order_noise", "tries")
    rows = [r for r in results["rows"] if r["metric"] == "solved" and not any(r["setting"].get(m) for m in marks)]
    return [r for r in rows if r["setting"]["z"] == "once"]


def sudoku_table(results: dict) -> Table:
    """The paper's table with a row for each system: logic puzzles, two orders, three numbers of evaluations."""
    places = [(order, steps) for order in ("prob", "margin") for steps in (5, 10, 20)]
    rows, lines = plain_rows(results), []
    for name, about in results["systems"].items():
        if about["trained_on"] not in ("logic", "any"):
            continue
        found = [find(rows, system=name, data="logic", order=o, steps=s) for o, s in places]
        lines.append([name, *sudoku_cost(about), *map(percent, found)])
        figures = ["" if r is None or r.get("paper") is None else f"{r['paper']:.1f}" for r in found]
        if any(figures):
            lines.append(["  as the paper prints it", "", "", "", *figures])
    return ["system", *SUDOKU_COST, *(f"{o}, NFE {s}" for o, s in places)], lines


SUDOKU_COST = ("parameters", "puzzles seen", "minutes")


def sudoku_cost(about: dict) -> list[str]:
    return [model_size(about), f"{about['rows_seen'] / 1e6:.1f} M", f"{about['training_seconds'] / 60:.1f}"]


def sudoku_orders(results: dict) -> Table:
    rows = [r for r in plain_rows(results) if r["setting"]["data"] == "logic"]
    counts = sorted({r["setting"]["steps"] for r in rows})
    lines = []
    for name, order in dict.fromkeys((r["system"], r["setting"]["order"]) for r in rows):
        found = [find(rows, system=name, order=order, steps=c) for c in counts]
        lines.append([name, order, *("" if r is None else f"{percent(r)} ({r['setting']['n']:,})" for r in found)])
    return ["system", "order", *(f"NFE {c}" for c in counts)], lines


def sudoku_kinds(results: dict) -> Table:
    """Puzzles of every kind, and decoders that revise or shuffle."""
    rows = [r for r in results["rows"] if r["metric"] == "solved" and "tries" not in r["setting"]]
    lines = []
    for r in rows:
        s = r["setting"]
        special = "revising" if s.get("revise") else "" if s["z"] == "once" else f"z {s['z']} at every step"
        special += f"{', ' if special else ''}noise {s['order_noise']:g} on the order" if s.get("order_noise") else ""
        if s["data"] != "logic" or special:
            lines.append([r["system"], s["data"], f"{s['n']:,}", s["order"], str(s["nfe"]), special, percent(r)])
    return ["system", "puzzles", "n", "order", "NFE", "", "solved"], lines


def sudoku_tries(results: dict) -> Table:
    rows = [r for r in results["rows"] if "tries" in r["setting"]]
    counts = sorted({r["setting"]["tries"] for r in rows})
    lines = []
    for name, data, revise in dict.fromkeys((r["system"], r["setting"]["data"], r["setting"]["revise"]) for r in rows):
        here = {"system": name, "data": data, "revise": revise}
        cells = []
        for found in (find(rows, **here, early=False, tries=count) for count in counts):
            cells.append("" if found is None else f"{found['value']:.2f} at {found['setting']['evaluations']:.1f}")
        early = find(rows, **here, early=True, tries=counts[-1])
        cells.append("" if early is None else f"{early['value']:.2f} at {early['setting']['evaluations']:.1f}")
        n = find(rows, **here)["setting"]["n"]  # type: ignore[index]
        lines.append([name, data, f"{n:,}", "yes" if revise else "no", *cells])
    last = f"{counts[-1]} tries, stopping early" if counts else ""
    return ["system", "puzzles", "n", "revising", *(f"{c} tr{'y' if c == 1 else 'ies'}" for c in counts), last], lines


def sudoku_several(results: dict) -> Table:
    rows = [r for r in results["rows"] if r["setting"]["data"] == "multi"]
    counts = sorted({r["setting"]["steps"] for r in rows})
    lines = []
    for name, z in dict.fromkeys((r["system"], r["setting"]["z"]) for r in rows):
        cells = []
        for count in counts:
            share, kl, ideal = (
                find(rows, system=name, z=z, steps=count, metric=m)
                for m in ("valid", "kl_to_uniform", "kl_to_uniform_ideal")
            )
            if share is None:
                cells.append("")
                continue
            cells.append(
                percent(share)
                + " %"
                + ("" if kl is None or ideal is None else f" · {kl['value']:.3f} ({ideal['value']:.3f})")
            )
        lines.append([name, *sudoku_cost(results["systems"][name]), "" if name.endswith("no z") else z, *cells])
    return ["valid · KL to uniform (if drawn evenly)", *SUDOKU_COST, "z", *(f"NFE {c}" for c in counts)], lines


def sudoku_grids(results: dict) -> Table:
    rows = [r for r in results["rows"] if r["setting"]["data"] == "grid"]
    counts = sorted({r["setting"]["steps"] for r in rows})
    lines = []
    for name, z in dict.fromkeys((r["system"], r["setting"]["z"]) for r in rows):
        cells = [percent(find(rows, system=name, z=z, steps=c, metric="valid")) for c in counts]
        lines.append([name, *sudoku_cost(results["systems"][name]), "" if name.endswith("no z") else z, *cells])
    return ["system", *SUDOKU_COST, "z", *(f"NFE {c}" for c in counts)], lines


def text_tables(results: dict) -> list[tuple[str, Table]]:
    if results["name"] == "text-scan":
        return [("Certified bits per character of the validation text", text_bits_table(results))]
    tables = [
        ("Certified bits per character of the test text, and real words of samples, by evaluations", text_summary(results)),
        ("Certified bits per character of the test text", text_bits_table(results)),
        ("Against the four steps of BD3-LM, r = 4: paired difference, bits per character", text_paired_table(results)),
        ("Samples at temperature 1, random order", text_samples_table(results)),
    ]
    return [(title, table) for title, table in tables if table[1]]


def as_trained(results: dict) -> list[dict]:
    """Rows of sampled tokens; of a system that was trained for one number of steps, at that number alone."""
    aims = {name: run["objective"] for name, run in results["configurations"].items()}
    return [
        row
        for row in results["rows"]
        if row["setting"].get("rule") == "sample"
        and (aims[row["system"]]["masking"] != "steps" or row["setting"]["steps"] in aims[row["system"]]["steps"])
    ]


def model_size(about: dict) -> str:
    counts = about["parameters"]
    size = f"{(counts['backbone'] + counts['pathway'] + counts['prior']) / 1e6:.1f} M"
    return size + (f" + {counts['encoder'] / 1e6:.1f} M encoder" if counts["encoder"] else "")


def text_summary(results: dict) -> Table:
    """Systems with blocks of any size compare by evaluations of the network for a row of text."""
    rows = as_trained(results)
    names = [name for name, about in results["systems"].items() if not about["judge"]]
    counts = sorted({row["setting"]["nfe"] for row in rows if row["metric"] == "bits" and row["system"] in names})
    lines = []
    for name in names:
        about, cells = results["systems"][name], []
        for nfe in counts:
            bits, words = (find(rows, system=name, metric=metric, nfe=nfe) for metric in ("bits", "real_words"))
            parts = [] if bits is None else [number(bits["value"], 3, bits["stderr"])]
            cells.append(" · ".join(parts + ([] if words is None else [f"{words['value']:.1f} %"])))
        lines.append([name, model_size(about), f"{about['training_seconds'] / 60:.1f}", *cells])
    return ["system", "parameters", "minutes", *(f"{nfe} evaluations" for nfe in counts)], lines


def text_bits_table(results: dict) -> Table:
    """Bits by steps per block; perplexity at all steps, and as the paper prints it; what z carries; the objective."""
    rows, lines = results["rows"], []
    for name, about in results["systems"].items():
        r = about["block"]
        everything = find(rows, system=name, metric="bits", steps=r)
        cells = [
            ""
            if (found := find(rows, system=name, metric="bits", steps=n)) is None
            else number(found["value"], 4, found["stderr"])
            for n in (1, 2, 4)
        ]
        surrogate, bound = (find(rows, system=name, metric=metric) for metric in ("surrogate", "own_bound"))
        trained = ""
        if bound is not None:
            over = bound["setting"].get("mean_of", [])
            what = "bound" if len(over) < 2 else f"mean of the bounds at N = {', '.join(map(str, over))}"
            trained = f"{bound['value']:.4f} ({what})"
        if surrogate is not None:
            apart = find(rows, system=name, metric="surrogate_apart")
            told = "" if apart is None else f", {signed(apart)} of N = r"
            trained = f"{surrogate['value']:.4f} (surrogate{told})"
        whole = "" if everything is None else number(everything["value"], 4, everything["stderr"])
        perplexity = "" if everything is None else f"{2 ** everything['value']:.3f}"
        printed = "" if everything is None or everything.get("paper") is None else f"{2 ** everything['paper']:.3f}"
        seen = f"{about['characters'] / 1e6:.0f} M"
        carried = "" if about.get("latent_kl") is None else f"{about['latent_kl']:.2g}"
        minutes = f"{about['training_seconds'] / 60:.1f}"
        lines.append([name, model_size(about), seen, minutes, str(r), whole, perplexity, printed, *cells, carried, trained])
    steps = ["N = r", "perplexity", "printed", "N = 1", "N = 2", "N = 4"]
    headers = ["system", "parameters", "characters seen", "minutes", "r", *steps, "KL of z, nats a block", "objective"]
    slack = {name: [find(rows, system=name, metric="order_slack", steps=n) for n in (2, 4)] for name in results["systems"]}
    if not any(any(some) for some in slack.values()):
        return headers, lines
    for line in lines:
        line[-2:-2] = ["" if found is None else number(found["value"], 4, found["stderr"]) for found in slack[line[0]]]
    headers[-2:-2] = [f"the order's part of N = {n}" for n in (2, 4)]
    return headers, lines


def signed(apart: dict) -> str:
    return f"{apart['value']:+.4f} ± {apart['stderr'] or 0:.4f}"


def text_paired_table(results: dict) -> Table:
    """By steps per block: a system's bits less those of one other, row by row of text."""
    rows = [row for row in results["rows"] if row["metric"] == "bits_apart"]
    counts = sorted({row["setting"]["steps"] for row in rows})
    lines = []
    for name, other in {row["system"]: row["setting"]["from"] for row in rows}.items():
        found = [find(rows, system=name, steps=count) for count in counts]
        against = f"{other['system']}, N = {other['steps']}"
        lines.append([name, against, *("" if row is None else signed(row) for row in found)])
    return ["system", "against", *(f"N = {count}" for count in counts)], lines


YARDSTICKS = {"test_text": "other rows of the test text", "random_letters": "letters drawn one by one, as often as in text"}


SAMPLE_METRICS = {  # the name of its column, and digits
    "real_words": ("real words, %", 1),
    "judged_bits": ("judge's bits", 3),
    "counted_bits": ("n-gram judge's bits", 3),
    "divergence": ("4-gram divergence", 4),
    "entropy": ("own entropy, bits", 3),
    "distinct": ("distinct 4-grams", 4),
    "characters_per_second": ("characters/s", 0),
}


def text_samples_table(results: dict) -> Table:
    rows = [r for r in results["rows"] if "temperature" in r["setting"]]
    lines = []
    for yardstick, name in YARDSTICKS.items():
        if found := results.get(yardstick):
            cells = [f"{found[m]:.{digits}f}" if m in found else "" for m, (_, digits) in SAMPLE_METRICS.items()]
            lines.append([name, "", "", "", *cells])
    for name, steps, rule in dict.fromkeys((r["system"], r["setting"]["steps"], r["setting"]["rule"]) for r in rows):
        here = {m: find(rows, system=name, steps=steps, rule=rule, metric=m) for m in SAMPLE_METRICS}
        nfe = next(row["setting"]["nfe"] for row in here.values() if row is not None)
        cells = ["" if row is None else number(row["value"], SAMPLE_METRICS[m][1], row["stderr"]) for m, row in here.items()]
        lines.append([name, str(steps), str(nfe), rule, *cells])
    return ["system", "steps per block", "NFE", "rule", *(name for name, _ in SAMPLE_METRICS.values())], lines


def bench_table(record: dict) -> tuple[list[str], list[list[str]]]:
    """What was measured, for people."""
    training = record["what"] == "train"
    headers = [record["vary"]] if record["vary"] else []
    headers += ["tokens/s", "ms per step", "utilisation", "peak GiB"] if training else []
    headers += [] if training else ["batch", "steps per block", "NFE", "tokens/s", "ms per block", "utilisation", "peak GiB"]
    headers += ["against no latent", "against naive"]
    lines = []
    for row in record["rows"]:
        line = [str(row["value"])] if record["vary"] else []
        if "error" in row:
            lines.append(line + [row["error"]] + ["-"] * (len(headers) - len(line) - 1))
            continue
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        if training:
            line += [
                f"{row['tokens_per_second']:,.0f}",
                f"{row['milliseconds']:.1f}",
                f"{100 * row['utilisation']:.1f} %",
                peak,
            ]
            line.append(f"{100 * row['speed_of_no_latent']:.0f} % of its speed" if "without_latent" in row else "-")
            line.append(f"{row['times_naive']:.1f} x as fast" if "naive" in row else "-")
        else:
            line += [str(row["batch"]), str(row["steps"]), str(row["nfe"]), f"{row['tokens_per_second']:,.0f}"]
            use = f"{100 * row['utilisation']:.2g} %" if "utilisation" in row else "-"
            line += [f"{row['milliseconds_per_block']:.2f}", use, peak]
            line.append(f"{row['time_of_no_latent']:.2f} x its time" if "without_latent" in row else "-")
            line.append(f"{row['times_naive']:.1f} x as fast" if "naive" in row else "-")
        lines.append(line)
    return headers, lines
