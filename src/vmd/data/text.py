"""Text by its name or path, prepared once and kept, and chunks of it to train on."""

import hashlib
import io
import json
import os
import urllib.request
import zipfile
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vmd.config import InvalidInput, require, require_choice, require_range
from vmd.data.arrays import ON_DEVICE, EpochOrder
from vmd.data.preparing import AGAIN, SPLITS, TEXT8_KINDS, prepare, prepare_text, read_meta, require_digest, shard_is_whole
from vmd.data.reading import OnProgress, encoded, read_file, reading, require_known, source_files
from vmd.data.tokenizers import (
    TEXT8_ALPHABET,
    CharTokenizer,
    Text8Tokenizer,
    Tokenizer,
    id_type,
    load_tokenizer,
    one_line,
    tokenizer_from_dict,
)
from vmd.files import make_folder, write_atomically
from vmd.masking import Rows, send

TEXT8_URL, TEXT8_ARCHIVE = "http://mattmahoney.net/dc/text8.zip", "text8.zip"


def cache_folder() -> Path:
    """Of this machine: $VMD_CACHE, or .cache/vmd in the home folder."""
    return Path(os.environ.get("VMD_CACHE") or Path.home() / ".cache" / "vmd")


def prepared_text(
    name: str, tokenizer: str | Tokenizer, *, documents: bool = False, on_progress: OnProgress = lambda done, total: None
) -> Path:
    """The folder of a text by its name or path, prepared at the first call and kept in the cache of this machine.

    A file called text8 or text8-70M is checked to be that, if characters are asked for.
    """
    cache, source = cache_folder(), Path(name)
    if isinstance(tokenizer, str) and tokenizer not in ("char", "byte"):
        tokenizer = load_tokenizer(tokenizer)
    what = tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer.to_dict())
    letters = what in ("char", *(json.dumps(t.to_dict()) for t in (CharTokenizer(TEXT8_ALPHABET), Text8Tokenizer())))
    if name == "text8" and not source.exists():
        if letters and not documents:
            return text8(cache=cache, on_progress=on_progress)
        source = text8_archive(cache, on_progress)  # in other tokens
    if letters and source.is_file() and not documents and source.name.split(".")[0] in TEXT8_KINDS:
        return text8(source, cache=cache, on_progress=on_progress)
    asked = json.dumps([str(source.resolve()), what, documents])
    place = f"{source.resolve().name.split('.')[0]}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
    return prepare_text(source, tokenizer, cache / place, documents=documents, on_progress=on_progress)


def text_rows(
    name: str, tokenizer: Tokenizer, length: int, *, on_progress: OnProgress = lambda done, total: None
) -> np.ndarray:
    """(rows, L): all of a text in chunks, in order, in the ids of a model's tokenizer; what does not fill one is dropped."""
    source = text8_archive(cache_folder(), on_progress) if name == "text8" and not os.path.exists(name) else Path(name)
    with reading(source):
        files = source_files(source)
    texts = (require_known(text, tokenizer, files) for path in files.values() for text in read_file(path))
    parts = [ids for ids, _ in encoded(texts, tokenizer)]
    ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    require(len(ids) >= length, f"{name}: {len(ids)} tokens: too short: expected at least {length}, one chunk")
    return ids[: len(ids) // length * length].reshape(-1, length)


# text8


def text8(
    source: str | Path | None = None, *, cache: str | Path, on_progress: OnProgress = lambda done, total: None
) -> Path:
    """The prepared folder of text8, below the cache: 100,000,000 characters, the first 90 % to train, then twice 5 %.

    From a file (plain, .zip, .xz or .gz), or downloaded. A file whose name contains text8-70M must hold 70,000,000
    characters; it is split 95 / 2.5 / 2.5 % and named text8-70M. Other lengths have neither name: see `prepare_text`.
    """
    cache = Path(cache)
    kind = "text8-70M" if source is not None and "text8-70M" in Path(source).name else "text8"
    out, (characters, split) = cache / kind, TEXT8_KINDS[kind]
    if source is None:
        if not (cache / TEXT8_ARCHIVE).is_file() and (out / "meta.json").is_file() and read_meta(out)["name"] == kind:
            return out  # prepared before, and the archive thrown away
        source = text8_archive(cache, on_progress)
    require(Path(source).is_file(), f"{source}: no such file: expected {kind}, plain, .zip, .xz or .gz")
    return prepare(Path(source), CharTokenizer(TEXT8_ALPHABET), out, kind, split, False, on_progress, characters)


def text8_archive(cache: Path, on_progress: OnProgress) -> Path:
    """Downloaded at the first call."""
    archive = cache / TEXT8_ARCHIVE
    if not archive.is_file():
        _download(TEXT8_URL, archive, on_progress)
    return archive


def _download(url: str, path: Path, on_progress: OnProgress) -> None:
    content, size = bytearray(), 0
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            size = int(answer.headers.get("Content-Length") or 0)
            while True:
                data = answer.read(2**20)
                if not data:
                    break
                content += data
                on_progress(len(content), max(size, len(content)))
    except (OSError, HTTPException, ValueError) as error:
        raise InvalidInput(f"cannot download {url}: {one_line(error)}: give the file by its path") from None
    require(len(content) >= size, f"cannot download {url}: {len(content)} of {size} bytes came: try again")
    require(zipfile.is_zipfile(io.BytesIO(content)), f"cannot download {url}: what came is no zip archive")
    make_folder(path.parent)
    write_atomically(path, bytes(content))


# Data


class TextData:
    """Chunks of a split of prepared text, end to end; what does not fill one is dropped, in every document if there are any.

    Training chunks are shuffled anew every epoch; those of the other splits come in order, again and again. Which chunks a
    step sees is a function of (seed, step) alone.
    """

    def __init__(self, folder: str | Path, split: str = "train", *, length: int, seed: int = 0, verify: bool = True):
        require_choice("split", split, SPLITS)
        require_range("length", length, 1, 1_000_000)
        folder = Path(folder)
        meta = read_meta(folder)
        self.tokenizer = tokenizer_from_dict(meta["tokenizer"], str(folder / "meta.json"))
        self.name, self.split, self.length, self.seed = str(meta["name"]), split, length, seed
        self.vocab_size, self.symbols = self.tokenizer.vocab_size, self.tokenizer.symbols
        self.sha256 = meta["shards"][split]["sha256"]
        shard, path = meta["shards"][split], folder / f"{split}.bin"
        whole = self.vocab_size == meta["vocab_size"] and shard_is_whole(folder, meta, split)
        require(whole, f"{path}: missing or damaged: expected {shard['tokens']} tokens: {AGAIN}")
        if verify:
            require_digest(path, shard["sha256"])
        offsets = np.array([0, shard["tokens"]])
        if meta["documents"]:
            require_digest(path.with_suffix(".documents.npy"), shard["documents_sha256"])
            offsets = np.load(path.with_suffix(".documents.npy"), allow_pickle=False)
        lengths = np.diff(offsets)
        chunks = lengths // length  # of each document
        before = np.cumsum(chunks) - chunks
        self._starts = np.repeat(offsets[:-1] - before * length, chunks) + length * np.arange(chunks.sum())
        longest = f"{lengths.max(initial=0)} tokens" + (" in the longest document" if meta["documents"] else "")
        short = f"{self.name}: {longest} of its {split} part: too short: expected at least {length}, one chunk"
        require(len(self._starts) > 0, short)
        # Copy on write: the file cannot change, and torch takes the map as it is.
        self.tokens = np.memmap(path, dtype=id_type(self.vocab_size), mode="c")
        self._order = EpochOrder(len(self._starts), seed, shuffled=split == "train")
        self._kept: dict[str, Tensor] = {}  # the tokens on a device

    def __len__(self) -> int:
        return len(self._starts)

    def batch(
        self, step: int, size: int, *, rows: Rows | None = None, generator: torch.Generator | None = None, device=None
    ) -> Tensor:
        """(size, L), or these rows of it; `generator` is not needed: the order is fixed by the seed."""
        return self._chunks(self._order.rows(step, size, rows), device)

    def row(self, index: int) -> Tensor:
        """(L,): a chunk by its place in the text."""
        require(0 <= index < len(self), f"row {index}: expected 0 to {len(self) - 1}")
        return self._chunks(np.array([index]), None)[0]

    def in_order(self, start: int, count: int, device=None) -> Tensor:
        """(count, L): chunks as they follow each other in the text, fewer at its end."""
        require(0 <= start < len(self), f"start={start}: expected 0 to {len(self) - 1}")
        require_range("count", count, 1)
        return self._chunks(np.arange(start, min(start + count, len(self))), device)

    def rows_at(self, index: np.ndarray) -> Tensor:
        """(n, L): chunks by their places in the text."""
        return self._chunks(index, None)

    def _chunks(self, index: np.ndarray, device) -> Tensor:
        starts, within = self._starts[index], np.arange(self.length)
        if not self._keeps(device):
            return send(torch.from_numpy(self.tokens[starts[:, None] + within].astype(np.int64)), device)
        if str(device) not in self._kept:
            wide = self.tokens.dtype.itemsize > 1
            self._kept = {str(device): torch.from_numpy(self.tokens.view(np.int16) if wide else self.tokens).to(device)}
        places = send(torch.from_numpy(starts), device)[:, None] + torch.arange(self.length, device=device)
        return self._kept[str(device)][places].long() & 0xFFFF  # GPUs index int16, not uint16

    def _keeps(self, device) -> bool:
        return torch.device(device or "cpu").type == "cuda" and self.tokens.size <= ON_DEVICE
