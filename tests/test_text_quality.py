"""Figures of text samples, by hand and at their limits."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import NO_LATENT, all_sequences, codes, tiny_model
from vmd.config import InvalidInput
from vmd.experiments.text_quality import (
    conditional_entropy,
    distinct_share,
    js_divergence,
    judged_bits,
    ngrams,
    random_letters,
    text_quality,
    word_share,
    words_of,
)

texts = st.lists(st.text("ab ", min_size=4, max_size=20), min_size=1, max_size=5)


def test_cut_words_do_not_count():
    assert words_of(["he cat sat on th", "", "one", "a  b c"]) == ["cat", "sat", "on", "b"]


def test_the_share_of_real_words_by_hand():
    share, error = word_share(["x the qqq cat x"], {"the", "cat"})
    assert (share, error) == (pytest.approx(200 / 3), None)
    assert math.isnan(word_share(["abc"], {"abc"})[0])


def test_the_error_of_real_words_is_that_of_many_draws():
    """Texts of different length, whose words are real together or not at all."""
    random = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[str]:
        kinds = torch.randint(3, (count,), generator=random).tolist()
        return [("x the cat x", "x qqq x", "x the the qqq qqq x")[kind] for kind in kinds]

    shares, errors = torch.tensor([word_share(draw(100), {"the", "cat"}) for _ in range(400)]).unbind(1)
    assert float(errors.mean()) == pytest.approx(float(shares.std()), rel=0.1)


def test_random_letters_have_the_frequencies_of_the_reference_and_nothing_else():
    reference = ["aab " * 8] * 20
    drawn = random_letters(reference, 200)
    assert len(drawn) == 200
    assert {len(text) for text in drawn} == {32}
    counts = Counter("".join(drawn))
    assert counts["a"] / 6_400 == pytest.approx(0.5, abs=0.03)
    assert conditional_entropy(drawn, 2) == pytest.approx(1.5, abs=0.03)  # the one before tells nothing
    assert drawn == random_letters(reference, 200)


def test_every_ngram_counts():
    assert ngrams(["abcd", "bcd"], 3) == {"abc": 1, "bcd": 2}
    assert ngrams(["abcd"], 4) == {"abcd": 1}


@given(texts, texts)
def test_divergence_is_symmetric_between_0_and_1_and_0_for_equals(one, other):
    a, b = ngrams(one, 3), ngrams(other, 3)
    assert js_divergence(a, a) == pytest.approx(0, abs=1e-12)
    assert js_divergence(a, b) == pytest.approx(js_divergence(b, a))
    assert -1e-12 <= js_divergence(a, b) <= 1 + 1e-12


def test_divergence_of_disjoint_texts_is_one_bit():
    assert js_divergence(Counter(["aa"]), Counter(["bb"])) == pytest.approx(1)
    with pytest.raises(InvalidInput, match="no n-grams"):
        js_divergence(Counter(), Counter(["b"]))


def test_repetition_shows():
    repeated, random = ["ab" * 50] * 4, ["".join("abcdefgh"[i] for i in torch.randint(8, (100,)).tolist()) for _ in range(4)]
    assert distinct_share(repeated, 4) < 0.01 < distinct_share(random, 4)
    assert conditional_entropy(repeated, 2) == pytest.approx(0)
    assert conditional_entropy(random, 1) == pytest.approx(3, abs=0.1)


@given(texts)
def test_more_context_never_raises_the_entropy(some):
    long = [text for text in some if len(text) >= 3]
    if long:
        once = ["".join(t[1:]) for t in long]  # the same places as those with one more character before
        assert conditional_entropy(long, 2) <= conditional_entropy(once, 1) + 1e-9


def test_a_text_is_like_itself():
    found = text_quality(["the cat sat on the mat"], ["the cat sat on the mat"], {"the", "cat", "sat", "on"})
    assert (found.real_words, found.divergence) == (pytest.approx(100), pytest.approx(0))


@torch.no_grad()
def test_a_judge_s_bits_are_its_exact_likelihood():
    judge = tiny_model(3, 1, 3, NO_LATENT)
    rows = all_sequences(3, 3)
    each = torch.tensor([judged_bits(judge, row.unsqueeze(0))[0] for row in rows], dtype=torch.float64)
    assert float((2 ** (-3 * each)).sum()) == pytest.approx(1, abs=1e-5)


def test_a_judge_reads_from_left_to_right():
    with pytest.raises(InvalidInput, match="a judge of blocks of 3"):
        judged_bits(tiny_model(3, 3, 3, codes()), torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(InvalidInput, match="samples of 4 tokens"):
        judged_bits(tiny_model(3, 1, 3, NO_LATENT), torch.zeros(1, 4, dtype=torch.long))
