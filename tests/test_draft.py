"""Tokens of one step that are written in turn: what they see, their probabilities, and that samples have them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import all_sequences, chi_square_p, random_tokens, tiny_config
from vmd.config import InvalidInput, LatentConfig, ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig
from vmd.data.synthetic import law
from vmd.evaluation import evaluate_model, rows_per_pass
from vmd.likelihood import confidence_order_nll, enumerate_orders, exact_nll, nll_bound
from vmd.masking import apply_mask, draw_steps
from vmd.metrics import kl_to, one_step_probabilities, sequence_ids
from vmd.model import VMD
from vmd.solving import solve_puzzles
from vmd.training import train

V = 3
NO_Z = LatentConfig(kind="none")
shapes = pytest.mark.parametrize(("length", "r"), [(3, 3), (4, 2), (3, 1)])


def drafting(length: int, r: int, vocab: int = V, seed: int = 2) -> VMD:
    """A random model whose tokens depend strongly on each other."""
    model = VMD(replace(tiny_config(length, r, vocab, NO_Z), draft=16), seed=seed).eval()
    draft = model.decoder.draft
    assert draft is not None
    with torch.no_grad():
        for part, factor in ((draft.out, 2), (draft.last, 8)):
            part.weight.mul_(factor)
    return model


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(4, 4), (8, 4), (6, 3), (40, 20)]), st.integers(0, 2**31))
@torch.no_grad()
def test_a_token_sees_those_before_it_in_its_block_if_they_are_known_and_no_others(shape, seed):
    length, r = shape
    g = torch.Generator().manual_seed(seed)
    model, x0 = drafting(length, r), random_tokens(1, length, V, seed)
    masks = draw_steps(x0, r, (2,), generator=g)
    xt = apply_mask(x0, masks.mask, V)
    known = apply_mask(x0, masks.mask & ~masks.target, V)
    place = int(torch.randint(length, (), generator=g))
    other = known.clone()
    other[0, place] = (other[0, place] + 1) % V
    moved = (model.denoise(xt, x0, known) != model.denoise(xt, x0, other)).any(-1)[0]
    end = min((place // r + 1) * r, place + 1 + 16)  # of what it sees there is a limit
    assert not bool(moved[: place + 1].any())
    assert bool(moved[place + 1 : end].all())
    assert not bool(moved[end:].any())


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(4, 4), (8, 4), (6, 1), (40, 4), (36, 12), (40, 20)]), st.integers(0, 2**31))
def test_the_head_reads_the_last_tokens_before_a_place(shape, seed):
    """Of its own block as they are known, of earlier ones as they are; nothing before the text."""
    length, r = shape
    head = drafting(length, r).decoder.draft
    known, x0 = random_tokens(1, length, V + 1, seed)[0], random_tokens(1, length, V, seed + 1)[0]
    windows = head.windows(known, x0)
    assert windows.shape == (length, {4: 3, 8: 7, 6: 5, 36: 11, 40: 8 if r == 4 else 16}[length])
    for place in range(length):
        for back, token in enumerate(reversed(windows[place].tolist()), start=1):
            there = place - back
            source = known if there // r == place // r else x0
            assert token == (V + 1 if there < 0 else source[there])


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(4, 4), (8, 4), (6, 1), (40, 4)]), st.integers(0, 2**31))
@torch.no_grad()
def test_no_token_sees_the_truth_of_its_own_block_or_of_later_ones(shape, seed):
    length, r = shape
    g = torch.Generator().manual_seed(seed)
    model, x0 = drafting(length, r), random_tokens(1, length, V, seed)
    masks = draw_steps(x0, r, (min(2, r),), generator=g)
    xt, known = apply_mask(x0, masks.mask, V), apply_mask(x0, masks.mask & ~masks.target, V)
    place = int(torch.randint(length, (), generator=g))
    other = x0.clone()
    other[0, place] = (other[0, place] + 1) % V
    moved = (model.denoise(xt, x0, known) != model.denoise(xt, other, known)).any(-1)[0]
    end = (place // r + 1) * r
    assert not bool(moved[:end].any())
    assert bool(moved[end:].all())


@shapes
def test_probabilities_sum_to_one_at_every_number_of_steps(length, r):
    model, rows = drafting(length, r), all_sequences(length, V)
    for steps in range(1, r + 1):
        total = float((-exact_nll(enumerate_orders(model, rows, steps))).exp().sum())
        assert total == pytest.approx(1, abs=1e-5)
        for order in ("prob", "margin", "entropy"):
            nll = confidence_order_nll(model, rows, steps, order)
            assert float(nll.neg().exp().sum()) == pytest.approx(1, abs=1e-5)


@shapes
@pytest.mark.parametrize("order", ["random", "margin"])
def test_samples_have_the_probabilities_that_are_certified(length, r, order):
    model, rows = drafting(length, r), all_sequences(length, V)
    for steps in range(1, r + 1):
        if order == "random":
            expected = (-exact_nll(enumerate_orders(model, rows, steps))).exp()
        else:
            expected = confidence_order_nll(model, rows, steps, order).neg().exp()
        drawn = model.sample(20_000, steps=steps, order=order, generator=torch.Generator().manual_seed(steps))
        counts = torch.bincount(sequence_ids(drawn.tokens, V), minlength=len(rows))
        assert chi_square_p(counts, expected) > 1e-3
        assert drawn.nfe == steps * length // r


def test_in_one_step_tokens_depend_on_each_other():
    """The law of a pair is not the product of its tokens' laws."""
    p = one_step_probabilities(drafting(2, 2), all_sequences(2, V)).view(V, V)
    assert float((p - p.sum(1, keepdim=True) * p.sum(0)).abs().max()) > 0.05


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(("length", "r"), [(40, 2), (24, 1), (36, 12), (20, 20)])
@torch.no_grad()
def test_what_is_written_is_what_the_likelihood_holds_likeliest(length, r, cache):
    """Far from the beginning, too: the head of the sampler reads what that of the likelihood reads."""
    model = drafting(length, r, vocab=7)
    tokens = model.sample(6, steps=1, rule="argmax", cache=cache, generator=torch.Generator().manual_seed(0)).tokens
    prompt = torch.full((6, length), -1)
    prompt[:, ::5] = torch.arange(6).unsqueeze(1)
    given = model.sample(prompt=prompt, steps=1, rule="argmax", cache=cache).tokens
    for x0, masked in ((tokens, torch.ones_like(prompt) > 0), (given, prompt < 0)):
        likeliest = model.denoise(apply_mask(x0, masked, 7), x0, x0).argmax(-1)
        assert torch.equal(likeliest[masked], x0[masked])


@pytest.mark.parametrize("rule", ["sample", "argmax"])
@pytest.mark.parametrize("revise", [False, True])
def test_cached_samples_are_the_uncached_ones_and_keep_what_is_given(rule, revise):
    model = drafting(12, 4)
    prompt = torch.full((20, 12), -1)
    prompt[:, 5], prompt[::2, 8:12] = 1, 2
    options = {"prompt": prompt, "steps": 2, "rule": rule, "order": "prob", "revise": revise, "seeds": list(range(20))}
    cached, uncached = (model.sample(cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached.tokens, uncached.tokens)
    assert bool((cached.tokens == prompt)[prompt >= 0].all())
    assert int(cached.tokens.max()) < V


def test_revising_writes_in_sight_of_what_stays():
    """At the last step all is kept: no [MASK] is left, and nothing that is given has moved."""
    model = drafting(6, 6)
    drawn = model.sample(50, steps=3, order="margin", revise=True, generator=torch.Generator().manual_seed(0), trace=True)
    assert [int((step.canvas == V).sum(1).unique()) for step in drawn.trace] == [4, 2, 0]


def test_the_training_objective_of_steps_has_the_mean_of_the_bound():
    model, x0 = drafting(4, 4), random_tokens(1, 4, V)
    for steps in (1, 2, 4):
        many = x0.expand(20_000, -1)
        masks = draw_steps(many, 4, (steps,), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            trained = model(many, masks, None).total.double()
            bound = nll_bound(model, many, steps, generator=torch.Generator().manual_seed(1))
        error = float((trained.var() / len(many) + bound.var() / len(many)).sqrt()) + 1e-5
        assert abs(float(trained.mean() - bound.mean())) < 4 * error


def test_in_one_step_it_learns_what_blind_tokens_cannot():
    """D2 is two pairs: blind tokens lose what each says of its neighbour, log 10 nats a pair."""
    truth = law("d2")
    model = VMD(ModelConfig(10, 4, 4, layers=1, width=32, heads=2, draft=64, latent=NO_Z))
    training = TrainingConfig(steps=150, batch_size=64, learning_rate=6e-3, log_every=150)
    train(model, truth, RunConfig(model.config, ObjectiveConfig(masking="steps", steps=(1,)), training))
    assert kl_to(truth, one_step_probabilities(model, truth.sequences)) < 0.2


def test_its_objective_by_counts_is_called_a_surrogate():
    rows = evaluate_model(drafting(4, 4, 10), law("d1"), [1])
    names = [row["metric"] for row in rows]
    assert any(name.startswith("surrogate (not a bound)") for name in names)
    assert not any(name.startswith("bound at N") for name in names)


def test_its_parameters_are_counted_apart():
    counts = drafting(4, 2).parameter_counts()
    assert counts["pathway"] > 0
    assert counts["backbone"] == VMD(tiny_config(4, 2, V, NO_Z)).parameter_counts()["backbone"]


@pytest.mark.parametrize(
    "more",
    [{"latent": LatentConfig(kind="categorical")}, {"shifted": True}, {"length": 1}],
    ids=["latent", "shifted", "one token"],
)
def test_what_has_no_draft_is_refused(more):
    with pytest.raises(InvalidInput, match=r"model.draft=8: expected 0 with a latent"):
        ModelConfig(**({"vocab_size": V, "length": 4, "draft": 8, "latent": NO_Z} | more))


def board(z: LatentConfig = NO_Z) -> VMD:
    return VMD(ModelConfig(4, 16, 16, layers=1, width=16, heads=2, board=True, draft=16, latent=z), seed=3).eval()


@pytest.mark.parametrize("revise", [False, True])
def test_a_solver_says_what_was_written_and_not_what_was_guessed_before(revise):
    model, puzzle, last = board(), torch.zeros(8, 16, dtype=torch.long), []
    puzzle[:, 0] = torch.arange(8) % 4 + 1
    found = solve_puzzles(
        model, puzzle, steps=2, early=False, revise=revise, on_step=lambda attempt, frame: last.append(frame.canvas)
    )
    assert torch.equal(found.grids, last[-1])
    drawn = model.sample(prompt=puzzle - 1, steps=2, rule="argmax", order="margin", revise=revise)
    assert torch.equal(found.grids, drawn.tokens + 1)
    many = solve_puzzles(model, puzzle[:1].expand(20, -1), steps=1, early=False, rule="sample")
    assert len(many.grids.unique(dim=0)) > 1


def test_rows_of_a_pass_heed_the_head():
    small, large = (VMD(replace(tiny_config(8, 4, V, NO_Z), draft=width)) for width in (8, 2_000))
    assert rows_per_pass(large) < rows_per_pass(small)
