"""Tokenizers: characters, bytes, text8's letters, and those of the `tokenizers` package."""

import importlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vmd.config import InvalidInput, require
from vmd.files import TOKENIZER_FILE, read_json

VOCAB_LIMIT = 65_536
TEXT8_ALPHABET = " abcdefghijklmnopqrstuvwxyz"  # id 0 is the space, 1 to 26 are a to z


class Tokenizer(Protocol):
    """Text to token ids and back. `symbols` names each id in print; `to_dict` is all that `tokenizer_from_dict` needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def symbols(self) -> tuple[str, ...]: ...
    def encode(self, text: str | bytes) -> np.ndarray: ...
    def decode(self, ids: Any) -> str: ...
    def to_dict(self) -> dict: ...


class CharTokenizer:
    """One id per character, in the order of the alphabet."""

    def __init__(self, alphabet: str):
        require(len(alphabet) > 0, "tokenizer char: an empty alphabet: expected at least one character")
        require(
            len(alphabet) <= VOCAB_LIMIT,
            f"tokenizer char: {len(alphabet)} different characters: expected at most {VOCAB_LIMIT}: byte has no such limit",
        )
        common, times = Counter(alphabet).most_common(1)[0]
        require(times == 1, f"tokenizer char: {common!r} is {times} times in the alphabet: expected different characters")
        points = code_points(alphabet)
        lone = (points >= 0xD800) & (points < 0xE000)
        require(not lone.any(), "tokenizer char: half a surrogate pair in the alphabet: expected whole characters")
        self.alphabet, self.vocab_size = alphabet, len(alphabet)
        choice = f"expected one of the {len(alphabet)} characters of the alphabet"
        self.expected = f"{choice} (trained with --tokenizer byte, a model reads any)"
        self.symbols = tuple(c if c.isprintable() else c.encode("unicode_escape").decode() for c in alphabet)
        self._points = points
        self._ids = np.full(int(points.max()) + 2, -1, dtype=np.int32)  # the last entry: whatever is beyond the alphabet
        self._ids[points] = np.arange(len(points))

    def outside(self, text: str) -> int:
        """The position of the first character outside the alphabet, or -1."""
        missing = self._look_up(text) < 0
        return int(missing.argmax()) if missing.any() else -1

    def _look_up(self, text: str) -> np.ndarray:
        return self._ids[np.minimum(code_points(text), len(self._ids) - 1)]

    def encode(self, text: str | bytes) -> np.ndarray:
        text = _as_text(text)
        if (position := self.outside(text)) >= 0:
            raise InvalidInput(f"{named(text[position])} at position {position}: {self.expected}")
        return self._look_up(text).astype(id_type(self.vocab_size))

    def decode(self, ids: Any) -> str:
        return self._points[_checked_ids(ids, self.vocab_size)].tobytes().decode("utf-32-le")

    def to_dict(self) -> dict:
        return {"kind": "char", "alphabet": self.alphabet}


class Text8Tokenizer(CharTokenizer):
    """The letters of text8 for any text, read as text8 has it: lower case, digits spelled out, one space for all else."""

    def __init__(self) -> None:
        super().__init__(TEXT8_ALPHABET)

    def outside(self, text: str) -> int:
        return -1

    def encode(self, text: str | bytes) -> np.ndarray:
        return super().encode(as_text8(_as_text(text)))

    def to_dict(self) -> dict:
        return {"kind": "text8"}


def as_text8(text: str) -> str:
    """By the rule of text8's maker (Mahoney 2011); letters with accents are no letters."""
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    capitals = dict(zip(map(ord, "ABCDEFGHIJKLMNOPQRSTUVWXYZ"), TEXT8_ALPHABET[1:], strict=True))
    spelled = text.translate(capitals | {ord(str(digit)): f" {name} " for digit, name in enumerate(digits)})
    return re.sub("[^a-z]+", " ", spelled)


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether what one writes, the other reads."""
    letters = isinstance(one, CharTokenizer) and isinstance(other, CharTokenizer)
    return one.symbols == other.symbols if letters else one.to_dict() == other.to_dict()


class ByteTokenizer:
    """One id per byte of UTF-8. Bytes that are no UTF-8, as a model may write, decode to the replacement character."""

    vocab_size = 256
    symbols = tuple(chr(b) if 32 <= b < 127 else f"\\x{b:02x}" for b in range(256))

    def encode(self, text: str | bytes) -> np.ndarray:
        if isinstance(text, str):
            text = _as_bytes(text)
        return np.frombuffer(text, dtype=np.uint8).copy()

    def decode(self, ids: Any) -> str:
        return _checked_ids(ids, 256).astype(np.uint8).tobytes().decode(errors="replace")

    def to_dict(self) -> dict:
        return {"kind": "byte"}


class JsonTokenizer:
    """A tokenizer of the `tokenizers` package, from the text of its JSON file."""

    def __init__(self, text: str, name: str = "tokenizer"):
        try:
            package = importlib.import_module("tokenizers")
        except ImportError:
            raise InvalidInput(f"{name}: expected the package `tokenizers` to read it: pip install tokenizers") from None
        try:
            self._tokenizer = package.Tokenizer.from_str(text)
        except Exception as error:  # the package raises nothing more precise
            raise InvalidInput(f"{name}: expected the JSON of a tokenizer: {one_line(error)}") from None
        self._tokenizer.no_truncation()  # a file may ask for either: here every token of the text is wanted, and no other
        self._tokenizer.no_padding()
        names = {number: token for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        require(bool(names), f"{name}: an empty vocabulary: expected at least one token")
        self.vocab_size = max(names) + 1
        require(self.vocab_size <= VOCAB_LIMIT, f"{name}: {self.vocab_size} tokens: expected at most {VOCAB_LIMIT}")
        self.symbols = tuple(names.get(number, f"<{number}>") for number in range(self.vocab_size))
        self._text = text

    def encode(self, text: str | bytes) -> np.ndarray:
        text = _as_text(text if isinstance(text, bytes) else _as_bytes(text))  # the package takes whole characters only
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the package raises nothing more special
            raise InvalidInput(f"{one_line(error)}: expected a tokenizer that knows all of this text") from None
        return np.array(ids, dtype=id_type(self.vocab_size))

    def decode(self, ids: Any) -> str:
        return str(self._tokenizer.decode(_checked_ids(ids, self.vocab_size).tolist(), skip_special_tokens=False))

    def gives_back(self, ids: np.ndarray) -> bool:
        """Whether these tokens surely say all of the text that they were made of, and nothing else.

        Not if text was changed before, if blanks between words were thrown away or are put in by decoding, or where there is
        the token for what is unknown.
        """
        parts = json.loads(self._text)
        model, first = parts.get("model") or {}, parts.get("pre_tokenizer")
        split = (first or {}).get("pretokenizers") or ([first] if first else [])
        kept = all(p.get("type") in KEEP_ALL and p.get("behavior") != "Removed" for p in split)
        kept = kept and not parts.get("normalizer") and (parts.get("decoder") or {}).get("type") in ADD_NOTHING
        name, unknown = model.get("unk_token"), model.get("unk_id")
        unknown = self._tokenizer.token_to_id(name) if name is not None else unknown
        return kept and (unknown is None or not bool((np.asarray(ids) == unknown).any()))

    def to_dict(self) -> dict:
        return {"kind": "json", "json": self._text}


KEEP_ALL = ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation")  # ways to cut a text
ADD_NOTHING = ("ByteLevel", "Metaspace", "Fuse")  # and to put it together


def load_tokenizer(name: str | Path, alphabet: str = "") -> Tokenizer:
    """`char` with its alphabet, `text8`, `byte`, or the path of a JSON file: of the `tokenizers` package, or of a model."""
    if name in ("byte", "text8"):
        return tokenizer_from_dict({"kind": str(name)})
    if name == "char":
        require(bool(alphabet), "tokenizer 'char': expected an alphabet, or a text to find it in")
        return CharTokenizer(alphabet)
    path = Path(name)
    require(
        path.suffix == ".json" or path.is_file(),
        f"tokenizer {str(name)!r}: expected char, text8, byte or the path of a tokenizer's JSON file",
    )
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise InvalidInput(f"{path}: cannot read the tokenizer: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path}: expected the JSON of a tokenizer, in UTF-8") from None
    if (ours := _parsed(text)) is not None:
        return tokenizer_from_dict(ours, str(path))
    return JsonTokenizer(text, str(path))


def _parsed(text: str) -> dict | None:
    """The description of a tokenizer as `to_dict` makes it, if it is one."""
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "kind" in values else None


def tokenizer_from_dict(values: Any, where: str = "tokenizer") -> Tokenizer:
    """The inverse of `to_dict`."""
    kind = values.get("kind") if isinstance(values, dict) else None
    known = {"char": {"kind", "alphabet"}, "text8": {"kind"}, "byte": {"kind"}, "json": {"kind", "json"}}
    good = isinstance(values, dict) and all(isinstance(value, str) for value in values.values())
    good = good and kind in known and set(values) == known[kind]
    require(good, f"{where}: expected the description of a tokenizer, got {values!r:.60}")
    if kind == "char":
        return CharTokenizer(values["alphabet"])
    if kind == "json":
        return JsonTokenizer(values["json"], where)
    return ByteTokenizer() if kind == "byte" else Text8Tokenizer()


def is_ours(path: Path) -> bool:
    """Whether a tokenizer.json describes a tokenizer as we do: files of other libraries have that name, too."""
    described = read_json(path) if path.is_file() else None
    return isinstance(described, dict) and "kind" in described


def model_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer that a model of text was saved with, None for others."""
    path = folder / TOKENIZER_FILE
    return tokenizer_from_dict(read_json(path), str(path)) if is_ours(path) else None


def code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def id_type(vocab_size: int) -> np.dtype:
    return np.dtype("u1") if vocab_size <= 256 else np.dtype("<u2")


def named(character: str) -> str:
    return f"character {character!r} (U+{ord(character):04X})"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _as_text(text: str | bytes) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"not text: byte 0x{text[error.start]:02x} at offset {error.start}: expected UTF-8") from None


def _as_bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{named(text[error.start])} at position {error.start}: expected Unicode text") from None


def _checked_ids(ids: Any, vocab_size: int) -> np.ndarray:
    found = np.asarray(ids)
    if found.size == 0:
        return np.empty(0, dtype=np.int64)
    require(
        found.ndim == 1 and np.issubdtype(found.dtype, np.integer),
        f"token ids of shape {found.shape} and type {found.dtype}: expected one row of integers",
    )
    for extreme in (int(found.min()), int(found.max())):
        require(0 <= extreme < vocab_size, f"token id {extreme}: expected 0 to {vocab_size - 1}")
    return found
