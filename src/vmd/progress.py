"""A progress bar with rate and time left, on stderr, so that results on stdout stay clean."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta


@contextmanager
def progress_bar(description: str, total: int, unit: str = " steps") -> Iterator[Callable[[int, str], None]]:
    """Yields `update(done, text)`. Off a terminal it writes a line for every tenth; of several processes the first does."""
    if os.environ.get("RANK", "0") != "0" and "MASTER_ADDR" in os.environ:

        def keep_quiet(done: int, text: str = "") -> None:
            pass

        yield keep_quiet
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.1f}{unit}/s")

    class Last(ProgressColumn):
        """What there is room for."""

        def render(self, task) -> Text:
            return Text(task.fields["text"], no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True)
    whole = Column(no_wrap=True)
    columns = (
        TextColumn("{task.description}", markup=False, table_column=whole),
        BarColumn(bar_width=30 if console.width >= 120 else 8, table_column=whole),
        MofNCompleteColumn(table_column=whole),
        Rate(table_column=whole),
        TimeRemainingColumn(table_column=whole),
        Last(),
    )
    if not console.is_terminal:
        said, latest, at, started, first = -1, "", 0, 0.0, 0

        def tell(done: int, text: str = "") -> None:
            nonlocal said, latest, at, started, first
            now = time.perf_counter()
            if said < 0:  # of a run that goes on, what was done before took no time
                started, first = now, done
            if text:
                latest, at = text, done
            if done * 10 // total > said:
                said = done * 10 // total
                old = f" (at {at})" if latest and at != done else ""
                left = (now - started) / (done - first) * (total - done) if done > first else 0
                until = f"{timedelta(seconds=round(left))} left " if left >= 1 else ""
                print(f"{description}: {done} of {total} {until}{latest}{old}".rstrip(), file=sys.stderr)

        yield tell
        return
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total, text="")

        def update(done: int, text: str = "") -> None:
            if text:
                progress.update(task, completed=done, text=text)
            else:
                progress.update(task, completed=done)

        yield update


@contextmanager
def percent_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Yields `on_progress(done, total)`; there is a bar only if it takes more than a second."""
    started = time.perf_counter()
    shown: list[Callable[[int, str], None]] = []
    with ExitStack() as stack:

        def on_progress(done: int, total: int) -> None:
            if not shown and done < total and time.perf_counter() - started >= 1:
                shown.append(stack.enter_context(progress_bar(f"{description}, percent", 100, " %")))
            for update in shown:
                update(100 * done // total, "")

        yield on_progress
