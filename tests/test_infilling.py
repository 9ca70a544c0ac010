"""Gaps are filled in sight of the text on both sides, by a model that writes from left to right."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vmd
from vmd.config import InvalidInput, LatentConfig, ModelConfig
from vmd.data.tokenizers import CharTokenizer
from vmd.infilling import Stage, between_gaps, fit, gaps_of, stages
from vmd.likelihood import nll_bound
from vmd.model import VMD
from vmd.network import Block

LATENTS = {
    "none": LatentConfig("none"),
    "codes": LatentConfig("categorical", codes=4),
    "codes by place": LatentConfig("categorical", codes=4, by_place=True),
    "chain": LatentConfig("chain", codes=3),
    "codes in a layer": LatentConfig("categorical", codes=4, code_layers=1),
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
            parameter.add_((0.25 if draft else 0.4) * torch.randn(parameter.shape, generator=chance))
    return model


@pytest.mark.parametrize("length", [2, 4, 6])
@pytest.mark.parametrize("kind", [*LATENTS, "draft"])
def test_a_shortened_model_is_the_same_on_what_is_left(kind, length):
    length += 8 * (kind == "draft")  # which sees eight tokens back
    model = model_of(kind, 8 if kind != "draft" else 16)
    x = torch.randint(3, (16, model.config.length), generator=torch.Generator().manual_seed(1))
    after = torch.arange(model.config.length) >= length
    short = model.shortened(length)
    if kind in ("gaussian", "learned prior"):  # whose z is drawn for all blocks: the same noise would come to other places
        z = torch.randn(16, 4, 2, generator=torch.Generator().manual_seed(2))
        mask, masked = torch.full_like(x, 3), torch.ones_like(x, dtype=torch.bool)
        some = (x[:, :length], z[:, : length // 2])
        torch.testing.assert_close(short.denoise(mask[:, :length], *some), model.denoise(mask, x, z)[:, :length])
        for ours, theirs in (
            (short.encode(x[:, :length], masked[:, :length]), model.encode(x, masked)),
            (short.prior(mask[:, :length], x[:, :length]), model.prior(mask, x)),
        ):
            for part, whole in zip(ours, theirs, strict=True):
                torch.testing.assert_close(part, whole[:, : length // 2])
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


TEXTS = {
    "mixed block first": [-1, 1, 2, 2, 1, 0],
    "two mixed blocks": [1, -1, -1, 0, 2, 2],
    "a block alone": [-1, -1, 0, 1, 2, 2],
    "two gaps": [-1, 1, 0, 2, -1, 2, 2, 1],
    "a block and a gap": [-1, -1, 0, 2, 2, -1, 2, 1],
}


def test_a_text_that_ends_inside_a_block_follows_its_own_law():
    """Of all that may stand in the rest of the block, summed over: nothing is known of it, and nothing is scored."""
    model, text = model_of("codes by place", 6), [0, 1, -1, 2, -1]
    rest = exact_law(model, [*text, -1]).view(-1, 3).sum(1)
    assert float((drawn_law(model, text, 2_000, 64) - rest).abs().sum() / 2) < 0.055
    rows, gap = torch.tensor([[0, 1, 2, 2, 1, rest] for rest in range(3)]), torch.tensor([*text, 0]) < 0
    weights = fit(model, rows, gap, 5, Stage(2, 6, 6), 1)  # whatever stands there by chance
    torch.testing.assert_close(weights, weights[:1].expand(3), atol=1e-6, rtol=0)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("kind", ["none", "codes by place", "draft"])
def test_with_many_candidates_gaps_follow_the_law_given_both_sides(kind, text):
    model = model_of(kind, len(text))
    exact, n = exact_law(model, text), 1_000
    apart = {tries: float((drawn_law(model, text, n, tries) - exact).abs().sum() / 2) for tries in (1, 32)}
    assert apart[1] > 0.12  # the text after the gaps matters here
    assert apart[32] < 0.1  # more than half of it by chance


def test_gaps_of_a_chain_follow_the_law_given_both_sides():
    model, text = model_of("chain", 6), TEXTS["two mixed blocks"]
    assert (drawn_law(model, text, 1_500, 64) - exact_law(model, text)).abs().sum() / 2 < 0.08


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", ["none", "codes by place", "chain", "draft"])
def test_candidates_that_are_alike_weigh_the_same(kind, steps):
    """There is no chance in the weights, and text before the gaps or beyond the stage has no part in them."""
    model = model_of(kind, 16)
    gap = torch.zeros(16, dtype=torch.bool)
    gap[9:11] = True
    rows = torch.randint(3, (16,), generator=torch.Generator().manual_seed(3)).repeat(20, 1)
    rows[:, 14:] = torch.randint(3, (20, 2), generator=torch.Generator().manual_seed(4))
    weights = fit(model, rows, gap, 16, Stage(8, 12, 14), steps)
    torch.testing.assert_close(weights, weights[:1].expand(20), atol=1e-5, rtol=0)


@pytest.mark.parametrize("first", [0, 8])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", ["none", "codes by place", "chain", "draft"])
def test_blocks_behind_a_cache_weigh_what_they_weigh_with_all_before_them(kind, steps, first):
    model, chance = model_of(kind, 20), torch.Generator().manual_seed(3)
    rows = torch.randint(3, (30, 20), generator=chance)
    rows[:, :first] = rows[torch.arange(30) // 10, :first]  # three beginnings
    rows[5:10] = rows[4]  # and some that are alike altogether
    gap = torch.zeros(20, dtype=torch.bool)
    gap[first + 1 : first + 5] = True
    reader = model.predictor(30)
    stage = Stage(first, first + 6, first + 10)
    with torch.no_grad():
        if first:
            reader.read(rows, 0, first // 2, None, None)
        cached, anew = (fit(model, rows, gap, 19, stage, steps, cache) for cache in (reader.cache, None))
        alone = torch.cat([fit(model, row.unsqueeze(0), gap, 19, stage, steps) for row in rows[::7]])
    torch.testing.assert_close(anew[::7], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cached, anew, atol=1e-5, rtol=1e-5)
    assert float(anew.std()) > 0.1  # it matters which


@pytest.mark.parametrize("kind", ["none", "codes by place", "codes in a layer", "chain", "draft"])
def test_many_gaps_are_filled_with_a_cache_as_without(kind):
    model = model_of(kind, 32)
    text = torch.randint(3, (31,), generator=torch.Generator().manual_seed(5))
    text[[1, 2, 8, 9, 15, 20, 21, 22, 28]] = -1
    with_it, without = (
        vmd.infill(model, text, 5, tries=8, seeds=list(range(5)), cache=cache, steps=2, trace=True)
        for cache in (True, False)
    )
    assert torch.equal(with_it.tokens, without.tokens)
    assert with_it.nfe == without.nfe
    for ours, theirs in zip(with_it.trace, without.trace, strict=True):
        assert torch.equal(ours.canvas, theirs.canvas)
        assert torch.equal(ours.revealed, theirs.revealed)


def test_text_is_read_once_for_all_candidates_that_share_it(monkeypatch):
    made: list[int] = []  # tokens of every pass
    usual = Block.forward

    def counted(block, h, turn, visible, condition, cache, layer, *rest):
        made.extend([h.shape[0] * h.shape[1]] * (layer == 0))
        return usual(block, h, turn, visible, condition, cache, layer, *rest)

    monkeypatch.setattr(Block, "forward", counted)
    text = torch.zeros(64, dtype=torch.long)
    text[50] = -1
    vmd.infill(model_of("codes by place", 64), text, 4, tries=8, seeds=list(range(4)))
    assert made[:2] == [50, 32 * 2]  # the text before the block, and 32 times the block
    assert sum(made[2:]) <= 3 * 2 * (14 + 2)  # of three candidates all from there on, and the block again, both doubled


@torch.no_grad()
def test_of_tokens_written_in_turn_the_weight_is_of_the_whole_chain():
    """No latent, several steps: log p of each token given those before it, less what the gap was drawn with."""
    model, text = model_of("none", 6), torch.tensor([0, 2, 1, 0, 2, 1])
    gap = torch.tensor([False, False, True, False, False, False])

    def log_p(canvas: list[int], place: int) -> float:
        logits = model.denoise(torch.tensor([canvas]), text.unsqueeze(0))
        return float(logits[0, place].log_softmax(-1)[text[place]].detach())

    x, m = text.tolist(), 3
    whole = log_p([*x[:2], m, m, m, m], 2) + log_p([*x[:3], m, m, m], 3) + log_p([*x[:4], m, m], 4) + log_p([*x[:5], m], 5)
    drawn = log_p([*x[:2], m, *x[3:]], 2)
    assert float(fit(model, text.unsqueeze(0), gap, 6, Stage(2, 4, 6), 2)) == pytest.approx(whole - drawn, abs=1e-5)


def test_rows_depend_on_their_seeds_alone_and_texts_may_be_short():
    model, text = model_of("codes by place"), torch.tensor([0, -1, 1, -1, 2])
    both = vmd.infill(model, text, 3, tries=4, seeds=[5, 6, 7], steps=2).tokens
    assert both.shape == (3, 5)
    assert torch.equal(vmd.infill(model, text, 1, tries=4, seeds=[6], steps=2).tokens, both[1:2])
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    vmd.infill(model, text, 1, seeds=[6])
    assert torch.equal(torch.rand(1), expected)  # nobody else's chance


def test_gaps_far_apart_are_written_with_chance_of_their_own():
    model = model_of("none", 12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # every token as likely as any
    text = torch.tensor([-1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0])
    drawn = vmd.infill(model, text, 400, tries=4, seeds=list(range(400))).tokens
    for a, b in ((0, 4), (4, 8), (0, 8)):
        assert 0.2 < (drawn[:, a] == drawn[:, b]).double().mean() < 0.47  # a third
    assert all(0.2 < (drawn[:, place] == 0).double().mean() < 0.47 for place in (0, 1, 4, 5, 8, 9))


@pytest.mark.parametrize("steps", [1, 2])
def test_the_steps_shown_are_those_of_the_text_that_came_out(steps):
    model, text, seen = model_of("codes by place"), torch.tensor([0, -1, 1, 2, -1, -1, 2]), []
    made = vmd.infill(model, text, 3, tries=8, seeds=[3, 4, 5], steps=steps, trace=True, on_step=seen.append)
    assert len(seen) == len(made.trace)
    assert [s.block for s in seen] == [s.block for s in made.trace]
    assert {s.block for s in seen} == {0, 2}  # not the last one, which nothing was asked of
    written = torch.zeros(3, 7, dtype=torch.bool)
    for step in seen:
        width = min(7, step.canvas.shape[1])
        new = step.revealed[:, :width]
        assert torch.equal(step.canvas[:, :width][new], made.tokens[:, :width][new])
        written[:, :width] |= new
    assert torch.equal(written, (text < 0).expand(3, -1))


def test_candidates_are_made_only_where_something_tells_between_them():
    model = model_of("codes by place")
    for text, weighed in (([0, 1, -1, -1], 0), ([-1] * 5, 0), ([0, 1, 2], 0), ([-1, 1], 4), ([-1, -1, 0, 0, -1, -1], 4)):
        told = []
        vmd.infill(
            model, torch.tensor(text), 1, tries=4, seeds=[1], on_progress=lambda *counts, told=told: told.append(counts)
        )
        assert [done for done, total in told][-1:] == [weighed][: len(told)]
        assert bool(told) == bool(weighed)
        assert all(total == weighed for _, total in told)


@pytest.mark.parametrize("kind", ["one block", "gaussian", "learned prior"])
def test_models_that_cannot_weigh_write_once(kind):
    model, text = model_of(kind, 8, 8 if kind == "one block" else 2), torch.tensor([0, -1, 1])
    assert torch.equal(
        vmd.infill(model, text, 2, seeds=[1, 2]).tokens, vmd.infill(model, text, 2, tries=1, seeds=[1, 2]).tokens
    )
    with pytest.raises(InvalidInput, match="tries=9: expected 1"):
        vmd.infill(model, text, 2, tries=9)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_stages_hold_every_gap_once_and_end_in_text(gap, block_size):
    found = stages(gap, block_size)
    covered = [i for stage in found for i in range(stage.first, stage.last)]
    assert len(covered) == len(set(covered))
    assert {i for i, here in enumerate(gap) if here} <= set(covered)
    for stage, following in itertools.pairwise(found):
        assert stage.end <= following.first
        assert not any(gap[stage.last : stage.end])
    for stage in found:
        assert all(border % block_size == 0 for border in stage)
        assert stage.first < stage.last <= stage.end
        assert all(any(gap[i : i + block_size]) for i in range(stage.first, stage.last, block_size))
        assert stage.end > stage.last or stage.last >= len(gap)  # a gap is judged by text, if there is any


def test_only_text_soon_after_a_gap_judges_it():
    assert stages([True] + [False] * 199, 4) == [Stage(0, 4, 4 + 64)]


def test_a_model_with_a_prompt_fills_gaps_at_its_own_length():
    config = ModelConfig(vocab_size=3, length=8, block_size=2, layers=1, width=16, heads=2, prompt=2, latent=LATENTS["none"])
    drawn = vmd.infill(VMD(config), torch.tensor([0, 1, -1, 2, 0, -1]), 2, seeds=[1, 2]).tokens
    assert drawn.shape == (2, 6)
    assert (drawn[:, [0, 1, 3, 4]] == torch.tensor([0, 1, 2, 0])).all()


def test_bad_texts_are_refused():
    model, text = model_of("none"), torch.tensor([0, -1, 1])
    for bad, more, named in (
        (text.unsqueeze(0), {}, "shape"),
        ([0, -1], {}, "expected a tensor"),
        (torch.full((9,), -1), {}, "9 tokens"),
        (torch.tensor([0, -1, 3]), {}, "token id 3"),
        (text.double(), {}, "integers"),
        (text > 0, {}, "integers"),
        (text, {"tries": 0}, "tries=0"),
        (text, {"tries": 2.0}, "tries=2.0"),
        (text, {"n": 0}, "n=0"),
        (text, {"n": 2.0}, "n=2.0"),
        (text, {"n": 2, "seeds": [1]}, "1 seeds"),
        (text, {"seeds": [-1]}, "seeds"),
        (text, {"seeds": [2**63]}, "seeds"),
        (text, {"seeds": [1.5]}, "seeds"),
        (text, {"batch_size": 4}, "batch_size"),
        (text, {"steps": 3}, "steps=3"),
    ):
        with pytest.raises(InvalidInput, match=named):
            vmd.infill(model, bad, **more)


def test_an_underscore_with_a_backslash_is_no_gap():
    letters = CharTokenizer("abc_\\")
    for text, tokens in (("a_b", [0, -1, 1]), (r"a\_b_", [0, 3, 1, -1]), (r"\_", [3]), ("a\\b", [0, 4, 1])):
        assert gaps_of(text, letters).tolist() == tokens


@given(st.lists(st.text(st.sampled_from("ab_\\"), max_size=4), min_size=1, max_size=4))
def test_any_text_can_stand_between_gaps(parts):
    r"""A _ that is no gap is written \_, and of backslashes before a _ or a gap two for one."""

    def written(part: str, before_gap: bool) -> str:
        held = re.sub(r"(\\*)_", lambda mark: 2 * mark[1] + r"\_", part)
        return held + "\\" * (len(held) - len(held.rstrip("\\"))) * before_gap

    text = "_".join(written(part, number < len(parts) - 1) for number, part in enumerate(parts))
    assert between_gaps(text) == parts
