"""Gaps are filled in sight of the text on both sides, by a model that writes from left to right."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vmd
from vmd.config import InvalidInput, LatentConfig, ModelConfig
from vmd.infilling import stages
from vmd.likelihood import nll_bound
from vmd.model import VMD

LATENTS = {
    "none": LatentConfig("none"),
    "codes": LatentConfig("categorical", codes=4),
    "codes by place": LatentConfig("categorical", codes=4, by_place=True),
    "chain": LatentConfig("chain", codes=3),
    "gaussian": LatentConfig("gaussian", dim=2, encoder_layers=1, encoder_stream="doubled"),
    "learned prior": LatentConfig("gaussian", dim=2, encoder_layers=1, prior="learned"),
}


def model_of(kind: str, length: int = 8, block: int = 2, vocabulary: int = 3) -> VMD:
    latent = LATENTS.get(kind, LatentConfig("none"))
    draft = 8 if kind == "draft" else 0
    size = {"vocab_size": vocabulary, "length": length, "block_size": block, "layers": 2, "width": 16, "heads": 2}
    model = VMD(ModelConfig(**size, latent=latent, draft=draft)).eval()
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # so that all that can matter does
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=chance))
    return model


@pytest.mark.parametrize("length", [2, 4, 6])
@pytest.mark.parametrize("kind", [*LATENTS, "draft"])
def test_a_shortened_model_is_the_same_on_what_is_left(kind, length):
    length += 8 * (kind == "draft")  # which sees eight tokens back
    model = model_of(kind, 8 if kind != "draft" else 16)
    x = torch.randint(3, (16, model.config.length), generator=torch.Generator().manual_seed(1))
    after = torch.arange(model.config.length) >= length
    short = model.shortened(length)
    if kind in ("gaussian", "learned prior"):  # whose z is drawn for all blocks: the same noise in other places
        z = torch.randn(16, 4, 2, generator=torch.Generator().manual_seed(2))
        mask = torch.full_like(x, 3)
        torch.testing.assert_close(
            short.denoise(mask[:, :length], x[:, :length], z[:, : length // 2]), model.denoise(mask, x, z)[:, :length]
        )
        return
    torch.testing.assert_close(nll_bound(short, x[:, :length], 1), nll_bound(model, x, 1, fixed=after), atol=1e-5, rtol=1e-5)
    assert short.decoder.head.weight.data_ptr() == model.decoder.head.weight.data_ptr()  # no copy


def test_only_whole_blocks_of_a_model_that_has_several_can_be_left_out():
    bad = ((model_of("none"), (0, 3, 10)), (model_of("none", 8, 8), (4,)), (model_of("draft"), (6,)))
    for model, lengths in bad:
        for length in lengths:
            with pytest.raises(InvalidInput, match=f"length {length}: expected"):
                model.shortened(length)


def exact_law(model: VMD, text: list[int]) -> torch.Tensor:
    """p(gaps | all that is given), by enumeration, for one step per block."""
    gaps = [i for i, token in enumerate(text) if token < 0]
    every = torch.tensor([text] * model.config.vocab_size ** len(gaps))
    every[:, gaps] = torch.tensor(list(itertools.product(range(model.config.vocab_size), repeat=len(gaps))))
    return (-nll_bound(model, every, 1)).softmax(0)


def drawn_law(model: VMD, text: list[int], n: int, tries: int) -> torch.Tensor:
    gaps = [i for i, token in enumerate(text) if token < 0]
    drawn = vmd.infill(model, torch.tensor(text), n, tries=tries, seeds=list(range(n))).tokens
    assert all((drawn[:, i] == token).all() for i, token in enumerate(text) if token >= 0)
    number = sum(drawn[:, i] * model.config.vocab_size**place for place, i in enumerate(reversed(gaps)))
    return torch.bincount(number, minlength=model.config.vocab_size ** len(gaps)).double() / n


@pytest.mark.parametrize("text", [[-1, 1, 2, 2, 1, 0], [1, -1, -1, 0, 2, 2], [-1, -1, 0, 1, 2, 2]])
@pytest.mark.parametrize("kind", ["none", "codes by place", "draft"])
def test_with_many_candidates_gaps_follow_the_law_given_both_sides(kind, text):
    model = model_of(kind, 6)
    exact, n = exact_law(model, text), 1_500
    apart = {tries: float((drawn_law(model, text, n, tries) - exact).abs().sum() / 2) for tries in (1, 32)}
    assert apart[1] > 0.12  # the text after the gap matters here
    assert apart[32] < 0.06


def test_rows_depend_on_their_seeds_alone_and_texts_may_be_short():
    model, text = model_of("codes by place"), torch.tensor([0, -1, 1, -1, 2])
    both = vmd.infill(model, text, 3, tries=4, seeds=[5, 6, 7], steps=2).tokens
    assert both.shape == (3, 5)
    assert torch.equal(vmd.infill(model, text, 1, tries=4, seeds=[6], steps=2).tokens, both[1:2])


def test_the_steps_shown_are_those_of_the_text_that_came_out():
    model, text, seen = model_of("codes by place"), torch.tensor([0, -1, 1, 2, -1, -1, 2, 0]), []
    made = vmd.infill(model, text, 1, tries=8, seeds=[3], trace=True, on_step=seen.append)
    assert [s.block for s in seen] == [s.block for s in made.trace] == [0, 2]
    for step in seen:
        shown = step.canvas[0]
        written = step.revealed[0]
        assert torch.equal(shown[written], made.tokens[0, : len(shown)][written])


def test_a_model_that_sees_everything_makes_one_candidate():
    model, text = model_of("none", 8, 8), torch.tensor([0, -1, 1])
    seeds = [1, 2]
    assert torch.equal(
        vmd.infill(model, text, 2, tries=9, seeds=seeds).tokens, vmd.infill(model, text, 2, tries=1, seeds=seeds).tokens
    )


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_stages_are_whole_blocks_that_part_gaps(gap, block_size):
    ends = stages(gap, block_size)
    assert ends == sorted(set(ends))
    assert ends[-1] == -(-len(gap) // block_size) * block_size
    assert all(end % block_size == 0 for end in ends)
    for end in ends[:-1]:  # a block of text before, a gap after
        assert not any(gap[end - block_size : end])
        assert any(gap[end : end + block_size])
        assert any(gap[:end])


def test_bad_texts_are_refused():
    model, text = model_of("none"), torch.tensor([0, -1, 1])
    for bad, more, named in (
        (text.unsqueeze(0), {}, "shape"),
        (torch.full((9,), -1), {}, "9 tokens"),
        (torch.tensor([0, -1, 3]), {}, "token id 3"),
        (text.double(), {}, "integers"),
        (text, {"tries": 0}, "tries=0"),
        (text, {"n": 0}, "n=0"),
        (text, {"n": 2, "seeds": [1]}, "1 seeds"),
    ):
        with pytest.raises(InvalidInput, match=named):
            vmd.infill(model, bad, **more)
