"""Adam as the paper has it, AdamW, and Muon for the matrices of the layers with AdamW for the rest."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vmd.config import TrainingConfig
from vmd.distributed import full, take_shard
from vmd.ensemble import Ensemble
from vmd.model import VMD

# Matrices of the layers: what Muon turns. qkv and modulation are several square matrices on top of each other.
TURNED = ("qkv.weight", "attention_out.weight", "mlp_in.weight", "mlp_out.weight", "modulation.weight")
STACKED = ("qkv.weight", "modulation.weight")


@torch.no_grad()
def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: every singular value of (n, a, b) is brought near 1.

    A quintic Newton-Schulz iteration with the coefficients of Jordan et al. (Muon, 2024): singular values end in about
    0.7 to 1.2, which is near enough and takes few steps. In bf16 on a GPU.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x.bfloat16() if x.is_cuda else x.float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, turned into orthogonal updates; matrices of one shape are turned in one batch.

    The update has the root mean square of Adam's (0.2 sqrt(longer side), Liu et al. 2025), so that one learning rate
    serves both.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, Tensor]], lr: float | Tensor, weight_decay: float, momentum: float = 0.95
    ):
        self.stacked = {id(p): name.endswith(STACKED) for name, p in parameters}
        super().__init__([p for _, p in parameters], {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            gradients, momenta = [p.grad for p in parameters], [self.state[p]["momentum"] for p in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            batches: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for p, nesterov in zip(parameters, torch._foreach_lerp(gradients, momenta, group["momentum"]), strict=True):
                nesterov = full(nesterov)
                size = nesterov.shape[-1] if self.stacked[id(p)] else nesterov.shape[-2]
                matrices = nesterov.unflatten(-2, (-1, size)).flatten(0, -3)  # (n, a, b)
                batches[matrices.shape[1:]].append((p, matrices))
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            for (a, b), entries in batches.items():
                turned = orthogonalize(torch.cat([matrices for _, matrices in entries])) * (0.2 * max(a, b) ** 0.5)
                parts = (turned * group["lr"]).split([len(matrices) for _, matrices in entries])
                changes = [take_shard(part.reshape(p.shape), p) for (p, _), part in zip(entries, parts, strict=True)]
                torch._foreach_sub_([p for p, _ in entries], changes)


class Optimizers:
    """Several optimisers, each with parameters of its own, as one."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.owner = {id(p): part for part in parts for group in part.param_groups for p in group["params"]}

    def state_of(self, p: Tensor) -> dict[str, Tensor]:
        return self.owner[id(p)].state[p]

    def set_state(self, p: Tensor, state: dict[str, Tensor]) -> None:
        self.owner[id(p)].state[p] = state

    def state_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """What a checkpoint must hold for this parameter."""
        if isinstance(self.owner[id(p)], Muon):
            return {"momentum": p.shape}
        return {"exp_avg": p.shape, "exp_avg_sq": p.shape, "step": torch.Size()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


def make_optimizer(model: VMD | Ensemble, config: TrainingConfig) -> Optimizers:
    """Adam decays nothing or everything as the paper's; AdamW and Muon decay matrices only."""
    names = model.names if isinstance(model, Ensemble) else [name for name, _ in model.named_parameters()]
    named = [(name, p) for name, p in zip(names, model.parameters(), strict=True) if p.requires_grad]
    device = named[0][1].device
    lr: float | Tensor = config.learning_rate
    options: dict[str, Any] = {"fused": device.type == "cuda"}
    if config.capture:  # a recorded step reads its learning rate from the device
        lr = torch.tensor(config.learning_rate, device=device)
        options["capturable"] = True
    if config.optimizer == "adam":
        return Optimizers(torch.optim.Adam([p for _, p in named], lr=lr, weight_decay=config.weight_decay, **options))
    leading = 1 if isinstance(model, Ensemble) else 0
    turned = [(name, p) for name, p in named if config.optimizer == "muon" and name.endswith(TURNED)]
    mine = {id(p) for _, p in turned}
    rest = [p for _, p in named if id(p) not in mine]
    groups = [
        {"params": [p for p in rest if p.dim() - leading >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() - leading < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=lr, **options)
    return Optimizers(adam, Muon(turned, lr, config.weight_decay)) if turned else Optimizers(adam)
