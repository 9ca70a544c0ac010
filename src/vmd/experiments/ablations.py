"""`vmd reproduce ablations`: which latent, trained by which objective, is worth what at which number of steps.
`vmd reproduce heads`: how codes should enter the decoder, and how many there should be.
"""

from typing import Any

import torch

from vmd.config import DataConfig, ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig, override_all
from vmd.data.synthetic import Law, law
from vmd.likelihood import law_bits, nll_bound
from vmd.masking import draw_masks
from vmd.metrics import accuracy, empirical, kl_to, one_step_probabilities
from vmd.model import VMD

SYSTEMS = {
    "no z": ("model.latent.kind=none",),
    "Gaussian": (),
    "Gaussian, learned prior": ("model.latent.prior=learned",),
    "Gaussian, importance-weighted": ("objective.samples=32", "training.batch_size=128"),
    "categorical": ("model.latent.kind=categorical",),
}
HEADS = {
    f"{name}, K = {codes}": ("model.latent.kind=categorical", f"model.latent.codes={codes}", *settings)
    for name, settings in {
        "bilinear, rank 64": ("training.split_codes_every=0",),
        "bilinear, rank 16": ("training.split_codes_every=0", "model.latent.head_dim=16"),
        "bilinear, rank 4": ("training.split_codes_every=0", "model.latent.head_dim=4"),
        "additive": ("training.split_codes_every=0", "model.latent.head=additive"),
        "bilinear and last layer": ("training.split_codes_every=0", "model.latent.code_layers=1"),
        "bilinear, rank 64, splitting": (),  # of codes hardly missed; the others show what each head does by itself
    }.items()
    for codes in ((16, 64) if "last layer" in name else (16, 64, 256))  # a layer for each of 256 codes takes ten minutes
}
SURROGATE = "surrogate"  # Eq. 5, masks by counts; without z it is Eq. 2, a bound at N = r
BOUND_1, BOUND_N, BOUND_ONCE = "1-step bound", "N-step bound, z fresh", "N-step bound, z once"
IWAE = 64  # samples of z in the certified bound of a Gaussian


def step_counts(block_size: int) -> tuple[int, ...]:
    """The numbers of steps per block that are trained for, and evaluated: 1, 2 and r."""
    return tuple(sorted({1, 2, block_size}))


def ablation_runs(table: str, data: tuple[str, ...]) -> list[tuple[str, str, RunConfig]]:
    """(system, training objective, run) for every data set; all at KL weight 1, the bound's own."""
    runs = []
    for system, settings in (HEADS if table == "heads" else SYSTEMS).items():
        objectives = [SURROGATE, BOUND_1, BOUND_N] + ([] if system == "no z" else [BOUND_ONCE])
        for objective in [BOUND_1] if table == "heads" else objectives:
            for name in data:
                length = law(name).length
                run = RunConfig(
                    model=ModelConfig(block_size=length),
                    objective=ObjectiveConfig(),
                    training=TrainingConfig(steps=2_000, batch_size=512, learning_rate=2e-3, ema=0.998),
                    data=DataConfig(name=name),
                )
                chosen = [f"model.latent.codes={128 * length}", *settings]
                if objective != SURROGATE:
                    z = "once" if objective == BOUND_ONCE else "fresh"
                    steps = (1,) if objective == BOUND_1 else step_counts(length)
                    chosen += ["objective.masking=steps", f"objective.steps={','.join(map(str, steps))}", f"objective.z={z}"]
                runs.append((system, objective, override_all(run, chosen)))
    return runs


def evaluate_ablation(
    system: str, objective: str, run: RunConfig, seed: int, model: VMD, draws: int, z_draws: int
) -> list[dict]:
    """Rows of one trained model: certified bits, samples (rule sample, random order), exact one-step KL, the surrogate."""
    truth, r = law(run.data.name), model.config.block_size
    generator = torch.Generator(model.device).manual_seed(20_000 + seed)
    rows: list[dict] = []
    base = {"objective": objective, "data": truth.name, "block": r}

    def add(metric: str, value: float, error: float | None = None, **setting) -> None:
        """`error`: of the estimate for this one model."""
        row = {"system": system, "setting": base | setting, "metric": metric, "value": value}
        rows.append(row if error is None else row | {"error": error})

    samples = IWAE if model.config.latent.kind == "gaussian" else 1
    per_sequence = max(2, draws // (25 * len(truth.sequences)))
    for steps in (1,) if system in HEADS else step_counts(r):
        for z in ["once"] if steps == 1 or not model.config.has_latent else ["once", "fresh"]:
            where: dict[str, Any] = {"steps": steps, "nfe": steps * model.config.blocks, "order": "random", "z": z}
            for s in sorted({1, samples}):
                bits = law_bits(
                    model,
                    truth,
                    lambda x0, n=steps, z=z, s=s: nll_bound(  # type: ignore[misc]
                        model, x0, n, z=z, samples=s, generator=generator, chunk=65_536 if x0.is_cuda else 8_192
                    ),
                    per_sequence,
                )
                add("bits", bits.value, bits.stderr, **where, iwae=s, n=per_sequence * len(truth.sequences))
            drawn = model.sample(draws, steps=steps, order="random", z=z, generator=generator, batch_size=50_000)
            where |= {"rule": "sample", "n": draws}
            if truth.constrains:
                add("accuracy", accuracy(drawn.tokens, truth), **where)
            add("kl", kl_to(truth, empirical(drawn.tokens, truth)), **where)
            if steps == 1:
                exact = one_step_probabilities(model, truth.sequences, z_draws, generator=generator)
                where |= {"n": z_draws if samples > 1 else 1}
                add("kl_exact", kl_to(truth, exact), **where)
                if truth.constrains:
                    add("accuracy_exact", 100 * float(exact.sum()), **where)
    if objective == SURROGATE and run.objective.samples == 1:  # which has no importance samples
        add("surrogate", surrogate_bits(model, truth, generator, draws), steps=0, nfe=0, z="none")
    return rows


@torch.no_grad()
def surrogate_bits(model: VMD, truth: Law, generator: torch.Generator, draws: int) -> float:
    """The paper's objective at KL weight 1, in bits per token. Not a bound, except without z."""

    def score(x0: torch.Tensor) -> torch.Tensor:
        totals = []
        for some in x0.split(2_048):
            masks = draw_masks(some, model.config.block_size, generator=generator)
            shape = model.latent_shape(len(some))
            noise = None if shape is None else torch.randn(shape, generator=generator, device=x0.device)
            totals.append(model(some, masks, noise).total)
        return torch.cat(totals)

    return law_bits(model, truth, score, max(1, draws // len(truth.sequences))).value
