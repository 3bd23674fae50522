"""Stand-ins for packages, extensions and `torch.cuda` that let an engine be imported without a GPU.

No engine rule lives here. A package listed as present becomes a module with every attribute. One
listed as absent is not found, even where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from .crashes import mark_stand_in_use
from .meta import StandIn


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _any_schema(*_: Any) -> Any:
    return importlib.import_module("pydantic_core").core_schema.any_schema()


class _ClassMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return Anything(name)

    def __or__(cls, other: object) -> Any:
        return object

    __ror__ = __or__


class AnyClass(metaclass=_ClassMeta):
    """Stands for any class of a stubbed package, also as a base class."""

    __get_pydantic_core_schema__ = classmethod(_any_schema)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return Anything(name)


class Anything:
    """Stands for any object of a stubbed package: callable, a decorator, a number, true."""

    __get_pydantic_core_schema__ = _any_schema

    def __init__(self, name: str = "anything") -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        value = self.__dict__[name] = Anything(name)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type)
        return args[0] if decorates else Anything(self.name)

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (AnyClass,)

    def __iter__(self) -> Iterator[Any]:
        mark_stand_in_use(2)
        return iter(())

    def __len__(self) -> int:
        mark_stand_in_use(2)
        return 0

    def __bool__(self) -> bool:
        return True

    def __index__(self) -> int:
        mark_stand_in_use(2)
        return 1

    def __float__(self) -> float:
        mark_stand_in_use(2)
        return 1.0

    def __or__(self, _: Any) -> Any:
        return object

    def __lt__(self, _: Any) -> bool:
        return False

    def __exit__(self, *_: Any) -> None: ...

    def __enter__(self) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return Anything(self.name)

    __ror__ = __or__
    __int__ = __index__
    __gt__ = __le__ = __ge__ = __lt__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = (
        __mod__
    ) = __getitem__
    __pow__ = __lshift__ = __rshift__ = __and__ = __getitem__

    def __neg__(self) -> Any:
        return self


class _Module(types.ModuleType):
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        is_class = name[:1].isupper() and not name.isupper()
        value: Any = (
            _ClassMeta(name, (AnyClass,), {"__module__": self.__name__})
            if is_class
            else Anything(name)
        )
        setattr(self, name, value)
        return value


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        module.__file__ = "/stub/" + spec.name.replace(".", "/")
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


class StubFinder(importlib.abc.MetaPathFinder):
    """Comes before every other finder."""

    def __init__(self, present_names: set[str], absent_names: set[str]) -> None:
        self.present_names = present_names
        self.absent_names = absent_names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parents = {fullname[:end] for end, char in enumerate(fullname + ".") if char == "."}
        if parents & self.absent_names:
            # importlib.util.find_spec answers None for a package that is not there, an import
            # raises.
            if sys._getframe(2).f_code.co_name == "find_spec":
                return None
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if parents & self.present_names:
            spec = importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)
            spec.origin = "stub"
            return spec
        return None


def import_torch() -> None:
    """Import the parts of torch that look for triton, whatever GPU and engine are asked."""
    for name in (
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "torch._inductor.kernel.flex",
        "torch.utils.flop_counter",
    ):
        importlib.import_module(name)


def install(present_names: set[str], absent_names: set[str]) -> None:
    """Put the stubs in place, after torch and transformers have found (and remembered) that there
    is not triton."""
    import_torch()
    look: Any = importlib.import_module("torch.utils._triton")
    look.has_triton_package()
    look.has_triton()
    probes: Any = importlib.import_module("transformers.utils.import_utils")
    for name, probe in list(vars(probes).items()):
        if name.startswith("is_") and name.endswith("_available"):
            with suppress(Exception):
                probe()
    stand_in(present_names, absent_names)
    triton: Any = importlib.import_module("triton")
    triton.__version__ = "3.7.0"
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << max(0, (n - 1).bit_length())
    backends: Any = importlib.import_module("triton.backends")
    backends.backends = {"nvidia": StandIn(driver=StandIn(is_active=lambda: True))}
    fake_triton()


def fake_triton() -> None:
    """Triton has a driver, for code that checks before it compiles a kernel."""
    runtime: Any = importlib.import_module("triton.runtime")
    limits = {"multiprocessor_count": 80, "max_shared_mem": 101376}
    runtime.driver = StandIn(
        active=StandIn(
            get_current_target=lambda: StandIn(backend="cuda", arch=90, warp_size=32),
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: "cuda",
            utils=StandIn(get_device_properties=lambda *_: limits),
        )
    )


def stand_in(present_names: set[str], absent_names: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Imports of `present_names` give modules that have every attribute, those of `absent_names`
    fail."""
    sys.meta_path.insert(0, StubFinder(present_names, absent_names))


# Shared memory that a block may ask for, bytes; 99 KiB where not listed.
_SHARED_MEMORY_BYTES = {
    (7, 5): 65536,
    (8, 0): 166912,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
}


def _constant_function(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def fake_cuda(
    capability: tuple[int, int], memory_bytes: int, count: int, cuda: str, called: str = "GPU"
) -> None:
    """`torch.cuda` answers for `count` equal GPUs of this capability."""
    torch: Any = importlib.import_module("torch")
    shared_bytes = _SHARED_MEMORY_BYTES.get(capability, 101376)
    properties = StandIn(
        name=called, major=capability[0], minor=capability[1], total_memory=memory_bytes,
        multi_processor_count=80, is_integrated=capability == (12, 1),
        shared_memory_per_block_optin=shared_bytes, gcnArchName="", uuid="GPU-0",
        shared_memory_per_multiprocessor=shared_bytes + 1024, max_threads_per_multi_processor=1536,
        warp_size=32, regs_per_multiprocessor=65536, L2_cache_size=48 << 20,
    )  # fmt: skip
    answers = {
        "is_available": True, "is_initialized": False, "device_count": count, "current_device": 0,
        "set_device": None, "get_device_capability": capability,
        "get_device_properties": properties, "get_device_name": called,
        "get_arch_list": [f"sm_{capability[0]}{capability[1]}"],
        "mem_get_info": (memory_bytes, memory_bytes), "_device_count_nvml": count,
        "is_bf16_supported": capability >= (8, 0), "_lazy_init": None, "current_stream": AnyClass(),
        "default_stream": AnyClass(), "synchronize": None, "empty_cache": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, _constant_function(answer))
    for name in ("Stream", "Event", "CUDAGraph"):
        setattr(torch.cuda, name, _ClassMeta(name, (AnyClass,), {}))
    torch.Event = torch.cuda.Event
    torch.Stream = torch.cuda.Stream
    torch._C._cuda_getDevice = _constant_function(0)
    torch.version.cuda = cuda
    accelerator = {
        "is_available": True, "device_count": count, "current_device_index": 0,
        "current_device_idx": 0, "current_accelerator": torch.device("cuda"),
        "set_device_index": None, "set_device_idx": None, "synchronize": None, "empty_cache": None,
    }  # fmt: skip
    for name, answer in accelerator.items():
        setattr(torch.accelerator, name, _constant_function(answer))


def fake_ops(namespaces: set[str], fakes: dict[str, Callable[..., Any]]) -> None:
    """`torch.ops.NAMESPACE.ANY` exists without the extension that registers it; `fakes` are host
    functions of `_C`."""
    torch: Any = importlib.import_module("torch")
    base: Any = importlib.import_module("torch._ops")._OpNamespace

    class Permissive(base):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if _is_special(name):
                    raise
                self.__dict__[name] = Anything(name)
                return self.__dict__[name]

    for name in namespaces:
        getattr(torch.ops, name).__class__ = Permissive
    register = torch.library.register_fake

    def register_fake(op: Any, func: Any = None, /, **kwargs: Any) -> Any:
        if isinstance(op, str) and op.split("::")[0] in namespaces:
            return func or (lambda f: f)
        return register(op, func, **kwargs) if func else register(op, **kwargs)

    torch.library.register_fake = register_fake
    for name, function in fakes.items():
        setattr(torch.ops._C, name, function)
