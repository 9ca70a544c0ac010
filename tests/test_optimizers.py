import math

import pytest
import torch
from safetensors.torch import load_file

from helpers import codes, latent, learned_prior, random_tokens, tiny_config
from vmd.config import LatentConfig, RunConfig, TrainingConfig, override_all
from vmd.data import ArrayData
from vmd.data.synthetic import d1
from vmd.ensemble import Ensemble
from vmd.masking import draw_masks
from vmd.model import VMD
from vmd.optimizers import Muon, make_optimizer, orthogonalize
from vmd.step import Batch, clip_gradients, mean_loss
from vmd.training import train

SHAPES = {"tall": (20, 6), "wide": (6, 20), "square": (12, 12), "row": (1, 9)}
LATENTS = {
    "none": LatentConfig(kind="none"),
    "gaussian": latent("doubled", on_clean=True),
    "learned-prior": learned_prior(),
    "bilinear": codes(),
    "additive-layer": codes(head="additive", layers=1),
}
kinds = pytest.mark.parametrize("z", LATENTS.values(), ids=LATENTS.keys())


def known_factors(a: int, b: int, count: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U (n, a, k), singular values (n, k) within a factor of 50 and V^T (n, k, b)."""
    generator = torch.Generator().manual_seed(a * 100 + b)
    u, _, vt = torch.linalg.svd(torch.randn(count, a, b, generator=generator), full_matrices=False)
    return u, 0.02 + 0.98 * torch.rand(count, min(a, b), generator=generator), vt


def known_matrices(a: int, b: int) -> torch.Tensor:
    u, s, vt = known_factors(a, b)
    return u * s.unsqueeze(1) @ vt


# Orthogonal matrices


@pytest.mark.parametrize(("a", "b"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_singular_values_come_near_one_and_singular_vectors_stay(a, b, scale):
    u, _, vt = known_factors(a, b)
    turned = orthogonalize(scale * known_matrices(a, b))
    assert turned.shape == (5, a, b)
    values = torch.linalg.svdvals(turned)
    assert values.min() > 0.5
    assert values.max() < 1.5
    inside = u.mT @ turned @ vt.mT
    torch.testing.assert_close(inside, torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1)), atol=1e-3, rtol=0)
    assert (inside.diagonal(dim1=-2, dim2=-1) > 0.5).all()


@pytest.mark.parametrize(("a", "b"), SHAPES.values(), ids=SHAPES.keys())
def test_a_batch_is_turned_as_each_of_its_matrices_alone(a, b):
    matrices = known_matrices(a, b)
    alone = torch.cat([orthogonalize(matrix.unsqueeze(0)) for matrix in matrices])
    torch.testing.assert_close(orthogonalize(matrices), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("a", "b"), SHAPES.values(), ids=SHAPES.keys())
def test_matrices_of_low_rank_stay_finite_and_of_their_rank(a, b):
    generator = torch.Generator().manual_seed(0)
    rank_one = torch.randn(3, a, 1, generator=generator) @ torch.randn(3, 1, b, generator=generator)
    values = torch.linalg.svdvals(orthogonalize(rank_one))
    assert ((values[:, 0] > 0.5) & (values[:, 0] < 1.5)).all()
    assert (values[:, 1:] < 1e-2).all()
    assert torch.equal(orthogonalize(torch.zeros(2, a, b)), torch.zeros(2, a, b))


# Muon


def turned_exactly(gradient: torch.Tensor) -> torch.Tensor:
    """Five times the odd quintic on the singular values, in float64."""
    u, s, vt = torch.linalg.svd(gradient.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


def test_two_steps_are_those_of_a_plain_reference():
    """Momentum 0.95 with Nesterov's look ahead, every square of qkv and modulation on its own, decoupled decay."""
    lr, decay, d = 0.03, 0.2, 8
    squares = {"qkv": 3, "attention_out": 1, "mlp_in": 1, "mlp_out": 1, "modulation": 6}
    shapes = {"qkv": (24, 8), "attention_out": (8, 8), "mlp_in": (32, 8), "mlp_out": (8, 32), "modulation": (48, 8)}
    generator = torch.Generator().manual_seed(0)
    named = [(f"blocks.0.{name}.weight", torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    expected = {name: p.clone().double() for name, p in named}
    velocity = {name: torch.zeros_like(p).double() for name, p in named}
    optimizer = Muon(named, lr, decay)
    for _ in range(2):
        for name, p in named:
            p.grad = torch.randn(p.shape, generator=generator)
            velocity[name] = 0.95 * velocity[name] + 0.05 * p.grad.double()
            ahead = 0.95 * velocity[name] + 0.05 * p.grad.double()
            parts = [turned_exactly(part) for part in ahead.chunk(squares[name.split(".")[2]])]
            assert len(parts) == 1 or parts[0].shape == (d, d)
            update = torch.cat(parts) * 0.2 * math.sqrt(max(parts[0].shape))
            expected[name] = (1 - lr * decay) * expected[name] - lr * update
        optimizer.step()
    for name, p in named:
        torch.testing.assert_close(p.double(), expected[name], atol=1e-5, rtol=0)


def test_a_parameter_without_gradient_stays_as_it_is():
    p = torch.ones(4, 4)
    optimizer = Muon([("mlp_in.weight", p)], 0.1, 0.5)
    optimizer.step()
    assert torch.equal(p, torch.ones(4, 4))


def test_an_update_has_the_size_of_adams():
    """Root mean square 0.2 times the learning rate, whatever the gradient's scale."""
    for name, shape in {"mlp_in.weight": (64, 16), "qkv.weight": (48, 16), "attention_out.weight": (16, 16)}.items():
        for scale in (1e-3, 1e3):
            p = torch.zeros(shape)
            p.grad = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
            Muon([(name, p)], 1.0, 0.0).step()
            assert 0.1 < p.square().mean().sqrt() < 0.3


@kinds
def test_muon_owns_the_matrices_of_the_layers_and_adamw_all_the_rest(z):
    model = VMD(tiny_config(4, 2, z=z))
    optimizer = make_optimizer(model, TrainingConfig(optimizer="muon", weight_decay=0.5))
    adam, muon = optimizer.parts
    assert isinstance(adam, torch.optim.AdamW)
    assert isinstance(muon, Muon)
    owned = [id(p) for part in optimizer.parts for group in part.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
    turned = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in turned}
    layers = {name for name, p in model.named_parameters() if ".blocks." in name and p.dim() == 2}
    assert names == layers | ({"decoder.pathway.final_modulation.weight"} if z.kind == "gaussian" else set())
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for p in model.parameters() if p.dim() >= 2}


@kinds
def test_every_matrix_that_muon_turns_by_squares_is_made_of_squares(z):
    model = VMD(tiny_config(4, 2, z=z))
    for name, p in model.named_parameters():
        if name.endswith(("qkv.weight", "modulation.weight")):
            assert p.shape[0] % p.shape[1] == 0


# In training


class Stacked:
    """The same rows for a model alone, or with a leading dimension for an ensemble of one."""

    length, vocab_size = 4, 5
    symbols: tuple[str, ...] = ()

    def __init__(self, leading: tuple[int, ...]):
        self.leading = leading

    def batch(self, step, size, *, rows=None, generator=None, device=None):
        return random_tokens(size, 4, seed=step).expand(*self.leading, -1, -1)


def muon_config(z: LatentConfig, *settings: str) -> RunConfig:
    training = TrainingConfig(
        steps=8, batch_size=8, optimizer="muon", weight_decay=0.1, clip=0.05, ema=0.5, log_every=1, checkpoint_every=3
    )
    return override_all(RunConfig(model=tiny_config(4, 2, z=z), training=training), list(settings))


@kinds
def test_training_an_ensemble_of_one_with_muon_is_training_the_model(z):
    config = muon_config(z)
    alone, ensemble = VMD(config.model), Ensemble([VMD(config.model)])
    log_alone = train(alone, Stacked(()), config)
    log = train(ensemble, Stacked((1,)), config)
    for a, b in zip(log, log_alone, strict=True):
        assert abs(a["total"] - b["total"]) < 1e-4
    for name, tensor in ensemble.models()[0].state_dict().items():
        torch.testing.assert_close(tensor, alone.state_dict()[name], atol=2e-4, rtol=1e-3)


def test_muon_steps_of_a_member_are_those_of_the_model_alone():
    """Gradients of very different sizes, so that a norm shared between members would show."""
    training = TrainingConfig(optimizer="muon", weight_decay=0.1)
    models = [VMD(tiny_config(4, 2, z=latent()), seed=s) for s in range(2)]
    ensemble, weights = Ensemble(models), torch.tensor([1e-2, 1e3])
    learners: list[VMD | Ensemble] = [ensemble, *models]
    optimizers = [make_optimizer(learner, training) for learner in learners]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x0 = random_tokens(12, 4, seed=step)
        masks = draw_masks(x0, 2, generator=generator).map(lambda part: part.view(2, 6, -1))
        x0, noise = x0.view(2, 6, -1), torch.randn(2, 6, 2, 3, generator=generator)
        own = [Batch(x0[i], masks.map(lambda part, i=i: part[i]), noise[i]) for i in range(2)]
        for learner, optimizer, part, weight in zip(
            learners, optimizers, [Batch(x0, masks, noise), *own], [weights, *weights], strict=True
        ):
            optimizer.zero_grad()
            mean_loss(learner, part, weight, 0.0).total.sum().backward()
            optimizer.step()
    for trained, alone in zip(ensemble.models(), models, strict=True):
        for name, tensor in trained.state_dict().items():
            torch.testing.assert_close(tensor, alone.state_dict()[name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("z", [LATENTS["none"], LATENTS["bilinear"]], ids=["none", "bilinear"])
def test_muon_learns(z):
    training = TrainingConfig(steps=60, batch_size=64, optimizer="muon", learning_rate=0.02, log_every=1)
    config = RunConfig(model=tiny_config(4, 2, vocab_size=10, z=z, width=32), training=training)
    log = train(VMD(config.model), d1(), config)
    assert sum(r["total"] for r in log[-5:]) < 0.6 * sum(r["total"] for r in log[:5])


class Interrupted(Exception):
    pass


@kinds
@pytest.mark.parametrize("stop", [3, 7])
def test_a_resumed_run_with_muon_is_the_uninterrupted_one_bit_for_bit(tmp_path, z, stop):
    config, data = muon_config(z), ArrayData(random_tokens(20, 4, seed=9).numpy())

    def interrupt(done, record):
        if done == stop:
            raise Interrupted

    train(VMD(config.model), data, config, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(VMD(config.model), data, config, out=tmp_path / "cut", on_step=interrupt)
    train(VMD(config.model, seed=5), data, config, out=tmp_path / "cut", resume=True)
    for name in ("checkpoints/step-000000008.safetensors", "model.safetensors"):  # weights, average, optimiser state
        expected, found = load_file(tmp_path / "whole" / name), load_file(tmp_path / "cut" / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())
    assert any(
        key.startswith("optimizer/momentum/") for key in load_file(tmp_path / "whole/checkpoints/step-000000008.safetensors")
    )


def test_the_norm_of_a_large_gradient_has_all_its_digits():
    large = torch.nn.Parameter(torch.zeros(2**22))
    large.grad = torch.randn(2**22, generator=torch.Generator().manual_seed(0))
    exact = large.grad.double().norm()
    assert float(clip_gradients([large], 0.0, per_model=False)) == pytest.approx(float(exact), rel=1e-6)
    clip_gradients([large], 1.0, per_model=False)
    assert float(large.grad.double().norm()) == pytest.approx(1.0, rel=1e-5)
