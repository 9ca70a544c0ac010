"""Systems compared row by row: the nats of every scored row are kept in a small file, and differences have their own errors.

A text is easy or hard for all systems alike: that is most of a system's standard error, and drops out of a difference.
"""

import json
import lzma
import math
from pathlib import Path

import torch
from torch import Tensor

from vmd.config import require
from vmd.files import write_atomically
from vmd.likelihood import in_bits

NATS_FILE = "nats.json.xz"
REFERENCES = ("BD3-LM, r = 4", "BD3-LM, r = 4, second seed")  # the first whose nats are kept
REFERENCE_STEPS = 4
METRIC = "bits_apart"
SAME_BITS = 1e-5  # above what rounded nats change


def write_nats(path: Path, nats: dict[int, Tensor], scored: str) -> None:
    """Of {steps: (n,)}, as exact as float32; `scored` is the hash of the rows."""
    kept = {steps: [round(value, 4) for value in some.tolist()] for steps, some in nats.items()}
    write_atomically(path, lzma.compress(json.dumps({"scored_sha256": scored, "nats": kept}).encode()))


def read_nats(path: Path, bits: list[dict], scored: str, length: int) -> dict[int, Tensor]:
    """{steps: (n,)}, of the rows that were scored, and of the system whose bits these are."""
    try:
        kept = json.loads(lzma.decompress(path.read_bytes()))
        of = kept["scored_sha256"]
        nats = {int(steps): torch.tensor(some, dtype=torch.float64) for steps, some in kept["nats"].items()}
        whole = all(nats[row["setting"]["steps"]].shape == (row["setting"]["n"],) for row in bits)
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole, of = False, scored
    require(of == scored, f"{path}: nats of other rows of the text: expected those that this table scores")
    require(whole, f"{path}: expected nats as `vmd reproduce text` keeps them")
    same = all(abs(in_bits(nats[row["setting"]["steps"]], length).value - row["value"]) < SAME_BITS for row in bits)
    require(same, f"{path}: nats of another run: expected those of the bits in the results")
    return nats


def pair_all(done: dict[str, dict], files: dict[str, Path], scored: str, length: int) -> bool:
    """Every system whose nats are kept less the reference; each is compared once. True: there is news.

    A system whose file is gone keeps the rows it has, unless the bits that they are the difference of are gone, too.
    """
    bits = {name: [row for row in part["rows"] if row["metric"] == "bits"] for name, part in done.items()}
    values = {(name, row["setting"]["steps"]): row["value"] for name, rows in bits.items() for row in rows}
    files = {name: path for name, path in files.items() if name in done and path.is_file()}
    reference = next((name for name in REFERENCES if name in files), "")
    news = False
    for name, part in done.items():
        paired = [row for row in part["rows"] if row["metric"] == METRIC and is_difference(row, values)]
        against = {row["setting"]["from"]["system"] for row in paired}
        if reference and name in files and not against & {reference, REFERENCES[0]}:
            own, base = (read_nats(files[which], bits[which], scored, length) for which in (name, reference))
            paired = paired_rows(name, bits[name], own, reference, base[REFERENCE_STEPS], length)
        rows = [row for row in part["rows"] if row["metric"] != METRIC] + paired
        news = news or rows != part["rows"]
        part["rows"] = rows
    return news


def paired_rows(
    name: str, bits: list[dict], nats: dict[int, Tensor], reference: str, base: Tensor, length: int
) -> list[dict]:
    rows = []
    for row in bits:
        steps = row["setting"]["steps"]
        if (name, steps) != (reference, REFERENCE_STEPS):
            apart = in_bits(nats[steps] - base, length)
            setting = {key: row["setting"][key] for key in ("steps", "nfe", "n")}
            setting["from"] = {"system": reference, "steps": REFERENCE_STEPS}
            rows.append({"system": name, "setting": setting, "metric": METRIC, "value": apart.value, "stderr": apart.stderr})
    return rows


def is_difference(row: dict, values: dict[tuple[str, int], float]) -> bool:
    """Of bits that are in the table now: neither system was trained anew."""
    other = row["setting"]["from"]
    compared = ((row["system"], row["setting"]["steps"]), (other["system"], other["steps"]))
    own, base = (values.get(which, math.nan) for which in compared)
    return abs(row["value"] - (own - base)) < SAME_BITS
