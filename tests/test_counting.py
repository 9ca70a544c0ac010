"""Counted n-grams, against the formula by dictionaries, and as a law."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmd.config import InvalidInput
from vmd.experiments.counting import beginnings, counted_bits, counted_nats, discounts, longest_ngram, ngram_ids, tally

texts = st.integers(2, 4).flatmap(
    lambda vocab: st.tuples(st.just(vocab), st.lists(st.integers(0, vocab - 1), min_size=6, max_size=60))
)


def by_dictionaries(text: list[int], row: list[int], vocab: int, n: int) -> list[float]:
    """The formula, one n-gram at a time. Shorter n-grams are those that something follows."""

    def occurrences(k: int) -> Counter:
        return Counter(tuple(text[i : i + k]) for i in range(len(text) - k + 1))

    def often(k: int) -> Counter:
        if k == n:
            return occurrences(n)
        found: Counter = Counter()
        for gram, count in occurrences(k + 1).items():
            found[gram[:-1]] += count
        return found

    how_often = {k: often(k) for k in range(1, n + 1)}
    how_many_before = {k: Counter(gram[1:] for gram in occurrences(k + 1)) for k in range(1, n)}

    def p(tables: dict[int, Counter], context: tuple[int, ...], x: int) -> float:
        shorter = p(how_many_before, context[1:], x) if context else 1 / vocab
        table = tables[len(context) + 1]
        taken = discounts(np.array(list(table.values())))
        after = {y: table[*context, y] for y in range(vocab) if table[*context, y]}
        if not after:
            return shorter
        left = sum(taken[min(c, 3)] for c in after.values())
        own = after[x] - taken[min(after[x], 3)] if x in after else 0.0
        return (own + left * shorter) / sum(after.values())

    return [-math.log(p(how_often, tuple(row[max(0, i - n + 1) : i]), x)) for i, x in enumerate(row)]


@given(texts, st.integers(1, 4), st.data())
def test_counts_are_the_formula(drawn, n, data):
    vocab, text = drawn
    row = data.draw(st.lists(st.integers(0, vocab - 1), min_size=4, max_size=8))
    found = counted_nats(np.array(text), np.array([row]), vocab, n)
    np.testing.assert_allclose(found[0], by_dictionaries(text, row, vocab, n), rtol=1e-9)


@given(texts, st.integers(1, 5))
def test_all_rows_together_have_probability_one(drawn, n):
    vocab, text = drawn
    rows = np.array(list(itertools.product(range(vocab), repeat=4)))
    assert math.isclose(np.exp(-counted_nats(np.array(text), rows, vocab, n).sum(-1)).sum(), 1, rel_tol=1e-9)


def test_what_was_never_seen_is_possible():
    nats = counted_nats(np.zeros(50, np.uint8), np.array([[0, 1, 2, 0]]), 3, 4)
    assert np.isfinite(nats).all()
    assert nats[0, 1] > nats[0, 0]


def test_a_text_s_own_law_costs_its_entropy_and_another_costs_more():
    """A walk over eight letters, one or two on: one bit for every letter but the first, which takes three."""
    random = np.random.default_rng(0)

    def walks(count: int, length: int) -> np.ndarray:
        return np.cumsum(random.integers(1, 3, (count, length)), -1) % 8

    text, rows = walks(1, 50_000)[0], (walks(500, 10) + random.integers(0, 8, (500, 1))) % 8
    own, error = counted_bits(counted_nats(text, rows, 8, 2))
    assert own == pytest.approx((3 + 9) / 10, abs=0.02)
    assert error is not None
    assert error < 0.01
    assert counted_bits(counted_nats(text, random.permutation(rows.ravel()).reshape(-1, 10), 8, 2))[0] > 4


def test_bits_are_a_mean_over_rows_with_its_standard_error():
    ln2 = math.log(2)
    assert counted_bits(np.array([[ln2, 3 * ln2]])) == (pytest.approx(2), None)
    rows = np.array([[ln2, 3 * ln2], [5 * ln2, ln2], [4 * ln2, 4 * ln2]])  # 2, 3 and 4 bits: a deviation of one
    assert counted_bits(rows) == (pytest.approx(3), pytest.approx(1 / math.sqrt(3)))


def test_the_first_tokens_of_a_row_are_judged_by_how_often_they_occur():
    """Not by how many tokens they follow, which is for contexts that do not help: half of the text is one letter."""
    text = np.tile([0, 1, 0, 2, 0, 3, 0, 4], 500)
    nats = counted_nats(text, np.array([[0, 1, 0], [4, 0, 1]]), 5, 3)
    np.testing.assert_allclose(np.exp(-nats), [[1 / 2, 1 / 4, 1], [1 / 8, 1, 1]], atol=0.01)


def test_longer_contexts_tell_more_of_a_text_that_has_them():
    random = np.random.default_rng(0)
    words = random.integers(0, 4, (30, 6))
    text, rows = (words[random.integers(0, 30, count)].reshape(-1, 12) for count in (4_000, 400))
    bits = [counted_bits(counted_nats(text.ravel(), rows, 4, n))[0] for n in (1, 3, 6)]
    assert bits == sorted(bits, reverse=True)
    assert bits[0] - bits[2] > 0.5


def test_rows_do_not_depend_on_each_other():
    text = np.random.default_rng(0).integers(0, 3, 300)
    rows = np.random.default_rng(1).integers(0, 3, (6, 9))
    together = counted_nats(text, rows, 3, 4)
    np.testing.assert_array_equal(np.concatenate([counted_nats(text, row[None], 3, 4) for row in rows]), together)


def test_discounts_are_estimated_from_how_rare_counts_are():
    counts = np.repeat([1, 2, 3, 4, 9], [8, 4, 2, 1, 3])
    assert discounts(counts) == pytest.approx([0, 1 - 2 * 0.5 * 4 / 8, 2 - 3 * 0.5 * 2 / 4, 3 - 4 * 0.5 * 1 / 2])
    assert discounts(np.array([1, 1, 2])).tolist() == [0, 0.5, 0.5, 0.5]
    odd = discounts(np.repeat([1, 2, 3, 4], [1, 1, 50, 5]))
    assert odd[2] == 0.1  # by the formula less than nothing: then what was not seen would be impossible


def test_ngrams_are_as_long_as_an_integer_allows():
    assert [longest_ngram(vocab) for vocab in (2, 27, 28, 256, 65_536)] == [13, 13, 13, 7, 3]
    assert ngram_ids(np.full(13, 26, np.uint8), 13, 27).tolist() == [27**13 - 1]
    with pytest.raises(InvalidInput, match="13-grams of 29 tokens: expected at most 12"):
        counted_nats(np.zeros(20, np.uint8), np.zeros((1, 20), np.uint8), 29, 13)
    assert counted_nats(np.zeros(9, np.uint8), np.zeros((2, 2), np.uint8), 29, 12).shape == (2, 2)  # no longer than the rows
    assert counted_nats(np.zeros(3, np.uint8), np.zeros((2, 9), np.uint8), 29, 12).shape == (2, 9)  # nor than the text


def test_tally_by_hand():
    found, counts = tally(np.array([3, 1, 3, 3, 2]))
    assert (found.tolist(), counts.tolist()) == ([1, 2, 3], [1, 1, 3])
    found, counts = beginnings(np.array([11, 12, 15, 30, 42]), np.array([1, 2, 3, 4, 5]), 10)
    assert (found.tolist(), counts.tolist()) == ([1, 3, 4], [6, 4, 5])


def test_progress_is_told_for_every_order():
    told: list[int] = []
    counted_nats(np.arange(20) % 3, np.zeros((1, 9), np.int64), 3, 4, on_order=told.append)
    assert told == [1, 2, 3, 4]
