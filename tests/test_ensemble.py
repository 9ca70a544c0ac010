import dataclasses

import pytest
import torch

from helpers import NO_LATENT, latent, random_tokens, tiny_config, tiny_model
from vmd.config import InvalidInput, ObjectiveConfig, RunConfig, TrainingConfig
from vmd.ensemble import Ensemble
from vmd.latent import standard_normal
from vmd.masking import draw_masks
from vmd.model import VMD
from vmd.optimizers import make_optimizer
from vmd.step import Batch, clip_gradients, mean_loss
from vmd.training import train

MEMBERS = 3
KL_WEIGHTS = torch.tensor([0.3, 1.0, 2.0])
# Beyond attention.SHORT keys, torch has no batched kernel on the CPU: the same numbers, slowly.
slowly = pytest.mark.filterwarnings("ignore:There is a performance drop")
settings = pytest.mark.parametrize(
    ("length", "r", "z_config"),
    [
        pytest.param(4, 4, NO_LATENT, id="mdm"),
        pytest.param(4, 2, NO_LATENT, id="bd3"),
        pytest.param(4, 4, latent(), id="vmd"),
        pytest.param(4, 2, latent(), id="block"),
        pytest.param(6, 3, latent("doubled", on_clean=True), id="long-clean", marks=slowly),
    ],
)


def members(length: int, r: int, z_config) -> list[VMD]:
    return [tiny_model(length, r, z=z_config, seed=s) for s in range(MEMBERS)]


def random_batch(length: int, r: int, z_config, seed: int = 0, rows: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x0 = random_tokens(MEMBERS * rows, length, seed=seed)
    masks = draw_masks(x0, r, generator=generator)
    shape = (MEMBERS, rows)
    noise = torch.randn(*shape, length // r, 3, generator=generator) if z_config.kind != "none" else None
    return Batch(x0.view(*shape, -1), masks.map(lambda part: part.view(*shape, -1)), noise)


def of_member(batch: Batch, index: int) -> Batch:
    noise = None if batch.noise is None else batch.noise[index]
    return Batch(batch.x0[index], batch.masks.map(lambda part: part[index]), noise)


@settings
def test_losses_and_gradients_of_a_member_are_those_of_the_model_alone(length, r, z_config):
    models = members(length, r, z_config)
    ensemble = Ensemble(models)
    batch = random_batch(length, r, z_config)
    together = mean_loss(ensemble, batch, KL_WEIGHTS, 0.1)
    together.total.sum().backward()
    stacked = dict(zip(ensemble.names, ensemble.weights, strict=True))
    for index, model in enumerate(models):
        alone = mean_loss(model, of_member(batch, index), KL_WEIGHTS[index], 0.1)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[index], b, atol=1e-5, rtol=1e-5)
        alone.total.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(stacked[name].grad[index], parameter.grad, atol=1e-5, rtol=1e-4)


@settings
def test_clipped_steps_of_a_member_are_those_of_the_model_alone(length, r, z_config):
    """Plain gradient steps, so that a wrong scale cannot hide behind Adam."""
    models = members(length, r, z_config)
    ensemble = Ensemble(models)
    learners = [ensemble, *models]
    optimizers = [torch.optim.SGD(learner.parameters(), lr=0.1) for learner in learners]
    for step in range(4):
        batch = random_batch(length, r, z_config, seed=step)
        batches = [batch, *(of_member(batch, i) for i in range(MEMBERS))]
        weights = [KL_WEIGHTS, *KL_WEIGHTS]
        for learner, optimizer, part, weight in zip(learners, optimizers, batches, weights, strict=True):
            optimizer.zero_grad()
            mean_loss(learner, part, weight, 0.0).total.sum().backward()
            norm = clip_gradients(list(learner.parameters()), 0.2, per_model=learner is ensemble)
            assert (norm > 0.2).all()  # clipping is active
            optimizer.step()
    for trained, alone in zip(ensemble.models(), models, strict=True):
        for name, tensor in trained.state_dict().items():
            torch.testing.assert_close(tensor, alone.state_dict()[name], atol=1e-5, rtol=1e-4)


class Stacked:
    """The same rows for a model alone, or with a leading dimension for an ensemble of one."""

    length, vocab_size, symbols = 4, 5, ()

    def __init__(self, leading: tuple[int, ...]):
        self.leading = leading

    def batch(self, step, size, *, generator=None, device=None):
        return random_tokens(size, 4, seed=step).expand(*self.leading, -1, -1)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_training_an_ensemble_of_one_is_training_the_model(optimizer):
    training = TrainingConfig(steps=6, batch_size=8, optimizer=optimizer, weight_decay=0.1, clip=0.05, ema=0.5, log_every=1)
    config = RunConfig(model=tiny_config(4, 2, z=latent()), training=training, objective=ObjectiveConfig(kl_weight=0.5))
    alone, ensemble = VMD(config.model), Ensemble([VMD(config.model)])
    log_alone = train(alone, Stacked(()), config)
    log = train(ensemble, Stacked((1,)), config)
    for a, b in zip(log, log_alone, strict=True):
        assert abs(a["total"] - b["total"]) < 1e-4
        assert b["gradient_norm"] > training.clip
    for name, tensor in ensemble.models()[0].state_dict().items():
        torch.testing.assert_close(tensor, alone.state_dict()[name], atol=2e-4, rtol=1e-3)


def test_every_member_has_its_own_kl_weight():
    training = TrainingConfig(steps=60, batch_size=16, learning_rate=5e-3)
    config = RunConfig(model=tiny_config(4, 4, z=latent()), training=training)
    ensemble = Ensemble([VMD(config.model) for _ in range(2)])
    train(ensemble, Stacked((2,)), config, kl_weights=torch.tensor([0.0, 10.0]))
    x0 = random_tokens(16, 4)
    mask = torch.ones_like(x0, dtype=torch.bool)
    with torch.no_grad():
        kls = []
        for member in ensemble.models():
            posterior = member.encode(x0, mask)
            kls.append(float(posterior.kl(standard_normal(posterior.mean)).mean()))
    assert kls[0] > 3 * kls[1]


def test_a_member_does_not_depend_on_the_others():
    """Its neighbour's gradients are huge, and clipped with their own norm."""
    training = TrainingConfig(steps=5, batch_size=8, weight_decay=0.1, clip=0.5)
    config = RunConfig(model=tiny_config(4, 2, z=latent()), training=training)
    firsts = []
    for neighbour in (1.0, 1e6):
        ensemble = Ensemble([VMD(config.model, seed=s) for s in range(2)])
        train(ensemble, Stacked((2,)), config, kl_weights=torch.tensor([1.0, neighbour]))
        firsts.append(ensemble.models()[0].state_dict())
    for name, tensor in firsts[0].items():
        torch.testing.assert_close(tensor, firsts[1][name], atol=1e-6, rtol=1e-5)


def test_adamw_decays_matrices_only_in_an_ensemble_too():
    ensemble = Ensemble(members(4, 2, latent()))
    optimizer = make_optimizer(ensemble, TrainingConfig(optimizer="adamw", weight_decay=0.5))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for p in ensemble.parameters() if p.dim() >= 3}


def test_models_returns_the_members_in_order_as_copies():
    models = members(4, 2, latent())
    ensemble = Ensemble(models)
    assert len(ensemble) == MEMBERS
    for returned, original in zip(ensemble.models(), models, strict=True):
        assert returned.config == original.config
        for name, tensor in returned.state_dict().items():
            assert torch.equal(tensor, original.state_dict()[name])
            tensor.add_(1)
            assert not torch.equal(tensor, original.state_dict()[name])


def test_a_member_can_be_saved_and_loaded(tmp_path):
    ensemble = Ensemble(members(4, 2, latent()))
    ensemble.models()[1].save_pretrained(tmp_path)
    loaded = VMD.from_pretrained(tmp_path)
    assert torch.equal(loaded.decoder.head.weight, tiny_model(4, 2, z=latent(), seed=1).decoder.head.weight)


def test_the_parameters_of_an_ensemble_are_those_of_its_members():
    models = members(4, 2, latent())
    assert sum(p.numel() for p in Ensemble(models).parameters()) == sum(p.numel() for m in models for p in m.parameters())


def test_members_of_different_settings_are_refused():
    """Weights of equal shapes but other blocks: one template cannot serve both."""
    models = [VMD(dataclasses.replace(tiny_config(4, 2, z=latent()), block_size=r)) for r in (1, 2)]
    with pytest.raises(InvalidInput):
        Ensemble(models)


def test_an_attention_that_members_cannot_share_is_refused():
    run = RunConfig(model=tiny_config(4, 2), training=TrainingConfig(steps=1, attention="fused"))
    with pytest.raises(InvalidInput, match="attention=fused: expected dense in an ensemble"):
        train(Ensemble([VMD(run.model)]), Stacked((1,)), run)


def test_an_ensemble_resumes_bit_for_bit(tmp_path):
    class Stop(Exception):
        pass

    def stop(done, record):
        if done == 4:
            raise Stop

    training = TrainingConfig(steps=6, batch_size=4, checkpoint_every=3, ema=0.9)
    config = RunConfig(model=tiny_config(4, 2, z=latent()), training=training)
    whole, cut, resumed = (Ensemble([VMD(config.model, seed=s + i) for i in range(2)]) for s in (0, 0, 7))
    train(whole, Stacked((2,)), config)
    with pytest.raises(Stop):
        train(cut, Stacked((2,)), config, out=tmp_path, on_step=stop)
    train(resumed, Stacked((2,)), config, out=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.weights, resumed.weights, strict=True))
