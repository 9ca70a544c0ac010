"""Reading text: files and folders, compressed or not, never all at once, in pieces that a tokenizer reads like the whole."""

import codecs
import contextlib
import gzip
import lzma
import os
import re
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from vmd.config import InvalidInput, require
from vmd.data.tokenizers import CharTokenizer, Text8Tokenizer, Tokenizer, named, one_line

READ_BYTES = 2**22  # of text held at a time
PIECE = 2**16  # characters encoded at a time, up to twice as many

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all


def source_files(source: Path) -> dict[str, Path]:
    """The files of a source by name, in order. Hidden ones are left out: systems put their own into folders."""
    require(source.is_file() or source.is_dir(), f"{source}: no such file or folder: expected text to prepare")
    if source.is_file():
        return {source.name: source}

    def refuse(error: OSError) -> None:
        raise error

    with reading(source):  # a folder that cannot be read must not be left out in silence
        walked = [Path(folder) / name for folder, _, names in os.walk(source, onerror=refuse) for name in names]
    found = {path.relative_to(source): path for path in walked if path.is_file()}
    files = {name.as_posix(): path for name, path in found.items() if not any(part.startswith(".") for part in name.parts)}
    require(bool(files), f"{source}: an empty folder: expected text files in it")
    return dict(sorted(files.items()))


def state_of(files: dict[str, Path]) -> list[dict]:
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
def reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, gzip.BadGzipFile, RuntimeError):
        raise InvalidInput(f"{path}: truncated, damaged or not a {path.suffix} file") from None
    except OSError as error:
        raise InvalidInput(f"{path}: cannot read: {error.strerror or one_line(error)}") from None


def read_file(path: Path, on_bytes: Callable[[int], None] = lambda done: None) -> Iterator[str]:
    """The text of a file, some of it at a time, line ends as they are."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with contextlib.ExitStack() as stack:
        with reading(path):
            raw, stream = stack.enter_context(_opened(path))
        while True:
            with reading(path):
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


def split_paragraphs(texts: Iterable[str]) -> Iterator[tuple[int, str]]:
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


def read_documents(
    files: dict[str, Path], paragraphs: bool, on_progress: OnProgress, again: bool
) -> Iterator[tuple[int, str]]:
    """(document, text): every file is a document, or every paragraph of the one file. `again`: the second reading of two."""
    sizes = [entry["bytes"] for entry in state_of(files)]
    total, before, number = max(2 * sum(sizes), 1), sum(sizes) if again else 0, 0
    for path, size in zip(files.values(), sizes, strict=True):

        def tell(done: int, before: int = before, size: int = size) -> None:
            on_progress(before + min(done, size), total)

        texts = read_file(path, tell)
        if paragraphs:
            yield from split_paragraphs(texts)
        else:
            some = False
            for text in texts:
                some = True
                yield number, text
            number += some
        before += size
        on_progress(before, total)  # an archive is not read to its last byte


def cut(texts: Iterable[str], borders: list[int]) -> Iterator[tuple[int, str]]:
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


def encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Piece by piece, and how many characters each was."""
    ends_in_space = False
    for piece in _pieces(texts):
        ids = tokenizer.encode(piece)
        if isinstance(tokenizer, Text8Tokenizer) and len(ids):  # two pieces may both have the space between them
            ids = ids[1:] if ends_in_space and ids[0] == 0 else ids
            ends_in_space = bool(ids[-1] == 0) if len(ids) else True
        yield ids, len(piece)


def require_known(text: str, tokenizer: Tokenizer, files: dict[str, Path]) -> str:
    """The text as it is. What the tokenizer does not know is told by its place in the file."""
    if isinstance(tokenizer, CharTokenizer) and (position := tokenizer.outside(text)) >= 0:
        raise InvalidInput(f"{_locate(files, text[position])}: {tokenizer.expected}")
    return text


def _locate(files: dict[str, Path], character: str) -> str:
    for path in files.values():
        before = 0
        for text in read_file(path):
            if (position := text.find(character)) >= 0:
                return f"{path}: {named(character)} at position {before + position}"
            before += len(text)
    return named(character)
