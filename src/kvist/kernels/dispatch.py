"""The one place that decides which implementation of a kernel runs.

Responsible for the table of implementations, forcing one by name (tests, bug reports) and counting what ran. Knows
nothing of how a kernel works.

Forcing and counting are process-wide, not per thread: the engine computes on a thread of its own, and a test that
forces an implementation means that thread too.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvist.errors import KernelUnavailable
from kvist.kernels import reference, torch_ops, torch_sdpa

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from kvist.kernels.batch import AttentionBatch
    from kvist.spec import Activation


class _Attention(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...


class _RmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class _Rope(Protocol):
    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...


class _Gate(Protocol):
    def __call__(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor: ...


class _Kernels(NamedTuple):
    attention: _Attention
    rms_norm: _RmsNorm
    rope: _Rope
    gate: _Gate


_IMPLEMENTATIONS = {
    "torch": _Kernels(torch_sdpa.attention, torch_ops.rms_norm, torch_ops.rope, torch_ops.gate),
    "reference": _Kernels(reference.attention, reference.rms_norm, reference.rope, reference.gate),
}
_DEFAULT = "torch"
_selected = _DEFAULT
_calls: Counter[tuple[str, str]] = Counter()


def available() -> tuple[str, ...]:
    """Return the names of the implementations that run on this machine, the default one first."""
    return tuple(_IMPLEMENTATIONS)


def selected() -> str:
    """Return the name of the implementation that runs now."""
    return _selected


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Run every kernel in the named implementation, in all threads, until the block ends.

    Raises:
        KernelUnavailable: No implementation of that name runs on this machine.
    """
    global _selected  # noqa: PLW0603  # process-wide by design, see the module docstring
    if name not in _IMPLEMENTATIONS:
        raise KernelUnavailable(
            f"[kernels] expected one of {', '.join(_IMPLEMENTATIONS)}, received {name!r}"
        )
    previous, _selected = _selected, name
    try:
        yield
    finally:
        _selected = previous


def num_calls(kernel: str, implementation: str) -> int:
    """Return how often an implementation of a kernel has run in this process."""
    return _calls[kernel, implementation]


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return attention of each token over the blocks of its sequence; see ``reference.attention``."""
    _calls["attention", _selected] += 1
    run = _IMPLEMENTATIONS[_selected].attention
    return run(q, kv, batch, scale=scale, window=window, softcap=softcap)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x normalised by its root mean square; see ``reference.rms_norm``."""
    _calls["rms_norm", _selected] += 1
    return _IMPLEMENTATIONS[_selected].rms_norm(x, weight, eps)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x rotated to its positions; see ``reference.rope``."""
    _calls["rope", _selected] += 1
    return _IMPLEMENTATIONS[_selected].rope(x, cos, sin)


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the gated activation of a fused gate-and-up projection; see ``reference.gate``."""
    _calls["gate", _selected] += 1
    return _IMPLEMENTATIONS[_selected].gate(gate_up, activation)
