"""The networks: a decoder p(x0 | xt, z) and an encoder q(z | x0, xt), both made of the same DiT blocks.

Shapes: B rows, L tokens, T tokens of a pass (L, or 2L for the doubled sequence), C blocks of r tokens in a pass,
D width, H heads, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vmd.attention import KVCache, attend, block_causal, visibility
from vmd.config import ModelConfig
from vmd.latent import Gaussian
from vmd.masking import apply_mask


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: turn the pairs (i, i + d/2) of x (B, H, T, d) by angles (T, d/2)."""
    cos, sin = angles.cos(), angles.sin()
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

    The modulation has no bias, so a block whose condition is zero is exactly the block of the model without latent.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: int, conditioned: bool):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, mlp_ratio * width)
        self.mlp_out = nn.Linear(mlp_ratio * width, width)
        self.modulation = nn.Linear(width, 6 * width, bias=False) if conditioned else None

    def forward(
        self, h: Tensor, angles: Tensor, visible: Tensor | None, condition: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        if self.modulation is None or condition is None:
            h = h + self.attention(self.attention_norm(h), angles, visible, cache, layer)
            return h + self.mlp(self.mlp_norm(h))
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)  # (B, C, D) each
        a = self.attention(modulate(self.attention_norm(h), shift1, scale1), angles, visible, cache, layer)
        h = h + gate_by(a, gate1)
        return h + gate_by(self.mlp(modulate(self.mlp_norm(h), shift2, scale2)), gate2)

    def attention(self, h: Tensor, angles: Tensor, visible: Tensor | None, cache: KVCache | None, layer: int) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, d) each
        q, k = rotate(q, angles), rotate(k, angles)
        if cache is not None:
            k, v = cache.update(layer, k, v)
        return self.attention_out(attend(q, k, v, visible).transpose(1, 2).flatten(2))

    def mlp(self, h: Tensor) -> Tensor:
        return self.mlp_out(F.gelu(self.mlp_in(h), approximate="tanh"))


class Trunk(nn.Module):
    """Token embedding, learned absolute positions, DiT blocks with rotary positions, final norm.

    Absolute positions are not optional: with rotary ones alone an all-[MASK] block gives every position the same output.
    """

    def __init__(self, config: ModelConfig, layers: int, conditioned: bool):
        super().__init__()
        head_dim = config.width // config.heads
        self.token = nn.Embedding(config.vocab_size + 1, config.width)  # the last row is [MASK]
        self.position = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads, config.mlp_ratio, conditioned) for _ in range(layers))
        self.norm = nn.LayerNorm(config.width)
        frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.arange(config.length).unsqueeze(1) * frequencies
        self.register_buffer("angles", angles, persistent=False)  # (L, d/2)
        self.angles: Tensor

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        *,
        added: Tensor | None = None,
        condition: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """tokens (B, T), positions (T,) -> (B, T, D). `added` (B, T, D) joins the embedding; condition is (B, C, D)."""
        h = self.embedding(tokens, positions)
        if added is not None:
            h = h + added
        for layer, block in enumerate(self.blocks):
            h = block(h, self.angles[positions], visible, condition, cache, layer)
        return self.norm(h)

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.token(tokens) + self.position(positions)


class LatentPathway(nn.Module):
    """How z enters the decoder: added to the embedding with a learned scale, and fed to every adaptive norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed = nn.Sequential(
            nn.Linear(config.latent.dim, config.width), nn.SiLU(), nn.Linear(config.width, config.width)
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.final_modulation = nn.Linear(config.width, 2 * config.width, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        """z (B, C, dim) -> condition (B, C, D)."""
        return self.embed(z)


class Decoder(nn.Module):
    """p(x0 | xt^b, x0^{<b}, z^b). With `latent.on_clean`, z^{<b} reaches block b too, through the clean stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config, config.layers, conditioned=config.has_latent)
        self.head = nn.Linear(config.width, config.vocab_size)
        self.pathway = LatentPathway(config) if config.has_latent else None
        if config.blocks > 1:
            visible = visibility(config.length, config.block_size, own_clean_block=False)
            self.register_buffer("visible", visible, persistent=False)

    def forward(self, xt: Tensor, x0: Tensor, z: Tensor | None) -> Tensor:
        """Logits (B, L, V) of every noisy position, from one pass over the doubled sequence [xt ; x0].

        With one block there is no clean prefix: the pass runs on xt alone.
        """
        length, blocks = self.config.length, self.config.blocks
        positions = torch.arange(length, device=xt.device)
        condition = None if z is None else self.condition(z)
        if blocks == 1:
            return self._run(xt, positions, None, condition, None)
        if condition is not None:
            clean = condition if self.config.latent.on_clean else torch.zeros_like(condition)
            condition = torch.cat([condition, clean], dim=1)
        doubled = torch.cat([xt, x0], dim=1)
        return self._run(doubled, positions.repeat(2), self.get_buffer("visible"), condition, None, keep=length)

    def forward_block(self, tokens: Tensor, block: int, z: Tensor | None, cache: KVCache, *, clean: bool) -> Tensor:
        """The same for the tokens (B, r) of one block behind the cached clean prefix; z is that block's (B, dim)."""
        r = self.config.block_size
        positions = torch.arange(block * r, (block + 1) * r, device=tokens.device)
        seen = None if clean and not self.config.latent.on_clean else z
        condition = None if seen is None else self.condition(seen.unsqueeze(1))
        return self._run(tokens, positions, None, condition, cache)

    def condition(self, z: Tensor) -> Tensor:
        assert self.pathway is not None
        return self.pathway(z)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        condition: Tensor | None,
        cache: KVCache | None,
        keep: int | None = None,
    ) -> Tensor:
        if condition is None or self.pathway is None:
            return self.head(self.trunk(tokens, positions, visible, cache=cache)[:, :keep])
        per_token = condition.repeat_interleave(tokens.shape[1] // condition.shape[1], dim=1)
        h = self.trunk(
            tokens,
            positions,
            visible,
            added=self.pathway.scale * per_token,
            condition=F.silu(condition),
            cache=cache,
        )
        shift, scale = self.pathway.final_modulation(F.silu(condition)).chunk(2, dim=-1)
        return self.head(modulate(h, shift, scale)[:, :keep])


class MeanPool(nn.Module):
    """(B, L, D) -> (B, blocks, D): the mean over each block's positions."""

    def forward(self, h: Tensor, blocks: int) -> Tensor:
        return h.unflatten(1, (blocks, -1)).mean(2)


class Encoder(nn.Module):
    """q(z^b | xt^b, x0^{<=b}), on the paper's doubled stream [xt ; x0] or on a single stream of (x0, mask bit).

    With `encoder_sees_mask=False` it is q(z^b | x0^{<=b}), the posterior of the all-masked block whatever xt is, so that z
    means the same at every step: what a z drawn once per block needs.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config, config.latent.encoder_layers, conditioned=False)
        self.pool = MeanPool()
        self.head = nn.Linear(config.width, 2 * config.latent.dim)
        length, r = config.length, config.block_size
        if config.latent.encoder_stream == "doubled":
            self.register_buffer("visible", visibility(length, r, own_clean_block=True), persistent=False)
        elif config.blocks > 1:
            self.register_buffer("block_causal", block_causal(length, r), persistent=False)
            self.register_buffer("earlier_clean", visibility(length, r, own_clean_block=False), persistent=False)
        if config.latent.encoder_stream == "single" and config.latent.encoder_sees_mask:
            self.mask_bit = nn.Embedding(2, config.width)

    def forward(self, x0: Tensor, mask: Tensor) -> Gaussian:
        stream = self.doubled_stream if self.config.latent.encoder_stream == "doubled" else self.single_stream
        mean, log_std = self.head(self.pool(stream(x0, mask), self.config.blocks)).chunk(2, dim=-1)
        return Gaussian(mean, log_std)

    def doubled_stream(self, x0: Tensor, mask: Tensor) -> Tensor:
        """[xt ; x0], where the noisy block b sees itself and the clean blocks <= b."""
        if not self.config.latent.encoder_sees_mask:
            mask = torch.ones_like(mask)
        positions = torch.arange(x0.shape[1], device=x0.device)
        xt = apply_mask(x0, mask, self.config.vocab_size)
        return self.trunk(torch.cat([xt, x0], dim=1), positions.repeat(2), self.get_buffer("visible"))[:, : x0.shape[1]]

    def single_stream(self, x0: Tensor, mask: Tensor) -> Tensor:
        """x0 alone, block-causal; the mask bits join it.

        With several blocks they join before the last layer only, and there a block sees the earlier ones without their
        bits: z^b must not depend on the masks of other blocks.
        """
        positions = torch.arange(x0.shape[1], device=x0.device)
        visible = None if self.config.blocks == 1 else self.get_buffer("block_causal")
        if not self.config.latent.encoder_sees_mask:
            return self.trunk(x0, positions, visible)
        bits = self.mask_bit(mask.long())
        if self.config.blocks == 1:
            return self.trunk(x0, positions, None, added=bits)
        h, angles = self.trunk.embedding(x0, positions), self.trunk.angles
        *layers, last = self.trunk.blocks
        for block in layers:
            h = block(h, angles, visible, None, None, 0)
        doubled = torch.cat([h + bits, h], dim=1)
        h = last(doubled, angles.repeat(2, 1), self.get_buffer("earlier_clean"), None, None, 0)
        return self.trunk.norm(h[:, : x0.shape[1]])


@torch.no_grad()
def init_weights(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Every initial value of the networks.

    matrices and their biases: U(-1, 1) / sqrt(inputs), torch's default for linear layers (drawn from `generator`)
    residual outputs (attention_out, mlp_out): the same, divided by sqrt(2 * layers)
    modulations: as matrices, times 0.1: z moves the norms from the start, but gently
    embeddings of tokens, positions and mask bits: N(0, 1)
    layer norms: scale 1, shift 0; the learned scale of z in the embedding: 1
    """
    layers = max((len(m.blocks) for m in module.modules() if isinstance(m, Trunk)), default=1)
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            bound = child.in_features**-0.5
            if name.endswith(("attention_out", "mlp_out")):
                bound /= (2 * layers) ** 0.5
            if name.endswith("modulation"):
                bound *= 0.1
            child.weight.uniform_(-bound, bound, generator=generator)
            if child.bias is not None:
                child.bias.uniform_(-bound, bound, generator=generator)
        elif isinstance(child, nn.Embedding):
            child.weight.normal_(generator=generator)
