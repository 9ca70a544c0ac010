"""Presets: one for each row of the controlled experiments, as the paper has it and as we do it. Imports no torch.

Names: DATA[-block R][-mdm][-paper], such as `deterministic`, `d1-block2`, `d2-block4-mdm-paper`.
"""

import difflib
import os
from dataclasses import replace

from vmd.config import (
    DataConfig,
    InvalidInput,
    LatentConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    TrainingConfig,
    override_all,
)

DEPENDENCE = (0.3, 0.5, 0.7, 0.8, 1.0)
TWO_TOKEN = ("deterministic", "non-uniform", *(f"dependence-{p:g}" for p in DEPENDENCE))
FOUR_TOKEN = ("d1", "d2")
FAMILIES = ("ours", "paper")

# Nats summed over dimensions; chosen on validation seeds (docs/reproduce.md).
OUR_KL_WEIGHT = {
    ("deterministic", 2): 0.4,
    ("non-uniform", 2): 0.4,
    ("dependence-0.3", 2): 0.3,
    ("dependence-0.5", 2): 0.3,
    ("dependence-0.7", 2): 0.3,
    ("dependence-0.8", 2): 0.3,
    ("dependence-1", 2): 0.4,
    ("d1", 2): 0.4,
    ("d2", 2): 0.4,
    ("d1", 4): 0.3,
    ("d2", 4): 0.15,
}


def paper_kl_weight(data: str, block_size: int, dim: int = 32) -> float:
    """The printed weight, 4 for uniform data and 1 otherwise, on the scale that reproduces the paper.

    A reconstruction averaged over tokens and a KL averaged over dimensions, brought to nats per block: times r / dim.
    """
    printed = 4.0 if data in ("deterministic", "d1", "d2") else 1.0
    return printed * block_size / dim


def synthetic(data: str, block_size: int, *, latent: bool = True, family: str = "ours") -> RunConfig:
    """A row of the two-token or four-token tables."""
    if family == "paper":
        return RunConfig(
            model=ModelConfig(
                block_size=block_size,
                layers=8,
                width=64,
                latent=LatentConfig(
                    kind="gaussian" if latent else "none", dim=32, encoder_layers=2, encoder_stream="doubled", on_clean=True
                ),
            ),
            objective=ObjectiveConfig(kl_weight=paper_kl_weight(data, block_size)),
            training=TrainingConfig(
                steps=2_000, batch_size=10_000, optimizer="adam", learning_rate=1e-3, schedule="constant", clip=0.0
            ),
            data=DataConfig(name=data),
        )
    return RunConfig(
        model=ModelConfig(
            block_size=block_size,
            layers=2,
            width=64,
            latent=LatentConfig(kind="gaussian" if latent else "none", dim=32, encoder_layers=2, encoder_sees_mask=False),
        ),
        objective=ObjectiveConfig(kl_weight=OUR_KL_WEIGHT[data, block_size]),
        training=TrainingConfig(steps=4_000, batch_size=1_024, learning_rate=2e-3, schedule="cosine", ema=0.998),
        data=DataConfig(name=data),
    )


def poker(kind: str = "categorical") -> RunConfig:
    """The quickstart: two-word poker hands, in seconds on one core."""
    run = RunConfig(
        model=ModelConfig(layers=1, latent=LatentConfig(encoder_layers=1)),
        training=TrainingConfig(steps=400, batch_size=128, learning_rate=4e-3),
        data=DataConfig(name="poker"),
    )
    return with_latent(run, kind)


def array(kind: str = "categorical") -> RunConfig:
    """Your own fixed-length token array: give it with --data FILE.npy."""
    run = RunConfig(
        model=ModelConfig(layers=3, width=128, latent=LatentConfig(encoder_layers=2)),
        training=TrainingConfig(
            steps=3_000,
            batch_size=128,
            optimizer="adamw",
            learning_rate=1e-3,
            weight_decay=0.01,
            warmup_steps=100,
            ema=0.999,
        ),
    )
    return with_latent(run, kind)


def text(kind: str = "categorical") -> RunConfig:
    """Text in blocks of four tokens: 8 layers of width 256, half as many for an encoder (the paper's sizes)."""
    run = RunConfig(
        model=ModelConfig(
            length=256,
            block_size=4,
            layers=8,
            width=256,
            heads=8,
            latent=LatentConfig(dim=128, encoder_layers=4, codes=512, by_place=kind == "categorical"),
        ),
        training=TrainingConfig(
            steps=10_000,
            batch_size=512,
            optimizer="muon",
            learning_rate=8e-3,
            weight_decay=0.01,
            warmup_steps=200,
            ema=0.999,
        ),
    )
    run = with_latent(run, kind)
    return replace(run, objective=replace(run.objective, together=0.9)) if kind == "categorical" else run


def text_small(kind: str = "categorical") -> RunConfig:
    """Text of your own on a laptop: minutes on two CPU cores."""
    run = text(kind)
    latent = replace(run.model.latent, dim=32, encoder_layers=2, codes=64)
    model = replace(run.model, length=128, layers=4, width=128, heads=4, latent=latent)
    training = replace(run.training, steps=1_200, batch_size=16, warmup_steps=100, ema=0.995, checkpoint_every=100)
    return replace(run, model=model, training=training)


def text_paper(kind: str = "gaussian") -> RunConfig:
    """The paper's latent and training: z of earlier blocks seen through the clean stream, AdamW with a long warm-up."""
    run = text(kind)
    latent = replace(run.model.latent, encoder_stream="doubled", on_clean=True)
    training = replace(run.training, optimizer="adamw", learning_rate=3e-4, schedule="constant", warmup_steps=2_500)
    objective = replace(run.objective, kl_weight=1.0)
    return replace(run, model=replace(run.model, latent=latent), objective=objective, training=training)


def text_draft(*, small: bool = False) -> RunConfig:
    """Text whose blocks are written in one evaluation, their tokens in turn by a small head; fit for more steps too."""
    run = text_small("none") if small else text("none")
    return replace(run, model=replace(run.model, draft=2 * run.model.width), objective=ObjectiveConfig(together=0.5))


def sudoku(kind: str = "categorical") -> RunConfig:
    """Sudoku: 81 cells, clues in place, a row, a column and a box for each; give puzzles by --data (`vmd data sudoku`)."""
    run = RunConfig(
        model=ModelConfig(layers=16, width=160, heads=5, board=True, latent=LatentConfig(dim=128, encoder_layers=4)),
        training=TrainingConfig(
            steps=12_000,
            batch_size=1_024,
            optimizer="muon",
            learning_rate=4e-3,
            weight_decay=0.01,
            warmup_steps=200,
            ema=0.999,
        ),
        data=DataConfig(puzzles=True),
    )
    return with_latent(run, kind)


def sudoku_paper(kind: str = "gaussian", encoder_layers: int = 4) -> RunConfig:
    """The paper's Sudoku network and training: puzzle, [SEP], solution, [EOS]; one adaptive norm, gated pooling.

    Its control has kind none; with no encoder layers z is there but carries nothing.
    """
    latent = LatentConfig(kind=kind, dim=128, encoder_layers=encoder_layers, pool="gated", shared_modulation=True)  # type: ignore[arg-type]
    return RunConfig(
        model=ModelConfig(layers=6, width=256, heads=8, prompt=82, latent=latent),
        objective=ObjectiveConfig(kl_weight=82 / 128),  # 1 on the scale of `paper_kl_weight`
        training=TrainingConfig(steps=20_000, batch_size=1_024, optimizer="adam", learning_rate=1e-3),
        data=DataConfig(puzzles=True, layout="pair", augment=False),
    )


def sudoku_gpt2() -> RunConfig:
    """The baseline of Ye et al. 2025 and Kim et al. 2025: GPT-2 of 3 layers, full attention, their weights."""
    return RunConfig(
        model=ModelConfig(
            layers=3, width=384, heads=12, rotary=False, shifted=True, prompt=82, latent=LatentConfig(kind="none")
        ),
        objective=ObjectiveConfig(masking="linear", focal=1.0),
        training=TrainingConfig(steps=20_000, batch_size=1_024, optimizer="adamw", learning_rate=1e-3),
        data=DataConfig(puzzles=True, layout="pair", augment=False),
    )


def with_latent(run: RunConfig, kind: str) -> RunConfig:
    """A Gaussian's information costs half of its bound's price here: it collapses less."""
    latent = replace(run.model.latent, kind=kind)  # type: ignore[arg-type]
    objective = replace(run.objective, kl_weight=0.5 if kind == "gaussian" else 1.0)
    return replace(run, model=replace(run.model, latent=latent), objective=objective)


def all_presets() -> dict[str, RunConfig]:
    presets: dict[str, RunConfig] = {}
    for name, make in (
        ("array", array),
        ("poker", poker),
        ("text", text),
        ("text-small", text_small),
        ("sudoku", sudoku),
    ):
        presets |= {name: make(), f"{name}-gaussian": make("gaussian"), f"{name}-mdm": make("none")}
    presets |= {
        "text-draft": text_draft(),
        "text-small-draft": text_draft(small=True),
        "text-paper": text_paper(),
        "text-mdm-paper": text_paper("none"),
        "sudoku-paper": sudoku_paper(),
        "sudoku-mdm-paper": sudoku_paper("none"),
        "sudoku-noise-paper": sudoku_paper(encoder_layers=0),
        "sudoku-gpt2": sudoku_gpt2(),
    }
    for family in FAMILIES:
        for latent in (True, False):
            suffix = ("" if latent else "-mdm") + ("" if family == "ours" else "-paper")
            for data in TWO_TOKEN:
                presets[data + suffix] = synthetic(data, 2, latent=latent, family=family)
            for data in FOUR_TOKEN:
                for block_size in (2, 4):
                    presets[f"{data}-block{block_size}{suffix}"] = synthetic(data, block_size, latent=latent, family=family)
    return presets


def controlled() -> list[str]:
    """Those of data sets whose law is known and whose tables `vmd reproduce` makes; one of each is enough to look at."""
    laws = tuple(f"{data}-" for data in (*TWO_TOKEN, *FOUR_TOKEN))
    return [name for name in all_presets() if f"{name}-".startswith(laws)]


def preset(name: str, *settings: str) -> RunConfig:
    """A preset (`vmd presets` lists them), with fields of your own: `vmd.preset("text-small", "training.steps=300")`.

    `run.model` is for `vmd.VMD.for_data(run.model, data)`, the whole for `vmd.train(model, data, run)`.
    """
    presets = all_presets()
    if not isinstance(name, str) or name not in presets:
        like = difflib.get_close_matches(str(name), presets, 6, 0.4) or list(presets)[:5]
        path = f"; a path goes with --data {name}" if isinstance(name, str) and os.path.exists(name) else ""
        raise InvalidInput(f"unknown preset {name!r}: `vmd presets` lists them, such as {', '.join(like)}{path}")
    return override_all(presets[name], list(settings))
