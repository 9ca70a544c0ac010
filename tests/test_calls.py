"""What Python calls of the wrong type get: one line that names the value and what was expected, as on the command line."""

import os

import numpy as np
import pytest
import torch

import vmd
from helpers import codes, tiny_model
from vmd import DataConfig, InvalidInput, LatentConfig, ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig

MODEL = tiny_model(4, 2, 5, z=codes())
GAPS, TEXT = torch.full((1, 4), -1), torch.tensor([1, -1, 2, 3])
LAW, RUN = vmd.law("d1"), vmd.preset("array")

WRONG = [
    (lambda: MODEL.sample("3"), "n='3': expected a whole number"),
    (lambda: MODEL.sample(3.5), "n=3.5: expected a whole number"),
    (lambda: MODEL.sample(True), "n=True: expected a whole number"),
    (lambda: MODEL.sample(0), "n=0: expected a whole number"),
    (lambda: MODEL.sample(), "n=None: expected a whole number"),
    (lambda: MODEL.sample(1, steps="1"), "steps='1': expected 1 to 2"),
    (lambda: MODEL.sample(1, steps=1.5), "steps=1.5: expected 1 to 2"),
    (lambda: MODEL.sample(1, temperature="1"), "temperature='1': expected a positive number"),
    (lambda: MODEL.sample(1, top_p=None), "top_p=None: expected a number"),
    (lambda: MODEL.sample(1, order=[]), "order=[]: expected one of"),
    (lambda: MODEL.sample(1, order_noise="1"), "order_noise='1': expected a number"),
    (lambda: MODEL.sample(1, batch_size=2.5), "batch_size=2.5: expected a whole number"),
    (lambda: MODEL.sample(1, seeds=3), "seeds=3: expected whole numbers, one for each of 1 rows"),
    (lambda: MODEL.sample(1, seeds=["a"]), "seeds=['a']: expected whole numbers"),
    (lambda: MODEL.sample(1, seeds=[1.5]), "seeds=[1.5]: expected whole numbers"),
    (lambda: MODEL.sample(1, seeds=[1, 2]), "2 seeds: expected one for each of 1 rows"),
    (lambda: MODEL.sample(1, generator=3), "generator=3: expected a torch.Generator"),
    (lambda: MODEL.sample(prompt=[[0, 1, -1, -1]]), "a prompt of type list: expected a tensor"),
    (lambda: MODEL.sample(prompt=torch.tensor(3)), "a prompt of shape (): expected"),
    (lambda: MODEL.sample(prompt=GAPS == 0), "a prompt of torch.bool: expected integers"),
    (lambda: MODEL.desk("1"), "a desk of '1' rows: expected a whole number"),
    (lambda: MODEL.shortened("2"), "length '2': expected"),
    (lambda: MODEL.save_pretrained(None), "None: expected the path of a folder"),
    (lambda: MODEL.save_pretrained(""), "'': expected the path of a folder"),
    (lambda: vmd.VMD.from_pretrained(None), "None: expected a model folder"),
    (lambda: vmd.VMD(RUN), "VMD(RunConfig): expected a ModelConfig"),
    (lambda: vmd.sample(MODEL, "abcd"), "a prompt of type str: expected a tensor"),
    (lambda: vmd.infill(MODEL, TEXT, steps="2"), "steps='2': expected"),
    (lambda: vmd.infill(MODEL, "a _ b"), "a prompt 'a _ b': expected tokens: this is no model of text"),
    (lambda: vmd.infill(MODEL, GAPS), "a prompt of shape (1, 4): expected a tensor of shape (length,)"),
    (lambda: vmd.infill(MODEL, [1, -1]), "a prompt of type list: expected a tensor of shape (length,)"),
    (lambda: vmd.infill(MODEL, TEXT, "2"), "n='2': expected a whole number"),
    (lambda: vmd.infill(MODEL, TEXT, True), "n=True: expected a whole number"),
    (lambda: vmd.infill(MODEL, TEXT, tries=1.5), "tries=1.5: expected a whole number"),
    (lambda: vmd.infill(MODEL, TEXT, seeds=3), "seeds=3: expected whole numbers"),
    (lambda: vmd.infill(MODEL, TEXT, generator=3), "generator=3: expected a torch.Generator"),
    (lambda: vmd.preset(3), "unknown preset 3"),
    (lambda: vmd.preset([]), "unknown preset []"),
    (lambda: vmd.law(3), "unknown data 3"),
    (lambda: vmd.VMD.for_data(vmd.preset("text").model, "mine.txt"), "for_data(ModelConfig, str)"),
    (lambda: vmd.load_data(__file__, length="8"), "text needs a length"),
    (lambda: vmd.load_data(__file__, length=8, tokenizer=3), "tokenizer 3: expected"),
    (lambda: vmd.draw_masks([[1]], 2), "x0: expected a tensor"),
    (lambda: vmd.draw_masks(GAPS, "2"), "block_size='2': expected a divisor of the length 4"),
    (lambda: vmd.draw_masks(GAPS, 3), "block_size=3: expected a divisor of the length 4"),
    (lambda: vmd.train(None, LAW, RUN), "train(NoneType, Law, RunConfig): expected a model"),
    (lambda: vmd.train(MODEL, None, RUN), "train(VMD, NoneType, RunConfig): expected a model"),
    (lambda: vmd.train(MODEL, LAW, RUN.training), "train(VMD, Law, TrainingConfig): expected a model"),
    (lambda: vmd.train(MODEL, LAW, RUN, out=""), "'': expected the path of a folder"),
    (lambda: ModelConfig(width="64"), "model.width='64': expected a whole number"),
    (lambda: ModelConfig(rotary=1), "model.rotary=1: expected True or False"),
    (lambda: ModelConfig(symbols=(1, 2)), "model.symbols=(1, 2): expected a tuple, each text"),
    (lambda: ModelConfig(latent="none"), "model.latent='none': expected a LatentConfig"),
    (lambda: LatentConfig(kind=[]), "model.latent.kind=[]: expected one of"),
    (lambda: TrainingConfig(steps=4.5), "training.steps=4.5: expected a whole number"),
    (lambda: TrainingConfig(ema=None), "training.ema=None: expected a number"),
    (lambda: ObjectiveConfig(steps=1), "objective.steps=1: expected a tuple, each a whole number"),
    (lambda: DataConfig(name=3), "data.name=3: expected text"),
    (lambda: RunConfig(model=3), "model=3: expected a ModelConfig"),
]


@pytest.mark.parametrize(("call", "says"), WRONG, ids=[says.split(":")[0] for _, says in WRONG])
def test_a_wrong_call_is_one_line(call, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput) as refusal:
        call()
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert os.listdir(tmp_path) == []


def test_numbers_of_other_libraries_are_numbers():
    drawn = [
        MODEL.sample(2, steps=2, seeds=[1, 2], temperature=1),
        MODEL.sample(np.int64(2), steps=np.int32(2), seeds=np.array([1, 2]), temperature=np.float32(1)),
        MODEL.sample(2, steps=2, seeds=torch.tensor([1, 2]), top_p=1),
        MODEL.sample(2, steps=2, seeds=range(1, 3)),
    ]
    assert all(torch.equal(some.tokens, drawn[0].tokens) for some in drawn)
    filled = [vmd.infill(MODEL, TEXT, n, seeds=seeds).tokens for n, seeds in ((2, [1, 2]), (np.int64(2), np.array([1, 2])))]
    assert torch.equal(*filled)
    assert ObjectiveConfig(kl_weight=1).kl_weight == 1


def test_what_is_given_otherwise_becomes_what_is_declared(tmp_path):
    """So that it compares, and can be written."""
    given = ModelConfig(width=np.int64(64), rotary=np.True_, symbols=["a", "b"], vocab_size=torch.tensor(2), length=4)
    assert given == ModelConfig(width=64, rotary=True, symbols=("a", "b"), vocab_size=2, length=4)
    assert all(type(value) in (int, bool, str, tuple, LatentConfig) for value in vars(given).values())
    assert vmd.VMD.from_pretrained(vmd.VMD(given).save_pretrained(tmp_path)).config.width == 64
    assert ObjectiveConfig(steps=[1, 2], kl_weight=np.float32(0.5)) == ObjectiveConfig(steps=(1, 2), kl_weight=0.5)
    assert DataConfig(name=tmp_path).name == str(tmp_path)


def test_a_tokenizer_of_another_library_is_left_alone(tmp_path):
    foreign = tmp_path / "tokenizer.json"
    foreign.write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    MODEL.save_pretrained(tmp_path)
    assert foreign.is_file()
    assert vmd.VMD.from_pretrained(tmp_path).tokenizer is None


def test_public_names_are_found_by_tab():
    assert {"VMD", "infill", "preset", "train"} <= set(dir(vmd))


@pytest.mark.parametrize("batch_size", [8192, 2])
def test_one_is_told_how_far_a_sample_is(batch_size):
    told = []
    MODEL.sample(4, batch_size=batch_size, on_progress=lambda done, total: told.append((done, total)))
    total = 2 * -(-4 // batch_size)  # two blocks in every batch
    assert told == [(done, total) for done in range(1, total + 1)]
