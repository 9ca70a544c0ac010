"""Latents: one z per block, shared by all tokens of the block that are decoded together.

A latent family is a record that draws from given normal noise, and knows its likeliest value. The Gaussian also has the
KL to a prior and log-densities: its posterior is inferred by an encoder. The codes of a categorical latent are few enough
to be summed over, so it needs neither.
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

    def likeliest(self) -> Tensor:
        return self.mean

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

    def likeliest(self) -> Tensor:
        return self.log_probs.argmax(-1, keepdim=True).float()


class CodeChain(NamedTuple):
    """A code for each of a block's r tokens: k_1 ~ softmax(bias_1), then k_{i+1} ~ softmax(next[k_i] + bias_{i+1}).

    The biases come from the context, the table `next` is one for all. Sums over all K^r chains are r - 1 products with
    exp(next): nothing of size K x K is made for a token.
    """

    bias: Tensor  # (..., r, K)
    next: Tensor  # (K, K): from (row) to (column)

    def draw(self, noise: Tensor) -> Tensor:
        """(..., r) code numbers from eps ~ N(0, 1), (..., r)."""
        logits = self.bias[..., 0, :]
        codes: list[Tensor] = []
        for place in range(self.bias.shape[-2]):
            if place:
                logits = self.next[codes[-1][..., 0].long()] + self.bias[..., place, :]
            codes.append(Categorical(logits.log_softmax(-1)).draw(noise[..., place : place + 1]))
        return torch.cat(codes, dim=-1)

    def likeliest(self) -> Tensor:
        """(..., r): of all chains the most probable, by Viterbi's algorithm. A row takes K x K: few at a time."""
        rows = self.bias.flatten(0, -3)
        some = rows.split(max(1, 2**24 // self.next.numel()))
        return torch.cat([CodeChain(part, self.next)._viterbi() for part in some]).view(self.bias.shape[:-1]).float()

    def _viterbi(self) -> Tensor:
        best, came_from = self.bias[..., 0, :].log_softmax(-1), []
        for place in range(1, self.bias.shape[-2]):
            steps = (self.next + self.bias[..., place, :].unsqueeze(-2)).log_softmax(-1)  # (rows, K, K)
            best, before = (best.unsqueeze(-1) + steps).max(-2)
            came_from.append(before)
        codes = [best.argmax(-1, keepdim=True)]
        for before in reversed(came_from):
            codes.insert(0, before.gather(-1, codes[0]))
        return torch.cat(codes, dim=-1)

    def forward_messages(self, log_likelihood: Tensor) -> list[Tensor]:
        """log p(evidence up to token i, k_i), (..., K) for each of the r tokens; the evidence is (..., r, K)."""
        with torch.autocast(self.bias.device.type, enabled=False):
            table = self.next.exp()
            messages = [self.bias[..., 0, :].log_softmax(-1) + log_likelihood[..., 0, :]]
            for place in range(1, self.bias.shape[-2]):
                before, bias = messages[-1], self.bias[..., place, :]
                weights, top = (bias - bias.amax(-1, keepdim=True)).exp(), before.amax(-1, keepdim=True)
                sent = (before - top).exp() / (weights @ table.mT)  # each code's row sums to one
                arrived = (sent @ table).log() + bias - bias.amax(-1, keepdim=True) + top
                messages.append(arrived + log_likelihood[..., place, :])
        return messages

    def marginals(self, log_likelihood: Tensor) -> Tensor:
        """(..., r, K): the posterior of each token's code given all evidence; with none, its prior."""
        forward = self.forward_messages(log_likelihood)
        table = self.next.exp()
        backward = [torch.zeros_like(forward[-1])]
        for place in range(self.bias.shape[-2] - 1, 0, -1):
            bias = self.bias[..., place, :]
            weights = (bias - bias.amax(-1, keepdim=True)).exp()
            evidence = log_likelihood[..., place, :] + backward[0]
            top = evidence.amax(-1, keepdim=True)
            sent = (weights * (evidence - top).exp()) @ table.mT
            backward.insert(0, sent.log() - (weights @ table.mT).log() + top)
        return (torch.stack(forward, dim=-2) + torch.stack(backward, dim=-2)).softmax(-1)


def standard_normal(like: Tensor) -> Gaussian:
    """The paper's prior, p(z) = N(0, I), shaped like a given tensor of latents or means."""
    zeros = torch.zeros_like(like)
    return Gaussian(zeros, zeros)
