"""From a checkpoint on disk to a ``NativeDecoder``: packed before, or packed now.

Responsible for the choice between the two. Knows neither the formats of checkpoints nor how weights are packed.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from kvist.kernels import native
from kvist.model import pack_cache
from kvist.model.loader import iterate_tensors
from kvist.model.native_decoder import NativeDecoder, load_packed, pack_weights
from kvist.spec import GIB, INT4_GROUP

if TYPE_CHECKING:
    from pathlib import Path

    from kvist.model.native_decoder import PackedWeights
    from kvist.spec import ModelSpec

logger = logging.getLogger(__name__)


def load_native_decoder(
    path: Path,
    spec: ModelSpec,
    kind: str,
    pool: Any,  # noqa: ANN401  # native.Pool
    *,
    fingerprint: str | None = None,
) -> NativeDecoder:
    """Return the decoder with its weights in the formats of the native kernels.

    Args:
        path: As ``loader.load_decoder``.
        spec: As ``loader.load_decoder``.
        kind: A key of ``spec.WEIGHT_BITS``.
        pool: The threads that pack, and later compute.
        fingerprint: Identity of the checkpoint, under which packed weights are looked for and kept on disk; None: they
            are packed now and not kept.

    Raises:
        ModelLoadError: As ``loader.load_decoder``.
        KernelUnavailable: There are no native kernels here.
    """
    started = time.perf_counter()
    weights, how = _weights(path, spec, kind, pool, fingerprint)
    logger.info(
        "[loader] %s %.2f GiB of %s weights in %.1f s",
        how,
        weights.num_bytes / GIB,
        kind,
        time.perf_counter() - started,
    )
    return NativeDecoder(spec, weights, pool)


def _weights(
    path: Path,
    spec: ModelSpec,
    kind: str,
    pool: Any,  # noqa: ANN401
    fingerprint: str | None,
) -> tuple[PackedWeights, str]:
    if fingerprint is None:
        return pack_weights(spec, iterate_tensors(path, spec), kind, pool), "packed"
    key = pack_cache.PackKey(
        fingerprint=fingerprint,
        kind=kind,
        group=INT4_GROUP if kind == "int4" else 0,
        layout=native.extension().linear_layout(),
    )
    arrays = pack_cache.find(path, key)
    if arrays is not None:
        try:
            return load_packed(spec, arrays, kind), "read"
        except ValueError as error:
            logger.warning("[loader] packed weights on disk do not fit the model: %s", error)
    weights = pack_weights(spec, iterate_tensors(path, spec), kind, pool)
    pack_cache.keep(path, key, weights.arrays())
    return weights, "packed"
