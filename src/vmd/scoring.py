"""Certified bits from Python: of rows, arrays, laws and texts, and of one model against another, row by row."""

import os

import numpy as np
import torch
from torch import Tensor

from vmd.config import InvalidInput, is_whole, require
from vmd.data import Law
from vmd.data.arrays import parse_positions, same_positions
from vmd.data.synthetic import LAWS
from vmd.data.tokenizers import same_ids
from vmd.evaluation import Data, draw_rows, per_block, row, rows_per_score
from vmd.likelihood import STEPS_SCORED, Bits, check, check_rows, in_bits, nll_bound
from vmd.model import VMD
from vmd.step import step_seed


def evaluate(
    model: VMD,
    data: Data | Tensor | np.ndarray | str,
    steps: int | tuple[int, ...] | list[int] = (1,),
    *,
    z: str = "",
    samples: int = 1,
    rows: int = 2_000,
    seed: int = 0,
    fixed: str | None = None,
    against: VMD | None = None,
    z_against: str = "",
) -> dict[int, Bits]:
    """{steps per block: certified bits per token}, with standard errors, of the sampler in random order, rule sample.

    Of data as `vmd.load_data` gives it, of rows of tokens (n, L), or of a text, cut into rows, by a model of text. z: fresh
    for every step, as by default for codes, or once per block, as for a Gaussian, whose bound may have several `samples`,
    and for codes that were trained so.
    `fixed`: positions that are given, as in "0:82" or "0,5,7", whose bits are not counted; by default those that always were
    in the model's training.
    `against`: the bits of another model are taken off, row by row of the same data and by the same orders if its blocks are
    of the same size, and the errors are those of the differences.
    """
    models = [(model, z)] if against is None else [(model, z), (against, z_against)]
    for one, _ in models:
        require(isinstance(one, VMD), f"evaluate({type(one).__name__}): expected a model")
    counts = list(steps) if isinstance(steps, (tuple, list)) else [steps]
    require(bool(counts) and all(map(is_whole, counts)), f"steps={steps!r}: expected a whole number of steps, or several")
    require(is_whole(rows) and rows >= 1, f"rows={rows!r}: expected a whole number, at least 1")
    models = [(one, how or (one.usual_z if one.config.has_latent else "fresh")) for one, how in models]
    for one, how in models:
        for count in counts:
            check(one.config, count, how, samples)
    if against is not None:
        require_comparable(model, against)
        apart = f"models trained with positions {model.fixed!r} and {against.fixed!r} given"
        same = fixed is not None or same_positions(model.fixed, against.fixed, model.config.length)
        require(same, f"{apart}: expected fixed=, for both")
    named = model.fixed if fixed is None else fixed
    require(isinstance(named, str), f"fixed={fixed!r:.60}: expected positions such as '0:82' or '0,5,7'")
    given = parse_positions(named, model.config.length, "fixed")
    x0 = rows_of(model, data, rows, seed)
    at_once = min(max(1, rows_per_score(one) // STEPS_SCORED) for one, _ in models)  # one draw of orders, before those of z
    found = {}
    for count in counts:
        nats = [row_nats(one, x0, count, how, samples, seed, at_once, given) for one, how in models]
        written = model.config.length - (0 if given is None else int(given.sum()))
        found[count] = in_bits(nats[0] - nats[1] if against is not None else nats[0], written)
    return found


def require_comparable(model: VMD, other: VMD) -> None:
    ours, theirs = model.config, other.config
    same = (ours.length, ours.vocab_size) == (theirs.length, theirs.vocab_size)
    same = same and (ours.symbols == theirs.symbols or () in (ours.symbols, theirs.symbols))
    same = same and ours.columns == theirs.columns
    if model.tokenizer is not None and other.tokenizer is not None:
        same = same and same_ids(model.tokenizer, other.tokenizer)
    there = f"rows of {theirs.length} of {theirs.vocab_size} tokens"
    require(same, f"against a model of {there}: expected {ours.length} of {ours.vocab_size}, the same tokens")


def rows_of(model: VMD, data: Data | Tensor | np.ndarray | str, rows: int, seed: int) -> Tensor:
    length = model.config.length
    if isinstance(data, str):
        is_name = f": a name or a path goes through vmd.load_data({data!r})" if data in LAWS or os.path.exists(data) else ""
        if model.tokenizer is None:
            raise InvalidInput(f"a text {data!r:.60}: expected rows of tokens: this is no model of text{is_name}")
        require(not is_name, f"{data!r} is taken as a text{is_name}")
        ids = torch.as_tensor(model.tokenizer.encode(data)).long()
        require(len(ids) >= length, f"a text of {len(ids)} tokens: expected at least {length}, a row of the model")
        data = ids[: len(ids) // length * length].view(-1, length)
    data = torch.as_tensor(data) if isinstance(data, np.ndarray) else data
    known = isinstance(data, (Tensor, Law)) or hasattr(data, "rows_at")
    expected = "expected an array or tensor of rows of tokens, a text, or what vmd.load_data gives"
    require(known, f"data of type {type(data).__name__}: {expected}")
    require(not hasattr(data, "__len__") or len(data) > 0, f"data without rows: {expected}")
    if (theirs := getattr(data, "tokenizer", None)) is not None:
        same = model.tokenizer is not None and same_ids(model.tokenizer, theirs)
        require(same, "text in other tokens than the model's: expected vmd.load_data(..., tokenizer=model.tokenizer)")
    read_as_ids = not str(getattr(data, "name", "")).lower().endswith((".csv", ".tsv"))
    same = getattr(data, "columns", ()) == model.config.columns or (read_as_ids and not hasattr(data, "columns"))
    require(same, "a table of other columns than the model's: expected vmd.load_data(..., columns=model.config.columns)")
    symbols, known_by_name = getattr(data, "symbols", ()), model.config.symbols
    require(() in (symbols, known_by_name) or symbols == known_by_name, "data of other symbols: expected the model's")
    if isinstance(data, Tensor):
        check_rows(model.config, data)
        chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:rows].sort().values
        return data[chosen.to(data.device)].long().to(model.device)
    return draw_rows(data, rows, seed, model.device)


def row_nats(
    model: VMD, x0: Tensor, steps: int, z: str, samples: int, seed: int, at_once: int, given: Tensor | None = None
) -> Tensor:
    """(n,): the bound of each row. The orders of `at_once` of them are drawn together, by a seed of their own."""
    generator, found = torch.Generator(model.device), []
    how: dict = {"z": z, "samples": samples, "fixed": None if given is None else given.to(model.device)}
    for number, some in enumerate(x0.to(model.device).split(at_once)):
        generator.manual_seed(step_seed(seed, number))
        found.append(nll_bound(model, some, steps, **how, generator=generator, chunk=rows_per_score(model)))
    return torch.cat(found).cpu()


def difference_rows(
    model: VMD, other: VMD, name: str, data: Data, steps: list[int], z: tuple[str, str], how: dict
) -> list[dict]:
    """How many bits fewer or more than another model: what both find hard is not noise."""
    samples, more = how["samples"], {"fixed": how["fixed"]} if how["fixed"] else {}
    how = how | {"against": other, "z": z[0], "z_against": z[1]}
    drawn = [f"z {one}" if m.config.has_latent else "no z" for m, one in ((model, z[0]), (other, z[1]))]
    about = f"less those of {name}, row by row; {' and '.join(drawn)}"
    about += f", IWAE {samples}" if "gaussian" in (model.config.latent.kind, other.config.latent.kind) else ""
    about += f", {how['fixed']} given" if more else ""
    return [
        row("difference, bits per token", bits.value, bits.stderr, f"{per_block(count)}, {about}")
        | {"steps": count, "order": "random", "iwae": samples, "against": name}
        | more
        for count, bits in evaluate(model, data, steps, **how).items()
    ]
