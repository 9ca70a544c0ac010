"""Counted work, measured speed and what `vmd bench` writes. No test here depends on how fast anything is."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from command import refused, settings, succeeds
from helpers import NO_LATENT, codes, latent, learned_prior, random_tokens, tiny_config
from vmd.bench import as_fast_as_it_gets, cases_of, exponent, run_bench
from vmd.config import InvalidInput, LatentConfig, ModelConfig, RunConfig, TrainingConfig
from vmd.experiments.tables import bench_table
from vmd.flops import forward_flops, sampling_flops
from vmd.masking import draw_masks
from vmd.model import VMD
from vmd.presets import preset
from vmd.step import check_attention, fast_settings

SMALL = ("model.length=16", "model.layers=2", "model.width=16", "model.heads=2", "model.latent.codes=4")
TINY = settings(*SMALL, "training.batch_size=4")


def counted(config: ModelConfig, **how: float) -> float:
    """Operations of the matrix products that a forward pass in training really makes, by torch's counter, for a sequence."""
    rows = 8  # what does not depend on them hardly counts
    model, x0 = VMD(config).eval(), random_tokens(rows, config.length, config.vocab_size)
    masks = draw_masks(x0, config.block_size, whole=1.0)  # codes of tokens that are not masked may be left out
    shape = model.latent_shape(rows)
    noise = torch.randn(shape) if shape is not None and config.latent.kind == "gaussian" else None
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x0, masks, noise, **how)
    return counter.get_total_flops() / rows


@pytest.mark.parametrize(
    "z",
    [
        NO_LATENT,
        latent(),
        latent("doubled"),
        learned_prior(),
        replace(latent(), encoder_layers=0),
        codes(),
        codes(by_place=True),
        codes(layers=1),
        codes(head="additive"),
    ],
    ids=["none", "gaussian", "doubled", "learned-prior", "noise", "codes", "by-place", "last-layer", "additive"],
)
def test_counted_work_of_one_block_is_what_torch_counts(z):
    config = ModelConfig(vocab_size=11, length=12, layers=3, width=16, heads=2, latent=z).resolved(12, 11)
    assert forward_flops(config) == pytest.approx(counted(config), rel=0.03)


@pytest.mark.parametrize("r", [12, 4])
def test_a_draft_head_that_scores_twice_works_twice(r):
    config = ModelConfig(vocab_size=11, length=12, block_size=r, layers=3, width=16, heads=2, draft=64, latent=NO_LATENT)
    once, twice = counted(config), counted(config, together=0.5)
    assert forward_flops(config, together=True) - forward_flops(config) == pytest.approx(twice - once, rel=0.03)
    assert twice > 1.2 * once


@pytest.mark.parametrize("r", [12, 3])
def test_a_z_of_noise_costs_its_pathway_alone(r):
    shape = {"vocab_size": 11, "length": 12, "block_size": r, "layers": 3, "width": 16, "heads": 2}
    plain, noise = (ModelConfig(**shape, latent=z) for z in (NO_LATENT, replace(latent(), encoder_layers=0)))
    expected = counted(noise) - counted(plain)
    assert forward_flops(noise) - forward_flops(plain) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("r", [4, 32])
@pytest.mark.parametrize(
    "z",
    [
        NO_LATENT,
        latent(),
        learned_prior(),
        codes(),
        codes(by_place=True),
        codes(layers=1),
        codes(head="additive"),
        "draft",
    ],
    ids=["none", "gaussian", "learned-prior", "codes", "by-place", "last-layer", "additive", "draft"],
)
def test_counted_work_of_sampling_is_most_of_what_torch_counts(z, r, steps):
    """What is counted less is work that nothing needs: z's way in at every step, the last layer of finished blocks."""
    config = ModelConfig(11, 32, r, layers=4, width=32, heads=2, latent=NO_LATENT if z == "draft" else z)
    model = VMD(replace(config, draft=16) if z == "draft" else config).eval()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model.sample(1, steps=steps)
    useful, made = sampling_flops(model.config, steps), counter.get_total_flops()
    assert 0.6 * made < useful < 1.01 * made
    if z == NO_LATENT and r == 32:
        assert useful == pytest.approx(made, rel=0.01)


def test_a_prior_by_place_reads_every_token():
    alike, placed = (ModelConfig(11, 32, 4, width=32, latent=codes(64, by_place=by_place)) for by_place in (False, True))
    more = (32 - 8) * 2 * 32 * 64  # 8 blocks
    assert forward_flops(placed) - forward_flops(alike) == more
    assert sampling_flops(placed, 2) - sampling_flops(alike, 2) == more


def test_useful_work_is_less_than_what_a_dense_mask_makes():
    config = ModelConfig(vocab_size=11, length=64, block_size=4, layers=4, width=16, heads=2, latent=NO_LATENT)
    assert 0.5 * counted(config) < forward_flops(config) < counted(config)


def test_work_grows_as_it_should():
    def flops(**changes) -> float:
        base = {"vocab_size": 27, "length": 256, "block_size": 4, "layers": 8, "width": 64, "heads": 4, "latent": NO_LATENT}
        return forward_flops(ModelConfig(**(base | changes)))

    assert flops(length=512) > 2 * flops()  # attention is more than linear
    assert 3.5 < flops(width=256) / flops(width=128) < 4
    k64, k128, k256 = (flops(latent=LatentConfig(kind="categorical", codes=k)) for k in (64, 128, 256))
    assert k256 - k128 == pytest.approx(2 * (k128 - k64))
    by_layer = [flops(latent=LatentConfig(kind="categorical", codes=8, code_layers=m)) for m in (1, 2, 3)]
    assert by_layer[2] - by_layer[1] == pytest.approx(by_layer[1] - by_layer[0])


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_exponents_are_recovered(power):
    assert exponent([1, 2, 8, 64], [3 * n**power for n in (1, 2, 8, 64)]) == pytest.approx(power, abs=1e-9)


@pytest.mark.parametrize("what", ["train", "sample"])
def test_a_bench_says_what_it_measured(what, tmp_path):
    out = tmp_path / "bench.json"
    more = ["--batch", "2", "--steps", "1,2"] if what == "sample" else []
    printed = succeeds("bench", what, "text", *TINY, *more, "--device", "cpu", "--json", out)
    record = json.loads(out.read_text())
    assert record["what"] == what
    assert record["hardware"]["device"] == "cpu"
    assert record["configuration"]["model"]["length"] == 16
    assert "naive" in printed.err
    for row in record["rows"]:
        assert row["tokens_per_second"] > 0
        assert row["spread"] >= 0
        assert row["utilisation"] == pytest.approx(row["flops_per_token"] * row["tokens_per_second"] / row["ceiling_flops"])
        if what == "train":  # on a CPU the same path
            assert "naive" not in row
        else:
            assert row["times_naive"] > 0
            assert row["naive"]["path"]
        assert row["without_latent"]["tokens_per_second"] > 0
    if what == "train":
        (row,) = record["rows"]
        assert row["bandwidth_bytes"] > 0
        assert row["utilisation"] == pytest.approx(row["flops_per_token"] * row["tokens_per_second"] / row["ceiling_flops"])
    else:
        assert [(row["batch"], row["steps"], row["nfe"]) for row in record["rows"]] == [(2, 1, 4), (2, 2, 8)]


@pytest.mark.parametrize(
    ("what", "vary", "values"),
    [
        ("train", "model.latent.codes=2,8", ["2", "8"]),
        ("train", "batch=2,4", ["2", "4"]),
        ("sample", "steps=1,2,4", ["1", "2", "4"]),
        ("sample", "model.length=8,16", ["8", "16"]),
    ],
)
def test_growth_has_a_row_for_every_value_and_an_exponent(what, vary, values):
    run = RunConfig(
        model=ModelConfig(vocab_size=5, length=8, block_size=4, width=16, heads=2, latent=LatentConfig(kind="categorical")),
        training=TrainingConfig(batch_size=2),
    )
    record = run_bench(what, run, "cpu", batches=[2], steps=[1], vary=vary)
    assert [row["value"] for row in record["rows"]] == values
    assert isinstance(record["exponent"], float)
    headers, lines = bench_table(record)
    assert all(len(line) == len(headers) for line in lines)


def test_a_preset_with_data_has_its_sizes():
    (case,) = cases_of("train", preset("d1-block2-paper"), [1], [1], "", [])
    assert (case.run.model.length, case.run.model.vocab_size, case.batch) == (4, 10, 10_000)


def test_every_batch_is_sampled_with_every_number_of_steps():
    run = RunConfig(model=tiny_config(8, 4))
    cases = cases_of("sample", run, [1, 3], [1, 2], "", [])
    assert [(case.batch, case.steps) for case in cases] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    assert len(cases_of("train", run, [1, 3], [1, 2], "", [])) == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["fly"], "fly"),
        (["train", "nothing"], "nothing"),
        (["train", "array"], "model.length"),
        (["train", "text", "--vary", "model.length=256"], "two different"),
        (["train", "text", "--vary", "steps=1,2"], "vmd bench sample"),
        (["train", "text", "--vary", "=1,2"], "FIELD"),
        (["train", "text", "--vary", "batch=4,4"], "different"),
        (["train", "text", "--vary", "training.accumulate=1,3"], "512"),
        (["train", "text", "--vary", "training.precision=float32,bf16"], "bf16"),
        (["sample", "text", "--steps", "9"], "9"),
        (["sample", "text", "--vary", "batch=1,x"], "x"),
        (["train", "text", "--vary", "model.nothing=1,2"], "model.nothing"),
        (["train", "text", "--json", "somewhere.txt"], "somewhere.txt"),
    ],
)
def test_bad_requests_get_one_line(words, named, tmp_path):
    assert named in refused("bench", *words, "--device", "cpu", folder=tmp_path)


# What is chosen for speed


def of_heads(size: int, blocks: int = 64, **training) -> RunConfig:
    model = ModelConfig(27, 4 * blocks, 4, width=8 * size, heads=8, latent=NO_LATENT)
    return RunConfig(model, training=TrainingConfig(**training))


def test_kernels_are_chosen_where_they_fit_and_pay():
    chosen = [
        fast_settings(run, "cuda")["attention"] for run in (of_heads(32), of_heads(24), of_heads(32, 1), of_heads(32, 8))
    ]
    assert chosen == ["fused", "dense", "dense", "dense"]


@pytest.mark.parametrize(
    ("length", "head", "attention"),
    [(81, 32, "fused"), (164, 32, "fused"), (256, 32, "fused"), (257, 32, "dense"), (164, 64, "dense"), (32, 32, "dense")],
)
def test_a_kernel_is_chosen_for_one_block_that_fits_it(length, head, attention):
    run = RunConfig(ModelConfig(9, length, length, width=2 * head, heads=2, latent=NO_LATENT))
    assert fast_settings(run, "cuda")["attention"] == attention


def test_only_long_runs_are_compiled():
    assert not fast_settings(of_heads(32, steps=10, batch_size=8), "cuda")["compile"]
    assert fast_settings(of_heads(32, steps=10_000, batch_size=512), "cuda")["compile"]


def test_nothing_is_chosen_without_a_gpu():
    assert fast_settings(of_heads(32), "cpu") == {}


def test_what_was_set_is_not_chosen_again():
    run = as_fast_as_it_gets(of_heads(32, precision="tf32"), "cuda", {"training.precision", "training.capture"})
    assert (run.training.precision, run.training.capture, run.training.compile) == ("tf32", False, True)


def test_heads_that_the_kernels_do_not_know_are_named():
    with pytest.raises(InvalidInput, match="heads of size 24: expected one of 32, 64, 128"):
        check_attention(TrainingConfig(attention="fused"), of_heads(24).model)


@pytest.mark.parametrize(
    ("name", "shared", "attention"), [("A100", 166_912, "dense"), ("RTX 50", 101_376, "dense"), ("H200", 232_448, "fused")]
)
def test_kernels_are_chosen_where_their_tiles_fit(name, shared, attention, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    properties = SimpleNamespace(name=name, shared_memory_per_block_optin=shared)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: properties)
    assert fast_settings(of_heads(32), "cuda")["attention"] == attention


def test_the_command_is_kept_without_where_its_record_goes(tmp_path):
    from vmd.commands.bench import without

    plain = ["bench", "sample", "--batch", "2", "--set", "a=--json"]
    for extra in (["--json", "./x.json"], ["--json=y.json"], []):
        assert without("--json", [*plain[:2], *extra, *plain[2:]]) == plain


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "--vary", "training.steps=10,20"), "--vary training.steps: expected a field that changes a step"),
        (("sample", "--vary", "batch=1,99999999999"), "batch=99999999999: expected an integer of 1 to ten million"),
        (("sample", "--batch", "99999999999"), "--batch"),
        (("train", "--json", "folder.json"), "folder.json: expected a file, found a folder"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_said_first(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    assert said in refused("bench", *words[:1], "text", *words[1:], *TINY, "--device", "cpu", folder=tmp_path)
