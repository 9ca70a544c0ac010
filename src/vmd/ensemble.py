"""Many models of one shape trained in one batched step: the seeds of a table's row, or its data sets, together.

Small models leave a GPU idle; M of them side by side fill it. Model m sees its own data, noise and KL weight, and its
gradients are its own, so training it here is training it alone, except that mask counts are stratified over all models.
"""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from vmd.config import require
from vmd.masking import Masks
from vmd.model import VMD
from vmd.objective import Loss


class Ensemble(nn.Module):
    def __init__(self, models: list[VMD]):
        super().__init__()
        alike = all(model.config == models[0].config for model in models)
        require(alike, "an ensemble of unlike models: expected one configuration")
        chunk = models[0].config.latent.code_chunk
        require(chunk == 0, f"model.latent.code_chunk={chunk}: expected 0 in an ensemble, which cannot recompute chunks")
        stacked, _ = stack_module_state(list(models))
        self.names = list(stacked)
        self.weights = nn.ParameterList(nn.Parameter(stacked[name].detach().clone()) for name in self.names)
        self._template = [copy.deepcopy(models[0])]  # in a list, so that its parameters are not registered as ours
        self.config = models[0].config

    def __len__(self) -> int:
        return self.weights[0].shape[0]

    def _apply(self, fn, recurse=True):
        self._template[0]._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def forward(
        self,
        x0: Tensor,
        masks: Masks,
        noise: Tensor | None,
        kl_weight: Tensor,
        free_bits: float = 0.0,
        focal: float = 0.0,
        score_entropy: bool = False,
        together: float = 0.0,
    ) -> Loss:
        """Everything as in `VMD.forward` with a leading dimension of models: x0 (M, B, L), kl_weight (M,)."""

        def one(weights: dict[str, Tensor], x0: Tensor, masks: Masks, noise: Tensor | None, kl_weight: Tensor) -> Loss:
            ways = (free_bits, focal, score_entropy, together)
            return functional_call(self._template[0], weights, (x0, masks, noise, kl_weight, *ways))

        weights = dict(zip(self.names, self.weights, strict=True))
        noise_dim = None if noise is None else 0
        return torch.vmap(one, in_dims=(0, 0, 0, noise_dim, 0))(weights, x0, masks, noise, kl_weight)

    @torch.no_grad()
    def member(self, index: int) -> tuple[VMD, dict[str, Tensor]]:
        """One model with the weights of now, good until the next call, and views of those weights to change them."""
        views = {name: w[index] for name, w in zip(self.names, self.weights, strict=True)}
        self._template[0].load_state_dict(views)
        return self._template[0], views

    @torch.no_grad()
    def models(self) -> list[VMD]:
        """The members as models of their own."""
        members = []
        for index in range(len(self)):
            member = copy.deepcopy(self._template[0])
            member.load_state_dict({name: w[index] for name, w in zip(self.names, self.weights, strict=True)})
            members.append(member)
        return members
