"""Triton, imported on first use: lazy kernels, what CI compiles of them, and their selection."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
import functools
import logging
import os
from pathlib import Path
import time
from typing import Any
from typing import Protocol
import weakref

import torch

from flashrt_core.errors import ContractError

FP8_ARCHS = (90, 110, 121)  # of those in ``Variant.archs``, the boards with E4M3
KERNELS_VARIABLE = 'FLASHRT_KERNELS'  # 'torch' selects every reference

_log = logging.getLogger(__name__)
_choices: dict[tuple[str, str], str] = {}
_check_s: dict[tuple[str, str], float] = {}
lazy_kernels: list[LazyKernel] = []


class Watcher(Protocol):
    """Who wants to know of checks as they end: the first compilation of all takes minutes."""

    def kernel_checked(self, name: str) -> None:
        """Take the name of a kernel whose check has ended; on the thread that checked it."""


watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


class LazyKernel:
    """A Triton kernel's Python function; becomes a JITFunction when it is first launched."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn
        self.name = f'{fn.__module__}.{fn.__name__}'
        lazy_kernels.append(self)

    @functools.cached_property
    def jit(self) -> Any:
        """Return the JITFunction; imports Triton."""
        import triton
        import triton.language
        self.fn.__globals__['tl'] = triton.language
        return triton.jit(self.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return the launcher for ``grid``."""
        return self.jit[grid]


def lazy_jit(fn: Callable[..., None]) -> LazyKernel:
    """Decorate a kernel in a module that says ``tl`` without importing it."""
    return LazyKernel(fn)


@dataclass(frozen=True)
class Variant:
    """
    One way a kernel is launched, for compilation without a GPU.

    ``signature`` maps every argument to Triton's type name ('constexpr' for the constants),
    ``constants`` gives those; ``archs`` leaves out what the kernel refuses (FP8 on sm_87).
    """

    kernel: LazyKernel
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    archs: tuple[int, ...] = (87, 90, 110, 121)
    options: Mapping[str, Any] = field(default_factory=dict)


def triton_selected(name: str, device: torch.device, check: Callable[[], bool]) -> bool:
    """
    Return whether the Triton kernel ``name`` is used on ``device``.

    The first call per device runs ``check``, which compares the kernel with its reference; a
    failure of any kind selects the reference and is logged once. Not inside a capture.

    :raises ContractError: the first call came inside a capture.
    """
    key = (name, str(device))
    if key not in _choices:
        if device.type == 'cuda' and torch.cuda.is_current_stream_capturing():
            raise ContractError(
                f'kernel {name!r} was first used inside a capture; run it once before')
        begun = time.perf_counter()
        _choices[key] = _choose(name, device, check)
        if device.type == 'cuda':
            _check_s[key] = time.perf_counter() - begun
            for watcher in list(watchers):
                watcher.kernel_checked(name)
        expected = _choices[key] == 'triton' or device.type != 'cuda'
        level = logging.INFO if expected else logging.WARNING
        _log.log(level, 'kernel %s on %s: %s', name, device, _choices[key])
    return _choices[key] == 'triton'


def _choose(name: str, device: torch.device, check: Callable[[], bool]) -> str:
    if device.type != 'cuda':
        return 'torch: not a CUDA device'
    if os.environ.get(KERNELS_VARIABLE) == 'torch':
        return f'torch: {KERNELS_VARIABLE} asks for it'
    try:
        equal = check()
    except Exception as error:
        return f'torch: the check raised {type(error).__name__}: {error}'
    return 'triton' if equal else 'torch: the check gave other bits than the reference'


def choices() -> dict[str, str]:
    """Return 'triton' or 'torch: reason' for every kernel and device asked so far."""
    return {f'{name} on {device}': choice for (name, device), choice in _choices.items()}


def check_seconds() -> dict[str, float]:
    """Return how long the check of each kernel took on each CUDA device, compilation included."""
    return {f'{name} on {device}': took for (name, device), took in _check_s.items()}


def kernel_cache() -> Path:
    """Return the folder where Triton keeps compiled kernels between processes."""
    named = os.environ.get('TRITON_CACHE_DIR')
    home = Path(os.environ.get('TRITON_HOME') or Path.home())
    return Path(named) if named else home / '.triton' / 'cache'
