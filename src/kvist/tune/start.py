"""What an engine starts with that was measured of its model: a profile, a reduction, and transforms.

Responsible for where they are from: files that the user names; for reductions and
transforms also what is kept of the model, or a
calibration on the text that Kvist brings, which is then kept. Knows no engine.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvist.codecs.transforms import load_transforms, save_transforms, uncalibrated
from kvist.errors import ConfigError
from kvist.model.fingerprint import content_fingerprint
from kvist.model.loader import load_decoder
from kvist.model.tokenizer import load_tokenizer
from kvist.spec import DTYPE_BYTES
from kvist.tune.calibration import TOKENS, calibrate
from kvist.tune.profile import load_profile
from kvist.tune.reduction import (
    calibrate_reduction,
    keep_reduction,
    kept_reduction,
    reduced_fingerprint,
)
from kvist.tune.run import transforms_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvist.codecs.reduction import KVReduction
    from kvist.codecs.transforms import KVTransforms
    from kvist.config import EngineConfig
    from kvist.model.tokenizer import Tokenizer
    from kvist.spec import ModelSpec
    from kvist.tune.profile import KVProfile

    Progress = Callable[[str, int, int], None]
    """Is told what is being done, how much of it is, and how much there is."""

AUTO = "auto"
NONE = "none"
"""Values of ``--kv-transforms`` that are no files."""

_WITHOUT_TRANSFORMS = (
    "for int4 and int3",
    "give a file that kvist tune made elsewhere as --kv-transforms, or --kv-transforms none, at some loss",
)
_WITHOUT_REDUCTION = (
    "for --kv-head-dim",
    "leave it out, or put the file that kvist tune made elsewhere into the same folder here",
)
"""What a calibration is for, and what to do where there is no memory for it."""

logger = logging.getLogger(__name__)


def profile_at_start(
    config: EngineConfig, path: Path, spec: ModelSpec
) -> tuple[EngineConfig, KVProfile | None]:
    """Return the configuration with the codec of the profile that it names, and the profile; None where it names none.

    Args:
        config: What the user asked for.
        path: The model.
        spec: Its specification.

    Raises:
        ConfigError: The file is missing, damaged or of another model, or another option says the codec, too.
    """
    cache = config.cache
    if cache.kv_profile is None:
        return config, None
    if cache.kv_cache_dtype != "auto" or cache.kv_precision is not None:
        raise ConfigError(
            f"[tune] --kv-profile {cache.kv_profile} says in which codec blocks are kept, and so does "
            f"{'--kv-cache-dtype' if cache.kv_precision is None else '--kv-precision'}; give one of them"
        )
    if cache.kv_head_dim is not None:
        raise ConfigError(
            f"[tune] --kv-profile {cache.kv_profile} was measured with K and V of whole heads, received --kv-head-dim "
            f"{cache.kv_head_dim}; leave out one of them, or give the codec as --kv-cache-dtype"
        )
    profile = load_profile(Path(cache.kv_profile), content_fingerprint(path, spec))
    chosen = dataclasses.replace(
        cache, kv_cache_dtype=profile.kv_cache_dtype, kv_precision=profile.kv_precision
    )
    return dataclasses.replace(config, cache=chosen), profile


def reduction_at_start(
    kv_head_dim: int, path: Path, spec: ModelSpec, available_bytes: int, on_progress: Progress
) -> KVReduction:
    """Return how a model's heads are kept in fewer dimensions: what is kept of it, or what is found out now.

    Args:
        kv_head_dim: As ``--kv-head-dim``.
        path: The model.
        spec: Its specification.
        available_bytes: Memory that a calibration may take for the model's weights.
        on_progress: Is told how far a calibration is.

    Raises:
        ConfigError: There is too little memory to calibrate.
        ModelLoadError: The model cannot be read.

    Side effects: As ``transforms_at_start``.
    """
    fingerprint = content_fingerprint(path, spec)
    kept = kept_reduction(fingerprint, kv_head_dim)
    if kept is not None:
        return kept
    logger.warning("[tune] finding out which dimensions of K and V matter least, once")
    tokenizer = load_tokenizer(path)
    decoder = load_decoder(path, spec, _dtype(spec, available_bytes, _WITHOUT_REDUCTION))
    reduction = calibrate_reduction(
        decoder,
        (tokenizer.encode(""), _shipped_tokens(tokenizer)),
        fingerprint,
        kv_head_dim,
        lambda done, total: on_progress(f"reducing heads to {kv_head_dim}", done, total),
    )
    keep_reduction(reduction)
    # What comes next needs the memory.
    del decoder
    gc.collect()
    return reduction


def transforms_at_start(  # of what, from where, with what
    source: str,
    path: Path,
    spec: ModelSpec,
    available_bytes: int,
    on_progress: Progress,
    reduction: KVReduction | None = None,
) -> KVTransforms:
    """Return the transforms of a model.

    Args:
        source: As ``--kv-transforms``.
        path: The model.
        spec: Its specification.
        available_bytes: Memory that a calibration may take for the model's weights.
        on_progress: Is told how far a calibration is.
        reduction: What keeps its heads in fewer dimensions; None: nothing does. Transforms are of what is kept.

    Raises:
        ConfigError: The file is missing, damaged or of another model; or there is too little memory to calibrate.
        ModelLoadError: The model cannot be read.

    Side effects: A calibration is kept where ``kvist tune`` keeps and finds it.
    """
    if source == NONE:
        head_dim = spec.head_dim if reduction is None else reduction.kv_head_dim
        return uncalibrated(spec.num_layers, spec.num_kv_heads, head_dim)
    fingerprint = content_fingerprint(path, spec)
    if reduction is not None:
        fingerprint = reduced_fingerprint(fingerprint, reduction)
    if source != AUTO:
        try:
            return load_transforms(Path(source), fingerprint)
        except ConfigError as error:
            raise ConfigError(
                f"{error} and give it as --kv-transforms, or leave that out"
            ) from error
    file = transforms_file(fingerprint)
    if file.exists():
        try:
            return load_transforms(file, fingerprint)
        except ConfigError as error:
            logger.warning("[tune] %s; calibrating anew", error)
    logger.warning("[tune] learning what int4 and int3 need to know of the model, once")
    tokenizer = load_tokenizer(path)
    decoder = load_decoder(path, spec, _dtype(spec, available_bytes, _WITHOUT_TRANSFORMS))
    transforms = calibrate(
        decoder if reduction is None else decoder.reduced(reduction),
        (tokenizer.encode(""), _shipped_tokens(tokenizer)),
        fingerprint,
        lambda done, total: on_progress("calibrating int4 and int3", done, total),
    )
    # What comes next needs the memory.
    del decoder
    gc.collect()
    try:
        save_transforms(file, transforms)
    except OSError as error:
        logger.warning(
            "[tune] cannot keep the calibration in %s: %s; the next start makes it again",
            file,
            error.strerror,
        )
    return transforms


def _dtype(spec: ModelSpec, available_bytes: int, ways_out: tuple[str, str]) -> torch.dtype:
    """Return the precision in which the weights fit, the best there is."""
    for name in ("float32", "bfloat16"):
        if spec.num_parameters * DTYPE_BYTES[name] <= available_bytes:
            dtype: torch.dtype = getattr(torch, name)
            return dtype
    raise ConfigError(
        f"[tune] a calibration {ways_out[0]} computes with {spec.num_parameters:,} weights of 2 bytes, and "
        f"{available_bytes:,} bytes are available; {ways_out[1]}"
    )


def _shipped_tokens(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(_shipped_text(), add_special_tokens=False)[:TOKENS]


def _shipped_text() -> str:
    # Beside the demonstration, which is the other one that reads it.
    document = resources.files("kvist").joinpath("cli", "demo_document.txt")
    return document.read_text(encoding="utf-8")
