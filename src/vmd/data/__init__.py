"""Data sets. Each has a length, a vocabulary and `batch(step, size)`; a `Law` is known exactly besides."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from vmd.config import require
from vmd.data.arrays import ArrayData, load_array
from vmd.data.synthetic import LAWS, Law, law
from vmd.data.text import OnProgress, TextData, prepared_text
from vmd.masking import Rows


class Dataset(Protocol):
    @property
    def length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def symbols(self) -> tuple[str, ...]: ...
    def batch(
        self, step: int, size: int, *, rows: Rows | None = None, generator: torch.Generator | None = None, device=None
    ) -> Tensor: ...


def load_data(
    name: str,
    seed: int = 0,
    *,
    length: int = 0,
    tokenizer: str = "",
    documents: bool = False,
    split: str = "train",
    on_progress: OnProgress = lambda done, total: None,
) -> "Law | ArrayData | TextData":
    """A law by name, an array by the path of its .npy, or text: `text8`, or the path of a file or a folder.

    Text is cut into chunks of `length` tokens of the tokenizer (char, byte, or the path of a JSON file; default char). It is
    prepared once and kept (`vmd.data.text`).
    """
    if name.endswith(".npy"):
        return load_array(name, seed)
    if is_text(name):
        require(length > 0, f"{name}: text needs a length of its chunks: use --set model.length=256, or a text preset")
        folder = prepared_text(name, tokenizer or "char", documents=documents, on_progress=on_progress)
        return TextData(folder, split, length=length, seed=seed)
    require(not tokenizer and not documents, f"{name}: no such text: expected the path of a file or folder, or text8")
    require("/" not in name, f"{name}: no such file: expected an .npy array of integers, or text")
    return law(name)


def is_text(name: str) -> bool:
    """Laws come first: a file of that name is meant by a path such as ./d1."""
    known = name in LAWS or name.startswith("dependence-") or name.endswith(".npy")
    return name == "text8" or (bool(name) and not known and Path(name).exists())


__all__ = ["ArrayData", "Dataset", "Law", "TextData", "law", "load_array", "load_data"]
