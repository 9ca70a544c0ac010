import contextlib
import dataclasses
import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from command import vmd
from helpers import NO_LATENT, gaps, latent, random_tokens, tiny_config, tiny_model
from vmd.config import InvalidInput, ModelConfig
from vmd.masking import apply_mask, draw_masks
from vmd.model import VMD

LATENTS = [NO_LATENT, latent(), latent("doubled", on_clean=True)]
all_latents = pytest.mark.parametrize("z_config", LATENTS, ids=["none", "single", "doubled-clean"])


def random_latents(model: VMD, rows: int):
    shape = model.latent_shape(rows)
    return None if shape is None else torch.randn(shape, generator=torch.Generator().manual_seed(7))


def some_logits(model: VMD):
    x0 = random_tokens(3, model.config.length)
    mask = draw_masks(x0, model.config.block_size, generator=torch.Generator().manual_seed(0)).mask
    with torch.no_grad():
        return model.denoise(apply_mask(x0, mask, model.mask_id), x0, random_latents(model, 3))


def one_line(error) -> bool:
    message = str(error.value)
    return bool(message) and "\n" not in message and "Traceback" not in message


@all_latents
def test_a_saved_model_loads_with_the_same_logits(tmp_path, z_config):
    model = tiny_model(4, 2, z=z_config, seed=3)
    model.save_pretrained(tmp_path / "model")
    loaded = VMD.from_pretrained(tmp_path / "model")
    assert loaded.config == model.config
    assert torch.equal(some_logits(loaded), some_logits(model))


@all_latents
def test_a_model_that_is_saved_small_is_rounded_and_no_more(tmp_path, z_config):
    """Every number of a matrix within half a step of its row, of which there are 127 up to the largest."""
    model = tiny_model(4, 2, z=z_config, seed=3)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "small", small=True)
    loaded = VMD.from_pretrained(tmp_path / "small").state_dict()
    for name, w in model.state_dict().items():
        step = w.abs().amax(-1, keepdim=True) / 127 if w.ndim > 1 else torch.zeros(())
        assert ((loaded[name] - w).abs() <= 0.501 * step).all(), name
    again = VMD.from_pretrained(tmp_path / "small")
    again.save_pretrained(tmp_path / "again", small=True)  # what is rounded stays as it is
    assert all(torch.allclose(w, loaded[name]) for name, w in VMD.from_pretrained(tmp_path / "again").state_dict().items())


def test_a_large_model_that_is_saved_small_takes_a_quarter(tmp_path):
    model = VMD(dataclasses.replace(tiny_config(), width=128, heads=2))
    sizes = []
    for small in (False, True):
        model.save_pretrained(tmp_path, small=small)
        sizes.append((tmp_path / "model.safetensors").stat().st_size)
    assert sizes[1] < 0.35 * sizes[0]


def test_rows_of_zeros_are_saved_small(tmp_path):
    model = tiny_model()
    zeros = {name: torch.zeros_like(w) for name, w in model.state_dict().items()}
    model.save_pretrained(tmp_path, zeros, small=True)
    assert all((w == 0).all() for w in VMD.from_pretrained(tmp_path).state_dict().values())


def test_what_cannot_be_saved_small_leaves_nothing(tmp_path):
    model = tiny_model()
    broken = {name: w * torch.nan for name, w in model.state_dict().items()}
    with pytest.raises(InvalidInput, match="eight bits") as error:
        model.save_pretrained(tmp_path, broken, small=True)
    assert one_line(error)
    assert not os.listdir(tmp_path)


FAULTS = ["no scale", "wrong scale", "whole scale", "endless scale", "scale of a scale", "no matrix", "matrix of numbers"]


@pytest.mark.parametrize("fault", FAULTS)
def test_small_weights_that_do_not_fit_are_refused(tmp_path, fault):
    tiny_model().save_pretrained(tmp_path, small=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    scale = next(name for name in tensors if name.endswith(":scale"))
    matrix, rows = scale.removesuffix(":scale"), tensors[scale]
    if fault.startswith("no "):
        del tensors[scale if fault == "no scale" else matrix]
    elif fault == "scale of a scale":
        tensors[scale + ":scale"] = torch.ones(len(rows), 1)
    elif fault == "matrix of numbers":
        tensors[matrix] = tensors[matrix].float()
    else:
        tensors[scale] = {"wrong": rows[:-1].contiguous(), "whole": rows.long(), "endless": rows * torch.inf}[
            fault.split()[0]
        ]
    save_file(tensors, path)
    with pytest.raises(InvalidInput, match=r"model\.safetensors: .*expected|not weights") as error:
        VMD.from_pretrained(tmp_path)
    assert one_line(error)


def test_symbols_survive_saving(tmp_path):
    model = VMD(tiny_config(symbols=("a", "b", "c", ",", "[")))
    model.save_pretrained(tmp_path)
    assert VMD.from_pretrained(tmp_path).config.symbols == ("a", "b", "c", ",", "[")


def test_saving_leaves_two_files_and_no_rest(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="nowhere") as error:
        VMD.from_pretrained(tmp_path / "nowhere")
    assert one_line(error)


@pytest.fixture
def saved(tmp_path):
    tiny_model(4, 2, z=latent()).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_refused(saved, name):
    (saved / name).unlink()
    with pytest.raises(InvalidInput, match=name) as error:
        VMD.from_pretrained(saved)
    assert one_line(error)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights_are_refused(saved, keep):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InvalidInput, match=r"model\.safetensors") as error:
        VMD.from_pretrained(saved)
    assert one_line(error)


@pytest.mark.parametrize("content", [b"not tensors at all, but long enough to read", b"\x80\x04\x95pickle", b"{}" * 40])
def test_foreign_weights_are_refused(saved, content):
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"model\.safetensors") as error:
        VMD.from_pretrained(saved)
    assert one_line(error)


@pytest.mark.parametrize("change", ["missing", "foreign", "shape"])
def test_weights_of_another_model_are_refused(saved, change):
    path = saved / "model.safetensors"
    tensors = load_file(path)
    if change == "missing":
        del tensors["decoder.head.bias"]
    elif change == "foreign":
        tensors["decoder.tail.bias"] = torch.zeros(2)
    else:
        tensors["decoder.head.bias"] = torch.zeros(2)
    save_file(tensors, path)
    with pytest.raises(InvalidInput, match=r"decoder\.(head|tail)\.bias") as error:
        VMD.from_pretrained(saved)
    assert one_line(error)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "JSON"),
        ("[1]", "vmd"),
        ('{"format": "other"}', "vmd"),
        ('{"format": "vmd"}', "object"),
        ('{"format": "vmd", "model": 3}', "object"),
    ],
)
def test_a_config_that_is_no_vmd_config_is_refused(saved, content, says):
    (saved / "config.json").write_text(content)
    with pytest.raises(InvalidInput, match=says) as error:
        VMD.from_pretrained(saved)
    assert one_line(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("novelty", 1),
        ("width", "wide"),
        ("width", 15),
        ("block_size", 3),
        ("vocab_size", 0),
        ("latent", {"kind": "discrete"}),
    ],
)
def test_a_config_with_a_wrong_field_is_refused_by_name(saved, field, value):
    path = saved / "config.json"
    described = json.loads(path.read_text())
    described["model"][field] = value
    path.write_text(json.dumps(described))
    with pytest.raises(InvalidInput, match=field) as error:
        VMD.from_pretrained(saved)
    assert one_line(error)


def test_a_config_of_another_width_is_refused(saved):
    path = saved / "config.json"
    described = json.loads(path.read_text())
    described["model"]["width"] = 32
    path.write_text(json.dumps(described))
    with pytest.raises(InvalidInput, match="shape"):
        VMD.from_pretrained(saved)


def test_a_failed_save_leaves_the_previous_files_intact(saved, monkeypatch):
    before = {name: (saved / name).read_bytes() for name in os.listdir(saved)}

    def disk_full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(InvalidInput, match="No space left"):
        tiny_model(4, 2, z=latent(), seed=9).save_pretrained(saved)
    assert {name: (saved / name).read_bytes() for name in os.listdir(saved)} == before


def test_saving_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="file"):
        tiny_model().save_pretrained(tmp_path / "file")


@pytest.mark.parametrize("r", [1, 2, 4])
@pytest.mark.parametrize("z_config", LATENTS[1:], ids=["single", "doubled-clean"])
def test_the_backbone_has_equal_size_with_and_without_a_latent(r, z_config):
    plain, with_z = tiny_model(4, r), tiny_model(4, r, z=z_config)
    assert with_z.parameter_counts()["backbone"] == plain.parameter_counts()["backbone"]
    assert plain.parameter_counts()["pathway"] == plain.parameter_counts()["encoder"] == 0
    assert min(with_z.parameter_counts()[part] for part in ("backbone", "pathway", "encoder")) > 0
    for model in (plain, with_z):
        assert sum(model.parameter_counts().values()) == sum(p.numel() for p in model.parameters())


def test_the_encoder_is_counted_as_encoder():
    model = tiny_model(z=latent())
    assert model.parameter_counts()["encoder"] == sum(p.numel() for p in model.encoder.parameters())


def test_a_block_size_of_zero_means_one_block():
    assert VMD(tiny_config(4, 0)).config.block_size == 4


@pytest.mark.parametrize("bad", [ModelConfig(), ModelConfig(vocab_size=4), ModelConfig(length=4)])
def test_a_model_needs_a_length_and_a_vocabulary(bad):
    with pytest.raises(InvalidInput, match="at least 1"):
        VMD(bad)


@torch.no_grad()
def cached_and_uncached_logits(model: VMD, rows: int = 3):
    """Logits of every block, first all masked and then half revealed, from both predictors."""
    length, r = model.config.length, model.config.block_size
    x0, z = random_tokens(rows, length), random_latents(model, rows)
    predictors = model.predictor(rows, cached=True), model.predictor(rows, cached=False)
    assert type(predictors[0]) is not type(predictors[1])
    for block in range(model.config.blocks):
        canvas = x0.clone()
        for start in (block * r, block * r + (r + 1) // 2):
            canvas[:, start:] = model.mask_id
            canvas[:, block * r : start] = x0[:, block * r : start]
            yield tuple(p.predict(canvas, block, z) for p in predictors)
        canvas[:, : (block + 1) * r] = x0[:, : (block + 1) * r]
        for predictor in predictors:
            predictor.commit(canvas, block, z)


@pytest.mark.parametrize(("length", "r"), [(4, 1), (4, 2), (6, 2), (12, 3)])
@pytest.mark.parametrize(
    "z_config", [NO_LATENT, latent(), latent(on_clean=True), latent("doubled")], ids=["none", "single", "clean", "doubled"]
)
def test_cached_logits_equal_uncached_logits(length, r, z_config):
    model = tiny_model(length, r, z=z_config)
    pairs = list(cached_and_uncached_logits(model))
    assert len(pairs) == 2 * length // r
    for cached, uncached in pairs:
        assert cached.shape == (3, r, 5)
        torch.testing.assert_close(cached, uncached, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", ["argmax", "sample"])
@pytest.mark.parametrize(
    ("z_config", "z"),
    [
        (NO_LATENT, "once"),
        (latent(), "once"),
        (latent(), "fresh"),
        (latent(on_clean=True), "once"),
        (latent("doubled"), "once"),
    ],
    ids=["none", "single-once", "single-fresh", "clean-once", "doubled-once"],
)
def test_cached_samples_equal_uncached_samples(z_config, z, rule):
    model = tiny_model(6, 2, z=z_config)
    prompt = gaps(20, 6)
    prompt[::2, 3] = 1
    cached, uncached = (
        model.sample(prompt=prompt, steps=2, rule=rule, z=z, cache=cache, generator=torch.Generator().manual_seed(0))
        for cache in (True, False)
    )
    assert torch.equal(cached.tokens, uncached.tokens)
    assert cached.nfe == uncached.nfe == 6
    assert cached.cache_passes == uncached.cache_passes == 0  # finished blocks go along with the next block's first step


def test_one_block_has_no_cache_to_fill():
    assert tiny_model(4, 4).sample(2, steps=2).cache_passes == 0


def test_uncached_logits_of_a_canvas_are_the_training_pass():
    """The sampler and the objective ask the same network the same question."""
    model = tiny_model(6, 2, z=latent(on_clean=True))
    x0, z = random_tokens(3, 6), random_latents(model, 3)
    mask = torch.tensor([False, True]).repeat(3).expand(3, -1)
    xt = apply_mask(x0, mask, model.mask_id)
    with torch.no_grad():
        training = model.denoise(xt, x0, z)
        for block in range(3):
            canvas = torch.cat([x0[:, : 2 * block], xt[:, 2 * block :]], dim=1)
            sampling = model.predictor(3, cached=False).predict(canvas, block, z)
            torch.testing.assert_close(sampling, training[:, 2 * block : 2 * block + 2], atol=1e-5, rtol=1e-5)


def test_sampling_from_the_model_leaves_no_graph_and_no_change():
    model = tiny_model(4, 2, z=latent())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    samples = model.sample(3, steps=2, trace=True)
    assert not samples.trace[0].confidence.requires_grad
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
def test_sampling_restores_the_training_mode_even_when_refused(training):
    model = tiny_model().train(training)
    model.sample(2)
    assert model.training == training
    with pytest.raises(InvalidInput):
        model.sample(2, steps=0)
    assert model.training == training


@pytest.mark.parametrize("n", [0, -1, None])
def test_a_number_of_samples_below_one_is_refused(n):
    with pytest.raises(InvalidInput, match="at least 1"):
        tiny_model().sample(n)


def test_n_must_be_the_rows_of_the_prompt():
    with pytest.raises(InvalidInput, match="n=3"):
        tiny_model().sample(3, prompt=gaps(2, 4))


def test_an_empty_prompt_gives_no_samples_or_is_refused():
    with contextlib.suppress(InvalidInput):
        assert tiny_model().sample(prompt=gaps(0, 4)).tokens.shape == (0, 4)


def test_the_number_of_seeds_must_be_the_number_of_rows():
    with pytest.raises(InvalidInput, match="2 seeds"):
        tiny_model().sample(3, seeds=[1, 2])


def test_a_model_that_comes_with_the_library_is_known_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("vmd.model.SHIPPED", tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    ours, own = tiny_model(4, 2, seed=1), tiny_model(4, 2, seed=2)
    halves = {name: w.bfloat16() for name, w in ours.state_dict().items()}
    ours.save_pretrained(tmp_path / "weights" / "toy", halves)
    found = VMD.from_pretrained("toy")
    assert all(torch.equal(w, halves[name].float()) for name, w in found.state_dict().items())
    with pytest.raises(InvalidInput, match=r"ty: expected a model folder .*, or one that comes with vmd: toy"):
        VMD.from_pretrained("ty")
    (tmp_path / "toy").mkdir()  # a folder without a model is none
    VMD.from_pretrained("toy")
    own.save_pretrained("toy")  # a model in a folder of that name comes first
    assert torch.equal(some_logits(VMD.from_pretrained("toy")), some_logits(own))


def test_a_command_takes_a_model_that_comes_with_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr("vmd.model.SHIPPED", tmp_path / "weights")
    tiny_model(4, 2).save_pretrained(tmp_path / "weights" / "toy")
    assert len(vmd("sample", "toy", "--n", 3, "--device", "cpu").out.splitlines()) == 3
    assert vmd("sample", "toys", "--device", "cpu").code == 2


@pytest.mark.parametrize("name", ["", "a" * 300, "__pycache__"])
def test_names_that_are_no_models_are_one_line(name, tmp_path, monkeypatch):
    monkeypatch.setattr("vmd.model.SHIPPED", tmp_path)
    (tmp_path / "__pycache__").mkdir()
    with pytest.raises(InvalidInput, match="expected a model folder with") as error:
        VMD.from_pretrained(name)
    assert one_line(error)
