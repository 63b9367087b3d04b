"""The precision of the large products: what a forward pass reads its weights as."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from functools import wraps

from torch import Tensor

from flashrt_core.errors import ConfigError
from flashrt_core.nn import fp8
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.runtime import Backend


def weights_of(c: Pi0Config, b: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the bound tensors by name, quantised weights as such where the config has them."""
    return fp8.Fp8Weights(b) if c.quantised else b


def reading(c: Pi0Config, body: Callable[..., None]) -> Callable[..., None]:
    """Return the body (config, forward, tensors by name, ...) with its weights as ``c`` says."""

    @wraps(body)
    def run(c: Pi0Config, forward: object, b: Mapping[str, Tensor], *rest: object,
            **named: object) -> None:
        body(c, forward, weights_of(c, b), *rest, **named)

    return run if c.quantised else body


def check_precision(c: Pi0Config, backend: Backend) -> None:
    """Verify that the device multiplies in the config's precision.

    :raises ConfigError: it does not.
    """
    if c.quantised and not fp8.selected(backend.device):
        raise ConfigError(
            f"precision is 'fp8' and {backend.device} does not multiply E4M3 as it should (NVIDIA "
            'GPUs do from compute capability 8.9 on); set precision: bf16'
        )
