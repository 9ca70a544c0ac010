"""Codes in the decoder: one pass of the trunk, then any number of them, chosen, scored or summed over.

Shapes as in `vmd.network`; n of the K codes at a time.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.utils.checkpoint import checkpoint

from vmd.attention import CleanPrefix, KVCache, Visible
from vmd.config import ModelConfig
from vmd.latent import Categorical, CodeChain
from vmd.network import Decoder, largest_tensor
from vmd.objective import ChainCodes, Codes


class CodePathway(nn.Module):
    """How one of K codes enters the decoder: through the output layer, and through the last layers if there are such.

    bilinear: logits_k = head(h) + out(scale_k * project(h) + shift_k). All codes are one matrix product with the K V rows
        scale_k * out_v, so that nothing of size K x D is made for a token.
    additive: logits_k = head(h) + table_{k, place in the block}, whose normaliser for all codes is one product
        exp(head(h)) . exp(table)^T. A code then means the same in every context; only its prior heeds the context.
    Of a chain, each token's code enters its own logits, and the prior has a table of which code follows which.
    With `by_place`, scale_k and shift_k are others at every place of a block, and the prior has weights for each.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        c, codes, width = config, config.latent.codes, config.width
        self.places = c.block_size if c.latent.by_place else 1
        share_a_code = c.latent.span if c.latent.kind == "chain" else c.block_size
        self.prior_norm = nn.LayerNorm(width)
        self.prior = nn.Linear(width * (share_a_code if c.latent.by_place else 1), codes)
        if c.latent.head == "bilinear":
            rank = c.latent.head_dim or width
            self.project = nn.Linear(width, rank, bias=False)
            self.out = nn.Linear(rank, c.vocab_size, bias=False)
            self.code_scale = nn.Embedding(codes, self.places * rank)
            self.code_shift = nn.Embedding(codes, self.places * rank)
        else:
            self.code_table = nn.Embedding(codes, c.block_size * c.vocab_size)
            self.shape = (c.block_size, c.vocab_size)
        if c.latent.kind == "chain":
            self.code_next = nn.Embedding(codes, codes)
        if c.latent.code_layers:
            self.code = nn.Embedding(codes, width)
            self.scale = nn.Parameter(torch.ones(1))

    def scale_and_shift(self, code: Tensor) -> tuple[Tensor, Tensor]:
        """(...,) codes -> (..., r or 1, R) each: of every place of the block, or of all."""
        scale, shift = (table(code).unflatten(-1, (self.places, -1)) for table in (self.code_scale, self.code_shift))
        return scale, shift

    def tables(self, code: Tensor) -> Tensor:
        """(...,) codes -> (..., r, V), softly limited so that no normaliser underflows."""
        return limited(self.code_table(code).unflatten(-1, self.shape), TABLE_LIMIT)


TABLE_LIMIT, NEXT_LIMIT = 20.0, 10.0
NEVER = -1e30  # the logit of what is never written; finite, so that it may be added to
KERNEL_RANKS, KERNEL_VOCAB = (16, 32, 64, 128, 256), 64  # ranks of a head, and the most symbols, that the kernel knows


def limited(x: Tensor, most: float) -> Tensor:
    return most * torch.tanh(x / most)


class CodeFeatures(NamedTuple):
    """What one pass of the trunk knows before a code is chosen."""

    h: Tensor  # (B, L, D): of the noisy tokens, before the layers that see the code
    prefix: KVCache | CleanPrefix | None  # keys and values of the clean stream in those layers
    positions: Tensor  # (L,)
    prior: Categorical | CodeChain  # log_probs (B, C, K); biases (B, C, r, K)


class CodeDecoder(Decoder):
    """p(x0 | xt^b, x0^{<b}, k^b), and the prior pi(k^b | xt^b, x0^{<b})."""

    pathway: CodePathway

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.pathway = CodePathway(config)

    def forward(self, xt: Tensor, x0: Tensor, z: Tensor | None, prefix: CleanPrefix | None = None) -> Tensor:
        """Logits (B, L, V) of every noisy position under codes z (B, C, 1), of a chain (B, C, r / span)."""
        assert z is not None, "a model of codes needs them"
        return self.code_logits(self.code_features(xt, x0, prefix), z.long())

    def code_features(self, xt: Tensor, x0: Tensor, prefix: CleanPrefix | None = None) -> CodeFeatures:
        """The layers before the code, over [xt ; x0]; the clean stream runs on alone through the last ones.

        With a prefix, for the blocks behind it, if all layers come before the code.
        """
        c, trunk = self.config, self.trunk
        split, length = c.layers - c.latent.code_layers, xt.shape[1]
        if c.blocks == 1:
            positions = torch.arange(length, device=xt.device)
            h = trunk.embed(xt, positions)
            h = trunk.run_layers(h, positions, None, range(split), None, None)
            return CodeFeatures(h, None, positions, self.code_prior(h))
        doubled, both, visible = self.doubled(xt, x0, prefix)
        keep = length if split == c.layers else None
        h = trunk.run_layers(trunk.embed(doubled, both), both, visible, range(split), None, prefix, keep)
        noisy, clean, positions = h[:, :length], h[:, length:], both[:length]
        recorded = CleanPrefix()
        if split < c.layers:
            assert prefix is None, "the layers that see the code would need it too"
            with recorded.recording():
                trunk.run_layers(clean, positions, self.visible.clean, range(split, c.layers), None, recorded)
        return CodeFeatures(noisy, recorded, positions, self.code_prior(noisy))

    def code_block_features(self, tokens: Tensor, cache: KVCache, *, clean: int) -> CodeFeatures:
        """The same for some blocks (B, n r) behind the cached clean prefix, less the first `clean`, which are finished."""
        h = self.trunk.embed(tokens, cache.positions)
        before_codes = range(self.config.layers - self.config.latent.code_layers)
        h = self.trunk.run_layers(h, cache.positions, None, before_codes, None, cache)[:, clean * self.config.block_size :]
        return CodeFeatures(h, cache, cache.positions, self.code_prior(h))

    def read_blocks(self, tokens: Tensor, cache: KVCache) -> Categorical | CodeChain:
        """Finished blocks (B, n r) through all layers, for the cache; the prior of their codes, now that they are known."""
        features = self.code_block_features(tokens, cache, clean=0)
        with_codes = range(self.config.layers - self.config.latent.code_layers, self.config.layers)
        self.trunk.run_layers(features.h, cache.positions, None, with_codes, None, cache)
        return features.prior

    def code_prior(self, h: Tensor) -> Categorical | CodeChain:
        """pi(k^b | revealed tokens of the block, earlier blocks); of a chain, from each code's own tokens."""
        pathway, blocks = self.pathway, h.shape[1] // self.config.block_size
        if self.config.latent.kind == "chain":
            bias = self._read_prior(h, h.shape[1] // self.config.latent.span)
            return CodeChain(bias.unflatten(1, (blocks, -1)), limited(pathway.code_next.weight.float(), NEXT_LIMIT))
        return Categorical(self._read_prior(h, blocks).log_softmax(-1))

    def _read_prior(self, h: Tensor, codes: int) -> Tensor:
        """(B, L, D) -> (B, codes, K), each from the mean over its tokens; by place, each of these has weights of its own."""
        h = self.pathway.prior_norm(h).unflatten(1, (codes, -1))
        read = h.flatten(2) / h.shape[2] if self.config.latent.by_place else h.mean(2)
        return self.pathway.prior(read).float()

    def code_weights(self, prior: Categorical | CodeChain) -> Tensor:
        """log pi of the code of each token, (B, L, K), whatever the others' are."""
        if isinstance(prior, CodeChain):
            by_code = torch.stack(prior.forward_messages(torch.zeros_like(prior.bias)), dim=-2).flatten(1, 2)
            return by_code.repeat_interleave(self.config.latent.span, dim=1)
        return prior.log_probs.repeat_interleave(self.config.block_size, dim=1)

    def last_layers(self, features: CodeFeatures, code: Tensor) -> Tensor:
        """The layers that see the code, for codes (B * n, C), n of them for each row -> normalised (B * n, L, D)."""
        c, h = self.config, features.h
        if c.latent.code_layers:
            pathway, each = self.pathway, len(code) // len(h)
            condition = pathway.code(code)  # (B n, C, D)
            per_token = condition.repeat_interleave(h.shape[1] // code.shape[1], dim=1)
            h = h.repeat_interleave(each, dim=0) + pathway.scale * per_token
            visible: Visible = None
            if isinstance(features.prefix, CleanPrefix):
                visible = self.visible.dense[: c.length]
            layers = range(c.layers - c.latent.code_layers, c.layers)
            h = self.trunk.run_layers(h, features.positions, visible, layers, F.silu(condition), features.prefix)
        return self.trunk.norm(h)

    def code_logits(self, features: CodeFeatures, code: Tensor) -> Tensor:
        """Logits (B, L, V) under the chosen codes: one for each block, (B, C, 1), or for each span, (B, C, r / span)."""
        pathway = self.pathway
        if self.config.latent.kind == "chain":
            h, code = self.trunk.norm(features.h), code.repeat_interleave(self.config.latent.span, dim=2)
            if self.config.latent.head == "additive":
                own = pathway.tables(code).diagonal(dim1=2, dim2=3)  # (B, C, V, r): of each place, its own code's
                return self.head(h) + own.transpose(2, 3).flatten(1, 2)
            here = torch.arange(code.shape[2], device=code.device)
            scale, shift = (x[:, :, here, here % pathway.places] for x in pathway.scale_and_shift(code))
            return self.head(h) + pathway.out(pathway.project(h) * scale.flatten(1, 2) + shift.flatten(1, 2))
        code = code.squeeze(-1)
        h = self.last_layers(features, code)  # (B, L, D)
        if self.config.latent.head == "additive":
            return self.head(h) + pathway.tables(code).flatten(1, 2)  # (B, L, V)
        scale, shift = pathway.scale_and_shift(code)  # (B, C, r or 1, R)
        moved = pathway.project(h).unflatten(1, (code.shape[1], -1)) * scale + shift
        return self.head(h) + pathway.out(moved.flatten(1, 2))

    def code_scores(self, xt: Tensor, x0: Tensor, target: Tensor, prefix: CleanPrefix | None = None) -> Codes | ChainCodes:
        """log pi_k and the sum over each block's target tokens of log p(x0_i | k), for every code: (B, C, K) each.

        Of a chain, the sum over each code's own targets, (B, C, r / span, K), and what the chain is.
        """
        features = self.code_features(xt, x0, prefix)
        found = torch.cat([part for part, _ in self._score_codes(features, x0, target)], dim=-1)
        return self._with_prior(features.prior, found)

    def code_scores_twice(self, xt: Tensor, x0: Tensor, target: Tensor) -> tuple[Codes | ChainCodes, Tensor]:
        """The same, and what targets cost each by itself: the sum over a block's of log sum_k pi_k p(x0_i | k), (B, C)."""
        features = self.code_features(xt, x0)
        scores = self._score_codes(features, x0, target, self.code_weights(features.prior))
        found, alone = zip(*scores, strict=True)
        by_token = torch.stack(alone).logsumexp(0).masked_fill(~target, 0.0).unflatten(1, (self.config.blocks, -1))
        return self._with_prior(features.prior, torch.cat(found, dim=-1)), by_token.sum(2)

    def _with_prior(self, prior: Categorical | CodeChain, found: Tensor) -> Codes | ChainCodes:
        return ChainCodes(prior, found) if isinstance(prior, CodeChain) else Codes(prior.log_probs, found)

    def _score_codes(self, features: CodeFeatures, x0: Tensor, target: Tensor, weights: Tensor | None = None) -> list[tuple]:
        """`_score_some` of all codes, in as many parts as memory asks for."""
        c = self.config
        codes = torch.arange(c.latent.codes, device=x0.device)
        per_code = max(self._per_code(x0.numel()), x0.numel() * 2 * c.mlp_ratio * c.width if c.latent.code_layers else 0)
        budget, fewest = largest_tensor(x0.device), 1
        if self.kernel_scores():  # no logits
            per_code = max(x0.numel(), self.pathway.places * padded(c.vocab_size) * (c.latent.head_dim or c.width))
        elif c.latent.head == "additive" and not c.latent.code_layers:  # nor here
            per_code = max(x0.numel(), c.block_size * c.vocab_size)
        elif self._by_target(features):  # a place at a time; small parts are faster, but each makes what all codes share
            budget, fewest = budget * self.pathway.places // 2**5, 1 + 2 * c.width // c.vocab_size
        elif x0.device.type == "cpu" and not torch.is_grad_enabled():  # with gradients all is made twice
            budget //= 2**5
        chunk = c.latent.code_chunk or max(fewest, min(len(codes), budget // per_code))
        parts = []
        for some in codes.split(chunk):
            if chunk < len(codes) and torch.is_grad_enabled():  # forget the chunk's activations, make them again
                arguments = (features, some, x0, target, weights)
                parts.append(checkpoint(self._score_some, *arguments, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(self._score_some(features, some, x0, target, weights))
        return parts

    def _score_some(
        self, features: CodeFeatures, some: Tensor, x0: Tensor, target: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(B, C, n) for n codes, of a chain (B, C, r/span, n); with weights, log sum_k pi_k p(x0_i | k) of these, (B, L)."""
        score = self._score_by_kernel if self.kernel_scores() else self._score_tokens
        log_p = score(features, some, x0, target)
        chosen = log_p.masked_fill(~target.unsqueeze(-1), 0.0).unflatten(1, (-1, self.config.block_size))
        chosen = chosen.unflatten(2, (-1, self.config.latent.span)) if self.config.latent.kind == "chain" else chosen
        return chosen.sum(-2), None if weights is None else (weights[..., some] + log_p).logsumexp(-1)

    def _score_tokens(self, features: CodeFeatures, some: Tensor, x0: Tensor, target: Tensor) -> Tensor:
        """log p(x0_i | k) of every target, (B, L, n), and anything finite of other tokens."""
        c, pathway, n = self.config, self.pathway, len(some)
        if c.latent.code_layers:
            every = some.repeat(len(x0)).unsqueeze(1).expand(-1, c.blocks)  # (B n, C): rows of one sequence are neighbours
            h = self.last_layers(features, every).unflatten(0, (-1, n)).transpose(1, 2)  # (B, L, n, D)
            return self._log_p(h, some, x0)
        h = self.trunk.norm(features.h).unsqueeze(2)  # (B, L, 1, D)
        if c.latent.head == "additive":
            return additive_log_p(self.head(h).squeeze(2), pathway.tables(some), x0)
        if self._by_target(features):
            return self._score_targets(h.flatten(0, 2), some, x0.flatten(), target.flatten()).view(*x0.shape, n)
        return self._log_p(h, some, x0)

    def _log_p(self, h: Tensor, some: Tensor, x0: Tensor) -> Tensor:
        """(B, L, n), from normalised h (B, L, n or 1, D)."""
        log_p = self._logits_of_codes(h, some).float().log_softmax(-1)  # (B, L, n, V)
        index = x0.view(*x0.shape, 1, 1).expand(-1, -1, len(some), -1)
        return log_p.gather(-1, index).squeeze(-1)

    def _by_target(self, features: CodeFeatures) -> bool:
        """Whether tokens that are no targets are left out: a CPU need not wait to know which these are."""
        c, h = self.config, features.h
        in_the_head = c.latent.head == "bilinear" and not c.latent.code_layers
        transformed = torch.compiler.is_compiling() or peek_interpreter_stack() is not None  # shapes must not depend on data
        return in_the_head and h.device.type == "cpu" and not transformed

    def _score_targets(self, h: Tensor, some: Tensor, x0: Tensor, target: Tensor) -> Tensor:
        """The same (B L, n) from h (B L, D), of targets alone, place by place."""
        pathway, n, place = self.pathway, len(some), torch.arange(len(h)) % self.pathway.places
        scales, shifts = (x.transpose(0, 1) for x in pathway.scale_and_shift(some))  # (r or 1, n, R)
        found = h.new_zeros(len(h), n, dtype=torch.float32)
        for here, (scale, shift) in enumerate(zip(scales, shifts, strict=True)):
            token = (target & (place == here)).nonzero().squeeze(1)
            shared, projected = self.head(h[token]).unsqueeze(1), pathway.project(h[token])
            if len(token) < self.config.vocab_size:  # features are moved faster than output rows
                moved = pathway.out(projected.unsqueeze(1) * scale + shift)
            else:
                rows = (scale.unsqueeze(1) * pathway.out.weight).flatten(0, 1)  # (n V, R)
                moved = F.linear(projected, rows, pathway.out(shift).flatten()).unflatten(-1, (n, -1))
            log_p = moved.add_(shared).float().log_softmax(-1)  # (tokens, n, V)
            found[token] = log_p.gather(-1, x0[token].view(-1, 1, 1).expand(-1, n, -1)).squeeze(-1)
        return found

    def kernel_scores(self) -> bool:
        """Whether kernels are asked for, in bf16, and have one for codes like these."""
        c, rank = self.config, self.config.latent.head_dim or self.config.width
        kernels = self.trunk.everything.other
        asked = kernels is not None and kernels.roomy and torch.is_autocast_enabled("cuda")
        in_the_head = c.latent.head == "bilinear" and not c.latent.code_layers
        return asked and in_the_head and rank in KERNEL_RANKS and c.vocab_size <= KERNEL_VOCAB

    def _score_by_kernel(self, features: CodeFeatures, some: Tensor, x0: Tensor, target: Tensor) -> Tensor:
        """log p(x0_i | k) of every target, (B, L, n), and 0 of other tokens."""
        from vmd.code_kernels import score_codes  # needs Triton, which needs a GPU

        pathway, h, vocab = self.pathway, self.trunk.norm(features.h), self.config.vocab_size
        more = padded(vocab) - vocab  # symbols that are never written
        out = F.pad(pathway.out.weight, (0, 0, 0, more))
        scale, shift = (x.transpose(0, 1) for x in pathway.scale_and_shift(some))  # (r or 1, n, R)
        rows, bias = (scale.unsqueeze(2) * out).bfloat16(), F.linear(shift, out)  # (r or 1, n, V, R), (r or 1, n, V)
        shared = F.pad(self.head(h), (0, more), value=NEVER)
        by_token = (part.flatten(0, 1) for part in (pathway.project(h), shared))
        return score_codes(*by_token, rows, bias, x0.flatten(), target.flatten()).view(*x0.shape, -1)

    def _per_code(self, tokens: int) -> int:
        """Elements that one code adds to the largest tensor: logits of tokens, or the output layer of each place."""
        return self.config.vocab_size * max(tokens, self.pathway.places * (self.config.latent.head_dim or self.config.width))

    def _logits_of_codes(self, h: Tensor, some: Tensor) -> Tensor:
        """Normalised h (B, L, n or 1, D) of n codes -> (B, L, n, V)."""
        c, pathway, n = self.config, self.pathway, len(some)
        logits = self.head(h)  # (B, L, n or 1, V)
        if c.latent.head == "additive":
            return logits + pathway.tables(some).transpose(0, 1).repeat(h.shape[1] // c.block_size, 1, 1)
        scale, shift = (x.transpose(0, 1) for x in pathway.scale_and_shift(some))  # (r or 1, n, R)
        projected = pathway.project(h).unflatten(1, (-1, pathway.places))  # (B, L/r, r, n or 1, R), or (B, L, 1, ...)
        few = h.shape[0] * h.shape[1] < pathway.places * c.vocab_size  # whose features are moved faster than output rows
        if c.latent.code_layers or few:
            return logits + pathway.out(projected * scale + shift).flatten(1, 2)
        rows, bias = (scale.unsqueeze(2) * pathway.out.weight).flatten(1, 2), pathway.out(shift).flatten(1)  # (r or 1, n V)
        if pathway.places == 1:
            return logits + F.linear(projected.flatten(2), rows[0], bias[0]).unflatten(-1, (n, -1))
        by_place = projected.squeeze(3).permute(2, 0, 1, 3).flatten(1, 2)  # (r, B L/r, R)
        moved = torch.baddbmm(bias.unsqueeze(1), by_place, rows.transpose(1, 2)).unflatten(1, (len(h), -1))
        return logits + moved.permute(1, 2, 0, 3).flatten(1, 2).unflatten(-1, (n, -1))

    def code_marginals(self, features: CodeFeatures) -> Tensor:
        """log p(x_i) of every token, summed over codes, (B, L, V); of codes that enter through the output layer alone."""
        c, weights = self.config, self.code_weights(features.prior)
        assert not c.latent.code_layers, "each code would take a pass of its own"
        h = self.trunk.norm(features.h).unsqueeze(2)
        codes = torch.arange(c.latent.codes, device=h.device)
        parts = []
        for some in codes.split(max(1, largest_tensor(h.device) // (8 * self._per_code(h.shape[0] * h.shape[1])))):
            log_p = self._logits_of_codes(h, some).float().log_softmax(-1)
            parts.append((log_p + weights[..., some].unsqueeze(-1)).logsumexp(2))
        return torch.stack(parts).logsumexp(0)


def additive_log_p(logits: Tensor, tables: Tensor, x0: Tensor) -> Tensor:
    """log p(x0_i | k) under logits (B, L, V) plus tables (n, r, V), for every code: (B, L, n), without logits for each."""
    tables, place = tables.float(), torch.arange(x0.shape[1], device=x0.device) % tables.shape[1]
    log_p = logits.float().log_softmax(-1)
    top = tables.amax(-1, keepdim=True)
    by_place = log_p.exp().unflatten(1, (-1, tables.shape[1])).transpose(1, 2).transpose(0, 1)  # (r, B, C, V)
    with torch.autocast(x0.device.type, enabled=False):
        normaliser = by_place.flatten(1, 2) @ (tables - top).exp().permute(1, 2, 0)  # (r, B C, n)
    normaliser = normaliser.unflatten(1, (len(x0), -1)).permute(1, 2, 0, 3).flatten(1, 2)  # (B, L, n)
    own = log_p.gather(-1, x0.unsqueeze(-1))  # (B, L, 1)
    shifted = (tables - top).permute(1, 2, 0)[place, x0]  # (B, L, n)
    return own + shifted - normaliser.log()


def padded(vocab: int) -> int:
    """Tiles of a kernel are powers of two."""
    return max(16, 1 << (vocab - 1).bit_length())


def order_targets(target: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """The tokens of each place (places, n), targets first, and how many these are."""
    target = target.flatten().view(-1, places).T
    counts = target.sum(1, dtype=torch.int32)
    position = torch.where(target, target.cumsum(1), counts.unsqueeze(1) + (~target).cumsum(1)) - 1
    token = torch.arange(target.numel(), device=target.device).view(-1, places).T
    return torch.empty(target.shape, dtype=torch.long, device=target.device).scatter_(1, position, token).int(), counts
