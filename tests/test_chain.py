"""A chain of codes, one for each token or for some neighbours: sums over all chains, draws, and what a model makes of it."""

import itertools
import math

import pytest
import torch

from helpers import all_sequences, chi_square_p, random_tokens, strong_model, tiny_config
from vmd.config import InvalidInput, LatentConfig, ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig
from vmd.data.synthetic import law
from vmd.diagnostics import diagnose
from vmd.latent import CodeChain
from vmd.likelihood import enumerate_orders, exact_nll
from vmd.masking import apply_mask, draw_steps
from vmd.metrics import kl_to, one_step_probabilities, sequence_ids
from vmd.model import VMD
from vmd.objective import ChainCodes
from vmd.training import train

V, K = 3, 4
heads = pytest.mark.parametrize("head", ["bilinear", "additive"])


def chain(codes: int = K, head: str = "bilinear", **more) -> LatentConfig:
    return LatentConfig(kind="chain", codes=codes, head=head, **more)


def random_chain(r: int, codes: int, *shape: int, seed: int = 0) -> tuple[CodeChain, torch.Tensor]:
    """A chain, and evidence for it."""
    g = torch.Generator().manual_seed(seed)
    draw = [torch.randn(*size, generator=g, dtype=torch.float64) for size in ((*shape, r, codes), (codes, codes))]
    return CodeChain(2 * draw[0], 2 * draw[1]), 3 * torch.randn(*shape, r, codes, generator=g, dtype=torch.float64)


def log_weights(found: CodeChain, evidence: torch.Tensor) -> dict[tuple[int, ...], torch.Tensor]:
    """log p(chain, evidence) of every chain, one after the other."""
    r, codes = evidence.shape[-2:]
    weights = {}
    for each in itertools.product(range(codes), repeat=r):
        total = found.bias[..., 0, :].log_softmax(-1)[..., each[0]] + evidence[..., 0, each[0]]
        for i in range(1, r):
            step = (found.next[each[i - 1]] + found.bias[..., i, :]).log_softmax(-1)
            total = total + step[..., each[i]] + evidence[..., i, each[i]]
        weights[each] = total
    return weights


@pytest.mark.parametrize(("r", "codes"), [(1, 3), (2, 2), (3, 4), (4, 3)])
def test_messages_and_marginals_are_sums_over_all_chains(r, codes):
    found, evidence = random_chain(r, codes, 5)
    weights = log_weights(found, evidence)
    total = torch.stack(list(weights.values())).logsumexp(0)
    torch.testing.assert_close(found.forward_messages(evidence)[-1].logsumexp(-1), total)
    posterior = torch.zeros(5, r, codes, dtype=torch.float64)
    for each, weight in weights.items():
        for i, code in enumerate(each):
            posterior[:, i, code] += (weight - total).exp()
    torch.testing.assert_close(found.marginals(evidence), posterior)


def test_a_chain_without_evidence_has_probability_one():
    found, evidence = random_chain(4, 5, 3)
    nothing = torch.zeros_like(evidence)
    torch.testing.assert_close(found.forward_messages(nothing)[-1].exp().sum(-1), torch.ones(3, dtype=torch.float64))


def test_extreme_numbers_stay_numbers():
    found = CodeChain(torch.tensor([[0.0, -80.0], [90.0, 0.0], [0.0, 0.0]]), torch.tensor([[10.0, -10.0], [-10.0, 10.0]]))
    messages = found.forward_messages(torch.full((3, 2), -200.0))
    assert all(bool(m.isfinite().all()) for m in messages)
    assert float(messages[-1].logsumexp(-1)) == pytest.approx(-600, rel=1e-4)


def test_codes_that_stay_are_one_code_for_the_block():
    bias = torch.zeros(3, K, dtype=torch.float64)
    bias[0] = torch.tensor([1.0, 0.0, -1.0, 0.5])
    stays = CodeChain(bias, torch.full((K, K), -40.0, dtype=torch.float64).fill_diagonal_(0.0))
    evidence = torch.randn(3, K, dtype=torch.float64)
    mixture = (bias[0].log_softmax(-1) + evidence.sum(0)).logsumexp(-1)
    torch.testing.assert_close(stays.forward_messages(evidence)[-1].logsumexp(-1), mixture)


@pytest.mark.parametrize(("r", "codes"), [(1, 3), (2, 4), (4, 3)])
def test_the_likeliest_chain_is_the_most_probable_of_all(r, codes):
    found, evidence = random_chain(r, codes, 20)
    weights = log_weights(found, torch.zeros_like(evidence))
    best = torch.stack(list(weights.values())).argmax(0)
    expected = torch.tensor(list(weights), dtype=torch.float)[best]
    assert torch.equal(found.likeliest(), expected)


def test_draws_follow_the_chain():
    found, evidence = random_chain(3, 3)
    noise = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(1))
    drawn = CodeChain(found.bias.expand(20_000, -1, -1), found.next).draw(noise).long()
    weights = log_weights(found, torch.zeros_like(evidence))
    expected = torch.stack([weights[each] for each in itertools.product(range(3), repeat=3)]).exp()
    counts = torch.bincount((drawn * torch.tensor([9, 3, 1])).sum(-1), minlength=27)
    assert chi_square_p(counts, expected) > 1e-3


# In a model


@heads
@pytest.mark.parametrize(
    ("length", "r", "span"), [(4, 4, 1), (4, 2, 1), (3, 1, 1), (6, 3, 1), (8, 4, 2), (6, 6, 3), (4, 2, 2)]
)
@torch.no_grad()
def test_a_score_is_the_log_probability_under_that_token_s_code(head, length, r, span):
    model = strong_model(length, r, V, chain(head=head, span=span))
    x0 = random_tokens(5, length, V)
    masks = draw_steps(x0, r, (max(1, r - 1),), generator=torch.Generator().manual_seed(0))
    xt = apply_mask(x0, masks.mask, V)
    scores = model.codes(xt, x0, masks.target)
    assert isinstance(scores, ChainCodes)
    codes = torch.randint(K, (5, length // r, r // span), generator=torch.Generator().manual_seed(2))
    log_p = model.denoise(xt, x0, codes.float()).log_softmax(-1).gather(-1, x0.unsqueeze(-1)).squeeze(-1) * masks.target
    chosen = scores.log_likelihood.gather(-1, codes.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(chosen.flatten(1), log_p.unflatten(1, (-1, span)).sum(-1), atol=1e-5, rtol=1e-4)


@heads
@pytest.mark.parametrize(("length", "r", "span"), [(3, 3, 1), (4, 2, 1), (4, 4, 2), (4, 2, 2)])
def test_probabilities_sum_to_one_at_every_number_of_steps(head, length, r, span):
    model = strong_model(length, r, V, chain(head=head, span=span))
    rows = all_sequences(length, V)
    for steps in range(1, r + 1):
        for z in ("fresh", "once"):
            total = float((-exact_nll(enumerate_orders(model, rows, steps, z=z))).exp().sum())
            assert total == pytest.approx(1, abs=1e-5)


@heads
@pytest.mark.parametrize("z", ["once", "fresh"])
@pytest.mark.parametrize(("r", "span"), [(2, 1), (4, 2)])
def test_samples_have_the_probabilities_that_are_certified(head, z, r, span):
    model = strong_model(4, r, V, chain(head=head, span=span))
    rows = all_sequences(4, V)
    for steps in (1, 2):
        expected = (-exact_nll(enumerate_orders(model, rows, steps, z=z))).exp()
        generator = torch.Generator().manual_seed(steps)
        drawn = model.sample(20_000, steps=steps, order="random", rule="sample", z=z, generator=generator)
        counts = torch.bincount(sequence_ids(drawn.tokens, V), minlength=len(rows))
        assert chi_square_p(counts, expected) > 1e-3


@pytest.mark.parametrize(("r", "span"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("rule", ["sample", "argmax"])
def test_cached_samples_are_the_uncached_ones(r, span, rule):
    model = strong_model(8, r, V, chain(span=span))
    seeds = list(range(20))
    drawn = [
        model.sample(20, steps=2, order="prob", rule=rule, z="fresh", seeds=seeds, cache=cache) for cache in (True, False)
    ]
    assert torch.equal(drawn[0].tokens, drawn[1].tokens)
    assert drawn[0].z is not None
    assert drawn[0].z.shape == (20, 8 // r, r // span)


@heads
@torch.no_grad()
def test_a_span_of_the_whole_block_is_one_code_for_it(head):
    """The same weights, the same law: the table of what follows what is not used."""
    one = strong_model(4, 2, V, LatentConfig(kind="categorical", codes=K, head=head))
    whole = VMD(tiny_config(4, 2, V, chain(head=head, span=2))).eval()
    missing = whole.load_state_dict(one.state_dict(), strict=False).missing_keys
    assert missing == ["decoder.pathway.code_next.weight"]
    rows = all_sequences(4, V)
    for steps in (1, 2):
        found, expected = (exact_nll(enumerate_orders(model, rows, steps)) for model in (whole, one))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    canvas = torch.full((1, 4), V)
    marginals = [m.decoder.code_marginals(m.decoder.code_features(canvas, canvas)) for m in (whole, one)]
    torch.testing.assert_close(*marginals, atol=1e-5, rtol=1e-5)


@heads
@pytest.mark.parametrize("span", [1, 2])
@torch.no_grad()
def test_the_belief_of_all_codes_is_the_sum_over_all_chains(head, span):
    """log p(x_i) of single tokens, against one step's law of whole blocks."""
    model = strong_model(4, 4, V, chain(head=head, span=span))
    canvas, rows = torch.full((1, 4), V), all_sequences(4, V)
    law_of_block = (-exact_nll(enumerate_orders(model, rows, 1))).exp().view(V, V, V, V)
    found = model.decoder.code_marginals(model.decoder.code_features(canvas, canvas))[0].exp()
    for place in range(4):
        others = tuple(i for i in range(4) if i != place)
        torch.testing.assert_close(found[place], law_of_block.sum(others).float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("latent", "block", "told"),
    [
        ({"kind": "chain", "span": 3}, 4, "span=3: expected a divisor of the block size 4"),
        ({"kind": "chain", "span": 0}, 4, "span=0: expected a number at least 1"),
        ({"kind": "categorical", "span": 2}, 4, "span=2: expected 1 without a chain"),
    ],
)
def test_spans_that_do_not_fit_are_refused(latent, block, told):
    with pytest.raises(InvalidInput, match=f"model.latent.{told}"):
        ModelConfig(V, 8, block, latent=LatentConfig(codes=K, **latent))


@heads
@torch.no_grad()
def test_codes_in_chunks_are_codes_at_once(head):
    x0 = random_tokens(3, 4, V)
    masks = draw_steps(x0, 4, (1,), generator=torch.Generator().manual_seed(0))
    bits = []
    for chunk in (0, 3):
        model = VMD(tiny_config(4, 4, V, chain(head=head, code_chunk=chunk)), seed=1)
        bits.append(model(x0, masks, None).total)
    torch.testing.assert_close(*bits)


def test_a_chain_learns_with_few_codes_what_takes_one_code_many():
    """D2 is two independent pairs: a hundred sequences, but each token says no more than its neighbour."""
    truth = law("d2")
    model = VMD(ModelConfig(10, 4, 4, layers=1, width=32, heads=2, latent=chain(32)))
    training = TrainingConfig(steps=200, batch_size=64, learning_rate=6e-3, split_codes_every=25, log_every=200)
    log = train(model, truth, RunConfig(model.config, ObjectiveConfig(masking="steps", steps=(1,)), training))
    thirty_two_of_a_hundred = math.log(100 / 32)  # what 32 codes for whole blocks leave at best
    assert kl_to(truth, one_step_probabilities(model, truth.sequences)) < thirty_two_of_a_hundred
    assert log[-1]["total"] < log[0]["total"]


def test_diagnostics_count_codes_of_tokens():
    model = strong_model(4, 2, V, chain())
    found = diagnose(model, random_tokens(40, 4, V))
    assert found is not None
    assert found.kl > 0
    assert len(found.spread) == K
    assert sum(found.spread) == pytest.approx(1, abs=1e-4)


def test_a_chain_has_no_layers_of_its_own():
    with pytest.raises(InvalidInput, match=r"code_layers=1: expected 0 with a chain"):
        chain(code_layers=1)
