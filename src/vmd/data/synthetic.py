"""The controlled experiments: laws over short sequences that are known exactly, and can be enumerated."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vmd.config import InvalidInput, require
from vmd.masking import Rows, send


@dataclass(frozen=True)
class Law:
    """A distribution over finitely many sequences."""

    name: str
    sequences: Tensor  # (S, L): the support
    probabilities: Tensor  # (S,) float64
    vocab_size: int
    symbols: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        return self.sequences.shape[1]

    @property
    def entropy(self) -> float:
        """In nats per sequence."""
        return float(torch.special.entr(self.probabilities).sum())

    @property
    def constrains(self) -> bool:
        """Whether some sequences are invalid, so that accuracy means something."""
        return len(self.sequences) < self.vocab_size**self.length

    def draw(self, count: int, *, generator: torch.Generator | None = None, device=None) -> Tensor:
        """(count, L) independent sequences."""
        cumulative = send(self.probabilities, device).cumsum(0)
        u = torch.rand(count, generator=generator, device=device, dtype=torch.float64) * cumulative[-1]
        index = torch.searchsorted(cumulative, u, right=True).clamp(max=len(self.sequences) - 1)
        return send(self.sequences, device)[index]

    def batch(
        self, step: int, size: int, *, rows: Rows | None = None, generator: torch.Generator | None = None, device=None
    ) -> Tensor:
        drawn = self.draw(size, generator=generator, device=device)
        return drawn if rows is None else rows.of(drawn)

    def marginals(self) -> Tensor:
        """(L, V): the law of each position alone."""
        table = torch.zeros(self.length, self.vocab_size, dtype=torch.float64)
        for position in range(self.length):
            table[position].index_add_(0, self.sequences[:, position], self.probabilities)
        return table

    def total_correlation(self) -> float:
        """KL(law || product of its marginals): what one-step MDM must show, and cannot beat."""
        return float(torch.special.entr(self.marginals()).sum()) - self.entropy


def deterministic(vocab_size: int = 10) -> Law:
    """(k, k+1 mod V), uniform."""
    k = torch.arange(vocab_size)
    uniform = torch.full((vocab_size,), 1 / vocab_size, dtype=torch.float64)
    return Law("deterministic", torch.stack([k, (k + 1) % vocab_size], dim=1), uniform, vocab_size)


def non_uniform(vocab_size: int = 10) -> Law:
    """(k, k+1 mod V) with probability proportional to k + 1."""
    k = torch.arange(vocab_size)
    weights = (k + 1).double()
    return Law("non-uniform", deterministic(vocab_size).sequences, weights / weights.sum(), vocab_size)


def dependence(p: float, vocab_size: int = 10) -> Law:
    """x1 uniform; x2 = x1 + 1 mod V with probability p, else one of the V - 1 others. Independent at p = 1/V."""
    require(0 <= p <= 1, f"dependence-{p}: expected a probability between 0 and 1")
    pairs = torch.tensor(list(itertools.product(range(vocab_size), repeat=2)))
    follows = pairs[:, 1] == (pairs[:, 0] + 1) % vocab_size
    probabilities = torch.where(follows, torch.tensor(p, dtype=torch.float64), (1 - p) / (vocab_size - 1)) / vocab_size
    support = probabilities > 0
    return Law(f"dependence-{p:g}", pairs[support], probabilities[support] / probabilities.sum(), vocab_size)


def d1(vocab_size: int = 10) -> Law:
    """(k, k+1, k+2, k+3 mod V), uniform: 10 sequences."""
    sequences = (torch.arange(vocab_size).unsqueeze(1) + torch.arange(4)) % vocab_size
    return Law("d1", sequences, torch.full((vocab_size,), 1 / vocab_size, dtype=torch.float64), vocab_size)


def d2(vocab_size: int = 10) -> Law:
    """(k, k+1, l, l+1 mod V), uniform: two independent pairs, 100 sequences."""
    pairs = deterministic(vocab_size).sequences
    sequences = torch.tensor([[*a, *b] for a in pairs.tolist() for b in pairs.tolist()])
    count = len(sequences)
    return Law("d2", sequences, torch.full((count,), 1 / count, dtype=torch.float64), vocab_size)


POKER_HANDS = ("high card", "two pair", "full house", "straight flush")


def poker() -> Law:
    """The paper's opening example: poker hands of two English words. Independent words give "high house"."""
    words = tuple(word for hand in POKER_HANDS for word in hand.split())
    sequences = torch.tensor([[words.index(word) for word in hand.split()] for hand in POKER_HANDS])
    uniform = torch.full((len(POKER_HANDS),), 1 / len(POKER_HANDS), dtype=torch.float64)
    return Law("poker", sequences, uniform, len(words), symbols=words)


LAWS = {"deterministic": deterministic, "non-uniform": non_uniform, "d1": d1, "d2": d2, "poker": poker}


def law(name: str) -> Law:
    """A law by name: deterministic, non-uniform, dependence-P, d1, d2, poker."""
    known = f"dependence-P, or one of {', '.join(LAWS)}"
    require(isinstance(name, str), f"unknown data {name!r:.60}: expected {known}")
    if name in LAWS:
        return LAWS[name]()
    if name.startswith("dependence-"):
        try:
            p = float(name.removeprefix("dependence-"))
        except ValueError:
            p = math.nan
        require(p == p, f"{name}: expected dependence-P with a probability P, such as dependence-0.5")
        return dependence(p)
    raise InvalidInput(f"unknown data {name!r}: no such file: expected the path of an .npy array or of text, text8, {known}")
