"""Scores of one model: certified bits per token, its objective, and its samples where the law of the data is known."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from vmd.config import DRAFT_EMBEDDING, require
from vmd.data import ArrayData, Law, SudokuData, TextData
from vmd.data.arrays import parse_positions
from vmd.data.sudoku import keeps_clues, valid
from vmd.data.tokenizers import JsonTokenizer
from vmd.diagnostics import Diagnostics, diagnose
from vmd.distributed import gather_rows, my_share, own_seed, require_a_share
from vmd.likelihood import (
    Bits,
    check,
    check_summable,
    confidence_order_nll,
    in_bits,
    law_bits,
    nll_bound,
    random_order_nll,
)
from vmd.masking import draw_masks
from vmd.metrics import accuracy, empirical, kl_to, one_step_probabilities, share_error
from vmd.model import VMD
from vmd.network import largest_tensor
from vmd.sampling import RULES, check_settings

CERTIFIED = "certified bits per token"
EXACT = "exact bits per token"
ORDER_PART = "  so much below the bound, bits per token"
Data = Law | ArrayData | TextData


def rows_per_pass(model: VMD) -> int:
    """So that no activation of a pass over doubled sequences has more elements than the device's budget."""
    c = model.config
    draft = max(c.draft, c.draft_reach * DRAFT_EMBEDDING) if c.draft else 0
    widest = 2 * c.length * max(c.vocab_size, 3 * c.width, c.mlp_ratio * c.width, draft)
    return max(1, min(65_536, largest_tensor(model.device) // widest))


def rows_per_score(model: VMD) -> int:
    """Of passes that only score, of which a CPU makes small ones faster."""
    return rows_per_pass(model) if model.device.type == "cuda" else max(1, rows_per_pass(model) // 2**5)


@torch.no_grad()
def evaluate_model(
    model: VMD,
    data: Data,
    steps: list[int],
    *,
    order: str = "prob",
    z: str = "once",
    iwae: Sequence[int] = (1,),
    n: int = 20_000,
    rows_scored: int = 2_000,
    seed: int = 0,
    fixed: str = "",
    exact: bool = False,
    on_part: Callable[[float, int], None] = lambda done, total: None,
) -> list[dict]:
    """Rows of {metric, value, stderr, about}. A bound is called a bound, a surrogate a surrogate.

    `exact`: also the bits that bounds of several steps are above, all orders summed over.
    `on_part(done, total)` is called after each part, and within those that take long.
    """
    config = model.config
    require(data.length == config.length, f"data of length {data.length}: expected {config.length}, the model's")
    require(
        data.vocab_size <= config.vocab_size,
        f"token id {data.vocab_size - 1} in the data: expected 0 to {config.vocab_size - 1}, the model's vocabulary",
    )
    same = getattr(data, "columns", ()) in ((), config.columns)
    require(same, "a table: expected a model of a table, with these columns")
    held = rows_scored if isinstance(data, Law) else min(rows_scored, len(data))
    require_a_share(held, "rows to score")
    draws_of_z = sorted(set(iwae)) if config.latent.kind == "gaussian" else [1]
    for count in steps:
        check_settings(config, count, order, "sample", z, 1.0, 1.0)
        for samples in draws_of_z:
            check(config, count, z, samples)
    given = parse_positions(fixed, config.length, "--fixed")
    if exact:
        check_summable(config)
        require(given is None, f"--exact: expected no positions that are given, found {fixed}")
    parts: list[Callable[[], list[dict]]] = []
    finished = 0

    def tell(done: int, total: int) -> None:
        on_part(finished + done / total, len(parts))

    for count in steps:
        for samples in draws_of_z:
            parts.append(partial(certified_row, model, data, count, z, samples, rows_scored, seed, given, tell))
        if exact:
            parts.append(partial(exact_rows, model, data, count, rows_scored, seed))
        if order != "random" and not (config.has_latent or config.columns) and given is None:
            parts.append(partial(confidence_row, model, data, count, order, rows_scored, seed))
    parts.append(partial(objective_rows, model, data, n if isinstance(data, Law) else rows_scored, seed, given))
    if isinstance(data, Law):
        for count in steps:
            parts.append(partial(sample_rows, model, data, count, order, z, n, seed, given))
    rows: list[dict] = []
    for finished, part in enumerate(parts):
        on_part(finished, len(parts))
        rows += part()
    on_part(len(parts), len(parts))
    if given is None:
        return rows
    return [scored | {"about": f"{scored['about']}, {fixed} given", "fixed": fixed} for scored in rows]


@torch.no_grad()
def evaluate_puzzles(
    model: VMD,
    data: SudokuData,
    steps: list[int],
    *,
    order: str = "prob",
    z: str = "once",
    revise: bool = False,
    rows_scored: int = 2_000,
    seed: int = 0,
    on_part: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict]:
    """Rows of {metric, value, stderr, about}: how many puzzles are solved, by the rules of the board alone.

    A grid is right if it keeps the clues and every row, column and box holds every digit once: of a puzzle with several
    solutions any will do.
    """
    config = model.config
    require(
        (data.length, data.vocab_size) == (config.length, config.vocab_size),
        f"puzzles of {data.length} tokens: expected {config.length} of {config.vocab_size} kinds, the model's",
    )
    for count in steps:
        check_settings(config, count, order, "sample", z, 1.0, 1.0)
    chosen = torch.randperm(len(data.puzzles), generator=torch.Generator().manual_seed(seed))[:rows_scored].sort().values
    require_a_share(len(chosen), "puzzles to solve")
    mine = my_share(len(chosen))
    puzzle = torch.from_numpy(data.puzzles.puzzle[chosen[mine.start : mine.stop].numpy()].astype("int64"))
    solution = torch.from_numpy(data.puzzles.solution[chosen[mine.start : mine.stop].numpy()].astype("int64"))
    found: list[dict] = []
    settings = [(count, rule) for count in steps for rule in RULES]
    for done, (count, rule) in enumerate(settings):
        on_part(done, len(settings))
        generator = torch.Generator(model.device).manual_seed(own_seed(seed))
        drawn = model.sample(
            prompt=data.layout.prompt(puzzle),
            steps=count,
            order=order,
            rule=rule,
            z=z,
            revise=revise,
            generator=generator,
            batch_size=rows_per_pass(model),
        )
        grids = data.layout.grids(drawn.tokens.cpu())
        solved = gather_rows(valid(grids) & keeps_clues(grids, puzzle)).double()
        about = f"rule {rule}, order {order}, {per_block(count)}, NFE {drawn.nfe}, {len(solved)} puzzles"
        about += (f", z {z}" if config.has_latent else "") + (", revising" if revise else "")
        stderr = share_error(float(solved.mean()), len(solved))
        found.append(row("solved, %", 100 * float(solved.mean()), 100 * stderr, about))
        blanks = gather_rows(((grids == solution) & (puzzle == 0)).sum(-1) / (puzzle == 0).sum(-1)).double()
        found.append(row("cells as in the solution given, %", 100 * float(blanks.mean()), None, about))
    on_part(len(settings), len(settings))
    return found


@torch.no_grad()
def bits_in_passing(
    model: VMD, x0: Tensor, steps: Sequence[int], z: str = "once", fixed: Tensor | None = None
) -> dict[str, float]:
    """{"bits_N": certified bits per token of rows (B, L) in N steps per block}; by the same masks always, to be compared."""
    found, written = {}, x0.shape[1] - (0 if fixed is None else int(fixed.sum()))
    for count in steps:
        generator = torch.Generator(x0.device).manual_seed(0)
        how: dict = {"z": z, "fixed": fixed, "generator": generator, "chunk": rows_per_score(model), "steps_scored": 8}
        found[f"bits_{count}"] = in_bits(nll_bound(model, x0, count, **how), written).value
    return found


def draw_rows(data: Data, n: int, seed: int, device: torch.device) -> Tensor:
    """Rows of the data: draws of a law, or different rows of an array."""
    if isinstance(data, Law):
        return data.draw(n, generator=torch.Generator(device).manual_seed(seed), device=device)
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:n]
    return data.rows_at(chosen.sort().values.numpy()).to(device)


def scored_bits(
    model: VMD,
    data: Data,
    score: Callable[[Tensor], Tensor],
    rows_scored: int,
    seed: int,
    given: Tensor | None,
) -> tuple[Bits, str]:
    """The mean over the data of score(x0): by enumerating a law, else over random rows."""
    if isinstance(data, Law) and given is None:
        draws = max(2, rows_scored // len(data.sequences))
        return law_bits(model, data, score, draws), f"all {len(data.sequences)} sequences of the law, {draws} draws each"
    x0 = draw_rows(data, rows_scored, seed, model.device)
    tokens = data.length - (0 if given is None else int(given.sum()))
    mine = my_share(len(x0))
    return in_bits(gather_rows(score(x0[mine.start : mine.stop])), tokens), f"{len(x0)} rows"


def certified_row(
    model: VMD,
    data: Data,
    steps: int,
    z: str,
    samples: int,
    rows_scored: int,
    seed: int,
    given: Tensor | None,
    on_rows: Callable[[int, int], None],
) -> list[dict]:
    """An upper bound on the bits of the sampler of that many steps in random order."""
    config = model.config
    generator = torch.Generator(model.device).manual_seed(
        seed if isinstance(data, Law) and given is None else own_seed(seed)
    )
    chunk = rows_per_score(model)
    fixed = None if given is None else given.to(model.device)

    def score(x0: Tensor) -> Tensor:
        how: dict = {"z": z, "samples": samples, "fixed": fixed, "generator": generator, "chunk": chunk, "on_rows": on_rows}
        return nll_bound(model, x0, steps, **how)

    bits, over = scored_bits(model, data, score, rows_scored, seed, given)
    written = config.blocks if given is None else int((~given).unflatten(0, (config.blocks, -1)).any(-1).sum())
    about = f"{per_block(steps)}, NFE {steps * written}, random order, rule sample"
    if config.has_latent:
        about += f", z {z}"
        about += ", summed over codes" if config.latent.coded else f", IWAE {samples}"
    setting = {"steps": steps, "order": "random", "z": z if config.has_latent else "none", "iwae": samples}
    found = [row(CERTIFIED, bits.value, bits.stderr, f"{about}; {over}") | setting]
    if isinstance(model.tokenizer, JsonTokenizer) and given is None and not isinstance(data, Law):
        x0 = draw_rows(data, rows_scored, seed, torch.device("cpu"))
        if model.tokenizer.gives_back(x0.numpy()):  # else more bytes may be counted than the text has
            size = bytes_per_token(model.tokenizer, x0)
            found.append(row("  per byte of the text", bits.value / size, None, f"{size:.3f} bytes a token in these rows"))
    return found


def bytes_per_token(tokenizer: JsonTokenizer, x0: Tensor) -> float:
    """By which bits of models with other tokens compare. A character that a row cuts counts nothing, so never too many."""
    texts = (tokenizer.decode(ids).strip("\ufffd") for ids in x0.tolist())
    return sum(len(text.encode()) for text in texts) / x0.numel()


def exact_rows(model: VMD, data: Data, steps: int, rows_scored: int, seed: int) -> list[dict]:
    """What the bound of several steps is above, and by how much: it is a mean over orders. Neither has any chance."""
    slack: list[Tensor] = []

    def score(x0: Tensor) -> Tensor:
        exact, bound = random_order_nll(model, x0, steps, chunk=max(1, rows_per_score(model) // 8))
        slack.append(bound - exact)
        return exact

    bits, over = scored_bits(model, data, score, rows_scored, seed, None)
    apart, _ = scored_bits(model, data, lambda x0: torch.cat(slack), rows_scored, seed, None)  # of the same rows
    about = f"{per_block(steps)}, NFE {steps * model.config.blocks}, random order, rule sample, summed over orders; {over}"
    setting = {"steps": steps, "order": "random", "z": "fresh" if model.config.has_latent else "none", "iwae": 1}
    rows = [row(EXACT, bits.value, bits.stderr, about) | setting]
    if steps > 1:
        rows.append(row(ORDER_PART, apart.value, apart.stderr, f"{per_block(steps)}; {over}") | setting)
    return rows


def confidence_row(model: VMD, data: Data, steps: int, order: str, rows_scored: int, seed: int) -> list[dict]:
    """Without z the order is a function of the tokens, and the likelihood of confidence orders is exact."""
    chunk = rows_per_score(model)
    bits, over = scored_bits(
        model, data, lambda x0: confidence_order_nll(model, x0, steps, order, chunk=chunk), rows_scored, seed, None
    )
    about = f"{per_block(steps)}, NFE {steps * model.config.blocks}, order {order}, rule sample, exact; {over}"
    return [row(CERTIFIED, bits.value, bits.stderr, about) | {"steps": steps, "order": order, "z": "none", "iwae": 1}]


def sample_rows(
    model: VMD, data: Law, steps: int, order: str, z: str, n: int, seed: int, given: Tensor | None
) -> list[dict]:
    """Accuracy and KL of samples by both token rules, and the exact KL in one step."""
    config, rows = model.config, []
    generator = torch.Generator(model.device)
    mine = my_share(n)
    for rule in RULES:
        generator.manual_seed(own_seed(seed))
        prompt = torch.full((n, config.length), -1)
        if given is not None:  # what is given is true
            prompt = torch.where(given, data.draw(n, generator=torch.Generator().manual_seed(seed)), prompt)
        prompt = prompt[mine.start : mine.stop]
        drawn = model.sample(prompt=prompt, steps=steps, order=order, rule=rule, z=z, generator=generator)
        drawn = drawn._replace(tokens=gather_rows(drawn.tokens))
        about = f"rule {rule}, order {order}, {per_block(steps)}, NFE {drawn.nfe}, n {n}"
        about += f", z {z}" if config.has_latent else ""
        if data.constrains:
            rows.append(row("accuracy, %", accuracy(drawn.tokens, data), None, about))
        rows.append(row("KL(data || samples), nats", kl_to(data, empirical(drawn.tokens, data)), None, about))
    if steps == 1 and given is None:
        exact = kl_to(data, one_step_probabilities(model, data.sequences, n, generator=generator))
        over = {"gaussian": f", integrated over {n} z", "none": ", exact"}
        rows.append(
            row(
                "KL(data || model), nats",
                exact,
                None,
                f"rule sample, 1 step per block{over.get(config.latent.kind, ', summed over codes')}",
            )
        )
    return rows


def objective_rows(model: VMD, data: Data, n: int, seed: int, fixed: Tensor | None) -> list[dict]:
    """The paper's objective in bits per maskable token, on n random rows with fresh masks."""
    config, device = model.config, model.device
    generator = torch.Generator(device).manual_seed(own_seed(seed))
    x0 = draw_rows(data, n, seed, device)
    mine = my_share(len(x0))
    fixed = None if fixed is None else fixed.to(device)
    maskable = config.length - (0 if fixed is None else int(fixed.sum()))
    parts: dict[str, list[Tensor]] = {"total": [], "reconstruction": [], "kl": []}
    for chunk in x0[mine.start : mine.stop].split(min(8_192, rows_per_pass(model))):
        masks = draw_masks(chunk, config.block_size, fixed=fixed, generator=generator)
        shape = model.latent_shape(len(chunk))
        noise = None if shape is None else torch.randn(shape, generator=generator, device=device)
        for name, value in model(chunk, masks, noise)._asdict().items():
            parts[name].append(value / (maskable * math.log(2)))
    about = f"{len(x0)} rows, mask counts, KL weight 1"
    name = "bound at N = block size" if config.bounded_by_counts else "surrogate (not a bound)"
    labels = {"total": f"{name}, bits per token"}
    if config.has_latent and config.latent.kind != "chain":  # whose loss is not split
        labels |= {"reconstruction": "  its reconstruction", "kl": "  its KL"}
    rows = []
    for part, label in labels.items():
        values = gather_rows(torch.cat(parts[part])).double()
        stderr = float(values.std() / len(values) ** 0.5) if len(values) > 1 else None
        rows.append(row(label, float(values.mean()), stderr, about))
    return rows


def diagnose_model(
    model: VMD, data: Data | SudokuData, seed: int = 0, fixed: str = "", rows: int = 512
) -> Diagnostics | None:
    """What the latent carries, on some rows of the data: on a CPU no more than take a few seconds."""
    if model.device.type == "cpu":
        rows = min(rows, max(1, 2**13 // model.config.length))
    if isinstance(data, SudokuData):
        count = min(rows, len(data.puzzles), rows_per_pass(model))
        generator = torch.Generator(model.device).manual_seed(seed)
        x0, clues = data.puzzle_batch(0, count, generator=generator, device=model.device)
        return diagnose(model, x0, fixed=clues, generator=generator)
    given = parse_positions(fixed, model.config.length)
    given = None if given is None else given.to(model.device)
    generator = torch.Generator(model.device).manual_seed(seed)
    x0 = draw_rows(data, min(rows, rows_per_pass(model)), seed, model.device)
    return diagnose(model, x0, fixed=given, generator=generator)


def per_block(steps: int) -> str:
    return f"{steps} step{'s' if steps > 1 else ''} per block"


def row(metric: str, value: float, stderr: float | None, about: str) -> dict:
    return {"metric": metric, "value": value, "stderr": stderr, "about": about}
