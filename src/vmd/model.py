"""The model: configuration and networks, the calls that objective and sampler need, and its files."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from vmd.attention import KVCache
from vmd.config import ModelConfig, from_dict, require, to_dict
from vmd.data import Dataset
from vmd.files import make_folder, read_json, read_tensors, write_atomically, write_tensors
from vmd.latent import Gaussian, standard_normal
from vmd.masking import Masks
from vmd.network import Decoder, Encoder, init_weights
from vmd.objective import Loss, objective
from vmd.sampling import Samples, sample

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


class VMD(nn.Module):
    """Variational masked diffusion. Without a latent it is MDM (one block) or BD3-LM (several)."""

    def __init__(self, config: ModelConfig, *, seed: int = 0):
        super().__init__()
        require(config.vocab_size > 0, f"model.vocab_size={config.vocab_size}: expected at least 1")
        require(config.length > 0, f"model.length={config.length}: expected at least 1")
        config = config.resolved(config.length, config.vocab_size)
        self.config = config
        self.decoder = Decoder(config)
        self.encoder = Encoder(config) if config.has_latent else None
        init_weights(self, torch.Generator().manual_seed(seed))

    @classmethod
    def for_data(cls, config: ModelConfig, data: Dataset, *, seed: int = 0) -> "VMD":
        """A model whose length, vocabulary and symbols are those of the data."""
        return cls(config.resolved(data.length, data.vocab_size, data.symbols), seed=seed)

    @property
    def mask_id(self) -> int:
        """[MASK] follows the vocabulary; it is an input only, never predicted."""
        return self.config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.decoder.head.weight.device

    def encode(self, x0: Tensor, mask: Tensor) -> Gaussian:
        """q(z^b | x0^{<=b}, xt^b) for every block."""
        assert self.encoder is not None, "a model without latent has no encoder"
        return self.encoder(x0, mask)

    def denoise(self, xt: Tensor, x0: Tensor, z: Tensor | None = None) -> Tensor:
        """Logits (B, L, V) of p(x0^b | xt^b, x0^{<b}, z) for all blocks at once."""
        return self.decoder(xt, x0, z)

    def forward(
        self, x0: Tensor, masks: Masks, noise: Tensor | None, kl_weight: float | Tensor = 1.0, free_bits: float = 0.0
    ) -> Loss:
        """Algorithms 1 and 3, line "compute the loss": a pure function of its arguments and the weights."""
        encode = None if self.encoder is None else self.encode
        return objective(
            self.denoise, encode, x0, masks, self.mask_id, noise=noise, kl_weight=kl_weight, free_bits=free_bits
        )

    def latent_shape(self, batch: int) -> tuple[int, int, int] | None:
        """(B, blocks, dim) of the latents of a batch; None for a model without."""
        return (batch, self.config.blocks, self.config.latent.dim) if self.config.has_latent else None

    def prior(self, like: Tensor) -> Gaussian:
        return standard_normal(like)

    def predictor(self, batch: int, *, cached: bool = True) -> "Predictor":
        """What the sampler calls, for a batch of that many rows."""
        return CachedPredictor(self, batch) if cached and self.config.blocks > 1 else Predictor(self)

    def sample(self, n: int | None = None, *, prompt: Tensor | None = None, batch_size: int = 8192, **options) -> Samples:
        """Draw n sequences, or complete a prompt (n, L) whose gaps are -1. Options: see `vmd.sampling.sample`."""
        if prompt is None:
            require(n is not None and n >= 1, f"n={n}: expected at least 1 sample")
            prompt = torch.full((n or 0, self.config.length), -1)
        require(n is None or n == len(prompt), f"n={n}: expected {len(prompt)}, the rows of the prompt")
        require(len(prompt) >= 1, "an empty prompt: expected at least one row")
        seeds = options.pop("seeds", None)
        if seeds is not None:
            require(len(seeds) == len(prompt), f"{len(seeds)} seeds: expected one for each of {len(prompt)} rows")
        parts = []
        was_training = self.training
        self.eval()
        try:
            for start in range(0, len(prompt), batch_size):
                rows = prompt[start : start + batch_size].to(self.device)
                row_seeds = None if seeds is None else seeds[start : start + batch_size]
                parts.append(sample(self, rows, seeds=row_seeds, **options))
        finally:
            self.train(was_training)
        return Samples.concatenate(parts)

    def parameter_counts(self) -> dict[str, int]:
        """Parameters of the decoder's backbone (equal with and without z), of the latent pathway and of the encoder."""
        counts = {"backbone": 0, "pathway": 0, "encoder": 0}
        for name, parameter in self.named_parameters():
            part = "pathway" if "pathway." in name or ".modulation." in name else "backbone"
            counts["encoder" if name.startswith("encoder.") else part] += parameter.numel()
        return counts

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write `config.json` and `model.safetensors`, each whole or not at all."""
        folder = Path(folder)
        make_folder(folder)
        write_tensors(folder / WEIGHTS_FILE, self.state_dict())
        write_atomically(folder / CONFIG_FILE, json.dumps({"format": "vmd", "model": to_dict(self.config)}, indent=2))
        return folder

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str | torch.device = "cpu") -> "VMD":
        folder = Path(folder)
        require(folder.is_dir(), f"{folder}: expected a model folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
        described = read_json(folder / CONFIG_FILE)
        require(
            isinstance(described, dict) and described.get("format") == "vmd",
            f'{folder / CONFIG_FILE}: not a vmd model: expected "format": "vmd"',
        )
        model = cls(from_dict(ModelConfig, described.get("model"), f"{folder / CONFIG_FILE}: model"))
        load_weights(model, read_tensors(folder / WEIGHTS_FILE), folder / WEIGHTS_FILE)
        return model.to(device)


class Predictor:
    """Answers the sampler by the training pass: the doubled sequence of the canvas so far, computed anew each time."""

    def __init__(self, model: VMD):
        self.model = model

    def predict(self, canvas: Tensor, block: int, z: Tensor | None) -> Tensor:
        """Logits (B, r, V) of block b, given the canvas (B, L) with [MASK] for what is unknown and z^{<=b} (B, C, dim)."""
        r = self.model.config.block_size
        return self.model.denoise(canvas, canvas, z)[:, block * r : (block + 1) * r]

    def commit(self, canvas: Tensor, block: int, z: Tensor | None) -> int:
        """Block b is finished. Returns the number of network passes that took."""
        return 0


class CachedPredictor(Predictor):
    """The same answers from the keys and values of the finished blocks: each pass costs one block."""

    def __init__(self, model: VMD, batch: int):
        super().__init__(model)
        c = model.config
        dtype = model.decoder.head.weight.dtype
        self.cache = KVCache(c.layers, batch, c.heads, c.length, c.width // c.heads, device=model.device, dtype=dtype)

    def predict(self, canvas: Tensor, block: int, z: Tensor | None) -> Tensor:
        return self._pass(canvas, block, z, clean=False)

    def commit(self, canvas: Tensor, block: int, z: Tensor | None) -> int:
        if block + 1 == self.model.config.blocks:
            return 0  # nothing reads the last block's keys
        self._pass(canvas, block, z, clean=True)
        self.cache.advance(self.model.config.block_size)
        return 1

    def _pass(self, canvas: Tensor, block: int, z: Tensor | None, *, clean: bool) -> Tensor:
        r = self.model.config.block_size
        tokens = canvas[:, block * r : (block + 1) * r]
        z_block = None if z is None else z[:, block]
        return self.model.decoder.forward_block(tokens, block, z_block, self.cache, clean=clean)


def load_weights(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Copy the tensors into the model, all or none; names and shapes must be the model's own."""
    expected = model.state_dict()
    missing, foreign = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    require(not missing, f"{source}: {len(missing)} tensors missing, first {missing[:1]}: not weights of this model")
    require(not foreign, f"{source}: {len(foreign)} unknown tensors, first {foreign[:1]}: not weights of this model")
    for name, tensor in tensors.items():
        want = tuple(expected[name].shape)
        require(tuple(tensor.shape) == want, f"{source}: {name} has shape {tuple(tensor.shape)}: expected {want}")
    model.load_state_dict(tensors)
