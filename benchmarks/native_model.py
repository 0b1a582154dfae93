"""The model that benchmarks of the native plane step themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist import plan as planning
from kvist.config import EngineConfig
from kvist.engine.build import load_model, model_fingerprint
from kvist.errors import KernelUnavailable
from kvist.model import catalog
from kvist.model.native_decoder import NativeDecoder

if TYPE_CHECKING:
    from pathlib import Path

    from kvist.plan import EnginePlan


def load_native(model: str, weights: str) -> tuple[Path, EnginePlan, NativeDecoder]:
    """Return where a model is, the plan of an engine with it, and its decoder.

    Args:
        model: As ``kvist serve --model``.
        weights: As ``--weights``.

    Raises:
        KernelUnavailable: There are no native kernels here.
    """
    path = catalog.resolve(model).path
    spec = planning.read_spec(path)
    config = EngineConfig.from_options(model=model, weights=weights)
    plan = planning.resolve(config, spec, planning.detect_hardware())
    decoder = load_model(plan, path, spec, model_fingerprint(path, spec))
    if not isinstance(decoder, NativeDecoder):
        raise KernelUnavailable("there are no native kernels here")
    return path, plan, decoder
