"""Data sets. Each has a length, a vocabulary and `batch(step, size)`; a `Law` is known exactly besides."""

from typing import Protocol

import torch
from torch import Tensor

from vmd.data.arrays import ArrayData, load_array
from vmd.data.synthetic import Law, law
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


def load_data(name: str, seed: int = 0) -> "Law | ArrayData":
    """A law by name, or an array by path."""
    if name.endswith(".npy") or "/" in name:
        return load_array(name, seed)
    return law(name)


__all__ = ["ArrayData", "Dataset", "Law", "law", "load_array", "load_data"]
