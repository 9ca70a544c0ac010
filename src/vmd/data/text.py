"""Text: shards of token ids that are made once and memory-mapped, and chunks of them to train on."""

import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import shutil
import tempfile
import urllib.request
import zipfile
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vmd.config import InvalidInput, require, require_choice, require_range
from vmd.data.arrays import ON_DEVICE, EpochOrder
from vmd.data.tokenizers import (
    TEXT8_ALPHABET,
    CharTokenizer,
    Text8Tokenizer,
    Tokenizer,
    code_points,
    id_type,
    load_tokenizer,
    named,
    one_line,
    tokenizer_from_dict,
)
from vmd.files import claimed, make_folder, read_json, write_atomically
from vmd.masking import Rows, send

FORMAT = "vmd-text-1"
SPLITS = ("train", "validation", "test")
READ_BYTES = 2**22  # of text held at a time
PIECE = 2**16  # characters encoded at a time, up to twice as many
AGAIN = "delete the folder and prepare the text again"

TEXT8_URL, TEXT8_ARCHIVE = "http://mattmahoney.net/dc/text8.zip", "text8.zip"
# Each name stands for one length and one split: figures on other texts are not figures on these.
TEXT8_KINDS = {"text8": (100_000_000, (0.9, 0.05, 0.05)), "text8-70M": (70_000_000, (0.95, 0.025, 0.025))}

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all


# Reading


def _source_files(source: Path) -> dict[str, Path]:
    """The files of a source by name, in order. Hidden ones are left out: systems put their own into folders."""
    require(source.is_file() or source.is_dir(), f"{source}: no such file or folder: expected text to prepare")
    if source.is_file():
        return {source.name: source}

    def refuse(error: OSError) -> None:
        raise error

    with _reading(source):  # a folder that cannot be read must not be left out in silence
        walked = [Path(folder) / name for folder, _, names in os.walk(source, onerror=refuse) for name in names]
    found = {path.relative_to(source): path for path in walked if path.is_file()}
    files = {name.as_posix(): path for name, path in found.items() if not any(part.startswith(".") for part in name.parts)}
    require(bool(files), f"{source}: an empty folder: expected text files in it")
    return dict(sorted(files.items()))


def _state(files: dict[str, Path]) -> list[dict]:
    """What tells whether a source is still the same."""
    try:
        stats = {name: path.stat() for name, path in files.items()}
    except OSError as error:
        raise InvalidInput(f"{error.filename}: cannot read: {error.strerror}") from None
    return [{"name": name, "bytes": s.st_size, "mtime_ns": s.st_mtime_ns} for name, s in stats.items()]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file as it is on disk, and its text: the same, or what it decompresses to."""
    with contextlib.ExitStack() as stack:
        raw: IO[bytes] = stack.enter_context(open(path, "rb"))
        text: Any = raw
        if path.suffix == ".xz":
            text = stack.enter_context(lzma.open(raw))
        elif path.suffix == ".gz":
            text = stack.enter_context(gzip.open(raw))
        elif path.suffix == ".zip":
            archive = stack.enter_context(zipfile.ZipFile(raw))
            inside = [member for member in archive.infolist() if not member.is_dir()]
            require(len(inside) == 1, f"{path}: {len(inside)} files in the archive: expected one, the text")
            text = stack.enter_context(archive.open(inside[0]))
        yield raw, text


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, gzip.BadGzipFile, RuntimeError):
        raise InvalidInput(f"{path}: truncated, damaged or not a {path.suffix} file") from None
    except OSError as error:
        raise InvalidInput(f"{path}: cannot read: {error.strerror or one_line(error)}") from None


def _read(path: Path, on_bytes: Callable[[int], None] = lambda done: None) -> Iterator[str]:
    """The text of a file, some of it at a time, line ends as they are."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with contextlib.ExitStack() as stack:
        with _reading(path):
            raw, stream = stack.enter_context(_opened(path))
        while True:
            with _reading(path):
                data = stream.read(READ_BYTES)
            start = done - len(decoder.getstate()[0])  # a character may have begun in the bytes before
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                where = f"byte 0x{error.object[error.start]:02x} at offset {start + error.start}"
                raise InvalidInput(f"{path}: not text: {where}: expected UTF-8") from None
            done += len(data)
            if text:
                yield text
            on_bytes(raw.tell())
            if not data:
                return


def _paragraphs(texts: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(number, text) of blocks that blank lines separate; white space at the end of a block is not part of it."""
    number, held = -1, "\n\n"  # as if a blank line came before; white space is held until what follows it is known
    for text in texts:
        held += text
        body = held.rstrip()
        if not body:
            continue
        held = held[len(body) :]
        first, *others = (block.rstrip() for block in re.split(r"\n\s*\n", body))
        if first:
            yield number, first
        for block in others:
            number += 1
            yield number, block


def _documents(files: dict[str, Path], paragraphs: bool, on_progress: OnProgress, again: bool) -> Iterator[tuple[int, str]]:
    """(document, text): every file is a document, or every paragraph of the one file. `again`: the second reading of two."""
    sizes = [entry["bytes"] for entry in _state(files)]
    total, before, number = max(2 * sum(sizes), 1), sum(sizes) if again else 0, 0
    for path, size in zip(files.values(), sizes, strict=True):

        def tell(done: int, before: int = before, size: int = size) -> None:
            on_progress(before + min(done, size), total)

        texts = _read(path, tell)
        if paragraphs:
            yield from _paragraphs(texts)
        else:
            some = False
            for text in texts:
                some = True
                yield number, text
            number += some
        before += size
        on_progress(before, total)  # an archive is not read to its last byte


def _cut(texts: Iterable[str], borders: list[int]) -> Iterator[tuple[int, str]]:
    """(part, text): a stream cut after so many characters."""
    position = 0
    for text in texts:
        start = 0
        while start < len(text):
            part = bisect_right(borders, position)
            stop = len(text) if part == len(borders) else min(len(text), start + borders[part] - position)
            yield part, text[start:stop]
            position, start = position + stop - start, stop


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """The same text in pieces that do not depend on how it was read, cut before a space that follows a word.

    A tokenizer that splits there itself gives the ids of the whole text.
    """
    border, held = re.compile(r"(?<=\S)(?= )"), ""
    for text in texts:
        held, start = held + text, 0
        while len(held) - start >= 2 * PIECE:
            found = border.search(held, start + PIECE, start + 2 * PIECE)
            stop = found.start() if found else start + 2 * PIECE
            yield held[start:stop]
            start = stop
        held = held[start:]
    if held:
        yield held


def _encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Piece by piece, and how many characters each was."""
    ends_in_space = False
    for piece in _pieces(texts):
        ids = tokenizer.encode(piece)
        if isinstance(tokenizer, Text8Tokenizer) and len(ids):  # two pieces may both have the space between them
            ids = ids[1:] if ends_in_space and ids[0] == 0 else ids
            ends_in_space = bool(ids[-1] == 0) if len(ids) else True
        yield ids, len(piece)


# Preparing


class _Shard:
    """One split, hashed while it is written."""

    def __init__(self, path: Path, file: IO[bytes]):
        self.path, self.file, self.digest = path, file, hashlib.sha256()
        self.tokens, self.characters = 0, 0
        self.offsets = array("q", [0])  # where documents begin, and the end of the last

    def write(self, ids: np.ndarray, characters: int) -> None:
        content = ids.tobytes()
        self.digest.update(content)
        self.tokens, self.characters = self.tokens + len(ids), self.characters + characters
        with _writing(self.path):
            self.file.write(content)

    def finish(self, documents: bool) -> dict:
        with _writing(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())
        entry = {"tokens": self.tokens, "characters": self.characters, "sha256": self.digest.hexdigest()}
        if documents:
            content = io.BytesIO()
            np.save(content, np.array(self.offsets, dtype="<i8"))
            write_atomically(self.path.with_suffix(".documents.npy"), content.getvalue())
            entry["documents"] = len(self.offsets) - 1
            entry["documents_sha256"] = hashlib.sha256(content.getvalue()).hexdigest()
        return entry


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"{path}: cannot write: {error.strerror}") from None


def prepare_text(
    source: str | Path,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    *,
    split: tuple[float, float, float] = (0.9, 0.05, 0.05),
    documents: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> Path:
    """Make a folder of train.bin, validation.bin, test.bin and meta.json from a text file or a folder of them.

    Files of a folder follow each other in the order of their names, with nothing between; .xz, .gz and .zip (of one file)
    are decompressed. The stream is split in order by characters. With `documents` every file of a folder, or every block
    between blank lines of one file, is a document; splits are by their number and chunks never cross them. Tokenizer
    `char` takes the characters of the whole source, sorted, for its alphabet. What `out` already holds of the same source,
    tokenizer and split is kept; the text is read twice and never held whole, and an interrupted run leaves nothing behind.
    """
    source = Path(source)
    name = source.resolve().name
    if name in TEXT8_KINDS:
        name += " (as given)"  # only `text8` checks that it is
    chosen: Tokenizer | None = None  # found in the text
    if not isinstance(tokenizer, (str, Path)):
        chosen = tokenizer
    elif tokenizer != "char":
        chosen = load_tokenizer(tokenizer)
    return _prepare(source, chosen, Path(out), name, split, documents, on_progress)


def _prepare(
    source: Path,
    tokenizer: Tokenizer | None,
    out: Path,
    name: str,
    split: tuple[float, ...],
    documents: bool,
    on_progress: OnProgress,
    characters: int = 0,
) -> Path:
    """Without a tokenizer: one of the characters found. `characters`: how many there must be."""
    good = len(split) == 3 and split[0] > 0 and min(split) >= 0 and abs(sum(split) - 1) < 1e-9
    require(good, f"split={split}: expected shares of train, validation and test that sum to 1, such as 0.9, 0.05, 0.05")
    with _reading(source):
        files = _source_files(source)
    out, real = out.resolve(), source.resolve()
    apart = not out.is_relative_to(real) and not real.is_relative_to(out)
    require(apart, f"{out}: inside the source {source}, or around it: expected an output folder beside it")
    asked = {
        "format": FORMAT,
        "name": name,
        "alphabet_found": tokenizer is None,
        "split": list(split),
        "documents": documents,
        "source": _state(files),
    }
    if _is_ready(out, asked, tokenizer):
        return out
    _require_ours(out)
    partial = out.with_name(out.name + ".partial")
    _require_ours(partial)

    paragraphs = documents and source.is_file()
    texts = _documents(files, paragraphs, on_progress, again=False)
    tokenizer, counted, last = _first_reading(source, files, tokenizer, texts)
    require(
        characters in (0, counted),
        f"{source}: {counted:,} characters: expected {characters:,}, the length of {name}: prepare_text takes any other",
    )
    borders = _borders(source, last + 1 if documents else counted, split, "documents" if documents else "characters")

    make_folder(out.parent)
    make_folder(partial)
    with claimed(partial, wait=True):
        try:
            if _is_ready(out, asked, tokenizer):  # another run made it while this one waited
                shutil.rmtree(partial, ignore_errors=True)
                return out
            for left in partial.iterdir():  # by a run that was killed
                left.unlink()
            texts = _documents(files, paragraphs, on_progress, again=True)
            shards = _second_reading(partial, tokenizer, borders, documents, texts)
            require(_state(files) == asked["source"], f"{source}: changed while it was read: prepare it again")
            meta = {**asked, "tokenizer": tokenizer.to_dict(), "vocab_size": tokenizer.vocab_size, "shards": shards}
            write_atomically(partial / "meta.json", json.dumps(meta, indent=1) + "\n")
            _move(partial, out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return out


def _first_reading(
    source: Path, files: dict[str, Path], tokenizer: Tokenizer | None, texts: Iterable[tuple[int, str]]
) -> tuple[Tokenizer, int, int]:
    """The tokenizer, how many characters there are and the last document. Refuses what cannot be encoded."""
    seen, counted, document = np.zeros(0x110000, dtype=bool), 0, -1
    for document, text in texts:  # noqa: B007
        counted += len(text)
        if tokenizer is None:
            seen[code_points(text)] = True
        else:
            _require_known(text, tokenizer, files)
    require(counted > 0, f"{source}: empty: expected some text")
    return tokenizer or CharTokenizer("".join(map(chr, np.flatnonzero(seen)))), counted, document


def _require_known(text: str, tokenizer: Tokenizer, files: dict[str, Path]) -> str:
    """The text as it is. What the tokenizer does not know is told by its place in the file."""
    if isinstance(tokenizer, CharTokenizer) and (position := tokenizer.outside(text)) >= 0:
        raise InvalidInput(f"{_locate(files, text[position])}: {tokenizer.expected}")
    return text


def _locate(files: dict[str, Path], character: str) -> str:
    for path in files.values():
        before = 0
        for text in _read(path):
            if (position := text.find(character)) >= 0:
                return f"{path}: {named(character)} at position {before + position}"
            before += len(text)
    return named(character)


def _borders(source: Path, total: int, split: tuple[float, ...], unit: str) -> list[int]:
    borders = [round(total * split[0]), round(total * (split[0] + split[1]))]
    sizes = np.diff([0, *borders, total])
    for which, size, share in zip(SPLITS, sizes, split, strict=True):
        short = f"{source}: {total} {unit}: too short: expected more, {share:g} of them for {which}"
        require(size > 0 or share == 0, short)
    return borders


def _second_reading(
    folder: Path, tokenizer: Tokenizer, borders: list[int], documents: bool, texts: Iterable[tuple[int, str]]
) -> dict[str, dict]:
    with contextlib.ExitStack() as files:
        shards = []
        for split in SPLITS:
            path = folder / f"{split}.bin"
            with _writing(path):
                shards.append(_Shard(path, files.enter_context(open(path, "wb"))))
        parts = texts if documents else _cut((text for _, text in texts), borders)
        for number, group in itertools.groupby(parts, lambda part: part[0]):
            shard = shards[bisect_right(borders, number) if documents else number]
            for ids, characters in _encoded((text for _, text in group), tokenizer):
                shard.write(ids, characters)
            shard.offsets.append(shard.tokens)
        return {split: shard.finish(documents) for split, shard in zip(SPLITS, shards, strict=True)}


def _is_ready(out: Path, asked: dict, tokenizer: Tokenizer | None) -> bool:
    """Whether the folder holds what was asked for, whole."""
    if not (out / "meta.json").is_file():
        return False
    meta = _read_meta(out)
    same = all(meta[key] == value for key, value in asked.items())
    same = same and (tokenizer is None or meta["tokenizer"] == tokenizer.to_dict())
    return same and all(_is_whole(out, meta, split) for split in SPLITS)


def _require_ours(folder: Path) -> None:
    """Only a folder that was prepared before is replaced."""
    if folder.exists() or folder.is_symlink():
        require(folder.is_dir() and not folder.is_symlink(), f"{folder}: not a folder: expected a folder to write to")
        ours = {"meta.json", *(f"{split}{end}" for split in SPLITS for end in (".bin", ".documents.npy"))}
        others = sorted(path.name for path in folder.iterdir() if path.name.removesuffix(".partial") not in ours)
        require(not others, f"{folder}: holds {', '.join(others[:3])}: expected a new folder, or one of prepared text")


def _move(partial: Path, out: Path) -> None:
    with _writing(out):
        if out.exists():  # a folder that is not empty cannot be renamed over
            aside = Path(tempfile.mkdtemp(prefix=out.name + ".old-", dir=out.parent))
            os.rename(out, aside / out.name)
            os.rename(partial, out)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(partial, out)


def _read_meta(folder: Path) -> dict:
    path = folder / "meta.json"
    require(path.is_file(), f"{folder}: no meta.json: expected a folder of prepared text")
    meta = read_json(path)
    found = meta.get("format") if isinstance(meta, dict) else None
    require(found == FORMAT, f"{path}: format {found!r:.60}: expected {FORMAT!r}")
    try:
        needed = ["tokens", "characters", "sha256"] + (["documents", "documents_sha256"] if meta["documents"] else [])
        shards = [meta["shards"][split][key] for split in SPLITS for key in needed]
        numbers = [value for value in shards if not isinstance(value, str)]
        whole = all(isinstance(n, int) and n >= 0 for n in [meta["vocab_size"], *numbers])
        whole = whole and {"name", "alphabet_found", "split", "source", "tokenizer"} <= set(meta)
    except (KeyError, TypeError):
        whole = False
    require(whole, f"{path}: damaged: expected what vmd wrote: {AGAIN}")
    return meta


def _is_whole(folder: Path, meta: dict, split: str) -> bool:
    path, size = folder / f"{split}.bin", meta["shards"][split]["tokens"] * id_type(meta["vocab_size"]).itemsize
    return path.is_file() and path.stat().st_size == size


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
    with _reading(source):
        files = _source_files(source)
    texts = (_require_known(text, tokenizer, files) for path in files.values() for text in _read(path))
    parts = [ids for ids, _ in _encoded(texts, tokenizer)]
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
        if not (cache / TEXT8_ARCHIVE).is_file() and (out / "meta.json").is_file() and _read_meta(out)["name"] == kind:
            return out  # prepared before, and the archive thrown away
        source = text8_archive(cache, on_progress)
    require(Path(source).is_file(), f"{source}: no such file: expected {kind}, plain, .zip, .xz or .gz")
    return _prepare(Path(source), CharTokenizer(TEXT8_ALPHABET), out, kind, split, False, on_progress, characters)


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
        meta = _read_meta(folder)
        self.tokenizer = tokenizer_from_dict(meta["tokenizer"], str(folder / "meta.json"))
        self.name, self.split, self.length, self.seed = str(meta["name"]), split, length, seed
        self.vocab_size, self.symbols = self.tokenizer.vocab_size, self.tokenizer.symbols
        self.sha256 = meta["shards"][split]["sha256"]
        shard, path = meta["shards"][split], folder / f"{split}.bin"
        whole = self.vocab_size == meta["vocab_size"] and _is_whole(folder, meta, split)
        require(whole, f"{path}: missing or damaged: expected {shard['tokens']} tokens: {AGAIN}")
        if verify:
            _require_digest(path, shard["sha256"])
        offsets = np.array([0, shard["tokens"]])
        if meta["documents"]:
            _require_digest(path.with_suffix(".documents.npy"), shard["documents_sha256"])
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


def _require_digest(path: Path, expected: str) -> None:
    with _reading(path), open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    require(found == expected, f"{path}: damaged: its sha256 is not that in meta.json: {AGAIN}")
