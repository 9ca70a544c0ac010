import gzip
import io
import itertools
import json
import lzma
import os
import random
import re
import shutil
import sys
import tempfile
import urllib.request
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from command import contents
from helpers import tiny_config
from vmd.config import InvalidInput, RunConfig, override_all
from vmd.data import load_data, preparing
from vmd.data import reading as reading_text
from vmd.data.preparing import SPLITS, TEXT8_KINDS, prepare_text
from vmd.data.reading import PIECE
from vmd.data.text import TextData, text8, text_rows
from vmd.data.tokenizers import (
    TEXT8_ALPHABET,
    ByteTokenizer,
    CharTokenizer,
    JsonTokenizer,
    Text8Tokenizer,
    as_text8,
    load_tokenizer,
    tokenizer_from_dict,
)
from vmd.files import claimed
from vmd.masking import Rows
from vmd.model import VMD
from vmd.training import train

LINE_ENDS = ["\n", "\r\n", "\r", "\u2028", "\x0b"]
characters = st.characters(exclude_categories=["Cs"])
texts = st.lists(st.one_of(st.sampled_from([*LINE_ENDS, " ", "a", "é", "中", "😀"]), characters)).map("".join)


def mixed(count: int, seed: int = 0) -> str:
    """Words, blank lines, and characters of one to four bytes."""
    draw = random.Random(seed)
    return "".join(draw.choices(["the ", "cat", "\n", "\n\n", "\r\n", " ", "é", "ﬁn", "中", "😀", ". "], k=count))


def saved(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def shard(folder: Path, split: str) -> np.ndarray:
    meta = json.loads((folder / "meta.json").read_text())
    return np.fromfile(folder / f"{split}.bin", dtype=np.uint8 if meta["vocab_size"] <= 256 else np.uint16)


def stream(folder: Path) -> np.ndarray:
    return np.concatenate([shard(folder, split) for split in SPLITS])


def documents(folder: Path) -> list[str]:
    """The documents of the three shards, decoded."""
    meta = json.loads((folder / "meta.json").read_text())
    tokenizer, found = tokenizer_from_dict(meta["tokenizer"]), []
    for split in SPLITS:
        offsets, ids = np.load(folder / f"{split}.documents.npy"), shard(folder, split)
        assert (offsets[0], offsets[-1]) == (0, len(ids))
        found += [tokenizer.decode(ids[a:b]) for a, b in itertools.pairwise(offsets)]
    return found


def bins(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "meta.json"}


def refuses(says: str, call, *args, **more) -> None:
    """One line that matches."""
    with pytest.raises(InvalidInput, match=says) as refusal:
        call(*args, **more)
    assert "\n" not in str(refusal.value)


# Tokenizers


@settings(max_examples=60)
@given(texts.filter(bool))
def test_characters_round_trip(text):
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert [tokenizer.alphabet[i] for i in ids] == list(text)
    assert tokenizer.decode(ids) == text
    assert np.array_equal(tokenizer.encode(text.encode()), ids)
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert np.array_equal(again.encode(text), ids)
    assert again.symbols == tokenizer.symbols


@given(texts, st.binary())
def test_bytes_round_trip(text, data):
    tokenizer = tokenizer_from_dict(json.loads(json.dumps(ByteTokenizer().to_dict())))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.encode(data).tolist() == list(data)
    assert isinstance(tokenizer.decode(list(data)), str)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("\\ \t\n\r\x85\u2028\xa0\\nab😀".replace("\\n", ""))])
def test_symbols_are_different_names_on_one_line(tokenizer):
    assert len(set(tokenizer.symbols)) == len(tokenizer.symbols) == tokenizer.vocab_size
    assert all(name.isprintable() for name in tokenizer.symbols)


def test_symbols_stand_for_their_ids():
    assert ByteTokenizer().symbols[ord("A")] == "A"
    assert ByteTokenizer().symbols[10] == "\\x0a"
    assert ByteTokenizer().symbols[0xE9] == "\\xe9"
    assert CharTokenizer("a\né").symbols == ("a", "\\n", "é")


def test_ids_are_as_small_as_they_can_be():
    alphabet = "".join(map(chr, range(0x100, 0x201)))
    assert CharTokenizer(alphabet[:256]).encode("").dtype == np.uint8
    assert CharTokenizer(alphabet).encode(alphabet).tolist() == list(range(257))
    assert CharTokenizer(alphabet).encode("").dtype == np.uint16


def test_the_alphabet_of_text8_starts_with_the_space():
    assert CharTokenizer(TEXT8_ALPHABET).encode(" abz").tolist() == [0, 1, 2, 26]
    assert list(TEXT8_ALPHABET) == sorted(TEXT8_ALPHABET)


@given(st.text(max_size=60))
def test_any_text_is_read_as_text8_has_it(text):
    folded = as_text8(text)
    assert set(folded) <= set(TEXT8_ALPHABET)
    assert "  " not in folded
    assert as_text8(folded) == folded
    assert Text8Tokenizer().decode(Text8Tokenizer().encode(text)) == folded
    letters = [c.lower() for c in text if c.isascii() and c.isalpha()]
    assert [c for c in folded if c != " "] == letters or any(c in "0123456789" for c in text)


def test_text8_spells_digits_and_has_one_space_for_all_else():
    assert as_text8("In 1969, Neil's\n\n-- moon!") == "in one nine six nine neil s moon "
    assert as_text8("Café K\u212a") == "caf k "  # neither an accent nor the sign for Kelvin is a letter of text8
    assert tokenizer_from_dict(Text8Tokenizer().to_dict()).to_dict() == {"kind": "text8"}
    assert load_tokenizer("text8").symbols == CharTokenizer(TEXT8_ALPHABET).symbols


@given(st.text(alphabet="aB .,1\n", min_size=1, max_size=120), st.integers(1, 9))
@settings(deadline=None)
def test_where_a_text_is_cut_leaves_no_trace_in_text8(text, piece):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_text, "PIECE", piece)
        path = Path(folder) / "some.txt"
        path.write_text(text, newline="")
        rows = text_rows(str(path), Text8Tokenizer(), 1)
        assert Text8Tokenizer().decode(rows[:, 0]) == as_text8(text)
        out = prepare_text(path, "text8", Path(folder) / "out", split=(1.0, 0.0, 0.0))
        data = TextData(out, "train", length=1)
        assert data.tokenizer.to_dict() == {"kind": "text8"}
        assert data.tokenizer.decode(data.in_order(0, len(data)).flatten()) == as_text8(text)


def test_files_of_a_folder_are_read_as_one_text(tmp_path):
    """To score as to train: the white space where one ends and the next begins is one space of text8."""
    for name, text in (("a.txt", "One cat.\n"), ("b.txt", " Two dogs"), ("c.txt", "and so on")):
        saved(tmp_path / "texts" / name, text)
    rows = text_rows(str(tmp_path / "texts"), Text8Tokenizer(), 1)
    assert Text8Tokenizer().decode(rows[:, 0]) == "one cat two dogsand so on"
    out = prepare_text(tmp_path / "texts", "text8", tmp_path / "out", split=(1.0, 0.0, 0.0))
    assert TextData(out, "train", length=1).in_order(0, len(rows)).flatten().tolist() == rows[:, 0].tolist()


def test_text8_itself_may_be_read_in_its_own_letters_or_in_those_of_any_text(tmp_path, monkeypatch):
    monkeypatch.setenv("VMD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(TEXT8_KINDS, "text8", (1_000, (0.9, 0.05, 0.05)))
    (tmp_path / "text8").write_text("the cat sat on the mat and ran off " * 28 + "the cat sat on the m")
    (tmp_path / "tokenizer.json").write_text(json.dumps(Text8Tokenizer().to_dict()))
    asked = {"char": "char", "text8": "text8", Text8Tokenizer(): "text8", str(tmp_path / "tokenizer.json"): "text8"}
    found = {kind: load_data(str(tmp_path / "text8"), length=8, tokenizer=kind) for kind in asked}
    assert {kind: data.tokenizer.to_dict()["kind"] for kind, data in found.items()} == asked
    assert all(torch.equal(data.in_order(0, 10), found["char"].in_order(0, 10)) for data in found.values())
    assert len(list((tmp_path / "cache").iterdir())) == 1  # prepared once


def test_tokens_of_a_tensor_are_decoded():
    assert CharTokenizer("abc").decode(torch.tensor([2, 0, 1])) == "cab"
    assert CharTokenizer("abc").decode([]) == ""


def test_tokenizers_are_loaded_by_name():
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)
    assert load_tokenizer("char", "ba").decode([0, 1]) == "ba"


def test_what_is_no_tokenizer_is_refused(tmp_path):
    refuses("'bpe': expected char, text8, byte or", load_tokenizer, "bpe")
    refuses("'char': expected an alphabet", load_tokenizer, "char")
    refuses(r"none\.json: cannot read", load_tokenizer, tmp_path / "none.json")
    refuses(r"bad\.json: expected the JSON of a tokenizer, in UTF-8", load_tokenizer, saved(tmp_path / "bad.json", b"\xff"))
    refuses("an empty alphabet", CharTokenizer, "")
    refuses("'a' is 2 times", CharTokenizer, "aba")
    refuses("half a surrogate", CharTokenizer, "a\ud800")
    refuses("65537 different characters: expected at most 65536", CharTokenizer, "".join(map(chr, range(0x10000, 0x20001))))
    assert CharTokenizer("".join(map(chr, range(0x10000, 0x20000)))).vocab_size == 65_536
    for values in (
        {},
        None,
        [],
        {"kind": "char"},
        {"kind": []},
        {"kind": "char", "alphabet": 3},
        {"kind": "byte", "more": ""},
    ):
        refuses("expected the description of a tokenizer", tokenizer_from_dict, values)


def test_what_a_tokenizer_cannot_take_is_refused():
    refuses(r"character 'é' \(U\+00E9\) at position 2: expected one of the 2", CharTokenizer("ab").encode, "abé")
    refuses("position 1", CharTokenizer("ab").encode, "a\udcff")
    refuses("position 1: expected Unicode", ByteTokenizer().encode, "a\udcff")
    refuses("0xff at offset 2", CharTokenizer("ab").encode, b"ab\xff")
    for ids, says in (([0, 2], "id 2: expected 0 to 1"), ([-1], "id -1"), ([[0]], "one row"), ([0.5], "float64")):
        refuses(says, CharTokenizer("ab").decode, ids)
    refuses("id 256", ByteTokenizer().decode, [256])
    assert CharTokenizer("ab").decode([0, 1]) == "ab"  # the ids next to those
    assert ByteTokenizer().decode([127]) == "\x7f"


# Tokenizers from JSON


def trained(text: str = "", **more) -> str:
    """The JSON of a small byte-level BPE, as GPT-2's."""
    tokenizers = pytest.importorskip("tokenizers")
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), **more
    )
    found.train_from_iterator([text or mixed(3000)], trainer)
    return found.to_str()


def test_a_json_tokenizer_round_trips_and_restores_itself(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path / "mine.json", trained()))
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    for text in (mixed(300, seed=1), "never seen: Ω≈ç√\r\n\x00", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert np.array_equal(again.encode(text), tokenizer.encode(text))
        assert np.array_equal(tokenizer.encode(text.encode()), tokenizer.encode(text))
    assert len(tokenizer.symbols) == tokenizer.vocab_size == 400
    assert tokenizer.encode("the").dtype == np.uint16
    refuses("position 1: expected Unicode", tokenizer.encode, "a\udcff")


def test_a_json_tokenizer_neither_cuts_nor_pads_nor_adds():
    tokenizers = pytest.importorskip("tokenizers")
    plain = tokenizers.Tokenizer.from_str(trained(special_tokens=["<s>"]))
    plain.enable_truncation(3)
    plain.enable_padding(length=1000)
    plain.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    text = mixed(100)
    assert JsonTokenizer(plain.to_str()).decode(JsonTokenizer(plain.to_str()).encode(text)) == text


def test_text_is_prepared_with_a_json_tokenizer_as_a_whole(tmp_path, monkeypatch):
    """Pieces do not show: the shards hold the ids of the whole text."""
    text = mixed(4000)
    path = saved(tmp_path / "mine.json", trained())
    for reading, piece in ((97, 50), (2**20, 2**16)):
        monkeypatch.setattr(reading_text, "READ_BYTES", reading)
        monkeypatch.setattr(reading_text, "PIECE", piece)
        out = prepare_text(saved(tmp_path / "a.txt", text), path, tmp_path / f"out{piece}", split=(1, 0, 0))
        assert np.array_equal(shard(out, "train"), load_tokenizer(path).encode(text))
    out = prepare_text(tmp_path / "a.txt", path, tmp_path / "split")
    data = [TextData(out, split, length=8) for split in SPLITS]
    assert "".join(d.tokenizer.decode(d.tokens) for d in data) == text  # splits fall between characters
    assert data[0].symbols == load_tokenizer(path).symbols


def test_json_that_is_no_small_tokenizer_is_refused(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    refuses(r"bad\.json: expected the JSON of a tokenizer", load_tokenizer, saved(tmp_path / "bad.json", '{"a":\n 3}'))
    large = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(65_537)}, unk_token="w0"))
    refuses("65537 tokens: expected at most 65536", JsonTokenizer, large.to_str())
    less = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(65_536)}, unk_token="w0"))
    assert JsonTokenizer(less.to_str()).vocab_size == 65_536
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    refuses("an empty vocabulary", JsonTokenizer, empty.to_str())


def test_a_json_tokenizer_that_does_not_know_a_text_says_so_in_one_line(tmp_path):
    words = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"cat": 0}, "unk_token": "[UNK]"}}
    rest = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    path = saved(tmp_path / "words.json", json.dumps(words | dict.fromkeys(rest) | {"added_tokens": []}))
    refuses("expected a tokenizer that knows all of this text", load_tokenizer(path).encode, "dog")


def test_folders_that_cannot_be_read_are_not_left_out_in_silence(tmp_path, monkeypatch):
    saved(tmp_path / "texts" / "a.txt", "some text")
    saved(tmp_path / "texts" / "closed" / "b.txt", "more")
    scandir = os.scandir

    def closed(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    refuses("texts: cannot read: Permission denied", prepare_text, tmp_path / "texts", "char", tmp_path / "out")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refuses(r"mine\.json: .*pip install tokenizers", load_tokenizer, saved(tmp_path / "mine.json", "{}"))
    assert load_tokenizer("byte").decode([97]) == "a"  # which does without


# Preparing


@settings(max_examples=30)
@given(texts.filter(lambda text: len(text) >= 3), st.sampled_from(["char", "byte"]), st.integers(1, 9), st.integers(1, 5))
def test_the_three_shards_are_the_text_in_order(text, name, reading, piece):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_text, "READ_BYTES", reading)
        patch.setattr(reading_text, "PIECE", piece)
        out = prepare_text(saved(Path(folder, "a.txt"), text), name, Path(folder, "out"), split=(0.4, 0.3, 0.3))
        meta = json.loads((out / "meta.json").read_text())
        tokenizer = tokenizer_from_dict(meta["tokenizer"])
        assert np.array_equal(stream(out), tokenizer.encode(text))
        parts = [tokenizer.decode(shard(out, split)) for split in SPLITS]
        borders = [0, round(0.4 * len(text)), round(0.7 * len(text)), len(text)]
        assert parts == [text[a:b] for a, b in itertools.pairwise(borders)]
        assert [meta["shards"][split]["characters"] for split in SPLITS] == [len(part) for part in parts]


@pytest.mark.parametrize("name", ["char", "byte"])
@pytest.mark.parametrize("by_document", [False, True])
def test_how_a_text_is_read_does_not_show(tmp_path, monkeypatch, name, by_document):
    source = saved(tmp_path / "a.txt", mixed(60_000))
    whole = prepare_text(source, name, tmp_path / "whole", documents=by_document)
    for reading, piece in ((61, 17), (4099, 1000)):
        monkeypatch.setattr(reading_text, "READ_BYTES", reading)
        monkeypatch.setattr(reading_text, "PIECE", piece)
        out = prepare_text(source, name, tmp_path / f"out{reading}", documents=by_document)
        assert bins(out) == bins(whole)
        assert (out / "meta.json").read_bytes() == (whole / "meta.json").read_bytes()


def test_an_alphabet_is_sorted_and_can_be_wide(tmp_path):
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 300))) + "😀 a"
    out = prepare_text(saved(tmp_path / "a.txt", text), "char", tmp_path / "out")
    data = TextData(out, length=4)
    assert data.tokenizer.to_dict()["alphabet"] == "".join(sorted(set(text)))
    assert data.tokens.dtype == np.uint16
    assert data.vocab_size == len(data.symbols) == 303


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    source = tmp_path / "texts"
    saved(source / "b.md", "second\r\n")
    saved(source / "a" / "z.txt", "first ")
    saved(source / "c.xz", lzma.compress("thïrd ".encode()))
    saved(source / "d.txt.gz", gzip.compress(b"fourth ") + gzip.compress(b"in two "))
    saved(source / "e", "fifth ")
    saved(source / "f.txt", "")
    with zipfile.ZipFile(source / "g.zip", "w") as archive:
        archive.writestr("inside/", "")
        archive.writestr("inside/name", "sixth")
    saved(source / ".hidden", b"\xff")
    saved(source / ".git" / "config", b"\xff")
    os.mkfifo(source / "pipe")  # would block for ever
    out = prepare_text(source, "char", tmp_path / "out")
    expected = "first second\r\nthïrd fourth in two fifth sixth"
    assert TextData(out, length=1).tokenizer.decode(stream(out)) == expected
    meta = json.loads((out / "meta.json").read_text())
    names = ["a/z.txt", "b.md", "c.xz", "d.txt.gz", "e", "f.txt", "g.zip"]
    assert [(entry["name"], entry["bytes"]) for entry in meta["source"]] == [(n, (source / n).stat().st_size) for n in names]


def test_progress_is_told_in_bytes_of_two_readings(tmp_path, monkeypatch):
    monkeypatch.setattr(reading_text, "READ_BYTES", 1000)
    source, told = tmp_path / "texts", []
    saved(source / "a.txt", mixed(3000))
    saved(source / "b.xz", lzma.compress(mixed(3000, seed=1).encode()))
    prepare_text(source, "byte", tmp_path / "out", on_progress=lambda done, total: told.append((done, total)))
    size = sum(path.stat().st_size for path in source.iterdir())
    assert {total for _, total in told} == {2 * size}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == 2 * size
    assert len(told) > 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n\nthree\n", ["one\ntwo", "three"]),
        ("\n\n \n  one\r\n\r\n \t\r\n\n  two \n", ["  one", "  two"]),
        ("one\n \u2003\ntwo", ["one", "two"]),
        ("one two", ["one two"]),
        ("one\n\n\n", ["one"]),
    ],
)
@pytest.mark.parametrize("reading", [1, 3, 1000])
def test_blank_lines_separate_the_documents_of_a_file(tmp_path, monkeypatch, text, expected, reading):
    monkeypatch.setattr(reading_text, "READ_BYTES", reading)
    source = saved(tmp_path / "a.txt", text)
    assert documents(prepare_text(source, "char", tmp_path / "out", documents=True, split=(1, 0, 0))) == expected


def test_documents_are_split_by_number_and_never_crossed(tmp_path):
    written = [f"<{i}>" + "x" * (i % 7) for i in range(40)]
    source = saved(tmp_path / "a.txt", "\n\n".join(written))
    out = prepare_text(source, "byte", tmp_path / "out", documents=True, split=(0.5, 0.25, 0.25))
    assert documents(out) == written
    counts = {split: len(np.load(out / f"{split}.documents.npy")) - 1 for split in SPLITS}
    assert counts == {"train": 20, "validation": 10, "test": 10}
    for split, some in (("train", written[:20]), ("validation", written[20:30]), ("test", written[30:])):
        data = TextData(out, split, length=4)
        chunks = [data.tokenizer.decode(chunk) for chunk in data.in_order(0, 1000)]
        assert chunks == [text[at : at + 4] for text in some for at in range(0, len(text) - 3, 4)]


@given(st.lists(st.text("ab ", max_size=9), min_size=1, max_size=12), st.integers(1, 5))
@settings(max_examples=15)
def test_every_file_of_a_folder_is_a_document(written, length):
    written = [*written, "aabab"]
    with tempfile.TemporaryDirectory() as folder:
        for i, text in enumerate(written):
            saved(Path(folder, "texts", f"{i:03d}.txt"), text)
        out = prepare_text(Path(folder, "texts"), "byte", Path(folder, "out"), documents=True, split=(1, 0, 0))
        assert documents(out) == [text for text in written if text]
        data = TextData(out, length=length)
        expected = [t[a : a + length] for t in written for a in range(0, len(t) - length + 1, length)]
        assert [data.tokenizer.decode(data.row(i)) for i in range(len(data))] == expected


def test_empty_files_are_no_documents(tmp_path):
    for name, text in (("1", ""), ("2", ""), ("3", "a"), ("4", "b")):
        saved(tmp_path / "texts" / name, text)
    out = prepare_text(tmp_path / "texts", "byte", tmp_path / "out", documents=True, split=(0.5, 0, 0.5))
    assert [bytes(shard(out, split)) for split in SPLITS] == [b"a", b"", b"b"]


def test_the_same_text_is_not_prepared_twice(tmp_path):
    source, told = saved(tmp_path / "a.txt", mixed(500)), []

    def again(name="char", **more) -> bool:
        told.clear()
        prepare_text(source, name, tmp_path / "out", on_progress=lambda *told_: told.append(told_), **more)
        return bool(told)

    alphabet = "".join(sorted(set(mixed(500))))
    assert again()
    assert not again()
    assert again(CharTokenizer(alphabet))
    assert not again(load_tokenizer("char", alphabet))
    assert again("byte")
    assert again("byte", split=(0.8, 0.1, 0.1))
    assert again("byte", documents=True)
    assert not again("byte", documents=True)
    saved(source, mixed(501))
    assert again("byte", documents=True)
    os.utime(source, ns=(1, 1))
    assert again("byte", documents=True)
    (tmp_path / "out" / "test.bin").write_bytes(b"short")
    assert again("byte", documents=True)
    assert not again("byte", documents=True)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "out"]
    assert documents(tmp_path / "out") == [block.rstrip() for block in re.split(r"\n\s*\n", mixed(501).strip())]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("call", [1, 4, 6, 8])
@pytest.mark.parametrize("before", [False, True])
def test_an_interrupted_preparation_leaves_things_as_they_were(tmp_path, monkeypatch, call, before):
    monkeypatch.setattr(reading_text, "READ_BYTES", 1000)
    source, told = saved(tmp_path / "a.txt", "abc " * 600), []
    if before:
        prepare_text(source, "byte", tmp_path / "out")
    found = contents(tmp_path)

    def stop(done, total):
        told.append(done)
        if len(told) == call:
            raise Interrupted

    with pytest.raises(Interrupted):
        prepare_text(source, "char", tmp_path / "out", on_progress=stop)
    assert contents(tmp_path) == found
    prepare_text(source, "char", tmp_path / "out")
    assert np.array_equal(stream(tmp_path / "out"), CharTokenizer(" abc").encode("abc " * 600))


def test_what_a_killed_run_left_is_replaced(tmp_path):
    source = saved(tmp_path / "a.txt", mixed(500))
    for name in ("train.bin", "train.documents.npy", "meta.json.partial"):
        saved(tmp_path / "out.partial" / name, "left")
    out = prepare_text(source, "byte", tmp_path / "out")
    assert sorted(os.listdir(out)) == ["meta.json", "test.bin", "train.bin", "validation.bin"]
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "out"]


@pytest.mark.parametrize("ends", ["done", "given up"])
def test_two_runs_do_not_write_into_each_other(tmp_path, ends):
    """The second waits for the first, and takes what that has made or, if it has made nothing, makes it."""
    source, out = saved(tmp_path / "a.txt", mixed(500)), tmp_path / "out"
    prepare_text(source, "byte", tmp_path / "whole" / "out")
    whole = contents(tmp_path / "whole" / "out")
    saved(tmp_path / "out.partial" / "train.bin", "being written")
    while_held = contents(tmp_path)
    with ThreadPoolExecutor() as threads:
        with claimed(tmp_path / "out.partial"):
            second = threads.submit(prepare_text, source, "byte", out)
            with pytest.raises(TimeoutError):
                second.result(0.5)
            assert contents(tmp_path) == while_held
            shutil.rmtree(tmp_path / "out.partial")
            if ends == "done":
                shutil.copytree(tmp_path / "whole" / "out", out)
                made = (out / "train.bin").stat().st_ino
        assert second.result(60) == out.resolve()
    assert list(contents(out).values()) == list(whole.values())
    assert ends == "given up" or (out / "train.bin").stat().st_ino == made
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "out", "whole"]


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_folders_of_other_things_are_left_alone(tmp_path, name):
    source = saved(tmp_path / "a.txt", mixed(500))
    saved(tmp_path / name / "thesis.txt", "ten years of work")
    before = contents(tmp_path)
    refuses(r"holds thesis\.txt: expected a new folder", prepare_text, source, "byte", tmp_path / "out")
    assert contents(tmp_path) == before


def test_the_output_lies_outside_the_source(tmp_path):
    source = saved(tmp_path / "texts" / "a.txt", mixed(500))
    file = saved(tmp_path / "file", "")
    before = contents(tmp_path)
    refuses("inside the source", prepare_text, tmp_path / "texts", "byte", tmp_path / "texts" / "out")
    refuses("inside the source", prepare_text, tmp_path / "texts", "byte", tmp_path / "texts")
    refuses("or around it", prepare_text, source, "byte", tmp_path / "texts")
    refuses("not a folder", prepare_text, source, "byte", file)
    refuses("cannot create", prepare_text, source, "byte", file / "out")
    assert contents(tmp_path) == before


def test_a_link_to_a_folder_is_written_through(tmp_path):
    source = saved(tmp_path / "a.txt", mixed(500))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    prepare_text(source, "byte", tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert len(stream(tmp_path / "elsewhere")) == len(mixed(500).encode())


def test_a_full_disk_and_a_source_that_changes_leave_nothing(tmp_path, monkeypatch):
    source = saved(tmp_path / "a.txt", mixed(500))

    def change(done, total):
        if done == total:
            saved(source, mixed(600))

    refuses("changed while it was read", prepare_text, source, "byte", tmp_path / "out", on_progress=change)

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refuses(r"train\.bin: cannot write: No space left", prepare_text, source, "byte", tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("suffix", [".txt", ".xz", ".gz", ".weights"])
@pytest.mark.parametrize("reading", [1, 2, 3, 1000])
def test_bytes_that_are_no_text_are_named(tmp_path, monkeypatch, suffix, reading):
    monkeypatch.setattr(reading_text, "READ_BYTES", reading)
    pack = {".xz": lzma.compress, ".gz": gzip.compress}.get(suffix, bytes)
    for end, says in ((b"\xff", "0xff at offset 6"), (b"\xe4\xb8", "0xe4 at offset 6"), (b"\xe4\xb8a", "0xe4 at offset 6")):
        source = saved(tmp_path / f"a{suffix}", pack("a中é".encode() + end))
        refuses(rf"a\{suffix}: not text: byte {says}: expected UTF-8", prepare_text, source, "byte", tmp_path / "out")
    assert len(os.listdir(tmp_path)) == 1


def test_sources_that_cannot_be_read_are_named(tmp_path):
    text = mixed(5000).encode()
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("one", "1")
        archive.writestr("two", "2")
    for name, content, says in (
        ("cut.xz", lzma.compress(text)[:-20], "truncated, damaged or not a .xz"),
        ("cut.gz", gzip.compress(text)[:-20], "truncated, damaged or not a .gz"),
        ("plain.xz", text, "not a .xz"),
        ("plain.gz", text, "not a .gz"),
        ("plain.zip", text, "not a .zip"),
        ("two.zip", (tmp_path / "two.zip").read_bytes(), "2 files in the archive: expected one"),
        ("empty.txt", b"", "empty: expected some text"),
        ("empty.gz", gzip.compress(b""), "empty: expected some text"),
    ):
        refuses(f"{name}: {says}|{name}: .*{says}", prepare_text, saved(tmp_path / name, content), "byte", tmp_path / "out")
    (tmp_path / "folder").mkdir()
    refuses("folder: an empty folder", prepare_text, tmp_path / "folder", "byte", tmp_path / "out")
    saved(tmp_path / "folder" / "a.txt", "")
    refuses("folder: empty: expected some text", prepare_text, tmp_path / "folder", "char", tmp_path / "out")
    refuses("none: no such file or folder", prepare_text, tmp_path / "none", "byte", tmp_path / "out")
    saved(tmp_path / "blank.txt", " \n\n ")
    refuses("blank.txt: empty", prepare_text, tmp_path / "blank.txt", "byte", tmp_path / "out", documents=True)
    assert not (tmp_path / "out").exists()


def test_preparations_that_make_no_sense_are_refused(tmp_path):
    source = saved(tmp_path / "a.txt", "abcdé\nab")
    for split in ((0.5, 0.5), (0, 0.5, 0.5), (0.5, 0.6, -0.1), (0.9, 0.05, 0.06), (float("nan"), 0.5, 0.5)):
        refuses("expected shares of train", prepare_text, source, "byte", tmp_path / "out", split=split)
    refuses("8 characters: too short: expected more, 0.05 of them for test", prepare_text, source, "byte", tmp_path / "out")
    refuses("1 documents: too short", prepare_text, source, "byte", tmp_path / "out", documents=True)
    refuses("'words': expected char, text8, byte", prepare_text, source, "words", tmp_path / "out")
    fixed = CharTokenizer("abcd\n")
    refuses(
        r"a\.txt: character 'é' \(U\+00E9\) at position 4: expected one of", prepare_text, source, fixed, tmp_path / "out"
    )
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_character_outside_the_alphabet_is_found_in_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(reading_text, "READ_BYTES", 3)
    saved(tmp_path / "texts" / "1.txt", "abababab")
    saved(tmp_path / "texts" / "2.txt", "ababab\nab")
    where = r"2\.txt: character '\\n' \(U\+000A\) at position 6"
    refuses(where, prepare_text, tmp_path / "texts", CharTokenizer("ab"), tmp_path / "out")
    assert os.listdir(tmp_path) == ["texts"]


def test_blank_lines_between_documents_need_no_place_in_the_alphabet(tmp_path):
    source = saved(tmp_path / "a.txt", "ab\n\nba\n")
    out = prepare_text(source, CharTokenizer("ab"), tmp_path / "out", documents=True, split=(0.5, 0, 0.5))
    assert documents(out) == ["ab", "ba"]
    assert [len(shard(out, split)) for split in SPLITS] == [2, 0, 2]


# Data


def numbered(folder: Path, count: int, length: int, more: int = 0) -> Path:
    """A text of which chunk i of the given length starts with character i."""
    text = "".join(chr(0x4E00 + i) + "x" * (length - 1) for i in range(count)) + "y" * more
    return prepare_text(saved(folder / "a.txt", text), "char", folder / "out", split=(1, 0, 0))


def starts(batch: torch.Tensor, data: TextData) -> list[int]:
    return [ord(data.tokenizer.decode(chunk)[0]) - 0x4E00 for chunk in batch]


@settings(max_examples=20)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 15), st.integers(0, 5))
def test_each_epoch_visits_each_chunk_once(count, length, size, seed):
    with tempfile.TemporaryDirectory() as folder:
        data = TextData(numbered(Path(folder), count, length, more=length - 1), length=length, seed=seed)
        assert len(data) == count  # the rest is dropped
        seen = [i for step in range(-(-3 * count // size)) for i in starts(data.batch(step, size), data)]
        for epoch in range(3):
            assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path):
    folder = numbered(tmp_path, 30, 3)
    data = TextData(folder, length=3)
    first, second = data.batch(0, 30), data.batch(1, 30)
    assert first.dtype == torch.int64
    assert first.shape == (30, 3)
    orders = [starts(batch, data) for batch in (first, second, TextData(folder, length=3, seed=1).batch(0, 30))]
    assert len({*map(tuple, orders), tuple(range(30))}) == 4


@given(st.permutations(list(range(8))))
@settings(max_examples=10)
def test_a_batch_is_a_function_of_its_step_alone(order):
    with tempfile.TemporaryDirectory() as folder:
        out = numbered(Path(folder), 7, 2)
        data = TextData(out, length=2)
        expected = [TextData(out, length=2).batch(step, 5, generator=torch.Generator()) for step in range(8)]
        for step in order:
            torch.manual_seed(step)
            assert torch.equal(data.batch(step, 5), expected[step])


@pytest.mark.parametrize("split", ["train", "validation"])
def test_shares_of_a_batch_make_it_up(tmp_path, split):
    out = prepare_text(saved(tmp_path / "a.txt", mixed(900)), "char", tmp_path / "out", split=(0.5, 0.3, 0.2))
    data = TextData(out, split, length=5)
    for step in (0, 3, 40):  # some cross into the next epoch
        shares = [data.batch(step, 16, rows=Rows(*pair, 16)) for pair in ((0, 3), (3, 4), (4, 16))]
        assert torch.equal(torch.cat(shares), data.batch(step, 16))


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_chunks_come_in_order(tmp_path, split):
    text = mixed(900)
    out = prepare_text(saved(tmp_path / "a.txt", text), "byte", tmp_path / "out")
    data = TextData(out, split, length=7)
    expected = torch.from_numpy(shard(out, split).astype(np.int64))[: len(data) * 7].view(-1, 7)
    assert len(data) == len(shard(out, split)) // 7
    assert torch.equal(data.batch(0, len(data)), expected)
    assert torch.equal(data.batch(1, len(data)), expected)


def test_chunks_can_be_had_in_the_order_of_the_text(tmp_path):
    data = TextData(numbered(tmp_path, 10, 3), length=3)
    assert starts(torch.cat([data.in_order(start, 4) for start in range(0, len(data), 4)]), data) == list(range(10))
    assert torch.equal(data.row(7), data.in_order(7, 1)[0])
    for says, call in (
        ("row 10: expected 0 to 9", lambda: data.row(10)),
        ("row -1", lambda: data.row(-1)),
        ("start=10", lambda: data.in_order(10, 1)),
        ("count=0", lambda: data.in_order(0, 0)),
    ):
        refuses(says, call)


def test_shards_are_mapped_and_stay_as_they_are(tmp_path):
    out = numbered(tmp_path, 10, 3)
    before = contents(out)
    data = TextData(out, length=3)
    assert isinstance(data.tokens, np.memmap)
    data.tokens[:] = 0
    data.batch(0, 4).zero_()
    del data
    assert contents(out) == before


@pytest.mark.parametrize("many", [20, 40_000])
def test_tokens_kept_on_a_device_give_the_same_batches(tmp_path, monkeypatch, many):
    text = "".join(chr(c) for c in range(0x10000, 0x10000 + many))  # ids to beyond those of int16
    out = prepare_text(saved(tmp_path / "a.txt", text), "char", tmp_path / "out", split=(1, 0, 0))
    plain, kept = TextData(out, length=7), TextData(out, length=7)
    monkeypatch.setattr(kept, "_keeps", lambda device: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            assert torch.equal(kept.batch(step, 300, device="cpu"), plain.batch(step, 300))
        assert torch.equal(kept.in_order(0, 10**6, device="cpu"), plain.in_order(0, 10**6))
    assert len(kept._kept) == 1
    assert not plain._kept


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("many", [20, 40_000])
def test_batches_on_the_gpu_are_those_of_the_cpu(tmp_path, monkeypatch, many):
    text = "".join(chr(c) for c in range(0x10000, 0x10000 + many))
    out = prepare_text(saved(tmp_path / "a.txt", text), "char", tmp_path / "out", split=(1, 0, 0))
    data, large = TextData(out, length=7), TextData(out, length=7)
    for step in range(3):
        assert torch.equal(data.batch(step, 300, device="cuda").cpu(), data.batch(step, 300))
    assert data._kept["cuda"].is_cuda
    monkeypatch.setattr("vmd.data.text.ON_DEVICE", 1)
    assert torch.equal(large.batch(0, 300, device="cuda").cpu(), data.batch(0, 300))
    assert not large._kept


def test_a_model_trains_on_text(tmp_path):
    out = prepare_text(saved(tmp_path / "a.txt", "ab" * 400), "char", tmp_path / "out")
    data = TextData(out, length=4)
    run = RunConfig(tiny_config(length=0, block_size=0, vocab_size=0))
    run = override_all(run, ["training.steps=10", "training.batch_size=16", "training.log_every=1"])
    model = VMD.for_data(run.model, data)
    log = train(model, data, RunConfig(model.config, run.objective, run.training, run.data))
    assert model.config.symbols == ("a", "b")
    assert log[-1]["reconstruction"] < log[0]["reconstruction"]


def test_shards_that_are_no_longer_what_was_made_are_refused(tmp_path):
    source = saved(tmp_path / "a.txt", mixed(2000))
    out = prepare_text(source, "byte", tmp_path / "out", documents=True)
    whole = contents(out)

    def damaged(name: str, content: bytes | None, says: str, **more) -> None:
        if content is None:
            (out / name).unlink()
        else:
            (out / name).write_bytes(content)
        refuses(says, TextData, out, length=4, **more)
        for path, original in whole.items():
            Path(path).write_bytes(original or b"")
        TextData(out, length=4)

    train_bin, meta = (out / "train.bin").read_bytes(), json.loads((out / "meta.json").read_text())
    changed = bytes([train_bin[0] ^ 1]) + train_bin[1:]
    damaged("train.bin", changed, r"train\.bin: damaged: its sha256")
    damaged("train.bin", train_bin[:-1], r"train\.bin: missing or damaged: expected \d+ tokens")
    damaged("train.bin", train_bin[:-1], "missing or damaged", verify=False)
    damaged("train.bin", None, "missing or damaged")
    damaged("train.documents.npy", b"", r"train\.documents\.npy: damaged")
    damaged("train.documents.npy", None, r"train\.documents\.npy: cannot read")
    damaged("meta.json", None, "no meta.json: expected a folder of prepared text")
    damaged("meta.json", b"{", "expected JSON")
    damaged("meta.json", b"[]", "format None: expected 'vmd-text-1'")
    damaged("meta.json", json.dumps({**meta, "format": "vmd-text-9"}).encode(), "format 'vmd-text-9'")
    damaged("meta.json", json.dumps({**meta, "shards": {"train": 3}}).encode(), r"meta\.json: damaged")
    damaged("meta.json", json.dumps({**meta, "vocab_size": None}).encode(), r"meta\.json: damaged")
    damaged("meta.json", json.dumps({**meta, "vocab_size": 27}).encode(), "missing or damaged")
    damaged("meta.json", json.dumps({**meta, "tokenizer": {"kind": "new"}}).encode(), "description of a tokenizer")
    (out / "train.bin").write_bytes(changed)
    TextData(out, length=4, verify=False)
    (out / "meta.json").write_text('{"format": "another"}')
    before = contents(out)
    refuses("format 'another'", prepare_text, source, "byte", out)
    assert contents(out) == before


def test_chunks_that_cannot_be_had_are_refused(tmp_path):
    out = prepare_text(saved(tmp_path / "a.txt", "abcdefgh" * 10), "byte", tmp_path / "out")
    assert len(TextData(out, "test", length=4)) == 1
    refuses("4 tokens of its test part: too short: expected at least 5, one chunk", TextData, out, "test", length=5)
    refuses("split='dev': expected one of train, validation, test", TextData, out, "dev", length=4)
    refuses("length=0", TextData, out, length=0)
    by_document = prepare_text(
        saved(tmp_path / "b.txt", "ab\n\nabc"), "byte", tmp_path / "b", documents=True, split=(1, 0, 0)
    )
    refuses("3 tokens in the longest document of its train part: too short", TextData, by_document, length=4)
    refuses("0 tokens", TextData, by_document, "test", length=1)
    refuses("no meta.json", TextData, tmp_path / "nowhere", length=4)


# text8


@pytest.fixture
def small_text8(monkeypatch) -> str:
    """A text of which the first 2,000 characters are called text8 here, the first 1,400 text8-70M."""
    for name, count in (("text8", 2000), ("text8-70M", 1400)):
        monkeypatch.setitem(TEXT8_KINDS, name, (count, TEXT8_KINDS[name][1]))
    return "".join(random.Random(0).choices(TEXT8_ALPHABET, k=2000))


def zipped(text: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text8", text)
    return content.getvalue()


def test_text8_is_a_hundred_million_characters():
    assert TEXT8_KINDS == {
        "text8": (100_000_000, (0.9, 0.05, 0.05)),
        "text8-70M": (70_000_000, (0.95, 0.025, 0.025)),
    }
    for name, sizes in (("text8", (90, 5, 5)), ("text8-70M", (66.5, 1.75, 1.75))):
        count, split = TEXT8_KINDS[name]
        assert np.diff([0, *preparing.borders_of(Path(name), count, split, ""), count]).tolist() == [
            s * 10**6 for s in sizes
        ]


@pytest.mark.parametrize("suffix", ["", ".txt", ".zip", ".xz"])
def test_text8_comes_from_a_file(tmp_path, small_text8, suffix):
    pack = {".zip": zipped, ".xz": lambda text: lzma.compress(text.encode())}.get(suffix, str)
    out = text8(saved(tmp_path / f"text8{suffix}", pack(small_text8)), cache=tmp_path / "cache")
    data = {split: TextData(out, split, length=10) for split in SPLITS}
    assert [len(data[split].tokens) for split in SPLITS] == [1800, 100, 100]
    assert {d.name for d in data.values()} == {"text8"}
    assert "".join(d.tokenizer.decode(d.tokens) for d in data.values()) == small_text8
    assert data["train"].symbols == tuple(TEXT8_ALPHABET)


def test_a_prefix_of_text8_has_a_name_of_its_own(tmp_path, small_text8):
    source = saved(tmp_path / "my-text8-70M.xz", lzma.compress(small_text8[:1400].encode()))
    out = text8(source, cache=tmp_path / "cache")
    assert out.name == TextData(out, length=10).name == "text8-70M"
    assert [len(shard(out, split)) for split in SPLITS] == [1330, 35, 35]
    assert np.array_equal(stream(out), CharTokenizer(TEXT8_ALPHABET).encode(small_text8[:1400]))
    # even where all 27 symbols are not in the text, and by the plain route under whatever file name
    plain = prepare_text(saved(tmp_path / "text8", small_text8[:300]), "char", tmp_path / "plain")
    assert TextData(plain, length=10).name == "text8 (as given)"


def test_other_texts_are_not_called_text8(tmp_path, small_text8):
    for name, text, says in (
        ("text8", small_text8[:1400], r"1,400 characters: expected 2,000, the length of text8: prepare_text"),
        ("text8", small_text8 + "a", "2,001 characters"),
        ("text8-70M", small_text8, r"2,000 characters: expected 1,400, the length of text8-70M"),
        ("text8", small_text8[:-1] + "\n", r"character '\\n' \(U\+000A\) at position 1999: expected one of the 27"),
        ("text8", "A" + small_text8[1:], r"text8: character 'A' \(U\+0041\) at position 0"),
    ):
        refuses(says, text8, saved(tmp_path / name, text), cache=tmp_path / "cache")
    refuses("no such file: expected text8", text8, tmp_path / "none", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


class Answer(io.BytesIO):
    """What urlopen gives, with a length that may be a lie."""

    def __init__(self, content: bytes, length: int | None = None):
        super().__init__(content)
        self.headers = Message()
        if length is not None:
            self.headers["Content-Length"] = str(length)


def answers(monkeypatch, *, content: bytes = b"", length: int | None = None, error: Exception | None = None) -> list[str]:
    """Every address that is asked for."""
    asked: list[str] = []

    def open_address(address, timeout):
        asked.append(address)
        if error:
            raise error
        return Answer(content, length)

    monkeypatch.setattr(urllib.request, "urlopen", open_address)
    return asked


@pytest.mark.parametrize("sized", [True, False])
def test_text8_is_downloaded_once(tmp_path, monkeypatch, small_text8, sized):
    content, told = zipped(small_text8), []
    asked = answers(monkeypatch, content=content, length=len(content) if sized else None)
    out = text8(cache=tmp_path / "cache", on_progress=lambda *now: told.append(now))
    assert told[0] == (len(content), len(content))
    assert told[-1] == (2 * len(content), 2 * len(content))
    assert asked == ["http://mattmahoney.net/dc/text8.zip"]
    assert TextData(out, length=10).name == "text8"
    assert len(stream(out)) == 2000
    assert sorted(os.listdir(tmp_path / "cache")) == ["text8", "text8.zip"]
    assert text8(cache=tmp_path / "cache") == out
    shutil.rmtree(out)
    text8(cache=tmp_path / "cache")  # from the archive
    (tmp_path / "cache" / "text8.zip").unlink()
    assert text8(cache=tmp_path / "cache") == out  # from the shards
    assert len(asked) == 1


def test_a_download_that_fails_leaves_nothing(tmp_path, monkeypatch, small_text8):
    content = zipped(small_text8)
    for faked, says in (
        ({"error": URLError("no route\nto host")}, "cannot download http.*no route to host.*: give the file by its path"),
        ({"error": TimeoutError("timed out")}, "timed out"),
        ({"content": content[:-10], "length": len(content)}, rf"{len(content) - 10} of {len(content)} bytes came"),
        ({"content": b"<html>please log in</html>"}, "no zip archive"),
    ):
        answers(monkeypatch, **faked)
        refuses(says, text8, cache=tmp_path / "cache")
    answers(monkeypatch, content=content)

    def stop(done, total):
        raise Interrupted

    with pytest.raises(Interrupted):
        text8(cache=tmp_path / "cache", on_progress=stop)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("before", [0, 7, 3 * PIECE])
def test_a_character_that_a_model_does_not_know_is_told_by_its_place_in_the_file(tmp_path, before):
    """Also far into a long text, and in the second of two files."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/1.txt").write_text("a b " * 10)
    (tmp_path / "texts/2.txt").write_text("a b "[:3] * (before // 3) + "a" * (before % 3) + "Ä" + "a b " * 10)
    tokenizer = CharTokenizer(" ab")
    refuses(
        rf"2\.txt: character 'Ä' \(U\+00C4\) at position {before}: exp", text_rows, str(tmp_path / "texts"), tokenizer, 4
    )
    (tmp_path / "texts/2.txt").write_text("a b " * 10)
    assert text_rows(str(tmp_path / "texts"), tokenizer, 4).shape == (20, 4)
