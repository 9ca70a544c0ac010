"""Logs for TensorBoard, an extra: every number of the log, and samples as the model trains."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from vmd.config import InvalidInput, TrainingConfig, require
from vmd.distributed import world_size
from vmd.model import VMD

BOARD_FOLDER = "tensorboard"
SHOWN = 8  # sequences per picture of samples
LOOKS = 20  # times in a run that samples are drawn
PAIRS = 2_000  # samples in a heat map


class Board:
    """What a run shows while it trains, in OUT/tensorboard. Where that cannot be written, the run goes on without."""

    def __init__(self, out: Path, model: VMD, training: TrainingConfig, on_note: Callable[[str], None] = lambda text: None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InvalidInput("--tensorboard: not installed: pip install tensorboard") from None
        folder = out / BOARD_FOLDER
        require(not folder.is_file(), f"{folder}: a file: expected a folder to log to")
        # A resumed run writes steps again that were logged after its checkpoint: those before it went.
        self.make_writer = lambda step: SummaryWriter(str(folder), purge_step=step)
        self.folder, self.on_note, self.failed = folder, on_note, False
        self.writer: Any = None  # made when there is something to show: a run may be refused before
        self.model, self.steps = model, training.steps
        self.every = max(1, training.steps // LOOKS)
        self.draws_samples = training.parallel == "ddp" or world_size() == 1  # one cannot sample weights that all share

    def __enter__(self) -> "Board":
        # The writer is a thread of its own, whose failure is told here in one line and not as a traceback.
        self.hook = threading.excepthook
        threading.excepthook = lambda failed: None if isinstance(failed.exc_value, OSError) else self.hook(failed)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        try:
            if self.writer is not None:
                self.writer.close()
        except OSError as failed:
            self.fail(failed)
        finally:
            threading.excepthook = self.hook

    def fail(self, error: OSError) -> None:
        if not self.failed:
            self.on_note(f"{self.folder}: cannot write: {error.strerror}; going on without TensorBoard")
        self.failed = True

    def show(self, step: int, record: dict | None) -> None:
        """After every step; the record is None where no log line was written."""
        if not self.failed:
            try:
                self.show_all(step, record)
            except OSError as error:
                self.fail(error)

    def show_all(self, step: int, record: dict | None) -> None:
        self.writer = self.writer or self.make_writer(step)
        for name, value in (record or {}).items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(f"train/{name}", value, step)
        if self.draws_samples and (step % self.every == 0 or step == self.steps):
            self.show_samples(step)

    def show_samples(self, step: int) -> None:
        """One step per block, rule sample, from the weights of now (not their average)."""
        config = self.model.config
        generator = torch.Generator(self.model.device).manual_seed(step)
        pairs = config.length == 2 and config.vocab_size <= 100
        tokens = self.model.sample(PAIRS if pairs else SHOWN, steps=1, rule="sample", generator=generator).tokens.cpu()
        names = config.symbols or tuple(map(str, range(config.vocab_size)))
        characters = sum(len(name) == 1 for name in config.symbols) > config.vocab_size / 2
        lines = [("" if characters else " ").join(names[t] for t in row) for row in tokens[:SHOWN].tolist()]
        self.writer.add_text("samples/one step per block", "\n".join(f"    {line}" for line in lines), step)
        if pairs:
            self.writer.add_image("samples/pairs, one step", heat(tokens, config.vocab_size), step)


def heat(pairs: Tensor, vocab_size: int, cell: int = 16) -> Tensor:
    """(1, V cell, V cell): how often each pair was drawn, white for the most frequent."""
    counts = torch.zeros(vocab_size, vocab_size).index_put_(
        (pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs)), accumulate=True
    )
    return (counts / counts.max()).repeat_interleave(cell, 0).repeat_interleave(cell, 1).unsqueeze(0)
