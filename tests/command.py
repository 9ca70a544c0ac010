"""Runs the `vmd` command in this process, as a shell would see it."""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

from vmd.cli import main

ROOT = Path(__file__).parent.parent


class Finished(NamedTuple):
    code: int
    out: str
    err: str


def settings(*fields: str) -> list[str]:
    return [word for field in fields for word in ("--set", field)]


TINY = settings(
    "training.steps=3", "training.batch_size=8", "training.log_every=1", "model.layers=1", "model.width=16", "model.heads=2"
)


def vmd(*words: object) -> Finished:
    """Exit code, stdout and stderr of `vmd WORDS`. What the command does not catch is not caught here either."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    plain = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    with (
        mock.patch.object(sys, "argv", ["vmd", *map(str, words)]),
        mock.patch.dict(os.environ, plain, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = 0 if stop.code is None else int(stop.code)
    return Finished(code, out.getvalue(), err.getvalue())


def succeeds(*words: object) -> Finished:
    done = vmd(*words)
    assert done.code == 0, done.err
    return done


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below: to see that a command changed nothing."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def refused(*words: object, folder: Path) -> str:
    """The one line by which `vmd WORDS` says no, with exit code 2 and nothing written below the folder."""
    before = contents(folder)
    done = vmd(*words)
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("vmd: ")
    assert done.err.count("\n") == 1, done.err
    assert done.err.endswith("\n")
    after = contents(folder)
    assert after.keys() == before.keys()
    assert after == before
    return done.err


def save_rows(path: Path, rows: int = 20, length: int = 4, vocab_size: int = 5) -> Path:
    """An .npy array of random tokens in which every id occurs."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, length))
    tokens[0, 0] = vocab_size - 1
    np.save(path, tokens)
    return path
