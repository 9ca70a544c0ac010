"""Checkpoints: one safetensors file each, holding weights, average, optimiser state, step and configuration."""

import contextlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as dump_tensors
from torch import Tensor

from vmd.config import InvalidInput, flatten, require, with_new_fields
from vmd.distributed import full, take_shard
from vmd.files import make_folder, read_json, write_atomically
from vmd.optimizers import Optimizers

KEPT = 2
# Of the training section, when resuming: how long and how often it reports, and on what machines it runs how.
REPORTING = ("steps", "log_every", "checkpoint_every")
# A checkpoint holds all weights: where they came from at first no longer matters.
FREE_TO_CHANGE = (*REPORTING, "compile", "capture", "attention", "precision", "accumulate", "parallel", "init")


def checkpoint_files(out: Path) -> list[Path]:
    """Oldest first."""
    return sorted((out / "checkpoints").glob("step-*.safetensors"))


def save_checkpoint(
    out: Path,
    step: int,
    parameters: Mapping[str, Tensor],
    average: dict[str, Tensor] | None,
    optimizer: Optimizers,
    config: dict,
    *,
    write: bool = True,
) -> None:
    """Processes that share weights put them together here, all of them; the one that is to `write` does."""
    tensors = {f"weights/{name}": p for name, p in parameters.items()}
    tensors |= {f"average/{name}": p for name, p in (average or {}).items()}
    for name, p in learning(parameters).items():
        tensors |= {f"optimizer/{key}/{name}": value for key, value in optimizer.state_of(p).items()}
    tensors = {name: full(t.detach()).cpu().contiguous() for name, t in tensors.items()}
    if not write:
        return
    metadata = {"format": "vmd-checkpoint", "step": str(step), "config": json.dumps(config)}
    metadata["checksum"] = checksum(tensors, metadata)
    make_folder(out / "checkpoints")
    write_atomically(out / "checkpoints" / f"step-{step:09d}.safetensors", dump_tensors(tensors, metadata))
    unfinished = (out / "checkpoints").glob("*.partial")  # by a run that was killed
    for old in [*checkpoint_files(out)[:-KEPT], *unfinished]:
        old.unlink()


def learning(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without those that are frozen."""
    return {name: p for name, p in parameters.items() if p.requires_grad}


def checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Of all that a checkpoint holds: a disk may forget bits without saying so."""
    total = zlib.crc32((metadata["step"] + metadata["config"]).encode())
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(tensors[name].flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def read_checkpoint(path: Path) -> tuple[int, dict, dict[str, Tensor]]:
    """Step, configuration and tensors; ValueError if it is not whole."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    if metadata.get("format") != "vmd-checkpoint" or not metadata.keys() >= {"step", "config"}:
        raise ValueError("not a checkpoint")
    if metadata.get("checksum", "") not in ("", checksum(tensors, metadata)):  # older ones have none
        raise ValueError("the checksum does not match")
    return int(metadata["step"]), json.loads(metadata["config"]), tensors


def goes_on(out: Path) -> bool:
    """Whether a run has not come to its end, be it that it had before, with fewer steps."""
    if not (out / "run.json").is_file():
        return False
    if not (out / "config.json").is_file():
        return True
    found, run = checkpoint_files(out), read_json(out / "run.json")
    try:
        return bool(found) and int(found[-1].stem.removeprefix("step-")) < run["training"]["steps"]
    except (KeyError, TypeError, ValueError):  # whatever it is, it is no run of ours
        return False


def newest_weights(out: Path) -> tuple[int, dict, dict[str, Tensor]]:
    """Step, configuration and weights, averaged if they are, of the newest checkpoint that is whole."""
    for path in reversed(checkpoint_files(out)):
        with contextlib.suppress(SafetensorError, OSError, ValueError):
            step, config, tensors = read_checkpoint(path)
            weights = {name.removeprefix("weights/"): t for name, t in tensors.items() if name.startswith("weights/")}
            average = {name.removeprefix("average/"): t for name, t in tensors.items() if name.startswith("average/")}
            return step, config, weights | average
    told = f"a run without a whole checkpoint yet; if it was stopped, go on with `vmd train --out {out} --resume`"
    raise InvalidInput(f"{out}: {told}")


def load_newest_checkpoint(
    out: Path,
    parameters: Mapping[str, Tensor],
    average: dict[str, Tensor] | None,
    optimizer: Optimizers,
    config: dict,
) -> tuple[int, str]:
    """Restore the newest checkpoint that is whole; its step and where the run goes on from, in words.

    The step is 0 if the run was stopped before its first checkpoint.
    """
    if not checkpoint_files(out) and (out / "run.json").exists():
        return 0, "from the start: the run was stopped before its first checkpoint"
    damaged = []
    for path in reversed(checkpoint_files(out)):
        try:
            step, saved, tensors = read_checkpoint(path)
        except (SafetensorError, OSError, ValueError):
            damaged.append(path.name)
            continue
        require_same_config(path, saved, config)
        restore(path, tensors, parameters, average, optimizer)
        return step, f"from step {step}" + (f"; damaged: {', '.join(damaged)}" if damaged else "")
    what = f"only damaged ones: {', '.join(damaged)}" if damaged else "none found"
    raise InvalidInput(f"{out / 'checkpoints'}: expected a checkpoint to resume from, {what}")


def restore(
    path: Path,
    tensors: dict[str, Tensor],
    parameters: Mapping[str, Tensor],
    average: dict[str, Tensor] | None,
    optimizer: Optimizers,
) -> None:
    expected = {f"weights/{name}": p.shape for name, p in parameters.items()}
    expected |= {f"average/{name}": p.shape for name, p in (average or {}).items()}
    for name, p in learning(parameters).items():
        expected |= {f"optimizer/{key}/{name}": shape for key, shape in optimizer.state_shapes(p).items()}
    for name, shape in expected.items():
        saved = tensors.get(name)
        require(saved is not None and saved.shape == shape, f"{path}: holds no {name} of shape {tuple(shape)}")
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(take_shard(tensors[f"weights/{name}"].to(p.device), p))
            if not p.requires_grad:
                continue
            if average is not None:
                average[name].copy_(take_shard(tensors[f"average/{name}"].to(p.device), p))
            state = {key: tensors[f"optimizer/{key}/{name}"].to(p.device) for key in optimizer.state_shapes(p)}
            shards = {key: take_shard(value, p) if value.dim() else value for key, value in state.items()}
            optimizer.set_state(p, shards)


def require_same_config(path: Path, saved: dict, current: dict, free_fields: tuple[str, ...] = FREE_TO_CHANGE) -> None:
    """A resumed run must be the same run; only some fields of training may change."""
    old, new = flatten(with_new_fields(saved)), flatten(current)
    free = {f"training.{name}" for name in free_fields}
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name) and name not in free]
    if changed:
        name = changed[0]
        raise InvalidInput(f"{path}: cannot resume with {name}={new.get(name)!r}: the run has {old.get(name)!r}")
