"""Several processes as one: what `torchrun` starts. In a process of its own everything here is the identity.

A step draws the chance of the whole batch in every process and each takes its rows, so that a run is the same run on any
number of processes.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vmd.config import InvalidInput, require
from vmd.masking import Rows

T = TypeVar("T")


def join(device: str) -> None:
    """Meet the other processes that torchrun started. On GPUs each takes its own; `cuda` then means that one."""
    if dist.is_initialized():
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        count = torch.cuda.device_count()
        require(local_rank < count, f"process {local_rank} of this machine: expected fewer than {count}, one for each GPU")
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


def leave() -> None:
    """Nobody leaves while another still talks."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def own_seed(seed: int) -> int:
    """A seed for each process; the first keeps the one given."""
    return seed if rank() == 0 else (seed * 0x9E3779B9 + rank() * 0x85EBCA6B) % 2**62


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def my_rows(total: int) -> Rows:
    """An even share of a batch; `total` must be a multiple of the number of processes."""
    size, each = world_size(), total // world_size()
    require(total % size == 0, f"a batch of {total} rows: expected a multiple of {size}, the number of processes")
    return Rows(rank() * each, (rank() + 1) * each, total)


def require_a_share(count: int, what: str) -> None:
    require(count >= world_size(), f"{count} {what}: expected at least {world_size()}, the number of processes")


def my_share(count: int) -> range:
    """This process's part of `count` things, as even as it can be; contiguous, in the order of ranks."""
    return range(rank() * count // world_size(), (rank() + 1) * count // world_size())


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


class FailedTogether(InvalidInput):
    """What the first process could not do; all processes give up, and it alone says why."""


def by_the_first(action: Callable[[], None]) -> None:
    """The first process does something for all. If it cannot, all fail alike instead of waiting for it."""
    told: list[str | None] = [None]
    if rank() == 0:
        try:
            action()
        except InvalidInput as error:
            if not dist.is_initialized():
                raise
            told = [str(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(told)
    if told[0] is not None:
        raise FailedTogether(told[0])


@contextmanager
def one_after_the_first() -> Iterator[None]:
    """The first process goes through alone, then the others: what it leaves on the disk they find there."""
    if rank() != 0:
        wait_for_all()
    yield
    if rank() == 0:
        wait_for_all()


def mean_of_all(x: Tensor) -> Tensor:
    """The mean over processes that hold equal shares."""
    if not dist.is_initialized():
        return x
    x = x.clone()
    dist.all_reduce(x)
    return x / world_size()


def highest_of_all(number: int) -> int:
    """On the host: it waits for the other processes, but not for the device."""
    if not dist.is_initialized():
        return number
    x = torch.tensor(number)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return int(x)


def gather_lists(mine: list[T]) -> list[T]:
    """All processes' lists one after the other, in every process: tensors on the CPU and numbers."""
    if not dist.is_initialized():
        return mine
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]


# Data parallel, or with every process holding a part of every weight.


def parallel(model: nn.Module, kind: str, *, compiled: bool) -> nn.Module:
    """The module to call in training: the model itself, or the same model kept in step with the other processes'.

    ddp: every process has all weights, gradients are averaged while they are computed.
    fsdp: every process keeps a share of each weight (`fully_shard`), which is put together layer by layer when needed.
    """
    if not dist.is_initialized():
        return model
    device = next(model.parameters()).device
    if kind == "ddp":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            return nn.parallel.DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # masks and tables, the same everywhere
            )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    from vmd.network import Block

    mesh = init_device_mesh(device.type, (world_size(),))
    # Layers that see codes also run to record keys alone; such an output has no gradient, which sharding needs.
    decoder: Any = model.get_submodule("decoder")
    codes = decoder.config.latent.coded
    see_codes = list(decoder.trunk.blocks)[decoder.trunk.first_conditioned :] if codes else []
    for part in model.modules():
        if isinstance(part, Block):
            if compiled:
                part.compile()
            if part not in see_codes:
                fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in ("codes", "encode", "denoise", "gaussian_prior"):  # what diagnostics call
        register_fsdp_forward_method(model, method)
    return model


@contextmanager
def gradients_kept_local(model: nn.Module, on: bool) -> Iterator[None]:
    """Inside, backward passes only add to this process's gradients: all but the last of accumulated ones."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and on:
        with model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(not on)  # type: ignore[operator]
    yield


def local(x: Tensor) -> Tensor:
    """This process's part of a tensor; shares its memory."""
    return x.to_local() if isinstance(x, DTensor) else x


def full(x: Tensor) -> Tensor:
    """The whole of a tensor that processes share. All of them must ask."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def take_shard(whole: Tensor, like: Tensor) -> Tensor:
    """The inverse of `full`: a tensor that is kept as `like` is. Every process must hold the same whole."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def forget_whole_weights(model: nn.Module) -> None:
    """After a pass without gradients whole weights stay behind; changed shards would not be seen by the next pass."""
    if hasattr(model, "reshard"):
        model.reshard()  # type: ignore[operator]


def sum_over_shards(x: Tensor, *, sharded: bool) -> Tensor:
    if sharded:
        dist.all_reduce(x)
    return x


def gather_rows(mine: Tensor) -> Tensor:
    """All processes' rows one after the other, on the CPU if there are several."""
    return mine if not dist.is_initialized() else torch.cat(gather_lists([mine.cpu()]))
