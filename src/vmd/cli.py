"""The `vmd` command. Nothing here imports torch until a command needs it."""

import errno
import os
import shlex
import sys
from typing import Annotated

import typer

from vmd.commands.bench import bench
from vmd.commands.evaluate import evaluate
from vmd.commands.look import plot, presets
from vmd.commands.sample import sample
from vmd.commands.sudoku import data, solve
from vmd.commands.tables import report, reproduce
from vmd.commands.train import train
from vmd.config import InvalidInput
from vmd.terminal import complain, first_process, lost_others, say, several_processes, usage_line

app = typer.Typer(
    help="Variational masked diffusion: generate many discrete tokens at once and make them agree.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def version(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """Variational masked diffusion: generate many discrete tokens at once and make them agree."""
    if show_version:
        from vmd import __version__

        print(__version__)
        raise typer.Exit


app.command(short_help="Train and measure a table of the paper.")(reproduce)
app.command(short_help="Train a model, on data of your own or a preset's.")(train)
app.command()(sample)
app.command(short_help="Certified bits of a model at each number of steps.")(evaluate)
app.command()(presets)
app.command()(plot)
app.command(short_help="Make Sudoku puzzles with their solutions.")(data)
app.command(short_help="Solve Sudoku puzzles, and check the solutions.")(solve)
app.command(short_help="Measure speed and memory of a preset.")(bench)
app.command(short_help="Renew the tables of a README from results.")(report)


def main() -> None:
    """Errors of the user are one line and exit code 2."""
    words = sys.argv[1:]
    try:
        code = app(words or ["--help"], standalone_mode=False)
        print(end="", flush=True)  # also where there is no output: whoever called may have closed it
        if code == 130:  # how typer reports an interruption
            say("vmd: interrupted")
        if several_processes():
            from vmd.distributed import leave

            leave()
    except InvalidInput as error:
        if first_process() or type(error).__name__ != "FailedTogether":
            complain(str(error))
        code = 2
    except KeyboardInterrupt:
        say("vmd: interrupted")
        code = 130
    except Exception as error:
        if type(error).__name__ == "TrainingDiverged":
            say(f"vmd: {error}")  # all processes find it together
            code = 1
        elif several_processes() and lost_others(error):
            complain(f"lost the other processes: {str(error).splitlines()[0]}")
            code = 1
        elif type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "allocate memory" in str(error):
            complain("out of memory: try training.accumulate, a smaller batch, fewer --rows or model.latent.code_chunk")
            code = 1
        elif type(error).__name__ == "Stopped":
            again = [word for word in words if word not in ("--resume", "--overwrite")]
            command = shlex.join(["vmd", *again, "--resume"])
            if several_processes():
                command = f"the same torchrun line, on any number of processes, and --resume: torchrun ... -m {command}"
            say(f"vmd: {error}; everything is saved; go on with: {command}")
            code = 128 + error.number  # type: ignore[attr-defined]
        elif type(error).__name__ == "Abort":
            say("vmd: interrupted")
            code = 130
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:  # files say so themselves: this is the terminal
            complain("cannot write the output: no space left on device")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries again at its end
            code = 2
        elif hasattr(error, "format_message"):  # a usage error of the command line
            commands = [command.callback.__name__ for command in app.registered_commands if command.callback]
            say(f"vmd: {usage_line(error, words, commands)}")
            code = 2
        else:
            raise
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
