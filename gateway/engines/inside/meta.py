"""Models built without memory, weights and other processes, on the meta device, for any rank and
stage."""

from __future__ import annotations

import importlib
import inspect
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .crashes import mark_stand_in_use


def fit(target: Any, /, **kwargs: Any) -> Any:
    """Result of `target` for the `kwargs` that this version's function or dataclass accepts."""
    parameters = inspect.signature(target).parameters
    return target(**{name: value for name, value in kwargs.items() if name in parameters})


class StandIn(types.SimpleNamespace):
    """Stands for an object of the engine, with the attributes that known versions read.

    A missing attribute does not count as a refusal (`crashes.is_of_this_package`).
    """


class _Ranks:
    """A torch process group: rank and size of a `Group` as functions."""

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, _tensors: Any, _options: Any) -> Any:
        """The value of this rank counts as agreed: every stage is asked, and `join_stages`
        takes the least."""
        return StandIn(wait=lambda: None)


class Group:
    """Stands for a group of ranks, seen by one of them: sizes only."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.world_size = size
        self.rank = self.rank_in_group = self.local_rank = rank
        self.first_rank, self.last_rank, self.ranks = 0, size - 1, list(range(size))
        self.is_first_rank = rank == 0
        self.is_last_rank = rank == size - 1
        self.device = importlib.import_module("torch").device("meta")
        self.device_group = self.cpu_group = _Ranks(size, rank)
        self.unique_name = self.group_name = f"group:{size}"

    def size(self) -> int:
        return self.world_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        mark_stand_in_use(2)
        # Engines also ask whether the group has a device communicator.
        absent_attributes = {"device_communicator": None, "use_device_communicator": False}
        return absent_attributes.get(name, _first_tensor)


def _first_tensor(*args: Any, **_: Any) -> Any:
    """The first tensor as it is, for a collective operation of one rank."""
    mark_stand_in_use(2)
    return args[0] if args else None


def meta_mode() -> Any:
    """Within this context device="cuda" means the meta device, and a value read from a meta tensor
    is zero.

    Model classes note values of their weights before these are loaded (slopes, factors of
    activations).
    """
    torch: Any = importlib.import_module("torch")

    def replace_device(value: Any) -> Any:
        cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
        return torch.device("meta") if cuda or type(value) is int else value

    class Meta(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = {
                name: replace_device(value) if name == "device" else value
                for name, value in (kwargs or {}).items()
            }
            name = getattr(function, "__name__", "")
            if name == "cuda":
                return args[0].to("meta")
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False  # only a driver pins memory
            read = ("cpu", "item", "tolist", "numpy")
            if name in read and getattr(args[0], "is_meta", False):
                mark_stand_in_use(4)
                return (
                    args[0]
                    if name == "cpu"
                    else getattr(
                        torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu"), name
                    )()
                )
            if name == "where" and len(args) == 1 and args[0].is_meta:
                # No value is known to hold, as those that are read are zero: maps of experts.
                return (torch.zeros(0, dtype=torch.int64, device="cpu"),) * args[0].dim()
            if name == "to":
                args = tuple(
                    value if isinstance(value, int) else replace_device(value) for value in args
                )
            return function(*args, **kwargs)

    return Meta()


@contextmanager
def write_folder(files: Mapping[str, bytes]) -> Iterator[str]:
    """A model folder that holds only `files`."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, Path(name).name).write_bytes(content)
        yield folder


def join_stages(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One answer from the answers of all stages: all kernels and backends, bytes of the largest
    stage, and the cache of the stage with the most per request, since all keep the same tokens."""
    largest_stage = max(stages, key=lambda stage: int(stage["weights"]))
    caches = [stage["kv"] for stage in stages if stage["kv"] and stage["kv"]["needed"]]
    largest_cache = max(caches, key=lambda kv: kv["needed"][-1][1], default=largest_stage["kv"])
    return {
        **largest_stage,
        "kv": largest_cache,
        "kernels": _sum_rows(stages, "kernels", "count"),
        "attention": _sum_rows(stages, "attention", "layers"),
    }


def _sum_rows(
    stages: Sequence[Mapping[str, Any]], rows: str, counted_field: str
) -> list[dict[str, Any]]:
    """Rows that are alike but for their counts, as one."""
    result: dict[str, dict[str, Any]] = {}
    for row in (row for stage in stages for row in stage[rows]):
        key = str({name: value for name, value in row.items() if name != counted_field})
        if key in result:
            result[key][counted_field] += row[counted_field]
        else:
            result[key] = dict(row)
    return list(result.values())
