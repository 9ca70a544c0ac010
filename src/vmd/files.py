"""Files: written whole or not at all, read without trusting them. Only JSON, .npy and safetensors; never pickle."""

import contextlib
import json
import os
import platform
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmd.config import InvalidInput, require

if TYPE_CHECKING:
    from torch import Tensor

TOKENIZER_FILE = "tokenizer.json"  # beside the weights of a model of text


def to_path(given: Any, what: str) -> Path:
    """Of what a caller gave: an empty path would be the current folder."""
    good = isinstance(given, (str, os.PathLike)) and str(given).strip() != ""
    require(good, f"{given!r:.60}: expected the path of a folder for {what}")
    return Path(given)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{folder}: cannot create the output folder: {error.strerror}") from None
    require(os.access(folder, os.W_OK), f"{folder}: the output folder is not writable")


@contextlib.contextmanager
def claimed(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder for one run. The system lets go of it when the process ends, however it ends.

    `wait`: until another run is done with it, which may have moved it: then it is made anew.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    here = False
    while not here:
        if wait:
            make_folder(folder)
        try:
            held = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            if wait:  # it was moved just now
                continue
            raise
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise InvalidInput(f"{folder}: another run is writing here: wait for it, or use another folder") from None
            here = not wait or is_still_at(folder, held)
            if here:
                yield
        finally:
            os.close(held)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make a folder and claim it; what is new and stays empty goes again."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    try:
        with claimed(folder):
            yield
    finally:
        for path in new:
            with contextlib.suppress(OSError):  # it holds something
                path.rmdir()


def is_still_at(folder: Path, held: int) -> bool:
    try:
        return os.path.samestat(os.fstat(held), folder.stat())
    except FileNotFoundError:
        return False


def remove_together(paths: list[Path], folder: Path) -> None:
    """All of them or, if one cannot be removed, none. They are in the folder."""
    paths = [path for path in paths if os.path.lexists(path)]
    if not paths:
        return
    moved: list[tuple[Path, Path]] = []
    aside = None
    try:
        aside = Path(tempfile.mkdtemp(prefix=".replaced-", dir=folder))
        for number, path in enumerate(paths):
            path.rename(aside / str(number))
            moved.append((path, aside / str(number)))
    except BaseException as error:
        for path, kept in reversed(moved):
            kept.rename(path)
        if aside is not None:
            aside.rmdir()
        if not isinstance(error, OSError):
            raise
        raise InvalidInput(f"{error.filename}: cannot be replaced: {error.strerror}; nothing was removed") from None
    shutil.rmtree(aside, ignore_errors=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside the target, flush to disk, rename: a reader sees the old file or the new one, never a part.

    Those who write the same file at the same time each write a part of their own; the last one stays.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError):
            raise
        raise InvalidInput(f"{path}: cannot write: {error.strerror}") from None


def read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot read: {error.strerror}") from None


def read_json(path: Path) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput(f"{path}: expected JSON") from None


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """Those of a safetensors file; what was written small as numbers again."""
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        tensors = load_tensors(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path}: cannot read: {error.strerror}") from None
    except (SafetensorError, ValueError):
        raise InvalidInput(f"{path}: truncated or not a safetensors file") from None
    return unpacked(tensors, path)


def write_tensors(path: Path, tensors: "dict[str, Tensor]", small: bool = False) -> None:
    """`small`: matrices with eight bits for a number, a quarter of the size."""
    from safetensors.torch import save as dump_tensors

    tensors = {name: t.detach().cpu() for name, t in tensors.items()}
    tensors = packed(tensors) if small else tensors
    write_atomically(path, dump_tensors({name: t.contiguous() for name, t in tensors.items()}))


SCALE = ":scale"  # of a row of a matrix, whose numbers are -127 ... 127 times it


def packed(tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """Matrices as int8 with a scale for every row, the rest as it is."""
    import torch

    small = {}
    for name, t in tensors.items():
        t = t.float() if t.is_floating_point() else t
        finite = f"{name}: not finite: expected numbers that can be rounded to eight bits"
        require(bool(t.isfinite().all()), finite)
        if t.ndim < 2 or not t.numel() or not t.is_floating_point():
            small[name] = t
            continue
        largest = t.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, largest, 1.0) / 127
        small |= {name: (t / scale).round().to(torch.int8), name + SCALE: scale}
    return small


def unpacked(tensors: "dict[str, Tensor]", path: Path) -> "dict[str, Tensor]":
    import torch

    for name in sorted((name for name in tensors if name + SCALE in tensors), reverse=True):  # a scale of a scale is none
        rows, scale = tensors[name], tensors.pop(name + SCALE)
        kinds = rows.dtype == torch.int8 and scale.dtype == torch.float32
        fits = kinds and rows.ndim > 1 and scale.shape == (*rows.shape[:-1], 1) and bool(scale.isfinite().all())
        require(fits, f"{path}: {name + SCALE}: expected a number for every row of {name}, and eight bits for all in them")
        tensors[name] = rows * scale
    return tensors


def hardware(device: str) -> dict:
    """What a result was made on."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return {"device": device, "name": name, "cpu_threads": torch.get_num_threads()}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
