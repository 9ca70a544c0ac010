"""A progress bar with rate and time left, on stderr, so that results on stdout stay clean."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Yields `update(done, text)`. Off a terminal it writes one line at the start and one at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.1f} steps/s")

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    if not console.is_terminal:
        last: list[str] = []

        def remember(done: int, text: str = "") -> None:
            if not last:  # not before: what is refused is refused in one line
                print(f"{description}: {total} steps", file=sys.stderr)
            last[:] = [text or "".join(last)]

        yield remember
        print(f"{description}: done {''.join(last)}".rstrip(), file=sys.stderr)
        return
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total, text="")

        def update(done: int, text: str = "") -> None:
            if text:
                progress.update(task, completed=done, text=text)
            else:
                progress.update(task, completed=done)

        yield update
