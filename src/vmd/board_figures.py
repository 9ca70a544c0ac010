"""Pictures of Sudoku boards, and of one filling in. Needs matplotlib (the extra `plots`)."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vmd.config import InvalidInput
from vmd.files import write_atomically
from vmd.plotting import INK, pyplot

NINES, DARKEST = 4.0, 7.5  # as sure as colours tell apart, and beyond: digits must be seen on them


SURE = (0.5, 0.9, 0.99, 0.999, 0.9999)


def draw_board(
    axis: Any, puzzle: Any, canvas: Any, guess: Any, confidence: Any, new: Any, title: str, size: float = 90
) -> None:
    """A board: clues in black, digits on a colour that says how sure the model was, the newest outlined.

    Those that are not written yet are gray, those that break a rule are red.
    """
    import numpy as np

    from vmd.data.sudoku_engine import clashing

    side = round(len(puzzle) ** 0.5)
    box = round(side**0.5)
    nines = np.clip(-np.log10(np.maximum(1 - confidence, 1e-9)), 0, NINES)  # 90 %, 99 %, 99.9 % ...: 1, 2, 3 ...
    axis.imshow(nines.reshape(side, side), cmap="Blues", vmin=0, vmax=DARKEST, extent=(0, side, side, 0))
    for line in range(side + 1):
        width = 2.0 if line % box == 0 else 0.5
        axis.plot([0, side], [line, line], color=INK, linewidth=width, clip_on=False)
        axis.plot([line, line], [0, side], color=INK, linewidth=width, clip_on=False)
    clash = clashing(canvas)
    for cell, digit in enumerate(canvas):
        row, column = divmod(cell, side)
        if new[cell]:
            axis.add_patch(pyplot().Rectangle((column + 0.07, row + 0.07), 0.86, 0.86, fill=False, color="#c0504d"))
        if digit > 0:
            colour = "#d00000" if clash[cell] else INK if puzzle[cell] else "#123a66"
            look = {"color": colour, "weight": "bold" if puzzle[cell] else "normal"}
        else:
            digit, look = guess[cell], {"color": "#7a7a7a"}
        if digit > 0:
            axis.text(column + 0.5, row + 0.54, str(int(digit)), ha="center", va="center", fontsize=size / side, **look)
    axis.set_axis_off()
    axis.set_title(title, fontsize=9)


def board_frames(puzzle: Any, steps: list) -> list[tuple]:
    """(canvas, guess, confidence, new, title) before the first step and after each, of the first row of a batch."""
    import numpy as np

    from vmd.data.sudoku_engine import clashing

    clues = np.asarray(puzzle)
    sure = np.full(len(clues), np.nan)
    frames = [(clues, clues, sure, np.zeros(len(clues), bool), f"{(clues > 0).sum()} clues")]
    for number, step in enumerate(steps, start=1):
        shown = step.guess if number == len(steps) else step.canvas  # the last grid is what the model would write
        digits, masked = np.asarray(shown[0]), np.asarray(step.masked[0])
        new = masked & (digits > 0)
        score = np.clip(np.asarray(step.score[0]), 0, 1)
        sure = np.where(masked, score, sure)
        filled, broken = (digits > 0).sum(), clashing(digits).sum()
        told = "the rules hold" if filled == len(digits) else f"{filled} of {len(digits)} cells"
        told = f"{broken} cells break the rules" if broken else told
        frames.append((digits, np.asarray(step.guess[0]), sure, new, f"evaluation {number}: {told}"))
    return frames


def animate_board(puzzle: Any, steps: list, path: Path, on_frame: Callable[[int, int], object] | None = None) -> Path:
    """A .gif of a board filling in. `on_frame(done, total)` is called for each picture."""
    plt = pyplot()
    from matplotlib.animation import FuncAnimation, PillowWriter

    frames = board_frames(puzzle, steps)
    figure, axis = plt.subplots(figsize=(4, 4.3), layout="constrained")

    def show(number: int) -> None:
        axis.clear()
        draw_board(axis, puzzle, *frames[min(number, len(frames) - 1)])

    partial = path.with_name(path.name + ".making.gif")
    try:
        movie = FuncAnimation(figure, show, frames=len(frames) + 4)  # the end stays a while
        movie.save(partial, writer=PillowWriter(fps=2), progress_callback=on_frame)
        write_atomically(path, partial.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path}: cannot write: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
        plt.close(figure)
    return path
