"""Differences of two systems, row by row: their errors, what they are from, and files that are not theirs."""

import json
import lzma
import math

import pytest
import torch

from vmd.config import InvalidInput
from vmd.experiments.paired import NATS_FILE, REFERENCES, pair_all, write_nats
from vmd.likelihood import in_bits

LENGTH, ROWS, SCORED = 256, 2_000, "a" * 64
FIRST, SECOND = REFERENCES
TEXTS = 270 + 50 * torch.randn(ROWS, generator=torch.Generator().manual_seed(0))  # easy and hard, for all systems


def system(seed: int) -> dict[int, torch.Tensor]:
    """{steps: nats}: those of the texts, and a little of its own."""
    generator = torch.Generator().manual_seed(seed)
    return {steps: TEXTS + 5 * torch.randn(ROWS, generator=generator) for steps in (1, 2, 4)}


def bits_of(name: str, nats: dict[int, torch.Tensor]) -> dict:
    rows = []
    for steps, some in nats.items():
        bits, setting = in_bits(some, LENGTH), {"steps": steps, "nfe": 64 * steps, "n": ROWS, "rule": "sample"}
        rows.append({"system": name, "setting": setting, "metric": "bits", "value": bits.value, "stderr": bits.stderr})
    return {"rows": rows}


@pytest.fixture
def table(tmp_path):
    """(done, {system: its file}, {system: its nats}), all kept."""
    nats = {name: system(seed) for seed, name in enumerate((FIRST, SECOND, "ours"), start=1)}
    files = {name: tmp_path / f"{seed}-{NATS_FILE}" for seed, name in enumerate(nats)}
    for name, path in files.items():
        write_nats(path, nats[name], SCORED)
    return {name: bits_of(name, nats[name]) for name in nats}, files, nats


def apart(done: dict, name: str = "ours") -> dict[int, dict]:
    return {row["setting"]["steps"]: row for row in done[name]["rows"] if row["metric"] == "bits_apart"}


def test_a_paired_error_is_that_of_the_differences_and_smaller(table):
    done, files, nats = table
    assert pair_all(done, files, SCORED, LENGTH)
    unpaired = {row["setting"]["steps"]: row["stderr"] for row in done["ours"]["rows"] if row["metric"] == "bits"}
    for steps, row in apart(done).items():
        each = (nats["ours"][steps] - nats[FIRST][4]).double() / (LENGTH * math.log(2))
        assert abs(row["value"] - float(each.mean())) < 1e-6
        assert abs(row["stderr"] - float(each.std()) / ROWS**0.5) < 1e-6
        assert row["stderr"] < unpaired[steps] / 5
    assert list(apart(done)) == list(apart(done, SECOND)) == [1, 2, 4]
    assert list(apart(done, FIRST)) == [1, 2]  # the four are what all are compared with
    assert not pair_all(done, files, SCORED, LENGTH)


def test_a_second_seed_stands_in_until_the_first_has_a_file(table):
    done, files, nats = table
    files[FIRST].unlink()
    for reference in (SECOND, FIRST):
        assert pair_all(done, files, SCORED, LENGTH)
        assert [row["setting"]["from"]["system"] for row in apart(done).values()] == [reference] * 3
        write_nats(files[FIRST], nats[FIRST], SCORED)
    files[FIRST].unlink()
    assert not pair_all(done, files, SCORED, LENGTH)  # and what is from the first stays so


def test_without_a_reference_there_are_no_differences(table):
    done, files, _ = table
    assert not pair_all({"ours": done["ours"]}, files, SCORED, LENGTH)
    assert apart(done) == {}


def test_a_file_is_small(table):
    assert all(path.stat().st_size < 30_000 for path in table[1].values())


def test_nats_of_another_run_are_refused(table):
    done, files, nats = table
    write_nats(files["ours"], nats["ours"] | {2: nats["ours"][2] + 0.01}, SCORED)
    with pytest.raises(InvalidInput, match="nats of another run"):
        pair_all(done, files, SCORED, LENGTH)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", *(lzma.compress(text) for text in (b"", b"{", b"[]", b"{}", b"\xff"))]
    + [
        lzma.compress(json.dumps({"scored_sha256": SCORED, "nats": nats}).encode()) for nats in ([], {"x": []}, {"1": [1.0]})
    ],
)
def test_damaged_nats_are_one_line(table, content):
    done, files, _ = table
    files["ours"].write_bytes(content)
    with pytest.raises(InvalidInput, match="expected nats as `vmd reproduce text` keeps them"):
        pair_all(done, files, SCORED, LENGTH)
