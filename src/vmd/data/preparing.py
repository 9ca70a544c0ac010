"""Preparing text: shards of token ids that are made once, whole or not at all."""

import contextlib
import hashlib
import io
import itertools
import json
import os
import shutil
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from vmd.config import InvalidInput, require
from vmd.data.reading import OnProgress, cut, encoded, read_documents, reading, require_known, source_files, state_of
from vmd.data.tokenizers import CharTokenizer, Tokenizer, code_points, id_type, load_tokenizer
from vmd.files import claimed, make_folder, read_json, write_atomically

FORMAT = "vmd-text-1"
SPLITS = ("train", "validation", "test")
AGAIN = "delete the folder and prepare the text again"
# Each name stands for one length and one split: figures on other texts are not figures on these.
TEXT8_KINDS = {"text8": (100_000_000, (0.9, 0.05, 0.05)), "text8-70M": (70_000_000, (0.95, 0.025, 0.025))}


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
    return prepare(source, chosen, Path(out), name, split, documents, on_progress)


def prepare(
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
    with reading(source):
        files = source_files(source)
    out, real = out.resolve(), source.resolve()
    apart = not out.is_relative_to(real) and not real.is_relative_to(out)
    require(apart, f"{out}: inside the source {source}, or around it: expected an output folder beside it")
    asked = {
        "format": FORMAT,
        "name": name,
        "alphabet_found": tokenizer is None,
        "split": list(split),
        "documents": documents,
        "source": state_of(files),
    }
    if is_ready(out, asked, tokenizer):
        return out
    _require_ours(out)
    partial = out.with_name(out.name + ".partial")
    _require_ours(partial)

    paragraphs = documents and source.is_file()
    texts = read_documents(files, paragraphs, on_progress, again=False)
    tokenizer, counted, last = _first_reading(source, files, tokenizer, texts)
    require(
        characters in (0, counted),
        f"{source}: {counted:,} characters: expected {characters:,}, the length of {name}: prepare_text takes any other",
    )
    borders = borders_of(source, last + 1 if documents else counted, split, "documents" if documents else "characters")

    make_folder(out.parent)
    make_folder(partial)
    with claimed(partial, wait=True):
        try:
            if is_ready(out, asked, tokenizer):  # another run made it while this one waited
                shutil.rmtree(partial, ignore_errors=True)
                return out
            for left in partial.iterdir():  # by a run that was killed
                left.unlink()
            texts = read_documents(files, paragraphs, on_progress, again=True)
            shards = _second_reading(partial, tokenizer, borders, documents, texts)
            require(state_of(files) == asked["source"], f"{source}: changed while it was read: prepare it again")
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
            require_known(text, tokenizer, files)
    require(counted > 0, f"{source}: empty: expected some text")
    return tokenizer or CharTokenizer("".join(map(chr, np.flatnonzero(seen)))), counted, document


def borders_of(source: Path, total: int, split: tuple[float, ...], unit: str) -> list[int]:
    borders = [round(total * split[0]), round(total * (split[0] + split[1]))]
    sizes = np.diff([0, *borders, total])
    for which, size, share in zip(SPLITS, sizes, split, strict=True):
        short = f"{source}: {total} {unit}: too short: expected more, {share:g} of them for {which}"
        require(size > 0 or share == 0, short)
    return borders


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


def _second_reading(
    folder: Path, tokenizer: Tokenizer, borders: list[int], documents: bool, texts: Iterable[tuple[int, str]]
) -> dict[str, dict]:
    with contextlib.ExitStack() as files:
        shards = []
        for split in SPLITS:
            path = folder / f"{split}.bin"
            with _writing(path):
                shards.append(_Shard(path, files.enter_context(open(path, "wb"))))
        parts = texts if documents else cut((text for _, text in texts), borders)
        for number, group in itertools.groupby(parts, lambda part: part[0]):
            shard = shards[bisect_right(borders, number) if documents else number]
            for ids, characters in encoded((text for _, text in group), tokenizer):
                shard.write(ids, characters)
            shard.offsets.append(shard.tokens)
        return {split: shard.finish(documents) for split, shard in zip(SPLITS, shards, strict=True)}


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"{path}: cannot write: {error.strerror}") from None


def is_ready(out: Path, asked: dict, tokenizer: Tokenizer | None) -> bool:
    """Whether the folder holds what was asked for, whole."""
    if not (out / "meta.json").is_file():
        return False
    meta = read_meta(out)
    same = all(meta[key] == value for key, value in asked.items())
    same = same and (tokenizer is None or meta["tokenizer"] == tokenizer.to_dict())
    return same and all(shard_is_whole(out, meta, split) for split in SPLITS)


def shard_is_whole(folder: Path, meta: dict, split: str) -> bool:
    path, size = folder / f"{split}.bin", meta["shards"][split]["tokens"] * id_type(meta["vocab_size"]).itemsize
    return path.is_file() and path.stat().st_size == size


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


def read_meta(folder: Path) -> dict:
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


def require_digest(path: Path, expected: str) -> None:
    with reading(path), open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    require(found == expected, f"{path}: damaged: its sha256 is not that in meta.json: {AGAIN}")
