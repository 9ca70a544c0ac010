"""TensorBoard: what a run shows can be read back."""

import builtins
import errno
import os

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from command import TINY, refused, save_rows, settings, succeeds
from vmd.boards import heat
from vmd.runs import read_log


def events(folder) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    found.Reload()
    return found


def test_every_number_of_the_log_is_a_curve_and_samples_are_shown(tmp_path):
    out = tmp_path / "run"
    succeeds("train", "poker", "--out", out, "--tensorboard", "--device", "cpu", *TINY)
    shown, log = events(out), read_log(out)
    for record in log:
        for name, value in record.items():
            if name != "step":
                points = {event.step: event.value for event in shown.Scalars(f"train/{name}")}
                assert points[record["step"]] == pytest.approx(value, rel=1e-5)
    assert [event.step for event in shown.Images("samples/pairs, one step")] == [1, 2, 3]
    (tag,) = [tag for tag in shown.Tags()["tensors"] if tag.startswith("samples/")]
    text = shown.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
    assert len(text.splitlines()) == 8
    assert {word for line in text.splitlines() for word in line.split()} <= set(
        ["full", "house", "high", "card", "two", "pair", "straight", "flush"]
    )


def test_longer_sequences_are_shown_as_text_alone(tmp_path):
    out = tmp_path / "run"
    data = save_rows(tmp_path / "rows.npy")
    succeeds("train", "array", "--data", data, "--out", out, "--tensorboard", "--device", "cpu", *TINY)
    assert events(out).Tags()["images"] == []


def test_looking_does_not_change_the_run(tmp_path):
    for name, more in (("plain", []), ("shown", ["--tensorboard"])):
        succeeds("train", "poker", "--out", tmp_path / name, "--device", "cpu", *more, *TINY)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "shown")]
    assert weights[0] == weights[1]


def test_a_missing_tensorboard_is_one_line(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    told = refused("train", "poker", "--out", tmp_path / "run", "--tensorboard", "--device", "cpu", *TINY, folder=tmp_path)
    assert "pip install" in told


def test_heat_is_brightest_where_pairs_are_frequent():
    picture = heat(torch.tensor([[0, 1], [0, 1], [2, 0]]), 3, cell=2)
    assert picture.shape == (1, 6, 6)
    assert picture[0, 0, 2] == 1
    assert picture[0, 4, 0] == 0.5
    assert picture.sum() == 4 * 1.5


@pytest.mark.parametrize("more", [["model.block_size=2"], ["data.fixed=0:1"]])
def test_numbers_that_a_model_does_not_have_are_left_out(tmp_path, more):
    """The gap of a prior that differs from row to row is undefined."""
    out, data = tmp_path / "run", save_rows(tmp_path / "rows.npy")
    succeeds("train", "array", "--data", data, "--out", out, "--tensorboard", "--device", "cpu", *TINY, *settings(*more))
    assert "train/latent_marginal_gap" not in events(out).Tags()["scalars"]


def test_a_run_that_starts_anew_shows_nothing_of_the_old_one(tmp_path):
    out = tmp_path / "run"
    words = ("train", "poker", "--out", out, "--tensorboard", "--device", "cpu", *TINY)
    succeeds(*words)
    succeeds(*words, "--overwrite", *settings("training.steps=1"))
    assert [event.step for event in events(out).Scalars("train/total")] == [1]


def test_a_file_in_the_way_is_one_line(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").write_text("mine")
    words = ("train", "poker", "--out", tmp_path / "run", "--tensorboard", "--device", "cpu", *TINY)
    assert "expected a folder" in refused(*words, folder=tmp_path)


def test_a_board_that_cannot_be_written_is_one_line_and_the_run_goes_on(tmp_path, monkeypatch):
    from tensorboard.summary.writer import record_writer

    monkeypatch.chdir(tmp_path)

    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record_writer.RecordWriter, "write", full)
    done = succeeds("train", "poker", *TINY, "--tensorboard", "--out", "run")
    assert done.err.count("cannot write: No space left on device; going on without TensorBoard") == 1
    assert "Traceback" not in done.err
    assert (tmp_path / "run" / "model.safetensors").exists()
