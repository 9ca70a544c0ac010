"""A model of tokens by counting, which judges samples on a CPU: interpolated Kneser-Ney n-grams with three discounts
(Chen and Goodman 1999). It knows the training text as the networks do, and has nothing else in common with them.

    p(x | h) = (c(hx) - D(c(hx)) + sum_y D(c(hy)) p'(x | h')) / sum_y c(hy)

h' is h without its first token. In p, whose h is all that is seen (n - 1 tokens, or as many as the row has before x), c
counts how often an n-gram occurs; in p', which is asked where h does not help, how many different tokens stand before it.
A context that was never seen says what its shorter one says; the shortest is uniform.
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


def beginnings(seen: np.ndarray, counts: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The same without the last token of each."""
    shorter = seen // vocab_size
    starts = np.flatnonzero(np.append(True, shorter[1:] != shorter[:-1]))
    return shorter[starts], np.add.reduceat(counts, starts)


def discounts(counts: np.ndarray) -> np.ndarray:
    """(4,): what is taken from a count of 0, 1, 2, and 3 or more. Estimated from how many there are of 1 to 4."""
    n = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].astype(float)
    if not n.all():  # a small text, or few tokens that all occur often
        return np.array([0, 0.5, 0.5, 0.5])
    k = np.arange(1, 4)
    found = k - (k + 1) * n[0] / (n[0] + 2 * n[1]) * n[1:] / n[:-1]
    return np.append(0, found.clip(0.1))  # something is always left for what was not seen


def interpolate(
    ngrams: tuple[np.ndarray, np.ndarray], asked: np.ndarray, shorter: np.ndarray, vocab_size: int
) -> np.ndarray:
    """p of the n-grams that are asked for, by those that are counted, and by p of the shorter ones."""
    seen, counts = ngrams
    taken = discounts(counts)[np.minimum(counts, 3)]
    up_to, taken_up_to = np.append(0, counts.cumsum()), np.append(0, taken.cumsum())
    each, which = np.unique(asked, return_inverse=True)
    context = each - each % vocab_size
    first, last = np.searchsorted(seen, context), np.searchsorted(seen, context + vocab_size)
    there = np.searchsorted(seen, each).clip(max=len(seen) - 1)
    own = np.where(seen[there] == each, counts[there] - taken[there], 0)
    total, left = up_to[last] - up_to[first], taken_up_to[last] - taken_up_to[first]
    which = which.reshape(asked.shape)
    p = shorter.copy()
    return np.divide(own[which] + left[which] * shorter, total[which], out=p, where=total[which] > 0)


def counted_nats(
    text: np.ndarray, rows: np.ndarray, vocab_size: int, n: int, on_order: Callable[[int], object] = lambda order: None
) -> np.ndarray:
    """(m, L): -log p of every token of rows (m, L) given those before it in its row, at most n - 1, by counts of a text.

    One order after the other, so that the counts of one are in memory.
    """
    n = min(n, rows.shape[-1], len(text))
    require(vocab_size**n < 2**63, f"{n}-grams of {vocab_size} tokens: expected at most {longest_ngram(vocab_size)}")
    p = np.full(rows.shape, 1 / vocab_size)  # of the n-grams so far; of the first tokens, all that there are before them
    for order in range(1, n):
        asked, shorter = ngram_ids(rows, order, vocab_size), p[:, order - 1 :]
        longer, counts = tally(ngram_ids(text, order + 1, vocab_size))
        often = beginnings(longer, counts, vocab_size)
        p[:, order - 1] = interpolate(often, asked[:, 0], shorter[:, 0], vocab_size)
        longer %= vocab_size**order
        p[:, order:] = interpolate(tally(longer), asked[:, 1:], shorter[:, 1:], vocab_size)
        on_order(order)
    whole = tally(ngram_ids(text, n, vocab_size))
    p[:, n - 1 :] = interpolate(whole, ngram_ids(rows, n, vocab_size), p[:, n - 1 :], vocab_size)
    on_order(n)
    return -np.log(p)


def counted_bits(nats: np.ndarray) -> tuple[float, float | None]:
    """Bits per token of rows, and the standard error over them."""
    each = nats.mean(-1) / math.log(2)
    return float(each.mean()), float(each.std(ddof=1) / len(each) ** 0.5) if len(each) > 1 else None
