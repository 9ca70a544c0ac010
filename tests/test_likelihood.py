"""Certified likelihoods against enumeration, integration, and laws whose entropy is known."""

import dataclasses
import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from helpers import (
    CODES,
    NO_LATENT,
    all_sequences,
    chi_square_p,
    close,
    codes,
    exact_denoiser,
    latent,
    learned_prior,
    mean_is,
    random_law,
    random_tokens,
    sequence_counts,
    standard_error,
    strengthened,
    strong_model,
    tiny_config,
    tiny_model,
)
from vmd.config import InvalidInput, RunConfig, TrainingConfig
from vmd.data import Law, law
from vmd.data.synthetic import deterministic
from vmd.latent import Gaussian, standard_normal
from vmd.likelihood import (
    all_orders,
    confidence_order_nll,
    enumerate_orders,
    exact_nll,
    in_bits,
    keep_some_steps,
    law_bits,
    nll_bound,
    random_order_nll,
)
from vmd.masking import Masks, draw_steps
from vmd.metrics import one_step_probabilities
from vmd.model import VMD
from vmd.objective import exact_objective
from vmd.sampling import ORDERS, reveal_counts
from vmd.training import train

V = 3
# z is absent or summed: nothing is approximated
EXACT = {"none": NO_LATENT} | {name: CODES[name] for name in ("bilinear", "additive", "bilinear-layer")}
exact_latents = pytest.mark.parametrize("z_config", EXACT.values(), ids=EXACT)
samplers = pytest.mark.parametrize(
    ("length", "r", "steps", "z"),
    [(2, 1, 1, "fresh"), (3, 3, 1, "once")]
    + [(length, r, n, z) for length, r, n in ((3, 3, 2), (3, 3, 3), (4, 2, 2), (4, 4, 3)) for z in ("fresh", "once")],
)


def least_doubtful(probabilities: torch.Tensor) -> torch.Tensor:
    """An order of one's own: the ends of a block are easy."""
    places = torch.arange(probabilities.shape[-2]).double()
    return (probabilities**2).sum(-1) + (places - places.mean()).abs()


def last_by_minus_infinity(probabilities: torch.Tensor) -> torch.Tensor:
    """Places that are never wanted, and one that is no number."""
    score = probabilities.amax(-1).clone()
    score[..., 1:], score[..., -1] = -torch.inf, torch.nan
    return score


CONFIDENCES = pytest.mark.parametrize("order", [*ORDERS[1:], least_doubtful, last_by_minus_infinity])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def probabilities(nll: torch.Tensor) -> torch.Tensor:
    return nll.double().neg().exp()


# What is estimated: enumeration, and sums over all sequences


@exact_latents
@samplers
def test_the_mean_of_the_bound_is_the_mean_over_all_orders(z_config, length, r, steps, z):
    model, x0 = strong_model(length, r, V, z_config), random_tokens(1, length, V, seed=4)
    exact = enumerate_orders(model, x0, steps, z=z).mean(0).sum()
    draws = nll_bound(model, x0.expand(1_000, -1), steps, z=z, generator=seeded())
    assert draws.dtype == torch.float64
    assert mean_is(draws, float(exact))
    assert (float(draws.std()) > 1e-3) == (steps > 1)  # the order matters, and is all chance there is


@pytest.mark.parametrize("z_config", [NO_LATENT, codes()], ids=["none", "codes"])
@pytest.mark.parametrize(("steps", "scored"), [(4, 1), (4, 3), (3, 2), (4, 4), (4, 9)])
def test_scoring_some_of_the_steps_has_the_mean_of_all(z_config, steps, scored):
    model, x0 = strong_model(4, 4, V, z_config), random_tokens(1, 4, V, seed=4)
    exact = enumerate_orders(model, x0, steps).mean(0).sum()
    draws = nll_bound(model, x0.expand(2_000, -1), steps, steps_scored=scored, generator=seeded())
    assert mean_is(draws, float(exact))
    assert standard_error(draws) < 0.03 * float(exact)


def test_a_code_drawn_once_is_scored_on_all_its_steps():
    model, x0 = strong_model(4, 4, V, codes()), random_tokens(50, 4, V)
    some, every = (nll_bound(model, x0, 4, z="once", steps_scored=n, generator=seeded()) for n in (1, 4))
    assert torch.equal(some, every)


@pytest.mark.parametrize(("steps", "count"), [(5, 1), (5, 2), (5, 4), (8, 3)])
def test_every_step_is_kept_as_often_and_never_twice(steps, count):
    rows = 4_000
    number = torch.arange(steps).view(1, -1, 1).expand(rows, -1, 2)
    kept = keep_some_steps(Masks(number, number + 100, torch.ones(rows, 1)), count, seeded())
    assert torch.equal(kept.target, kept.mask + 100)  # what a step hides and scores stay together
    assert kept.mask.shape == (rows, count, 2)
    assert (kept.mask[..., 0].diff(dim=1) > 0).all()
    share = torch.bincount(kept.mask[..., 0].flatten(), minlength=steps) / rows
    assert ((share - count / steps).abs() < 4 * (0.25 / rows) ** 0.5).all()


@exact_latents
@samplers
def test_the_likelihoods_of_all_sequences_sum_to_one(z_config, length, r, steps, z):
    model = strong_model(length, r, V, z_config)
    nll = exact_nll(enumerate_orders(model, all_sequences(length, V), steps, z=z))
    assert nll.shape == (V**length,)
    assert close(float(probabilities(nll).sum()), 1, 1e-5)
    assert float(nll.std()) > 0.1  # not because all are alike


@exact_latents
def test_in_one_step_the_bound_itself_is_exact(z_config):
    model, sequences = strong_model(4, 2, V, z_config), all_sequences(4, V)
    for z in ("fresh", "once"):
        nll = nll_bound(model, sequences, 1, z=z)
        assert close(float(probabilities(nll).sum()), 1, 1e-5)
        torch.testing.assert_close(nll, exact_nll(enumerate_orders(model, sequences, 1)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("z_config", [codes(8), codes(8, "additive")], ids=["bilinear", "additive"])
def test_the_ten_thousand_sequences_of_ten_symbols_sum_to_one(z_config):
    nll = nll_bound(strong_model(4, 4, 10, z_config), all_sequences(4, 10), 1)
    assert close(float(probabilities(nll).sum()), 1, 1e-5)


@exact_latents
def test_the_mean_over_orders_bounds_the_likelihood_of_every_sequence(z_config):
    """Jensen: the bound is never below -log p, and above it where orders differ."""
    per_order = enumerate_orders(strong_model(3, 3, V, z_config), all_sequences(3, V), 2)
    gap = per_order.mean(0).sum(-1) - exact_nll(per_order)
    assert (gap > -1e-6).all()
    assert float(gap.max()) > 5e-3


def test_a_code_drawn_once_and_drawn_fresh_are_different_likelihoods():
    model, sequences = strong_model(3, 3, V, codes()), all_sequences(3, V)
    fresh, once = (exact_nll(enumerate_orders(model, sequences, 3, z=z)) for z in ("fresh", "once"))
    assert float((fresh - once).abs().max()) > 0.05


def test_without_a_latent_fresh_and_once_are_one_bound():
    model, x0 = strong_model(4, 2, V), random_tokens(20, 4, V)
    fresh, once = (nll_bound(model, x0, 2, z=z, generator=seeded()) for z in ("fresh", "once"))
    torch.testing.assert_close(fresh, once)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_all_orders_are_different_and_reveal_every_token_by_the_counts(steps):
    orders = all_orders(4, steps)
    counts = reveal_counts(torch.tensor([4]), steps)[:, 0]
    assert len(orders) == math.factorial(4) // math.prod(math.factorial(n) for n in counts.tolist())
    assert len(orders.flatten(1).unique(dim=0)) == len(orders)
    assert (orders.sum(1) == 1).all()
    assert (orders.sum(2) == counts).all()


# Confidence orders


@CONFIDENCES
@pytest.mark.parametrize(("length", "r"), [(3, 3), (4, 2), (2, 1), (6, 3)])
def test_likelihoods_of_confidence_orders_sum_to_one(order, length, r):
    model, sequences = strong_model(length, r, V), all_sequences(length, V)
    for steps in range(1, r + 1):
        nll = confidence_order_nll(model, sequences, steps, order)
        assert close(float(probabilities(nll).sum()), 1, 1e-5)
        if steps == 1:
            torch.testing.assert_close(nll, nll_bound(model, sequences, 1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(confidence_order_nll(model, sequences, steps, order, chunk=7), nll, atol=1e-5, rtol=1e-5)


@CONFIDENCES
@pytest.mark.parametrize(("length", "r", "steps"), [(3, 3, 2), (4, 2, 2), (6, 3, 2)])
def test_likelihoods_of_confidence_orders_are_those_of_the_sampler(order, length, r, steps):
    model, known = strong_model(length, r, V), random_law(length, V)
    p = probabilities(confidence_order_nll(model, known.sequences, steps, order))
    tokens = model.sample(3_000, steps=steps, order=order, generator=seeded()).tokens
    assert chi_square_p(sequence_counts(tokens, known), p / p.sum()) > 1e-4


def test_orders_of_one_s_own_are_asked_block_by_block():
    """As the sampler asks them: places are those of a block."""
    shapes = []

    def noting(probabilities: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(probabilities.shape[-2:]))
        return least_doubtful(probabilities)

    model = strong_model(8, 4, 2)
    tokens = model.sample(4_000, steps=2, order=noting, generator=seeded()).tokens
    sequences = all_sequences(8, 2)
    p = probabilities(confidence_order_nll(model, sequences, 2, noting))
    assert set(shapes) == {(4, 2)}
    drawn = torch.bincount((tokens * 2 ** torch.arange(7, -1, -1)).sum(1), minlength=256) / len(tokens)
    where = (sequences * 2 ** torch.arange(7, -1, -1)).sum(1)
    assert (drawn[where] - p).abs().sum() / 2 < 0.1  # 0.6 if places were those of the whole row


def test_confidence_orders_of_latents_and_unknown_orders_are_refused():
    x0 = random_tokens(2, 4, V)
    for z_config in (latent(), codes()):
        with pytest.raises(InvalidInput, match=r"order=prob.*latent"):
            confidence_order_nll(tiny_model(4, 2, V, z_config), x0, 1, "prob")
        with pytest.raises(InvalidInput, match=r"order=least_doubtful.*latent"):
            confidence_order_nll(tiny_model(4, 2, V, z_config), x0, 1, least_doubtful)
    for order in ("random", "best"):
        with pytest.raises(InvalidInput, match=f"order='{order}'"):
            confidence_order_nll(tiny_model(4, 2, V), x0, 1, order)


# Given tokens, and what a pass may cost


@exact_latents
@pytest.mark.parametrize("given", [(1,), (0, 3), (0, 1), (2, 3)], ids=str)
def test_likelihoods_given_tokens_sum_to_one_over_the_rest_and_are_those_of_the_sampler(z_config, given):
    model, prompt = strong_model(4, 2, V, z_config), torch.full((1, 4), -1)
    prompt[:, list(given)] = 2
    fixed = prompt[0] >= 0
    sequences = all_sequences(4, V)
    known = Law("rest", sequences[(sequences[:, fixed] == 2).all(-1)], torch.ones(V**2) / V**2, V)
    p = probabilities(nll_bound(model, known.sequences, 1, fixed=fixed))
    assert close(float(p.sum()), 1, 1e-5)
    tokens = model.sample(prompt=prompt.expand(2_000, -1), steps=1, order="random", generator=seeded()).tokens
    assert chi_square_p(sequence_counts(tokens, known), p / p.sum()) > 1e-4


@pytest.mark.parametrize("z_config", [NO_LATENT, codes(), latent(), learned_prior()], ids=["none", "codes", "z", "learned"])
@pytest.mark.parametrize("z", ["fresh", "once"])
def test_a_sequence_that_is_given_costs_nothing(z_config, z):
    model, x0 = strong_model(4, 2, V, z_config), random_tokens(5, 4, V)
    assert (nll_bound(model, x0, 2, z=z, samples=3, fixed=torch.ones(4, dtype=torch.bool)) == 0).all()
    in_first = nll_bound(model, x0, 1, z=z, fixed=torch.tensor([False, False, True, True]), generator=seeded())
    changed = torch.cat([x0[:, :2], (x0[:, 2:] + 1) % V], dim=1)
    again = nll_bound(model, changed, 1, z=z, fixed=torch.tensor([False, False, True, True]), generator=seeded())
    torch.testing.assert_close(in_first, again)  # tokens given in a later block are not seen by an earlier one


class CountingRows:
    """A model that notes how many rows each of its passes has."""

    def __init__(self, model: VMD):
        self.model, self.config, self.rows = model, model.config, []

    def __getattr__(self, name: str):
        def noted(first, *rest):
            self.rows.append(len(first))
            return getattr(self.model, name)(first, *rest)

        return noted


@pytest.mark.parametrize("z_config", [NO_LATENT, codes(), learned_prior()], ids=["none", "codes", "learned"])
@pytest.mark.parametrize("z", ["fresh", "once"])
def test_no_pass_has_more_rows_than_a_chunk_and_chunks_change_nothing(z_config, z):
    model, x0 = strong_model(4, 2, V, z_config), random_tokens(9, 4, V)
    options = {"z": z, "samples": 5 if z_config.kind == "gaussian" else 1}
    for chunk in (2, 7, 16):
        counting = CountingRows(model)
        nll_bound(counting, x0, 2, chunk=chunk, **options)
        assert max(counting.rows) <= chunk
    if z_config.kind != "gaussian":  # there chunks draw other noise
        one_step = [nll_bound(model, x0, 1, z=z, chunk=chunk) for chunk in (2, 4096)]
        torch.testing.assert_close(*one_step, atol=1e-5, rtol=1e-5)
        orders = [enumerate_orders(model, x0, 2, z=z, chunk=chunk) for chunk in (2, 4096)]
        torch.testing.assert_close(*orders, atol=1e-5, rtol=1e-5)


# The Gaussian: ELBO, importance weights, and the integral they approach


@torch.no_grad()
def elbo_by_hand(model: VMD, x0: torch.Tensor, steps: int, z: str, draws: int) -> torch.Tensor:
    """(draws,) of the bound of one sequence: every order, KL by torch.distributions, z by its own sampler."""
    config, orders = model.config, all_orders(model.config.block_size, steps)
    total = torch.zeros(draws, dtype=torch.float64)

    def shown(hidden):
        return torch.where(hidden, model.mask_id, x0)

    for order in orders:
        targets = order.repeat(1, config.blocks)  # (N, L)
        for sharing in [range(steps)] if z == "once" else [[j] for j in range(steps)]:  # the steps of one z
            hidden, told = targets[sharing[0] :].any(0, keepdim=True), targets[list(sharing)].any(0, keepdim=True)
            q, p = model.encode(x0, hidden, told), model.gaussian_prior(shown(hidden), x0)
            q, p = Normal(q.mean, q.log_std.exp()), Normal(p.mean, p.log_std.exp())
            latents = q.sample((draws,)).squeeze(1)
            total += kl_divergence(q, p).sum()
            for j in sharing:
                canvas = shown(targets[j:].any(0, keepdim=True)).expand(draws, -1)
                log_p = model.denoise(canvas, x0.expand(draws, -1), latents).log_softmax(-1)
                total -= log_p[:, torch.arange(config.length), x0[0]][:, targets[j]].sum(-1)
    return total / len(orders)


@pytest.mark.parametrize("z_config", [latent(), learned_prior()], ids=["normal", "learned"])
@pytest.mark.parametrize(
    ("length", "r", "steps", "z"),
    [(2, 1, 1, "fresh"), (3, 3, 2, "fresh"), (3, 3, 2, "once"), (4, 2, 2, "fresh"), (4, 2, 2, "once")],
)
def test_with_one_sample_the_mean_is_the_elbo(z_config, length, r, steps, z):
    model, x0 = strong_model(length, r, V, z_config), random_tokens(1, length, V, seed=4)
    by_hand = elbo_by_hand(model, x0, steps, z, 500)
    draws = nll_bound(model, x0.expand(1_000, -1), steps, z=z, generator=seeded())
    error = math.hypot(standard_error(by_hand), standard_error(draws))
    assert abs(float(by_hand.mean() - draws.mean())) < 4 * error
    assert 4 * error < 0.15 * float(by_hand.mean())  # the test has power


def gentle_model(length: int, r: int, z_config) -> VMD:
    """Its posterior is wrong, but not so far from the prior that importance weights of some hundred draws fail."""
    model = strong_model(length, r, V, z_config)
    with torch.no_grad():
        for name, factor in (("encoder.head.weight", 0.4), ("encoder.head.bias", 0.4), ("decoder.head.weight", 0.4)):
            model.get_parameter(name).mul_(factor)
    return model


def integral(model: VMD, x0: torch.Tensor) -> torch.Tensor:
    """Independent estimates of -log p(x0) of one step by integration over the prior."""
    return -torch.cat([one_step_probabilities(model, x0, 2_000, generator=seeded(s)) for s in range(10)]).log()


@pytest.mark.parametrize("r", [2, 1])
def test_integration_draws_z_from_the_prior_that_the_model_has(r):
    model, known = strong_model(2, r, V, learned_prior()), random_law(2, V)
    p = one_step_probabilities(model, known.sequences, 5_000, generator=seeded())
    tokens = model.sample(5_000, generator=seeded(1)).tokens
    assert chi_square_p(sequence_counts(tokens, known), p / p.sum()) > 1e-4


def test_integration_over_codes_is_their_exact_sum():
    model, sequences = strong_model(4, 2, V, codes()), all_sequences(4, V)
    torch.testing.assert_close(one_step_probabilities(model, sequences), probabilities(nll_bound(model, sequences, 1)))


@pytest.mark.parametrize(
    ("z_config", "r"),
    [(latent(), 2), (latent(), 1), (latent(on_clean=True), 1), (latent("doubled", on_clean=True), 2), (learned_prior(), 2)],
    ids=["one-block", "two-blocks", "two-blocks-clean", "one-block-clean", "learned"],
)
def test_importance_weights_tighten_the_bound_down_to_the_integral_over_z(z_config, r):
    model, x0 = gentle_model(2, r, z_config), random_tokens(1, 2, V, seed=4)
    truth = integral(model, x0)
    means, errors = [], []
    for samples, rows in ((1, 3_000), (4, 600), (16, 200), (256, 25)):
        draws = nll_bound(model, x0.expand(rows, -1), 1, z="once", samples=samples, generator=seeded())
        means.append(float(draws.mean()))
        errors.append(standard_error(draws))
        assert means[-1] > float(truth.mean()) - 4 * math.hypot(errors[-1], standard_error(truth))
    for i in range(3):
        assert means[i + 1] < means[i] + 4 * math.hypot(errors[i], errors[i + 1])
    assert means[0] > means[3] + 3 * errors[0]  # the test has power: the ELBO is loose
    assert abs(means[3] - float(truth.mean())) < 4 * math.hypot(errors[3], standard_error(truth)) + 0.02


# Entropies: what no honest bound goes below


class Oracle:
    """What the bounds need of a model without latent, answering with a law's exact conditionals."""

    def __init__(self, known: Law, block_size: int):
        self.config = tiny_config(known.length, block_size, known.vocab_size)
        self.denoise = exact_denoiser(known, block_size)


def marginal_entropy(known: Law, positions: list[int]) -> float:
    """Of the tokens at the positions, in nats."""
    if not positions:
        return 0.0
    _, which = known.sequences[:, positions].unique(dim=0, return_inverse=True)
    return float(
        torch.special.entr(torch.zeros(int(which.max()) + 1).double().index_add(0, which, known.probabilities)).sum()
    )


def cost_of_steps(known: Law, r: int, steps: int) -> float:
    """E_order of the sum over steps and tokens of H(x_i | revealed, earlier blocks): entropy + total correlations."""
    total = 0.0
    orders = all_orders(r, steps)
    for start in range(0, known.length, r):
        for order in orders:
            before = list(range(start))
            for revealed in order:
                tokens = [start + i for i in revealed.nonzero().flatten().tolist()]
                base = marginal_entropy(known, before)
                total += sum(marginal_entropy(known, [*before, i]) - base for i in tokens) / len(orders)
                before += tokens
    return total


@pytest.mark.parametrize(
    ("name", "r"),
    [("deterministic", 2), ("dependence-0.5", 2), ("non-uniform", 1), ("d1", 4), ("d1", 2), ("d2", 2), ("random", 3)],
)
def test_exact_conditionals_cost_the_entropy_and_the_total_correlation_of_what_each_step_reveals(name, r):
    known = random_law(3, 3) if name == "random" else law(name)
    oracle = Oracle(known, r)
    costs = []
    for steps in range(1, r + 1):
        expected = cost_of_steps(known, r, steps)
        bound = enumerate_orders(oracle, known.sequences, steps).mean(0).sum(-1)
        assert close(float((known.probabilities * bound).sum()), expected, 1e-5)
        assert expected > known.entropy - 1e-9
        costs.append(expected)
        estimate = law_bits(oracle, known, lambda x0, n=steps: nll_bound(oracle, x0, n, generator=seeded()), 20)
        in_nats = known.length * math.log(2)
        assert abs(estimate.value * in_nats - expected) < 4 * estimate.stderr * in_nats + 1e-5
    assert close(costs[-1], known.entropy)  # a token a step: nothing is revealed together
    if r == known.length:
        assert close(costs[0], known.entropy + known.total_correlation())


TRAINED = {
    "none": NO_LATENT,
    "gaussian": latent(),
    "learned": learned_prior(),
    "clean": latent(on_clean=True),
    "codes": codes(16),
    "codes-layer": codes(8, "additive", 1),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("deterministic", "none"),
        ("deterministic", "gaussian"),
        ("deterministic", "codes"),
        ("dependence-0.5", "learned"),
        ("dependence-0.5", "codes-layer"),
        ("d1", "clean"),
        ("d1", "codes"),
    ],
)
def test_no_certified_bound_of_a_trained_model_goes_below_the_entropy(name, kind):
    known, r = law(name), 2
    training = TrainingConfig(steps=25, batch_size=32, learning_rate=1e-2, schedule="constant")
    config = RunConfig(model=tiny_config(known.length, r, 10, TRAINED[kind]), training=training)
    model = VMD(config.model)
    train(model, known, config)
    entropy = known.entropy / (known.length * math.log(2))
    for steps in range(1, r + 1):
        for z in ("once",) if config.model.z_reaches_later_blocks else ("once", "fresh"):
            for samples in (1, 8) if config.model.latent.kind == "gaussian" else (1,):
                options = {"z": z, "samples": samples, "generator": seeded()}
                bits = law_bits(model, known, lambda x0, n=steps, o=options: nll_bound(model, x0, n, **o), 3)
                assert bits.value > entropy - 3 * bits.stderr


class Truncated:
    """N(0, 1) confined to lower < Phi(z) < upper: a posterior that knows k, with its exact KL to another such."""

    def __init__(self, lower: torch.Tensor, upper: torch.Tensor):
        self.lower, self.upper = lower, upper
        self.mean = (lower + upper) / 2

    def draw(self, noise):
        return torch.special.ndtri(self.lower + (self.upper - self.lower) * torch.special.ndtr(noise.double()))

    def log_prob(self, z):
        normal = -0.5 * z**2 - 0.5 * math.log(2 * math.pi)
        return (normal - (self.upper - self.lower).log()).squeeze(-1)

    def kl(self, prior):
        return ((prior.upper - prior.lower) / (self.upper - self.lower)).log().squeeze(-1)


class KnowsThePair:
    """z = N(0, 1) chooses k of (k, k+1 mod 10) by its quantile, the encoder knows k, the prior what is revealed of it."""

    def __init__(self):
        self.config = tiny_config(2, 2, 10, learned_prior(dim=1))

    def denoise(self, xt, x0, z=None):
        k = (torch.special.ndtr(z[:, 0, 0]) * 10).long().clamp(max=9)
        return torch.nn.functional.one_hot(deterministic().sequences[k], 10).double().log()

    def among(self, k, known):
        lower = torch.where(known, k / 10, 0.0).double().view(-1, 1, 1)
        return Truncated(lower, lower + torch.where(known, 0.1, 1.0).double().view(-1, 1, 1))

    def encode(self, x0, mask, target=None):
        return self.among(x0[:, 0], torch.ones(len(x0), dtype=torch.bool))

    def gaussian_prior(self, xt, x0):
        k = torch.where(xt[:, 0] < 10, xt[:, 0], (xt[:, 1] - 1) % 10)
        return self.among(k, (xt < 10).any(-1))


def test_the_surrogate_of_an_ideal_latent_is_below_the_entropy_and_its_certified_bounds_are_not():
    """Side by side on one oracle: 1.151 against 2.303 nats, the entropy, whatever the steps and samples."""
    known, ideal = deterministic(), KnowsThePair()
    noise = torch.randn(3, 10, 1, 1)
    surrogate = exact_objective(ideal.denoise, ideal.encode, known.sequences, 2, 10, prior=ideal.gaussian_prior, noise=noise)
    assert abs(float((known.probabilities * surrogate.total).sum()) - 1.151) < 1e-3
    for steps in (1, 2):
        for z in ("once", "fresh"):
            for samples in (1, 5):
                certified = nll_bound(ideal, known.sequences, steps, z=z, samples=samples)
                torch.testing.assert_close(certified, torch.full_like(certified, known.entropy), atol=1e-5, rtol=0)


# A latent that reaches later blocks


class Borrower:
    """Two blocks of one token. The first is 0; the second is the sign of z^1, which q takes to be positive.

    p(0, 1) is a half. Block by block, the first mean over z^1 pays for it nothing, since x1 does not depend on it, and the
    second is told it for nothing.
    """

    def __init__(self, on_clean: bool):
        self.config = tiny_config(2, 1, 2, latent(on_clean=on_clean, dim=1))

    def denoise(self, xt, x0, z=None):
        logit = torch.stack([torch.full_like(z[:, 0, 0], -12.0), 12 * z[:, 0, 0]], dim=1)
        return torch.stack([torch.zeros_like(logit), logit], dim=-1)

    def encode(self, x0, mask, target=None):
        first = torch.tensor([1.0, 0.0]).view(1, 2, 1).expand(len(x0), -1, -1)
        return Gaussian(1.2 * first, math.log(0.7) * first)

    def gaussian_prior(self, xt, x0):
        return standard_normal(torch.zeros(len(xt), 2, 1))


@pytest.mark.parametrize(("samples", "rows"), [(1, 4_000), (64, 500), (1_000, 50)])
def test_a_latent_that_reaches_later_blocks_is_not_spent_twice(samples, rows):
    x0 = torch.tensor([[0, 1]]).expand(rows, -1)
    truth = math.log(2) + math.log1p(math.exp(-12))
    joint, block_by_block = (  # the second is the bound of models whose z stays at home
        nll_bound(Borrower(on_clean), x0, 1, z="once", samples=samples, generator=seeded()) for on_clean in (True, False)
    )
    assert float(joint.mean()) > truth - 4 * standard_error(joint)
    if samples > 1:
        assert abs(float(joint.mean()) - truth) < 4 * standard_error(joint) + 3 / samples
        assert float(block_by_block.mean()) < truth - 0.5  # no bound: 0.1 for a truth of 0.69
    else:  # a sum of logs is the same either way
        torch.testing.assert_close(joint, block_by_block)


@pytest.mark.parametrize("samples", [1, 20])
def test_blocks_of_several_steps_that_share_latents_are_bounded_too(samples):
    """Against the mean over draws of all latents from the prior, for each combination of the blocks' orders."""
    model, x0 = gentle_model(4, 2, latent(on_clean=True)), random_tokens(1, 4, V, seed=4)
    draws = 2_000
    latents = torch.randn(draws, 2, 3, generator=seeded())
    given_z = torch.zeros(2, 2, draws, dtype=torch.float64)  # log p(x | z) by order and block
    with torch.no_grad():
        for o, order in enumerate(all_orders(2, 2)):
            for j in range(2):
                canvas = torch.where(order[j:].any(0).repeat(2), model.mask_id, x0).expand(draws, -1)
                log_p = model.denoise(canvas, x0.expand(draws, -1), latents).double().log_softmax(-1)
                chosen = log_p[:, torch.arange(4), x0[0]] * order[j].repeat(2)
                given_z[o] += chosen.view(draws, 2, 2).sum(-1).T
    log_p = torch.stack([given_z[a, 0] + given_z[b, 1] for a in range(2) for b in range(2)]).exp().mean(0)
    truth = -float(log_p.mean().log())
    bound = nll_bound(model, x0.expand(200, -1), 2, z="once", samples=samples, generator=seeded())
    slack = 4 * math.hypot(standard_error(bound), standard_error(log_p) / float(log_p.mean()))
    assert float(bound.mean()) > truth - slack
    if samples > 1:
        assert float(bound.mean()) < truth + slack + 0.3


def test_a_given_block_still_pays_for_a_latent_that_later_blocks_see():
    x0, fixed = torch.tensor([[0, 1]]).expand(2_000, -1), torch.tensor([True, False])
    bound = nll_bound(Borrower(on_clean=True), x0, 1, z="once", fixed=fixed, generator=seeded())
    assert float(bound.mean()) > math.log(2) - 4 * standard_error(bound)


def test_fresh_latents_that_reach_later_blocks_are_refused_with_the_reason():
    x0 = random_tokens(2, 4, V)
    model = tiny_model(4, 2, V, latent(on_clean=True))
    for score in (nll_bound, enumerate_orders):
        with pytest.raises(InvalidInput, match=r"z=fresh.*on_clean"):
            score(model, x0, 2, z="fresh")
    assert nll_bound(model, x0, 1, z="fresh").isfinite().all()  # with one step there is one draw
    assert nll_bound(tiny_model(4, 4, V, latent(on_clean=True)), x0, 2, z="fresh").isfinite().all()  # no later block


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": 3}, "steps=3: expected 1 to 2"),
        ({"steps": 1, "z": "twice"}, "z='twice'"),
        ({"steps": 1, "samples": 0}, "samples=0"),
    ],
)
def test_settings_without_a_bound_are_refused_by_name(options, says):
    for score in (nll_bound, enumerate_orders):
        with pytest.raises(InvalidInput, match=says):
            score(tiny_model(4, 2, V, latent()), random_tokens(2, 4, V), **options)


def test_blocks_too_large_to_enumerate_are_refused():
    with pytest.raises(InvalidInput, match="block_size=7"):
        enumerate_orders(tiny_model(7, 7, V), random_tokens(1, 7, V), 2)


# Bits


def test_bits_are_nats_per_token_over_ln_2_with_the_error_of_the_mean():
    nats = torch.tensor([1.0, 2.0, 4.0, 5.0])
    bits = in_bits(nats, 3)
    assert close(bits.value, 3 / (3 * math.log(2)))
    assert close(bits.stderr, float(nats.double().std()) / 2 / (3 * math.log(2)))
    assert in_bits(nats[:1], 3).stderr is None


def test_bits_of_a_known_law_weigh_its_sequences_and_err_by_order_and_z_alone():
    known = law("non-uniform")
    place = {tuple(s): i for i, s in enumerate(known.sequences.tolist())}

    def score(x0):  # nats that differ by sequence, and by 0, 1, 2 over its draws
        assert len(x0) == 30
        number = torch.tensor([place[tuple(s)] for s in x0.tolist()])
        return number.double() + torch.arange(30) % 3

    bits = law_bits(None, known, score, 3)
    scale = 1 / (2 * math.log(2))
    assert close(bits.value, scale * (float((known.probabilities * torch.arange(10)).sum()) + 1))
    assert close(bits.stderr, scale * float((known.probabilities**2 / 3).sum().sqrt()))  # the variance of 0, 1, 2 is 1
    assert law_bits(None, known, lambda x0: torch.ones(10), 1).stderr is None


def test_grouped_draws_may_come_in_any_order():
    generator = seeded()
    nats, p = torch.rand(12, generator=generator), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    groups = torch.arange(3).repeat_interleave(4)
    shuffle = torch.randperm(12, generator=generator)
    one, other = in_bits(nats, 2, groups, p), in_bits(nats[shuffle], 2, groups[shuffle], p)
    assert close(one.value, other.value)
    assert close(one.stderr, other.stderr)


# The objective is the same bound


@pytest.mark.parametrize("z_config", [NO_LATENT, codes(), learned_prior()], ids=["none", "codes", "learned"])
@pytest.mark.parametrize("z", ["fresh", "once"])
@torch.no_grad()
def test_the_training_objective_of_a_sampler_has_the_mean_of_its_certified_bound(z_config, z):
    model, rows = strong_model(4, 2, V, z_config), 1_200
    x0 = random_tokens(1, 4, V, seed=4).expand(rows, -1)
    masks = draw_steps(x0, 2, (2,), whole=z == "once", generator=seeded())
    noise = torch.randn(rows, 2, 2, generator=seeded(1)) if z_config.kind == "gaussian" else None
    loss = model(x0, masks, noise).total
    bound = nll_bound(model, x0, 2, z=z, generator=seeded(2))
    error = math.hypot(standard_error(loss), standard_error(bound))
    assert abs(float(loss.double().mean() - bound.mean())) < 4 * error + 1e-5
    assert 4 * error < 0.15 * float(bound.mean())


def test_a_model_that_is_uniform_needs_log2_of_the_vocabulary_whatever_the_sampler():
    for z_config in (NO_LATENT, codes(), codes(head="additive", layers=1)):
        model = tiny_model(4, 2, 8, z_config)
        with torch.no_grad():
            for name, parameter in model.decoder.named_parameters():
                if name in ("head.weight", "head.bias", "pathway.out.weight", "pathway.code_table.weight"):
                    parameter.zero_()
        for steps in (1, 2):
            bits = in_bits(nll_bound(model, random_tokens(10, 4, 8), steps), 4)
            assert close(bits.value, 3, 1e-6)


def test_an_encoder_that_knows_nothing_pays_nothing():
    """Posterior = prior and a decoder deaf to z: the bound is that of the model without latent."""
    model = tiny_model(4, 2, V, dataclasses.replace(latent(), encoder_sees_mask=False))
    with torch.no_grad():
        model.encoder.head.weight.zero_()
        model.encoder.head.bias.zero_()
        for name, parameter in model.decoder.named_parameters():
            if "embed" in name:
                parameter.zero_()
    plain = tiny_model(4, 2, V)
    plain.load_state_dict({name: t for name, t in model.state_dict().items() if name in plain.state_dict()})
    x0 = random_tokens(6, 4, V)
    for samples in (1, 7):
        with_z = nll_bound(model, x0, 2, z="once", samples=samples, generator=seeded())
        torch.testing.assert_close(with_z, nll_bound(plain, x0, 2, generator=seeded()), atol=1e-5, rtol=1e-5)


def test_given_tokens_may_differ_by_row_whatever_the_chunk():
    model, x0 = tiny_model(4, 2, 3), random_tokens(9, 4, 3)
    fixed = torch.rand(9, 4, generator=seeded()) < 0.5
    at_once = nll_bound(model, x0, 1, fixed=fixed)
    torch.testing.assert_close(at_once, nll_bound(model, x0, 1, fixed=fixed, chunk=2), atol=1e-5, rtol=1e-5)
    assert bool((at_once[fixed.any(1)] < nll_bound(model, x0, 1)[fixed.any(1)]).any())


def test_orders_of_blocks_that_share_z_are_not_enumerated():
    with pytest.raises(InvalidInput, match="steps=2: expected 1 where z reaches later blocks"):
        enumerate_orders(tiny_model(4, 2, 3, z=latent(on_clean=True)), random_tokens(2, 4, 3), 2, z="once")


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("z", "draft"),
    [(NO_LATENT, 0), (NO_LATENT, 8), (codes(), 0), (codes(by_place=True), 0)],
    ids=["none", "draft", "codes", "places"],
)
def test_sums_over_what_is_revealed_are_those_over_orders(z, draft, steps):
    """24 orders of four tokens, or 32 steps from one set of known tokens to another."""
    config = dataclasses.replace(tiny_config(8, 4, 3, z, layers=2), draft=draft)
    model, rows = strengthened(VMD(config, seed=3).eval()), random_tokens(9, 8, 3, seed=2)
    exact, bound = random_order_nll(model, rows, steps, chunk=4)
    per_order = enumerate_orders(model, rows, steps)
    assert torch.allclose(exact, exact_nll(per_order), atol=1e-4)
    assert torch.allclose(bound, per_order.mean(0).sum(-1), atol=1e-4)
    assert bool((exact <= bound + 1e-6).all())
    if steps > 1:
        assert float((bound - exact).mean()) > 1e-3
    else:
        assert torch.equal(exact, bound)


def test_sums_over_orders_are_refused_where_there_are_none():
    rows = random_tokens(2, 4, 3)
    with pytest.raises(InvalidInput, match="a Gaussian latent: expected codes or none"):
        random_order_nll(tiny_model(4, 2, 3, latent()), rows, 1)
    long = tiny_model(9, 9, 3)
    with pytest.raises(InvalidInput, match="block_size=9: expected at most 8"):
        random_order_nll(long, random_tokens(2, 9, 3), 1)
