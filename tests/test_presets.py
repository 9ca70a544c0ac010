import dataclasses
from dataclasses import replace

import pytest

from command import succeeds
from vmd.config import InvalidInput, RunConfig, override_all
from vmd.data import law
from vmd.experiments.controlled import PAPER
from vmd.metrics import accuracy
from vmd.model import VMD
from vmd.presets import FOUR_TOKEN, OUR_KL_WEIGHT, TWO_TOKEN, all_presets, controlled, paper_kl_weight, preset, synthetic
from vmd.training import train

PRESETS = all_presets()
WITH_DATA = [name for name, run in PRESETS.items() if run.data.name]


def without_data(run: RunConfig) -> RunConfig:
    return replace(run, data=replace(run.data, name=""), objective=replace(run.objective, kl_weight=0.0))


@pytest.mark.parametrize("name", WITH_DATA)
def test_a_preset_makes_a_model_of_its_data(name):
    run = preset(name)
    data = law(run.data.name)
    model = VMD(run.model.resolved(data.length, data.vocab_size, data.symbols))
    assert model.config.has_latent is ("mdm" not in name)
    assert (model.encoder is None) is (model.config.latent.kind != "gaussian")


def test_presets_for_one_s_own_data_wait_for_it():
    waiting = [name for name in PRESETS if name not in WITH_DATA]
    own = [f"{kind}{latent}" for kind in ("array", "text", "text-small", "sudoku") for latent in ("", "-gaussian", "-mdm")]
    text = ["text-draft", "text-small-draft", "text-paper", "text-mdm-paper"]
    assert waiting == [*own, *text, "sudoku-paper", "sudoku-mdm-paper", "sudoku-noise-paper", "sudoku-gpt2"]


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("d") or name.startswith("non")])
def test_a_name_says_data_and_block_size(name):
    run = preset(name)
    data, _, rest = name.removesuffix("-paper").removesuffix("-mdm").partition("-block")
    assert run.data.name == data
    assert run.model.block_size == (int(rest) if rest else 2)


@pytest.mark.parametrize("name", [name for name in PRESETS if "-mdm" in name])
def test_a_baseline_is_its_model_without_the_latent(name):
    whole, plain = preset(name.replace("-mdm", "")), preset(name)
    assert whole.model.latent.by_place == (
        name in ("text-mdm", "text-small-mdm")
    )  # of short blocks, whose places are not alike
    assert whole.model.has_latent
    latent, objective = (
        dataclasses.replace(whole.model.latent, kind="none", by_place=False),
        dataclasses.replace(whole.objective, together=0.0),  # by place, together: of codes
    )
    assert plain == dataclasses.replace(whole, model=dataclasses.replace(whole.model, latent=latent), objective=objective)


@pytest.mark.parametrize("family", ["ours", "paper"])
def test_rows_of_a_table_differ_in_data_and_kl_weight_only(family):
    assert len({without_data(synthetic(data, 2, family=family)) for data in TWO_TOKEN}) == 1
    for block_size in (2, 4):
        assert len({without_data(synthetic(data, block_size, family=family)) for data in FOUR_TOKEN}) == 1


def test_every_row_of_the_paper_has_its_presets():
    for system, data, block_size, _ in PAPER:
        name = data + (f"-block{block_size}" if data in FOUR_TOKEN else "") + ("-mdm" if system == "MDM" else "")
        assert name in PRESETS
        assert f"{name}-paper" in PRESETS


def test_the_papers_settings():
    """Section 4.1 and the appendix: 8 layers of width 64, a latent of 32 from 2 layers, Adam 1e-3, batches of 10,000."""
    run = preset("deterministic-paper")
    assert (run.model.layers, run.model.width, run.model.latent.dim, run.model.latent.encoder_layers) == (8, 64, 32, 2)
    assert (run.model.latent.encoder_stream, run.model.latent.on_clean) == ("doubled", True)
    assert (run.training.optimizer, run.training.learning_rate, run.training.schedule) == ("adam", 1e-3, "constant")
    assert run.training.batch_size == 10_000


def test_the_papers_kl_weight_is_four_for_uniform_data_and_one_otherwise():
    assert paper_kl_weight("deterministic", 2) == 4 * paper_kl_weight("non-uniform", 2)
    assert paper_kl_weight("d2", 4) == 2 * paper_kl_weight("d2", 2) == 4 * 4 / 32
    assert paper_kl_weight("dependence-0.3", 2, dim=2) == 1


def test_our_kl_weights_are_those_of_the_tables():
    assert OUR_KL_WEIGHT.keys() == {(d, 2) for d in TWO_TOKEN} | {(d, block) for d in FOUR_TOKEN for block in (2, 4)}
    assert all(0 < weight <= 1 for weight in OUR_KL_WEIGHT.values())


def test_an_unknown_preset_is_refused_with_some_that_are_known():
    with pytest.raises(InvalidInput, match=r"unknown preset 'pokre': .*such as poker, "):
        preset("pokre")


def test_an_unknown_preset_is_refused_with_those_that_are_like_it(tmp_path):
    with pytest.raises(InvalidInput, match=r"'text-tiny'.*text-small"):
        preset("text-tiny")
    path = tmp_path / "mine.txt"
    path.write_text("text")
    with pytest.raises(InvalidInput, match=rf"a path goes with --data {path}$"):
        preset(str(path))


def test_the_command_lists_every_preset():
    done = succeeds("presets", "--all")
    head, *listed = done.out.splitlines()
    assert head.split() == ["preset", "data", "layers", "blocks", "latent", "training"]
    assert [line.split()[0] for line in listed] == list(PRESETS)
    assert done.err == ""


def test_presets_of_the_controlled_experiments_are_listed_when_asked_for():
    done = succeeds("presets")
    shown = [line.split()[0] for line in done.out.splitlines()[1:]]
    left_out = controlled()
    assert shown == [name for name in PRESETS if name not in left_out]
    assert {"array", "poker", "text", "text-small", "sudoku"} < set(shown)
    assert {PRESETS[name].data.name for name in left_out} == {*TWO_TOKEN, *FOUR_TOKEN}
    assert f"and {len(left_out)} of the controlled experiments" in done.err


def test_a_preset_takes_settings():
    run = preset("poker", "training.steps=7", "model.width=32")
    assert (run.training.steps, run.model.width) == (7, 32)
    assert preset("poker") == PRESETS["poker"]
    for wrong, told in (("steps=7", "expected objective.steps or training.steps"), (7, "expected field=value")):
        with pytest.raises(InvalidInput, match=told):
            preset("poker", wrong)


@pytest.mark.parametrize("name", ["array", "poker", "d2-block4-mdm-paper"])
def test_what_the_command_shows_can_be_set(name):
    shown = succeeds("presets", name).out.splitlines()
    assert override_all(RunConfig(), shown) == preset(name)


@pytest.mark.parametrize(("name", "rule", "right"), [("poker", "sample", 99), ("poker-gaussian", "argmax", 90)])
def test_the_poker_preset_writes_hands_and_completes_them(name, rule, right):
    """The quickstart's promise, with a trained model: two words that agree, and a prompt that is heeded."""
    hands = law("poker")
    run = preset(name)
    model = VMD.for_data(run.model, hands)
    train(model, hands, run)
    seeds = list(range(1_000))
    assert accuracy(model.sample(1_000, rule=rule, seeds=seeds).tokens, hands) > right
    prompt = hands.sequences.repeat(250, 1)
    prompt[:, 1] = -1
    completed = model.sample(prompt=prompt, rule=rule, seeds=seeds).tokens
    assert accuracy(completed, hands) > 98
