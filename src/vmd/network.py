"""The networks: a decoder p(x0 | xt, z), an encoder q(z | x0, xt) and a prior p(z | xt), all made of the same DiT blocks.

Shapes: B rows, L tokens, T tokens of a pass (L, or 2L for the doubled sequence), C blocks of r tokens in a pass,
D width, H heads, V vocabulary, K codes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vmd.attention import (
    CleanPrefix,
    Everything,
    Fused,
    KVCache,
    Visibility,
    Visible,
    Whole,
    attend,
    of_first_queries,
    visibility,
)
from vmd.config import DRAFT_EMBEDDING, ModelConfig
from vmd.latent import Gaussian, standard_normal
from vmd.masking import apply_mask

Keys = KVCache | CleanPrefix
Turn = tuple[Tensor, Tensor]  # cosines and sines of rotary positions, (T, d/2) each


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: turn the pairs (i, i + d/2) of x (B, H, T, d) by angles (T, d/2) of these cosines and sines."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def modulate(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale h (B, T, D) by one pair (B, C, D) per block, broadcast over the block's tokens."""
    blocks = h.unflatten(1, (shift.shape[1], -1))  # (B, C, r, D)
    return (blocks * (1 + scale.unsqueeze(2)) + shift.unsqueeze(2)).flatten(1, 2)


def gate_by(h: Tensor, gate: Tensor) -> Tensor:
    return (h.unflatten(1, (gate.shape[1], -1)) * (1 + gate.unsqueeze(2))).flatten(1, 2)


class Block(nn.Module):
    """A DiT block. Its layer norms have static scales and shifts; a latent adds to them (adaptive layer norm).

    The modulation has no bias, so a block whose condition is zero is exactly the block of the model without latent. A
    condition may be given for the first blocks of a pass alone; the others' is zero then.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: int, block_size: int, conditioned: bool):
        super().__init__()
        self.heads, self.block_size = heads, block_size
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, mlp_ratio * width)
        self.mlp_out = nn.Linear(mlp_ratio * width, width)
        self.modulation = nn.Linear(width, 6 * width, bias=False) if conditioned else None

    def forward(
        self,
        h: Tensor,
        turn: Turn,
        visible: Visible,
        condition: Tensor | None,
        cache: Keys | None,
        layer: int,
        keep: int | None = None,
        modulations: Tensor | None = None,
    ) -> Tensor:
        """With `keep`, only the first tokens come out; the others are keys and values to them.

        Modulations (B, C, 6 D) are the layer's own function of the condition, or given where all layers share them.
        """
        if modulations is None and self.modulation is not None and condition is not None:
            modulations = self.modulation(condition)
        if modulations is None:
            h = h[:, :keep] + self.attention(self.attention_norm(h), turn, visible, cache, layer, keep)
            return h + self.mlp(self.mlp_norm(h))
        unconditioned = h.shape[1] // self.block_size - modulations.shape[1]
        if unconditioned:
            modulations = F.pad(modulations, (0, 0, 0, unconditioned))
        shift1, scale1 = modulations.chunk(6, dim=-1)[:2]
        a = self.attention(modulate(self.attention_norm(h), shift1, scale1), turn, visible, cache, layer, keep)
        if keep is not None:
            modulations = modulations[:, : keep * modulations.shape[1] // h.shape[1]]
        _, _, gate1, shift2, scale2, gate2 = modulations.chunk(6, dim=-1)
        h = h[:, :keep] + gate_by(a, gate1)
        return h + gate_by(self.mlp(modulate(self.mlp_norm(h), shift2, scale2)), gate2)

    def attention(self, h: Tensor, turn: Turn, visible: Visible, cache: Keys | None, layer: int, keep: int | None) -> Tensor:
        qkv = self.qkv(h)
        if isinstance(visible, Whole):
            from vmd.kernels import whole_attention  # needs Triton, which needs a GPU

            assert keep is None, "of one block all tokens are wanted"
            return self.attention_out(whole_attention(qkv, *(table.float() for table in turn), self.heads))
        if isinstance(visible, Fused):
            from vmd.kernels import doubled_attention

            cos, sin = (table[: visible.length].float() for table in turn)
            shape = (self.heads, visible.block_size, visible.own_clean_block)
            return self.attention_out(doubled_attention(qkv, cos, sin, *shape, keep is not None)[0])
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, d) each
        cos, sin = turn
        q, k = rotate(q[:, :, :keep], cos[:keep], sin[:keep]), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.update(layer, k, v)
            visible = cache.visible if visible is None else visible
        return self.attention_out(attend(q, k, v, of_first_queries(visible, keep)).transpose(1, 2).flatten(2))

    def mlp(self, h: Tensor) -> Tensor:
        return self.mlp_out(F.gelu(self.mlp_in(h), approximate="tanh"))


def board_places(cells: int) -> Tensor:
    """(3, cells): the row, the column and the box of every cell."""
    side = math.isqrt(cells)
    box = math.isqrt(side)
    row, column = torch.arange(cells) // side, torch.arange(cells) % side
    return torch.stack([row, column, row // box * box + column // box])


class Trunk(nn.Module):
    """Token embedding, learned absolute positions, DiT blocks with rotary positions, final norm.

    Absolute positions are not optional: with rotary ones alone an all-[MASK] block gives every position the same output.
    """

    def __init__(self, config: ModelConfig, layers: int, conditioned: int = 0):
        """The last `conditioned` layers have adaptive norms."""
        super().__init__()
        own = not config.latent.shared_modulation
        head_dim = config.width // config.heads
        self.token = nn.Embedding(config.vocab_size + 1, config.width)  # the last row is [MASK]
        self.position = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, config.mlp_ratio, config.block_size, own and layer >= layers - conditioned)
            for layer in range(layers)
        )
        self.modulation = None if own or not conditioned else nn.Linear(config.width, 6 * config.width, bias=False)
        self.first_conditioned = layers - conditioned
        self.everything = Everything(head_dim)
        self.norm = nn.LayerNorm(config.width)
        self.lines: nn.ModuleList | None = None
        if config.board:
            self.lines = nn.ModuleList(nn.Embedding(math.isqrt(config.length), config.width) for _ in range(3))
            self.register_buffer("places", board_places(config.length), persistent=False)
        frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.arange(config.length).unsqueeze(1) * frequencies * config.rotary  # no angles: nothing is turned
        self.register_buffer("angles", angles, persistent=False)  # (L, d/2)
        self.angles: Tensor

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(B, T), (T,) -> (B, T, D)."""
        h = self.token(tokens) + self.position(positions)
        if self.lines is not None:
            for line, place in zip(self.lines, self.get_buffer("places"), strict=True):
                h = h + line(place[positions])
        return h

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Visible,
        *,
        added: Tensor | None = None,
        condition: Tensor | None = None,
        cache: Keys | None = None,
        keep: int | None = None,
    ) -> Tensor:
        """tokens (B, T), positions (T,) -> (B, T, D). `added` (B, T, D) joins the embedding; condition is (B, C, D).

        Of the last layer only the first `keep` tokens are computed: nothing reads the clean stream after it.
        """
        h = self.embed(tokens, positions)
        if added is not None:
            h = h + added
        return self.norm(self.run_layers(h, positions, visible, range(len(self.blocks)), condition, cache, keep))

    def run_layers(
        self,
        h: Tensor,
        positions: Tensor,
        visible: Visible,
        layers: range,
        condition: Tensor | None,
        cache: Keys | None,
        keep: int | None = None,
    ) -> Tensor:
        shared = None if condition is None or self.modulation is None else self.modulation(condition)
        if visible is None and cache is None:
            visible = self.everything(h.shape[1])
        angles = self.angles[positions]
        turn = (angles.cos(), angles.sin())
        for layer in layers:
            kept = keep if layer == layers[-1] else None
            given = shared if layer >= self.first_conditioned else None
            h = self.blocks[layer](h, turn, visible, condition, cache, layer, kept, given)
        return h


class LatentPathway(nn.Module):
    """How z enters the decoder: added to the embedding with a learned scale, and fed to every adaptive norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed = nn.Sequential(
            nn.Linear(config.latent.dim, config.width), nn.SiLU(), nn.Linear(config.width, config.width)
        )
        self.scale = nn.Parameter(torch.ones(1))
        self.final_modulation = nn.Linear(config.width, 2 * config.width, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        """z (B, C, dim) -> condition (B, C, D)."""
        return self.embed(z)


def largest_tensor(device: torch.device) -> int:
    """Elements of the largest tensor that scoring codes or rows may make at a time."""
    return 2**31 if device.type == "cuda" else 2**27


class DraftHead(nn.Module):
    """The tokens of a step one after the other: what the last tokens before a place add to its logits.

    The trunk is evaluated once for all of them; only this small network runs for one token after the other.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.reach = config.draft_reach
        self.block_size, self.outside = config.block_size, config.vocab_size + 1
        self.token = nn.Embedding(config.vocab_size + 2, DRAFT_EMBEDDING)  # also [MASK], unknown, and before the text
        self.features = nn.Linear(config.width, config.draft)
        self.last = nn.Linear(self.reach * DRAFT_EMBEDDING, config.draft, bias=False)
        self.mix = nn.Linear(config.draft, config.draft)
        self.out = nn.Linear(config.draft, config.vocab_size, bias=False)

    def windows(self, known: Tensor, x0: Tensor) -> Tensor:
        """(..., L) -> (..., L, reach): those before each place, in its own block as known by then, in earlier ones all."""
        own, finished = (
            F.pad(tokens, (self.reach, 0), value=self.outside).unfold(-1, self.reach, 1)[..., :-1, :]
            for tokens in (known, x0)
        )
        place = torch.arange(known.shape[-1], device=known.device).unsqueeze(1) % self.block_size
        back = torch.arange(self.reach, 0, -1, device=known.device)
        return torch.where(back <= place, own, finished)

    def forward(self, features: Tensor, windows: Tensor) -> Tensor:
        """`self.features` of h, (..., R), and tokens (..., reach) -> (..., V)."""
        x = F.gelu(features + self.last(self.token(windows).flatten(-2)), approximate="tanh")
        return self.out(F.gelu(self.mix(x), approximate="tanh"))


class Decoder(nn.Module):
    """p(x0 | xt^b, x0^{<b}, z^b). With `latent.on_clean`, z^{<b} reaches block b too, through the clean stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        kind = config.latent.kind
        conditioned = {"none": 0, "gaussian": config.layers, "categorical": config.latent.code_layers, "chain": 0}[kind]
        self.trunk = Trunk(config, config.layers, conditioned)
        self.head = nn.Linear(config.width, config.vocab_size)
        self.pathway: nn.Module | None = LatentPathway(config) if kind == "gaussian" else None
        self.draft = DraftHead(config) if config.draft else None
        if config.blocks > 1:
            self.visible = Visibility(config.length, config.block_size, own_clean_block=False)

    def forward(self, xt: Tensor, x0: Tensor, z: Tensor | None, prefix: CleanPrefix | None = None) -> Tensor:
        """Logits (B, L, V) of every noisy position, from one pass over the doubled sequence [xt ; x0].

        Where tokens are written in turn, z (B, L) are those known by the end of the step, [MASK] elsewhere; None: as in xt.
        With (n, B, L), for n such steps: (n, B, L, V). With a prefix, xt and x0 are some blocks behind it.
        """
        if self.draft is not None:
            return self.draft_logits(self.features(xt, x0, None, prefix), xt if z is None else z, x0, prefix)
        return self.head(self.features(xt, x0, z, prefix))

    def draft_logits(self, h: Tensor, known: Tensor, x0: Tensor, prefix: CleanPrefix | None = None) -> Tensor:
        """Of blocks of which these tokens (B, L) are known; of several such, (..., B, L), from the same h."""
        assert self.draft is not None
        if prefix is None or prefix.tokens is None:
            windows = self.draft.windows(known, x0)
        else:
            whole = (torch.cat([prefix.tokens, part], dim=1) for part in (known, x0))
            windows = self.draft.windows(*whole)[:, -h.shape[1] :]
        return self.head(h) + self.draft(self.draft.features(h), windows)

    def features(self, xt: Tensor, x0: Tensor, z: Tensor | None, prefix: CleanPrefix | None = None) -> Tensor:
        """What the logits are made of, (B, L, D). With one block there is no clean prefix: the pass runs on xt alone."""
        condition = None if z is None else self.condition(z)
        if self.config.blocks == 1:
            return self._run(xt, torch.arange(xt.shape[1], device=xt.device), None, condition, None)
        if condition is not None and self.config.latent.on_clean:
            condition = condition.repeat(1, 2, 1)
        doubled, positions, visible = self.doubled(xt, x0, prefix)
        return self._run(doubled, positions, visible, condition, prefix, keep=xt.shape[1])

    def doubled(self, xt: Tensor, x0: Tensor, prefix: CleanPrefix | None) -> tuple[Tensor, Tensor, Visible]:
        """[xt ; x0], where its tokens stand, and what they see: of a prefix everything."""
        length = xt.shape[1]
        tokens, positions = torch.cat([xt, x0], dim=1), torch.arange(length, device=xt.device).repeat(2)
        if prefix is None or prefix.tokens is None:
            return tokens, positions, self.visible()
        before = prefix.tokens.shape[1]
        visible = visibility(length, self.config.block_size, own_clean_block=False, device=xt.device)
        return tokens, before + positions, F.pad(visible, (0, before), value=True)

    def forward_blocks(self, tokens: Tensor, z: Tensor | None, cache: KVCache, *, clean: int) -> Tensor:
        """Features of some blocks (B, n r) behind the cached clean prefix, the first `clean` of them finished ones.

        Where they stand the cache was told; z is theirs (B, n, dim).
        """
        condition = None if z is None else self.condition(z)
        if condition is not None and clean and not self.config.latent.on_clean:
            condition = torch.cat([torch.zeros_like(condition[:, :clean]), condition[:, clean:]], dim=1)
        return self._run(tokens, cache.positions, None, condition, cache)

    def condition(self, z: Tensor) -> Tensor:
        assert self.pathway is not None
        return self.pathway(z)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Visible,
        condition: Tensor | None,
        cache: Keys | None,
        keep: int | None = None,
    ) -> Tensor:
        if condition is None or not isinstance(self.pathway, LatentPathway):
            h = self.trunk(tokens, positions, visible, cache=cache, keep=keep)
            return torch.cat([h[:, :1], h[:, :-1]], dim=1) if self.config.shifted else h
        r = self.config.block_size
        per_token = condition.repeat_interleave(r, dim=1)
        h = self.trunk(
            tokens,
            positions,
            visible,
            added=F.pad(self.pathway.scale * per_token, (0, 0, 0, tokens.shape[1] - per_token.shape[1])),
            condition=F.silu(condition),
            cache=cache,
            keep=keep,
        )
        kept = condition[:, : h.shape[1] // r]
        shift, scale = self.pathway.final_modulation(F.silu(kept)).chunk(2, dim=-1)
        return modulate(h, shift, scale)


class MeanPool(nn.Module):
    """(B, L, D) -> (B, blocks, D): the mean over each block's positions."""

    def forward(self, h: Tensor, blocks: int) -> Tensor:
        return h.unflatten(1, (blocks, -1)).mean(2)


class GatedPool(nn.Module):
    """The same with learned weights: a score for every position, softmax over the block's, the prompt's left out."""

    outside: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = nn.Linear(config.width, 1)
        outside = (torch.arange(config.length) < config.prompt).unflatten(0, (config.blocks, -1))
        outside = outside & ~outside.all(1, keepdim=True)  # a block that is all prompt has no z to speak of
        self.register_buffer("outside", outside, persistent=False)

    def forward(self, h: Tensor, blocks: int) -> Tensor:
        h = h.unflatten(1, (blocks, -1))  # (B, blocks, r, D)
        scores = self.gate(h).squeeze(-1).float().masked_fill(self.outside, -torch.inf)
        return (scores.softmax(-1).to(h.dtype).unsqueeze(-1) * h).sum(2)


class Encoder(nn.Module):
    """q(z^b | xt^b, x0^{<=b}), on the paper's doubled stream [xt ; x0] or on a single stream of (x0, mask bit).

    Of the masked tokens it is shown the targets. In the paper these are all; in a bound for a step that reveals some of
    them, seeing the others would only loosen it. With `encoder_sees_mask=False` it is q(z^b | x0^{<=b}), the posterior of
    the all-masked block whatever xt is, so that z means the same at every step: what a z drawn once per block needs.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config, config.latent.encoder_layers)
        self.pool = MeanPool() if config.latent.pool == "mean" else GatedPool(config)
        self.head = nn.Linear(config.width, 2 * config.latent.dim)
        length, r, sees_mask = config.length, config.block_size, config.latent.encoder_sees_mask
        if config.latent.encoder_stream == "doubled":
            self.visible = Visibility(length, r, own_clean_block=True)
        elif config.blocks > 1:
            self.visible = Visibility(length, r, own_clean_block=False)
        if config.latent.encoder_stream == "single" and sees_mask:
            self.mask_bit = nn.Embedding(2, config.width)

    def forward(self, x0: Tensor, mask: Tensor, target: Tensor | None = None) -> Gaussian:
        hidden = torch.zeros_like(mask) if target is None else mask & ~target
        stream = self.doubled_stream if self.config.latent.encoder_stream == "doubled" else self.single_stream
        mean, log_std = self.head(self.pool(stream(x0, mask, hidden), self.config.blocks)).chunk(2, dim=-1)
        return Gaussian(mean, log_std)

    def doubled_stream(self, x0: Tensor, mask: Tensor, hidden: Tensor) -> Tensor:
        """[xt ; x0], where the noisy block b sees itself and the clean blocks <= b.

        With several blocks hidden tokens stay visible: the clean block that would have to hide them serves later blocks.
        """
        if not self.config.latent.encoder_sees_mask:
            mask, hidden = torch.ones_like(mask), torch.zeros_like(hidden)
        positions = torch.arange(x0.shape[1], device=x0.device)
        xt = apply_mask(x0, mask, self.config.vocab_size)
        clean = apply_mask(x0, hidden, self.config.vocab_size) if self.config.blocks == 1 else x0
        both = torch.cat([xt, clean], dim=1)
        return self.trunk(both, positions.repeat(2), self.visible(), keep=x0.shape[1])

    def single_stream(self, x0: Tensor, mask: Tensor, hidden: Tensor) -> Tensor:
        """Tokens with their mask bits. With several blocks each sees itself so, and the earlier ones clean."""
        length, blocks = x0.shape[1], self.config.blocks
        positions = torch.arange(length, device=x0.device)
        if not self.config.latent.encoder_sees_mask:
            return self.trunk(x0, positions, None if blocks == 1 else self.visible.clean)
        bits, shown = self.mask_bit(mask.long()), apply_mask(x0, hidden, self.config.vocab_size)
        if blocks == 1:
            return self.trunk(shown, positions, None, added=bits)
        doubled, bits = torch.cat([shown, x0], dim=1), torch.cat([bits, torch.zeros_like(bits)], dim=1)
        return self.trunk(doubled, positions.repeat(2), self.visible(), added=bits, keep=length)


class NoEncoder(nn.Module):
    """Sees nothing: z is as in the prior N(0, I)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.shape = (config.blocks, config.latent.dim)

    def forward(self, x0: Tensor, mask: Tensor, target: Tensor | None = None) -> Gaussian:
        return standard_normal(torch.zeros(len(x0), *self.shape, device=x0.device))


class PriorNetwork(nn.Module):
    """p(z^b | revealed tokens of the block, earlier blocks), a diagonal Gaussian."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config, config.latent.prior_layers)
        self.pool = MeanPool()
        self.prior_head = nn.Linear(config.width, 2 * config.latent.dim)
        if config.blocks > 1:
            self.visible = Visibility(config.length, config.block_size, own_clean_block=False)

    def forward(self, xt: Tensor, x0: Tensor) -> Gaussian:
        """For all blocks: (B, C, dim)."""
        positions = torch.arange(xt.shape[1], device=xt.device)
        if self.config.blocks == 1:
            return self._gaussian(self.trunk(xt, positions, None))
        doubled = torch.cat([xt, x0], dim=1)
        return self._gaussian(self.trunk(doubled, positions.repeat(2), self.visible(), keep=xt.shape[1]))

    def forward_blocks(self, tokens: Tensor, cache: KVCache) -> Gaussian:
        """For some blocks (B, n r) behind the cached clean prefix: (B, n, dim)."""
        return self._gaussian(self.trunk(tokens, cache.positions, None, cache=cache))

    def _gaussian(self, h: Tensor) -> Gaussian:
        mean, log_std = self.prior_head(self.pool(h, h.shape[1] // self.config.block_size)).chunk(2, dim=-1)
        return Gaussian(mean, log_std)


@torch.no_grad()
def init_weights(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Every initial value of the networks.

    matrices and their biases: U(-1, 1) / sqrt(inputs), torch's default for linear layers (drawn from `generator`)
    residual outputs (attention_out, mlp_out): the same, divided by sqrt(2 * layers)
    modulations: as matrices, times 0.1: z moves the norms from the start, but gently
    priors: as matrices, times 0.1: near N(0, I), and all codes nearly equally likely
    embeddings of tokens, positions, mask bits and codes: N(0, 1); codes that start close together stay together
    layer norms: scale 1, shift 0; the learned scale of z in the embedding: 1
    """
    layers = max((len(m.blocks) for m in module.modules() if isinstance(m, Trunk)), default=1)
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            bound = child.in_features**-0.5
            if name.endswith(("attention_out", "mlp_out")):
                bound /= (2 * layers) ** 0.5
            if name.endswith(("modulation", "prior", "prior_head")):
                bound *= 0.1
            child.weight.uniform_(-bound, bound, generator=generator)
            if child.bias is not None:
                child.bias.uniform_(-bound, bound, generator=generator)
        elif isinstance(child, nn.Embedding):
            child.weight.normal_(generator=generator)
            if name.endswith("code_next"):  # a code mostly follows itself: the chain starts as one code for a block
                child.weight.mul_(0.5).fill_diagonal_(math.log(len(child.weight)) + 2)
