"""Runs Transformer Engine's Python code without a GPU, with plain torch in place of its compiled half.

The wheel ``transformer_engine`` of the package index is pure Python; its compiled halves are other packages. If that
wheel can be imported, its linears, norms, attention and FP8 and FP4 recipes run on a CPU. Every product is computed in
fp32. A GPU's kernels and streams are not covered.

:func:`without_gpu` switches it on, together with the package's stand-in for CUDA, which has local layers only.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from megatron.schedules.integration.cpu import standin
from tests.support import te_nvfp4, te_quantized

PACKAGE = "transformer_engine"
_COMPILED = Path(__file__).with_name("te_extension.py")
CAPABILITY_VARIABLE = "PIPELINE_STANDIN_CAPABILITY"
"""Compute capability of the GPU that is not there, such as 9.0; FP8 takes 8.9 and MXFP8 takes 10.0."""


def is_here() -> bool:
    """Returns whether the wheel can be imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def capability() -> tuple[int, int]:
    """Compute capability of the CPU stand-in: an A100's, or the value of the environment variable."""
    major, _, minor = os.environ.get(CAPABILITY_VARIABLE, "8.0").partition(".")
    return int(major), int(minor or 0)


def without_gpu() -> None:
    """Has Megatron run on the CPU in this process, with Transformer Engine's Python if that is on the path.

    Call it before Megatron is imported. On a machine with a GPU, or a second time, it does nothing.
    """
    if not standin.needed() or standin.enabled():
        return
    here = is_here()
    if here:
        _import_it()
    standin.enable()
    if here:
        _replace_in_torch()
        version = sys.modules[PACKAGE].__version__
        print(f"Transformer Engine {version}: its own Python, with plain torch in place of its kernels")


def _import_it() -> None:
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its Python then loads no CUDA shared library
    os.environ["NVTE_RELEASE_BUILD"] = os.environ["NVTE_TORCH_COMPILE"] = "0"
    finder = _CompiledHalf()
    sys.meta_path.insert(0, finder)
    try:
        with _optional_packages(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(f"{PACKAGE}.pytorch")
    finally:
        sys.meta_path.remove(finder)


def _replace_in_torch() -> None:
    """Gives Transformer Engine's Python CPU tensors where it requests a GPU, also in a backward."""
    standin.SEE_A_GPU.append(PACKAGE)
    properties = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda *_: _capable(properties())
    torch.cuda.get_device_capability = lambda *_: capability()
    for module in list(sys.modules.values()):
        if str(getattr(module, "__name__", "")).startswith(f"{PACKAGE}.") and hasattr(module, "canonicalize_device"):
            vars(module)["canonicalize_device"] = lambda device=None: torch.device("cpu")
    distributed: Any = sys.modules[f"{PACKAGE}.pytorch.distributed"]
    distributed._get_cuda_rng_state = lambda *_, **__: torch.random.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *_, **__: torch.random.set_rng_state(state)
    distributed.pad_columnwise_scale_inv = te_nvfp4.padded  # a Triton kernel
    for kind in ("MXFP8", "NVFP4"):  # from 2.16 on they move a tensor of the CPU to the GPU and back
        storage = sys.modules.get(f"{PACKAGE}.pytorch.tensor.storage.{kind.lower()}_tensor_storage")
        if storage is not None:
            getattr(storage, f"_From{kind}Func").forward = staticmethod(_dequantized)
    ring: Any = importlib.import_module(f"{PACKAGE}.pytorch.attention.dot_product_attention.context_parallel")
    ring.flash_attn_p2p_communicate = _waited_once(ring.flash_attn_p2p_communicate)
    torch.distributed._coalescing_manager = _one_by_one
    torch.distributed.distributed_c10d._coalescing_manager = _one_by_one
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.is_cuda = property(lambda self: _asked_by_it())  # type: ignore[assignment]
    # A TorchFunctionMode does not work here, because torch disables it in a backward.
    for name in ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like"):
        setattr(torch, name, standin.making_on_cpu(getattr(torch, name)))
    _gather_bytes()


def _capable(properties: Any) -> Any:
    properties.major, properties.minor = capability()
    properties.L2_cache_size, properties.warp_size = 1 << 25, 32
    return properties


def _gather_bytes() -> None:
    """Gathers several tensors in one call as bytes: gloo takes all of them for tensors of the first one's data type.

    Megatron gathers FP8 and bf16 weights in one call.
    """
    groups = torch.distributed.ProcessGroup
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):  # of torch 2.13, and of older ones
        if hasattr(groups, name):
            setattr(groups, name, _of_bytes(getattr(groups, name)))


def _of_bytes(gather: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(group: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
        return gather(group, *([each.view(torch.uint8) for each in tensors] for tensors in (outputs, inputs)), *options)

    return gathered


def _dequantized(ctx: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    return te_quantized.dequantize(tensor, dtype)


class _Done:
    """Handle of communication that has ended, or that ends with the first wait."""

    def __init__(self, work: Any = None) -> None:
        self._work = work

    def wait(self) -> None:
        """Waits once: a second wait for a message of gloo's does not return."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def _waited_once(communicate: Callable[..., list[Any]]) -> Callable[..., list[_Done]]:
    return lambda *args: [_Done(work) for work in communicate(*args)]


@contextmanager
def _one_by_one(*args: Any, **kwargs: Any) -> Iterator[_Done]:
    """Runs collectives one by one that a GPU would join into one, because gloo cannot join them."""
    yield _Done()


def _asked_by_it() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(f"{PACKAGE}.")


class _CompiledHalf(importlib.abc.MetaPathFinder):
    """Makes ``transformer_engine.common`` find ``te_extension.py`` in place of the shared library."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Returns the usual loader of ``transformer_engine.common``, extended to change the module after it has run."""
        if name != f"{PACKAGE}.common":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            module._get_shared_object_file = lambda library: _COMPILED
            module.is_package_installed = lambda package: False  # 2.3 calls pip, which takes seconds
            module.get_te_path = _AnyFolder

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _AnyFolder:
    """Folder in which 2.3 looks for the shared library; every folder contains it."""

    def __truediv__(self, name: str) -> _AnyFolder:
        return self

    def glob(self, pattern: str) -> Iterator[Path]:
        """Yields one file for any pattern."""
        return iter([_COMPILED])


def _dataclass(*args: Any, **settings: Any) -> Any:
    """Replaces Pydantic's data class as far as recipes need it: it ignores unknown arguments."""
    if not args:
        return functools.partial(_dataclass, **settings)
    made: Any = dataclasses.dataclass(*args, **settings)
    init, known = made.__init__, {field.name for field in dataclasses.fields(made)}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        init(self, *args, **{name: value for name, value in kwargs.items() if name in known})

    made.__init__ = __init__
    return made


@contextmanager
def _optional_packages() -> Iterator[None]:
    """Provides empty modules, during the import, for packages that the linears do not use."""
    stood_for: dict[str, Any] = {}
    for name in ("onnx", "onnxscript", "einops"):
        if importlib.util.find_spec(name) is None:
            stood_for[name] = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))
    if importlib.util.find_spec("pydantic") is None:
        package: Any = ModuleType("pydantic")
        classes: Any = ModuleType("pydantic.dataclasses")
        package.dataclasses, classes.dataclass = classes, _dataclass
        stood_for |= {"pydantic": package, "pydantic.dataclasses": classes}
    sys.modules.update(stood_for)
    try:
        yield
    finally:
        for name in stood_for:
            sys.modules.pop(name, None)
