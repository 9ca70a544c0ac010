"""Starting from a trained model: what is taken over, what is new, what may be frozen."""

import dataclasses
import json
import shutil

import pytest
import torch

from command import refused, settings, succeeds
from helpers import NO_LATENT, codes, latent, learned_prior, random_tokens, tiny_config
from vmd import training
from vmd.config import InvalidInput, LatentConfig, RunConfig, TrainingConfig
from vmd.data import ArrayData, text
from vmd.data.synthetic import deterministic
from vmd.ensemble import Ensemble
from vmd.metrics import accuracy
from vmd.model import VMD, of_backbone, start_from
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
    told = start_from(model, str(trained))
    shared = source.state_dict()
    for key, tensor in model.state_dict().items():
        expected = source if key in shared else fresh
        assert torch.equal(tensor, expected.state_dict()[key]), key
    assert shared.keys() <= model.state_dict().keys()
    assert told.startswith(f"{len(shared)} tensors of {trained}")
    assert ("; blocks of 4 in the place of 2" in told) is (name == "other blocks")
    assert ("; new: " in told) is (name != "other blocks")


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


def test_a_model_with_a_part_gives_the_others_to_one_without(tmp_path):
    VMD(ADDED["codes"], seed=5).save_pretrained(tmp_path / "codes")
    model = VMD(tiny_config(z=NO_LATENT), seed=1)
    told = start_from(model, str(tmp_path / "codes"))
    assert told == f"{len(model.state_dict())} tensors of {tmp_path / 'codes'}; left out: decoder.pathway"


OTHER_LATENTS = {
    "more codes": codes(5),
    "codes in a layer": codes(layers=1),
    "additive": codes(head="additive"),
    "chain": LatentConfig(kind="chain", codes=4),
}


@pytest.mark.parametrize("name", OTHER_LATENTS)
def test_parts_of_another_latent_are_not_taken_though_they_have_the_same_names(tmp_path, name):
    source = VMD(ADDED["codes"], seed=5)
    source.save_pretrained(tmp_path / "codes")
    model, fresh = (VMD(tiny_config(z=OTHER_LATENTS[name]), seed=1) for _ in range(2))
    told = start_from(model, str(tmp_path / "codes"))
    assert "; new: " in told
    assert "; left out: decoder.pathway" in told
    for key, tensor in model.state_dict().items():
        expected = source if of_backbone(key) else fresh
        assert torch.equal(tensor, expected.state_dict()[key]), key


@pytest.mark.parametrize("name", ["codes", "Gaussian", "draft"])
def test_the_same_latent_is_taken_whole(tmp_path, name):
    VMD(ADDED[name], seed=5).save_pretrained(tmp_path / "source")
    model = VMD(ADDED[name], seed=1)
    start_from(model, str(tmp_path / "source"))
    assert all(torch.equal(t, model.state_dict()[k]) for k, t in VMD(ADDED[name], seed=5).state_dict().items())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (tiny_config(width=32), "model.width=32: expected 16"),
        (tiny_config(layers=3), "model.layers=3: expected 2"),
        (tiny_config(mlp_ratio=4), "model.mlp_ratio=4: expected 2"),
        (tiny_config(vocab_size=7), "model.vocab_size=7: expected 5"),
        (tiny_config(heads=4), "model.heads=4: expected 2"),  # these have weights of the same shapes
        (tiny_config(rotary=False), "model.rotary=False: expected True"),
        (tiny_config(block_size=4, shifted=True), "model.shifted=True: expected False"),
        (tiny_config(length=16, block_size=16, board=True), "model.board=True: expected False"),
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


def test_other_symbols_are_refused(tmp_path):
    VMD(dataclasses.replace(tiny_config(), symbols=tuple("abcde"))).save_pretrained(tmp_path / "letters")
    with pytest.raises(InvalidInput, match="other symbols"):
        start_from(VMD(dataclasses.replace(tiny_config(), symbols=tuple("vwxyz"))), str(tmp_path / "letters"))
    start_from(VMD(tiny_config()), str(tmp_path / "letters"))  # which says nothing of symbols


def test_training_starts_from_the_weights_and_says_so(trained):
    model, told = VMD(ADDED["codes"], seed=1), []
    train(model, data(), run_for("codes", trained, steps=1, learning_rate=1e-30), on_note=told.append)
    source = VMD.from_pretrained(trained).state_dict()
    assert all(torch.allclose(model.state_dict()[name], tensor, atol=1e-12) for name, tensor in source.items())
    assert told == [f"{len(source)} tensors of {trained}; new: decoder.pathway"]


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
    if stop > 1:
        shutil.rmtree(source)  # all is in the checkpoint
    train(again, data(), config, out=tmp_path / "run", resume=True)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in whole.state_dict().items())


def test_a_frozen_network_stays_while_codes_that_it_had_are_split(tmp_path):
    VMD(ADDED["codes"], seed=5).save_pretrained(tmp_path / "codes")
    config = run_for("codes", tmp_path / "codes", freeze=True, split_codes_every=1, steps=4)
    model = VMD(config.model, seed=1)
    train(model, data(), config)
    before = VMD(ADDED["codes"], seed=5).state_dict()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved
    assert not any(of_backbone(name) for name in moved)


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_what_the_user_had_frozen_is_so_afterwards(trained, monkeypatch, freeze, fails):
    model = VMD(ADDED["codes"], seed=1)
    model.decoder.pathway.out.weight.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    before = model.decoder.pathway.out.weight.clone()
    if fails:
        monkeypatch.setattr(training, "make_optimizer", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(model, data(), run_for("codes", trained, freeze=freeze))
    else:
        train(model, data(), run_for("codes", trained, freeze=freeze, split_codes_every=0))
    assert torch.equal(model.decoder.pathway.out.weight, before)
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}


def test_what_cannot_be_frozen_or_begun_is_refused(trained):
    with pytest.raises(InvalidInput, match="expected a model with a latent or a draft head"):
        train(VMD(ADDED["other blocks"]), data(), run_for("other blocks", trained, freeze=True))
    assert TrainingConfig(init=trained).init == str(trained)  # a path is as good
    law = deterministic()
    shape = tiny_config(law.length, law.length, law.vocab_size, codes())
    for how, says in (({"init": str(trained)}, "expected none in an ensemble"), ({"freeze": True}, "expected one model")):
        config = RunConfig(model=shape, training=TrainingConfig(steps=1, **how))
        with pytest.raises(InvalidInput, match=says):
            train(Ensemble([VMD(shape)]), law, config)


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


FEW = "a cat at a mat. " * 100  # of an alphabet that is a part of the other


def start(tmp_path, *words, preset: str = "text", text: str = FEW, out: str = "second") -> tuple:
    (tmp_path / "few.txt").write_text(text)
    steps = settings("training.steps=4", "training.batch_size=8", "training.log_every=2")
    return ("train", preset, "--data", tmp_path / "few.txt", "--out", tmp_path / out, "--device", "cpu", *steps, *words)


@pytest.mark.parametrize(("preset", "new"), [("text", "decoder.pathway"), ("text-draft", "decoder.draft"), ("text-mdm", "")])
def test_text_goes_on_in_the_tokens_and_sizes_of_the_model_it_starts_from(language, tmp_path, preset, new):
    done = succeeds(*start(tmp_path, "--init", language, preset=preset))
    assert f"tensors of {language}" in done.err
    assert (f"new: {new}" in done.err) is bool(new)
    tokenizers = [json.loads((folder / "tokenizer.json").read_text()) for folder in (language, tmp_path / "second")]
    assert tokenizers[0] == tokenizers[1]
    run = json.loads((tmp_path / "second/run.json").read_text())
    assert run["training"]["init"] == str(language)
    assert (run["model"]["layers"], run["model"]["width"], run["model"]["length"]) == (1, 16, 16)
    (line,) = succeeds("sample", tmp_path / "second", "-n", 1).out.splitlines()
    assert len(line) == 16


@pytest.mark.parametrize(("chosen", "codes_then"), [((), 6), (("model.latent.codes=4",), 4)])
def test_codes_that_were_trained_are_kept_unless_others_are_asked_for(language, tmp_path, chosen, codes_then):
    succeeds(*start(tmp_path, "--init", language, *settings("model.latent.codes=6")))
    done = succeeds(*start(tmp_path, "--init", tmp_path / "second", *settings(*chosen), out="third"))
    assert json.loads((tmp_path / "third/run.json").read_text())["model"]["latent"]["codes"] == codes_then
    assert ("new: " in done.err) is bool(chosen)


def test_what_was_not_trained_is_not_frozen(language, tmp_path):
    told = refused(*start(tmp_path, *settings("training.freeze=true")), folder=tmp_path / "second")
    assert told.startswith("vmd: training.freeze=true: expected with --init")


@pytest.mark.parametrize("freeze", ["true", "false"])
def test_a_run_needs_its_beginning_no_longer(language, tmp_path, freeze, monkeypatch):
    """Neither to be scored nor to go on, whatever has become of it."""
    words = ("--init", language, "--set", f"training.freeze={freeze}")
    succeeds(*start(tmp_path, *words))
    before = (tmp_path / "second/model.safetensors").read_bytes()
    scored = succeeds("evaluate", tmp_path / "second", "--data", tmp_path / "few.txt", "--rows", 2).out
    shutil.move(language, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert succeeds("evaluate", "second", "--data", tmp_path / "few.txt", "--rows", 2).out == scored
    for again in (("--init", "elsewhere"), ("--init", language), ()):
        kept = words[2:] if freeze == "true" else ()
        succeeds(*start(tmp_path, "--resume", *again, *kept))
        assert (tmp_path / "second/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("spelled", ["second", "./second", "link"])
def test_a_model_is_not_written_over_while_it_is_begun_from(language, tmp_path, monkeypatch, spelled):
    shutil.copytree(language, tmp_path / "second")
    (tmp_path / "link").symlink_to(tmp_path / "second")
    monkeypatch.chdir(tmp_path)
    told = refused(*start(tmp_path, "--init", spelled, "--overwrite", preset="text-mdm"), folder=tmp_path / "second")
    assert f"--init {spelled}: expected another folder than --out" in told


def test_text8_keeps_its_splits(tmp_path, monkeypatch):
    """Whether its letters are found, or are those of a model."""
    monkeypatch.setenv("VMD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(text.TEXT8_KINDS, "text8-70M", (27 * 40, (0.95, 0.025, 0.025)))
    (tmp_path / "text8-70M").write_text(text.TEXT8_ALPHABET * 40)
    tokenizer = text.CharTokenizer(text.TEXT8_ALPHABET)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()))
    for given in ("char", tokenizer, str(tmp_path / "tokenizer.json")):
        assert text.prepared_text(str(tmp_path / "text8-70M"), given) == tmp_path / "cache/text8-70M"
    other = text.prepared_text(str(tmp_path / "text8-70M"), text.CharTokenizer(text.TEXT8_ALPHABET[::-1]))
    assert other.name != "text8-70M"


def test_a_tokenizer_may_be_that_of_a_trained_model(language, tmp_path):
    succeeds(*start(tmp_path, "--tokenizer", language / "tokenizer.json", *SMALL, preset="text-mdm"))
    assert (tmp_path / "second/tokenizer.json").read_text() == (language / "tokenizer.json").read_text()
    (tmp_path / "wrong.json").write_text('{"kind": "runes"}')
    words = start(tmp_path, "--tokenizer", tmp_path / "wrong.json", *SMALL, out="third")
    assert "wrong.json: expected the description of a tokenizer" in refused(*words, folder=tmp_path / "third")


@pytest.mark.parametrize(
    ("characters", "more", "says"),
    [
        ("A CAT AT A MAT. " * 100, (), "character 'A'"),
        (TEXT, ("--tokenizer", "byte"), "text in other tokens than those of"),
        (TEXT, ("--set", "model.width=32"), "model.width=32: expected 16"),
        (TEXT, ("--set", "model.length=32"), "decoder.trunk.position.weight has shape (16, 16)"),
        (TEXT, ("--set", "training.freeze=true"), "training.freeze=true: expected a model with"),
    ],
)
def test_what_does_not_fit_is_one_line(language, tmp_path, characters, more, says):
    words = start(tmp_path, "--init", language, *more, preset="text-mdm", text=characters)
    assert says in refused(*words, folder=tmp_path / "second")


@pytest.mark.parametrize("where", ["nowhere", ""])
def test_a_model_that_is_not_there_is_one_line(tmp_path, where):
    told = refused(*start(tmp_path, "--init", where, text=TEXT), folder=tmp_path / "second")
    assert "expected a model folder" in told


@pytest.mark.parametrize("table", ["text", "text-scan", "sudoku", "two-token"])
@pytest.mark.parametrize("setting", ["training.init=runs/x", "training.freeze=true"])
def test_systems_of_a_table_are_trained_from_the_start(tmp_path, table, setting):
    told = refused("reproduce", table, "--quick", "--out", tmp_path / "out", "--set", setting, folder=tmp_path)
    assert f"--set {setting}: expected with `vmd train`" in told


@pytest.mark.parametrize("z", [codes(by_place=True), codes(head="additive")], ids=["by place", "additive"])
def test_codes_that_know_their_places_are_new_in_other_blocks(tmp_path, z):
    """What is as large as a block cannot be taken over; the network can."""
    other = VMD(tiny_config(8, 2, z=z), seed=1)
    other.save_pretrained(tmp_path / "a")
    model = VMD(tiny_config(8, 4, z=z), seed=2)
    told = start_from(model, str(tmp_path / "a"))
    assert told.endswith("; new: decoder.pathway; left out: decoder.pathway; blocks of 4 in the place of 2")
    for name, p in model.state_dict().items():
        assert not of_backbone(name) or torch.equal(p, other.state_dict()[name])
    assert "decoder.pathway" not in start_from(VMD(tiny_config(8, 2, z=z)), str(tmp_path / "a"))
