"""What all pictures share. Needs matplotlib (the extra `plots`)."""

import io
from pathlib import Path
from typing import Any

from vmd.config import InvalidInput
from vmd.files import write_atomically

INK, GRID = "#222222", "#dddddd"
SHADES = ("#1f5fa8", "#e8a33d", "#7a4fa3", "#c0504d", "#5b8c5a")


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise InvalidInput("figures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.edgecolor": INK, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def save(figure: Any, path: Path) -> Path:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    pyplot().close(figure)
    write_atomically(path, buffer.getvalue())
    return path
