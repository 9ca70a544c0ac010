"""How good text samples are, by what they are made of and by another model's opinion. Each figure names what it cannot see.

Few-step samples fail by characters that do not go together: words that are no words. A model that repeats itself makes good
words too; so the variety of the samples stands beside every figure.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vmd.config import require
from vmd.likelihood import in_bits, nll_bound
from vmd.model import VMD


class Quality(NamedTuple):
    real_words: float  # percent of whole words that the training text has, be it once
    real_words_stderr: float | None  # over texts
    divergence: float  # Jensen-Shannon, bits: of the samples' n-grams to the reference's; 0 is equal, 1 disjoint
    distinct: float  # different n-grams / n-grams
    entropy: float  # bits per character of the samples' own n-grams, given the characters before


def words_of(texts: Iterable[str]) -> list[str]:
    """Whole words: the first and the last of a chunk may be cut."""
    return [word for text in texts for word in text.split(" ")[1:-1] if word]


def word_share(texts: Sequence[str], vocabulary: set[str]) -> tuple[float, float | None]:
    """Percent of the words that the vocabulary has, nan if there are no words, and the standard error over texts."""
    words = [words_of([text]) for text in texts]
    counts, hits = [len(some) for some in words], [sum(word in vocabulary for word in some) for some in words]
    if not (total := sum(counts)):
        return math.nan, None
    share = sum(hits) / total
    apart = sum((hit - share * count) ** 2 for hit, count in zip(hits, counts, strict=True))  # of a ratio of sums
    error = (apart * len(texts) / (len(texts) - 1)) ** 0.5 / total if len(texts) > 1 else None
    return 100 * share, None if error is None else 100 * error


def random_letters(reference: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """As many texts of letters that are drawn one by one, as often as the reference has each: what a figure is at worst."""
    letters, weights = zip(*sorted(Counter("".join(reference)).items()), strict=True)
    draw = random.Random(seed)
    return ["".join(draw.choices(letters, weights, k=len(reference[0]))) for _ in range(count)]


def ngrams(texts: Iterable[str], n: int) -> Counter[str]:
    return Counter(text[i : i + n] for text in texts for i in range(len(text) - n + 1))


def js_divergence(one: Counter[str], other: Counter[str]) -> float:
    """In bits, between the shares of n-grams."""
    totals = [sum(counts.values()) for counts in (one, other)]
    require(min(totals) > 0, "no n-grams: expected texts that are longer")
    found = 0.0
    for gram in one.keys() | other.keys():
        p, q = (counts[gram] / total for counts, total in zip((one, other), totals, strict=True))
        middle = (p + q) / 2
        found += sum(0.5 * share * math.log2(share / middle) for share in (p, q) if share)
    return found


def distinct_share(texts: Sequence[str], n: int) -> float:
    counts = ngrams(texts, n)
    return len(counts) / sum(counts.values())


def conditional_entropy(texts: Sequence[str], n: int) -> float:
    """Bits of a character given the n - 1 before it, by counting in the texts themselves: low where they repeat."""
    whole, before = ngrams(texts, n), Counter[str]()
    for gram, count in whole.items():
        before[gram[:-1]] += count
    total = sum(whole.values())
    return sum(count / total * math.log2(before[gram[:-1]] / count) for gram, count in whole.items())


def text_quality(texts: Sequence[str], reference: Sequence[str], vocabulary: set[str], n: int = 4) -> Quality:
    return Quality(
        *word_share(texts, vocabulary),
        js_divergence(ngrams(texts, n), ngrams(reference, n)),
        distinct_share(texts, n),
        conditional_entropy(texts, n),
    )


@torch.no_grad()
def judged_bits(judge: VMD, tokens: Tensor, chunk: int = 1_024) -> tuple[float, float | None]:
    """Bits per token that another model needs for these samples (n, L), and the standard error over them.

    Its blocks must have one token, so that it reads from left to right and its likelihood is exact.
    """
    config = judge.config
    require(config.block_size == 1, f"a judge of blocks of {config.block_size}: expected 1: it reads left to right")
    require(
        tokens.shape[1] == config.length and int(tokens.max()) < config.vocab_size,
        f"samples of {tokens.shape[1]} tokens: expected {config.length} of {config.vocab_size} kinds, the judge's",
    )
    return in_bits(nll_bound(judge, tokens.to(judge.device), 1, chunk=chunk), config.length)
