"""What commands share: words and tables on the terminal, devices, prompts, and what a model's folder says of it."""

import itertools
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vmd.config import InvalidInput, flatten, require, require_choice, to_dict
from vmd.flops import forward_flops

TEXT8_NOTE = "note: text is read as text8 has it: lower case, digits spelled out, one space for all else"


def data_to_score(folder: Path, model: Any, name: str, split: str | None) -> Any:
    """A law, an array, or text in the model's own tokens: all of it, or a split of what the model was trained on."""
    from vmd.data import ArrayData, is_text, load_data
    from vmd.data.preparing import SPLITS
    from vmd.data.text import text_rows
    from vmd.data.tokenizers import TEXT8_ALPHABET, Text8Tokenizer, same_ids
    from vmd.progress import percent_bar

    tokenizer = model.tokenizer
    if tokenizer is None and is_text(name) and not model.config.board and not saved_data(folder).get("puzzles"):
        raise InvalidInput(f"--data {name}: expected an .npy array of integers, or a named data set: no model of text")
    if tokenizer is None or not is_text(name):
        require(split is None, f"--split {split}: expected with a text and a model of text")
        about = saved_data(folder)
        puzzles = bool(about.get("puzzles") or model.config.board) and Path(name).is_file()
        layout = about.get("layout", "board")
        how: dict = {"puzzles": puzzles, "augment": False, "layout": layout, "columns": model.config.columns}
        return load_data(name, length=model.config.length, **how)
    trained = saved_data(folder)
    letters = tokenizer.symbols == tuple(TEXT8_ALPHABET)
    parted = name == "text8" and letters and not os.path.exists(name)  # of text8 all score the same part
    split = split or ("test" if parted or is_same_file(str(trained.get("name")), name) else "all")
    require_choice("--split", split, ("all", *SPLITS))
    if split == "all":
        with percent_bar(f"preparing {name}") as on_progress:
            rows = text_rows(name, tokenizer, model.config.length, on_progress=on_progress)
        everything = ArrayData(rows, name)
        if isinstance(tokenizer, Text8Tokenizer):
            say(TEXT8_NOTE)
        say(f"scoring all of {name}")
        return everything
    began_elsewhere = bool(saved(folder, "training").get("init")) and not trained.get("tokenizer")
    with percent_bar(f"preparing {name}") as on_progress:
        found: Any = load_data(
            name,
            length=model.config.length,
            split=split,
            tokenizer=tokenizer if began_elsewhere else str(trained.get("tokenizer") or ""),
            documents=bool(trained.get("documents")),
            on_progress=on_progress,
        )
    require(
        same_ids(found.tokenizer, tokenizer), f"{name}: its parts are in other tokens than the model's: expected --split all"
    )
    say(f"scoring the {split} part of {name}")
    return found


def is_same_file(one: str, other: str) -> bool:
    """However the path is spelled."""
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))


def parse_counts(option: str, text: str) -> list[int]:
    counts = []
    for part in text.split(","):
        require(part.strip().isdecimal() and int(part) >= 1, f"{option} {text!r}: expected counts such as 1,2,4")
        counts.append(int(part))
    return list(dict.fromkeys(counts))


def saved_data(folder: Path) -> dict:
    return saved(folder, "data")


def saved(folder: Path, section: str) -> dict:
    """A section of the run that made a model, if it is there."""
    from vmd.files import read_json

    path = folder / "run.json"
    run = read_json(path) if path.is_file() else {}
    found = run.get(section) if isinstance(run, dict) else None
    return found if isinstance(found, dict) else {}


def unit_of(tokenizer: Any) -> str:
    """What a token is, where it is something that people count."""
    from vmd.data.tokenizers import ByteTokenizer, CharTokenizer

    if isinstance(tokenizer, ByteTokenizer):
        return "byte"
    return "character" if isinstance(tokenizer, CharTokenizer) else "token"


def note_unfinished(model: Any, folder: Path) -> None:
    """What is read of a run that goes on, or was stopped."""
    if model.stopped_at is not None:
        steps = saved(folder, "training").get("steps")
        step = f"{model.stopped_at} of {steps}"
        say(f"note: {folder} is at step {step}; if it was stopped, `vmd train --out {folder} --resume` goes on")


def say(text: str) -> None:
    """To whoever sits at the terminal; of several processes the first speaks."""
    if first_process():
        print(text, file=sys.stderr)


def pick_device(name: str) -> str:
    require_choice("--device", name, ("auto", "cpu", "cuda"))
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    require(name != "cuda" or torch.cuda.is_available(), "--device cuda: no GPU found: expected cpu or auto")
    if several_processes():
        from vmd.distributed import join

        join(name)
    return name


def several_processes() -> bool:
    """Whether torchrun started this one."""
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdecimal() and int(size) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def first_process() -> bool:
    return not several_processes() or os.environ["RANK"] == "0"


def parse_seeds(text: str) -> tuple[int, ...]:
    """ "5" is seeds 0 to 4; "100,101" and "100," are those."""
    parts = [part for part in text.split(",") if part]
    good = parts and all(part.isdecimal() and int(part) < 2**31 for part in parts)
    require(bool(good), f"--seeds {text}: expected a number of seeds, or seeds such as 100,101")
    numbers = tuple(int(part) for part in parts)
    require(len(set(numbers)) == len(numbers), f"--seeds {text}: expected different seeds")
    if "," in text:
        return numbers
    require(1 <= numbers[0] <= 1_000, f"--seeds {text}: expected 1 to 1000")
    return tuple(range(numbers[0]))


def short(number: float) -> str:
    """2434371 -> 2.43M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def describe(counts: dict[str, int]) -> str:
    parts = [f"{name} {count:,}" for name, count in counts.items() if count]
    return f"parameters: {', '.join(parts)}, total {sum(counts.values()):,}"


def parse_prompt(text: str, length: int, vocab_size: int, symbols: tuple[str, ...], option: str = "--prompt") -> list[int]:
    """ "3 _ _ 6" or "full _", or with commas between, for names with spaces: ids or names, with _ for a gap."""
    words = [word.strip() for word in text.split(",")]
    words = words if len(words) == length else text.replace(",", " ").split()
    require(len(words) == length, f"{option} {text!r} has {len(words)} tokens: expected {length}, with _ for each gap")
    row = []
    for word in words:
        if word == "_":
            row.append(-1)
        elif word in symbols:
            row.append(symbols.index(word))
        elif word.isdecimal() and not symbols:
            require(int(word) < vocab_size, f"{option}: token id {word}: expected 0 to {vocab_size - 1}")
            row.append(int(word))
        else:
            known = f"one of {', '.join(symbols)}" if symbols else f"0 to {vocab_size - 1}"
            raise InvalidInput(f"{option}: token {word!r}: expected {known}, or _ for a gap")
    return row


def parts_that_fit(run: Any, processes: int = 1) -> int:
    """In how many parts a training step on a CPU needs half of the memory: a layer keeps some 45 tensors of its width, and
    the output some 6 of the vocabulary's, if the latent's are counted with them. Of each process's share of the batch."""
    model, batch = run.model, run.training.batch_size
    layers = 45 * (2 if model.blocks > 1 else 1) * model.width * model.layers
    kept = 4 * batch * model.length * (layers + 6 * model.vocab_size)
    share, most = max(1, batch // processes), -(-2 * kept // memory_here())
    return next(parts for parts in range(1, share + 1) if share % parts == 0 and (parts >= most or parts == share))


def memory_here() -> int:
    """Bytes, of the machine or of the container that this is."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


CPU_SPEED = 1e11  # operations a second, of a few cores


def days_on_a_cpu(run: Any) -> float:
    return 3 * forward_flops(run.model) * run.training.batch_size * run.training.steps / CPU_SPEED / 86_400


def work_of_codes(model: Any) -> float:
    """Of a network with codes, for one without: their output layers grow with the vocabulary."""
    return forward_flops(model) / forward_flops(replace(model, latent=replace(model.latent, kind="none", by_place=False)))


def prompt_row(prompt: str | None, infill: str | None, config: Any, tokenizer: Any, wanted: int | None = None) -> list[int]:
    """Token ids with -1 for what the model is to write: of an infill no more than it holds. `wanted`: so many tokens."""
    require(prompt is None or infill is None, "--prompt and --infill: expected one of the two")
    length, row = wanted or config.length, []
    if tokenizer is None:
        option, text = ("--prompt", prompt) if infill is None else ("--infill", infill)
        if text is None:
            row = [-1] * length
        elif config.columns:
            from vmd.data.columns import parse_row

            try:
                row = parse_row(config.columns, text)
            except InvalidInput as error:
                raise InvalidInput(f"{option}: {error}") from None
        else:
            row = parse_prompt(text, length, config.vocab_size, config.symbols, option)
        require(infill is None or -1 in row, f"--infill {infill!r:.60}: expected a _ for each gap")
        return row
    from vmd.data.tokenizers import Text8Tokenizer, as_text8
    from vmd.infilling import between_gaps, gaps_of

    if isinstance(tokenizer, Text8Tokenizer):
        require(
            "_" not in (prompt or ""), f"--prompt {prompt!r:.60}: _ is no letter of this model: expected --infill for gaps"
        )
        parts = between_gaps(prompt or infill or "")
        lost = any(part.strip() for part in parts) and not any(as_text8(part).strip() for part in parts)
        option = f"--prompt {prompt!r:.60}" if infill is None else f"--infill {infill!r:.60}"
        require(not lost, f"{option}: none of it is left in the 27 letters of this model: expected letters a to z or digits")
        if any(as_text8(part) != part for part in parts):
            say(TEXT8_NOTE)
    if prompt is not None:
        row = tokenizer.encode(prompt).tolist()
    has_gap = infill is None or len(between_gaps(infill)) > 1
    require(has_gap, f"--infill {infill!r:.60}: expected a _ for each gap; --prompt goes on from a text")
    if infill is not None:
        row = gaps_of(infill, tokenizer).tolist()
    option = "--prompt" if infill is None else "--infill"
    most = f"{length}, the model's length" + (": --length writes more" if infill is None else "")
    most = f"{length}, the --length" if wanted else most
    require(len(row) <= length, f"{option}: {len(row)} tokens: expected at most {most}")
    return row if infill is not None else row + [-1] * (length - len(row))


def has_later_tokens(row: list[int], block_size: int) -> bool:
    """Whether a token is given in a block behind a gap's."""
    first = row.index(-1) // block_size if -1 in row else len(row)
    return any(token >= 0 for token in row[(first + 1) * block_size :])


def show(tokens: list[int], config: Any, tokenizer: Any = None, first: int = 0) -> str:
    """Names or text, with _ for what is not written yet; `first`: the place of the first of them."""
    if tokenizer is not None:
        pieces = itertools.groupby(tokens, lambda t: t == config.vocab_size)
        return "".join("_" * len(list(ids)) if masked else tokenizer.decode(list(ids)) for masked, ids in pieces)
    if config.columns:
        places = zip(tokens, config.columns[first : first + len(tokens)], strict=True)
        return ", ".join("_" if t == config.vocab_size else values[t] for t, (_, *values) in places)
    return " ".join("_" if t == config.vocab_size else config.symbols[t] if config.symbols else str(t) for t in tokens)


def visible(text: str) -> str:
    """On one line, and nothing in it that a terminal would obey: as the symbols of a tokenizer are named."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def read_together(tokens: list[int], config: Any, tokenizer: Any) -> Iterator[tuple[slice, str]]:
    """Which tokens make whole characters, and what they say: a byte of several that make one says nothing alone."""
    start, most = 0, 4  # bytes of a character
    while start < len(tokens):
        stop, text = start + 1, show(tokens[start : start + 1], config, tokenizer, start)
        while "\N{REPLACEMENT CHARACTER}" in text and stop < min(start + most, len(tokens)):
            stop += 1
            text = show(tokens[start:stop], config, tokenizer)
        if "\N{REPLACEMENT CHARACTER}" in text:  # nothing comes of it
            stop, text = start + 1, show(tokens[start : start + 1], config, tokenizer, start)
        yield slice(start, stop), text
        start = stop


class Watch:
    """Shows the first sample on the terminal while it is written: new tokens in colour, the next ones as gaps."""

    def __init__(self, config: Any, tokenizer: Any, row: list[int], *, whole: bool):
        """`row`: tokens that are given, -1 for others. `whole`: show those that are behind the block at work, too."""
        from rich.console import Console
        from rich.live import Live

        self.config, self.tokenizer, self.row, self.whole = config, tokenizer, row, whole
        self.console = Console(stderr=True)
        live = self.console.is_terminal
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if live else None  # the sample follows
        if self.live is not None:
            self.live.start()

    def __call__(self, step: Any) -> None:
        from rich.text import Text

        tokens, new = step.canvas[0].tolist(), step.revealed[0].tolist()
        shown = min(len(self.row), (step.block + 1) * self.config.block_size)  # blocks after this one are not begun
        behind = [self.config.vocab_size if token < 0 else token for token in self.row[shown:]] if self.whole else []
        line = Text()
        words = " " if self.tokenizer is None else ""
        for here, text in read_together([*tokens[:shown], *behind], self.config, self.tokenizer):
            line.append(visible(text) + words, style="bold green" if any(new[here]) else "")
        if self.live is None:
            self.console.print(line, highlight=False, soft_wrap=True)
            return
        self.live.update(line, refresh=True)
        time.sleep(0.03)  # for the eye

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()


def check_array_path(path: Path) -> None:
    require(path.suffix.lower() in (".npy", ".csv"), f"--out {path}: expected a path ending in .npy or .csv")
    require(path.parent.is_dir(), f"--out {path}: no such folder {path.parent}")


def write_array(path: Path, tokens: Any, columns: Any = ()) -> None:
    """Token ids, or as .csv of a table its values."""
    import io

    import numpy as np

    from vmd.files import write_atomically

    if path.suffix.lower() == ".csv":
        from vmd.data.columns import to_csv

        write_atomically(path, to_csv(columns, tokens))
        return
    buffer = io.BytesIO()
    np.save(buffer, tokens.cpu().numpy())
    write_atomically(path, buffer.getvalue())


def to_markdown(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(headers)
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n" for cells in (headers, rule, *lines)
    )


def print_table(headers: Sequence[str], lines: Sequence[Sequence[str]], title: str = "") -> None:
    """To stdout, drawn by rich on a terminal and as markdown elsewhere."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    if not console.is_terminal:
        print(to_markdown(headers, lines), end="")
        return
    table = RichTable(title=title or None)
    table.add_column(headers[0], min_width=min(30, max(len(cells[0]) for cells in lines)))
    for header in headers[1:]:
        table.add_column(header)
    for cells in lines:
        table.add_row(*cells)
    console.print(table)


def lost_others(error: Exception) -> bool:
    """Another process has gone, and the line of communication with it."""
    closed = any(words in str(error) for words in ("Connection closed by peer", "Connection reset by peer"))
    return closed or type(error).__module__.startswith("torch.distributed")


def complain(text: str) -> None:
    """One process may fail where the others do not, so each says it; the first without its number."""
    print(f"vmd: {text}" if first_process() else f"vmd: process {os.environ.get('RANK')}: {text}", file=sys.stderr)


def usage_line(error: Any, words: list[str], commands: list[str]) -> str:
    """Errors of the command line itself, with the value that was given and what was expected."""
    told, param = error.format_message(), getattr(error, "param", None)
    names = getattr(param, "opts", None) or [getattr(error, "option_name", "")]
    for option, value in itertools.pairwise([*words, ""]):
        name, equals, joined = option.partition("=")
        if name in names and (kind := re.search("integer|number", told)):
            article = "an" if kind[0] == "integer" else "a"
            return f"{name} {joined if equals else value}: expected {article} {kind[0]}"
    if "requires an argument" in told:
        return f"{names[0]}: expected a value after it"
    if told.startswith("Missing"):
        said = (getattr(param, "help", "") or "a value").rstrip(".")
        name = names[-1] if names[-1].startswith("-") else names[-1].upper()
        return f"nothing given for {name}: expected {said[0].lower() + said[1:]}"
    if told.startswith("No such option") and words[:1] == ["train"]:
        from vmd.presets import preset

        field = names[0].lstrip("-").replace("-", "_")
        meant = [f"--set {name}=..." for name in flatten(to_dict(preset("array"))) if name.partition(".")[2] == field]
        if meant:
            return f"no such option {names[0]}: expected {' or '.join(meant)}"
    told = told[:1].lower() + told[1:]
    return f"{told.rstrip('.')}: expected one of {', '.join(commands)}" if told.startswith("no such command") else told
