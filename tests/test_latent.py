import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import chi_square_p
from vmd.latent import Categorical, Gaussian, standard_normal


def gaussian(*shape: int, seed: int = 0) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    mean, log_std = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return Gaussian(mean, 0.5 * log_std)


def test_kl_to_itself_is_zero_and_to_another_is_positive():
    q, p = gaussian(4, 3), gaussian(4, 3, seed=1)
    torch.testing.assert_close(q.kl(q), torch.zeros(4, dtype=torch.float64))
    assert (q.kl(p) > 0).all()


def test_kl_equals_torch_distributions_summed_over_dimensions():
    q, p = gaussian(4, 3), gaussian(4, 3, seed=1)
    normals = [torch.distributions.Normal(g.mean, g.log_std.exp()) for g in (q, p)]
    torch.testing.assert_close(q.kl(p), torch.distributions.kl_divergence(*normals).sum(-1))


def test_kl_is_the_expected_ratio_of_log_densities(generator):
    q, p = gaussian(3), gaussian(3, seed=1)
    z = q.draw(torch.randn(100_000, 3, generator=generator, dtype=torch.float64))
    ratio = q.log_prob(z) - p.log_prob(z)
    assert abs(float(ratio.mean() - q.kl(p))) < 4 * float(ratio.std()) / math.sqrt(len(z))


def test_log_prob_equals_torch_distributions():
    q, z = gaussian(4, 3), torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(q.log_prob(z), torch.distributions.Normal(q.mean, q.log_std.exp()).log_prob(z).sum(-1))


def test_draws_have_the_mean_and_spread_of_the_gaussian(generator):
    q = gaussian(3)
    z = q.draw(torch.randn(100_000, 3, generator=generator, dtype=torch.float64))
    torch.testing.assert_close(z.mean(0), q.mean, atol=0.03, rtol=0)
    torch.testing.assert_close(z.std(0), q.log_std.exp(), atol=0, rtol=0.03)


def test_draws_are_reparameterised():
    mean, log_std = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    noise = torch.tensor([2.0, -3.0])
    Gaussian(mean, log_std).draw(noise).sum().backward()
    assert mean.grad.tolist() == [1, 1]
    assert log_std.grad.tolist() == [2, -3]


def test_the_prior_is_standard_normal_of_the_given_shape():
    prior = standard_normal(torch.full((2, 3), 7.0))
    noise = torch.randn(2, 3)
    assert torch.equal(prior.draw(noise), noise)
    assert prior.kl(Gaussian(torch.zeros(2, 3), torch.zeros(2, 3))).tolist() == [0, 0]


def test_codes_are_drawn_by_the_probabilities_of_their_own_row(generator):
    logits = torch.tensor([[0.0, 1.0, -2.0, 2.0], [3.0, -1.0, 0.5, 0.0]])
    drawn = Categorical(logits.log_softmax(-1).expand(20_000, -1, -1)).draw(torch.randn(20_000, 2, 1, generator=generator))
    assert drawn.shape == (20_000, 2, 1)
    assert drawn.dtype == torch.float32
    for row in range(2):
        counts = torch.bincount(drawn[:, row, 0].long(), minlength=4)
        assert chi_square_p(counts, logits[row].double().softmax(-1)) > 1e-4


@given(st.lists(st.booleans(), min_size=2, max_size=6).filter(any), st.floats(-45, 45))
def test_codes_of_probability_zero_are_never_drawn(possible, noise):
    """However far out the noise: its uniform may round to 0 or to 1."""
    log_probs = torch.where(torch.tensor(possible), torch.linspace(-1, 1, len(possible)), -torch.inf).log_softmax(-1)
    code = Categorical(log_probs).draw(torch.tensor([noise]))
    assert possible[int(code)]


def test_more_noise_draws_a_later_code():
    log_probs = torch.tensor([0.25, 0.5, 0.25]).log()
    noise = torch.linspace(-4, 4, 101)
    drawn = Categorical(log_probs.expand(101, -1)).draw(noise.unsqueeze(-1))[:, 0]
    assert torch.equal(drawn, (noise > -0.6745).float() + (noise > 0.6745))
