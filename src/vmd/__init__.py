"""vmd: variational masked diffusion. Fill in many discrete tokens at once and make them agree."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "VMD": "vmd.model",
    "ModelConfig": "vmd.config",
    "LatentConfig": "vmd.config",
    "ObjectiveConfig": "vmd.config",
    "TrainingConfig": "vmd.config",
    "DataConfig": "vmd.config",
    "RunConfig": "vmd.config",
    "InvalidInput": "vmd.config",
    "train": "vmd.training",
    "sample": "vmd.sampling",
    "evaluate": "vmd.scoring",
    "infill": "vmd.infilling",
    "write": "vmd.writing",
    "draw_masks": "vmd.masking",
    "law": "vmd.data",
    "load_data": "vmd.data",
    "preset": "vmd.presets",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from vmd.config import DataConfig, InvalidInput, LatentConfig, ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig
    from vmd.data import law, load_data
    from vmd.infilling import infill
    from vmd.masking import draw_masks
    from vmd.model import VMD
    from vmd.presets import preset
    from vmd.sampling import sample
    from vmd.scoring import evaluate
    from vmd.training import train
    from vmd.writing import write


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str):
    """Names are imported when first used, so that `vmd --help` need not wait for torch."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vmd' has no attribute {name!r}")
