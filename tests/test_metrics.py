import math

import pytest
import torch

from helpers import (
    NO_LATENT,
    all_sequences,
    chi_square_p,
    close,
    latent,
    random_law,
    sequence_counts,
    tiny_config,
    tiny_model,
)
from vmd.data import Law, law
from vmd.latent import standard_normal
from vmd.metrics import FLOOR, accuracy, empirical, kl_to, one_step_probabilities, sequence_ids, share_error

THREE = Law(
    "three", torch.tensor([[2, 0], [0, 1], [1, 1]]), torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64), vocab_size=3
)
TOKENS = torch.tensor([[0, 1], [0, 1], [2, 0], [2, 2], [1, 1], [0, 0], [0, 1], [1, 0]])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_sequence_ids_are_numbers_in_base_v():
    assert sequence_ids(torch.tensor([[0, 0, 1], [1, 2, 0]]), 3).tolist() == [1, 15]
    assert len(sequence_ids(all_sequences(3, 4), 4).unique()) == 64


def test_shares_of_the_support_are_counted():
    """The support is not sorted; samples outside count for nobody, but count."""
    assert empirical(TOKENS, THREE).tolist() == [1 / 8, 3 / 8, 1 / 8]


def test_accuracy_is_the_percentage_inside_the_support():
    assert accuracy(TOKENS, THREE) == 62.5
    assert accuracy(THREE.sequences, THREE) == 100
    assert accuracy(torch.tensor([[2, 2]]), THREE) == 0


def test_tokens_outside_the_vocabulary_of_the_law_are_wrong():
    """A model may have more symbols than the law: (0, 12) is not (1, 2)."""
    assert accuracy(torch.tensor([[0, 12], [1, 2]]), law("deterministic")) == 50


def test_kl_is_computed_over_the_support_without_renormalising():
    q = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    expected = 0.5 * math.log(0.5 / 0.1) + 0.25 * math.log(0.25 / 0.2) + 0.25 * math.log(0.25 / 0.3)
    assert close(kl_to(THREE, q), expected)


def test_sequences_never_drawn_count_with_the_floor():
    assert FLOOR == 1e-8
    expected = 0.5 * math.log(0.5 / 0.5) + 0.5 * math.log(0.25 / 1e-8)
    assert close(kl_to(THREE, torch.tensor([0.5, 0.0, 0.0])), expected)


def test_kl_to_itself_is_zero():
    for known in (THREE, law("non-uniform"), law("d2")):
        assert abs(kl_to(known, known.probabilities)) < 1e-12


@pytest.mark.parametrize("name", ["deterministic", "non-uniform", "d1", "d2", "dependence-0.7"])
def test_kl_of_the_product_of_marginals_is_the_total_correlation(name):
    known = law(name)
    product = known.marginals()[torch.arange(known.length), known.sequences].prod(-1)
    assert close(kl_to(known, product), known.total_correlation())


def uniform_model(length: int, r: int, vocab_size: int, z_config=NO_LATENT):
    model = tiny_model(length, r, vocab_size, z_config)
    with torch.no_grad():
        model.decoder.head.weight.zero_()
        model.decoder.head.bias.zero_()
    return model


@pytest.mark.parametrize(("length", "r"), [(2, 2), (2, 1)])
@pytest.mark.parametrize("z_config", [NO_LATENT, latent(), latent(on_clean=True)], ids=["none", "latent", "clean"])
def test_a_uniform_model_gives_every_sequence_the_same_probability(length, r, z_config):
    known = law("deterministic")
    probabilities = one_step_probabilities(uniform_model(length, r, 10, z_config), known.sequences, 50)
    torch.testing.assert_close(probabilities, torch.full((10,), 0.01, dtype=torch.float64))
    assert abs(kl_to(known, probabilities) - math.log(10)) < 1e-6


@pytest.mark.parametrize("z_config", [NO_LATENT, latent()], ids=["none", "latent"])
def test_probabilities_of_one_block_sum_to_one(z_config):
    model = tiny_model(3, 3, 3, z_config)
    probabilities = one_step_probabilities(model, all_sequences(3, 3), 40, generator=seeded())
    assert close(float(probabilities.sum()), 1, 1e-6)
    assert (probabilities > 0).all()


@pytest.mark.parametrize(
    ("z_config", "tolerance"),
    [(NO_LATENT, 1e-6), (latent(), 0.01), (latent(on_clean=True), 0.01)],
    ids=["none", "latent", "clean"],
)
def test_probabilities_of_two_blocks_sum_to_one(z_config, tolerance):
    model = tiny_model(2, 1, 3, z_config)
    probabilities = one_step_probabilities(model, all_sequences(2, 3), 2000, generator=seeded())
    assert abs(float(probabilities.sum()) - 1) < tolerance


@torch.no_grad()
def test_without_a_latent_one_block_is_the_product_of_the_models_marginals():
    model, sequences = tiny_model(3, 3, 3), all_sequences(3, 3)
    marginals = model.denoise(torch.full((1, 3), 3), torch.zeros(1, 3, dtype=torch.long)).double().softmax(-1)[0]
    expected = marginals[torch.arange(3), sequences].prod(-1)
    torch.testing.assert_close(one_step_probabilities(model, sequences), expected)


@torch.no_grad()
def test_without_a_latent_two_blocks_are_the_product_given_the_true_prefix():
    model, sequences = tiny_model(4, 2, 2), all_sequences(4, 2)
    expected = torch.ones(16, dtype=torch.float64)
    for block in range(2):
        canvas = torch.full((16, 4), 2)
        canvas[:, : 2 * block] = sequences[:, : 2 * block]
        p = model.predictor(16, cached=False).predict(canvas, block, None).double().softmax(-1)
        expected *= p.gather(-1, sequences[:, 2 * block : 2 * block + 2, None]).prod(1)[:, 0]
    torch.testing.assert_close(one_step_probabilities(model, sequences), expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_without_a_latent_chunks_change_nothing(chunk):
    for r in (2, 4):
        model, sequences = tiny_model(4, r, 2), all_sequences(4, 2)
        whole = one_step_probabilities(model, sequences)
        torch.testing.assert_close(one_step_probabilities(model, sequences, chunk=chunk), whole)


@pytest.mark.parametrize("chunk", [16, 48, 1000])
@pytest.mark.parametrize("r", [2, 4])
def test_every_draw_of_z_counts_once_whatever_the_chunk(r, chunk):
    model, sequences = tiny_model(4, r, 2, latent()), all_sequences(4, 2)
    assert abs(float(one_step_probabilities(model, sequences, 101, generator=seeded(), chunk=chunk).sum()) - 1) < 0.1


def amplified(r: int, z_config):
    """A model whose predictions depend strongly on z."""
    model = tiny_model(4, r, 2, z_config)
    with torch.no_grad():
        model.decoder.head.weight.mul_(8)
        model.decoder.pathway.scale.mul_(10)
    return model


@pytest.mark.parametrize("z_config", [latent(), latent(on_clean=True)], ids=["latent", "clean"])
@pytest.mark.parametrize("r", [4, 2])
def test_probabilities_are_the_frequencies_of_one_step_samples(r, z_config):
    model, known = amplified(r, z_config), random_law(4, 2)
    probabilities = one_step_probabilities(model, known.sequences, 3000, generator=seeded())
    tokens = model.sample(5000, steps=1, generator=seeded(1)).tokens
    assert chi_square_p(sequence_counts(tokens, known), probabilities / probabilities.sum()) > 1e-4


class SignOfZ:
    """Two blocks of one token. Block b says the sign of z^b or, where z enters the clean stream, both that of z^1."""

    mask_id, device = 2, torch.device("cpu")

    def __init__(self, on_clean: bool):
        self.config = tiny_config(2, 1, 2, latent(on_clean=on_clean, dim=1))

    def latent_shape(self, batch: int):
        return (batch, 2, 1)

    def gaussian_prior(self, xt, x0):
        return standard_normal(torch.zeros(len(xt), 2, 1))

    def denoise(self, xt, x0, z):
        signs = (z[..., 0] > 0).long()
        said = signs[:, :1].expand(-1, 2) if self.config.latent.on_clean else signs
        return 60.0 * torch.nn.functional.one_hot(said, 2)


@pytest.mark.parametrize(("on_clean", "expected"), [(False, [0.25] * 4), (True, [0.5, 0, 0, 0.5])])
def test_blocks_that_share_a_latent_are_integrated_jointly(on_clean, expected):
    probabilities = one_step_probabilities(SignOfZ(on_clean), all_sequences(2, 2), 10_000, generator=seeded())
    torch.testing.assert_close(probabilities, torch.tensor(expected, dtype=torch.float64), atol=0.02, rtol=0)


@torch.no_grad()
def test_a_latent_correlates_the_tokens_of_a_block():
    """The probability is the mean over z of a product, not the product of means."""
    model, sequences = amplified(4, latent()), all_sequences(4, 2)
    p = one_step_probabilities(model, sequences, 5000, generator=seeded())
    marginals = torch.stack([(p * sequences[:, i]).sum() for i in range(4)])
    product = torch.where(sequences == 1, marginals, 1 - marginals).prod(-1)
    assert float((p * (p / product).log()).sum()) > 0.01


def test_samples_of_a_law_have_little_kl_to_it():
    known = law("dependence-0.7")
    assert kl_to(known, empirical(known.draw(100_000, generator=seeded()), known)) < 0.01


def test_the_kl_is_never_below_minus_log_accuracy():
    """KL >= -ln(accuracy), a check on every honest row of a table."""
    model, known = tiny_model(2, 2, 10, latent()), law("deterministic")
    tokens = model.sample(20_000, generator=seeded()).tokens
    q = empirical(tokens, known)
    assert kl_to(known, q) >= -math.log(accuracy(tokens, known) / 100)


@pytest.mark.parametrize("count", [20, 1_000])
def test_the_error_of_a_share_is_the_binomial_one_and_never_zero(count):
    assert share_error(0.5, count) == pytest.approx((0.25 / (count + 4)) ** 0.5)
    assert 0 < share_error(0.0, count) == pytest.approx(share_error(1.0, count))
    assert share_error(0.0, count) < share_error(0.5, count)
