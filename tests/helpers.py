"""Tiny models, oracles that know a law exactly, and the few statistics the tests need."""

import itertools
import math

import torch
from torch import Tensor

from vmd.config import LatentConfig, ModelConfig
from vmd.data import Law
from vmd.model import VMD

NO_LATENT = LatentConfig(kind="none")


def latent(stream: str = "single", on_clean: bool = False, dim: int = 3) -> LatentConfig:
    return LatentConfig(dim=dim, encoder_layers=1, encoder_stream=stream, on_clean=on_clean)


def codes(count: int = 4, head: str = "bilinear", layers: int = 0, **more) -> LatentConfig:
    return LatentConfig(kind="categorical", codes=count, head=head, code_layers=layers, **more)


def learned_prior(stream: str = "single", on_clean: bool = False, dim: int = 2) -> LatentConfig:
    return LatentConfig(dim=dim, encoder_layers=1, encoder_stream=stream, on_clean=on_clean, prior="learned")


# Every way a code can enter: through either head, of full or low rank, and through the last layers too.
CODES = {
    "bilinear": codes(),
    "additive": codes(head="additive"),
    "low-rank": codes(head_dim=2),
    "by place": codes(by_place=True),
    "bilinear-layer": codes(layers=1),
    "by place-layer": codes(layers=1, by_place=True),
    "additive-layers": codes(head="additive", layers=2),
}


def tiny_config(
    length: int = 4, block_size: int = 2, vocab_size: int = 5, z: LatentConfig = NO_LATENT, **more
) -> ModelConfig:
    shape = {"layers": 2, "width": 16, "heads": 2, "mlp_ratio": 2} | more
    return ModelConfig(vocab_size=vocab_size, length=length, block_size=block_size, latent=z, **shape)


def tiny_model(length: int = 4, block_size: int = 2, vocab_size: int = 5, z: LatentConfig = NO_LATENT, seed: int = 0) -> VMD:
    return VMD(tiny_config(length, block_size, vocab_size, z), seed=seed).eval()


def strong_model(
    length: int = 4, block_size: int = 2, vocab_size: int = 3, z: LatentConfig = NO_LATENT, seed: int = 0
) -> VMD:
    """A random model whose predictions and prior depend strongly on what is revealed, and on the latent."""
    return strengthened(
        VMD(tiny_config(length, block_size, vocab_size, z, layers=max(2, z.code_layers + 1)), seed=seed).eval()
    )


@torch.no_grad()
def strengthened(model: VMD) -> VMD:
    factors = {
        "decoder.head.weight": 4,
        "pathway.out.weight": 3,
        "pathway.scale": 3,
        "pathway.prior.weight": 40,
        "prior_head.weight": 6,
    }
    for name, parameter in model.named_parameters():
        for ending, factor in factors.items():
            if name.endswith(ending):
                parameter.mul_(factor)
    return model


def random_tokens(rows: int, length: int, vocab_size: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def gaps(rows: int, length: int) -> Tensor:
    return torch.full((rows, length), -1)


def random_law(length: int, vocab_size: int, seed: int = 0) -> Law:
    """A law of no structure over all V^L sequences."""
    sequences = torch.tensor(list(itertools.product(range(vocab_size), repeat=length)))
    weights = torch.rand(len(sequences), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3 + 0.02
    return Law("random", sequences, weights / weights.sum(), vocab_size)


def all_sequences(length: int, vocab_size: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(vocab_size), repeat=length)))


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """The p-value of Pearson's test that the counts were drawn from the probabilities; rare outcomes count as one."""
    expected = probabilities.double() * counts.sum()
    assert bool((counts[expected == 0] == 0).all()), "an impossible outcome was drawn"
    ascending = expected.argsort()
    counts, expected = counts[ascending].double(), expected[ascending]
    rare = int((expected.cumsum(0) < 5).sum()) + 1
    counts, expected = (torch.cat([part[:rare].sum().view(1), part[rare:]]) for part in (counts, expected))
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def standard_error(draws: Tensor) -> float:
    return float(draws.double().std()) / len(draws) ** 0.5


def mean_is(draws: Tensor, expected: float, errors: float = 4, tolerance: float = 2e-5) -> bool:
    """Whether the mean of independent draws is the expected value, within so many standard errors."""
    return abs(float(draws.double().mean()) - expected) < errors * standard_error(draws) + tolerance


def sequence_counts(tokens: Tensor, law: Law) -> Tensor:
    """How often each sequence of the law was drawn; fails if some other sequence was."""
    hits = (tokens.unsqueeze(1) == law.sequences).all(-1)
    assert bool(hits.any(-1).all()), "a sequence outside the support was drawn"
    return hits.sum(0)


def conditionals(law: Law, canvas: Tensor) -> Tensor:
    """(B, L, V): the exact law of each position given the tokens of the canvas; V stands for a masked one."""
    hidden = canvas.unsqueeze(1) == law.vocab_size
    agrees = (hidden | (canvas.unsqueeze(1) == law.sequences)).all(-1)  # (B, S)
    weights = agrees * law.probabilities
    weights = weights / weights.sum(-1, keepdim=True)
    one_hot = torch.nn.functional.one_hot(law.sequences, law.vocab_size).double()
    return torch.einsum("bs,slv->blv", weights, one_hot)


def exact_denoiser(law: Law, block_size: int):
    """A `Denoise` callable: block b from the law's own conditionals given xt^b and x0^{<b}."""

    def denoise(xt: Tensor, x0: Tensor, z: Tensor | None) -> Tensor:
        parts = []
        for start in range(0, law.length, block_size):
            stop = start + block_size
            hidden = torch.full_like(x0[:, stop:], law.vocab_size)
            canvas = torch.cat([x0[:, :start], xt[:, start:stop], hidden], dim=1)
            parts.append(conditionals(law, canvas)[:, start:stop])
        return torch.cat(parts, dim=1).log()

    return denoise


class LawOracle:
    """What the sampler needs of a model, answering with a law's exact conditionals; counts its evaluations."""

    def __init__(self, law: Law, block_size: int):
        self.law, self.calls = law, []
        self.config = tiny_config(law.length, block_size, law.vocab_size)

    def latent_shape(self, batch: int):
        return None

    def predictor(self, batch: int, *, cached: bool = True):
        return self

    def predict(self, canvas: Tensor, block: int, z: Tensor | None, noise: Tensor | None = None) -> Tensor:
        self.calls.append(block)
        r = self.config.block_size
        return conditionals(self.law, canvas)[:, block * r : (block + 1) * r].log()

    def read(self, canvas: Tensor, first: int, last: int, z: Tensor | None, noise: Tensor | None) -> int:
        return 0

    def commit(self, canvas: Tensor, block: int, z: Tensor | None) -> int:
        return 0


class UniformIndex:
    """A prior whose draws are sequence numbers 0..count-1, made uniform from the sampler's normal noise."""

    def __init__(self, count: int):
        self.count = count

    def draw(self, noise: Tensor) -> Tensor:
        return (torch.special.ndtr(noise.double()) * self.count).floor().clamp(max=self.count - 1).float()


class LatentOracle(LawOracle):
    """z selects the whole sequence of a uniform law, so that given z all tokens are certain."""

    def __init__(self, law: Law, block_size: int):
        super().__init__(law, block_size)
        self.config = tiny_config(law.length, block_size, law.vocab_size, latent(dim=1))
        self.seen = []

    def latent_shape(self, batch: int):
        return (batch, self.config.blocks, 1)

    def prior(self) -> UniformIndex:
        return UniformIndex(len(self.law.sequences))

    def read(self, canvas: Tensor, first: int, last: int, z: Tensor | None, noise: Tensor | None) -> int:
        assert z is not None
        assert noise is not None
        z[:, first:last] = self.prior().draw(noise)
        return 0

    def predict(self, canvas: Tensor, block: int, z: Tensor | None, noise: Tensor | None = None) -> Tensor:
        assert z is not None
        if noise is not None:
            self.read(canvas, block, block + 1, z, noise.unsqueeze(1))
        self.calls.append(block)
        self.seen.append(z.clone())
        r = self.config.block_size
        chosen = self.law.sequences[z[:, block, 0].long()][:, block * r : (block + 1) * r]
        return torch.nn.functional.one_hot(chosen, self.law.vocab_size).double().log()


class FixedLogits(LawOracle):
    """Predicts the same logits (L, V) whatever the canvas holds."""

    def __init__(self, logits: Tensor, block_size: int | None = None):
        length, vocab_size = logits.shape
        self.logits, self.calls = logits, []
        self.config = tiny_config(length, block_size or length, vocab_size)

    def predict(self, canvas: Tensor, block: int, z: Tensor | None, noise: Tensor | None = None) -> Tensor:
        self.calls.append(block)
        r = self.config.block_size
        return self.logits[block * r : (block + 1) * r].expand(len(canvas), -1, -1)


def close(a: float, b: float, tolerance: float = 1e-9) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
