"""Tables of categories: read, learned, written, filled in and scored; a column has its own values and no others."""

import csv
import io
import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vmd
from command import TINY, refused, settings, succeeds
from helpers import NO_LATENT, codes, latent, strengthened
from vmd.config import InvalidInput, ModelConfig
from vmd.data import ArrayData, TableData, load_data
from vmd.data.columns import MOST_VALUES, load_csv, parse_row, prompt_of, to_csv
from vmd.likelihood import nll_bound
from vmd.model import VMD

COLUMNS = (("country", "Italy", "Norway"), ("city", "Bergen", "Oslo", "Rome", "Rome, south"), ("size", "1", "20", ""))
TOKENS = np.array([[0, 2, 0], [0, 3, 2], [1, 0, 1], [1, 1, 1]])


def model_of_table(block_size=3, z=NO_LATENT, draft=0, seed=0) -> VMD:
    config = ModelConfig(width=16, layers=1, heads=2, block_size=block_size, latent=z, draft=draft, columns=COLUMNS)
    return strengthened(VMD(config.resolved(3, 4), seed=seed).eval())


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(to_csv(COLUMNS, torch.from_numpy(TOKENS)))
    return tmp_path


def test_a_table_is_read_by_its_line_of_names(here):
    found = load_data("t.csv")
    assert isinstance(found, TableData)
    assert (found.columns, found.vocab_size, found.length) == (COLUMNS, 4, 3)
    assert found.rows_at(np.arange(4)).tolist() == TOKENS.tolist()


CELLS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=5)


@given(st.data(), st.sampled_from(",;\t"))
def test_any_values_are_written_as_they_were_read(data, delimiter):
    width = data.draw(st.integers(2, 4))
    names = [f"column {number}" for number in range(width)]
    row = st.lists(CELLS, min_size=width, max_size=width).filter(any)
    rows = [*data.draw(st.lists(row, min_size=1, max_size=6)), ["not a number", *["1"] * (width - 1)]]
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([names, *rows])

    found = load_csv_text(text.getvalue())
    again = io.StringIO()
    csv.writer(again, lineterminator="\n").writerows([names, *rows])
    assert to_csv(found.columns, torch.from_numpy(found.tokens)) == again.getvalue()


def load_csv_text(text: str) -> TableData:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_text(text, encoding="utf-8", newline="")
        found = load_csv(path)
    assert isinstance(found, TableData)
    return found


def test_values_of_numbers_are_in_their_order():
    assert load_csv_text("a,b\n10,x\n9,y\n-1,x\n,y\n").columns[0] == ("a", "-1", "9", "10", "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("country,city\nItaly,Rome\nItaly\n", "line 3: 1 values: expected 2"),
        ("a,a\nx,y\n", "two columns 'a'"),
        (",city\nItaly,Rome\n", "line 1: ',city': '' names no column"),
        ("1,2\nx,y\n", "line 2: 'x,y': expected integers"),
        ("a,b\n" + "".join(f"x{number},y\n" for number in range(MOST_VALUES + 1)), "column 'a' has 1,025 different values"),
        ("country,town,size\nItaly,Rome,1\n", "columns country, town, size: expected country, city, size"),
        ("country,city,size\nItaly,Rome,1\nItaly,Paris,1\n", "line 3: city 'Paris': expected one of 'Bergen', 'Oslo'"),
        ("Italy,Rome,1\n", "expected country, city, size|columns Italy|names of the columns"),
    ],
)
def test_what_is_no_such_table_is_one_line(text, told, here):
    columns = COLUMNS if text.startswith(("country,town", "country,city,size", "Italy")) else ()
    (here / "bad.csv").write_text(text)
    with pytest.raises(InvalidInput, match=told):
        load_data("bad.csv", columns=columns)


def test_columns_may_come_in_another_order(here):
    (here / "other.csv").write_text("size,country,city\n20,Norway,Oslo\n")
    assert load_data("other.csv", columns=COLUMNS).tokens.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("rule", ["sample", "argmax"])
@pytest.mark.parametrize("order", ["prob", "margin", "random"])
@pytest.mark.parametrize(
    ("block_size", "z", "draft"),
    [(3, NO_LATENT, 0), (1, NO_LATENT, 0), (3, latent(), 0), (3, codes(), 0), (1, codes(), 0), (3, NO_LATENT, 8)],
    ids=["plain", "blocks", "gaussian", "codes", "codes in blocks", "draft"],
)
def test_a_column_has_its_own_values_and_no_others(block_size, z, draft, order, rule):
    model = model_of_table(block_size, z, draft)
    drawn = model.sample(300, steps=min(2, block_size), order=order, rule=rule, seeds=range(300)).tokens
    assert (drawn < torch.tensor([2, 4, 3])).all()


@pytest.mark.parametrize("rule", ["sample", "argmax"])  # with argmax, confidences are summed over codes
def test_orders_are_told_of_a_columns_values_alone(rule):
    seen = []

    def order(probabilities):
        seen.append(probabilities)
        return probabilities.amax(-1)

    model_of_table(z=codes()).sample(20, steps=2, order=order, rule=rule, seeds=range(20))
    missing = torch.arange(4) >= torch.tensor([[2], [4], [3]])
    assert len(seen) >= 2
    for probabilities in seen:
        assert float(probabilities[:, missing].abs().max()) == 0
        assert torch.allclose(probabilities.sum(-1), torch.ones(()).double())


@pytest.mark.parametrize("z", [NO_LATENT, codes()], ids=["no z", "codes"])
def test_certified_bits_hold_for_what_is_sampled(z):
    """Of values that a column has not, samples have none: so their law gives the others more, and takes fewer bits."""
    model = model_of_table(z=z)
    every = torch.tensor(list(itertools.product(range(2), range(4), range(3))))
    promised = (-nll_bound(model, every, 1)).exp()
    assert 0.3 < float(promised.sum()) < 0.999
    drawn = model.sample(60_000, steps=1, order="random", generator=torch.Generator().manual_seed(0)).tokens
    shares = torch.stack([(drawn == row).all(-1).double().mean() for row in every])
    assert float(shares.sum()) == 1
    assert (shares > promised - 4 * (promised / 60_000).sqrt()).all()
    if not model.config.has_latent:  # each column by itself, so this is the law
        canvas = torch.full((1, 3), 4)
        alone = model.denoise(canvas, canvas).log_softmax(-1)[0]
        alone = alone.masked_fill(torch.arange(4) >= torch.tensor([[2], [4], [3]]), -math.inf).softmax(-1)
        law = alone[torch.arange(3), every].prod(-1)
        assert shares == pytest.approx(law.detach().numpy(), abs=0.012)


def test_rows_are_prompted_and_read_by_names():
    model = model_of_table(z=codes())
    drawn = model.sample(20, prompt={"country": "Norway", "size": ""}, steps=1, seeds=range(20))
    rows = model.rows(drawn.tokens)
    assert all(row["country"] == "Norway" and row["size"] == "" and row["city"] in COLUMNS[1][1:] for row in rows)
    assert len({row["city"] for row in rows}) > 1
    for prompt, told in (
        ({"planet": "Mars"}, "no column 'planet'"),
        ({"country": "Mars"}, "country 'Mars': expected one of"),
    ):
        with pytest.raises(InvalidInput, match=told):
            model.sample(1, prompt=prompt)
    plain = VMD(ModelConfig(vocab_size=4, length=3))
    for call in (lambda: plain.sample(1, prompt={"a": "b"}), lambda: plain.rows(drawn.tokens)):
        with pytest.raises(InvalidInput, match=r"model of a table|a model of one"):
            call()


def test_prompts_are_rows_or_names():
    for text in ("Italy,_,20", "size=20, country=Italy", 'Italy, _ ,"20"'):
        assert parse_row(COLUMNS, text) == [0, -1, 1]
    assert parse_row(COLUMNS, '_,"Rome, south",') == [-1, 3, 2]
    assert prompt_of(COLUMNS, {}) == [-1, -1, -1]


def test_data_of_other_columns_are_refused(here):
    model = model_of_table()
    (here / "other.csv").write_text("country,city,size\nNorway,Oslo,20\nItaly,Rome,20\n")
    assert vmd.evaluate(model, load_data("other.csv", columns=COLUMNS))[1].value > 0
    with pytest.raises(InvalidInput, match="other columns"):
        vmd.evaluate(model, load_data("other.csv"))
    with pytest.raises(InvalidInput, match="other columns"):
        VMD.for_data(model.config, load_data("other.csv"))
    assert vmd.evaluate(model, TOKENS)[1].value > 0  # ids are ids


def test_a_table_is_trained_sampled_scored_and_gone_on_with(here):
    told = succeeds("train", "--data", "t.csv", "--out", "run", *TINY).err
    assert "a table of 4 rows; its columns, and how many values each has: country (2), city (4), size (3)" in told
    drawn = list(csv.reader(io.StringIO(succeeds("sample", "run", "-n", "30", "--out", "s.csv").out)))
    assert drawn[0] == ["country", "city", "size"]
    assert len(drawn) == 31
    assert all(cell in column[1:] for row in drawn[1:] for cell, column in zip(row, COLUMNS, strict=True))
    assert list(csv.reader((here / "s.csv").open(newline=""))) == drawn
    asked = succeeds("sample", "run", "-n", "5", "--prompt", "country=Norway", "--watch", "--trace", "--steps", "2")
    assert all(line.startswith("Norway,") for line in asked.out.splitlines()[1:])
    assert "block 0 step 0: Norway, " in asked.err
    assert "country 'Mars'" in refused("sample", "run", "--prompt", "country=Mars", folder=here)
    assert "--infill" in refused("sample", "run", "--infill", "Norway,Oslo,1", folder=here)
    (here / "held.csv").write_text("size,country,city\n20,Norway,Oslo\n1,Italy,Rome\n")
    assert "2 rows" in succeeds("evaluate", "run", "--data", "held.csv", "--order", "prob").out
    (here / "new.csv").write_text("size,country,city\n30,Norway,Oslo\n")
    assert "line 2: size '30'" in refused("evaluate", "run", "--data", "new.csv", folder=here)
    assert "size '30'" in refused("train", "--data", "new.csv", "--init", "run", "--out", "second", *TINY, folder=here)
    succeeds("train", "--data", "held.csv", "--init", "run", "--out", "second", *TINY)
    assert VMD.from_pretrained("second").config.columns == COLUMNS
    assert "difference" in succeeds("evaluate", "second", "--data", "held.csv", "--against", "run").out
    succeeds("train", "--out", "run", "--resume", *settings("training.steps=5"))
    (here / "t.csv").write_text("country,city,size\nItaly,Rome,1\nNorway,Oslo,2\n")
    assert "vmd: " in refused("train", "--out", "run", "--resume", *settings("training.steps=7"), folder=here)


def test_integers_are_written_as_csv(here):
    np.save("rows.npy", TOKENS)
    succeeds("train", "--data", "rows.npy", "--out", "run", *TINY)
    done = succeeds("sample", "run", "-n", "4", "--out", "s.csv")
    assert (here / "s.csv").read_text().replace(",", " ") == done.out
    assert isinstance(load_data("s.csv"), ArrayData)


def test_what_is_no_number_is_a_name():
    """Sorted in one way always: a nan is neither above nor below."""
    assert load_csv_text("a,b\nnan,x\n30,x\n5,x\ninf,x\n").columns[0] == ("a", "5", "30", "inf", "nan")


def test_rows_of_blanks_are_rows():
    assert load_csv_text("a,b\nx,y\n,\n\nz,\n").tokens.tolist() == [[1, 1], [0, 0], [2, 0]]


def test_a_name_may_hold_what_is_between_names():
    assert load_csv_text('"a, b, c";d\nx;y\n').columns == (("a, b, c", "x"), ("d", "y"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"city,size\nM\xe1laga,1\n", "byte 0xe1 at 11: expected UTF-8"),
        (b",a,b\n0,x,y\n", "'' names no column: .*index=False"),
        (b"country,2019\nItaly,yes\n", "'2019' names no column"),
        (b"1,2\n" + b"9" * 5000 + b",1\n", "beyond 64 bits"),
    ],
)
def test_what_cannot_be_read_says_why(content, told, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=told):
        load_csv(path)


def test_ids_that_are_no_values_are_refused():
    model = model_of_table()
    wrong = torch.tensor([[2, 0, 0]])
    for call in (lambda: model.sample(prompt=wrong), lambda: vmd.evaluate(model, wrong), lambda: nll_bound(model, wrong, 1)):
        with pytest.raises(InvalidInput, match="token id 2 of column 'country': expected 0 to 1"):
            call()
    for tokens in (torch.zeros(3), torch.zeros(1, 2, dtype=torch.long), [0, 1, 2]):
        with pytest.raises(InvalidInput, match="rows of a table"):
            model.rows(tokens)
    assert model.rows(torch.tensor([0, 1, 0])) == [{"country": "Italy", "city": "Oslo", "size": "1"}]
    for n in (2.5, "a", True, -1):
        with pytest.raises(InvalidInput, match="n="):
            model.sample(n, prompt={"size": "1"})


def test_models_and_tables_of_other_columns_do_not_meet(here):
    (here / "other.csv").write_text("size,country,city\n1,Norway,Oslo\n20,Italy,Rome\n")
    run = vmd.preset("array-mdm", "training.steps=1", "training.batch_size=2")
    other = load_data("other.csv")
    with pytest.raises(InvalidInput, match="other columns"):
        vmd.train(model_of_table(), other, run)
    np.save("rows.npy", TOKENS)
    succeeds("train", "--data", "rows.npy", "--out", "run", *TINY)
    assert "a table: expected a model of a table" in refused("evaluate", "run", "--data", "other.csv", folder=here)
    (here / "ids.csv").write_text("size,city,country\n1,1,1\n")
    with pytest.raises(InvalidInput, match="other columns"):
        vmd.evaluate(model_of_table(), load_data("ids.csv"))  # numbers, of which nobody knows whether they are ids
    for text in ("country=Norway,country=Italy", 'a"b\nc,"d'):
        with pytest.raises(InvalidInput, match="expected"):
            parse_row(COLUMNS, text)


def test_rows_of_a_file_are_completed(here):
    succeeds("train", "--data", "t.csv", "--out", "run", *TINY)
    (here / "gaps.csv").write_text('size,country,city\n20,_,_\n_,Norway,"Rome, south"\n')
    made = list(csv.reader(io.StringIO(succeeds("sample", "run", "--prompts", "gaps.csv", "-n", "3").out)))
    assert made[0] == ["country", "city", "size"]
    assert [row[2] for row in made[1:4]] == ["20"] * 3
    assert [row[:2] for row in made[4:]] == [["Norway", "Rome, south"]] * 3
    assert len(succeeds("sample", "run", "--prompts", "gaps.csv").out.splitlines()) == 3
    alone = [succeeds("sample", "run", "--prompts", "gaps.csv", "--seed", seed).out for seed in ("1", "1", "2")]
    assert alone[0] == alone[1]
    for text, told in (("size,country\n_,_\n", "columns size, country: expected"), ("size,country,city\n", "no rows")):
        (here / "bad.csv").write_text(text)
        assert told in refused("sample", "run", "--prompts", "bad.csv", folder=here)
    assert "--prompts gaps.csv: expected no" in refused(
        "sample", "run", "--prompts", "gaps.csv", "--prompt", "size=1", folder=here
    )
    np.save("rows.npy", TOKENS)
    succeeds("train", "--data", "rows.npy", "--out", "ids", *TINY)
    (here / "ids.csv").write_text("_,2,0\n1,_,_\n")
    lines = [line.split() for line in succeeds("sample", "ids", "--prompts", "ids.csv").out.splitlines()]
    assert [lines[0][1:], lines[1][:1]] == [["2", "0"], ["1"]]
    for text, told in (("_,2\n", "2 tokens: expected 3"), ("_,x,1\n", "'x': expected token ids"), ("_,9,1\n", "token id 9")):
        (here / "bad.csv").write_text(text)
        assert told in refused("sample", "ids", "--prompts", "bad.csv", folder=here)
