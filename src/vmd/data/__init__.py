"""Data sets. Each has a length, a vocabulary and `batch(step, size)`; a `Law` is known exactly besides."""

import os
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from vmd.config import is_whole, require
from vmd.data.arrays import ArrayData, load_array
from vmd.data.columns import Columns, TableData, load_csv
from vmd.data.reading import OnProgress
from vmd.data.sudoku import SudokuData, load_puzzles
from vmd.data.synthetic import LAWS, Law, law
from vmd.data.text import TextData, prepared_text
from vmd.data.tokenizers import Text8Tokenizer, Tokenizer, load_tokenizer
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


@runtime_checkable
class Puzzles(Dataset, Protocol):
    """Data of which every row gives some tokens: clues, and what they stand in."""

    def puzzle_batch(
        self, step: int, size: int, *, rows: Rows | None = None, generator: torch.Generator | None = None, device=None
    ) -> tuple[Tensor, Tensor]: ...


def load_data(
    name: str | Path,
    seed: int = 0,
    *,
    length: int = 0,
    tokenizer: str | Tokenizer = "",
    documents: bool = False,
    split: str = "train",
    on_progress: OnProgress = lambda done, total: None,
    puzzles: bool = False,
    augment: bool = True,
    layout: str = "board",
    columns: Columns = (),
) -> "Law | ArrayData | TextData | SudokuData":
    """A law by name, by path an array (.npy or .csv) or a table of categories (.csv), text (`text8`, or a path), or puzzles.

    A table is read in the columns of a model, `model.config.columns`, if they are given.
    A file is read as puzzles if it is called .sudoku, or with `puzzles`; they are turned by their symmetries with `augment`
    and laid out in place (board), or as a puzzle and its solution (pair).
    Text is cut into chunks of `length` tokens of the tokenizer (char, text8, byte, or a path: a JSON file; default char).
    It is prepared once and kept (`vmd.data.text`).
    """
    name = str(name)
    if puzzles or name.lower().endswith(".sudoku"):
        return SudokuData(load_puzzles(name), seed, augment, pair=layout == "pair")
    if name.lower().endswith((".csv", ".tsv")):
        require(os.path.isfile(name), f"{name}: no such file: expected integers, or a table below a line of names")
        return load_csv(Path(name), seed, columns or ())
    if name.lower().endswith(".npy"):
        return load_array(name, seed)
    if is_text(name):
        presets = "preset text-small-draft, or text on a GPU, or --set model.length=256"
        told = f"text needs a length of its chunks: use {presets} (integers go in an .npy or .csv file)"
        require(is_whole(length) and length > 0, f"{name}: {told}")
        tokenizer = str(tokenizer) if isinstance(tokenizer, Path) else tokenizer
        named = isinstance(tokenizer, str) or hasattr(tokenizer, "encode")
        require(named, f"tokenizer {tokenizer!r:.60}: expected a name, a path or a tokenizer")
        if isinstance(tokenizer, str) and tokenizer not in ("", "char", "byte"):
            tokenizer = load_tokenizer(tokenizer)
        folder = prepared_text(name, tokenizer or "char", documents=documents, on_progress=on_progress)
        data = TextData(folder, split, length=length, seed=seed)
        if isinstance(tokenizer, Text8Tokenizer):  # text8 itself is prepared once, for this tokenizer and for plain letters
            data.tokenizer = tokenizer
        return data
    require(not tokenizer and not documents, f"{name}: no such text: expected the path of a file or folder, or text8")
    require("/" not in name, f"{name}: no such file: expected an .npy array of integers, or text")
    return law(name)


def is_text(name: str) -> bool:
    """Laws come first: a file of that name is meant by a path such as ./d1."""
    known = name in LAWS or name.startswith("dependence-") or name.lower().endswith((".npy", ".csv", ".tsv", ".sudoku"))
    return name == "text8" or (bool(name) and not known and os.path.exists(name))


__all__ = ["ArrayData", "Dataset", "Law", "Puzzles", "SudokuData", "TableData", "TextData", "law", "load_array", "load_data"]
