import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import chi_square_p, sequence_counts
from vmd.config import InvalidInput
from vmd.data import ArrayData, law, load_array, load_data
from vmd.data.arrays import parse_positions
from vmd.data.synthetic import LAWS, POKER_HANDS

NAMES = [*LAWS, "dependence-0.3", "dependence-0", "dependence-1"]
names = pytest.mark.parametrize("name", NAMES)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Integers with commas between


def write_csv(path, text):
    path.write_text(text)
    return path


TABLES = [
    "1,2,3\n4,5,6\n",
    "a,b,c\n1,2,3\n4,5,6",
    "1, 2, 3\n\n4, 5, 6\n\n",
    "x\r\n1,2,3\r\n4,5,6\r\n",
    "\ufeff1,2,3\n4,5,6\n",
    "a;b;c\n1;2;3\n4;5;6\n",
    "1\t2\t3\n4\t5\t6\n",
    '"1","2","3"\n4,"5",6\n',
]


@pytest.mark.parametrize("text", TABLES)
def test_a_csv_of_integers_is_an_array(text, tmp_path):
    data = load_data(write_csv(tmp_path / "mine.csv", text))
    assert data.rows_at(np.arange(2)).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert data.vocab_size == 7


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1,,3\n4,5,6\n", "line 1: '1,,3': expected integers"),
        ("1.0,2.0\n3,4\n", "line 1: '1.0,2.0': expected integers"),
        ("1 2\n3 4\n", "line 2: '3 4': expected integers"),
        ("1,2\n\n\n3,b\n", "line 4: '3,b': expected integers"),
        ("1,2\n3\n", "line 2: 1 integers: expected 2"),
        ("1,2\n3,b\n", "line 2: '3,b': expected integers"),
        ("1,2\n0.5,1\n", "line 2: '0.5,1': expected integers"),
        ("a,b\n", "no rows: expected integers"),
        ("", "no rows: expected integers"),
        ("1,-2\n", "token id -2: expected ids from 0"),
        ("1,70000\n", "token id 70000: expected ids below 65536"),
        (f"1,{10**30}\n", "an integer beyond 64 bits"),
    ],
)
def test_a_csv_of_something_else_is_refused(text, told, tmp_path):
    with pytest.raises(InvalidInput, match=told):
        load_data(write_csv(tmp_path / "mine.csv", text))


# Laws


@names
def test_a_law_is_a_distribution_over_distinct_sequences(name):
    known = law(name)
    assert known.probabilities.dtype == torch.float64
    assert (known.probabilities > 0).all()
    assert abs(float(known.probabilities.sum()) - 1) < 1e-12
    assert len(known.sequences.unique(dim=0)) == len(known.sequences) == len(known.probabilities)
    assert ((known.sequences >= 0) & (known.sequences < known.vocab_size)).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dependence-0.3", 0.154),
        ("dependence-0.5", 0.511),
        ("dependence-0.7", 1.033),
        ("dependence-0.8", 1.363),
        ("dependence-1", 2.303),
        ("dependence-0.1", 0.0),
        ("deterministic", 2.303),
        ("non-uniform", 2.151),
        ("d1", 6.908),
        ("d2", 4.605),
        ("poker", math.log(4)),
    ],
)
def test_total_correlations_are_the_known_ones(name, expected):
    assert abs(law(name).total_correlation() - expected) < 6e-4


@pytest.mark.parametrize(
    ("name", "expected"),
    [("deterministic", math.log(10)), ("d1", math.log(10)), ("d2", math.log(100)), ("poker", math.log(4))],
)
def test_entropies_are_the_known_ones(name, expected):
    assert math.isclose(law(name).entropy, expected)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 0.7, 1.0])
def test_dependence_has_exactly_its_conditional(p):
    known = law(f"dependence-{p}")
    table = torch.zeros(10, 10, dtype=torch.float64)
    table[known.sequences[:, 0], known.sequences[:, 1]] = known.probabilities
    for first, second in itertools.product(range(10), repeat=2):
        conditional = p if second == (first + 1) % 10 else (1 - p) / 9
        assert abs(float(table[first, second]) - conditional / 10) < 1e-12


def test_the_entropy_of_dependence_is_that_of_its_conditional():
    conditional = 0.7 * math.log(1 / 0.7) + 0.3 * math.log(9 / 0.3)
    assert abs(law("dependence-0.7").entropy - math.log(10) - conditional) < 1e-9


def test_the_deterministic_laws_hold_the_sequences_they_name():
    assert law("deterministic").sequences.tolist() == [[k, (k + 1) % 10] for k in range(10)]
    assert law("d1").sequences.tolist() == [[(k + i) % 10 for i in range(4)] for k in range(10)]
    pairs = [[k, (k + 1) % 10] for k in range(10)]
    assert sorted(law("d2").sequences.tolist()) == sorted(a + b for a in pairs for b in pairs)


def test_non_uniform_is_proportional_to_k_plus_one():
    torch.testing.assert_close(law("non-uniform").probabilities, torch.arange(1, 11).double() / 55)


def test_poker_hands_are_spelled_by_their_symbols():
    known = law("poker")
    hands = [" ".join(known.symbols[i] for i in row) for row in known.sequences.tolist()]
    assert tuple(hands) == POKER_HANDS
    assert len(known.symbols) == known.vocab_size


@names
def test_marginals_are_sums_over_the_sequences(name):
    known = law(name)
    marginals = known.marginals()
    torch.testing.assert_close(marginals.sum(-1), torch.ones(known.length, dtype=torch.float64))
    for position in range(known.length):
        for token in range(known.vocab_size):
            expected = known.probabilities[known.sequences[:, position] == token].sum()
            assert abs(float(marginals[position, token] - expected)) < 1e-12


@names
def test_draws_follow_the_law(name):
    known = law(name)
    drawn = known.draw(20_000, generator=generator())
    assert chi_square_p(sequence_counts(drawn, known), known.probabilities) > 1e-4


def test_a_batch_of_a_law_is_a_function_of_the_generator():
    known = law("d2")
    first, again, other = (known.batch(0, 50, generator=generator(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_law_constrains_where_some_sequences_are_invalid():
    assert law("deterministic").constrains
    assert law("dependence-1").constrains
    assert not law("dependence-0.3").constrains


@pytest.mark.parametrize(
    "name", ["", "d3", "dependence-", "dependence-x", "dependence-nan", "dependence-1.5", "dependence--1"]
)
def test_unknown_laws_are_refused_by_name(name):
    with pytest.raises(InvalidInput, match=name or "unknown"):
        load_data(name)


# Arrays


def rows(count: int, length: int = 3) -> np.ndarray:
    return np.arange(count * length).reshape(count, length)


@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 5))
def test_each_epoch_visits_each_row_once(count, size, seed):
    data = ArrayData(rows(count), seed=seed)
    steps = math.ceil(3 * count / size)
    seen = torch.cat([data.batch(step, size) for step in range(steps)])[:, 0] // 3
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = (ArrayData(rows(30)).batch(step, 30) for step in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, ArrayData(rows(30), seed=1).batch(0, 30))
    assert not torch.equal(first, torch.from_numpy(rows(30)))


@given(st.permutations(list(range(8))))
def test_a_batch_is_a_function_of_its_step_alone(order):
    data = ArrayData(rows(7))
    expected = [ArrayData(rows(7)).batch(step, 5, generator=generator(step)) for step in range(8)]
    for step in order:
        torch.manual_seed(step)
        assert torch.equal(data.batch(step, 5), expected[step])


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64, np.uint64])
def test_integer_arrays_become_long_tokens(dtype):
    data = ArrayData(np.array([[1, 2], [3, 4]], dtype=dtype))
    batch = data.batch(0, 2)
    assert batch.dtype == torch.int64
    assert sorted(batch.tolist()) == [[1, 2], [3, 4]]
    assert (data.length, data.vocab_size) == (2, 5)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros((2, 3)), "float64"),
        (np.zeros((2, 3), dtype=bool), "bool"),
        (np.zeros((2, 3), dtype=complex), "complex"),
        (np.zeros(3, dtype=int), "two dimensions"),
        (np.zeros((1, 2, 3), dtype=int), "two dimensions"),
        (np.array(3), "two dimensions"),
        (np.array([[0, -1]]), "-1"),
        (np.array([[0, 65_536]]), "65536"),
        (np.zeros((0, 3), dtype=int), "at least one"),
        (np.zeros((3, 0), dtype=int), "at least one"),
    ],
)
def test_arrays_that_are_no_tokens_are_refused(tmp_path, array, says):
    with pytest.raises(InvalidInput, match=says):
        ArrayData(array)
    np.save(tmp_path / "array.npy", array)
    with pytest.raises(InvalidInput, match=r"array\.npy"):
        load_array(tmp_path / "array.npy")


class Bomb:
    """Unpickling this would be noticed."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def test_pickled_arrays_are_refused_unread(tmp_path):
    np.save(tmp_path / "array.npy", np.array([[Bomb()]], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInput, match=r"array\.npy"):
        load_array(tmp_path / "array.npy")


@pytest.mark.parametrize(
    "content",
    [b"", b"text", b"\x93NUMPY", b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i8' ", b"\x80\x04N."],
    ids=["empty", "text", "magic-alone", "damaged-header", "pickle"],
)
def test_files_that_are_no_arrays_are_refused(tmp_path, content):
    (tmp_path / "array.npy").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"array\.npy"):
        load_array(tmp_path / "array.npy")


def test_truncated_archived_and_missing_arrays_are_refused(tmp_path):
    np.save(tmp_path / "array.npy", rows(10))
    content = (tmp_path / "array.npy").read_bytes()
    (tmp_path / "array.npy").write_bytes(content[:-8])
    np.savez(tmp_path / "archive.npz", a=rows(2))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    for name in ("array.npy", "archive.npy", "missing.npy", "."):
        with pytest.raises(InvalidInput, match=r"array\.npy|archive\.npy|missing\.npy|no such file"):
            load_array(tmp_path / name)


def test_an_array_is_loaded_by_its_path(tmp_path):
    np.save(tmp_path / "mine.npy", rows(5))
    data = load_data(str(tmp_path / "mine.npy"), seed=3)
    assert torch.equal(data.batch(0, 5), ArrayData(rows(5), seed=3).batch(0, 5))


# Positions


@pytest.mark.parametrize(
    ("text", "expected"), [("0", [0]), ("0:3", [0, 1, 2]), ("0,2,4", [0, 2, 4]), ("1:3,4", [1, 2, 4]), ("2:3,2", [2])]
)
def test_positions_are_read_from_text(text, expected):
    assert parse_positions(text, 6).nonzero().flatten().tolist() == expected


def test_no_text_fixes_nothing():
    assert parse_positions("", 6) is None


@pytest.mark.parametrize("text", ["x", "1:", ":3", "3:1", "2:2", "-1", "6", "0:7", "0,", "1.5", "0:6", "0,1,2,3,4,5"])
def test_bad_positions_are_refused(text):
    with pytest.raises(InvalidInput, match="fixed"):
        parse_positions(text, 6)
