"""Scores of one model: its objective on data, and its samples where the law of the data is known."""

import math

import torch
from torch import Tensor

from vmd.config import require
from vmd.data import ArrayData, Law
from vmd.data.arrays import parse_positions
from vmd.masking import draw_masks
from vmd.metrics import accuracy, empirical, kl_to, one_step_probabilities
from vmd.model import VMD
from vmd.sampling import RULES, check_settings


@torch.no_grad()
def evaluate_model(
    model: VMD,
    data: Law | ArrayData,
    steps: list[int],
    *,
    order: str = "prob",
    z: str = "once",
    n: int = 20_000,
    seed: int = 0,
    fixed: str = "",
) -> list[dict]:
    """Rows of {metric, value, stderr, about}. A bound is called a bound, a surrogate a surrogate."""
    config = model.config
    require(data.length == config.length, f"data of length {data.length}: expected {config.length}, the model's")
    require(
        data.vocab_size <= config.vocab_size,
        f"token id {data.vocab_size - 1} in the data: expected 0 to {config.vocab_size - 1}, the model's vocabulary",
    )
    for count in steps:
        check_settings(config, count, order, "sample", z, 1.0, 1.0)
    given = parse_positions(fixed, config.length)
    rows = objective_rows(model, data, n, seed, given)
    if not isinstance(data, Law):
        return rows
    generator = torch.Generator(model.device)
    for count in steps:
        for rule in RULES:
            generator.manual_seed(seed)
            prompt = torch.full((n, config.length), -1)
            if given is not None:  # what is given is true
                prompt = torch.where(given, data.draw(n, generator=torch.Generator().manual_seed(seed)), prompt)
            drawn = model.sample(prompt=prompt, steps=count, order=order, rule=rule, z=z, generator=generator)
            about = f"rule {rule}, order {order}, {count} steps per block, NFE {drawn.nfe}, n {n}"
            about += f", z {z}" if config.has_latent else ""
            if data.constrains:
                rows.append(row("accuracy, %", accuracy(drawn.tokens, data), None, about))
            rows.append(row("KL(data || samples), nats", kl_to(data, empirical(drawn.tokens, data)), None, about))
        if count == 1 and given is None:
            exact = kl_to(data, one_step_probabilities(model, data.sequences, n, generator=generator))
            about = f"rule sample, 1 step per block, {n} latents" if config.has_latent else "rule sample, 1 step per block"
            rows.append(row("KL(data || model), nats, by integration over z", exact, None, about))
    return rows


def objective_rows(model: VMD, data: Law | ArrayData, n: int, seed: int, fixed: Tensor | None) -> list[dict]:
    """The objective in bits per maskable token, on n random rows with fresh masks."""
    config, device = model.config, model.device
    generator = torch.Generator(device).manual_seed(seed)
    if isinstance(data, Law):
        x0 = data.draw(n, generator=generator, device=device)
    else:
        chosen = torch.randperm(len(data.tokens), generator=torch.Generator().manual_seed(seed))[:n]
        x0 = torch.from_numpy(data.tokens[chosen.sort().values.numpy()].astype("int64")).to(device)
    fixed = None if fixed is None else fixed.to(device)
    maskable = config.length - (0 if fixed is None else int(fixed.sum()))
    parts: dict[str, list[Tensor]] = {"total": [], "reconstruction": [], "kl": []}
    for chunk in x0.split(8_192):
        masks = draw_masks(chunk, config.block_size, fixed=fixed, generator=generator)
        shape = model.latent_shape(len(chunk))
        noise = None if shape is None else torch.randn(shape, generator=generator, device=device)
        for name, value in model(chunk, masks, noise)._asdict().items():
            parts[name].append(value / (maskable * math.log(2)))
    about = f"{len(x0)} rows, mask counts, KL weight 1"
    name = "surrogate (not a bound), bits per token" if config.has_latent else "bound at N = block size, bits per token"
    labels = {"total": name}
    if config.has_latent:
        labels |= {"reconstruction": "  its reconstruction", "kl": "  its KL"}
    rows = []
    for part, label in labels.items():
        values = torch.cat(parts[part]).double()
        stderr = float(values.std() / len(values) ** 0.5) if len(values) > 1 else None
        rows.append(row(label, float(values.mean()), stderr, about))
    return rows


def row(metric: str, value: float, stderr: float | None, about: str) -> dict:
    return {"metric": metric, "value": value, "stderr": stderr, "about": about}
