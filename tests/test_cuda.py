"""On a GPU: `pytest -m cuda`."""

import pytest
import torch

from vmd.config import RunConfig, override_all
from vmd.data.synthetic import law
from vmd.ensemble import Ensemble
from vmd.model import VMD
from vmd.presets import synthetic
from vmd.reproduce import StackedLaws
from vmd.training import draw_batch, mean_loss, train

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def small(block_size: int = 2, *settings: str) -> RunConfig:
    run = override_all(synthetic("d1", block_size), ["training.steps=40", "training.batch_size=64", *settings])
    return RunConfig(run.model.resolved(4, 10), run.objective, run.training, run.data)


@pytest.mark.parametrize("block_size", [2, 4])
def test_loss_on_the_gpu_equals_the_loss_on_the_cpu(block_size):
    run = small(block_size)
    model = VMD(run.model)
    batch = draw_batch(model, law("d1"), run.objective, 0, 64, None, torch.Generator().manual_seed(0))
    on_cpu = mean_loss(model, batch, torch.tensor(1.0), 0.0)
    moved = torch.utils._pytree.tree_map(lambda t: t.cuda(), batch)
    on_gpu = mean_loss(model.cuda(), moved, torch.tensor(1.0, device="cuda"), 0.0)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        assert torch.allclose(a, b.cpu(), atol=1e-4)


def test_compiled_ensemble_loss_equals_the_eager_one():
    run = small(2)
    ensemble = Ensemble([VMD(run.model, seed=s) for s in range(3)]).cuda()
    data = StackedLaws([law("d1"), law("d2"), law("d1")])
    batch = draw_batch(ensemble, data, run.objective, 0, 64, None, torch.Generator("cuda").manual_seed(0))
    weights = torch.ones(3, device="cuda")
    eager = mean_loss(ensemble, batch, weights, 0.0)
    compiled = torch.compile(mean_loss)(ensemble, batch, weights, 0.0)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_every_precision_learns(precision):
    run = small(2, f"training.precision={precision}")
    model = VMD(run.model).cuda()
    log = train(model, law("d1"), run)
    assert log[-1]["reconstruction"] < 0.8 * log[0]["reconstruction"]


@pytest.mark.parametrize("kind", ["none", "gaussian", "categorical"])
def test_a_recorded_step_trains_as_the_plain_one(kind):
    logs = []
    for capture in ("false", "true"):
        more = ["training.ema=0.9", "objective.kl_weight=1", f"model.latent.kind={kind}", f"training.capture={capture}"]
        run = small(2, *more, "training.log_every=1", "training.warmup_steps=5")
        model = VMD(run.model).cuda()
        logs.append([record["total"] for record in train(model, law("d1"), run)])
    assert logs[0] == pytest.approx(logs[1], rel=2e-3)


def test_a_recorded_ensemble_trains_as_its_plain_one():
    logs = []
    for capture in ("false", "true"):
        run = small(4, "training.log_every=1", f"training.capture={capture}", "training.precision=bf16")
        ensemble = Ensemble([VMD(run.model, seed=s) for s in range(3)]).cuda()
        log = train(ensemble, StackedLaws([law("d1"), law("d2"), law("d1")]), run, kl_weights=torch.tensor([0.1, 0.2, 0.3]))
        logs.append([record["total"] for record in log])
    assert logs[0] == pytest.approx(logs[1], rel=2e-2)


def test_cached_samples_equal_uncached_ones_on_the_gpu():
    model = VMD(small(2).model).cuda()
    seeds = list(range(64))
    cached = model.sample(64, seeds=seeds, rule="argmax", steps=2)
    uncached = model.sample(64, seeds=seeds, rule="argmax", steps=2, cache=False)
    assert (cached.tokens == uncached.tokens).float().mean() > 0.99
