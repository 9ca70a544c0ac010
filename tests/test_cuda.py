"""On a GPU: `pytest -m cuda`."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import vmd
from vmd import attention
from vmd.attention import Visibility, attend, attend_few, of_first_queries, visibility
from vmd.bench import RandomTokens
from vmd.config import ObjectiveConfig, RunConfig, override_all
from vmd.data import ArrayData, load_data
from vmd.data.sudoku import SudokuData, draw_puzzles
from vmd.data.synthetic import law
from vmd.data.tokenizers import Text8Tokenizer
from vmd.ensemble import Ensemble
from vmd.experiments.controlled import StackedLaws
from vmd.infilling import infill
from vmd.model import VMD
from vmd.network import rotate
from vmd.presets import synthetic
from vmd.step import draw_batch, mean_loss, precision
from vmd.training import train

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
    moved = torch.utils._pytree.tree_map(lambda t: None if t is None else t.cuda(), batch)
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


def text_like(*settings: str) -> RunConfig:
    """Sequences longer than a tile, in blocks of four."""
    base = ["model.length=128", "model.vocab_size=11", "model.block_size=4", "model.width=64", "model.heads=2"]
    more = ["training.batch_size=16", "training.steps=12", "training.log_every=1", "training.learning_rate=1e-3"]
    run = override_all(RunConfig(), [*base, *more, *settings])
    return RunConfig(run.model.resolved(run.model.length, 11), run.objective, run.training, run.data)


@pytest.mark.parametrize(
    "settings",
    [
        ["model.latent.kind=none"],
        ["model.latent.kind=gaussian"],
        ["model.latent.kind=gaussian", "model.latent.encoder_stream=doubled", "model.latent.on_clean=true"],
        ["model.latent.kind=gaussian", "model.latent.prior=learned", "objective.samples=2"],
        ["model.latent.kind=categorical", "model.latent.codes=8"],
        ["model.latent.kind=categorical", "model.latent.codes=8", "model.latent.code_layers=1"],
        ["model.latent.kind=chain", "model.latent.codes=8"],
        ["model.latent.kind=none", "training.optimizer=muon", "training.accumulate=2", "training.ema=0.9"],
        ["model.latent.kind=none", "model.draft=32"],
        ["model.latent.kind=none", "model.draft=32", "objective.together=0.5"],
        ["model.latent.kind=categorical", "model.latent.codes=8", "objective.together=0.9"],
        ["model.latent.kind=categorical", "model.latent.by_place=true", "model.latent.codes=8", "objective.together=0.9"],
        ["model.latent.kind=chain", "model.latent.by_place=true", "model.latent.codes=8"],
        ["model.latent.kind=categorical", "model.latent.codes=8", "model.latent.code_chunk=3", "objective.together=0.9"],
    ],
    ids=lambda settings: " ".join(s.rpartition(".")[2] for s in settings),
)
def test_recorded_steps_with_the_kernels_train_as_plain_ones(settings):
    fast = ["training.capture=true", "training.precision=tf32", "training.attention=fused"]
    plain, fused = (losses(text_like(*settings, *way)) for way in (["training.attention=dense"], fast))
    assert plain == pytest.approx(fused, rel=3e-3)


def losses(run: RunConfig) -> list[float]:
    torch._dynamo.reset()
    return [record["total"] for record in train(VMD(run.model).cuda(), RandomTokens(128, 11), run)]


@pytest.mark.parametrize("attention", ["tiles", "fused"])
def test_the_compiled_path_trains_as_the_plain_one(attention):
    """Compiling takes most of a minute: codes, which use the most."""
    base = ["model.latent.kind=categorical", "model.latent.codes=8", "training.optimizer=muon", "training.ema=0.9"]
    base += ["objective.together=0.9", "model.latent.by_place=true"]
    fast = ["training.compile=true", "training.capture=true", "training.precision=tf32", f"training.attention={attention}"]
    plain, compiled = (losses(text_like(*base, *way)) for way in (["training.attention=dense"], fast))
    assert plain == pytest.approx(compiled, rel=3e-3)


@pytest.mark.parametrize("keep", [None, "noisy"])
@pytest.mark.parametrize("own_clean_block", [False, True])
@pytest.mark.parametrize(("length", "r", "head"), [(128, 4, 32), (100, 4, 64), (200, 8, 32), (256, 128, 32), (130, 13, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_and_their_gradients_are_the_dense_mask_s(length, r, head, own_clean_block, keep, dtype):
    """Against float64 on the same numbers; every gradient is written, also of keys nobody sees."""
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(3, 2 * length, 3 * 2 * head, device="cuda", generator=generator).to(dtype)
    dense = visibility(length, r, own_clean_block=own_clean_block, device="cuda")
    angles = torch.arange(length, device="cuda").unsqueeze(1) * 10_000.0 ** (-torch.arange(0, head, 2, device="cuda") / head)
    exact = qkv.double().requires_grad_()
    q, k, v = exact.unflatten(-1, (3, 2, head)).permute(2, 0, 3, 1, 4)
    both = angles.double().repeat(2, 1)
    scores = (rotate(q, both.cos(), both.sin()) @ rotate(k, both.cos(), both.sin()).mT * head**-0.5).masked_fill(
        ~dense, -torch.inf
    )
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)[:, : length if keep else None]
    from vmd.kernels import doubled_attention  # needs Triton

    ours = qkv.clone().requires_grad_()
    found, *_ = doubled_attention(ours, angles.cos(), angles.sin(), 2, r, own_clean_block, keep is not None)
    weights = torch.randn(found.shape, device="cuda", generator=generator)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), exact)
    (gradient,) = torch.autograd.grad((found.float() * weights).sum(), ours)
    close = 2e-2 if dtype == torch.bfloat16 else 4e-3  # TF32 products
    assert float((found.double() - expected).norm() / expected.norm()) < close
    assert float((gradient.double() - wanted).norm() / wanted.norm()) < close


@pytest.mark.parametrize(("length", "head"), [(81, 32), (164, 32), (2, 32), (128, 64), (33, 128), (256, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_of_one_block_and_its_gradient_are_plain_attention_s(length, head, dtype):
    """Against float64 on the same numbers, with scores far below zero too: what is beyond the end counts for nothing."""
    from vmd.kernels import whole_attention  # needs Triton

    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(3, length, 3 * 2 * head, device="cuda", generator=generator)
    qkv[0, :, :1], qkv[0, :, 2 * head : 2 * head + 1] = -60, 60  # one sequence whose scores are about -600
    qkv = qkv.to(dtype)
    angles = torch.arange(length, device="cuda").unsqueeze(1) * 10_000.0 ** (-torch.arange(0, head, 2, device="cuda") / head)
    angles[:, 0] = 0  # the large numbers are not turned
    exact = qkv.double().requires_grad_()
    q, k, v = exact.unflatten(-1, (3, 2, head)).permute(2, 0, 3, 1, 4)
    cos, sin = angles.double().cos(), angles.double().sin()
    expected = (rotate(q, cos, sin) @ rotate(k, cos, sin).mT * head**-0.5).softmax(-1) @ v
    expected = expected.transpose(1, 2).flatten(2)
    ours = qkv.clone().requires_grad_()
    found = whole_attention(ours, angles.cos(), angles.sin(), 2)
    weights = torch.randn(found.shape, device="cuda", generator=generator)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), exact)
    (gradient,) = torch.autograd.grad((found.float() * weights).sum(), ours)
    close = 2e-2 if dtype == torch.bfloat16 else 4e-3  # TF32 products
    for i, far in enumerate((2.5, 1, 1)):  # large scores have fewer digits behind the point
        assert float((found[i].double() - expected[i]).norm() / expected[i].norm()) < far * close
        assert float((gradient[i].double() - wanted[i]).norm() / wanted[i].norm()) < far * close


@pytest.mark.parametrize(
    "settings",
    [
        ["kind=none"],
        ["kind=gaussian"],
        ["kind=gaussian", "encoder_stream=doubled"],
        ["kind=gaussian", "prior=learned"],
        ["kind=categorical", "codes=8"],
        ["kind=categorical", "codes=8", "code_layers=1"],
        ["kind=chain", "codes=8"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_every_gradient_of_one_block_with_the_kernel_is_that_without(settings, way, monkeypatch):
    """Of weights whose attention matters: each parameter's gradient, and the kernel was asked."""
    import vmd.kernels as kernels  # needs Triton

    if way == "compiled" and settings != ["kind=none"]:
        pytest.skip("compiling takes long")
    run = text_like("model.length=81", "model.block_size=81", *(f"model.latent.{s}" for s in settings))
    model = VMD(run.model).cuda()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(4 if name.endswith("qkv.weight") else 1)
    batch = draw_batch(model, RandomTokens(81, 11), run.objective, 0, 16, None, torch.Generator("cuda").manual_seed(0))
    asked, real = [], kernels.whole_forward_kernel
    monkeypatch.setattr(
        kernels,
        "whole_forward_kernel",
        type("Counted", (), {"__getitem__": lambda _, grid: (asked.append(grid), real[grid])[1]})(),
    )
    found = []
    for attention_way in ("dense", "fused"):
        with attention.attention_by(model, attention_way), precision("tf32"):
            function = torch.compile(mean_loss) if way == "compiled" else mean_loss
            loss = function(model, batch, torch.tensor(1.0, device="cuda"), 0.0).total
            found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        assert bool(asked) == (attention_way == "fused")
    whole = float(torch.stack([a.norm() for a in found[0] if a is not None]).norm())
    for (name, _), a, b in zip(model.named_parameters(), *found, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            rounding = 1e-4 * whole if a.numel() == 1 else 1e-7  # in the gradient of one number much cancels
            assert float((a - b).norm()) <= 2e-2 * float(a.norm()) + rounding, name


@pytest.mark.parametrize("own_clean_block", [False, True])
@pytest.mark.parametrize(("length", "r"), [(128, 4), (200, 8)])
def test_tiles_and_their_gradients_are_the_dense_mask_s(length, r, own_clean_block):
    visible = Visibility(length, r, own_clean_block=own_clean_block).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 2, 2 * length, 32, device="cuda", generator=generator, requires_grad=True) for _ in range(3))
    found = []
    for way in ("dense", "tiles"):
        visible.use(way)
        out = torch.compile(attend, dynamic=False)(q, k, v, of_first_queries(visible(), None))
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for dense, tiled in zip(*found, strict=True):
        torch.testing.assert_close(tiled, dense, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("z", ["once", "fresh"])
@pytest.mark.parametrize(("rule", "order"), [("argmax", "prob"), ("sample", "random"), ("sample", "entropy")])
@pytest.mark.parametrize(
    "settings",
    [
        ["model.latent.kind=none"],
        ["model.latent.kind=none", "model.draft=32"],
        ["model.latent.kind=gaussian"],
        ["model.latent.kind=gaussian", "model.latent.prior=learned"],
        ["model.latent.kind=categorical", "model.latent.codes=8"],
        ["model.latent.kind=categorical", "model.latent.codes=8", "model.latent.by_place=true"],
        ["model.latent.kind=categorical", "model.latent.codes=8", "model.latent.code_layers=1"],
        ["model.latent.kind=chain", "model.latent.codes=8"],
    ],
    ids=lambda settings: " ".join(s.rpartition(".")[2] for s in settings),
)
def test_recorded_samples_are_the_plain_ones(settings, rule, order, z):
    model = VMD(text_like(*settings).model).cuda().eval()
    prompt = torch.full((24, 128), -1)
    prompt[:, 8:20] = 3  # whole blocks given, and parts of blocks
    prompt[::2, 61] = 1
    options = {"steps": 2, "order": order, "rule": rule, "z": z, "seeds": list(range(24))}
    recorded, plain = (model.sample(prompt=prompt, desk=model.desk(8, record=record), **options) for record in (True, False))
    assert (recorded.tokens == plain.tokens).float().mean() > 0.98  # equal but for ties of rounding
    assert (recorded.nfe, recorded.cache_passes) == (plain.nfe, plain.cache_passes)
    assert bool((recorded.tokens.cpu() == prompt)[prompt >= 0].all())


@pytest.mark.parametrize("settings", [["model.draft=32"], ["model.latent.kind=categorical", "model.latent.codes=8"]])
def test_recorded_samples_of_a_table_keep_to_its_values(settings):
    sizes = torch.arange(128) % 10 + 2
    run = text_like("model.latent.kind=none", *settings)
    columns = tuple((f"column {place}", *map(str, range(size))) for place, size in enumerate(sizes.tolist()))
    model = VMD(replace(run.model, columns=columns)).cuda().eval()
    options = {"steps": 2, "rule": "sample", "seeds": list(range(24))}
    recorded, plain = (model.sample(24, desk=model.desk(8, record=record), **options) for record in (True, False))
    assert (recorded.tokens == plain.tokens).float().mean() > 0.98  # equal but for ties of rounding
    assert bool((recorded.tokens.cpu() < sizes).all())


@pytest.mark.parametrize("kind", ["none", "categorical"])
def test_samples_are_recorded_unasked_and_equal_the_uncached_ones(kind, monkeypatch):
    model, desks, desk = VMD(text_like(f"model.latent.kind={kind}").model).cuda().eval(), [], VMD.desk
    monkeypatch.setattr(VMD, "desk", lambda *args, **more: desks.append(desk(*args, **more)) or desks[-1])
    by_default, uncached = (model.sample(20, seeds=list(range(20)), rule="argmax", cache=cache) for cache in (True, False))
    assert [bool(found.recordings) for found in desks] == [True]
    assert (by_default.tokens == uncached.tokens).float().mean() > 0.98  # equal but for ties of rounding


@pytest.mark.parametrize("n", [3, 20])
def test_windows_of_a_size_share_what_is_recorded(n, monkeypatch):
    model, desks, desk = VMD(text_like("model.latent.kind=categorical").model).cuda().eval(), [], VMD.desk
    monkeypatch.setattr(VMD, "desk", lambda *args, **more: desks.append(desk(*args, **more)) or desks[-1])
    options = {"length": 64 * 6 + 128, "seeds": list(range(n)), "rule": "argmax", "batch_size": 8}
    start = torch.tensor([1, 2, 3])
    recorded = vmd.write(model, start, n, **options)
    assert [bool(found.recordings) for found in desks] == [True]
    plain = vmd.write(model, start, n, cache=False, **options)
    assert (recorded.tokens == plain.tokens).float().mean() > 0.8  # equal but for ties of rounding, and what follows
    assert recorded.nfe == plain.nfe


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("tq", "tk"), [(1, 16), (4, 40), (8, 256), (16, 4096)])
def test_attention_of_few_queries_is_taken_and_equals_the_kernel(tq, tk, masked, monkeypatch):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 3, t, 32, device="cuda", generator=generator) for t in (tq, tk, tk))
    visible = torch.arange(tk, device="cuda") <= torch.arange(tq, device="cuda").unsqueeze(1) + tk // 2 if masked else None
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=visible)
    taken = []
    monkeypatch.setattr(attention, "attend_few", lambda *args: taken.append(attend_few(*args)) or taken[-1])
    with torch.no_grad():
        torch.testing.assert_close(attention.attend(q, k, v, visible), exact.float(), atol=1e-5, rtol=1e-5)
    assert len(taken) == 1


def test_a_desk_serves_many_calls():
    model = VMD(text_like("model.latent.kind=categorical").model).cuda().eval()
    desk = model.desk(8, record=True)
    first, other, again = (model.sample(8, desk=desk, seeds=list(range(s, s + 8))).tokens for s in (0, 50, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kept", [True, False], ids=["on the device", "on the host"])
@pytest.mark.parametrize("name", ["law", "array", "puzzles", "text"])
def test_a_batch_is_drawn_without_waiting_for_the_device(name, kept, tmp_path, monkeypatch):
    for module in ("arrays", "text") if not kept else ():
        monkeypatch.setattr(f"vmd.data.{module}.ON_DEVICE", 0)
    run = RunConfig(objective=ObjectiveConfig(masking="steps", steps=(1, 2)))
    if name == "law":
        data = law("d1")
    elif name == "array":
        data = ArrayData(torch.randint(300, (50, 6), generator=torch.Generator().manual_seed(0)).numpy())
    elif name == "puzzles":
        data, run = SudokuData(draw_puzzles(20, "any", 0, 2)), RunConfig()
    else:
        (tmp_path / "text.txt").write_text("the history of science " * 100)
        data = load_data(str(tmp_path / "text.txt"), 0, length=16, tokenizer="char", split="train")
    model = VMD(run.model.resolved(data.length, data.vocab_size)).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    for step in range(2):
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first puts the data on the device
        try:
            batch = draw_batch(model, data, run.objective, step, 8, None, generator)
            if step:  # what would wait is noticed, be it a number read or a copy from ordinary memory
                for waits in (batch.x0.sum().item, lambda: torch.ones(3).to("cuda")):
                    with pytest.raises(RuntimeError, match="synchroniz"):
                        waits()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_an_array_is_kept_on_the_device():
    data = ArrayData(torch.randint(300, (50, 6), generator=torch.Generator().manual_seed(0)).numpy())
    assert torch.equal(data.batch(3, 20, device="cuda").cpu(), data.batch(3, 20))


def test_one_process_of_a_group_trains_as_a_process_alone(tmp_path):
    """DDP and FSDP on the GPU, with a group of one."""
    logs = []
    for parallel in (None, "ddp", "fsdp"):
        run = text_like("model.latent.kind=categorical", "model.latent.codes=8", f"training.parallel={parallel or 'ddp'}")
        if parallel is not None:
            dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/{parallel}", rank=0, world_size=1)
        try:
            logs.append([record["total"] for record in train(VMD(run.model).cuda(), RandomTokens(128, 11), run)])
        finally:
            if parallel is not None:
                dist.destroy_process_group()
    assert logs[0] == pytest.approx(logs[1], rel=1e-3)
    assert logs[0] == pytest.approx(logs[2], rel=1e-3)


@pytest.mark.parametrize(
    "settings", ["model.latent.kind=categorical model.latent.codes=8", "model.latent.kind=none model.draft=32"]
)
@pytest.mark.parametrize("way", ["training.compile=false", "training.compile=true"])
def test_a_recorded_step_leaves_a_frozen_network_alone(settings, way, tmp_path):
    """In bf16 with the kernels; what is left to learn does as in the plain path."""
    added = settings.split()
    added.append("objective.together=0.5")
    plain = text_like("model.latent.kind=none")
    train(VMD(plain.model).cuda(), RandomTokens(128, 11), plain, out=tmp_path / "plain")
    begun = [f"training.init={tmp_path / 'plain'}", "training.freeze=true", *added]
    fast = ["training.capture=true", "training.precision=bf16", "training.attention=fused", way]
    logs, models = [], []
    for more in ([], fast):
        run = text_like(*begun, *more)
        models.append(VMD(run.model).cuda())
        logs.append([record["total"] for record in train(models[-1], RandomTokens(128, 11), run)])
    assert logs[0] == pytest.approx(logs[1], rel=0.02)
    before, after = VMD.from_pretrained(tmp_path / "plain").state_dict(), models[1].state_dict()
    assert all(torch.equal(after[name].cpu(), tensor) for name, tensor in before.items())
    fresh = VMD(models[1].config).state_dict()
    assert any(not torch.equal(after[name].cpu(), tensor) for name, tensor in fresh.items() if name not in before)


@pytest.mark.parametrize("prompt", ["the ____ of science", "the history of ____"])
def test_gaps_are_filled_as_on_a_cpu(prompt):
    """Nearly: sums in another order may tip a draw."""
    letters = Text8Tokenizer()
    text = torch.tensor([-1 if c == "_" else int(letters.encode(c)[0]) for c in prompt])
    on_cpu, on_gpu = (
        infill(VMD.from_pretrained("text", device), text, 8, tries=8, seeds=list(range(8))).tokens.cpu()
        for device in ("cpu", "cuda")
    )
    assert (on_gpu[:, text >= 0] == text[text >= 0]).all()
    assert (on_cpu == on_gpu).all(1).sum() >= 6


@pytest.mark.parametrize(
    "settings",
    [
        ["codes=12", "by_place=true"],
        ["codes=12"],
        ["codes=70", "by_place=true", "head_dim=32"],
        ["codes=12", "by_place=true", "code_chunk=5"],
        ["kind=chain", "codes=12", "by_place=true", "span=2"],
    ],
    ids=" ".join,
)
def test_the_kernel_scores_codes_as_plain_logits_do(settings):
    """Scores, and gradients of all weights: as far from float32 as bf16 is without the kernel, or nearer."""
    run = text_like("model.latent.kind=categorical", *(f"model.latent.{setting}" for setting in settings))
    model = VMD(run.model, seed=1).cuda()
    for table in (model.coder.pathway.out, model.coder.head):  # begin at zero or near it
        torch.nn.init.normal_(table.weight, std=0.1)
    generator = torch.Generator("cuda").manual_seed(0)
    x0 = torch.randint(run.model.vocab_size, (64, run.model.length), generator=generator, device="cuda")
    target = torch.rand(x0.shape, generator=generator, device="cuda") < 0.6
    target[: len(x0) // 2, :: run.model.block_size] = False  # places have other numbers of targets
    xt = torch.where(target, model.mask_id, x0)
    found = []
    for way, kind in (("dense", "float32"), ("dense", "bf16"), ("fused", "bf16")):
        model.zero_grad()
        with attention.attention_by(model, way), precision(kind):
            assert model.coder.kernel_scores() == (way == "fused")
            codes, alone = model.coder.code_scores_twice(xt, x0, target)
            scores = torch.cat([codes.log_joint().flatten(), alone.flatten()])
            (codes.log_joint().logsumexp(-1).sum() + alone.sum()).backward()  # codes in parts are scored once more
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append([scores.detach(), *gradients])
    for exact, plain, by_kernel in zip(*found, strict=True):
        assert torch.isfinite(by_kernel).all()
        off = [torch.linalg.vector_norm(part - exact) / torch.linalg.vector_norm(exact) for part in (plain, by_kernel)]
        assert off[1] < 1.5 * off[0] + 1e-4
