import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from command import TINY, refused, save_rows, settings, succeeds, vmd
from helpers import strengthened
from vmd import cli, presets, terminal
from vmd.config import InvalidInput, ModelConfig, override_all
from vmd.data import ArrayData, load_data
from vmd.data.tokenizers import CharTokenizer
from vmd.model import VMD
from vmd.runs import run_as_it_began
from vmd.training import train

COMMANDS = {command.name: command for command in typer.main.get_command(cli.app).commands.values()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on an array of four tokens, of six steps with a checkpoint after every two. Copy it to change it."""
    folder = tmp_path_factory.mktemp("trained")
    more = settings("training.steps=6", "training.checkpoint_every=2")
    succeeds("train", "--data", save_rows(folder / "rows.npy"), "--out", folder / "run", *TINY, *more)
    return folder / "run"


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A run with two blocks whose latents also enter the clean stream."""
    folder = tmp_path_factory.mktemp("blocks")
    more = settings("model.block_size=2", "model.latent.on_clean=true")
    rows = save_rows(folder / "rows.npy", vocab_size=10)
    succeeds("train", "array-gaussian", "--data", rows, "--out", folder / "run", *TINY, *more)
    return folder / "run"


@pytest.fixture(scope="module")
def poker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("poker")
    succeeds("train", "poker", "--out", folder / "run", *TINY)
    return folder / "run"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder with an array in it."""
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.npy")
    return tmp_path


@pytest.fixture
def run(trained, here):
    """A copy of the trained run, and of its array at the place where the run looks for it."""
    return shutil.copytree(trained, here / "run")


def again(trained, out, *words):
    """The command that trained the run, with another output folder."""
    more = settings("training.steps=6", "training.checkpoint_every=2")
    return ("train", "--data", trained.parent / "rows.npy", "--out", out, *TINY, *more, *words)


def lines(text: str) -> list[str]:
    return text.splitlines()


def python(*words: str, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=cwd, timeout=120)


# What is printed where


@pytest.mark.parametrize("words", [["--help"], ["presets"], ["presets", "poker"], ["train", "--help"], ["report", "--help"]])
def test_help_and_presets_do_not_wait_for_torch(words):
    code = f"""
import sys
from vmd.cli import main
sys.argv = ["vmd", *{words!r}]
try:
    main()
except SystemExit as stop:
    assert not stop.code
assert "torch" not in sys.modules
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "vmd",
        "vmd.config",
        "vmd.presets",
        "vmd.experiments.tables",
        "vmd.experiments.figures",
        "vmd.experiments.report",
        "vmd.terminal",
        "vmd.runs",
        "vmd.cli",
        "vmd.commands.train",
    ],
)
def test_modules_that_say_so_import_no_torch(module):
    done = python("-c", f"import sys, {module}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, f"{module} imports torch\n{done.stderr}"


def test_help_lists_every_command():
    text = succeeds("--help").out
    assert set(COMMANDS) == {
        "reproduce",
        "train",
        "sample",
        "evaluate",
        "presets",
        "plot",
        "data",
        "bench",
        "report",
        "solve",
    }
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_mentions_each_option(name):
    done = succeeds(name, "--help")
    assert done.err == ""
    assert f"Usage: vmd {name}" in done.out
    for parameter in COMMANDS[name].params:
        for word in parameter.opts:
            assert word in done.out
        assert parameter.help


def test_without_arguments_the_help_is_shown():
    done = vmd()
    shown = done.out + done.err
    assert shown.startswith("Usage: vmd")
    assert all(name in shown for name in COMMANDS)


def test_the_module_runs_as_a_program(here):
    words = ("train", "poker", "--out", "run", *TINY)
    done = python("-m", "vmd", *words, cwd=here)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert (here / "run" / "model.safetensors").exists()
    refused_again = python("-m", "vmd", *words, cwd=here)
    assert refused_again.returncode == 2
    assert refused_again.stderr.startswith("vmd: run holds a run (run.json, ")
    assert refused_again.stderr.count("\n") == 1


def test_a_program_that_reads_only_the_first_line_is_no_error_of_ours():
    shell = f"{sys.executable} -m vmd presets | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert len(lines(done.stdout)) == 1
    assert "Traceback" not in done.stderr


def test_training_prints_nothing_on_stdout(here):
    done = succeeds("train", "--data", "rows.npy", "--out", "run", *TINY)
    assert done.out == ""
    assert "parameters: " in done.err
    assert "rows.npy: 3 of 3 surrogate" in done.err
    assert lines(done.err)[-1] == "model: run"


@pytest.mark.parametrize(("warmup", "told"), [(3, False), (4, True)])
def test_a_warm_up_longer_than_the_training_is_told(here, warmup, told):
    """TINY trains for three steps."""
    done = succeeds("train", "--data", "rows.npy", "--out", "run", *TINY, "--set", f"training.warmup_steps={warmup}")
    assert (f"training.warmup_steps={warmup}: the learning rate does not reach its value" in done.err) is told


def test_progress_on_a_terminal_goes_to_stderr_too(here, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "argv", ["vmd", "train", "--data", "rows.npy", "--out", "run", *TINY])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    assert not stop.value.code
    assert printed.out == ""
    assert "3/3" in printed.err


def test_a_name_in_brackets_is_printed_as_it_is(here):
    save_rows(here / "rows[red].npy")
    done = succeeds("train", "--data", "rows[red].npy", "--out", "run", *TINY)
    assert "vmd train rows[red].npy: 3 of 3" in done.err


def test_a_long_name_does_not_break_a_line(here):
    name = "rows" * 40 + ".npy"
    save_rows(here / name)
    done = succeeds("train", "--data", name, "--out", "run", *TINY)
    assert f"vmd train {name}: 3 of 3 surrogate" in done.err


def test_interruption_is_one_line_and_its_own_code(here, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("vmd.training.train", interrupted)
    done = vmd("train", "poker", "--out", "run", *TINY)
    assert done.code == 130
    assert lines(done.err)[-1] == "vmd: interrupted"


def test_a_diverged_run_says_so_in_its_last_line(here):
    done = vmd("train", "poker", "--out", "run", *TINY, *settings("training.learning_rate=1e30", "training.clip=0"))
    assert done.code == 1
    assert done.out == ""
    assert lines(done.err)[-1].startswith("vmd: loss, gradient or weights are no longer numbers ")
    assert not (here / "run" / "model.safetensors").exists()


# Training


def test_a_run_writes_its_files(trained):
    files = {str(path.relative_to(trained)) for path in trained.rglob("*") if path.is_file()}
    steps = {f"checkpoints/step-{step:09d}.safetensors" for step in (4, 6)}
    assert files == {"run.json", "config.json", "model.safetensors", "metrics.jsonl"} | steps
    records = [json.loads(line) for line in lines((trained / "metrics.jsonl").read_text())]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(record["total"] > 0 and record["kl"] >= 0 for record in records)


def test_run_json_holds_the_resolved_configuration(trained):
    run = run_as_it_began(trained / "run.json")
    assert (run.model.vocab_size, run.model.length, run.model.block_size) == (5, 4, 4)
    assert (run.model.layers, run.model.width, run.training.steps, run.training.batch_size) == (1, 16, 6, 8)
    assert run.data.name == str(trained.parent / "rows.npy")
    assert json.loads((trained / "config.json").read_text())["model"]["vocab_size"] == 5


def test_the_last_of_two_settings_of_a_field_counts(here):
    succeeds("train", "--data", "rows.npy", "--out", "run", *TINY, *settings("training.steps=5", "training.steps=2"))
    assert json.loads((here / "run" / "run.json").read_text())["training"]["steps"] == 2


def test_data_may_be_given_as_a_field_or_as_an_option(here):
    succeeds("train", "--out", "a", *TINY, *settings("data.name=rows.npy"))
    succeeds("train", "--out", "b", *TINY, "--data", "rows.npy")
    assert (here / "a" / "run.json").read_text() == (here / "b" / "run.json").read_text()


def test_the_output_folder_is_named_after_the_preset(here):
    succeeds("train", "poker-mdm", *TINY)
    assert (here / "runs" / "poker-mdm" / "model.safetensors").exists()
    for words in (("sample", "runs/poker-mdm"), ("evaluate", "runs/poker-mdm", "--data", "poker")):
        assert "--z fresh: expected with a model that has a latent" in refused(*words, "--z", "fresh", folder=here)


PATHS = [(name, p.opts[0]) for name, command in COMMANDS.items() for p in command.params if p.metavar == "<path>"]


@pytest.mark.parametrize(("name", "option"), PATHS)
def test_an_empty_path_is_not_the_current_folder(name, option, here):
    words = [] if name == "report" else ["x"]
    for given in ([option, ""], [f"{option}="], [option, " "]):
        told = refused(name, *words, *given, folder=here)
        assert f"'{option}': '" in told
        assert told.endswith("': expected a path\n")


def test_the_current_folder_is_given_by_a_dot(here):
    assert {("reproduce", "--out"), ("train", "--out"), ("sample", "--out"), ("plot", "--out")} <= set(PATHS)
    assert {("data", "--out"), ("solve", "--out"), ("report", "--results"), ("bench", "--json")} <= set(PATHS)
    succeeds("train", "poker", "--out", ".", *TINY)
    assert (here / "model.safetensors").exists()


def test_the_same_command_gives_the_same_weights(trained, here):
    succeeds(*again(trained, "run"))
    assert (here / "run" / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_another_seed_gives_other_weights(trained, here):
    succeeds(*again(trained, "run", *settings("training.seed=1")))
    assert (here / "run" / "model.safetensors").read_bytes() != (trained / "model.safetensors").read_bytes()


def test_a_resumed_run_equals_the_uninterrupted_one(trained, run):
    """As if the power had failed after step 4, with step 5 logged and its line cut short."""
    for name in ("model.safetensors", "config.json", "checkpoints/step-000000006.safetensors"):
        (run / name).unlink()
    log = lines((run / "metrics.jsonl").read_text())
    (run / "metrics.jsonl").write_text("\n".join(log[:5]) + "\n" + log[5][:20])
    succeeds(*again(trained, run, "--resume"))
    whole, resumed = load_file(trained / "model.safetensors"), load_file(run / "model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    losses = [[json.loads(line)["total"] for line in lines((out / "metrics.jsonl").read_text())] for out in (trained, run)]
    assert losses[0] == losses[1]


def test_a_run_can_be_resumed_for_more_steps_and_run_json_says_so(trained, run):
    done = succeeds(*again(trained, run, "--resume", *settings("training.steps=8")))
    assert "8 training steps where the run had 6: its learning rate now falls over these" in done.err
    assert (run / "checkpoints" / "step-000000008.safetensors").exists()
    assert len(lines((run / "metrics.jsonl").read_text())) == 8
    assert json.loads((run / "run.json").read_text())["training"]["steps"] == 8


def test_a_folder_knows_what_it_goes_on_with(trained, run):
    """Data, preset and settings, as the run has them; what is set now is set."""
    succeeds("train", "--out", run, "--resume", "--device", "cpu")
    assert (run / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    succeeds("train", "--out", run, "--resume", "--device", "cpu", *settings("training.steps=8"))
    kept = [json.loads((out / "run.json").read_text()) for out in (trained, run)]
    kept[0]["training"]["steps"] = 8
    assert kept[0] == kept[1]
    (run / "run.json").write_text("[]")
    assert "run.json: expected an object" in refused("train", "--out", run, "--resume", folder=run.parent)


def test_resuming_a_finished_run_changes_no_weight(trained, run):
    succeeds(*again(trained, run, "--resume"))
    assert (run / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_overwrite_starts_anew(trained, run):
    succeeds(*again(trained, run, "--overwrite", *settings("training.steps=2")))
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000000002.safetensors"]
    assert len(lines((run / "metrics.jsonl").read_text())) == 2
    assert json.loads((run / "run.json").read_text())["training"]["steps"] == 2


def test_overwrite_leaves_no_model_of_the_old_run_beside_the_new_configuration(trained, run):
    failing = settings("training.learning_rate=1e30", "training.clip=0")
    assert vmd(*again(trained, run, "--overwrite", *failing)).code == 1
    assert not (run / "model.safetensors").exists()


def test_fixed_positions_are_not_learned(here):
    """The first token is always given, so that the model's guess of it never enters the loss."""
    succeeds("train", "--data", "rows.npy", "--out", "run", *TINY, *settings("data.fixed=0,2:4", "model.latent.kind=none"))
    assert json.loads((here / "run" / "run.json").read_text())["data"]["fixed"] == "0,2:4"
    losses = [json.loads(line)["total"] for line in lines((here / "run" / "metrics.jsonl").read_text())]
    assert all(0.2 < 4 * loss < 4 for loss in losses)  # one token of ln 5 nats, not four


# Sampling


def test_samples_go_to_stdout_one_per_line_and_the_rest_to_stderr(trained):
    done = succeeds("sample", trained, "-n", "7")
    assert len(lines(done.out)) == 7
    assert all(len(row) == 4 and set(row) <= set("01234") for row in map(str.split, lines(done.out)))
    assert lines(done.err) == ["n 7, rule sample, order prob, 1 step per block, NFE 1, z once"]


@pytest.mark.parametrize("rule", ["argmax", "sample"])
def test_the_same_seed_gives_the_same_samples(trained, rule):
    words = ("sample", trained, "-n", "20", "--steps", "2", "--rule", rule, "--seed", "5")
    assert succeeds(*words).out == succeeds(*words).out


def test_another_seed_gives_other_samples(trained):
    words = ("sample", trained, "-n", "20", "--rule", "sample")
    assert succeeds(*words, "--seed", "0").out != succeeds(*words, "--seed", "100").out


@pytest.mark.parametrize("z", ["once", "fresh"])
def test_sample_i_is_the_same_in_any_batch(trained, z):
    words = ("sample", trained, "--rule", "sample", "--steps", "2", "--z", z)
    many = lines(succeeds(*words, "-n", "9", "--seed", "3").out)
    assert lines(succeeds(*words, "-n", "4", "--seed", "3").out) == many[:4]
    assert lines(succeeds(*words, "-n", "9", "--seed", "4").out) != many


def test_the_cache_does_not_change_samples(blocks):
    words = ("sample", blocks, "-n", "20", "--rule", "sample", "--steps", "2")
    cached, plain = succeeds(*words), succeeds(*words, "--no-cache")
    assert cached.out == plain.out
    assert "fill the cache" not in cached.err  # a finished block goes along with the next one's first step
    assert "passes" not in plain.err


@pytest.mark.parametrize("order", ["random", "prob", "margin", "entropy"])
@pytest.mark.parametrize("prompt", ["3 _ _ 1", "_ 2 _ _", "_,_,4,_", "0 1 2 3"])
def test_tokens_of_the_prompt_stay(trained, prompt, order):
    given = prompt.replace(",", " ").split()
    done = succeeds("sample", trained, "-n", "3", "--prompt", prompt, "--steps", "2", "--order", order)
    for line in lines(done.out):
        assert all(want in ("_", got) for want, got in zip(given, line.split(), strict=True))


def test_poker_is_prompted_and_answered_in_words(poker):
    words = {word for hand in ("high card", "two pair", "full house", "straight flush") for word in hand.split()}
    for line in lines(succeeds("sample", poker, "-n", "4", "--prompt", "full _").out):
        first, second = line.split()
        assert first == "full"
        assert second in words


def test_trace_shows_every_step_of_the_first_sample(blocks):
    done = succeeds("sample", blocks, "-n", "2", "--steps", "2", "--trace", "--prompt", "3 _ _ _")
    first = lines(done.out)[0]
    shown = lines(done.err)[:-1]
    assert [line.split(":")[0] for line in shown] == [f"block {b} step {s}" for b in (0, 1) for s in (0, 1)]
    canvases = [line.split(": ")[1] for line in shown]
    assert canvases[-1] == first
    assert [canvas.count("_") for canvas in canvases] == [2, 2, 1, 0]
    for canvas in canvases:
        assert all(a in ("_", b) for a, b in zip(canvas.split(), first.split(), strict=True))


def test_samples_are_written_as_an_array_too(trained, here):
    done = succeeds("sample", trained, "-n", "5", "--out", "samples.npy")
    tokens = np.load(here / "samples.npy", allow_pickle=False)
    assert [" ".join(map(str, row)) for row in tokens] == lines(done.out)
    assert np.issubdtype(tokens.dtype, np.integer)


def test_written_samples_can_be_trained_on(trained, here):
    succeeds("sample", trained, "-n", "9", "--rule", "sample", "--out", "samples.npy")
    succeeds("train", "--data", "samples.npy", "--out", "run", *TINY)
    assert (here / "run" / "model.safetensors").is_file()


# Evaluation


def test_evaluation_prints_a_table_on_stdout_and_nothing_else(trained):
    done = succeeds("evaluate", trained, "--data", trained.parent / "rows.npy", "--rows", "20")
    assert lines(done.out)[0] == "| metric | value | setting |"
    assert lines(done.out)[2].startswith("| certified bits per token | ")
    assert all(line.startswith("| ") for line in lines(done.out))
    assert "percent" in done.err
    assert "what z says, nats per block: KL" in done.err


def test_every_line_of_the_table_has_as_many_cells_as_its_head(poker):
    done = succeeds("evaluate", poker, "--data", "poker", "-n", "50", "--steps", "1,2")
    assert {line.replace("\\|", "").count("|") for line in lines(done.out)} == {4}


def test_evaluation_writes_its_rows_as_json(poker, here):
    done = succeeds("evaluate", poker, "--data", "poker", "-n", "50", "--json", "scores.json")
    scores = json.loads((here / "scores.json").read_text())
    assert scores["command"] == f"vmd evaluate {poker} --data poker -n 50 --json scores.json"
    assert len(scores["rows"]) == len(lines(done.out)) - 3  # head, rule and entropy
    assert all(row.keys() >= {"metric", "value", "stderr", "about"} for row in scores["rows"])
    assert scores["entropy"] == pytest.approx(1.0)
    assert len(scores["latent"]["spread"]) == scores["latent"]["size"]
    assert (here / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_scores(poker):
    words = ("evaluate", poker, "--data", "poker", "-n", "50")
    assert succeeds(*words).out == succeeds(*words).out
    assert succeeds(*words).out != succeeds(*words, "--seed", "1").out


# What is refused


BAD_WORDS = [
    ("frob", "no such command 'frob': expected one of reproduce, train,"),
    ("train --frob", "no such option: --frob"),
    ("train --learning-rate 5", "no such option --learning-rate: expected --set training.learning_rate=..."),
    ("train --set steps=5", "unknown field 'steps': expected objective.steps or training.steps"),
    ("train poker extra", "extra"),
    ("train --out", "--out"),
    ("sample", "nothing given for MODEL: expected a model folder"),
    ("sample run -n ten", "-n ten: expected an integer"),
    ("sample run --temperature=hot", "--temperature hot: expected a number"),
    ("sample run --seed", "--seed: expected a value after it"),
    ("evaluate run", "nothing given for --data: expected a named data set"),
    ("reproduce", "nothing given for NAME: expected two-token"),
    ("presets nope", "unknown preset 'nope'"),
    ("train nope", "unknown preset 'nope'"),
    ("train", "preset 'array' has no data"),
    ("train poker --data nope", "unknown data 'nope'"),
    ("train poker --data dependence-2", "dependence-2"),
    ("train poker --data dependence-x", "dependence-x"),
    ("train poker --data missing.npy", "missing.npy: no such file"),
    ("train poker --device tpu", "--device='tpu'"),
    ("train --data rows.npy --out rows.npy", "rows.npy"),
    ("train --data rows.npy --out rows.npy/run", "rows.npy/run"),
    ("train poker --resume --overwrite", "--resume and --overwrite"),
    ("train poker --resume --out run", "run"),
    ("train --resume --out typo", "typo: expected a run to resume"),
    ("sample missing", "missing: expected a model folder"),
    ("sample rows.npy", "rows.npy: expected a model folder"),
    ("evaluate missing --data d1", "missing: expected a model folder"),
    ("reproduce nope", "'nope': expected one of two-token, four-token, ablations, heads, sudoku, text, text-scan"),
    ("reproduce two-token --quick --seeds 0", "--seeds 0"),
    ("reproduce two-token --quick --seeds -1", "--seeds -1"),
    ("reproduce two-token --quick --seeds two", "--seeds"),
    ("reproduce two-token --quick --preset nope", "--preset='nope'"),
    ("reproduce two-token --quick --out rows.npy/run", "rows.npy/run"),
    ("reproduce two-token --quick --set training.steps=0", "training.steps=0"),
    ("reproduce two-token --quick --set data.name=d1", "data"),
    ("reproduce two-token --quick --set data.fixed=0", "data"),
    ("reproduce two-token --quick --set model.block_size=3", "model.block_size"),
    ("reproduce two-token --quick --set data.name=deterministic --set training.steps=1", "data"),
    ("reproduce two-token --quick --set training.precision=bf16", "training.precision=bf16"),
    ("report --results missing", "missing: no such folder"),
    ("report --results . --readme missing.md", "missing.md: no such file"),
]


@pytest.mark.parametrize(("words", "says"), BAD_WORDS, ids=[words for words, _ in BAD_WORDS])
def test_a_wrong_command_is_one_line(words, says, here):
    assert says in refused(*words.split(), folder=here)


BAD_SETTINGS = [
    ("training.steps", "--set 'training.steps'"),
    ("", "--set ''"),
    ("=3", "unknown field ''"),
    ("nope=1", "unknown field 'nope'"),
    ("model.nope=1", "unknown field 'model.nope'"),
    ("model.latent.nope=1", "unknown field 'model.latent.nope'"),
    ("training.steps.more=1", "unknown field 'training.steps.more'"),
    ("model=1", "'model' is a section"),
    ("model.latent=none", "'model.latent' is a section"),
    ("training.steps=abc", "training.steps='abc'"),
    ("training.steps=1.5", "training.steps='1.5'"),
    ("training.steps=", "training.steps=''"),
    ("training.steps=1e400", "training.steps='1e400'"),
    ("model.latent.on_clean=maybe", "model.latent.on_clean='maybe'"),
    ("model.latent.kind=vq", "model.latent.kind='vq'"),
    ("objective.masking=all", "objective.masking='all'"),
    ("training.learning_rate=fast", "training.learning_rate='fast'"),
    ("training.learning_rate=nan", "training.learning_rate='nan'"),
    ("training.learning_rate=inf", "training.learning_rate='inf'"),
    ("training.learning_rate=-1", "training.learning_rate=-1"),
    ("training.learning_rate=0", "training.learning_rate=0"),
    ("training.steps=0", "training.steps=0"),
    ("training.steps=-1", "training.steps=-1"),
    ("training.batch_size=0", "training.batch_size=0"),
    ("training.batch_size=1e30", "training.batch_size=1"),
    ("training.ema=1", "training.ema=1"),
    ("training.clip=-1", "training.clip=-1"),
    ("training.seed=-1", "training.seed=-1"),
    ("objective.kl_weight=-1", "objective.kl_weight=-1"),
    ("model.width=17", "model.width=17"),
    ("model.heads=3", "model.heads = 6"),
    ("model.block_size=3", "model.block_size=3: expected a divisor of the length 4"),
    ("model.block_size=5", "model.block_size=5"),
    ("model.vocab_size=3", "model.vocab_size=3: expected at least 5"),
    ("model.length=5", "model.length=5: expected 4"),
    ("model.symbols=a,b", "model.symbols"),
    ("data.fixed=x", "data.fixed='x'"),
    ("data.fixed=7", "data.fixed='7'"),
    ("data.fixed=0:4", "data.fixed='0:4'"),
    ("training.precision=bf16", "training.precision=bf16: expected float32 on cpu"),
]


@pytest.mark.parametrize(("setting", "says"), BAD_SETTINGS, ids=[setting or "empty" for setting, _ in BAD_SETTINGS])
def test_a_wrong_setting_is_one_line_that_names_the_field(setting, says, here):
    assert says in refused(
        "train", "--data", "rows.npy", "--out", "run", "--device", "cpu", *TINY, "--set", setting, folder=here
    )


@pytest.mark.parametrize(
    "words", ["train poker", "sample run", "evaluate run --data rows.npy", "reproduce two-token --quick"]
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line(words, run, here):
    assert "--device cuda: no GPU found" in refused(*words.split(), "--device", "cuda", folder=here)


def save_bad_array(path, kind):
    rows = np.zeros((5, 4), dtype=np.int64)
    arrays = {
        "one dimension": rows[0],
        "three dimensions": rows[None],
        "floats": rows.astype(float),
        "booleans": rows.astype(bool),
        "text": rows.astype(str),
        "negative": rows - 1,
        "ids too large": rows + 65_536,
        "no rows": rows[:0],
        "no tokens": rows[:, :0],
    }
    if kind in arrays:
        np.save(path, arrays[kind])
        return
    np.save(path, rows)
    whole = path.read_bytes()
    path.write_bytes(
        {"empty": b"", "header cut": whole[:20], "data cut": whole[:-30], "not an array": b"hello\n" * 99}[kind]
    )


BAD_ARRAYS = ["one dimension", "three dimensions", "floats", "booleans", "text", "negative", "ids too large", "no rows"]
BAD_ARRAYS += ["no tokens", "empty", "header cut", "data cut", "not an array"]


@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_a_wrong_array_is_one_line(kind, run, here):
    save_bad_array(here / "bad.npy", kind)
    assert "bad.npy: " in refused("train", "--data", "bad.npy", "--out", "new", *TINY, folder=here)
    assert "bad.npy: " in refused("evaluate", run, "--data", "bad.npy", folder=here)


def test_a_model_of_integers_does_not_score_the_characters_of_a_file(run, here):
    (here / "rows.txt").write_text("0,1,1\n1,0,1\n")
    told = refused("evaluate", run, "--data", "rows.txt", folder=here)
    assert "--data rows.txt: expected an .npy array of integers" in told


def test_integers_may_come_with_commas_between(run, here):
    rows = np.load(here / "rows.npy")
    np.savetxt(here / "rows.csv", rows, fmt="%d", delimiter=",", header="a,b,c,d", comments="")
    arrays, tables = (succeeds("evaluate", run, "--data", f"rows.{kind}").out for kind in ("npy", "csv"))
    assert arrays == tables
    succeeds("train", "--data", "rows.csv", "--out", "again", *TINY, *settings("training.steps=6"))
    one, other = (load_file(out / "model.safetensors") for out in (run, here / "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_is_not_finished_is_read_as_far_as_it_is(trained, run, here):
    """Its newest checkpoint, with averaged weights: here as trained as the whole run."""
    whole = [succeeds(*words).out for words in (("sample", run), ("evaluate", run, "--data", "rows.npy"))]
    (run / "config.json").unlink()
    (run / "model.safetensors").unlink()
    for words, expected in zip((("sample", run), ("evaluate", run, "--data", "rows.npy")), whole, strict=True):
        done = succeeds(*words)
        assert done.out == expected
        assert f"{run} is at step 6 of 6; if it was stopped, `vmd train --out {run} --resume` goes on" in done.err
    (run / "checkpoints/step-000000006.safetensors").write_bytes(b"damaged")
    done = succeeds("evaluate", run, "--data", "rows.npy")
    assert done.out != whole[1]
    assert "is at step 4 of 6" in done.err
    shutil.rmtree(run / "checkpoints")
    for words in (("sample", run), ("evaluate", run, "--data", "rows.npy")):
        assert "a run without a whole checkpoint yet; if it was stopped, go on with `vmd train --out" in refused(
            *words, folder=here
        )


def test_a_run_that_goes_on_for_longer_is_read_by_its_newest_checkpoint(trained, run, here):
    """Not by the model that it had been before."""
    begun = json.loads((run / "run.json").read_text())
    begun["training"]["steps"] = 8
    (run / "run.json").write_text(json.dumps(begun))
    assert f"{run} is at step 6 of 8" in succeeds("sample", run).err
    (run / "checkpoints/step-000000006.safetensors").rename(run / "checkpoints/step-000000007.safetensors")
    (run / "model.safetensors").write_bytes(b"of before")
    succeeds("sample", run)
    succeeds("train", "--out", run, "--resume", "--device", "cpu", *settings("training.steps=8"))
    assert "is at step" not in succeeds("sample", run).err


def test_two_models_are_compared_row_by_row(run, here):
    """The same model is no better than itself; of another the difference of means is that of the table."""
    words = ("evaluate", run, "--data", "rows.npy", "--steps", "1,2", "--json", here / "e.json")
    succeeds("train", "--data", "rows.npy", "--out", "other", *TINY, *settings("training.seed=3"))
    means = {}
    for name in (str(run), "other"):
        done = succeeds("evaluate", name, *words[2:], "--against", run)
        scored = json.loads((here / "e.json").read_text())["rows"]
        certified = [row for row in scored if row["metric"] == "certified bits per token" and row["order"] == "random"]
        means[name] = [row["value"] for row in certified]
        apart = [row for row in scored if row["metric"] == "difference, bits per token"]
        assert [row["steps"] for row in apart] == [1, 2]
        assert "difference, bits per token" in done.out
        if name == str(run):
            assert [(row["value"], row["stderr"]) for row in apart] == [(0, 0)] * 2
    assert apart[0]["value"] == pytest.approx(means["other"][0] - means[str(run)][0], abs=1e-6)  # one step has no chance
    assert apart[0]["value"] != 0
    assert 0 < apart[0]["stderr"] < 1
    succeeds("train", "poker", "--out", "poker", *TINY)
    assert "against a model of rows of 2 of" in refused(*words, "--against", "poker", folder=here)


class Trap:
    """Unpickling it leaves a file behind."""

    def __reduce__(self):
        return open, (os.path.abspath("sprung"), "w")


def test_a_pickle_is_never_opened(run, here):
    np.save(here / "objects.npy", np.array([[Trap()]], dtype=object), allow_pickle=True)
    (here / "plain.npy").write_bytes(pickle.dumps(Trap()))
    (run / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    for name in ("objects.npy", "plain.npy"):
        assert name in refused("train", "--data", name, "--out", "new", *TINY, folder=here)
    assert "model.safetensors" in refused("sample", run, folder=here)
    assert not (here / "sprung").exists()


BAD_SAMPLING = [
    ("--steps 0", "steps=0: expected 1 to 4"),
    ("--steps 5", "steps=5: expected 1 to 4"),
    ("--order best", "order='best'"),
    ("--rule beam", "rule='beam'"),
    ("--z twice", "z='twice'"),
    ("--rule argmax --temperature 0.5", "rule=argmax"),
    ("--rule argmax --top-p 0.5", "rule=argmax"),
    ("--rule sample --temperature 0", "temperature=0"),
    ("--rule sample --temperature nan", "temperature=nan"),
    ("--rule sample --temperature inf", "temperature=inf"),
    ("--rule sample --top-p 0", "top_p=0"),
    ("--rule sample --top-p 1.1", "top_p=1.1"),
    ("--order-noise -1", "order_noise=-1.0"),
    ("--order random --order-noise 1", "order_noise=1.0: expected 0 with order random"),
    ("-n 0", "--n 0"),
    ("--seed -1", "--seed -1"),
    ("--out samples.txt", "samples.txt: expected a path ending in .npy"),
    ("--out missing/samples.npy", "missing"),
    ("--out rows.npy/samples.npy", "rows.npy"),
]


@pytest.mark.parametrize(("words", "says"), BAD_SAMPLING, ids=[words for words, _ in BAD_SAMPLING])
def test_wrong_sampling_is_one_line(words, says, run, here):
    assert says in refused("sample", run, *words.split(), folder=here)


@pytest.mark.parametrize("prompt", ["9 _ _ _", "-1 _ _ _", "x _ _ _", "1.5 _ _ _", "² _ _ _", "_ _", "_ _ _ _ _", ""])
def test_a_wrong_prompt_is_one_line(prompt, run, here):
    assert "--prompt" in refused("sample", run, f"--prompt={prompt}", folder=here)


def test_a_word_that_poker_does_not_know_is_one_line(poker, here):
    assert "expected one of high, card, two" in refused("sample", poker, "--prompt", "royal _", folder=here)


def test_ids_of_a_model_with_words_are_not_words(poker, here):
    assert "token '3'" in refused("sample", poker, "--prompt", "3 _", folder=here)


@pytest.mark.parametrize("command", [["sample"], ["evaluate", "--data", "rows.npy"], ["evaluate", "--data", "d1"]])
def test_fresh_latents_are_refused_where_later_blocks_see_them(command, blocks, here):
    assert "z=fresh" in refused(command[0], blocks, *command[1:], "--z", "fresh", folder=here)


BAD_EVALUATIONS = [
    ("--data rows.npy --steps x", "--steps 'x'"),
    ("--data rows.npy --steps ²", "--steps '²'"),
    ("--data rows.npy --steps 1,", "--steps '1,'"),
    ("--data rows.npy --steps=-1", "--steps '-1'"),
    ("--data rows.npy --steps 0", "--steps '0'"),
    ("--data rows.npy --iwae 0", "--iwae '0'"),
    ("--data rows.npy --iwae x,1", "--iwae 'x,1'"),
    ("--data rows.npy --rows 1", "--rows 1"),
    ("--data rows.npy --plot scores.pdf", "--plot scores.pdf"),
    ("--data rows.npy --plot missing/scores.png", "missing"),
    ("--data rows.npy --steps 1,9", "steps=9"),
    ("--data rows.npy --order best", "order='best'"),
    ("--data rows.npy --z twice", "z='twice'"),
    ("--data rows.npy -n 1", "--n 1"),
    ("--data rows.npy --seed -1", "--seed -1"),
    ("--data big.npy", "token id 6 in the data: expected 0 to 4"),
    ("--data short.npy", "data of length 3: expected 4"),
    ("--data d1", "token id 9 in the data: expected 0 to 4"),
    ("--data missing.npy", "missing.npy: no such file"),
    ("--data nope", "unknown data 'nope'"),
    ("--data rows.npy --json missing/scores.json", "missing"),
    ("--data rows.npy --json rows.npy/scores.json", "rows.npy"),
]


@pytest.mark.parametrize(("words", "says"), BAD_EVALUATIONS, ids=[words for words, _ in BAD_EVALUATIONS])
def test_a_wrong_evaluation_is_one_line(words, says, run, here):
    save_rows(here / "big.npy", vocab_size=7)
    save_rows(here / "short.npy", length=3)
    assert says in refused("evaluate", run, *words.split(), folder=here)


def config_with(run, **fields):
    described = json.loads((run / "config.json").read_text())
    described["model"] |= fields
    return json.dumps(described)


def damage(run, how):
    weights, config = run / "model.safetensors", run / "config.json"
    tensors = load_file(weights)
    first = sorted(tensors)[0]
    match how:
        case "weights cut":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "weights' header cut":
            weights.write_bytes(weights.read_bytes()[:20])
        case "no weights":
            weights.unlink()
        case "foreign weights":
            save_file({"embeddings": torch.zeros(3)}, weights)
        case "one tensor missing":
            save_file({name: t for name, t in tensors.items() if name != first}, weights)
        case "one tensor too many":
            save_file(tensors | {"extra": torch.zeros(1)}, weights)
        case "another shape":
            save_file(tensors | {first: torch.zeros(7, 7)}, weights)
        case "no config":
            config.unlink()
        case "not JSON":
            config.write_text("{")
        case "not text":
            config.write_bytes(b"\xff\xfe\x00\x81")
        case "a list":
            config.write_text("[1]")
        case "of another library":
            config.write_text('{"architectures": ["BertModel"]}')
        case "no model":
            config.write_text('{"format": "vmd"}')
        case "an unknown field":
            config.write_text(config_with(run, novelty=1))
        case "a wrong type":
            config.write_text(config_with(run, width="wide"))
        case "a missing value":
            config.write_text(config_with(run, length=None))
        case "a value out of range":
            config.write_text(config_with(run, layers=0))
        case "no length":
            config.write_text(config_with(run, length=0))
        case "another width":
            config.write_text(config_with(run, width=32))
        case "nested too deep":
            config.write_text("[" * 100_000)


DAMAGES = [
    "weights cut",
    "weights' header cut",
    "no weights",
    "foreign weights",
    "one tensor missing",
    "one tensor too many",
]
DAMAGES += ["another shape", "no config", "not JSON", "not text", "a list", "of another library", "no model"]
DAMAGES += ["an unknown field", "a wrong type", "a missing value", "a value out of range", "no length", "another width"]
DAMAGES += ["nested too deep"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_or_foreign_model_is_one_line(how, run, here):
    damage(run, how)
    (run / "run.json").unlink()  # else it might go on
    for words in (("sample", run), ("evaluate", run, "--data", "rows.npy")):
        said = refused(*words, folder=here)
        assert "config.json" in said or "model.safetensors" in said


def test_a_folder_that_holds_a_run_is_not_trained_into(trained, run, here):
    assert "holds a run" in refused(*again(trained, run), folder=here)


@pytest.mark.parametrize("setting", ["model.layers=2", "training.learning_rate=0.5", "training.seed=1", "data.fixed=0"])
def test_a_run_is_not_resumed_as_another_one(setting, trained, run, here):
    says = refused(*again(trained, run, "--resume", *settings(setting)), folder=here)
    assert f"cannot resume with {setting.split('=')[0]}=" in says


def test_a_run_is_not_resumed_on_other_data(trained, run, here):
    words = [word if word != trained.parent / "rows.npy" else "rows.npy" for word in again(trained, run, "--resume")]
    assert "cannot resume with data.name=" in refused(*words, folder=here)


def test_a_run_stopped_before_its_first_checkpoint_is_resumed_from_the_start(trained, run):
    before = (run / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints")
    succeeds(*again(trained, run, "--resume"))
    assert (run / "model.safetensors").read_bytes() == before


def test_training_deletes_no_file_it_did_not_write(here):
    (here / "project").mkdir()
    (here / "project" / "config.json").write_text("{}")
    assert "config.json" in refused("train", "poker", "--out", "project", *TINY, folder=here)


def test_seeds_are_counted_or_named():
    assert (terminal.parse_seeds("3"), terminal.parse_seeds("100,101"), terminal.parse_seeds("7,")) == (
        (0, 1, 2),
        (100, 101),
        (7,),
    )


def test_a_run_with_only_damaged_checkpoints_is_not_resumed(trained, run, here):
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert "damaged" in refused(*again(trained, run, "--resume"), folder=here)


def test_a_wrong_setting_destroys_no_run(trained, run, here):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused(*again(trained, run, "--overwrite", "--device", "cpu", *settings("training.precision=bf16")), folder=here)
    refused(*again(trained, run, "--overwrite", *settings("model.block_size=3")), folder=here)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


# Pieces


def test_prompts_are_read_as_ids_or_names():
    assert terminal.parse_prompt("3 _ _ 4", 4, 5, ()) == [3, -1, -1, 4]
    assert terminal.parse_prompt("b,_", 2, 2, ("a", "b")) == [1, -1]
    with pytest.raises(InvalidInput, match="expected 0 to 4"):
        terminal.parse_prompt("5 _", 2, 5, ())


def test_tokens_are_shown_as_ids_or_names():
    assert terminal.show([0, 2, 1], ModelConfig(vocab_size=2)) == "0 _ 1"
    assert terminal.show([0, 2, 1], ModelConfig(vocab_size=2, symbols=("a", "b"))) == "a _ b"
    assert terminal.show([0, 2, 2, 1], ModelConfig(vocab_size=2), CharTokenizer("ab")) == "a__b"


# Curves


def test_curves_of_runs_are_drawn_over_each_other(trained, poker, here):
    done = succeeds("plot", trained, poker, "--metric", "total,gradient_norm", "--out", "curves.png")
    assert lines(done.err) == ["picture: curves.png"]
    assert (here / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_still_writing_can_be_drawn(run, here):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "tot')
    succeeds("plot", run, "--against", "seconds", "--out", "curves.png")
    assert "no such field: nope" in succeeds("plot", run, "--metric", "total,nope").err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("missing", "missing: expected a run folder"),
        ("rows.npy", "rows.npy: no log lines in it"),
        ("run --metric nope", "--metric nope: expected fields of the log"),
        ("run --against time", "--against='time'"),
        ("run --out curves.pdf", "--out curves.pdf"),
        ("run --out missing/curves.png", "no such folder missing"),
    ],
)
def test_wrong_curves_are_one_line(words, says, run, here):
    assert says in refused("plot", *words.split(), folder=here)


def test_a_refused_overwrite_leaves_the_old_run_alone(run, here):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for words in ("objective.kl_weight=0.5", "objective.masking=steps objective.steps=9", "objective.steps=2"):
        refused("train", "--data", "rows.npy", "--out", "run", "--overwrite", *TINY, *settings(*words.split()), folder=here)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    refused("train", "--data", "rows.npy", "--out", "new", *TINY, *settings("objective.kl_weight=0.5"), folder=here)
    assert not (here / "new").exists()


def test_what_was_given_in_training_is_given_in_evaluation(here):
    succeeds("train", "--data", "rows.npy", "--out", "run", *TINY, *settings("data.fixed=0:2"))
    told = succeeds("evaluate", "run", "--data", "rows.npy", "--rows", "20")
    assert "positions 0:2 are given" in told.err
    same = succeeds("evaluate", "run", "--data", "rows.npy", "--rows", "20", "--fixed", "0:2")
    other = succeeds("evaluate", "run", "--data", "rows.npy", "--rows", "20", "--fixed", "")
    assert told.out == same.out != other.out
    assert "positions 0:2 given" in succeeds("sample", "run", "-n", "1").err
    assert "--fixed='9'" in refused("evaluate", "run", "--data", "rows.npy", "--fixed", "9", folder=here)


def test_models_are_compared_given_the_same_positions(here):
    """What one model was always given, another may have had to write."""
    ours = ("array-mdm", "--data", "rows.npy", *TINY)  # without z there is no chance but in the order
    succeeds("train", *ours, "--out", "free")
    succeeds("train", *ours, "--out", "given", *settings("data.fixed=0:2"))
    words = ("--data", "rows.npy", "--rows", "20", "--steps", "1")
    for one, other in (("free", "given"), ("given", "free")):
        assert "expected --fixed, for both" in refused("evaluate", one, *words, "--against", other, folder=here)

    def bits(*more) -> list[float]:
        succeeds("evaluate", *more, *words, "--fixed", "0:2", "--json", "scores.json")
        scores = json.loads((here / "scores.json").read_text())["rows"]
        assert all(row["fixed"] == "0:2" and "0:2 given" in row["about"] for row in scores)
        return [row["value"] for row in scores if "steps" in row]

    (free,), (given,), (_, apart) = bits("free"), bits("given"), bits("free", "--against", "given")
    assert apart == pytest.approx(free - given, abs=1e-5)
    assert free != given


def test_exact_bits_are_printed_beside_bounds(run, here):
    words = ("evaluate", run, "--data", "rows.npy", "--rows", "20", "--steps", "1,2", "--json", "s.json")
    assert "exact bits per token" in succeeds(*words, "--exact").out
    assert "expected --z fresh" in refused(*words, "--exact", "--z", "once", folder=here)


def test_scores_of_the_rows_that_were_trained_on_are_said_to_be(here):
    succeeds("train", "--data", "rows.npy", "--out", "run", *TINY)
    assert "what it was trained on" in succeeds("evaluate", "run", "--data", here / "rows.npy", "--rows", "20").err
    save_rows(here / "others.npy")
    assert "trained on" not in succeeds("evaluate", "run", "--data", "others.npy", "--rows", "20").err


def test_an_array_that_has_changed_is_not_resumed(trained, run, here):
    rows = np.load(trained.parent / "rows.npy")
    np.save(here / "rows.npy", rows.astype(np.int16))  # the same tokens
    again = ("train", "--data", here / "rows.npy", "--out", run, "--resume", *TINY, *settings("training.checkpoint_every=2"))
    kept = json.loads((run / "run.json").read_text())
    kept["data"]["name"] = str(here / "rows.npy")
    (run / "run.json").write_text(json.dumps(kept))
    for name in (run / "checkpoints").iterdir():
        name.unlink()
    succeeds(*again, *settings("training.steps=6"))
    np.save(here / "rows.npy", rows[::-1])
    assert "not the array that" in refused(*again, *settings("training.steps=8"), folder=run)


def test_a_run_of_python_is_resumed_in_python(here):
    rows = ArrayData(np.load("rows.npy"))
    preset = override_all(presets.preset("array-mdm"), [word for word in TINY if word != "--set"])
    train(VMD.for_data(preset.model, rows), rows, preset, out="run", on_step=lambda *_: None)
    for more in ([], ["--data", "rows.npy"]):
        told = refused("train", "--out", "run", "--resume", *more, folder=here)
        assert "begun in Python" in told


def test_gaps_of_tokens_are_filled_in_sight_of_later_blocks(here):
    """The third token says what the first is: a block that was written before it cannot know."""
    rows = np.random.default_rng(0).integers(5, size=(200, 4))
    rows[:, 0] = rows[:, 2]
    np.save("rows.npy", rows)
    steps = settings("training.steps=120", "training.batch_size=64", "training.learning_rate=1e-2", "model.block_size=2")
    succeeds("train", "array-mdm", "--data", "rows.npy", "--out", "run", *TINY, *steps)
    told = succeeds("sample", "run", "-n", "50", "--prompt", "_ _ 3 _")
    assert "no gap sees tokens of later blocks; --infill" in told.err
    assert "later blocks" not in succeeds("sample", "run", "-n", "1", "--prompt", "3 _ _ _").err
    filled = succeeds("sample", "run", "-n", "50", "--infill", "_ _ 3 _")
    shares = [sum(line.split()[0] == "3" for line in lines(out)) / 50 for out in (told.out, filled.out)]
    assert shares[0] < 0.5 < 0.8 < shares[1]
    assert all(line.split()[2] == "3" for line in lines(filled.out))
    for wrong, says in (("_ _ 3", "--infill '_ _ 3' has 3 tokens"), ("1 2 3 4", "expected a _"), ("_ _ 9 _", "token id 9")):
        assert says in refused("sample", "run", "--infill", wrong, folder=here)


def test_names_with_spaces_are_prompted_with_commas(here):
    np.save("rows.npy", np.random.default_rng(0).integers(3, size=(40, 2)))
    names = settings("model.symbols=New York,Rome,Oslo")
    succeeds("train", "--data", "rows.npy", "--out", "run", *TINY, *names)
    assert succeeds("sample", "run", "-n", "1", "--prompt", "New York, _").out.startswith("New York ")
    twice = refused("train", "--data", "rows.npy", *TINY, *settings("model.symbols=a,b,a"), folder=here)
    assert "model.symbols: ['a'] twice" in twice


@pytest.mark.parametrize("name", ["ROWS.CSV", "rows.NPY"])
def test_a_suffix_may_be_in_capitals(name, here):
    rows = np.load("rows.npy")
    if name.endswith("CSV"):
        Path(name).write_text("\n".join(",".join(map(str, row)) for row in rows))
    else:
        shutil.copy("rows.npy", name)
    assert np.array_equal(load_data(name).tokens, rows)


@pytest.mark.parametrize("words", ["--json scores.png", "--json folder", "--plot folder.png", "--json folder.json"])
def test_places_that_cannot_hold_scores_are_refused_at_once(words, run, here):
    for name in ("folder", "folder.png", "folder.json"):
        (here / name).mkdir()
    assert words.split()[0] in refused("evaluate", run, "--data", "rows.npy", *words.split(), folder=here)


@pytest.mark.parametrize(
    ("trained", "z"),
    [
        ([], "fresh"),
        (["objective.masking=steps", "objective.steps=1,2"], "fresh"),
        (["objective.masking=steps", "objective.steps=1"], "once"),
        (["objective.masking=steps", "objective.steps=1,2", "objective.z=once"], "once"),
        (["model.latent.kind=gaussian"], "once"),
    ],
)
def test_z_is_drawn_as_it_was_trained(trained, z, here):
    succeeds("train", "poker", "--out", "run", *settings("training.steps=1", "training.batch_size=4", *trained))
    assert f"z {z}" in succeeds("sample", "run", "-n", "1", "--steps", "2").err
    assert "z once" in succeeds("sample", "run", "-n", "1").err  # in one step there is no difference
    assert f"z {z}" in succeeds("evaluate", "run", "--data", "poker", "--steps", "2", "--n", "4", "--rows", "4").out
    model = VMD.from_pretrained("run")
    model.shortened(2).save_pretrained("copy")
    described = json.loads((here / "run" / "config.json").read_text())
    (here / "run" / "config.json").write_text(json.dumps({key: described[key] for key in ("format", "model")}))
    for same in (model, VMD.from_pretrained("copy"), VMD.from_pretrained("run")):  # also as older ones were written
        assert same.usual_z == z
    strengthened(model)
    by_default, asked = (model.sample(200, steps=2, seeds=range(200), **how).tokens for how in ({}, {"z": z}))
    assert torch.equal(by_default, asked)
    other = model.sample(200, steps=2, seeds=range(200), z={"once": "fresh", "fresh": "once"}[z]).tokens
    assert not torch.equal(by_default, other)


def test_one_can_watch_a_sample_appear(run):
    done = succeeds("sample", run, "-n", "2", "--steps", "2", "--watch")
    plain = succeeds("sample", run, "-n", "2", "--steps", "2")
    assert done.out == plain.out
    shown = [line.split() for line in lines(done.err)[:-1]]
    assert shown[-1] == lines(done.out)[0].split()  # the first sample, whole
    assert "_" in shown[0]


def test_fast_settings_are_said_and_left_to_those_who_choose(here, monkeypatch):
    monkeypatch.setattr("vmd.step.fast_settings", lambda run, device: {"clip": 0.5, "ema": 0.9})
    words = ("train", "poker", "--device", "cpu", "--set", "training.steps=1", "--set", "training.ema=0.5")
    assert "for speed: clip=0.5 (" in succeeds(*words, "--out", here / "fast").err
    assert "for speed" not in succeeds(*words, "--out", here / "plain", "--no-fast").err
    used = [json.loads((here / name / "run.json").read_text())["training"] for name in ("fast", "plain")]
    assert [(t["clip"], t["ema"]) for t in used] == [(0.5, 0.5), (1.0, 0.5)]


def test_numbers_that_a_log_lacks_here_and_there_are_left_out_of_its_curve(here):
    lines = [{"step": step, "total": 3.0 - step, "latent_marginal_gap": None if step % 2 else 0.1} for step in (1, 2, 3)]
    (here / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    succeeds("plot", here / "metrics.jsonl", "--metric", "total,latent_marginal_gap", "--out", here / "gap.png")
    assert (here / "gap.png").exists()


def test_noise_on_the_order_is_said_and_repeats_with_its_seed(trained):
    words = ("sample", trained, "-n", "20", "--steps", "4", "--seed", "5")
    plain, noisy, again = (succeeds(*words, *more) for more in ((), *[("--order-noise", "0.5")] * 2))
    assert "noise 0.5 on the order" in noisy.err
    assert "noise" not in plain.err
    assert noisy.out == again.out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_output_that_is_full_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "vmd", "presets"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "vmd: cannot write the output: no space left on device\n")
