"""A model of tokens by counting, which judges samples on a CPU: interpolated Kneser-Ney n-grams with three discounts
(Chen and Goodman 1999). It has nothing in common with a network but the text it was made of.

    p(x | h) = (c(hx) - D(c(hx)) + sum_y D(c(hy)) p(x | h')) / sum_y c(hy)

h' is h without its first token. For the longest n-grams c counts how often they occur, for the shorter ones how many
different tokens stand before them. A context that was never seen says what its shorter one says; the shortest is uniform.
"""

import math
from collections.abc import Callable

import numpy as np

from vmd.config import require

LONGEST = 13  # as many of text8's letters as fit into 63 bits; longer ones are rarely seen twice


def longest_ngram(vocab_size: int) -> int:
    """An n-gram is one integer of 63 bits."""
    n = 1
    while n < LONGEST and vocab_size ** (n + 1) < 2**63:
        n += 1
    return n


def ngram_ids(rows: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """(..., L - n + 1): the n-grams of rows (..., L), the first token counts most."""
    count = rows.shape[-1] - n + 1
    ids = np.zeros((*rows.shape[:-1], count), np.int64)
    for place in range(n):
        ids *= vocab_size
        ids += rows[..., place : place + count]
    return ids


def tally(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those that occur, in order, and how often. Sorts in place."""
    ids.sort()
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    return ids[starts], np.diff(starts, append=len(ids))


def discounts(counts: np.ndarray) -> np.ndarray:
    """(4,): what is taken from a count of 0, 1, 2, and 3 or more. Estimated from how many there are of 1 to 4."""
    n = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].astype(float)
    if not n.all():  # a small text
        return np.array([0, 0.5, 0.5, 0.5])
    k = np.arange(1, 4)
    found = k - (k + 1) * n[0] / (n[0] + 2 * n[1]) * n[1:] / n[:-1]
    return np.append(0, found.clip(0.1, k))  # something is always left for what was not seen


def counted_nats(
    text: np.ndarray,
    rows: np.ndarray,
    vocab_size: int,
    n: int | None = None,
    on_order: Callable[[int], object] = lambda order: None,
) -> np.ndarray:
    """(m, L): -log p of every token of rows (m, L) given those before it in its row, at most n - 1, by counts of a text.

    One order after the other, so that the counts of one are in memory: some 40 bytes a token of the text.
    """
    n = min(n or longest_ngram(vocab_size), rows.shape[-1], len(text))
    require(vocab_size**n < 2**63, f"{n}-grams of {vocab_size} tokens: expected at most {longest_ngram(vocab_size)}")
    p = np.full(rows.shape, 1 / vocab_size)
    for order in range(1, n + 1):
        if order < n:
            longer, _ = tally(ngram_ids(text, order + 1, vocab_size))
            seen, counts = tally(longer % vocab_size**order)
        else:
            seen, counts = tally(ngram_ids(text, n, vocab_size))
        taken = discounts(counts)[np.minimum(counts, 3)]
        up_to, taken_up_to = np.append(0, counts.cumsum()), np.append(0, taken.cumsum())
        asked, which = np.unique(ngram_ids(rows, order, vocab_size), return_inverse=True)
        context = asked - asked % vocab_size
        first, last = np.searchsorted(seen, context), np.searchsorted(seen, context + vocab_size)
        there = np.searchsorted(seen, asked).clip(max=len(seen) - 1)
        own = np.where(seen[there] == asked, counts[there] - taken[there], 0)
        total, left = up_to[last] - up_to[first], taken_up_to[last] - taken_up_to[first]
        which = which.reshape(len(rows), -1)
        shorter = p[:, order - 1 :]
        known = total[which] > 0
        np.divide(own[which] + left[which] * shorter, total[which], out=shorter, where=known)
        on_order(order)
    return -np.log(p)


def counted_bits(nats: np.ndarray) -> tuple[float, float | None]:
    """Bits per token of rows, and the standard error over them."""
    each = nats.mean(-1) / math.log(2)
    return float(each.mean()), float(each.std(ddof=1) / len(each) ** 0.5) if len(each) > 1 else None
