"""What one sees while one waits."""

import re
import time
from types import SimpleNamespace

import rich.console

from vmd import progress
from vmd.progress import progress_bar


def ticking(monkeypatch, seconds: float) -> None:
    """A clock that goes on by so much whenever it is read."""
    now = [0.0]

    def tick() -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=tick))


def test_off_a_terminal_a_line_for_every_tenth_says_what_is_left(capsys, monkeypatch):
    ticking(monkeypatch, 60.0)
    with progress_bar("work", 20) as update:
        for done in range(5, 21):  # a run that goes on
            update(done, f"loss {done}" if done % 5 == 0 else "")
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "work: 5 of 20 loss 5"
    assert told[1] == "work: 6 of 20 0:14:00 left loss 5 (at 5)"
    assert told[-1] == "work: 20 of 20 loss 20"
    assert len(told) == 9


def test_in_a_narrow_terminal_rate_and_time_left_stay_whole_on_one_line(capsys, monkeypatch):
    console = rich.console.Console
    monkeypatch.setattr(
        rich.console, "Console", lambda **options: console(**options, force_terminal=True, width=80, color_system=None)
    )
    with progress_bar("vmd train a-long-name.txt", 40) as update:
        for done in range(1, 41):
            time.sleep(0.01)
            update(done, "loss 2.1995 kl 0.3461, 770 tokens/s")
    drawn = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err))
    last = [line for line in drawn if line.strip()][-1]
    assert re.search(r"40/40 \d+\.\d steps/s 0:00:00 loss.*…", last)
    assert len(last) <= 80
