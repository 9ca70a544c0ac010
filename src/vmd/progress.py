"""A progress bar with rate and time left, on stderr, so that results on stdout stay clean."""

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
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    if not console.is_terminal:
        console.print(f"{description}: {total} steps", highlight=False)
        last = [""]

        def remember(done: int, text: str = "") -> None:
            last[0] = text or last[0]

        yield remember
        console.print(f"{description}: done {last[0]}", highlight=False)
        return
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total, text="")

        def update(done: int, text: str = "") -> None:
            if text:
                progress.update(task, completed=done, text=text)
            else:
                progress.update(task, completed=done)

        yield update
