"""Starting from a trained model: what is taken over, what is new, what may be frozen."""

import dataclasses
import json
import shutil

import pytest
import torch

from command import refused, settings, succeeds
from helpers import NO_LATENT, codes, latent, learned_prior, random_tokens, tiny_config
from vmd.config import InvalidInput, LatentConfig, RunConfig, TrainingConfig
from vmd.data import ArrayData
from vmd.data.synthetic import deterministic
from vmd.ensemble import Ensemble
from vmd.metrics import accuracy
from vmd.model import VMD, start_from
from vmd.training import train

CHAIN = LatentConfig(kind="chain", codes=3)
ADDED = {
    "codes": tiny_config(z=codes()),
    "codes in a layer": tiny_config(z=codes(layers=1)),
    "chain": tiny_config(z=CHAIN),
    "Gaussian": tiny_config(z=latent()),
    "learned prior": tiny_config(z=learned_prior()),
    "draft": tiny_config(draft=8),
    "other blocks": tiny_config(block_size=4),
}


class Interrupted(Exception):
    pass


def data() -> ArrayData:
    return ArrayData(random_tokens(20, 4, seed=9).numpy())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model without a latent, trained for a few steps."""
    out = tmp_path_factory.mktemp("trained") / "model"
    model = VMD(tiny_config(z=NO_LATENT), seed=3)
    train(model, data(), RunConfig(model=model.config, training=TrainingConfig(steps=5, batch_size=8)), out=out)
    return out


def run_for(name: str, source, **training) -> RunConfig:
    settings = {"steps": 4, "batch_size": 8, "log_every": 1, "checkpoint_every": 2, "init": str(source)} | training
    return RunConfig(model=ADDED[name], training=TrainingConfig(**settings))


@pytest.mark.parametrize("name", ADDED)
def test_what_both_have_is_taken_over_and_the_rest_is_new(trained, name):
    model, fresh, source = VMD(ADDED[name], seed=1), VMD(ADDED[name], seed=1), VMD.from_pretrained(trained)
    taken = start_from(model, str(trained))
    assert sorted(taken) == sorted(source.state_dict())
    for key, tensor in model.state_dict().items():
        expected = source if key in taken else fresh
        assert torch.equal(tensor, expected.state_dict()[key]), key
    assert (set(taken) == set(model.state_dict())) is (name == "other blocks")


def test_a_frozen_model_that_gets_codes_makes_tokens_agree(tmp_path):
    """It writes both tokens of a pair at once, blindly; the codes alone learn which belong together."""
    law = deterministic()
    shape = tiny_config(law.length, law.length, law.vocab_size)
    blind, agreeing = VMD(shape, seed=0), VMD(dataclasses.replace(shape, latent=codes(20)), seed=0)
    training = {"steps": 150, "batch_size": 256, "learning_rate": 0.01}
    train(blind, law, RunConfig(model=blind.config, training=TrainingConfig(**training)), out=tmp_path / "blind")
    training |= {"init": str(tmp_path / "blind"), "freeze": True, "steps": 400}
    train(agreeing, law, RunConfig(model=agreeing.config, training=TrainingConfig(**training)))
    before, after = (
        accuracy(m.sample(2_000, steps=1, rule="sample", generator=torch.Generator().manual_seed(0)).tokens, law)
        for m in (blind, agreeing)
    )
    assert before < 20
    assert after > 80


def test_a_model_with_a_part_gives_the_others_to_one_without(trained, tmp_path):
    VMD(ADDED["codes"], seed=5).save_pretrained(tmp_path / "codes")
    model = VMD(tiny_config(z=NO_LATENT), seed=1)
    assert sorted(start_from(model, str(tmp_path / "codes"))) == sorted(model.state_dict())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (tiny_config(width=32), "model.width=16: expected 32"),
        (tiny_config(layers=3), "model.layers=2: expected 3"),
        (tiny_config(heads=4), "model.heads=2: expected 4"),  # whose weights have the same shapes
        (tiny_config(vocab_size=7), "model.vocab_size=5: expected 7"),
        (tiny_config(length=8, block_size=2), "decoder.trunk.position.weight has shape (4, 16): expected (8, 16)"),
    ],
)
def test_another_network_is_refused_and_nothing_is_copied(trained, config, says):
    model = VMD(config, seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidInput) as error:
        start_from(model, str(trained))
    assert says in str(error.value)
    assert str(trained) in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_other_codes_and_other_symbols_are_refused(tmp_path):
    VMD(ADDED["codes"]).save_pretrained(tmp_path / "codes")
    with pytest.raises(InvalidInput, match="has shape"):
        start_from(VMD(tiny_config(z=codes(5))), str(tmp_path / "codes"))
    VMD(dataclasses.replace(tiny_config(), symbols=tuple("abcde"))).save_pretrained(tmp_path / "letters")
    with pytest.raises(InvalidInput, match="other symbols"):
        start_from(VMD(dataclasses.replace(tiny_config(), symbols=tuple("vwxyz"))), str(tmp_path / "letters"))
    start_from(VMD(tiny_config()), str(tmp_path / "letters"))  # which says nothing of symbols


def test_training_starts_from_the_weights_and_says_so(trained):
    model, told = VMD(ADDED["codes"], seed=1), []
    train(model, data(), run_for("codes", trained, steps=1, learning_rate=1e-30), on_note=told.append)
    source = VMD.from_pretrained(trained).state_dict()
    assert all(torch.allclose(model.state_dict()[name], tensor, atol=1e-12) for name, tensor in source.items())
    assert told == [f"{len(source)} tensors of {trained}; new: decoder.pathway (8)"]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
@pytest.mark.parametrize("ema", [0.0, 0.5])
@pytest.mark.parametrize("name", ["codes", "chain", "Gaussian", "learned prior", "draft"])
def test_frozen_weights_stay_and_new_ones_learn(trained, tmp_path, name, optimizer, ema):
    model = VMD(ADDED[name], seed=1)
    fresh = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    settings = {"freeze": True, "optimizer": optimizer, "ema": ema, "weight_decay": 0.1, "learning_rate": 0.01}
    train(model, data(), run_for(name, trained, **settings), out=tmp_path / "run")
    source = VMD.from_pretrained(trained).state_dict()
    changed = [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, source.get(key, fresh[key]))]
    assert changed
    assert not set(changed) & set(source)
    assert all(p.requires_grad for p in model.parameters())
    saved = VMD.from_pretrained(tmp_path / "run").state_dict()
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(trained, tmp_path, freeze, stop):
    source = shutil.copytree(trained, tmp_path / "source")
    config = run_for("codes", source, freeze=freeze, ema=0.9)
    whole = VMD(config.model, seed=1)
    train(whole, data(), config, out=tmp_path / "whole")

    def interrupt(done, record):
        if done == stop:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(VMD(config.model, seed=1), data(), config, out=tmp_path / "run", on_step=interrupt)
    again = VMD(config.model, seed=1)
    if stop > 1 and not freeze:
        shutil.rmtree(source)  # all is in the checkpoint
    train(again, data(), config, out=tmp_path / "run", resume=True)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in whole.state_dict().items())


def test_what_cannot_be_frozen_is_refused(trained):
    with pytest.raises(InvalidInput, match=r"training\.freeze=true: expected with training\.init"):
        TrainingConfig(freeze=True)
    with pytest.raises(InvalidInput, match="expected a part that"):
        train(VMD(ADDED["other blocks"]), data(), run_for("other blocks", trained, freeze=True))
    law = deterministic()
    config = RunConfig(
        model=tiny_config(length=law.length, block_size=0, vocab_size=law.vocab_size).resolved(law.length, law.vocab_size),
        training=TrainingConfig(steps=1, init=str(trained)),
    )
    with pytest.raises(InvalidInput, match="expected none in an ensemble"):
        train(Ensemble([VMD(config.model)]), law, config)


# The command


SMALL = settings(
    *("training.steps=4", "training.batch_size=8", "training.log_every=2", "model.length=16", "model.layers=1"),
    *("model.width=16", "model.heads=2"),
)
TEXT = "the cat sat on the mat and the dog sat on the log. " * 40


@pytest.fixture
def language(tmp_path, monkeypatch):
    monkeypatch.setenv("VMD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cats.txt").write_text(TEXT)
    succeeds("train", "text-mdm", "--data", tmp_path / "cats.txt", "--out", tmp_path / "first", "--device", "cpu", *SMALL)
    return tmp_path / "first"


@pytest.mark.parametrize(("preset", "new"), [("text", "decoder.pathway"), ("text-draft", "decoder.draft"), ("text-mdm", "")])
def test_text_goes_on_in_the_tokens_of_the_model_it_starts_from(language, tmp_path, preset, new):
    """Of an alphabet that the new text does not fill."""
    (tmp_path / "few.txt").write_text("a cat at a mat. " * 100)
    done = succeeds(
        *("train", preset, "--data", tmp_path / "few.txt", "--out", tmp_path / "second", "--device", "cpu", *SMALL),
        *("--init", language),
    )
    assert f"tensors of {language}" in done.err
    assert (f"new: {new}" in done.err) is bool(new)
    tokenizers = [json.loads((folder / "tokenizer.json").read_text()) for folder in (language, tmp_path / "second")]
    assert tokenizers[0] == tokenizers[1]
    run = json.loads((tmp_path / "second/run.json").read_text())
    assert run["training"]["init"] == str(language)
    (line,) = succeeds("sample", tmp_path / "second", "-n", 1).out.splitlines()
    assert len(line) == 16
    succeeds("evaluate", tmp_path / "second", "--data", tmp_path / "few.txt", "--rows", 2)


def test_a_tokenizer_may_be_that_of_a_trained_model(language, tmp_path):
    (tmp_path / "few.txt").write_text("a cat at a mat. " * 100)
    words = ("train", "text-mdm", "--data", tmp_path / "few.txt", "--device", "cpu", *SMALL)
    succeeds(*words, "--out", tmp_path / "second", "--tokenizer", language / "tokenizer.json")
    assert (tmp_path / "second/tokenizer.json").read_text() == (language / "tokenizer.json").read_text()
    (tmp_path / "wrong.json").write_text('{"kind": "runes"}')
    told = refused(*words, "--out", tmp_path / "third", "--tokenizer", tmp_path / "wrong.json", folder=tmp_path / "third")
    assert "wrong.json: expected the description of a tokenizer" in told


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        ("A CAT AT A MAT. " * 100, (), "character 'A'"),
        (TEXT, ("--tokenizer", "byte"), "model.vocab_size="),
        (TEXT, ("--set", "model.width=32"), "model.width=16: expected 32"),
        (TEXT, ("--set", "training.freeze=true"), "training.freeze=true: expected a part"),
    ],
)
def test_what_does_not_fit_is_one_line(language, tmp_path, text, more, says):
    (tmp_path / "other.txt").write_text(text)
    words = ("train", "text-mdm", "--data", tmp_path / "other.txt", "--out", tmp_path / "second", "--device", "cpu", *SMALL)
    done = refused(*words, "--init", language, *more, folder=tmp_path / "second")
    assert says in done


def test_a_model_that_is_not_there_is_one_line(language, tmp_path):
    words = ("train", "text", "--data", tmp_path / "cats.txt", "--out", tmp_path / "second", "--device", "cpu", *SMALL)
    assert "nowhere: expected a model folder" in refused(*words, "--init", "nowhere", folder=tmp_path / "second")
