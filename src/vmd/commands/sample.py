"""`vmd sample`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from vmd.commands.options import Device, Model, path_option
from vmd.config import require
from vmd.terminal import (
    Watch,
    check_array_path,
    has_later_tokens,
    note_unfinished,
    pick_device,
    prompt_row,
    say,
    show,
    visible,
    write_array,
)


def sample(
    model: Model,
    n: Annotated[
        int | None, typer.Option("-n", "--n", help="Number of samples. [default: 10; of each row of --prompts 1]")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps per block.")] = 1,
    order: Annotated[str, typer.Option(help="random, prob, margin or entropy.")] = "prob",
    rule: Annotated[
        str | None,
        typer.Option(help="argmax (the paper's) or sample. [default: argmax with a Gaussian latent, else sample]"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="For rule sample.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="For rule sample.")] = 1.0,
    z: Annotated[
        str | None,
        typer.Option(
            help="once per block, fresh or the likeliest at every step. [default: fresh for codes trained so, else once]"
        ),
    ] = None,
    revise: Annotated[
        bool, typer.Option("--revise", help="A step may mask again what an earlier one wrote, where the model has doubts.")
    ] = False,
    order_noise: Annotated[
        float, typer.Option(help="Gumbel noise on the confidences, less with every step: an order not greedy at first.")
    ] = 0.0,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Tokens with _ for each gap, as in '3 _ _ 6'; of a table NAME=VALUE,NAME=VALUE; of text, how it begins."
        ),
    ] = None,
    prompts: Annotated[
        Path | None, path_option(help="Of a table, or of tokens: rows of a .csv to complete, with _ for each gap.")
    ] = None,
    infill: Annotated[
        str | None, typer.Option(help="Text or tokens with _ for each gap, as in 'the ____ of science'; \\_ is no gap.")
    ] = None,
    tries: Annotated[
        int | None,
        typer.Option(
            help="Of an infill: candidates for each gap, of which one is drawn by how well the text after it follows. "
            "[default: 32; 1 for a model of one block, which sees all of the text, and with a Gaussian latent]"
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Of text: write so many tokens, in windows that see the end of the last. [default: the model's length]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Sample i depends on the seed and i alone.")] = 0,
    cache: Annotated[bool, typer.Option(help="Keep keys and values of finished blocks.")] = True,
    trace: Annotated[bool, typer.Option("--trace", help="Show every step of the first sample.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the tokens of the first sample as they appear.")] = False,
    out: Annotated[Path | None, path_option(help="Also write the tokens, as .npy or .csv.")] = None,
    device: Device = "auto",
) -> None:
    """Draw samples, or fill the gaps of a prompt. One sample per line; of texts with line ends, --- between samples."""
    import torch

    from vmd.distributed import gather_rows, my_share, rank
    from vmd.evaluation import rows_per_pass
    from vmd.infilling import TRIES
    from vmd.infilling import infill as fill_gaps
    from vmd.model import VMD, model_folder
    from vmd.progress import percent_bar
    from vmd.step import step_seed
    from vmd.writing import write

    n = n if n is not None else 1 if prompts else 10
    require(1 <= n <= 10_000_000, f"--n {n}: expected 1 to 10,000,000")
    require(0 <= seed < 2**62, f"--seed {seed}: expected 0 to 2^62")
    folder = model_folder(model)
    loaded = VMD.from_pretrained(folder, device=pick_device(device))
    note_unfinished(loaded, folder)
    config = loaded.config
    rule = rule or ("argmax" if config.latent.kind == "gaussian" else "sample")
    require(z is None or config.has_latent, f"--z {z}: expected with a model that has a latent")
    z = z or (loaded.usual_z if steps > 1 else "once")
    deaf = config.latent.kind == "gaussian" and config.latent.prior == "normal" and not config.latent.encoder_sees_mask
    if (prompt is not None or prompts is not None) and deaf:
        say("note: this model's z does not heed the prompt; for prompts train with model.latent.encoder_sees_mask=true")
    if prompt is None and infill is None and prompts is None and loaded.fixed:
        say(f"note: this model was trained with positions {loaded.fixed} given; use --prompt to give them")
    tokenizer = loaded.tokenizer
    if length is not None:
        of_text = tokenizer is not None and infill is None
        require(
            of_text and not (watch or trace),
            f"--length {length}: expected with a model of text, no --infill, --watch, --trace",
        )
        require(1 <= length <= 1_000_000, f"--length {length}: expected 1 to 1,000,000")
    if prompts is None:
        row = prompt_row(prompt, infill, config, tokenizer, length)
        asked = [row]
    else:
        from vmd.data.columns import load_prompts

        alone = prompt is None and infill is None and tokenizer is None and not (watch or trace)
        require(alone, f"--prompts {prompts}: expected no model of text, and no --prompt, --infill, --watch, --trace")
        asked = load_prompts(prompts, config.columns, config.length).tolist()
        row = asked[0]
        n *= len(asked)
    wanted = len(row)  # of an infill no more than it holds
    if infill is None and tokenizer is None and any(has_later_tokens(some, config.block_size) for some in asked):
        weigh = "" if config.latent.kind == "gaussian" else "; --infill weighs what it writes by them"
        say(f"note: blocks of {config.block_size} are written from left to right: no gap sees tokens of later blocks{weigh}")
    require(tries is None or infill is not None, f"--tries {tries}: expected with --infill")
    require(tries is None or tries >= 1, f"--tries {tries}: expected at least 1")
    if out is not None:
        check_array_path(out)
    mine = my_share(n)
    watching = Watch(config, tokenizer, row, whole=infill is not None) if watch and rank() == 0 else None
    options: dict = {
        "steps": steps,
        "order": order,
        "rule": rule,
        "temperature": temperature,
        "top_p": top_p,
        "z": z,
        "revise": revise,
        "order_noise": order_noise,
        "cache": cache,
        "seeds": [step_seed(seed, i) for i in mine or [0]],  # a process without a share draws one for nothing
        "trace": trace,
        "on_step": watching,
    }
    bar: Any = nullcontext(lambda done, total: None) if watch else percent_bar(f"vmd sample {model}")
    if length is not None:
        given = torch.tensor([token for token in row if token >= 0], dtype=torch.long)
        options |= {"length": length, "batch_size": rows_per_pass(loaded)}
        with bar as show_progress:
            drawn = write(loaded, given, max(1, len(mine)), on_progress=show_progress, **options)
    elif infill is None:
        size = 8_192 if watch or trace else rows_per_pass(loaded)  # of every batch all steps would be shown
        rows = torch.tensor([asked[i * len(asked) // n] for i in mine or [0]])
        with bar as show_progress:
            drawn = loaded.sample(prompt=rows, batch_size=size, on_progress=show_progress, **options)
    else:
        weighed = []  # candidates, if there were any to weigh

        def tell(done: int, total: int) -> None:
            weighed.append(total)
            show_progress(done, total)

        with bar as show_progress:
            drawn = fill_gaps(loaded, torch.tensor(row), max(1, len(mine)), tries=tries, on_progress=tell, **options)
    if watching is not None:
        watching.close()
    everything = gather_rows(drawn.tokens[: len(mine), :wanted])
    if rank() != 0:
        return
    if out is not None:
        write_array(out, everything, config.columns)
    for step in drawn.trace:
        say(f"block {step.block} step {step.step}: {visible(show(step.canvas[0, :wanted].tolist(), config, tokenizer))}")
    if config.columns:
        from vmd.data.columns import to_csv

        texts = [to_csv(config.columns, everything).rstrip("\n")]
    else:
        texts = [show(tokens, config, tokenizer) for tokens in everything.tolist()]
    separator = "\n---\n" if not config.columns and any("\n" in text for text in texts) else "\n"
    print(separator.join(texts))
    say(
        f"n {n}, rule {rule}, order {order}, {steps} step{'s' if steps > 1 else ''} per block, NFE {drawn.nfe}"
        + (f" and {drawn.cache_passes} to fill the cache" if drawn.cache_passes else "")
        + (f", for each of {tries or TRIES} candidates, of which one is drawn by how it fits" if infill and weighed else "")
        + (f", z {z}" if config.has_latent else "")
        + (", revising" if revise else "")
        + (f", noise {order_noise:g} on the order" if order_noise else "")
    )
