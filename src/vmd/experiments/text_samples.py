"""Samples of the systems of `vmd reproduce text`: drawn, kept, measured by what they are made of, and judged.

They are judged by a larger network, and by counts of n-grams, which takes no GPU.
"""

import hashlib
import json
import lzma
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vmd.config import InvalidInput, RunConfig, require
from vmd.data import TextData
from vmd.evaluation import rows_per_pass
from vmd.experiments.counting import counted_bits, counted_nats, longest_ngram
from vmd.experiments.text_quality import Quality, judged_bits, random_letters, text_quality, words_of
from vmd.experiments.text_systems import JUDGE, System, folder_of, step_counts
from vmd.files import write_atomically
from vmd.model import VMD, WEIGHTS_FILE
from vmd.progress import progress_bar
from vmd.sampling import RULES
from vmd.step import precision

SAMPLES_FILE = "samples.jsonl.xz"  # small enough to be kept with the results, so that another judge can read them
LAST = {"judged_bits": 1, "counted_bits": 2}


def sample_rows(
    model: VMD, run: RunConfig, data: TextData, reference: list[str], words: set[str], draws: int, folder: Path
) -> list[dict]:
    """Samples at temperature 1: real words, n-grams, variety, and how long they took. They are kept in the folder."""
    rows, kept = [], []
    config = model.config
    z = "once" if config.z_reaches_later_blocks else "fresh"
    for steps in step_counts(run):
        for rule in RULES:
            if rule == "argmax" and not config.has_latent:
                continue  # it writes one text for ever
            generator = torch.Generator(model.device).manual_seed(0)
            options: dict[str, Any] = {
                "steps": steps,
                "order": "random",
                "rule": rule,
                "z": z,
                "batch_size": rows_per_pass(model),
            }
            with precision("tf32" if model.device.type == "cuda" else "float32"):
                if model.device.type == "cuda":  # kernels are loaded by the first draw, which is not timed
                    model.sample(min(draws, rows_per_pass(model)), **options)
                started = time.perf_counter()
                drawn = model.sample(draws, generator=generator, **options)
                tokens = drawn.tokens.cpu()
                seconds = time.perf_counter() - started
            texts = [data.tokenizer.decode(row.numpy()) for row in tokens]
            setting = {"steps": steps, "nfe": drawn.nfe, "order": "random", "rule": rule, "n": draws}
            setting |= {"z": z if config.has_latent else "none", "temperature": 1}
            quality = text_quality(texts, reference, words)
            errors = {"real_words": quality.real_words_stderr}
            found = known(quality) | {"characters_per_second": tokens.numel() / seconds}
            rows += [{"setting": setting, "metric": m, "value": v, "stderr": errors.get(m)} for m, v in found.items()]
            kept += [json.dumps({"setting": setting, "text": text}) for text in texts]
    write_atomically(folder / SAMPLES_FILE, lzma.compress("".join(line + "\n" for line in kept).encode()))
    return rows


def kept_samples(path: Path, data: TextData) -> dict[str, Tensor]:
    """{how they were drawn, in JSON: tokens (n, L)}"""
    drawn: dict[str, list[Tensor]] = {}
    try:
        for line in lzma.decompress(path.read_bytes()).decode().splitlines():
            sample = json.loads(line)
            how = sample["setting"]
            whole = all(isinstance(how[name], int) for name in ("steps", "nfe", "n")) and how["rule"] in RULES
            tokens = torch.from_numpy(data.tokenizer.encode(sample["text"])).long()
            require(whole and len(tokens) == data.length, "another setting, or another length")
            drawn.setdefault(json.dumps(how), []).append(tokens)
        whole = bool(drawn) and all(len(some) == json.loads(how)["n"] for how, some in drawn.items())
        require(whole, "samples are missing")
    except (lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidInput):
        raise InvalidInput(f"{path}: expected samples as `vmd reproduce text` keeps them") from None
    return {how: torch.stack(some) for how, some in drawn.items()}


def judged_rows(judge: VMD, data: TextData, path: Path) -> list[dict]:
    """What the judge thinks of the samples that are kept in a file."""
    rows = []
    for setting, some in kept_samples(path, data).items():
        bits, error = judged_bits(judge, some)
        rows.append({"setting": json.loads(setting), "metric": "judged_bits", "value": bits, "stderr": error})
    return rows


def spread_over(rows: np.ndarray, count: int) -> np.ndarray:
    """So many of them, from all over the text: neighbours are of one article."""
    return rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64)]


def yardstick_texts(data: TextData, scored: np.ndarray, count: int) -> dict[str, list[str]]:
    """As many texts as samples: rows of the text that are not in the reference, and letters drawn one by one.

    Figures of n-grams depend on how many there are, and no text is as near to the reference as the reference.
    """
    others = spread_over(np.setdiff1d(np.arange(len(data)), scored), count)
    return {"test_text": texts_at(data, others), "random_letters": random_letters(texts_at(data, scored), count)}


def texts_at(data: TextData, rows: np.ndarray) -> list[str]:
    return [data.tokenizer.decode(row.numpy()) for row in data.rows_at(rows)] if len(rows) else []


def yardsticks(texts: dict[str, list[str]], reference: list[str], words: set[str]) -> dict[str, dict[str, float]]:
    return {name: known(text_quality(some, reference, words)) if some else {} for name, some in texts.items()}


def known(quality: Quality) -> dict[str, float]:
    """Without the share of real words where there are no words, and without its error."""
    values = quality._replace(real_words_stderr=None)._asdict()
    return {name: value for name, value in values.items() if value is not None and not math.isnan(value)}


def vocabulary(data: TextData, at_once: int = 4_096) -> set[str]:
    """The words of the whole training text."""
    words: set[str] = set()
    for start in range(0, len(data), at_once):
        rows = data.in_order(start, min(at_once, len(data) - start))
        words |= set(words_of(data.tokenizer.decode(row.numpy()) for row in rows))
    return words


def find_judge(out: Path, device: str) -> VMD | None:
    folder = folder_of(out, JUDGE)
    return VMD.from_pretrained(folder, device).eval() if (folder / WEIGHTS_FILE).is_file() else None


def judge_all(
    systems: dict[str, System], done: dict[str, dict], data: TextData, out: Path, device: str, on_note: Callable[[str], None]
) -> bool:
    """Of all systems whose samples are here, whether the judge was trained before or after them. True: there is news."""
    judge, news = find_judge(out, device), False
    if judge is None:
        on_note(f"no judge is trained here, so that samples are judged by n-grams alone: --only '{JUDGE.name}' trains it")
        return news
    who = digest(folder_of(out, JUDGE) / WEIGHTS_FILE)
    for name, part in done.items():
        if name not in systems or systems[name].judge:
            continue
        path = folder_of(out, systems[name]) / SAMPLES_FILE
        which, before = [who, digest(path)], part.get("judged", ["", ""])
        if before == which or (not which[1] and before[0] == who):  # these samples, by this judge
            continue
        if not which[1]:
            on_note(f"{name}: no {SAMPLES_FILE} is kept, so that its samples are not judged")
        judged = judged_rows(judge, data, path) if which[1] else []
        part["rows"] = with_new_rows(part["rows"], name, "judged_bits", judged)
        part["judged"] = which
        news = True
    return news


def uncounted(
    systems: dict[str, System], done: dict[str, dict], trained: TextData, tested: TextData, out: Path
) -> dict[str, dict[str, Tensor]]:
    """{system: its samples}, of all that n-grams of this text have not judged."""
    found = {}
    for name, part in done.items():
        path = folder_of(out, systems[name]) / SAMPLES_FILE if name in systems else None
        if path is None or not path.is_file():
            continue
        done_before = part.get("counted") == counted_by(trained, path)
        if not done_before or not any(row["metric"] == "counted_bits" for row in part["rows"]):
            found[name] = kept_samples(path, tested)
    return found


def ngram_of(data: TextData) -> int:
    return min(longest_ngram(data.vocab_size), data.length)


def counted_by(trained: TextData, samples: Path) -> list:
    """N-grams of which text, of which samples."""
    return [ngram_of(trained), trained.sha256, digest(samples)]


def count_all(
    systems: dict[str, System],
    done: dict[str, dict],
    trained: TextData,
    tested: TextData,
    beside: dict[str, list[str]],
    figures: dict[str, dict[str, float]],
    out: Path,
) -> bool:
    """Bits by n-grams of the training text: of new samples, and of the texts beside them. True: there is news."""
    drawn = uncounted(systems, done, trained, tested, out)
    begun = drawn or any("counted" in part for part in done.values())
    missing = {
        name: texts for name, texts in beside.items() if texts and begun and (drawn or "counted_bits" not in figures[name])
    }
    if not drawn and not missing:
        return False
    asked = [((name, how), some.numpy()) for name, each in drawn.items() for how, some in each.items()]
    asked += [((name, ""), np.stack([tested.tokenizer.encode(text) for text in texts])) for name, texts in missing.items()]
    n = ngram_of(trained)
    with progress_bar(f"{n}-grams", n) as update:
        rows = np.concatenate([some for _, some in asked])
        nats = counted_nats(trained.tokens, rows, trained.vocab_size, n, on_order=lambda order: update(order, ""))
    each = np.split(nats, np.cumsum([len(some) for _, some in asked])[:-1])
    bits = {key: counted_bits(some) for (key, _), some in zip(asked, each, strict=True)}
    for name, settings in drawn.items():
        counted = [
            {"setting": json.loads(how) | {"ngram": n}, "metric": "counted_bits", "value": value, "stderr": error}
            for how, (value, error) in ((how, bits[name, how]) for how in settings)
        ]
        done[name]["rows"] = with_new_rows(done[name]["rows"], name, "counted_bits", counted)
        done[name]["counted"] = counted_by(trained, folder_of(out, systems[name]) / SAMPLES_FILE)
    for name in missing:
        figures[name]["counted_bits"] = bits[name, ""][0]
    return True


def with_new_rows(rows: list[dict], name: str, metric: str, new: list[dict]) -> list[dict]:
    """In one order, whichever judge came first."""
    rows = [row for row in rows if row["metric"] != metric] + [{"system": name} | row for row in new]
    return sorted(rows, key=lambda row: LAST.get(row["metric"], 0))


def digest(path: Path) -> str:
    """Of a file; nothing, if there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
