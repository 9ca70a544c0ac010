"""Text in several windows."""

import pytest
import torch

import vmd
from command import refused, succeeds
from helpers import CODES, NO_LATENT, strong_model
from vmd.config import InvalidInput
from vmd.data.tokenizers import CharTokenizer
from vmd.model import VMD
from vmd.writing import fresh_seeds

V = 3
kinds = pytest.mark.parametrize("z_config", [NO_LATENT, *CODES.values()], ids=["none", *CODES])
shapes = pytest.mark.parametrize(("length", "r"), [(8, 2), (12, 4), (4, 4), (6, 1), (3, 1), (2, 2)])


@kinds
@shapes
@pytest.mark.parametrize("begun", [0, 1, 5, 30])
def test_windows_see_the_end_of_what_stands_before(z_config, length, r, begun):
    """Window by window as one would write them by hand, from a prompt of any length."""
    model = strong_model(length, r, V, z_config)
    prompt = torch.randint(V, (begun,), generator=torch.Generator().manual_seed(0))
    found = vmd.write(model, prompt, 3, length=begun + 2 * length + 1, seeds=[5, 6, 7]).tokens
    assert found.shape == (3, begun + 2 * length + 1)
    assert (found[:, :begun] == prompt).all()
    have, window = begun, 0
    while have < found.shape[1]:
        seen = have if have <= length - max(1, length // 4) else length // 2
        canvas = torch.full((3, length), -1)
        canvas[:, :seen] = found[:, have - seen : have]
        seeds = fresh_seeds([5, 6, 7], window) if window else [5, 6, 7]
        new = model.sample(prompt=canvas, seeds=seeds).tokens[:, seen:]
        ends = min(found.shape[1], have + new.shape[1])
        assert torch.equal(found[:, have:ends], new[:, : ends - have])
        have, window = ends, window + 1
    assert window >= 2


@kinds
@shapes
def test_what_fits_one_window_is_written_in_one(z_config, length, r):
    """Nothing of the prompt is forgotten."""
    model = strong_model(length, r, V, z_config)
    for begun in range(length):
        prompt = torch.randint(V, (begun,), generator=torch.Generator().manual_seed(begun))
        canvas = torch.cat([prompt, torch.full((length - begun,), -1)]).repeat(2, 1)
        whole = model.sample(prompt=canvas, seeds=[5, 6])
        found = vmd.write(model, prompt, 2, length=length, seeds=[5, 6])
        assert torch.equal(found.tokens, whole.tokens)
        assert (found.nfe, found.cache_passes) == (whole.nfe, whole.cache_passes)


def test_chance_may_come_from_a_generator():
    model = strong_model(8, 2, V, CODES["by place"])
    prompt = torch.tensor([0, 1])
    drawn = [
        vmd.write(model, prompt, 4, length=40, generator=torch.Generator().manual_seed(seed)).tokens for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_text_is_the_tokens_that_it_is_for_the_model():
    model = strong_model(8, 2, V, NO_LATENT)
    model.tokenizer = CharTokenizer("abc")
    found = vmd.write(model, "cab", 2, length=20, seeds=[1, 2]).tokens
    assert torch.equal(found, vmd.write(model, torch.tensor([2, 0, 1]), 2, length=20, seeds=[1, 2]).tokens)
    assert found[:, :3].tolist() == [[2, 0, 1]] * 2


def test_progress_is_of_what_is_new_and_cache_passes_of_all_windows():
    model, told = strong_model(8, 2, V, NO_LATENT), []
    found = vmd.write(model, torch.tensor([0, 1]), length=20, on_progress=lambda *now: told.append(now))
    done = [new for new, _ in told]
    assert {total for _, total in told} == {18}
    assert done == sorted(done)
    assert done[-1] == 18
    assert len(set(done)) > 4  # within windows, too
    canvas = torch.tensor([[0, 1, *[-1] * 6]])
    assert found.cache_passes > model.sample(prompt=canvas).cache_passes  # there are several windows


@shapes
def test_a_row_depends_on_its_seed_alone(length, r):
    model = strong_model(length, r, V, NO_LATENT)
    prompt = torch.tensor([0, 1])
    together = vmd.write(model, prompt, 3, length=40, seeds=[5, 6, 7]).tokens
    alone = [vmd.write(model, prompt, length=40, seeds=[seed]).tokens[0] for seed in (5, 6, 7)]
    assert torch.equal(together, torch.stack(alone))
    assert len({tuple(row.tolist()) for row in together}) == 3


@pytest.mark.parametrize("n", [3, 7])
def test_windows_of_a_size_share_a_desk(n, monkeypatch):
    """Where steps are recorded, which is on a GPU; here they are not, but the desk is the same."""
    model, desks, desk = strong_model(8, 2, V, CODES["by place"]), [], VMD.desk
    options = {"length": 29, "seeds": range(n), "batch_size": 3}
    plain = vmd.write(model, torch.tensor([0, 1]), n, **options)
    monkeypatch.setattr(VMD, "records", lambda *_, **more: True)
    monkeypatch.setattr(VMD, "desk", lambda model, rows, **more: desks.append(desk(model, rows)) or desks[-1])
    shared = vmd.write(model, torch.tensor([0, 1]), n, **options)
    assert [(found.rows, found.model.config.length) for found in desks] == [(3, 8), (3, 6)]
    assert torch.equal(shared.tokens, plain.tokens)


def test_windows_have_chances_of_their_own():
    """With the same seed a window that sees the same would be the same for ever."""
    model = strong_model(4, 2, V, NO_LATENT)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # every token is as likely as the others, whatever stands before
    rows = vmd.write(model, torch.tensor([], dtype=torch.long), 200, length=20, seeds=range(200)).tokens
    assert torch.bincount(rows.flatten(), minlength=V).min() > 1_200
    windows = rows[:, 4:].unflatten(1, (8, 2))
    same = (windows[:, 1:] == windows[:, :-1]).all(-1).double().mean()
    assert 0.05 < same < 0.18  # 1/9 by chance


def test_evaluations_are_those_of_all_windows():
    model = strong_model(8, 2, V, NO_LATENT)
    assert vmd.write(model, torch.zeros(0).long(), length=8).nfe == 4
    assert vmd.write(model, torch.zeros(0).long(), length=16).nfe == 4 + 2 + 2
    assert vmd.write(model, torch.zeros(4).long(), length=4).nfe == 0


REFUSED = (
    ({"prompt": torch.tensor([0, -1])}, "and no gaps"),
    ({"prompt": torch.tensor([0, V])}, "tokens from 0 to 2"),
    ({"prompt": torch.tensor([[0]])}, "a tensor of integers of shape"),
    ({"prompt": torch.tensor([0.5])}, "a tensor of integers of shape"),
    ({"prompt": torch.tensor([True])}, "a tensor of integers of shape"),
    ({"prompt": torch.tensor([1j])}, "a tensor of integers of shape"),
    ({"prompt": "abc"}, "no model of text"),
    ({"prompt": None}, "a text, or a tensor"),
    ({"length": 1}, "length=1: expected at least 2"),
    ({"length": 2.5}, "length=2.5: expected a whole number"),
    ({"n": 0}, "n=0: expected"),
    ({"trace": True}, "trace: expected no such option"),
    ({"seeds": [1, 2]}, "2 seeds: expected one for each of 1"),
)


@pytest.mark.parametrize(("changed", "told"), REFUSED)
def test_what_makes_no_text_is_refused(changed, told):
    model = strong_model(8, 2, V, NO_LATENT)
    with pytest.raises(InvalidInput, match=told):
        vmd.write(model, **({"prompt": torch.tensor([0, 1]), "length": 20} | changed))


def test_the_command_writes_texts_longer_than_the_model_and_goes_on_from_long_ones(tmp_path):
    long = "the history of " * 30
    written = succeeds("sample", "text", "-n", 2, "--length", 500, "--prompt", long).out.splitlines()
    assert [len(line) for line in written] == [500, 500]
    assert all(line.startswith(long) for line in written)
    assert written[0] != written[1]
    told = refused("sample", "text", "--prompt", long, folder=tmp_path)
    assert "450 tokens: expected at most 256, the model's length: --length writes more" in told
    for words in (("--infill", "a _ b"), ("--watch",), ("--trace",)):
        assert "--length 300: expected with a model of text" in refused(
            "sample", "text", "--length", 300, *words, folder=tmp_path
        )
    assert "--length 300: expected with a model of text" in refused("sample", "sudoku", "--length", 300, folder=tmp_path)
