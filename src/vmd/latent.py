"""Latents: one z per block, shared by all tokens of the block that are decoded together.

A latent family is a record that draws from given normal noise. The Gaussian also has the KL to a prior and log-densities:
its posterior is inferred by an encoder. The codes of a categorical latent are few enough to be summed over, so it needs
neither.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Gaussian(NamedTuple):
    """Diagonal Gaussian over the last dimension."""

    mean: Tensor  # (..., dim)
    log_std: Tensor  # (..., dim)

    def draw(self, noise: Tensor) -> Tensor:
        """Algorithms 1 and 3: z = mu + sigma * eps, with eps ~ N(0, I) drawn by the caller."""
        return self.mean + self.log_std.exp() * noise

    def kl(self, prior: "Gaussian") -> Tensor:
        """D_KL(self || prior) in nats, summed over dimensions."""
        return self.kl_by_dimension(prior).sum(-1)

    def kl_by_dimension(self, prior: "Gaussian") -> Tensor:
        log_ratio = self.log_std - prior.log_std
        shift = (self.mean - prior.mean) * (-prior.log_std).exp()
        return 0.5 * ((2 * log_ratio).exp() + shift**2 - 1 - 2 * log_ratio)

    def log_prob(self, z: Tensor) -> Tensor:
        scaled = (z - self.mean) * (-self.log_std).exp()
        return (-0.5 * scaled**2 - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


class Categorical(NamedTuple):
    """One of K codes."""

    log_probs: Tensor  # (..., K), normalised

    def draw(self, noise: Tensor) -> Tensor:
        """(..., 1) code numbers from eps ~ N(0, 1), (..., 1): Phi(eps) is uniform and inverts the distribution function."""
        cumulative = self.log_probs.double().exp().cumsum(-1)
        total = cumulative[..., -1:]
        below_total = torch.nextafter(total, torch.zeros_like(total))
        target = torch.minimum(torch.special.ndtr(noise.double()) * total, below_total)
        return torch.searchsorted(cumulative, target, right=True).to(noise.dtype)


def standard_normal(like: Tensor) -> Gaussian:
    """The paper's prior, p(z) = N(0, I), shaped like a given tensor of latents or means."""
    zeros = torch.zeros_like(like)
    return Gaussian(zeros, zeros)
