"""Nothing is lost: killed, stopped, out of disk, out of numbers, or two at once."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from command import ROOT, refused, save_rows, settings, succeeds
from vmd import files
from vmd.checkpoints import checkpoint_files
from vmd.config import InvalidInput
from vmd.files import claimed, remove_together, working_in, write_atomically

STEPS = 90
WORDS = settings(
    f"training.steps={STEPS}",
    "training.batch_size=8",
    "training.log_every=1",
    "training.checkpoint_every=7",
    "training.ema=0.9",
    "training.split_codes_every=10",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
)


def start(folder, out, *words: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "vmd",
        "train",
        "--data",
        "rows.npy",
        "--out",
        str(out),
        "--device",
        "cpu",
        *WORDS,
        *words,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def wait_for_line(out, count: int, process: subprocess.Popen) -> None:
    """Until the log has so many lines, or the run is over."""
    log = out / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= count):
        time.sleep(0.002)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    save_rows(folder / "rows.npy")
    assert start(folder, folder / "run").wait() == 0
    return load_file(folder / "run" / "model.safetensors")


def same(out, expected: dict) -> bool:
    found = load_file(out / "model.safetensors")
    return found.keys() == expected.keys() and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_run_killed_again_and_again_ends_as_the_undisturbed_one(tmp_path, undisturbed):
    save_rows(tmp_path / "rows.npy")
    out = tmp_path / "run"
    for line, more in ((3, ()), (23, ("--resume",)), (41, ("--resume",))):
        process = start(tmp_path, out, *more)
        wait_for_line(out, line, process)
        process.kill()
        process.communicate()
        assert not (out / "model.safetensors").exists()
    left = out / "checkpoints" / "step-000000077.safetensors.1-1.partial"
    left.write_bytes(b"half of a checkpoint")
    finished = start(tmp_path, out, "--resume")
    _, said = finished.communicate()
    assert finished.returncode == 0
    assert "resuming from step " in said
    assert not left.exists()
    assert same(out, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_stopped_run_saves_says_how_to_go_on_and_does(number, tmp_path, undisturbed):
    save_rows(tmp_path / "rows.npy")
    out = tmp_path / "run"
    process = start(tmp_path, out)
    wait_for_line(out, 9, process)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 128 + number
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"vmd: stopped by {number.name} after step ")
    assert last.endswith("--resume")
    assert "Traceback" not in said
    step = int(last.split("after step ")[1].split(";")[0])
    assert checkpoint_files(out)[-1].name == f"step-{step:09d}.safetensors"
    assert start(tmp_path, out, "--resume").wait() == 0
    assert same(out, undisturbed)


def test_a_damaged_newest_checkpoint_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    succeeds("train", "--data", "rows.npy", "--out", "run", *WORDS)
    newest = checkpoint_files(tmp_path / "run")[-1]
    newest.write_bytes(newest.read_bytes()[:-10])
    done = succeeds("train", "--data", "rows.npy", "--out", "run", *WORDS, "--resume")
    assert f"damaged: {newest.name}" in done.err


def flipped(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda content: content[:-400] + bytes(400),
        lambda content: content.replace(b"vmd-checkpoint", b"vmd-checkpoinT"),
        lambda content: content.replace(b'\\"training\\"', b'\\"training\\ '),
        lambda content: content.replace(b'"step":"2', b'"step":"x'),
    ],
    ids=["one bit", "zeros", "format", "configuration", "step"],
)
def test_whatever_is_damaged_the_checkpoint_before_it_is_taken(damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    command = ("train", "--data", "rows.npy", "--out", "run", *WORDS, *settings("training.steps=20"))
    succeeds(*command)
    before, newest = checkpoint_files(tmp_path / "run")
    content, tensors = newest.read_bytes(), {name: t.clone() for name, t in load_file(newest).items()}
    assert damage(content) != content
    newest.write_bytes(damage(content))
    done = succeeds(*command, "--resume")
    assert f"resuming from step {int(before.stem[5:])}; damaged: {newest.name}" in done.err
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(newest).items())  # made again


def test_two_runs_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    (tmp_path / "run").mkdir()
    with claimed(tmp_path / "run"):
        for more in ((), ("--overwrite",)):
            assert "another run is writing here" in refused(
                "train", "--data", "rows.npy", "--out", "run", *WORDS, *more, folder=tmp_path
            )
    with claimed(tmp_path / "run"):  # free again
        pass


def test_two_tables_are_not_made_in_one_folder(tmp_path, monkeypatch):
    """The one that ends last would write its rows alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "text").mkdir(parents=True)
    with claimed(tmp_path / "runs" / "text"):
        assert "another run is writing here" in refused(
            *("reproduce", "text", "--quick", "--out", "runs/text", "--device", "cpu"), folder=tmp_path
        )


def test_a_folder_that_was_made_for_nothing_goes_again(tmp_path):
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "there", tmp_path / "new" / "newer"):
        with pytest.raises(InvalidInput), working_in(folder):
            raise InvalidInput("no")
        with working_in(folder):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    with working_in(tmp_path / "new" / "newer"):
        (tmp_path / "new" / "newer" / "file").touch()
    assert (tmp_path / "new" / "newer" / "file").exists()


def test_only_another_run_is_called_another_run(tmp_path):
    with pytest.raises(BlockingIOError), claimed(tmp_path):
        raise BlockingIOError  # of a terminal that is slow, say


def test_what_is_interrupted_leaves_no_part_behind(tmp_path, monkeypatch):
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "weights", b"new")
    assert list(tmp_path.iterdir()) == []


def test_parts_that_a_killed_run_left_go_when_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    from command import succeeds

    words = ("train", "--data", "rows.npy", "--out", "run", *WORDS)
    succeeds(*words)
    (tmp_path / "run" / "model.safetensors.99-1.partial").touch()
    succeeds(*words, "--resume")
    assert not list((tmp_path / "run").rglob("*.partial"))


def test_a_full_disk_is_one_line_and_the_previous_file_survives(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(InvalidInput, match="cannot write: No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["weights"]


def test_those_who_write_one_file_at_the_same_time_do_not_mix(tmp_path):
    path, contents = tmp_path / "file", [bytes([number]) * 100_000 for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda number: write_atomically(path, contents[number % 4]), range(80)):
            assert path.read_bytes() in contents
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_loss_that_is_no_number_names_step_seed_and_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    from command import vmd
    from vmd import step as steps

    whole = steps.learning_rate
    monkeypatch.setattr(steps, "learning_rate", lambda config, step: float("nan") if step == 30 else whole(config, step))
    done = vmd("train", "--data", "rows.npy", "--out", "run", *WORDS)
    assert done.code == 1
    last = done.err.strip().splitlines()[-1]
    seed = steps.step_seed(0, 31)
    assert (
        f"are no longer numbers at step 32 (batch seed {seed}); last good checkpoint: run/checkpoints/step-000000028" in last
    )


@pytest.mark.parametrize("poisoned", [27, STEPS - 1], ids=["a checkpoint's", "the last"])
def test_weights_that_are_no_numbers_are_never_saved(poisoned, tmp_path, monkeypatch):
    """The step before was good, and so was its loss: only the weights tell."""
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    from command import vmd
    from vmd import step as steps

    whole = steps.learning_rate
    monkeypatch.setattr(
        steps, "learning_rate", lambda config, step: float("nan") if step == poisoned else whole(config, step)
    )
    done = vmd("train", "--data", "rows.npy", "--out", "run", *WORDS)
    assert done.code == 1
    assert f"are no longer numbers at step {poisoned + 1} " in done.err.strip().splitlines()[-1]
    assert not (tmp_path / "run" / "model.safetensors").exists()
    last = checkpoint_files(tmp_path / "run")[-1]
    assert last.name in done.err
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(last).values())


def test_a_gradient_that_is_no_number_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    from command import vmd
    from vmd import step as steps

    whole = steps.clip_gradients
    monkeypatch.setattr(steps, "clip_gradients", lambda *args, **more: whole(*args, **more) * torch.inf)
    done = vmd("train", "--data", "rows.npy", "--out", "run", *WORDS)
    assert done.code == 1
    assert "are no longer numbers at step 1 " in done.err


def test_a_run_that_cannot_be_replaced_stays_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    command = ("train", "--data", "rows.npy", "--out", "run", *WORDS, *settings("training.steps=20"))
    succeeds(*command)
    files_before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    stuck, rename = checkpoint_files(tmp_path / "run")[-1].name, Path.rename

    def refuse(path, target):
        if path.name == stuck:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    said = refused(*command, "--overwrite", folder=tmp_path)
    assert f"{stuck}: cannot be replaced: Permission denied; nothing was removed" in said
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files_before
    monkeypatch.setattr(Path, "rename", rename)
    succeeds(*command, "--overwrite")
    assert not list((tmp_path / "run").glob(".replaced*"))


def test_a_run_is_not_resumed_to_end_before_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    command = ("train", "--data", "rows.npy", "--out", "run", *WORDS)
    succeeds(*command, *settings("training.steps=20"))
    said = refused(*command, *settings("training.steps=10"), "--resume", folder=tmp_path)
    assert "training.steps=10: expected at least 20, where the run is" in said


def test_a_log_with_lines_of_others_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    command = ("train", "--data", "rows.npy", "--out", "run", *WORDS, *settings("training.steps=9"))
    succeeds(*command)
    log = tmp_path / "run" / "metrics.jsonl"
    kept = log.read_text()
    log.write_bytes(kept.encode() + b'{"a": 1}\n\xff\n3\n{"step": "x"}\n')
    succeeds(*command, "--resume")
    assert log.read_text() == kept


def test_a_run_from_before_a_field_and_the_checksum_were_there_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    command = ("train", "--data", "rows.npy", "--out", "run", *WORDS, *settings("training.steps=20"))
    succeeds(*command)
    for path in checkpoint_files(tmp_path / "run"):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        del metadata["checksum"]
        config = json.loads(metadata["config"])
        del config["model"]["draft"]
        save_file({name: t.clone() for name, t in load_file(path).items()}, path, metadata | {"config": json.dumps(config)})
    assert "resuming from step 20" in succeeds(*command, "--resume").err


def test_a_removal_that_is_interrupted_removes_nothing(tmp_path, monkeypatch):
    files_here = [tmp_path / name for name in ("a", "b", "c")]
    for path in files_here:
        path.write_text(path.name)
    rename = Path.rename

    def interrupt(path, target):
        if path.name == "b":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        remove_together(files_here, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    monkeypatch.setattr(Path, "rename", rename)
    (tmp_path / "link").symlink_to("nowhere")
    remove_together([*files_here, tmp_path / "link"], tmp_path)
    assert list(tmp_path.iterdir()) == []
