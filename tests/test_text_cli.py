"""Text from a file to a model and back: train, sample with a beginning or gaps, evaluate."""

import io
import json
import random
import re
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from command import refused, settings, succeeds, vmd
from vmd import terminal
from vmd.cli import main
from vmd.config import InvalidInput, ModelConfig, RunConfig, from_dict, override_all
from vmd.data import load_data
from vmd.data import text as text_module
from vmd.data.tokenizers import TEXT8_ALPHABET, ByteTokenizer, CharTokenizer, JsonTokenizer, model_tokenizer
from vmd.evaluation import bytes_per_token
from vmd.infilling import infill
from vmd.likelihood import nll_bound
from vmd.model import SHIPPED, VMD
from vmd.presets import preset
from vmd.scoring import evaluate
from vmd.terminal import days_on_a_cpu, parts_that_fit, work_of_codes
from vmd.training import train as fit

SMALL = settings(
    *("training.steps=4", "training.batch_size=8", "training.log_every=2", "model.length=16", "model.layers=1"),
    *("model.width=16", "model.heads=2", "model.latent.codes=4"),
)
TEXT = "the cat sat on the mat and the dog sat on the log. " * 40


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VMD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "cats.txt"
    path.write_text(TEXT)
    return path


def train(source, out, *more):
    return succeeds("train", "text", "--data", source, "--out", out, "--device", "cpu", *SMALL, *more)


def test_a_model_of_text_writes_text(source, tmp_path):
    out = tmp_path / "run"
    train(source, out)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    train(source, tmp_path / "again")
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}  # made once
    lines = succeeds("sample", out, "-n", 3).out.splitlines()
    assert [len(line) for line in lines] == [16] * 3
    assert set("".join(lines)) <= set(TEXT)


def test_held_out_text_is_looked_at_while_a_model_learns(source, tmp_path):
    """As `vmd evaluate` scores it, in one step and in as many as a block has tokens; `vmd plot` draws it."""
    told = train(source, tmp_path / "run", "--set", "training.ema=0").err
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    looks = [record for record in log if "bits_1" in record]
    assert [record["step"] for record in looks] == [2, 4]
    assert f"step 4: validation text takes {looks[-1]['bits_1']:.3f} in 1 step per block, " in told
    scored = tmp_path / "scored.json"
    arguments = ("--steps", "1,4", "--rows", 32, "--split", "validation", "--json", scored)
    succeeds("evaluate", tmp_path / "run", "--data", source, *arguments)
    rows = [row for row in json.loads(scored.read_text())["rows"] if row["metric"] == "certified bits per token"]
    assert rows[0]["value"] == pytest.approx(looks[-1]["bits_1"], abs=1e-4)  # one step has no chance in it
    assert rows[1]["value"] == pytest.approx(looks[-1]["bits_4"], rel=0.05)
    assert "(certified bits per character, " in told
    drawn = succeeds("plot", tmp_path / "run", "--out", tmp_path / "curves.png").err
    assert "no such field" not in drawn


GIVEN, ONCE = (
    ("--set", "data.fixed=0:6"),
    ("--set", "objective.masking=steps", "--set", "objective.steps=1,4", "--set", "objective.together=0"),
)


@pytest.mark.parametrize("more", [GIVEN, (*ONCE, "--set", "objective.z=once")], ids=["given", "once"])
def test_a_look_is_at_what_the_model_is_trained_for(more, source, tmp_path):
    """As `vmd evaluate` of the same rows: given places cost nothing, and z is drawn as it will be."""
    train(source, tmp_path / "run", "--set", "training.ema=0", *more)
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scored = tmp_path / "scored.json"
    arguments = ("--steps", "1,4", "--rows", 32, "--split", "validation", "--json", scored)
    fixed = ("--fixed", "0:6") if more is GIVEN else ()
    succeeds("evaluate", tmp_path / "run", "--data", source, *arguments, *fixed)
    rows = [row for row in json.loads(scored.read_text())["rows"] if row["metric"] == "certified bits per token"]
    assert rows[0]["value"] == pytest.approx(log[-1]["bits_1"], abs=1e-4)
    assert rows[1]["value"] == pytest.approx(log[-1]["bits_4"], rel=0.05)


@pytest.mark.parametrize(("more", "z"), [([], "fresh"), ([*ONCE, "--set", "objective.z=once"], "once")])
def test_looks_are_at_rows_from_all_over_the_text(more, z, tmp_path, monkeypatch):
    """Neighbours are of one article: here the first 40 rows are all the same. z is drawn as it will be."""
    text, seen = tmp_path / "text.txt", []

    def look(model, x0, steps, *how):
        seen.append((x0, how))
        return {f"bits_{n}": 1.0 for n in steps}

    monkeypatch.setattr("vmd.evaluation.bits_in_passing", look)
    text.write_text("ab" * 8 * 80 * 18 + "a" * 16 * 40 + "b" * 16 * 40 + "ab" * 8 * 80)
    train(text, tmp_path / "run", *more)
    rows, how = seen[0]
    assert rows.shape == (32, 16)
    assert len(rows.unique(dim=0)) > 1
    assert how == (z, None)


def test_a_text_too_short_to_hold_some_out_is_learned_all_the_same(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:100])
    told = train(short, tmp_path / "run").err
    assert "note: without a look at validation text on the way: short.txt: 5 tokens of its validation part: " in told
    assert "validation text takes" not in told


def test_samples_with_line_ends_are_told_apart(tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("ab\n" * 400)
    train(lines, tmp_path / "run")
    samples = succeeds("sample", tmp_path / "run", "-n", 3).out.removesuffix("\n").split("\n---\n")
    assert [len(sample) for sample in samples] == [16] * 3
    assert "\n" in "".join(samples)


def test_held_out_text_is_scored_however_its_path_is_spelled(source, tmp_path, monkeypatch):
    """And it is said what is scored: the part that was not trained on, or all of another text."""
    monkeypatch.chdir(tmp_path)
    train("cats.txt", "run")
    (tmp_path / "other.txt").write_text(TEXT)
    spelled = [succeeds("evaluate", "run", "--data", name) for name in ("cats.txt", "./cats.txt", source, "other.txt")]
    assert all("scoring the test part of" in done.err for done in spelled[:3])
    assert len({done.out for done in spelled[:3]}) == 1
    assert "scoring all of other.txt" in spelled[3].err
    assert spelled[3].out != spelled[0].out


def test_the_scores_are_shown_before_what_takes_longer(source, tmp_path, monkeypatch):
    train(source, tmp_path / "run")
    seen = []

    def interrupted(*args, **more):
        seen.append((sys.stdout.getvalue(), more["rows"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("vmd.evaluation.diagnose_model", interrupted)
    done = vmd("evaluate", tmp_path / "run", "--data", source, "--rows", 2)
    assert done.code == 130
    assert "certified bits per character" in done.out
    assert seen == [(done.out, 2)]


def test_a_beginning_and_gaps_are_kept(source, tmp_path):
    out = tmp_path / "run"
    train(source, out)
    assert all(
        line.startswith("the cat") for line in succeeds("sample", out, "-n", 3, "--prompt", "the cat").out.splitlines()
    )
    for line in succeeds("sample", out, "-n", 3, "--infill", "the ___ sat").out.splitlines():
        assert line[:4] + line[7:] == "the  sat"  # and nothing after it
    assert "each of 5 candidates" in succeeds("sample", out, "-n", 1, "--infill", "the ___ sat", "--tries", 5).err
    assert "candidate" not in succeeds("sample", out, "-n", 1, "--infill", "the ___ sat", "--tries", 1).err
    traced = succeeds("sample", out, "-n", 1, "--prompt", "the ", "--trace").err
    assert "block 1 step 0: the " in traced
    assert "____" in traced


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_every_tokenizer_travels_with_its_model(source, tmp_path, tokenizer):
    source.write_text(TEXT + "über naïve\n" * 4)
    out = tmp_path / "run"
    train(source, out, "--tokenizer", tokenizer)
    found = model_tokenizer(out)
    assert found.to_dict()["kind"] == tokenizer
    assert found.decode(found.encode("über")) == "über"
    succeeds("sample", out, "-n", 2, "--prompt", "über")


BYTES = [*"aü€\n\x1b[31m".encode(), 256, 0xC3, ord("b"), 0xC3, 256, 0xE2, 0x82]


def test_characters_are_shown_whole_and_by_name_where_a_terminal_would_obey_them():
    """Those of several bytes too, if all of them are there."""
    config = ModelConfig(vocab_size=256)
    found = list(terminal.read_together(BYTES, config, ByteTokenizer()))
    assert "".join(terminal.visible(shown) for _, shown in found) == "aü€\\n\\x1b[31m_\ufffdb\ufffd_\ufffd\ufffd"
    assert [here.stop for here, _ in found] == [*(here.start for here, _ in found[1:]), len(BYTES)]  # and each once
    assert [here.stop - here.start for here, _ in found][:3] == [1, 2, 3]
    assert list(terminal.read_together([0, 2, 1], ModelConfig(vocab_size=2), CharTokenizer("\nb"))) == [
        (slice(0, 1), "\n"),
        (slice(1, 2), "_"),
        (slice(2, 3), "b"),
    ]


def test_one_can_watch_a_gap_being_filled_in_sight_of_what_follows():
    shown = succeeds("sample", "text", "-n", 1, "--infill", "the ____ of science", "--watch").err.splitlines()
    watched = [line for line in shown if "science" in line]
    assert watched
    assert all(re.fullmatch("the [a-z _]{4} of science", line) for line in watched)


@pytest.mark.parametrize("option", ["--prompt", "--infill"])
def test_a_prompt_of_which_no_letter_can_be_read_is_refused(option, tmp_path):
    told = refused("sample", "text", option, "Привет _____"[: 6 if option == "--prompt" else 12], folder=tmp_path)
    assert f"{option} 'Привет" in told
    assert "none of it is left" in told
    assert "none of it" not in succeeds("sample", "text", "-n", 1, "--infill", "____").err


def test_a_run_that_goes_on_over_other_steps_says_so(source, tmp_path):
    train(source, tmp_path / "run")
    words = ("train", "--out", tmp_path / "run", "--resume", "--device", "cpu")
    assert "where the run had" not in succeeds(*words).err
    assert "note: 6 training steps where the run had 4" in succeeds(*words, "--set", "training.steps=6").err


def test_text_that_is_read_as_27_letters_is_said_to_be(source, tmp_path):
    told = succeeds("train", "text", "--data", source, "--tokenizer", "text8", "--out", tmp_path / "run", *SMALL).err
    assert "read as text8 has it" in told


def test_a_model_of_bytes_can_be_watched(source, tmp_path):
    source.write_text("ü€\n\x1b[31m" * 100)
    train(source, tmp_path / "run", "--tokenizer", "byte")
    prompt = "ü€\n\x1b[31m"
    for how in ("--watch", "--trace"):
        shown = succeeds("sample", tmp_path / "run", "-n", 1, "--prompt", prompt, how).err
        *steps, _ = shown.splitlines()
        assert len(steps) == 4  # a line for each of its blocks
        assert "ü€\\n\\x1b[31m" in steps[-1]
        assert all(line.isprintable() for line in steps)


def test_bits_of_bytes_are_said_to_be(source, tmp_path):
    train(source, tmp_path / "run", "--tokenizer", "byte")
    assert "certified bits per byte" in succeeds("evaluate", tmp_path / "run", "--data", source, "--rows", 4).out


def test_a_short_text_is_said_to_be_learned_by_heart(source, tmp_path):
    assert "by heart" not in train(source, tmp_path / "long").err
    source.write_text(TEXT[:200])
    told = train(source, tmp_path / "short", "--set", "training.steps=300", "--set", "training.log_every=300").err
    assert "note: 11 chunks of 16 tokens, read some 218 times, will be learned by heart" in told


def test_what_has_been_learned_by_heart_is_said_to_be(source, tmp_path, monkeypatch):
    found = iter([2.0, 3.0, 3.0, 2.0])
    monkeypatch.setattr(
        "vmd.evaluation.bits_in_passing", lambda model, x0, steps, *how: dict.fromkeys(["bits_1", "bits_4"], next(found))
    )
    told = train(source, tmp_path / "run").err
    assert "note: validation text was best at step 2 (2.000; now 3.000)" in told
    assert "or training.steps=2\n" in told
    assert "was best at" not in train(source, tmp_path / "other").err


def test_settings_of_data_are_heeded_where_a_run_goes_on(source, tmp_path):
    train(source, tmp_path / "run")
    words = ("train", "text", "--out", tmp_path / "run", "--resume", "--device", "cpu", *SMALL)
    done = vmd(*words, "--set", "data.documents=true")
    assert done.code == 2
    assert "documents" in done.err.splitlines()[-1]


def test_models_of_other_characters_are_not_compared(source, tmp_path):
    train(source, tmp_path / "one")
    text = TEXT.replace("a", "x")
    (tmp_path / "other.txt").write_text(text)
    train(tmp_path / "other.txt", tmp_path / "other")
    words = ("evaluate", tmp_path / "one", "--data", source, "--rows", 4, "--against", tmp_path / "other")
    done = vmd(*words)
    assert done.code == 2
    assert "the same tokens" in done.err.splitlines()[-1]
    one, other = (VMD.from_pretrained(tmp_path / name) for name in ("one", "other"))
    many = {"symbols": ()}  # as models of many characters have it
    one.config, other.config = replace(one.config, **many), replace(other.config, **many)
    with pytest.raises(InvalidInput, match="the same tokens"):
        evaluate(one, TEXT, against=other)


def test_a_z_that_was_not_asked_for_is_each_model_s_own(source, tmp_path):
    """A model whose codes are drawn once is no better than itself."""
    once = ("--set", "objective.masking=steps", "--set", "objective.z=once", "--set", "objective.steps=1,2")
    train(source, tmp_path / "once", *once, "--set", "objective.together=0")
    train(source, tmp_path / "fresh")
    scored = tmp_path / "e.json"
    for first, second, told in (("once", "once", "z once and z once"), ("fresh", "once", "z fresh and z once")):
        words = ("evaluate", tmp_path / first, "--data", source, "--rows", 8, "--steps", "1,2", "--json", scored)
        assert told in succeeds(*words, "--against", tmp_path / second).out
        apart = [row for row in json.loads(scored.read_text())["rows"] if "against" in row]
        assert (apart[1]["value"] == 0) is (first == second)
    assert "z fresh and z fresh" in succeeds(*words, "--against", tmp_path / "once", "--z", "fresh").out


def test_bits_of_long_tokens_are_also_per_byte(tmp_path):
    """By which models of other tokens compare."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = {letter: number for number, letter in enumerate(["the ", "cat ", "sat ", "é"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="é"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(tmp_path / "words.json"))
    source = tmp_path / "source.txt"
    source.write_text("the cat sat the sat cat " * 400)
    train(source, tmp_path / "run", "--tokenizer", tmp_path / "words.json")
    words = ("evaluate", tmp_path / "run", "--data", source, "--split", "all", "--json", tmp_path / "e.json")
    assert "per byte of the text" in succeeds(*words).out
    certified, per_byte = json.loads((tmp_path / "e.json").read_text())["rows"][:2]
    assert per_byte["about"] == "4.000 bytes a token in these rows"
    assert per_byte["value"] == pytest.approx(certified["value"] / 4)
    strange = tmp_path / "strange.txt"
    strange.write_text("the cat zat " * 400)  # a word that is not known says nothing of how long it was
    assert "per byte" not in succeeds("evaluate", tmp_path / "run", "--data", strange, "--split", "all").out
    pieces, how = tokenizers.pre_tokenizers, made.decoder
    for first, last, normal in (
        (pieces.Whitespace(), how, None),  # blanks that are thrown away
        (made.pre_tokenizer, tokenizers.decoders.WordPiece(), None),  # blanks that are put in
        (made.pre_tokenizer, None, None),
        (pieces.Sequence([pieces.Digits(), pieces.Split(" ", "removed")]), how, None),
        (made.pre_tokenizer, how, tokenizers.normalizers.Lowercase()),
    ):
        lossy = tokenizers.Tokenizer.from_str(made.to_str())
        lossy.pre_tokenizer, lossy.decoder = first, last
        if normal is not None:
            lossy.normalizer = normal
        assert not JsonTokenizer(lossy.to_str()).gives_back(np.zeros((1, 4), dtype=np.int64))
    assert JsonTokenizer(made.to_str()).gives_back(np.zeros((1, 4), dtype=np.int64))
    train(source, tmp_path / "letters")
    assert "per byte" not in succeeds("evaluate", tmp_path / "letters", "--data", source).out


def test_bytes_of_a_character_that_a_row_cuts_are_not_counted():
    """Else bits of a byte would seem fewer than they are: what is left of a character is shown as one of three bytes."""

    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    text = ("中文é" * 100).encode()
    for length in (4, 5, 7, 16):
        rows = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)
        assert bytes_per_token(Bytes(), rows) <= 1
    assert bytes_per_token(Bytes(), torch.tensor([list("aé中".encode())])) == 1


def test_scores_are_of_all_of_a_text_or_of_a_split(source, tmp_path):
    out, other = tmp_path / "run", tmp_path / "other.txt"
    train(source, out)
    other.write_text("the dog sat on the cat" * 4)

    def rows(*words) -> int:
        succeeds("evaluate", out, *words, "--json", tmp_path / "scores.json")
        return int(json.loads((tmp_path / "scores.json").read_text())["rows"][0]["about"].split("; ")[1].split()[0])

    assert rows("--data", other) == 88 // 16
    assert rows("--data", source) == len(TEXT) * 5 // 100 // 16  # the test split of its own text
    assert rows("--data", source, "--split", "all") == len(TEXT) // 16
    assert rows("--data", source, "--split", "train") == len(TEXT) * 90 // 100 // 16


def test_a_resumed_run_keeps_its_tokenizer(source, tmp_path):
    out = tmp_path / "run"
    train(source, out)
    kept = (out / "tokenizer.json").read_bytes()
    train(source, out, "--resume", *settings("training.steps=6"))
    assert (out / "tokenizer.json").read_bytes() == kept


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_run_is_not_resumed_on_a_text_that_has_changed_under_its_name(source, tmp_path, checkpoints):
    out = tmp_path / "run"
    train(source, out)
    if not checkpoints:  # it was stopped before the first
        for path in (out / "checkpoints").iterdir():
            path.unlink()
    words = ("train", "text", "--data", source, "--out", out, "--device", "cpu", *SMALL, "--resume")
    source.write_text(TEXT.replace("cat", "act"))
    told = refused(*words, folder=out)
    assert f"cats.txt: not the text that {out} was begun with: expected that, or another folder" in told
    source.write_text(TEXT)  # of the same content it may be a new file
    succeeds(*words, *settings("training.steps=6"))


def test_a_run_that_did_not_keep_what_it_read_is_resumed(source, tmp_path):
    out = tmp_path / "run"
    train(source, out)
    run = json.loads((out / "run.json").read_text())
    del run["text_sha256"]
    (out / "run.json").write_text(json.dumps(run))
    train(source, out, "--resume", *settings("training.steps=6"))
    assert "text_sha256" in json.loads((out / "run.json").read_text())


def test_an_overwritten_run_leaves_no_tokenizer_behind(source, tmp_path):
    out = tmp_path / "run"
    train(source, out)
    np.save(tmp_path / "rows.npy", np.arange(40).reshape(10, 4) % 3)
    words = ("train", "array", "--data", tmp_path / "rows.npy", "--out", out, "--overwrite", "--device", "cpu")
    succeeds(*words, *settings("training.steps=2", "model.layers=1", "model.width=16", "model.heads=2"))
    assert model_tokenizer(out) is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "text", "--data", "nowhere.txt"], "nowhere.txt"),
        (["train", "text", "--data", "no/where.txt"], "no/where.txt"),
        (["train", "text", "--data", "SOURCE", "--tokenizer", "words"], "words"),
        (["train", "text", "--data", "d1", "--tokenizer", "byte"], "d1"),
        (["train", "array", "--data", "SOURCE"], "model.length"),
        (["train", "text", "--data", "EMPTY"], "empty"),
        (["train", "text", "--data", "SOURCE", "--set", "model.length=3000"], "too short"),
    ],
)
def test_bad_text_is_one_line(words, named, source, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    places = {"SOURCE": str(source), "EMPTY": str(tmp_path / "empty.txt")}
    words = [places.get(word, word) for word in words]
    folder = tmp_path / "out"
    folder.mkdir()
    assert named in refused(*words, "--out", folder / "run", "--device", "cpu", folder=folder)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["sample", "RUN", "--prompt", "Ä"], "Ä"),
        (["sample", "RUN", "--infill", "_" * 17], "17 tokens"),
        (["sample", "RUN", "--infill", "no gap"], "--infill 'no gap': expected a _ for each gap"),
        (["sample", "RUN", "--infill", "a_", "--prompt", "a"], "one of the two"),
        (["sample", "RUN", "--infill", "a_", "--tries", "0"], "--tries 0"),
        (["sample", "RUN", "--prompt", "a", "--tries", "4"], "--tries 4: expected with --infill"),
        (["evaluate", "RUN", "--data", "SHORT"], "too short"),
        (["evaluate", "RUN", "--data", "SOURCE", "--split", "half"], "half"),
        (["evaluate", "RUN", "--data", "d1", "--split", "test"], "--split"),
    ],
)
def test_bad_requests_to_a_model_of_text_are_one_line(words, named, source, tmp_path):
    run, short = tmp_path / "run", tmp_path / "short.txt"
    train(source, run)
    short.write_text("the cat")
    places = {"RUN": run, "SOURCE": source, "SHORT": short}
    assert named in refused(*(places.get(word, word) for word in words), folder=tmp_path)


ENGLISH = (
    "The old house stood at the end of a long road. Nobody had lived there since the war, and the garden was full of weeds. "
)


def test_the_model_of_text_that_comes_with_vmd(tmp_path):
    """Small enough, knows English from a mess of its letters, in one step as well as in four, and takes what people type."""
    weights = SHIPPED / "text" / "model.safetensors"
    assert weights.stat().st_size <= 13e6
    assert {tensor.dtype for name, tensor in load_file(weights).items() if name.endswith("weight") and tensor.ndim > 1} == {
        torch.int8
    }
    ran = json.loads((Path(__file__).parents[1] / "results/text8-70M/results.json").read_text())["configurations"]
    assert VMD.from_pretrained("text").config == from_dict(RunConfig, ran["2048 codes, r = 4"]).model
    assert len(succeeds("sample", "text", "--n", 2, "--steps", 1, "--prompt", "The History of").out.splitlines()) == 2
    bits = {}
    for name, text in {
        "english": ENGLISH * 5,
        "mess": "".join(random.Random(0).sample(ENGLISH * 5, 5 * len(ENGLISH))),
    }.items():
        (tmp_path / f"{name}.txt").write_text(text)
        done = succeeds(
            *("evaluate", "text", "--data", tmp_path / f"{name}.txt", "--steps", "1,4", "--json", tmp_path / "e.json")
        )
        assert "as text8 has it" in done.err
        rows = json.loads((tmp_path / "e.json").read_text())["rows"]
        bits[name] = [row["value"] for row in rows if row["metric"] == "certified bits per token"]
    assert all(len(found) == 2 for found in bits.values())
    assert max(bits["english"]) < 2.3
    assert min(bits["mess"]) > 4


def test_the_model_that_comes_with_vmd_fills_gaps_with_what_fits():
    """By its own certified bits of the whole text, which filled blindly it likes less."""
    words = ("sample", "text", "-n", 8, "--seed", 1, "--infill", "the ____ of the united states")
    model, letters, bits = VMD.from_pretrained("text").shortened(32), CharTokenizer(TEXT8_ALPHABET), []
    for tries in (16, 1):
        lines = succeeds(*words, "--tries", tries).out.splitlines()
        assert all(line.startswith("the ") and line.endswith(" of the united states") for line in lines)
        x0 = torch.tensor(np.stack([letters.encode(line.ljust(32)) for line in lines]).astype(np.int64))
        bits.append(float(nll_bound(model, x0, 1).mean()))
    assert bits[0] < bits[1] - 2


def test_what_people_type_is_read_as_text8_with_a_note(tmp_path):
    assert "as text8 has it" in succeeds("sample", "text", "-n", 1, "--prompt", "Rome, 753").err
    assert "as text8 has it" not in succeeds("sample", "text", "-n", 1, "--prompt", "rome ").err
    done = succeeds("sample", "text", "-n", 1, "--infill", "the __ of")
    assert "as text8 has it" not in done.err
    assert "--infill" in refused("sample", "text", "--prompt", "the _ of", folder=tmp_path)


def test_paths_may_be_strings_or_paths(source, tmp_path):
    run = override_all(preset("text"), [word for word in SMALL if word != "--set"])
    data = load_data(source, length=16)
    model = VMD.for_data(run.model, data)
    fit(model, data, run, out=str(tmp_path / "by string"))
    assert (tmp_path / "by string" / "model.safetensors").is_file()


def test_a_file_that_is_not_there_is_not_called_damaged(source, tmp_path):
    (tmp_path / "empty").mkdir()
    told = refused("sample", tmp_path / "empty", folder=tmp_path)
    assert "config.json: cannot read: No such file or directory" in told


def test_a_closed_output_is_no_error(source, tmp_path, monkeypatch):
    """As in `vmd sample MODEL >&-`."""
    train(source, tmp_path / "run")
    monkeypatch.setattr(sys, "stdout", None)
    for words in (["sample", tmp_path / "run", "-n", 1], ["evaluate", tmp_path / "run", "--data", source, "--rows", 2]):
        monkeypatch.setattr(sys, "argv", ["vmd", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code


def test_a_model_of_text_stays_one_when_python_loads_and_saves_it(source, tmp_path):
    train(source, tmp_path / "run", "--tokenizer", "byte")
    for name in ("text", tmp_path / "run"):
        model = VMD.from_pretrained(name)
        model.save_pretrained(tmp_path / "again")
        both = [succeeds("sample", folder, "-n", 2, "--prompt", "the ").out for folder in (name, tmp_path / "again")]
        assert both[0] == both[1]
        assert both[0].startswith("the ")
        row = model.tokenizer.encode("the cat")
        assert model.shortened(16).tokenizer.decode(row) == "the cat"
    VMD.from_pretrained("sudoku").save_pretrained(tmp_path / "again")  # nothing of the other model stays
    assert VMD.from_pretrained(tmp_path / "again").tokenizer is None


def test_a_model_that_python_trains_on_text_can_be_read(source, tmp_path):
    run = override_all(preset("text"), [word for word in SMALL if word != "--set"])
    data = load_data(source, length=16)
    model = VMD.for_data(run.model, data)
    fit(model, data, run, out=tmp_path / "run")
    assert set(model.tokenizer.decode(model.sample(1).tokens[0])) <= set(TEXT)
    assert len(succeeds("sample", tmp_path / "run", "-n", 1).out) == 17


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        ({"kind": "byte"}, "a tokenizer of 256 tokens: expected 14, the model's vocabulary"),
        ({"kind": "char", "alphabet": "ABCDEFGHIJKLMN"}, "a tokenizer of other tokens: expected the model's symbols"),
        ({"kind": "char", "alphabet": "AB"}, "a tokenizer of other tokens: expected the model's symbols"),
    ],
)
def test_a_tokenizer_that_is_not_the_models_is_one_line(source, tmp_path, tokenizer, says):
    train(source, tmp_path / "run")
    (tmp_path / "run/tokenizer.json").write_text(json.dumps(tokenizer))
    for words in (["sample", tmp_path / "run"], ["evaluate", tmp_path / "run", "--data", source]):
        assert f"tokenizer.json: {says}" in refused(*words, folder=tmp_path)


def test_symbols_that_are_not_the_texts_are_refused_before_training(source, tmp_path):
    data = load_data(source, length=16)
    run = override_all(preset("text"), [word for word in SMALL if word != "--set"])
    model = VMD(replace(run.model, vocab_size=data.vocab_size, symbols=tuple("ABCDEFGHIJKLMN")))
    with pytest.raises(InvalidInput, match=r"cats\.txt: a tokenizer of other tokens"):
        fit(model, data, run, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def fetched(monkeypatch) -> list[str]:
    """Every address that is asked for; a text of 2,000 letters is called text8, and comes from there."""
    asked, content = [], io.BytesIO()
    monkeypatch.setitem(text_module.TEXT8_KINDS, "text8", (2_000, (0.9, 0.05, 0.05)))
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("text8", "".join(random.Random(0).choices(TEXT8_ALPHABET, k=2_000)))

    def download(url, path, on_progress):
        asked.append(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.getvalue())

    monkeypatch.setattr(text_module, "_download", download)
    return asked


def test_text8_is_fetched_to_be_scored_too(source, tmp_path, monkeypatch, fetched):
    """By models that have its letters, which score its test part, and by others, which score all of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.txt").write_text(TEXT8_ALPHABET * 30)
    train("letters.txt", "letters")
    train(source, "bytes", "--tokenizer", "byte")
    assert "scoring the test part of text8" in succeeds("evaluate", "letters", "--data", "text8").err
    assert len(fetched) == 1
    assert "scoring all of text8" in succeeds("evaluate", "letters", "--data", "text8", "--split", "all").err
    assert "scoring all of text8" in succeeds("evaluate", "bytes", "--data", "text8").err
    assert "scoring the train part of text8" in succeeds("evaluate", "bytes", "--data", "text8", "--split", "train").err
    train(source, "cats")
    assert "expected one of the 14 characters" in refused("evaluate", "cats", "--data", "text8", folder=tmp_path)
    assert len(fetched) == 1  # and no more


def test_text8_may_be_trained_on_in_other_tokens(tmp_path, fetched):
    train("text8", tmp_path / "run", "--tokenizer", "byte")
    assert VMD.from_pretrained(tmp_path / "run").config.vocab_size == 256
    assert "scoring the test part of text8" in succeeds("evaluate", tmp_path / "run", "--data", "text8").err


def test_a_text8_that_cannot_be_fetched_is_one_line(source, tmp_path, monkeypatch):
    train(source, tmp_path / "run")

    def fail(*rest, **more):
        raise URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    for split in ((), ("--split", "test")):
        told = refused("evaluate", tmp_path / "run", "--data", "text8", *split, folder=tmp_path)
        assert "cannot download http" in told


def test_a_step_that_does_not_fit_is_said_with_what_would(monkeypatch):
    """A step of preset `text` keeps some 97 GB."""
    run = sized("text")
    for gigabytes, parts in ((1, 256), (23, 16), (25, 8), (200, 1)):
        pages = {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": gigabytes * 10**6}
        monkeypatch.setattr("os.sysconf", pages.__getitem__)
        assert parts_that_fit(run) == parts
    large = sized("text", 32_000)
    assert parts_that_fit(large) > 1  # 200 GB are no longer enough: logits take 101


@pytest.mark.parametrize(("fits", "noted"), [(1, False), (4, True)])
def test_a_step_that_does_not_fit_is_made_in_parts(source, tmp_path, monkeypatch, fits, noted):
    monkeypatch.setattr("vmd.runs.parts_that_fit", lambda run, processes: fits)
    arguments = ("train", "text", "--data", source, "--device", "cpu", *SMALL)
    told = succeeds(*arguments, "--out", tmp_path / "out").err
    assert ("training.accumulate=4: a step is made in parts, to fit this machine's memory" in told) is noted
    assert json.loads((tmp_path / "out" / "run.json").read_text())["training"]["accumulate"] == fits
    told = succeeds(*arguments, "--out", tmp_path / "chosen", "--set", "training.accumulate=2").err
    assert "in parts" not in told
    assert json.loads((tmp_path / "chosen" / "run.json").read_text())["training"]["accumulate"] == 2


def test_documents_that_lose_much_to_chunks_are_said_to(source, tmp_path):
    text = tmp_path / "lines.txt"
    text.write_text("\n\n".join("ab" * (5 + number % 7) for number in range(400)))
    assert "left out" in train(text, tmp_path / "documents", "--set", "data.documents=true", "--set", "model.length=8").err
    assert "left out" not in train(source, tmp_path / "stream").err


def test_a_run_goes_on_as_it_began_whatever_the_machine_would_like(source, tmp_path, monkeypatch):
    """Its folder knows what it is trained on and how: nothing of that has to be said again."""
    run = tmp_path / "run"
    train(source, run, "--set", "training.accumulate=2", "--no-fast", "--tokenizer", "byte")
    begun = json.loads((run / "run.json").read_text())
    monkeypatch.setattr("vmd.runs.parts_that_fit", lambda run, processes: 4)
    monkeypatch.setattr("vmd.step.fast_settings", lambda run, device: {"precision": "bf16", "compile": True})
    for words in ([], ["--data", source]):
        succeeds("train", *words, "--out", run, "--device", "cpu", "--resume")
        assert json.loads((run / "run.json").read_text()) == begun
    succeeds("train", "--out", run, "--device", "cpu", "--resume", "--set", "training.accumulate=1")
    assert json.loads((run / "run.json").read_text())["training"]["accumulate"] == 1
    monkeypatch.undo()
    monkeypatch.setenv("VMD_CACHE", str(tmp_path / "cache"))
    succeeds("train", "text", "--out", run, "--device", "cpu", "--resume", *SMALL)  # the preset and no --data
    assert json.loads((run / "run.json").read_text())["data"] == begun["data"]


def test_one_is_told_of_a_run_that_takes_days_on_a_cpu(source, tmp_path, monkeypatch):
    assert days_on_a_cpu(sized("text")) > 7
    assert 0.001 < days_on_a_cpu(sized("text-small")) < 0.01
    arguments = ("train", "text", "--data", source, "--device", "cpu", *SMALL)
    assert "takes some" not in succeeds(*arguments, "--out", tmp_path / "small").err
    monkeypatch.setattr("vmd.runs.days_on_a_cpu", lambda run: 15.2)
    told = succeeds(*arguments, "--out", tmp_path / "long").err
    assert "takes some 15.2 days\n" in told  # as small as one may want it
    told = succeeds(*arguments, "--set", "model.width=132", "--out", tmp_path / "large").err
    assert "takes some 15.2 days: preset text-small-draft takes minutes" in told


@pytest.mark.parametrize(("width", "better"), [(16, "text-small-draft"), (132, "text-draft")])
def test_one_is_told_of_codes_that_are_too_much_work_for_their_vocabulary(source, tmp_path, monkeypatch, width, better):
    assert work_of_codes(sized("text").model) < work_of_codes(sized("text", 256).model) < 4
    assert work_of_codes(sized("text-small", 4096).model) > 4
    arguments = ("train", "text", "--data", source, "--device", "cpu", *SMALL, "--set", f"model.width={width}")
    assert "the work of" not in succeeds(*arguments, "--out", tmp_path / "letters").err
    monkeypatch.setattr("vmd.runs.work_of_codes", lambda model: 26.7)
    told = succeeds(*arguments, "--out", tmp_path / "pieces").err
    assert "note: 4 codes of 14 symbols take 27 times the work of no latent: for tokens of several letters" in told
    assert f"preset {better} is better\n" in told


def sized(name: str, vocabulary: int = 27):
    run = preset(name)
    return replace(run, model=run.model.resolved(run.model.length, vocabulary))


def test_a_text_is_gone_on_with_in_python():
    model = VMD.from_pretrained("text").shortened(32)
    drawn = model.sample(2, prompt="the history of", seeds=[1, 2]).tokens
    assert len(drawn) == 2
    assert not torch.equal(*drawn)
    for row in drawn:
        assert model.tokenizer.decode(row).startswith("the history of")
    for prompt, n, told in (("x" * 33, 1, "33 tokens: expected at most 32"), ("x", 0, "n=0: expected")):
        with pytest.raises(InvalidInput, match=told):
            model.sample(n, prompt=prompt)
    with pytest.raises(InvalidInput, match="no model of text"):
        VMD.from_pretrained("sudoku").sample(prompt="53..7")


def test_a_text_with_gaps_is_filled_in_python():
    model = VMD.from_pretrained("text").shortened(32)
    drawn = infill(model, "the ____ of science", 2, seeds=[1, 2], tries=4).tokens
    for row in drawn:
        assert re.fullmatch("the [a-z ]{4} of science", model.tokenizer.decode(row))
