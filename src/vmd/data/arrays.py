"""A user's own data: integers in an .npy array, one fixed-length sequence per row."""

import hashlib
from functools import cached_property
from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch
from torch import Tensor

from vmd.config import InvalidInput, require
from vmd.masking import Rows, send

ON_DEVICE = 2**31  # tokens up to which an array is kept on the GPU that trains on it


class EpochOrder:
    """Which of `count` rows a step sees: all in every epoch, in a new order each; a function of (seed, step) alone."""

    def __init__(self, count: int, seed: int, shuffled: bool = True):
        self.count, self.seed, self.shuffled = count, seed, shuffled
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def rows(self, step: int, size: int, rows: Rows | None = None) -> np.ndarray:
        start, stop, _ = rows or Rows(0, size, size)
        epochs, index = np.divmod(np.arange(step * size + start, step * size + stop, dtype=np.int64), self.count)
        for epoch in np.unique(epochs) if self.shuffled else []:
            index[epochs == epoch] = self.permutation(int(epoch))[index[epochs == epoch]]
        return index

    def permutation(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.count)
        return self._permutation


class ArrayData:
    """Rows of a token array, shuffled anew every epoch. Which rows a step sees is a function of (seed, step) alone."""

    def __init__(self, tokens: np.ndarray | Tensor, name: str = "array", seed: int = 0):
        tokens = tokens.cpu().numpy() if isinstance(tokens, Tensor) else tokens
        kind = type(tokens).__name__
        require(isinstance(tokens, np.ndarray), f"{name}: a {kind}: expected an array or tensor of integers, (rows, length)")
        require(tokens.ndim == 2, f"{name}: an array of shape {tokens.shape}: expected two dimensions (rows, length)")
        require(np.issubdtype(tokens.dtype, np.integer), f"{name}: an array of {tokens.dtype}: expected integers")
        require(tokens.size > 0, f"{name}: an array of shape {tokens.shape}: expected at least one row and one token")
        low, high = int(tokens.min()), int(tokens.max())
        require(low >= 0, f"{name}: token id {low}: expected ids from 0")
        require(high < 65_536, f"{name}: token id {high}: expected ids below 65536")
        self.tokens, self.name, self.seed = tokens, name, seed
        self.length, self.vocab_size = tokens.shape[1], high + 1
        self.symbols: tuple[str, ...] = ()
        self._order = EpochOrder(len(tokens), seed)
        self._kept: dict[str, Tensor] = {}  # the tokens on a device

    def batch(
        self, step: int, size: int, *, rows: Rows | None = None, generator: torch.Generator | None = None, device=None
    ) -> Tensor:
        """(size, L), or these rows of it; `generator` is not needed: the order is fixed by the seed."""
        index = self._order.rows(step, size, rows)
        if torch.device(device or "cpu").type == "cuda" and self.tokens.size <= ON_DEVICE:
            if str(device) not in self._kept:
                small = np.uint8 if self.vocab_size <= 256 else np.int32
                self._kept = {str(device): torch.from_numpy(self.tokens.astype(small)).to(device)}
            return self._kept[str(device)][send(torch.from_numpy(index), device)].long()
        return send(torch.from_numpy(np.asarray(self.tokens[index], dtype=np.int64)), device)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def sha256(self) -> str:
        """Of the tokens, whatever file and type of integers they came in."""
        digest = hashlib.sha256(str(self.tokens.shape).encode())
        for start in range(0, len(self.tokens), 65_536):
            digest.update(np.asarray(self.tokens[start : start + 65_536], dtype=np.int32).tobytes())
        return digest.hexdigest()

    def rows_at(self, index: np.ndarray) -> Tensor:
        """(n, L): rows by their numbers."""
        return torch.from_numpy(np.asarray(self.tokens[index], dtype=np.int64))


def load_array(path: str | Path, seed: int = 0) -> ArrayData:
    path = Path(path)
    require(path.is_file(), f"{path}: no such file: expected an .npy array of integers")
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError, TokenError):  # numpy parses the header as Python
        raise InvalidInput(f"{path}: truncated or not an .npy array of integers") from None
    require(isinstance(tokens, np.ndarray), f"{path}: an archive of arrays: expected one .npy array of integers")
    return ArrayData(tokens, str(path), seed)


def parse_positions(text: str, length: int, name: str = "data.fixed") -> Tensor | None:
    """ "0:82,90" -> (L,) bool; empty text -> None."""
    if not text:
        return None
    fixed = torch.zeros(length, dtype=torch.bool)
    for part in text.split(","):
        start, colon, stop = part.partition(":")
        try:
            first = int(start)
            last = int(stop) if colon else first + 1
        except ValueError:
            raise InvalidInput(f"{name}={text!r}: expected positions such as 0:82 or 0,5,7") from None
        require(0 <= first < last <= length, f"{name}={text!r}: expected positions between 0 and {length}, got {part!r}")
        fixed[first:last] = True
    require(not bool(fixed.all()), f"{name}={text!r}: expected at least one of {length} positions left to learn")
    return fixed


def same_positions(one: str, other: str, length: int) -> bool:
    """However they are written."""
    first, second = parse_positions(one, length), parse_positions(other, length)
    return first is second if first is None or second is None else bool((first == second).all())
