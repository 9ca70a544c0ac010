"""Several processes as one, by the commands that a user would give. On the CPU, each launch some seconds."""

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from command import ROOT, Finished, refused, settings, succeeds
from helpers import codes, latent, learned_prior, random_law, tiny_config
from vmd import distributed, splitting, step, terminal
from vmd.checkpoints import checkpoint_files
from vmd.config import InvalidInput, LatentConfig, ObjectiveConfig, RunConfig, TrainingConfig
from vmd.data import ArrayData, Dataset
from vmd.evaluation import evaluate_model
from vmd.masking import Rows
from vmd.model import VMD
from vmd.step import Batch, check_precision, draw_batch, mean_loss
from vmd.training import train

STEPS = 24
BASE = (
    f"training.steps={STEPS}",
    "training.batch_size=16",
    "training.log_every=4",
    "training.checkpoint_every=8",
    "training.warmup_steps=2",
    "training.schedule=constant",
    "training.learning_rate=0.02",
    "training.ema=0.9",
    "model.block_size=4",
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
)
CODES = settings(
    *BASE,
    "training.optimizer=muon",
    "training.split_codes_every=6",
    "model.latent.codes=16",
    "model.latent.head=additive",
    "model.latent.code_layers=1",
    "objective.together=0.5",
)
GAUSSIAN = settings(
    *BASE,
    "training.learning_rate=0.002",
    "model.latent.kind=gaussian",
    "model.latent.dim=3",
    "model.latent.encoder_layers=1",
    "model.latent.encoder_stream=doubled",
    "model.latent.on_clean=true",
)
FSDP = settings("training.parallel=fsdp")
TRAIN = ("train", "--data", "rows.npy", "--device", "cpu", "--out")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with rows.npy: two sequences with a few wrong tokens, so that codes fall out of use."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 6, (2, 8))[random.integers(0, 2, 240)]
    wrong = random.random(tokens.shape) < 0.05
    np.save(tmp_path / "rows.npy", np.where(wrong, random.integers(0, 6, tokens.shape), tokens))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start_two(*words: object) -> subprocess.Popen:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, "-m", "vmd", *map(str, words)], env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen) -> Finished:
    try:
        out, err = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:  # processes that wait for each other: torchrun ends them with itself
        process.terminate()
        raise
    return Finished(process.returncode, out, err)


def two(*words: object) -> Finished:
    """`vmd WORDS` in two processes."""
    return finish(start_two(*words))


def two_succeed(*words: object) -> Finished:
    done = two(*words)
    assert done.code == 0, done.err
    return done


def as_one_of(world: int, rank: int = 0):
    """In this process alone, as if it were one of several."""
    return mock.patch.multiple(distributed, world_size=lambda: world, rank=lambda: rank)


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(run: Path, other: Path) -> None:
    """Equal but for the order in which numbers are added."""
    assert [r["step"] for r in records(run)] == [r["step"] for r in records(other)] == [1, *range(4, STEPS + 1, 4)]
    for name in ("total", "reconstruction", "kl", "gradient_norm"):
        assert [r[name] for r in records(run)] == pytest.approx([r[name] for r in records(other)], rel=1e-4, abs=1e-6)
    for name in ("model.safetensors", f"checkpoints/step-{STEPS:09d}.safetensors"):  # weights, average, optimiser state
        found, expected = load_file(run / name), load_file(other / name)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def killed_at_16(run: Path, folder: Path) -> Path:
    """The folder of a run as if it had been killed before its end."""
    shutil.copytree(run, folder)
    for name in ("model.safetensors", "config.json", f"checkpoints/step-{STEPS:09d}.safetensors"):
        (folder / name).unlink()
    assert [path.name for path in checkpoint_files(folder)] == ["step-000000016.safetensors"]
    return folder


# Shares


@given(count=st.integers(0, 200), world=st.integers(1, 17))
def test_shares_cover_everything_once_in_order_and_evenly(count, world):
    shares = []
    for rank in range(world):
        with as_one_of(world, rank):
            shares.append(distributed.my_share(count))
    assert [i for share in shares for i in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(each=st.integers(1, 20), world=st.integers(1, 9))
def test_rows_of_a_batch_are_equal_shares_of_it(each, world):
    shares = []
    for rank in range(world):
        with as_one_of(world, rank):
            shares.append(distributed.my_rows(each * world))
            if world > 1:
                with pytest.raises(InvalidInput, match=f"a batch of {each * world + 1} rows"):
                    distributed.my_rows(each * world + 1)
    assert [i for rows in shares for i in range(rows.start, rows.stop)] == list(range(each * world))
    assert {(rows.stop - rows.start, rows.total) for rows in shares} == {(each, each * world)}


OBJECTIVES = {
    "counts": ObjectiveConfig(),
    "times": ObjectiveConfig(masking="times"),
    "steps-fresh": ObjectiveConfig(masking="steps", steps=(1, 2)),
    "steps-once": ObjectiveConfig(masking="steps", steps=(1, 2), z="once"),
    "samples": ObjectiveConfig(samples=3),
    "samples-once": ObjectiveConfig(masking="steps", steps=(2,), z="once", samples=3),
}
DATA: dict[str, Dataset] = {
    "array": ArrayData(np.random.default_rng(0).integers(0, 3, (7, 4)), seed=1),  # an epoch is shorter than a batch
    "law": random_law(4, 3),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize("data", DATA.values(), ids=DATA.keys())
@pytest.mark.parametrize("fixed", [None, torch.tensor([True, False, False, False])], ids=["free", "fixed"])
@given(cuts=st.lists(st.integers(1, 11), max_size=4, unique=True), step=st.integers(0, 9))
@hypothesis_settings(max_examples=12)
def test_parts_of_a_batch_are_what_they_are_in_the_whole(objective, data, fixed, cuts, step):
    model, size = VMD(tiny_config(4, 2, vocab_size=3, z=latent())), 12

    def drawn(rows: Rows | None) -> tuple[Batch, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        batch = draw_batch(model, data, objective, step, size, fixed, generator, rows)
        return batch, generator.get_state()

    whole, state = drawn(None)
    edges = [0, *sorted(cuts), size]
    parts = []
    for start, stop in itertools.pairwise(edges):
        part, after = drawn(Rows(start, stop, size))
        assert torch.equal(after, state)  # what is drawn later is the same for all
        parts.append(part)
    assert torch.equal(torch.cat([part.x0 for part in parts]), whole.x0)
    for name in ("mask", "target", "weight"):
        assert torch.equal(torch.cat([getattr(part.masks, name) for part in parts]), getattr(whole.masks, name))
    noises = [part.noise for part in parts if part.noise is not None]
    assert whole.noise is not None
    assert torch.equal(torch.cat(noises, dim=-3), whole.noise)
    assert len(whole.x0) == size


@pytest.mark.parametrize("z", [LatentConfig(kind="none"), latent(), codes()], ids=["none", "gaussian", "codes"])
def test_fewer_rows_than_processes_are_refused(z):
    model, data = VMD(tiny_config(4, 2, vocab_size=3, z=z)), ArrayData(np.array([[0, 1, 2, 0]]))
    with as_one_of(2, rank=0), pytest.raises(InvalidInput, match="1 rows to score: expected at least 2"):
        evaluate_model(model, data, [1, 2])


# Gradients that are added up

KINDS = {
    "none": (LatentConfig(kind="none"), ObjectiveConfig()),
    "gaussian": (latent("doubled", on_clean=True), ObjectiveConfig(kl_weight=0.5)),
    "learned-samples": (learned_prior(), ObjectiveConfig(samples=3)),
    "learned-once": (learned_prior(), ObjectiveConfig(masking="steps", steps=(1, 2), z="once", samples=3)),
    "bilinear": (codes(), ObjectiveConfig()),
    "bilinear-once": (codes(), ObjectiveConfig(masking="steps", steps=(2,), z="once")),
    "additive-layer": (codes(head="additive", layers=1), ObjectiveConfig(masking="times")),
}
kinds = pytest.mark.parametrize(("z", "objective"), KINDS.values(), ids=KINDS.keys())


@kinds
def test_a_batch_in_four_parts_trains_as_the_whole(z, objective):
    models, logs = [], []
    for accumulate in (1, 4):
        settings = TrainingConfig(steps=8, batch_size=16, log_every=1, clip=0.5, ema=0.5, accumulate=accumulate)
        config = RunConfig(model=tiny_config(4, 2, vocab_size=3, z=z), objective=objective, training=settings)
        models.append(VMD(config.model))
        logs.append(train(models[-1], DATA["array"], config))
    for name in ("total", "reconstruction", "kl", "gradient_norm"):
        assert [r[name] for r in logs[1]] == pytest.approx([r[name] for r in logs[0]], rel=1e-4, abs=1e-6)
    for name, tensor in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], tensor, atol=1e-4, rtol=1e-4)


@kinds
def test_every_weight_has_a_gradient(z, objective):
    """Processes wait for each other's gradient of every weight."""
    model = VMD(tiny_config(4, 2, vocab_size=3, z=z))
    batch = draw_batch(model, DATA["law"], objective, 0, 8, None, torch.Generator().manual_seed(0))
    mean_loss(model, batch, torch.tensor(1.0), 0.0).total.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


# What is for one process only


def test_tables_are_reproduced_by_one_process(here, monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "here")):
        monkeypatch.setenv(name, value)
    assert "without torchrun" in refused("reproduce", "two-token", "--quick", folder=here)


@pytest.mark.parametrize("size", ["2", "two"])
def test_half_an_environment_of_torchrun_means_nothing(size, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.delenv("RANK", raising=False)
    assert not terminal.several_processes()
    assert terminal.first_process()


def test_what_the_first_process_cannot_do_fails_all(monkeypatch):
    """In a process alone the error is its own."""

    def refuse() -> None:
        raise InvalidInput("no")

    with pytest.raises(InvalidInput, match="no") as found:
        distributed.by_the_first(refuse)
    assert not isinstance(found.value, distributed.FailedTogether)
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    monkeypatch.setattr(distributed.dist, "broadcast_object_list", lambda told: None)
    with pytest.raises(distributed.FailedTogether, match="no"):
        distributed.by_the_first(refuse)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed.dist, "broadcast_object_list", lambda told: told.__setitem__(0, "no"))
    with pytest.raises(distributed.FailedTogether, match="no"):
        distributed.by_the_first(lambda: pytest.fail("only the first acts"))


def test_a_recorded_step_is_for_one_process(monkeypatch):
    check_precision(TrainingConfig(capture=True), "cuda")
    monkeypatch.setattr(step, "world_size", lambda: 2)
    with pytest.raises(InvalidInput, match=r"training.capture=true: expected false with several processes"):
        check_precision(TrainingConfig(capture=True), "cuda")


@pytest.mark.parametrize(("batch", "accumulate"), [(16, 3), (12, 4), (2, 2)])
def test_a_batch_divides_among_processes_and_their_parts(batch, accumulate, monkeypatch):
    monkeypatch.setattr(step, "world_size", lambda: 2)
    with pytest.raises(InvalidInput, match=f"training.batch_size={batch}: expected a multiple of {2 * accumulate}"):
        check_precision(TrainingConfig(batch_size=batch, accumulate=accumulate), "cpu")
    check_precision(TrainingConfig(batch_size=2 * batch * accumulate, accumulate=accumulate), "cpu")


# Training in two processes


@pytest.mark.parametrize(
    ("words", "more"), [(CODES, []), (CODES, FSDP), (GAUSSIAN, [])], ids=["codes-ddp", "codes-fsdp", "gaussian-ddp"]
)
def test_two_processes_train_as_one_and_one_goes_on_where_two_were_killed(here, words, more):
    done = two_succeed(*TRAIN, "two", *words, *more)
    assert done.out == ""
    assert done.err.count("parameters: ") == done.err.count("model: two") == done.err.count(f"{STEPS} of {STEPS}") == 1
    with mock.patch.object(splitting, "take_shard", wraps=splitting.take_shard) as split:
        succeeds(*TRAIN, "one", *words)
    assert split.called == (words is CODES)  # codes were split
    assert_same_run(here / "two", here / "one")
    killed_at_16(here / "two", here / "resumed")
    assert "resuming from step 16" in succeeds(*TRAIN, "resumed", *words, "--resume").err
    assert_same_run(here / "resumed", here / "one")


@pytest.mark.parametrize(
    ("words", "more"),
    [(CODES, []), ([*GAUSSIAN, *settings("training.optimizer=muon")], FSDP)],
    ids=["codes-ddp", "gaussian-fsdp"],
)
def test_two_processes_go_on_where_one_was_killed_and_may_accumulate(here, words, more):
    succeeds(*TRAIN, "one", *words)
    killed_at_16(here / "one", here / "resumed")
    done = two_succeed(*TRAIN, "resumed", *words, *more, *settings("training.accumulate=4"), "--resume")
    assert done.err.count("resuming from step 16") == 1
    assert_same_run(here / "resumed", here / "one")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
@pytest.mark.parametrize("everyone", [False, True], ids=["torchrun", "every-process"])
def test_a_stopped_run_of_two_saves_says_so_once_and_goes_on_in_one(here, everyone):
    """torchrun passes the signal on; some schedulers send it to every process besides."""
    words = [*CODES, *settings("training.log_every=2", "training.checkpoint_every=1000000")]
    process = start_two(*TRAIN, "run", *words, *settings("training.steps=1000000"))
    log = here / "run" / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 7):
        time.sleep(0.01)
    if everyone:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    code, _, said = finish(process)
    assert code != 0
    stops = re.findall(
        r"^vmd: stopped by SIGTERM after step (\d+); everything is saved; go on with: .*--resume$", said, re.M
    )
    assert len(stops) == said.count("stopped by") == said.count("go on with") == 1, said
    assert [path.name for path in checkpoint_files(here / "run")] == [f"step-{int(stops[0]):09d}.safetensors"]
    end = int(stops[0]) + 3
    resumed = succeeds(*TRAIN, "run", *words, *settings(f"training.steps={end}"), "--resume")
    assert f"resuming from step {stops[0]}" in resumed.err
    assert [r["step"] for r in records(here / "run")] == [1, *range(2, end, 2), end]
    assert (here / "run" / "model.safetensors").exists()


def test_two_processes_that_diverge_say_so_once(here):
    done = two(*TRAIN, "run", *CODES, *settings("training.optimizer=adamw", "training.learning_rate=1e30"))
    assert done.code != 0
    assert len(re.findall(r"^vmd: .*loss, gradient or weights are no longer numbers at step 2 ", done.err, re.M)) == 1
    assert done.err.count("no longer numbers") == 1
    assert "TrainingDiverged" not in done.err
    assert not (here / "run" / "model.safetensors").exists()


def test_a_batch_that_does_not_divide_is_refused_by_its_value(here):
    done = two(*TRAIN, "run", *CODES, *settings("training.batch_size=15"))
    assert done.code != 0
    assert done.out == ""
    said = [line for line in done.err.splitlines() if line.startswith("vmd: ")]
    assert 1 <= len(said) <= 2  # one for each process that was not ended by the other's end
    assert all("training.batch_size=15: expected a multiple of 2" in line for line in said)
    assert sorted(path.name for path in here.iterdir()) == ["rows.npy"]


# Sampling and scoring


def test_two_processes_print_the_samples_of_one_once(here):
    succeeds(*TRAIN, "model", *CODES)
    words = ("sample", "model", "-n", 7, "--seed", 3, "--steps", 2, "--device", "cpu", "--out")
    one, both = succeeds(*words, "one.npy"), two_succeed(*words, "two.npy")
    assert len(one.out.splitlines()) == 7
    assert both.out == one.out
    assert both.err.count("n 7, rule sample") == 1
    assert np.array_equal(np.load("one.npy"), np.load("two.npy"))


def test_two_processes_score_as_one_and_print_one_table(here):
    succeeds(*TRAIN, "model", *CODES)
    words = ("evaluate", "model", "--data", "rows.npy", "--steps", "1,4", "--rows", 201, "--device", "cpu", "--json")
    one, both = succeeds(*words, "one.json"), two_succeed(*words, "two.json")
    assert len(both.out.splitlines()) == len(one.out.splitlines())
    assert both.out.count("metric") == 1
    rows = [json.loads((here / name).read_text())["rows"] for name in ("one.json", "two.json")]
    assert [row["about"] for row in rows[0]] == [row["about"] for row in rows[1]]
    for a, b in zip(*rows, strict=True):
        assert abs(a["value"] - b["value"]) < 4 * (a["stderr"] + b["stderr"])
        assert b["stderr"] == pytest.approx(a["stderr"], rel=0.3)
    assert rows[1][0]["steps"] == 1  # where nothing is left to chance
    assert rows[1][0]["value"] == pytest.approx(rows[0][0]["value"], rel=1e-5)
    assert rows[1][0]["stderr"] == pytest.approx(rows[0][0]["stderr"], rel=1e-4)
