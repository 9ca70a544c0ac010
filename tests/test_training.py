import dataclasses
import itertools
import json
import math
import os
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import NO_LATENT, codes, latent, learned_prior, random_tokens, tiny_config, tiny_model
from vmd.checkpoints import KEPT, checkpoint_files
from vmd.config import DataConfig, InvalidInput, ObjectiveConfig, RunConfig, TrainingConfig, override_all
from vmd.data import ArrayData
from vmd.data.synthetic import d1, deterministic, law
from vmd.ensemble import Ensemble
from vmd.likelihood import nll_bound
from vmd.metrics import accuracy
from vmd.model import VMD
from vmd.optimizers import make_optimizer
from vmd.presets import preset
from vmd.step import Batch, clip_gradients, draw_batch, kl_warmup, learning_rate, mean_loss, step_seed
from vmd.training import FiniteSoFar, TrainingDiverged, train


class Interrupted(Exception):
    pass


def interrupt_at(step: int):
    def on_step(done, record):
        if done == step:
            raise Interrupted

    return on_step


def data(seed: int = 0) -> ArrayData:
    return ArrayData(random_tokens(20, 4, seed=9).numpy(), seed=seed)


def run_config(*settings: str, optimizer: str = "adam", ema: float = 0.9) -> RunConfig:
    training = TrainingConfig(
        steps=10,
        batch_size=8,
        optimizer=optimizer,
        weight_decay=0.01,
        warmup_steps=2,
        ema=ema,
        log_every=1,
        checkpoint_every=3,
    )
    return override_all(RunConfig(model=tiny_config(4, 2, z=latent()), training=training), list(settings))


def model_for(config: RunConfig, seed: int = 0) -> VMD:
    return VMD(config.model, seed=seed)


def equal_weights(a: VMD, b: VMD) -> bool:
    return all(torch.equal(t, b.state_dict()[name]) for name, t in a.state_dict().items())


def test_training_shows_how_far_it_is_to_those_who_do_not_ask(capsys):
    config = run_config()
    train(model_for(config), data(), config)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("training: 1 of 10 loss ")
    assert told[-1].startswith("training: 10 of 10 loss ")
    seen = []
    train(model_for(config), data(), config, on_step=lambda done, record: seen.append(done))
    assert seen == list(range(1, 11))
    assert capsys.readouterr().err == ""


def logged_steps(out) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def uninterrupted(tmp_path, config: RunConfig):
    folder = tmp_path / "whole"
    folder.mkdir()
    model = model_for(config)
    return folder, model, train(model, data(), config, out=folder)


# Resuming


@pytest.mark.parametrize("stop", [3, 4, 8])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, out, optimizer, ema, stop):
    config = run_config(optimizer=optimizer, ema=ema)
    whole_out, whole, whole_log = uninterrupted(tmp_path, config)
    with pytest.raises(Interrupted):
        train(model_for(config), data(), config, out=out, on_step=interrupt_at(stop))
    resumed = model_for(config, seed=5)  # nothing may survive of a fresh start
    log = train(resumed, data(), config, out=out, resume=True)
    assert equal_weights(resumed, whole)
    for name in ("checkpoints/step-000000010.safetensors", "model.safetensors"):  # weights, average, optimiser state
        expected, saved = load_file(whole_out / name), load_file(out / name)
        assert expected.keys() == saved.keys()
        assert all(torch.equal(tensor, saved[key]) for key, tensor in expected.items())
    assert logged_steps(out) == logged_steps(whole_out) == [r["step"] for r in log] == list(range(1, 11))
    assert all(before["seconds"] < after["seconds"] for before, after in itertools.pairwise(log))  # it goes on counting
    for name in ("total", "reconstruction", "kl", "gradient_norm", "learning_rate"):
        assert [r[name] for r in log] == [r[name] for r in whole_log]


def test_resuming_a_finished_run_changes_nothing(out):
    config = run_config()
    model = model_for(config)
    train(model, data(), config, out=out)
    before = (out / "model.safetensors").read_bytes()
    again = model_for(config, seed=5)
    train(again, data(), config, out=out, resume=True)
    assert equal_weights(again, model)
    assert (out / "model.safetensors").read_bytes() == before
    assert logged_steps(out) == list(range(1, 11))


def test_a_longer_run_can_be_resumed_from_a_shorter_one(tmp_path, out):
    config = run_config("training.schedule=constant")
    whole_out, whole, _ = uninterrupted(tmp_path, config)
    train(model_for(config), data(), override_all(config, ["training.steps=6"]), out=out)
    resumed = model_for(config, seed=5)
    train(resumed, data(), config, out=out, resume=True)
    assert equal_weights(resumed, whole)
    assert logged_steps(out) == logged_steps(whole_out)


@pytest.mark.parametrize("keep", [0, 7, 1000, -1])
def test_a_damaged_newest_checkpoint_falls_back_to_the_previous(tmp_path, out, keep):
    config = run_config()
    whole_out, whole, _ = uninterrupted(tmp_path, config)
    with pytest.raises(Interrupted):
        train(model_for(config), data(), config, out=out, on_step=interrupt_at(7))
    newest = checkpoint_files(out)[-1]
    assert newest.name == "step-000000006.safetensors"
    newest.write_bytes(newest.read_bytes()[:keep])
    resumed = model_for(config, seed=5)
    train(resumed, data(), config, out=out, resume=True)
    assert equal_weights(resumed, whole)
    assert logged_steps(out) == logged_steps(whole_out)


def test_only_damaged_checkpoints_are_refused_by_name(out):
    config = run_config()
    with pytest.raises(Interrupted):
        train(model_for(config), data(), config, out=out, on_step=interrupt_at(7))
    for path in checkpoint_files(out):
        path.write_bytes(b"damaged")
    with pytest.raises(InvalidInput, match="step-000000006"):
        train(model_for(config), data(), config, out=out, resume=True)


def test_resuming_from_nothing_is_refused(out):
    config = run_config()
    with pytest.raises(InvalidInput, match="none found"):
        train(model_for(config), data(), config, out=out, resume=True)
    with pytest.raises(InvalidInput, match="output folder"):
        train(model_for(config), data(), config, resume=True)


@pytest.mark.parametrize(
    "setting", ["training.learning_rate=0.1", "training.seed=3", "objective.kl_weight=0.5", "training.ema=0", "data.fixed=0"]
)
def test_resuming_with_another_config_is_refused_by_name(out, setting):
    config = run_config()
    with pytest.raises(Interrupted):
        train(model_for(config), data(), config, out=out, on_step=interrupt_at(4))
    with pytest.raises(InvalidInput, match=setting.split("=")[0]):
        train(model_for(config), data(), override_all(config, [setting]), out=out, resume=True)


def test_the_first_step_with_what_is_no_number_is_told():
    """Losses are looked at now and then only, when several may have been so."""
    finite = FiniteSoFar(torch.device("cpu"))
    for step, whole in enumerate((True, True, False, True, False)):
        finite.see(step, torch.tensor(whole))
        assert finite.first_bad(10) == (None if step < 2 else 2)


def test_resuming_another_model_is_refused(out):
    config = run_config()
    with pytest.raises(Interrupted):
        train(model_for(config), data(), config, out=out, on_step=interrupt_at(4))
    wider = VMD(dataclasses.replace(config.model, width=32))
    with pytest.raises(InvalidInput, match=r"cannot resume with model\.width=32: the run has 16"):
        train(wider, data(), config, out=out, resume=True)


def test_a_run_of_a_preset_is_read_before_it_is_done(out):
    """Presets leave sizes to the data; what is kept has them."""
    config, rows = override_all(preset("poker"), ["training.steps=4", "training.checkpoint_every=2"]), law("poker")
    model = VMD.for_data(config.model, rows)
    with pytest.raises(Interrupted):
        train(model, rows, config, out=out, on_step=interrupt_at(2))
    read = VMD.from_pretrained(out)
    assert read.stopped_at == 2
    assert read.config == model.config


@pytest.mark.parametrize("missing", ["metadata", "weights/", "average/", "optimizer/exp_avg/", "optimizer/"])
def test_an_incomplete_checkpoint_is_refused(out, missing):
    config = run_config()
    with pytest.raises(Interrupted):
        train(model_for(config), data(), config, out=out, on_step=interrupt_at(4))
    path = checkpoint_files(out)[-1]
    metadata = {"format": "vmd-checkpoint", "step": "3", "config": json.dumps(dataclasses.asdict(config))}
    if missing == "metadata":
        metadata = {"format": "vmd-checkpoint"}
    save_file({name: t for name, t in load_file(path).items() if not name.startswith(missing)}, path, metadata)
    with pytest.raises(InvalidInput):
        train(model_for(config), data(), config, out=out, resume=True)


def test_a_foreign_checkpoint_is_refused(out):
    (out / "checkpoints").mkdir()
    save_file({"x": torch.zeros(1)}, out / "checkpoints" / "step-000000003.safetensors")
    config = run_config()
    with pytest.raises(InvalidInput, match=r"expected a checkpoint to resume from, only damaged ones: step-000000003"):
        train(model_for(config), data(), config, out=out, resume=True)


def test_only_the_newest_checkpoints_are_kept(out):
    config = run_config()
    train(model_for(config), data(), config, out=out)
    assert [p.name for p in checkpoint_files(out)] == ["step-000000009.safetensors", "step-000000010.safetensors"][-KEPT:]
    assert sorted(os.listdir(out)) == ["checkpoints", "config.json", "metrics.jsonl", "model.safetensors", "run.json"]


def test_a_line_that_a_crash_cut_short_is_dropped(out):
    config = run_config()
    with pytest.raises(Interrupted):
        train(model_for(config), data(), config, out=out, on_step=interrupt_at(4))
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "total": 1.')
    train(model_for(config), data(), config, out=out, resume=True)
    assert logged_steps(out) == list(range(1, 11))


def test_training_makes_its_output_folder(tmp_path):
    config = run_config("training.steps=2")
    train(model_for(config), data(), config, out=tmp_path / "deep" / "folder")
    assert VMD.from_pretrained(tmp_path / "deep" / "folder").config == config.model


def test_a_fresh_run_in_a_used_folder_is_a_run_of_its_own_or_refused(out):
    """Neither its log nor its checkpoints may mix with those of the older, longer run."""
    old = run_config("training.learning_rate=0.01")
    train(model_for(old), data(), old, out=out)
    new = run_config()
    try:
        with pytest.raises(Interrupted):
            train(model_for(new), data(), new, out=out, on_step=interrupt_at(4))
    except InvalidInput:
        return
    assert logged_steps(out) == [1, 2, 3, 4]
    train(model_for(new), data(), new, out=out, resume=True)
    assert logged_steps(out) == list(range(1, 11))


def test_the_saved_model_is_the_trained_one(out):
    config = run_config()
    model = model_for(config)
    train(model, data(), config, out=out)
    assert equal_weights(VMD.from_pretrained(out), model)
    assert not model.training


# Chance


def trained(config: RunConfig, seed: int = 0, source=None) -> VMD:
    model = model_for(config, seed)
    train(model, source or data(), config)
    return model


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    config = run_config()
    assert equal_weights(trained(config), trained(config))
    assert not equal_weights(trained(config), trained(override_all(config, ["training.seed=1"])))
    assert not equal_weights(trained(config), trained(config, seed=1))


def test_training_does_not_depend_on_the_global_generator():
    config = run_config()
    torch.manual_seed(1)
    first = trained(config, source=d1(5))
    torch.manual_seed(2)
    assert equal_weights(first, trained(config, source=d1(5)))


def test_seeds_of_steps_are_distinct_and_fit_a_generator():
    seeds = {step_seed(seed, step) for seed in range(30) for step in range(300)}
    assert len(seeds) == 30 * 300
    assert all(0 <= s < 2**63 for s in seeds)


def test_seeds_of_steps_are_well_mixed():
    """Each bit is set in about half of the seeds, and neighbours share no more bits than strangers."""
    seeds = [step_seed(0, step) for step in range(2000)]
    for bit in range(63):
        assert abs(sum(s >> bit & 1 for s in seeds) - 1000) < 150
    shared = [63 - (a ^ b).bit_count() for a, b in itertools.pairwise(seeds)]
    assert abs(sum(shared) / len(shared) - 31.5) < 1


def test_a_batch_holds_rows_of_the_data_masks_and_noise():
    config = run_config("data.fixed=1")
    fixed = torch.tensor([False, True, False, False])
    model = model_for(config)
    batch = draw_batch(model, data(), config.objective, 3, 8, fixed, torch.Generator().manual_seed(0))
    assert torch.equal(batch.x0, data().batch(3, 8))
    assert batch.masks.mask.shape == (8, 4)
    assert batch.masks.weight.shape == (8, 2)
    assert batch.noise.shape == (8, 2, 3)
    assert not batch.masks.mask[:, 1].any()
    plain = draw_batch(tiny_model(4, 2), data(), config.objective, 3, 8, fixed, torch.Generator().manual_seed(0))
    assert plain.noise is None


def test_fixed_positions_are_not_learned():
    """The token of an always given position is never a target: its output bias gets no gradient of its own."""
    config = run_config("data.fixed=0:2", "training.steps=3", ema=0)
    config = dataclasses.replace(config, model=tiny_config(4, 4))
    seen = []
    model = model_for(config)
    model.register_forward_hook(lambda module, args, output: seen.append(args[1].mask))
    train(model, data(), config)
    assert len(seen) == 3
    assert not any(mask[:, :2].any() for mask in seen)
    assert all(mask[:, 2:].any(-1).all() for mask in seen)


# Schedules and optimisers


def schedule(name: str, warmup: int = 0, steps: int = 10) -> list[float]:
    config = TrainingConfig(steps=steps, learning_rate=2.0, schedule=name, warmup_steps=warmup)
    return [learning_rate(config, step) for step in range(steps + 1)]


def test_the_constant_schedule_stays():
    assert schedule("constant") == [2.0] * 11


@pytest.mark.parametrize("name", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_schedules_rise_to_the_learning_rate_and_fall_to_zero(name, warmup):
    rates = schedule(name, warmup)
    assert rates[:warmup] == [2.0 * (i + 1) / warmup for i in range(warmup)]
    assert rates[warmup] == 2.0
    assert math.isclose(rates[(10 + warmup) // 2], 1.0)  # half way between the warm-up and the end
    assert abs(rates[10]) < 1e-12
    assert all(a > b for a, b in itertools.pairwise(rates[warmup:]))


def test_cosine_is_flat_at_both_ends_and_linear_is_not():
    cosine, linear = schedule("cosine", steps=100), schedule("linear", steps=100)
    assert 2 - cosine[1] < 0.1 * (2 - linear[1])
    assert cosine[99] < 0.1 * linear[99]


def test_a_warm_up_as_long_as_the_run_is_allowed():
    assert schedule("cosine", warmup=10, steps=10)[9] == 2.0


def test_the_kl_weight_warms_up_linearly_to_one():
    config = ObjectiveConfig(kl_warmup_steps=4)
    assert [kl_warmup(config, step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert kl_warmup(ObjectiveConfig(), 0) == 1


def test_the_loss_is_charged_with_the_warmed_up_kl_weight():
    config = run_config("objective.kl_weight=2", "objective.kl_warmup_steps=4", "training.steps=6")
    log = train(model_for(config), data(), config)
    for record, factor in zip(log, [0.25, 0.5, 0.75, 1, 1, 1], strict=True):
        assert math.isclose(record["total"], record["reconstruction"] + 2 * factor * record["kl"], rel_tol=1e-5)


def test_the_log_holds_the_first_the_last_and_every_nth_step():
    config = run_config("training.log_every=4")
    records = []
    log = train(model_for(config), data(), config, on_step=lambda done, record: records.append((done, record)))
    assert [r["step"] for r in log] == [1, 4, 8, 10]
    assert [done for done, _ in records] == list(range(1, 11))
    assert [r for _, r in records if r is not None] == log


def gradients(*shapes, scale: float = 1.0):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.zeros(s, requires_grad=True) for s in shapes]
    for p in parameters:
        p.grad = scale * torch.randn(p.shape, generator=generator)
    return parameters


def test_gradients_are_clipped_to_the_largest_norm_together():
    clipped, reference = gradients((3, 4), (5,), ()), gradients((3, 4), (5,), ())
    norm = clip_gradients(clipped, 0.5, per_model=False)
    expected = torch.nn.utils.clip_grad_norm_(reference, 0.5)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(clipped, reference, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("largest", [0.0, 1000.0])
def test_small_gradients_and_a_clip_of_zero_are_left_alone(largest):
    clipped, reference = gradients((3, 4), (5,)), gradients((3, 4), (5,))
    norm = clip_gradients(clipped, largest, per_model=False)
    assert norm > 1
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(clipped, reference, strict=True))


def test_each_model_of_an_ensemble_is_clipped_by_its_own_norm():
    clipped, reference = gradients((2, 3, 4), (2, 5), (2,)), gradients((2, 3, 4), (2, 5), (2,))
    for p in (*clipped, *reference):
        p.grad[1] *= 0.01  # the second model's gradients are within the limit
    norms = clip_gradients(clipped, 0.5, per_model=True)
    assert norms.shape == (2,)
    for a, b in zip(clipped, reference, strict=True):
        torch.testing.assert_close(a.grad[0], b.grad[0] * 0.5 / norms[0])
        assert torch.equal(a.grad[1], b.grad[1])
    assert math.isclose(float(torch.cat([p.grad[0].flatten() for p in clipped]).norm()), 0.5, rel_tol=1e-4)


def test_adamw_decays_matrices_only():
    model = tiny_model(4, 2, z=latent())
    optimizer = make_optimizer(model, TrainingConfig(optimizer="adamw", weight_decay=0.5))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    everything = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert everything == {id(p) for p in model.parameters()}
    assert decayed == {id(p) for p in model.parameters() if p.dim() >= 2}


def test_the_average_is_what_is_kept_and_it_starts_short():
    config = run_config("training.steps=1", "training.clip=0", ema=0.999)
    raw, averaged = trained(override_all(config, ["training.ema=0"])), trained(config)
    start = model_for(config)
    for name, tensor in averaged.state_dict().items():
        expected = start.state_dict()[name].lerp(raw.state_dict()[name], 0.9)  # decay (1 + 0) / (10 + 0) at step 0
        torch.testing.assert_close(tensor, expected, atol=1e-7, rtol=1e-5)


# Whole runs


@pytest.mark.parametrize("r", [1, 2, 4])
@pytest.mark.parametrize(
    "z_config",
    [NO_LATENT, latent(), latent(on_clean=True), latent("doubled"), latent("doubled", on_clean=True)],
    ids=["none", "single", "single-clean", "doubled", "doubled-clean"],
)
@pytest.mark.parametrize("masking", ["counts", "times"])
def test_every_setting_trains_and_samples(r, z_config, masking):
    config = run_config("training.steps=4", f"objective.masking={masking}")
    config = dataclasses.replace(config, model=tiny_config(4, r, z=z_config))
    model = model_for(config)
    log = train(model, data(), config)
    assert all(math.isfinite(r["total"]) and r["gradient_norm"] > 0 for r in log)
    assert (log[-1]["kl"] > 0) == config.model.has_latent
    assert not equal_weights(model, model_for(config))
    samples = model.sample(5, steps=r, generator=torch.Generator().manual_seed(0))
    assert samples.tokens.shape == (5, 4)
    assert ((samples.tokens >= 0) & (samples.tokens < 5)).all()
    assert samples.nfe == 4


def test_training_finds_the_entropy_of_a_law():
    """Autoregression over one-token blocks on (k, k+1): ln 4 nats a sequence, and samples inside the law."""
    known = deterministic(4)
    training = TrainingConfig(steps=150, batch_size=64, learning_rate=5e-3, log_every=50)
    config = RunConfig(model=tiny_config(2, 1, 4), training=training)
    model = model_for(config)
    log = train(model, known, config)
    assert abs(2 * log[-1]["total"] - known.entropy) < 0.1
    assert accuracy(model.sample(500, generator=torch.Generator().manual_seed(0)).tokens, known) > 90


def test_a_latent_makes_tokens_of_one_step_agree():
    """One step without a latent is right once in V; with one, most of the time."""
    known = deterministic(4)
    training = TrainingConfig(steps=200, batch_size=64, learning_rate=5e-3, log_every=100)
    shares = []
    for z_config in (NO_LATENT, latent(dim=8)):
        shape = tiny_config(2, 2, 4, z_config, width=32, layers=1)
        config = RunConfig(model=shape, training=training, objective=ObjectiveConfig(kl_weight=0.3))
        model = model_for(config)
        train(model, known, config)
        shares.append(accuracy(model.sample(2000, generator=torch.Generator().manual_seed(0)).tokens, known))
    without, with_latent = shares
    assert abs(without - 25) < 5
    assert with_latent > 60


def test_a_loss_that_is_no_number_stops_the_run(out):
    config = run_config()
    model = model_for(config)
    with torch.no_grad():
        model.decoder.head.bias.fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match="learning_rate"):
        train(model, data(), config, out=out)
    assert not checkpoint_files(out)


def test_bf16_is_refused_on_the_cpu():
    config = run_config("training.precision=bf16")
    with pytest.raises(InvalidInput, match="precision"):
        train(model_for(config), data(), config)


def test_fixed_positions_outside_the_sequence_are_refused():
    config = dataclasses.replace(run_config(), data=DataConfig(fixed="0:5"))
    with pytest.raises(InvalidInput, match="fixed"):
        train(model_for(config), data(), config)


@pytest.mark.parametrize("source", [d1(6), deterministic(5)], ids=["more-symbols", "another-length"])
def test_data_that_do_not_fit_the_model_are_refused(source):
    config = run_config()
    with pytest.raises(InvalidInput):
        train(model_for(config), source, config)


# Objectives of samplers, codes, and learned priors


NEW_SETTINGS = {
    "codes": (codes(), ()),
    "codes-layer": (codes(head="additive", layers=1, code_chunk=3), ("objective.masking=times",)),
    "codes-fresh": (codes(head="additive"), ("objective.masking=steps", "objective.steps={steps}")),
    "codes-once": (codes(layers=1), ("objective.masking=steps", "objective.steps={steps}", "objective.z=once")),
    "none-steps": (NO_LATENT, ("objective.masking=steps", "objective.steps={steps}")),
    "learned": (learned_prior(), ()),
    "learned-fresh": (learned_prior(), ("objective.masking=steps", "objective.steps={steps}", "objective.samples=3")),
    "learned-once": (
        learned_prior("doubled"),
        ("objective.masking=steps", "objective.steps={steps}", "objective.z=once", "objective.samples=3"),
    ),
    "clean-once": (latent(on_clean=True), ("objective.masking=steps", "objective.steps={steps}", "objective.z=once")),
}


def new_config(name: str, r: int, *more: str) -> RunConfig:
    z_config, settings = NEW_SETTINGS[name]
    choices = ",".join(str(n) for n in (1, 2, 4) if n <= r)
    config = run_config(*(setting.format(steps=choices) for setting in settings), *more)
    return dataclasses.replace(config, model=tiny_config(4, r, z=z_config))


@pytest.mark.parametrize("r", [1, 2, 4])
@pytest.mark.parametrize("name", NEW_SETTINGS)
def test_codes_learned_priors_and_objectives_of_samplers_train_sample_and_are_scored(r, name):
    config = new_config(name, r, "training.steps=3")
    model = model_for(config)
    log = train(model, data(), config)
    assert all(math.isfinite(record["total"]) and record["gradient_norm"] > 0 for record in log)
    for record in log:  # the parts add up, at KL weight 1
        assert math.isclose(record["total"], record["reconstruction"] + record["kl"], rel_tol=1e-4, abs_tol=1e-5)
    assert not equal_weights(model, model_for(config))
    samples = model.sample(5, steps=r, generator=torch.Generator().manual_seed(0))
    assert ((samples.tokens >= 0) & (samples.tokens < 5)).all()
    assert samples.nfe == 4
    bound = nll_bound(model, random_tokens(5, 4), r, z="once", samples=2)
    assert bound.isfinite().all()
    assert (bound > 0).all()


@pytest.mark.parametrize(
    ("name", "mask_shape", "noise_shape"),
    [
        ("codes", (8, 4), None),
        ("codes-fresh", (8, 4), None),
        ("codes-once", (8, 2, 4), None),
        ("none-steps", (8, 4), None),
        ("learned", (8, 4), (8, 2, 2)),
        ("learned-fresh", (8, 4), (3, 8, 2, 2)),
        ("learned-once", (8, 2, 4), (3, 8, 2, 2)),
    ],
)
def test_a_batch_has_all_steps_of_one_z_and_noise_for_every_sample(name, mask_shape, noise_shape):
    config = new_config(name, 2)
    batch = draw_batch(model_for(config), data(), config.objective, 0, 8, None, torch.Generator().manual_seed(0))
    assert batch.masks.mask.shape == batch.masks.target.shape == mask_shape
    assert batch.masks.weight.shape == (8, 2)
    assert (None if batch.noise is None else tuple(batch.noise.shape)) == noise_shape


def test_objectives_that_do_not_fit_the_model_are_refused_before_training():
    for settings in (("objective.masking=steps", "objective.steps=3"), ("objective.kl_weight=0.5",)):
        config = dataclasses.replace(run_config(*settings), model=tiny_config(4, 2, z=codes()))
        with pytest.raises(InvalidInput, match=settings[-1].split("=")[0]):
            train(model_for(config), data(), config)


@pytest.mark.parametrize("name", ["codes-once", "learned-once"])
def test_new_settings_resume_bit_for_bit(out, name):
    config = new_config(name, 2)
    whole = model_for(config)
    train(whole, data(), config)
    with pytest.raises(Interrupted):
        train(model_for(config), data(), config, out=out, on_step=interrupt_at(4))
    resumed = model_for(config, seed=5)
    train(resumed, data(), config, out=out, resume=True)
    assert equal_weights(resumed, whole)


class StackedData:
    """The same rows for every member of an ensemble."""

    length, vocab_size, symbols = 4, 5, ()

    def __init__(self, members: int):
        self.members = members

    def batch(self, step, size, *, generator=None, device=None):
        return random_tokens(self.members * size, 4, seed=step).view(self.members, size, 4)


@pytest.mark.parametrize("r", [4, 2])
@pytest.mark.parametrize("name", ["codes", "codes-fresh", "codes-once", "learned-fresh", "learned-once"])
def test_members_of_an_ensemble_have_the_losses_and_gradients_they_have_alone(r, name):
    config = new_config(name, r)
    models = [model_for(config, seed) for seed in range(3)]
    ensemble, weights = Ensemble(models), torch.ones(3)
    batch = draw_batch(ensemble, StackedData(3), config.objective, 0, 6, None, torch.Generator().manual_seed(0))
    together = mean_loss(ensemble, batch, weights, 0.0)
    together.total.sum().backward()
    stacked = dict(zip(ensemble.names, ensemble.weights, strict=True))
    for index, model in enumerate(models):
        masks = batch.masks.map(lambda part, index=index: part[index])
        own = Batch(batch.x0[index], masks, None if batch.noise is None else batch.noise[index])
        alone = mean_loss(model, own, weights[index], 0.0)
        alone.total.backward()
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[index], b, atol=1e-5, rtol=1e-5)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(stacked[key].grad[index], parameter.grad, atol=1e-5, rtol=1e-4)
    assert float(together.total.detach().std()) > 1e-4  # members differ


# Looking at the model while it is trained


def copied(model: VMD) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_look_sees_the_weights_that_a_run_of_so_many_steps_would_keep(ema):
    """The averaged ones, bit for bit, where there is an average."""
    config = run_config("training.schedule=constant", ema=ema)
    model, seen = model_for(config), {}
    train(model, data(), config, on_look=lambda step: seen.update({step: copied(model)}), look_every=4)
    assert list(seen) == [4, 8, 10]
    for step, weights in seen.items():
        kept = trained(override_all(config, [f"training.steps={step}"]))
        assert all(torch.equal(tensor, weights[name]) for name, tensor in kept.state_dict().items())


@pytest.mark.parametrize("z_config", [latent(), codes()], ids=["gaussian", "codes"])
def test_looking_changes_nothing_of_the_run(tmp_path, z_config):
    config = dataclasses.replace(run_config("training.split_codes_every=3"), model=tiny_config(4, 2, z=z_config))
    plain, looked_at = model_for(config), model_for(config)

    def look(step: int) -> None:
        torch.rand(3)  # from the global generator
        looked_at.sample(3, steps=2)

    logs = [train(plain, data(), config, out=tmp_path / "plain")]
    logs += [train(looked_at, data(), config, out=tmp_path / "looked", on_look=look, look_every=1)]
    assert equal_weights(plain, looked_at)
    timeless = [[{k: v for k, v in record.items() if "second" not in k} for record in log] for log in logs]
    assert timeless[0] == timeless[1]
    for name in ("checkpoints/step-000000009.safetensors", "checkpoints/step-000000010.safetensors", "model.safetensors"):
        expected, found = (load_file(tmp_path / which / name) for which in ("plain", "looked"))
        assert expected.keys() == found.keys()
        assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())


@pytest.mark.parametrize(("every", "expected"), [(0, [10]), (3, [3, 6, 9, 10]), (5, [5, 10]), (99, [10])])
def test_looks_come_every_so_many_steps_and_at_the_end(every, expected):
    config, seen = run_config(), []
    train(model_for(config), data(), config, on_look=seen.append, look_every=every)
    assert seen == expected


def test_what_a_look_finds_stands_in_the_next_log_line():
    config = run_config("training.log_every=4")
    log = train(model_for(config), data(), config, on_look=lambda step: {f"at_{step}": 0.5}, look_every=3)
    found = {record["step"]: [name for name in record if name.startswith("at_")] for record in log}
    assert found == {1: [], 4: ["at_3"], 8: ["at_6"], 10: ["at_9", "at_10"]}


def test_a_resumed_run_looks_at_what_is_left(out):
    config, seen = run_config(), []
    with pytest.raises(Interrupted):
        train(model_for(config), data(), config, out=out, on_step=interrupt_at(7), on_look=seen.append, look_every=2)
    assert seen == [2, 4, 6]
    train(model_for(config), data(), config, out=out, resume=True, on_look=seen.append, look_every=2)
    assert seen == [2, 4, 6, 8, 10]


def test_a_look_that_fails_leaves_the_model_its_own_weights():
    config = run_config()
    looked_at, stopped = model_for(config), model_for(config)
    with pytest.raises(ZeroDivisionError):
        train(looked_at, data(), config, on_look=lambda step: 1 / 0, look_every=4)
    with pytest.raises(Interrupted):
        train(stopped, data(), config, on_step=interrupt_at(4))
    assert equal_weights(looked_at, stopped)


def test_a_look_that_fails_costs_no_step(out):
    config = run_config()

    def look(step: int) -> None:
        if step == config.training.steps:
            raise MemoryError

    with pytest.raises(MemoryError):
        train(model_for(config), data(), config, out=out, on_look=look, look_every=2)
    resumed, undisturbed = model_for(config), model_for(config)
    train(resumed, data(), config, out=out, resume=True, on_step=lambda step, record: pytest.fail("nothing is left to do"))
    train(undisturbed, data(), config)
    assert equal_weights(resumed, undisturbed)


def test_looking_is_not_training_time():
    config, started = run_config(), time.perf_counter()
    log = train(model_for(config), data(), config, on_look=lambda step: time.sleep(0.1), look_every=2)
    assert log[-1]["seconds"] < time.perf_counter() - started - 0.5
    assert all(a["seconds"] <= b["seconds"] for a, b in itertools.pairwise(log))


# The settings of Ye et al.


def test_linear_masks_and_focal_weights_train_what_mean_loss_says():
    config = run_config("objective.masking=linear", "objective.focal=1", "training.steps=3", ema=0)
    config = dataclasses.replace(config, model=tiny_config(4, 4, rotary=False, shifted=True))
    log = train(model_for(config), data(), config)
    generator = torch.Generator().manual_seed(step_seed(0, 0))
    first = draw_batch(model_for(config), data(), config.objective, 0, 8, None, generator)
    expected = mean_loss(model_for(config), first, torch.tensor(1.0), 0.0, focal=1.0)
    assert math.isclose(log[0]["total"], float(expected.total.detach()), rel_tol=1e-5)
    assert float(mean_loss(model_for(config), first, torch.tensor(1.0), 0.0).total.detach()) > log[0]["total"] + 0.01


def test_a_share_of_blocks_is_masked_whole_in_training():
    model = VMD(tiny_config(4, 4, 10))
    for whole, wanted in ((0.0, 8), (0.5, 20)):  # of 32 blocks: a quarter, and a quarter of the other half
        drawn = draw_batch(model, d1(), ObjectiveConfig(whole=whole), 0, 32, None, torch.Generator().manual_seed(0))
        assert int(drawn.masks.mask.view(32, 4).all(-1).sum()) == wanted


def test_members_of_an_ensemble_have_the_focal_losses_they_have_alone():
    config = dataclasses.replace(run_config("objective.focal=1"), model=tiny_config(4, 4))
    models = [model_for(config, seed) for seed in range(2)]
    batch = draw_batch(Ensemble(models), StackedData(2), config.objective, 0, 6, None, torch.Generator().manual_seed(0))
    together = mean_loss(Ensemble(models), batch, torch.ones(2), 0.0, 1.0).total
    for index, model in enumerate(models):
        own = Batch(batch.x0[index], batch.masks.map(lambda part, index=index: part[index]), None)
        torch.testing.assert_close(together[index], mean_loss(model, own, torch.tensor(1.0), 0.0, 1.0).total)


def test_every_run_that_compiles_starts_anew(monkeypatch):
    """torch.compile gives up on a function after eight models of one process; a table has more."""
    resets = []
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(True))
    for compiles in ("true", "false", "true"):
        trained(run_config(f"training.compile={compiles}", "training.steps=1"))
    assert len(resets) == 2
