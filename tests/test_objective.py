import itertools
import math

import pytest
import torch

from helpers import (
    CODES,
    NO_LATENT,
    exact_denoiser,
    latent,
    learned_prior,
    random_law,
    random_tokens,
    strong_model,
    tiny_config,
    tiny_model,
)
from vmd.config import InvalidInput, ObjectiveConfig
from vmd.data import law
from vmd.data.synthetic import deterministic
from vmd.latent import Gaussian
from vmd.masking import Masks, all_masks, apply_mask, draw_masks, draw_steps
from vmd.objective import code_objective, exact_objective, objective, token_nll

LN10 = math.log(10)


def encoder_of(model):
    return model.encode if model.config.has_latent else None


def fixed_noise(model, rows: int, draws: int | None = None):
    """The same noise for every row, so that only masks are random."""
    if not model.config.has_latent:
        return None
    _, blocks, dim = model.latent_shape(1)
    eps = torch.randn(draws or 1, 1, blocks, dim, generator=torch.Generator().manual_seed(2)).expand(-1, rows, -1, -1)
    return eps if draws else eps[0]


@pytest.mark.parametrize(("length", "r"), [(4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("z_config", [NO_LATENT, latent("doubled")], ids=["none", "latent"])
@torch.no_grad()
def test_the_exact_objective_is_the_mean_of_the_sampled_one(generator, length, r, z_config):
    model, rows = tiny_model(length, r, z=z_config), 6000
    x0 = random_tokens(1, length, seed=3)
    noise = fixed_noise(model, 1, draws=1)
    exact = exact_objective(model.denoise, encoder_of(model), x0, r, 5, noise=noise, kl_weight=0.7)
    many = x0.expand(rows, -1)
    masks = draw_masks(many, r, generator=generator)
    loss = objective(model.denoise, encoder_of(model), many, masks, 5, noise=fixed_noise(model, rows), kl_weight=0.7)
    for sampled, expected in zip(loss, exact, strict=True):
        error = 4 * float(sampled.double().std()) / rows**0.5 + 1e-5
        assert abs(float(sampled.double().mean() - expected[0])) < error


@pytest.mark.parametrize(
    "z_config", [NO_LATENT, latent("single"), latent("doubled")], ids=["none", "latent-single", "latent-doubled"]
)
@torch.no_grad()
def test_the_exact_objective_is_the_sum_over_all_joint_masks(z_config):
    """Every combination of masks of two blocks with its own probability: what one pattern for both must equal."""
    r, length = 2, 4
    model = tiny_model(length, r, z=z_config)
    x0 = random_tokens(3, length, seed=3)
    noise = fixed_noise(model, 3)
    patterns, _ = all_masks(r)
    total = torch.zeros(3, dtype=torch.float64)
    for combination in itertools.product(patterns, repeat=2):
        counts = torch.tensor([int(p.sum()) for p in combination])
        probability = math.prod(1 / (r * math.comb(r, int(k))) for k in counts)
        masks = Masks(*[torch.cat(combination).expand(3, -1)] * 2, (r / counts).expand(3, -1))
        total += probability * objective(model.denoise, encoder_of(model), x0, masks, 5, noise=noise).total.double()
    exact = exact_objective(model.denoise, encoder_of(model), x0, r, 5, noise=None if noise is None else noise[None])
    torch.testing.assert_close(exact.total, total, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_exact_objective_averages_over_draws_of_z():
    model = tiny_model(4, 2, z=latent("doubled"))
    x0 = random_tokens(3, 4)
    noise = torch.randn(5, 3, 2, 3)
    singles = [exact_objective(model.denoise, model.encode, x0, 2, 5, noise=noise[i : i + 1]).total for i in range(5)]
    together = exact_objective(model.denoise, model.encode, x0, 2, 5, noise=noise).total
    torch.testing.assert_close(together, torch.stack(singles).mean(0))


@torch.no_grad()
def test_one_token_blocks_give_the_autoregressive_likelihood():
    model = tiny_model(5, 1)
    x0 = random_tokens(6, 5)
    by_hand = torch.zeros(6)
    for i in range(5):  # each conditional from its own prefix alone, whatever stands behind
        canvas = torch.cat([x0[:, :i], torch.full((6, 5 - i), model.mask_id)], dim=1)
        logits = model.predictor(6, cached=False).predict(canvas, i, None)
        by_hand -= logits[:, 0].log_softmax(-1)[torch.arange(6), x0[:, i]]
    masks = draw_masks(x0, 1)
    torch.testing.assert_close(objective(model.denoise, None, x0, masks, 5).total, by_hand, atol=1e-5, rtol=1e-5)
    exact = exact_objective(model.denoise, None, x0, 1, 5).total
    torch.testing.assert_close(exact.float(), by_hand, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "r"),
    [
        ("deterministic", 1),
        ("deterministic", 2),
        ("non-uniform", 2),
        ("dependence-0.5", 2),
        ("d1", 4),
        ("d1", 2),
        ("d2", 4),
        ("d2", 2),
        ("poker", 2),
        ("random", 1),
        ("random", 3),
    ],
)
def test_exact_conditionals_cost_the_entropy(name, r):
    known = random_law(3, 3) if name == "random" else law(name)
    loss = exact_objective(exact_denoiser(known, r), None, known.sequences, r, known.vocab_size)
    assert abs(float((known.probabilities * loss.total).sum()) - known.entropy) < 1e-5


def test_no_denoiser_costs_less_than_the_entropy_without_a_latent():
    """Eq. 2 is a bound: conditionals of any other law cost more."""
    truth, wrong = random_law(3, 3), random_law(3, 3, seed=1)
    loss = exact_objective(exact_denoiser(wrong, 3), None, truth.sequences, 3, 3)
    assert float((truth.probabilities * loss.total).sum()) > truth.entropy + 0.1


class IdealPosterior:
    """Knows k: draws it as z (as many times as there are blocks), at a KL that the test decides."""

    def __init__(self, k, kl):
        self.mean, self._kl = k.float().view(-1, 1, 1), kl

    def draw(self, noise):
        return self.mean + 0 * noise

    def kl(self, prior):
        assert torch.equal(prior.mean, torch.zeros_like(self.mean))
        return self._kl


def told_the_sequence(xt, x0, z):
    """p(x | z) of the deterministic law, where z is k."""
    sequences = deterministic().sequences[z[:, 0, 0].long()]
    return torch.nn.functional.one_hot(sequences, 10).double().log()


@pytest.mark.parametrize(
    ("kl_where", "expected"),
    [
        (lambda mask: torch.full((len(mask), 1), LN10), 1.5 * LN10),  # each of three masks has coefficient 1/2
        (lambda mask: LN10 * mask.all(-1, keepdim=True).double(), 0.5 * LN10),  # 1.151: k is in the revealed token
    ],
    ids=["always", "when-all-masked"],
)
def test_an_ideal_latent_costs_what_first_principles_say(kl_where, expected):
    known = deterministic()

    def encode(x0, mask, target):
        return IdealPosterior(x0[:, 0], kl_where(mask))

    noise = torch.randn(1, 10, 1, 1)
    loss = exact_objective(told_the_sequence, encode, known.sequences, 2, 10, noise=noise)
    assert float(loss.reconstruction.abs().max()) < 1e-6
    torch.testing.assert_close(loss.total, torch.full((10,), expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_papers_objective_is_no_bound():
    """With an ideal latent it falls to half of the entropy: 1.151 < 2.303 nats."""
    known = deterministic()

    def encode(x0, mask, target):
        return IdealPosterior(x0[:, 0], LN10 * mask.all(-1, keepdim=True).double())

    loss = exact_objective(told_the_sequence, encode, known.sequences, 2, 10, noise=torch.randn(1, 10, 1, 1))
    value = float((known.probabilities * loss.total).sum())
    assert abs(value - 1.151) < 1e-3
    assert value < known.entropy - 1


def unit_posterior(x0, mask, target):
    """KL = dim/2 to the standard normal prior, for two blocks."""
    return Gaussian(torch.ones(len(x0), 2, 4), torch.zeros(len(x0), 2, 4))


def uniform_denoiser(xt, x0, z):
    return torch.zeros(*x0.shape, 5)


def losses(weight, mask, **options):
    x0 = random_tokens(1, 4)
    masks = Masks(torch.tensor([mask]), torch.tensor([mask]), torch.tensor([weight]))
    loss = objective(uniform_denoiser, unit_posterior, x0, masks, 5, noise=torch.zeros(1, 2, 4), **options)
    return tuple(float(part) for part in loss)


def test_weights_multiply_reconstruction_and_kl_of_their_block():
    total, reconstruction, kl = losses([2.0, 0.5], [True, False, True, True], kl_weight=3.0)
    assert math.isclose(reconstruction, (2 * 1 + 0.5 * 2) * math.log(5), rel_tol=1e-6)
    assert math.isclose(kl, 2 * 2 + 0.5 * 2, rel_tol=1e-6)  # reported without the KL weight
    assert math.isclose(total, reconstruction + 3 * kl, rel_tol=1e-6)


def test_a_block_of_weight_zero_costs_no_kl_even_with_free_bits():
    for options in ({}, {"free_bits": 10.0}):
        total, reconstruction, kl = losses([0.0, 0.0], [False] * 4, **options)
        assert total == reconstruction == kl == 0


def test_free_bits_charge_at_least_so_much_per_block_and_report_the_true_kl():
    _, reconstruction, kl = losses([1.0, 1.0], [True] * 4)
    for free_bits, charged in ((0.0, 2 + 2), (1.5, 2 + 2), (3.0, 3 + 3)):
        total, _, reported = losses([1.0, 1.0], [True] * 4, free_bits=free_bits)
        assert math.isclose(total - reconstruction, charged, rel_tol=1e-5)
        assert reported == kl


@pytest.mark.parametrize(("free_bits", "pushed"), [(0.0, True), (1.0, True), (3.0, False)])
def test_free_bits_stop_the_push_on_small_kls_alone(free_bits, pushed):
    mean = torch.ones(1, 2, 4, requires_grad=True)
    masks = Masks(*[torch.ones(1, 4, dtype=torch.bool)] * 2, torch.ones(1, 2))
    loss = objective(
        uniform_denoiser,
        lambda x0, mask, target: Gaussian(mean, torch.zeros(1, 2, 4)),
        random_tokens(1, 4),
        masks,
        5,
        noise=torch.zeros(1, 2, 4),
        free_bits=free_bits,
    )
    loss.total.sum().backward()
    assert (mean.grad.abs().sum() > 0) == pushed


def test_only_masked_tokens_cost():
    def denoise(xt, x0, z):  # certain of a wrong token where nothing is masked
        logits = torch.zeros(*x0.shape, 5)
        wrong = torch.nn.functional.one_hot((x0 + 1) % 5, 5) * 50.0
        return torch.where((xt < 5).unsqueeze(-1), wrong, logits)

    x0 = random_tokens(8, 4)
    masks = draw_masks(x0, 2, generator=torch.Generator().manual_seed(0))
    loss = objective(denoise, None, x0, masks, 5)
    expected = (masks.mask.view(8, 2, 2).sum(-1) * masks.weight).sum(-1) * math.log(5)
    torch.testing.assert_close(loss.total, expected)


def test_the_denoiser_is_shown_masked_tokens_as_mask_and_the_encoder_the_truth():
    x0 = random_tokens(4, 4)
    masks = draw_masks(x0, 2, generator=torch.Generator().manual_seed(0))

    def denoise(xt, clean, z):
        assert torch.equal(xt, apply_mask(x0, masks.mask, 5))
        assert torch.equal(clean, x0)
        assert torch.equal(z, torch.full((4, 2, 4), 3.0))  # mean 1 + std 1 * noise 2
        return torch.zeros(4, 4, 5)

    def encode(clean, mask, target):
        assert torch.equal(clean, x0)
        assert torch.equal(mask, masks.mask)
        return unit_posterior(clean, mask, target)

    objective(denoise, encode, x0, masks, 5, noise=torch.full((4, 2, 4), 2.0))


def test_token_nll_is_minus_the_log_probability(generator):
    logits, x0 = torch.randn(2, 3, 5, generator=generator), random_tokens(2, 3)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x0.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(token_nll(logits, x0), expected)


def test_a_models_forward_is_the_objective_of_its_networks():
    model = tiny_model(4, 2, z=latent())
    x0 = random_tokens(4, 4)
    masks, noise = draw_masks(x0, 2), torch.randn(4, 2, 3)
    with torch.no_grad():
        expected = objective(model.denoise, model.encode, x0, masks, 5, noise=noise, kl_weight=0.3, free_bits=0.2)
        for a, b in zip(model(x0, masks, noise, 0.3, 0.2), expected, strict=True):
            assert torch.equal(a, b)


# Steps of a sampler: what is scored, and what the parts see


def step_of(rows: int, whole: bool, steps: tuple[int, ...] = (2,)):
    """x0 of two blocks of three tokens, and masks that hide tokens which are not scored yet."""
    x0 = random_tokens(rows, 6)
    return x0, draw_steps(x0, 3, steps, whole=whole, generator=torch.Generator().manual_seed(0))


def single_steps(masks: Masks) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(mask, target) of each step."""
    if masks.mask.dim() == 2:
        return [(masks.mask, masks.target)]
    return [(masks.mask[:, j], masks.target[:, j]) for j in range(masks.mask.shape[1])]


both_forms = pytest.mark.parametrize("whole", [False, True], ids=["one-step", "all-steps"])


def test_of_the_masked_tokens_the_targets_alone_cost():
    x0, masks = step_of(8, whole=False)
    assert (masks.mask & ~masks.target).any()
    loss = objective(uniform_denoiser, None, x0, masks, 5)
    expected = (masks.target.view(8, 2, 3).sum(-1) * masks.weight).sum(-1) * math.log(5)
    torch.testing.assert_close(loss.total, expected)


@both_forms
def test_encoder_and_prior_are_shown_the_step_that_draws_z(whole):
    """One step: its own mask and targets. All steps of one z: the first one's mask, and everything they will score."""
    x0, masks = step_of(4, whole)
    first = single_steps(masks)[0][0]
    told = masks.target.any(1) if whole else masks.target

    def encode(clean, mask, target):
        assert torch.equal(clean, x0)
        assert torch.equal(mask, first)
        assert torch.equal(target, told)
        return unit_posterior(clean, mask, target)

    def prior(xt, clean):
        assert torch.equal(xt, apply_mask(x0, first, 5))
        assert torch.equal(clean, x0)
        return unit_posterior(clean, None, None)

    loss = objective(uniform_denoiser, encode, x0, masks, 5, prior=prior, noise=torch.zeros(4, 2, 4))
    assert (loss.kl == 0).all()  # to the prior that was given, not to N(0, I)


@torch.no_grad()
def test_steps_that_share_z_add_up_their_targets_and_pay_its_kl_once():
    model = strong_model(6, 3, 5, learned_prior())
    x0, masks = step_of(4, whole=True, steps=(3,))
    noise = torch.randn(4, 2, 2)
    loss = objective(model.denoise, model.encode, x0, masks, 5, prior=model.gaussian_prior, noise=noise)
    blank = torch.full_like(x0, 5)
    posterior, before = model.encode(x0, torch.ones_like(x0, dtype=torch.bool)), model.gaussian_prior(blank, x0)
    torch.testing.assert_close(loss.kl, posterior.kl(before).sum(-1))
    by_hand = torch.zeros(4)
    for mask, target in single_steps(masks):
        by_hand += (token_nll(model.denoise(apply_mask(x0, mask, 5), x0, posterior.draw(noise)), x0) * target).sum(-1)
    torch.testing.assert_close(loss.reconstruction, by_hand)
    torch.testing.assert_close(loss.total, loss.reconstruction + loss.kl)


# Importance weights


@both_forms
@pytest.mark.parametrize("samples", [1, 3])
@torch.no_grad()
def test_importance_weighted_totals_are_minus_the_log_of_the_mean_weight(whole, samples):
    model = strong_model(6, 3, 5, learned_prior())
    x0, masks = step_of(4, whole)
    noise = torch.randn(samples, 4, 2, 2)
    loss = objective(model.denoise, model.encode, x0, masks, 5, prior=model.gaussian_prior, noise=noise)
    first, told = single_steps(masks)[0][0], masks.target.any(1) if whole else masks.target
    posterior, before = model.encode(x0, first, told), model.gaussian_prior(apply_mask(x0, first, 5), x0)
    costs, weights = [], []  # -log p(targets | z), and p(targets | z) p(z) / q(z), of every draw and block
    for eps in noise:
        z = posterior.draw(eps)
        nll = torch.zeros(4, 2, dtype=torch.float64)
        for mask, target in single_steps(masks):
            per_token = token_nll(model.denoise(apply_mask(x0, mask, 5), x0, z), x0) * target
            nll += per_token.view(4, 2, 3).sum(-1)
        costs.append(nll)
        weights.append((before.log_prob(z) - posterior.log_prob(z) - nll).exp())
    costs, weights = torch.stack(costs), torch.stack(weights)
    reweighted = (weights / weights.sum(0) * costs).sum(0)
    for part, expected in ((loss.total, -weights.mean(0).log()), (loss.reconstruction, reweighted)):
        torch.testing.assert_close(part.double(), (expected * masks.weight).sum(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(loss.total, loss.reconstruction + loss.kl, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_one_importance_sample_has_the_reconstruction_of_the_plain_objective():
    model = strong_model(6, 3, 5, latent())
    x0, masks = step_of(4, whole=False)
    noise = torch.randn(4, 2, 3)
    one, plain = (objective(model.denoise, model.encode, x0, masks, 5, noise=n) for n in (noise[None], noise))
    torch.testing.assert_close(one.reconstruction, plain.reconstruction)


# Codes


@pytest.mark.parametrize("z_config", CODES.values(), ids=CODES)
@both_forms
@torch.no_grad()
def test_the_objective_of_codes_sums_over_them_and_its_parts_are_those_of_their_posterior(z_config, whole):
    model = strong_model(6, 3, 5, z_config)
    x0, masks = step_of(4, whole)
    loss = code_objective(model.codes, x0, masks, 5)
    first = single_steps(masks)[0][0]
    prior = model.prior(apply_mask(x0, first, 5), x0).log_probs.double().exp()  # (B, blocks, K)
    likelihood = torch.ones_like(prior)
    for code in range(z_config.codes):
        for mask, target in single_steps(masks):
            z = torch.full((4, 2, 1), float(code))
            nll = token_nll(model.denoise(apply_mask(x0, mask, 5), x0, z), x0).double() * target
            likelihood[..., code] *= nll.view(4, 2, 3).sum(-1).neg().exp()
    evidence = (prior * likelihood).sum(-1)
    posterior = prior * likelihood / evidence.unsqueeze(-1)
    kl = (posterior * (posterior / prior).log()).sum(-1)
    for part, expected in ((loss.total, -evidence.log()), (loss.kl, kl), (loss.reconstruction, -evidence.log() - kl)):
        torch.testing.assert_close(part.double(), (expected * masks.weight).sum(-1), atol=1e-4, rtol=1e-4)


@both_forms
@torch.no_grad()
def test_a_block_without_targets_costs_nothing_under_codes_either(whole):
    model = strong_model(4, 2, 5, CODES["bilinear"])
    x0, fixed = random_tokens(6, 4), torch.tensor([True, True, False, False])
    masks = draw_steps(x0, 2, (2,), whole=whole, fixed=fixed, generator=torch.Generator().manual_seed(0))
    loss = code_objective(model.codes, x0, masks, 5)
    second_alone = masks._replace(weight=masks.weight * torch.tensor([0.0, 1.0]))
    assert (loss.total > 0).all()
    for a, b in zip(loss, code_objective(model.codes, x0, second_alone, 5), strict=True):
        assert torch.equal(a, b)


def test_the_forward_of_a_model_with_codes_is_their_objective():
    model = strong_model(4, 2, 5, CODES["additive"])
    x0 = random_tokens(4, 4)
    masks = draw_masks(x0, 2)
    for a, b in zip(model(x0, masks, None), code_objective(model.codes, x0, masks, 5), strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_the_forward_of_a_model_with_a_learned_prior_uses_it():
    model = strong_model(4, 2, 5, learned_prior())
    x0 = random_tokens(4, 4)
    masks, noise = draw_steps(x0, 2, (1, 2)), torch.randn(3, 4, 2, 2)
    expected = objective(model.denoise, model.encode, x0, masks, 5, prior=model.gaussian_prior, noise=noise)
    normal = objective(model.denoise, model.encode, x0, masks, 5, noise=noise)
    for a, b in zip(model(x0, masks, noise), expected, strict=True):
        assert torch.equal(a, b)
    assert not torch.allclose(expected.total, normal.total)


# Score entropy (SEDD, absorbing states)


def test_score_entropy_is_never_below_the_cross_entropy_and_meets_it_where_outputs_are_normalised():
    logits, x0 = 3 * torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    exact, bound = token_nll(logits, x0), token_nll(logits, x0, score_entropy=True)
    assert bool((bound >= exact - 1e-4).all())
    assert bool((bound > exact + 0.1).any())
    torch.testing.assert_close(token_nll(logits.log_softmax(-1), x0, score_entropy=True), exact)


def test_the_best_scores_are_the_probabilities():
    """The gradient of the expected score entropy is e^f - p: it ends at normalised outputs."""
    p = torch.tensor([0.5, 0.3, 0.2])
    f = p.log().requires_grad_()
    expected = sum(share * token_nll(f.view(1, 1, 3), torch.tensor([[v]]), True).sum() for v, share in enumerate(p))
    (gradient,) = torch.autograd.grad(expected, f)
    torch.testing.assert_close(gradient, torch.zeros(3), atol=1e-6, rtol=0)


def test_a_model_is_trained_on_score_entropy():
    model = tiny_model(4, 4, 5)
    x0 = random_tokens(6, 4, 5)
    masks = draw_masks(x0, 4, generator=torch.Generator().manual_seed(0))
    plain, score = (model(x0, masks, None, score_entropy=flag).total for flag in (False, True))
    assert bool((score > plain).all())


# Focal weights


@pytest.mark.parametrize("focal", [1.0, 2.5])
@both_forms
@torch.no_grad()
def test_with_focal_a_token_of_probability_p_weighs_one_minus_p_to_its_power(focal, whole):
    model = strong_model(6, 3, 5)
    x0, masks = step_of(4, whole)
    by_hand = torch.zeros(4, 2, dtype=torch.float64)
    for mask, target in single_steps(masks):
        p = model.denoise(apply_mask(x0, mask, 5), x0).double().softmax(-1).gather(-1, x0.unsqueeze(-1)).squeeze(-1)
        by_hand += (-((1 - p) ** focal) * p.log() * target).view(4, 2, 3).sum(-1)
    loss = objective(model.denoise, None, x0, masks, 5, focal=focal)
    torch.testing.assert_close(loss.total.double(), (by_hand * masks.weight).sum(-1), atol=1e-5, rtol=1e-5)
    assert (loss.total < objective(model.denoise, None, x0, masks, 5).total).all()
    for a, b in zip(model(x0, masks, None, focal=focal), loss, strict=True):
        assert torch.equal(a, b)


def test_without_focal_nothing_is_weighed_bit_for_bit():
    model = strong_model(6, 3, 5)
    x0, masks = step_of(4, whole=False)
    assert torch.equal(objective(model.denoise, None, x0, masks, 5, focal=0.0).total, model(x0, masks, None).total)


@pytest.mark.parametrize("focal", [1.0, 1.5, 3.0])
def test_focal_gradients_are_finite_and_those_of_the_formula(focal):
    """d/dp of -(1 - p)^f log p by hand, for tokens that are sure, likely, unlikely and hopeless."""
    margins = torch.tensor([1e4, 3.0, 0.0, -3.0, -1e4])  # logit of the truth above the others
    logits = torch.zeros(1, 5, 4)
    logits[0, :, 2] = margins
    logits.requires_grad_()
    x0, masks = torch.full((1, 5), 2), Masks(*[torch.ones(1, 5, dtype=torch.bool)] * 2, torch.ones(1, 1))
    objective(lambda xt, clean, z: logits, None, x0, masks, 4, focal=focal).total.sum().backward()
    assert logits.grad.isfinite().all()
    probabilities = logits.detach().double().softmax(-1)[0]
    p = probabilities[:, 2]
    by_p = -((1 - p) ** focal) / p + focal * (1 - p) ** (focal - 1) * p.log()
    step = p.unsqueeze(-1) * (torch.eye(4, dtype=torch.float64)[2] - probabilities)  # dp / dlogits
    torch.testing.assert_close(logits.grad[0, 1:4].double(), (by_p.unsqueeze(-1) * step)[1:4], atol=1e-5, rtol=1e-4)
    assert logits.grad[0, 0].abs().max() < 1e-6  # nothing to learn where it is sure
    torch.testing.assert_close(logits.grad[0, 4], torch.tensor([1.0, 1.0, -3.0, 1.0]) / 3)  # of -log p alone, at p = 0


def test_tokens_that_are_no_targets_have_no_focal_gradient():
    logits = torch.zeros(4, 6, 5, requires_grad=True)
    x0, masks = step_of(4, whole=False)
    objective(lambda xt, clean, z: logits, None, x0, masks, 5, focal=1.0).total.sum().backward()
    weighed = masks.target & (masks.weight > 0).repeat_interleave(3, dim=1)
    assert torch.equal(logits.grad.abs().sum(-1) > 0, weighed)


@pytest.mark.parametrize("focal", [0.5, -1.0, 0.999, 101.0, math.nan])
def test_focal_powers_with_infinite_gradients_are_refused(focal):
    with pytest.raises(InvalidInput, match="focal"):
        ObjectiveConfig(focal=focal)


@pytest.mark.parametrize("z_config", [latent(), CODES["bilinear"]], ids=["gaussian", "codes"])
def test_focal_weights_are_for_models_without_a_latent(z_config):
    chosen = ObjectiveConfig(focal=1.0)
    chosen.check(tiny_config())
    with pytest.raises(InvalidInput, match="focal"):
        chosen.check(tiny_config(z=z_config))
