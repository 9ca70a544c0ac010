import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vmd
from helpers import codes, latent, tiny_config
from vmd.config import (
    InvalidInput,
    LatentConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    TrainingConfig,
    from_dict,
    override,
    override_all,
    to_dict,
    with_new_fields,
)
from vmd.experiments.systems import is_of


def one_line(error) -> bool:
    return bool(str(error.value)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("training.steps=100", 100),
        ("training.steps=1e3", 1000),
        ("training.steps= 7 ", 7),
        ("training.learning_rate=3e-4", 3e-4),
        ("training.learning_rate=1", 1.0),
        ("training.compile=true", True),
        ("training.compile=No", False),
        ("training.schedule=linear", "linear"),
        ("model.latent.kind=none", "none"),
        ("model.latent.on_clean=1", True),
        ("model.symbols=a,b,c", ("a", "b", "c")),
        ('model.symbols=["a", ","]', ("a", ",")),
        ("model.symbols=", ()),
        ("data.name=a=b", "a=b"),
    ],
)
def test_text_is_read_as_the_type_of_its_field(setting, read):
    value = override_all(RunConfig(), [setting])
    for name in setting.partition("=")[0].split("."):
        value = getattr(value, name)
    assert value == read
    assert type(value) is type(read)


def test_an_override_changes_one_field_of_a_copy():
    before = RunConfig()
    after = override(before, "model.latent.dim", "5")
    assert before == RunConfig()
    assert after.model.latent.dim == 5
    assert override(after, "model.latent.dim", 32) == before


def test_later_settings_win():
    assert override_all(RunConfig(), ["training.steps=3", "training.steps=4"]).training.steps == 4


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("training.steps", "field=value"),
        ("training.stops=3", "training.stops|stops"),
        ("trainings.steps=3", "trainings"),
        ("training=3", "section"),
        ("training.steps.more=3", "no fields"),
        ("training.steps=many", "integer"),
        ("training.steps=1.5", "integer"),
        ("training.steps=nan", "integer"),
        ("training.steps=inf", "integer"),
        ("training.steps=0", "at least 1"),
        ("training.learning_rate=fast", "number"),
        ("training.learning_rate=nan", "finite"),
        ("training.learning_rate=inf", "finite"),
        ("training.learning_rate=0", "positive"),
        ("training.learning_rate=-1", "positive"),
        ("training.compile=maybe", "true or false"),
        ("training.optimizer=sgd", "adam"),
        ("training.ema=1", "decay"),
        ("training.seed=-1", "seed"),
        ("objective.kl_weight=-1", "kl_weight"),
        ("objective.masking=none", "counts"),
        ("model.latent.kind=beta", "gaussian"),
        ("model.latent.dim=0", "dim"),
        ("model.layers=0", "layers"),
        ("model.width=66", "multiple"),
        ("model.symbols=[1", "list"),
        ("=3", "unknown field"),
    ],
)
def test_bad_settings_are_refused_in_one_line(setting, says):
    with pytest.raises(InvalidInput, match=says) as error:
        override_all(RunConfig(), [setting])
    assert one_line(error)


@given(
    st.builds(
        RunConfig,
        model=st.builds(
            ModelConfig,
            vocab_size=st.sampled_from([0, 3]),
            length=st.sampled_from([0, 8]),
            block_size=st.sampled_from([0, 4]),
            latent=st.builds(LatentConfig, kind=st.sampled_from(["none", "gaussian"]), on_clean=st.booleans()),
            symbols=st.sampled_from([(), ("x", ",", "[")]),
        ),
        objective=st.builds(ObjectiveConfig, kl_weight=st.floats(0, 10), free_bits=st.floats(0, 1)),
        training=st.builds(TrainingConfig, seed=st.integers(0, 2**62), learning_rate=st.floats(1e-9, 1)),
    )
)
def test_a_config_survives_json(config):
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_missing_fields_take_their_defaults():
    assert from_dict(RunConfig, {"training": {"steps": 3}}) == override(RunConfig(), "training.steps", 3)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], "object"),
        ({"training": 3}, "training"),
        ({"novelty": {}}, "novelty"),
        ({"training": {"novelty": 1}}, "novelty"),
        ({"training": {"steps": True}}, "steps"),
        ({"training": {"steps": None}}, "steps"),
        ({"training": {"steps": [1]}}, "steps"),
        ({"training": {"learning_rate": None}}, "learning_rate"),
        ({"training": {"compile": 3}}, "compile"),
        ({"training": {"optimizer": ["adam"]}}, "optimizer"),
        ({"data": {"name": 3}}, "name"),
        ({"model": {"symbols": [1, 2]}}, "symbols"),
    ],
)
def test_wrong_values_are_refused_by_name(values, says):
    with pytest.raises(InvalidInput, match=says) as error:
        from_dict(RunConfig, values)
    assert one_line(error)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"length": 6, "block_size": 4}, "divisor"),
        ({"length": 4, "block_size": 6}, "divisor"),
        ({"block_size": -1}, "block_size"),
        ({"width": 12, "heads": 4}, "multiple"),
        ({"width": 8, "heads": 16}, "heads"),
        ({"vocab_size": 3, "symbols": ("a", "b")}, "2 names"),
        ({"vocab_size": 100_000}, "vocab_size"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(fields, says):
    with pytest.raises(InvalidInput, match=says):
        ModelConfig(**fields)


def test_the_data_decides_what_was_left_open():
    config = ModelConfig().resolved(6, 11)
    assert (config.length, config.vocab_size, config.block_size, config.blocks) == (6, 11, 6, 1)
    config = ModelConfig(block_size=2, vocab_size=20).resolved(6, 11)
    assert (config.vocab_size, config.block_size, config.blocks) == (20, 2, 3)
    assert ModelConfig().resolved(2, 2, ("a", "b")).symbols == ("a", "b")


@pytest.mark.parametrize(
    ("fields", "says"), [({"length": 5}, "length=5"), ({"vocab_size": 3}, "vocab_size=3"), ({"block_size": 4}, "divisor")]
)
def test_data_that_contradict_the_config_are_refused(fields, says):
    with pytest.raises(InvalidInput, match=says):
        ModelConfig(**fields).resolved(6, 11)


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().width = 3


def test_the_configuration_imports_no_torch():
    code = "import sys, vmd, vmd.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="novelty"):
        vmd.novelty  # noqa: B018


@pytest.mark.parametrize("name", sorted(set(vmd.__all__) - {"__version__", "preset"}))
def test_a_public_name_stays_what_it_is(name):
    """A function must not turn into the module that holds it once that module has been imported."""
    assert [callable(getattr(vmd, name)) for _ in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("objective.masking=step", "counts, times, steps"),
        ("objective.steps=", "steps is empty"),
        ("objective.steps=0", "objective.steps=0"),
        ("objective.steps=2,x", "integer"),
        ("objective.z=twice", "objective.z='twice'"),
        ("objective.whole=1", "objective.whole=1.0: expected a share"),
        ("objective.whole=-0.1", "objective.whole=-0.1: expected a share"),
        ("objective.samples=0", "objective.samples=0"),
        ("model.latent.codes=1", "model.latent.codes=1"),
        ("model.latent.head=linear", "bilinear, additive"),
        ("model.latent.head_dim=-1", "head_dim=-1"),
        ("model.latent.code_layers=-1", "code_layers=-1"),
        ("model.latent.code_chunk=-1", "code_chunk=-1"),
        ("model.latent.prior=flat", "normal, learned"),
        ("model.latent.prior_layers=0", "prior_layers=0"),
    ],
)
def test_bad_settings_of_latents_and_steps_are_refused_in_one_line(setting, says):
    with pytest.raises(InvalidInput, match=says) as error:
        override_all(RunConfig(), [setting])
    assert one_line(error)


def test_several_numbers_of_steps_are_read():
    assert override_all(RunConfig(), ["objective.steps=1,2,4"]).objective.steps == (1, 2, 4)


def test_settings_that_would_do_nothing_are_refused():
    for fields in ({"kind": "categorical", "prior": "learned"}, {"head": "additive", "head_dim": 8}):
        with pytest.raises(InvalidInput, match=r"model.latent.\w+=(learned|8): expected"):
            LatentConfig(**fields)
    with pytest.raises(InvalidInput, match=r"objective.samples=8: expected 1 without a latent"):
        ObjectiveConfig(samples=8).check(tiny_config(4, 2))


@pytest.mark.parametrize("fields", [{"kl_weight": 0.5}, {"kl_warmup_steps": 3}, {"free_bits": 0.1}], ids=str)
def test_importance_weights_have_no_kl_to_weigh(fields):
    ObjectiveConfig(**fields)
    with pytest.raises(InvalidInput, match=r"objective.samples=4") as error:
        ObjectiveConfig(samples=4, **fields)
    assert one_line(error)


@pytest.mark.parametrize("fields", [{"kl_weight": 0.5}, {"kl_warmup_steps": 3}, {"free_bits": 0.1}, {"samples": 2}], ids=str)
def test_codes_have_no_kl_to_weigh(fields):
    ObjectiveConfig(**fields).check(tiny_config(4, 2, z=latent()))
    ObjectiveConfig().check(tiny_config(4, 2, z=codes()))
    ((name, value),) = fields.items()
    with pytest.raises(InvalidInput, match=rf"objective.{name}={value}: expected \d with a latent of codes") as error:
        ObjectiveConfig(**fields).check(tiny_config(4, 2, z=codes()))
    assert one_line(error)


def test_steps_above_the_block_size_are_refused_where_they_are_used():
    for z_config in (latent(), codes()):
        ObjectiveConfig(masking="steps", steps=(1, 2)).check(tiny_config(4, 2, z=z_config))
        for unused in ({"steps": (1, 2)}, {"z": "once"}):
            with pytest.raises(InvalidInput, match=r"expected only with objective.masking=steps"):
                ObjectiveConfig(**unused).check(tiny_config(4, 2, z=z_config))
        with pytest.raises(InvalidInput, match=r"objective.steps=3: expected 1 to 2"):
            ObjectiveConfig(masking="steps", steps=(1, 3)).check(tiny_config(4, 2, z=z_config))


def test_blocks_are_masked_whole_by_counts_only():
    ObjectiveConfig(whole=0.5).check(tiny_config(4, 2))
    for masking in ("times", "steps", "linear"):
        with pytest.raises(InvalidInput, match=r"objective.whole=0.5: expected only with objective.masking=counts"):
            ObjectiveConfig(masking=masking, whole=0.5).check(tiny_config(4, 2))


def test_latents_that_reach_later_blocks_take_one_sample_once():
    several, one = (tiny_config(4, r, z=latent(on_clean=True)) for r in (2, 4))
    ObjectiveConfig(samples=3).check(one)
    ObjectiveConfig(masking="steps", steps=(1, 2), z="fresh").check(one)
    ObjectiveConfig(masking="steps", steps=(1, 2), z="once").check(several)
    ObjectiveConfig(masking="steps", steps=(1,), z="fresh").check(several)
    with pytest.raises(InvalidInput, match=r"objective.samples=3.*on_clean"):
        ObjectiveConfig(samples=3).check(several)
    with pytest.raises(InvalidInput, match=r"objective.z=fresh.*on_clean"):
        ObjectiveConfig(masking="steps", steps=(1, 2), z="fresh").check(several)


def test_codes_need_a_layer_before_them_and_no_clean_stream():
    tiny_config(4, 2, z=codes(layers=1))
    with pytest.raises(InvalidInput, match=r"code_layers=2: expected fewer than model.layers = 2"):
        tiny_config(4, 2, z=codes(layers=2))
    tiny_config(4, 2, z=LatentConfig(kind="gaussian", code_layers=2))  # not used there
    with pytest.raises(InvalidInput, match=r"on_clean=true.*codes"):
        codes(on_clean=True)


def test_settings_of_latents_and_steps_survive_json():
    model = tiny_config(4, 2, z=codes(7, "additive", 1, code_chunk=3))
    config = RunConfig(model, ObjectiveConfig(masking="steps", steps=(1, 2), z="once"))
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_a_configuration_from_before_a_field_was_there_is_the_same_with_its_default():
    run = override_all(RunConfig(), ["model.width=32"])
    saved = to_dict(run)
    del saved["model"]["draft"], saved["objective"]["focal"]
    assert with_new_fields(saved) == to_dict(run)
    assert is_of(saved, run)
    assert not is_of(saved, override_all(run, ["model.draft=8", "model.latent.kind=none"]))
    foreign = {"model": {"no such field": 1}}
    assert with_new_fields(foreign) == foreign
