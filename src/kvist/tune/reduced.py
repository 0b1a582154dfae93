"""What fewer dimensions of K and V cost, with each codec behind them: ``kvist tune --kv-head-dim``.

Responsible for the measurement alone. Two decoders of the same weights compute the same text, one with whole heads in
the codec that others are compared with, one with reduced heads; the codecs are those of the kernels that serve. Knows
nothing of the command line. Nothing is taken from an earlier measurement: scores of windows are not kept.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvist import plan
from kvist.codecs.rotated import SPAN
from kvist.codecs.transforms import uncalibrated
from kvist.errors import ConfigError
from kvist.kernels import native
from kvist.model.fingerprint import content_fingerprint
from kvist.model.loader import load_decoder
from kvist.model.native_decoder import NativeDecoder
from kvist.model.native_loader import load_native_decoder
from kvist.model.tokenizer import load_tokenizer
from kvist.spec import SPAN_CODEC_BITS
from kvist.tune.calibration import TOKENS, text_digest
from kvist.tune.quality import NativeComputer, Score, TorchComputer, bits_per_value, compare
from kvist.tune.reduction import (
    calibrate_reduction,
    keep_reduction,
    kept_reduction,
    reduced_fingerprint,
)
from kvist.tune.run import cut_windows, obtain_transforms

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvist.codecs.reduction import KVReduction
    from kvist.codecs.transforms import KVTransforms
    from kvist.model.decoder import Decoder
    from kvist.spec import ModelSpec
    from kvist.tune.quality import Computer
    from kvist.tune.run import Measurement, Progress

    Text = tuple[list[int], list[int]]
    """What every sequence of a model begins with, and tokens to learn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """The model with whole heads and with reduced ones."""

    whole: Computer
    reduced: Computer


def measure_reduced(
    measurement: Measurement, kv_head_dim: int, on_progress: Progress
) -> dict[str, Any]:  # Any: JSON values
    """Return the figures of each codec behind reduced heads, as ``kvist tune --json`` prints them.

    Args:
        measurement: What is to be measured; no continuations and no retrieval.
        kv_head_dim: Dimensions of a head that K and V are kept in.
        on_progress: Is told what is being done, how much of it is, and how much there is.

    Raises:
        ConfigError: The text is too short, or the setting cannot work here.
        ModelLoadError: The model cannot be read.

    Side effects: Keeps the reduction and the transforms behind it in ``envvars.tune_folder()``; sets the tensor
        library's thread count for the whole process.
    """
    path, spec = measurement.path, plan.read_spec(measurement.path)
    if measurement.calibration_text is None:
        raise ConfigError(
            "[tune] which dimensions --kv-head-dim leaves out is learnt from text; leave out --no-calibration"
        )
    if kv_head_dim > spec.head_dim:
        raise ConfigError(
            f"[tune] --kv-head-dim must be at most the {spec.head_dim} dimensions of this model's heads, "
            f"received {kv_head_dim}"
        )
    tokenizer = load_tokenizer(path)
    prefix = tokenizer.encode("")
    tokens = tokenizer.encode(measurement.text, add_special_tokens=False)
    windows = cut_windows(measurement, spec, prefix, tokens)
    learnt = tokenizer.encode(measurement.calibration_text, add_special_tokens=False)[:TOKENS]
    hardware = plan.detect_hardware()
    weights = plan.weight_format(measurement.model, spec, "auto", hardware)
    spans = [name for name in measurement.codecs if name in SPAN_CODEC_BITS]
    if spans and weights.plane != "native":
        raise ConfigError(
            f"[tune] {', '.join(spans)} behind --kv-head-dim need the native kernels; leave out of --codecs"
        )
    threads = measurement.model.threads or hardware.cpus
    torch.set_num_threads(threads)
    reduction = _reduction(measurement, spec, (prefix, learnt), kv_head_dim, on_progress)
    transforms = uncalibrated(spec.num_layers, spec.num_kv_heads, kv_head_dim)
    if spans:
        fingerprint = reduced_fingerprint(reduction.fingerprint, reduction)
        transforms = obtain_transforms(
            path, spec, fingerprint, (prefix, learnt), on_progress, reduction
        )
        gc.collect()
    pair = _pair(measurement, spec, weights, threads, reduction)
    scores = dict.fromkeys(measurement.codecs, Score())
    num_done, num_tokens = 0, sum(map(len, windows))

    def on_computed(count: int) -> None:
        nonlocal num_done
        num_done += count
        on_progress("measuring", num_done, num_tokens)

    for window in windows:
        found = score_reduced(
            pair.whole, pair.reduced, transforms, window, measurement.codecs, on_computed
        )
        scores = {name: scores[name] + score for name, score in found.items()}
    return {
        "model": measurement.model.model,
        "fingerprint": reduction.fingerprint,
        "kv_head_dim": kv_head_dim,
        "head_dim": spec.head_dim,
        "reduction": reduction.digest,
        "transforms": transforms.digest,
        "windows": measurement.windows,
        "positions": max(score.positions for score in scores.values()),
        "window_tokens": measurement.window_tokens,
        "weights": weights.kind,
        "plane": weights.plane,
        "calibration_tokens": len(learnt),
        "codecs": [
            {
                "name": name,
                "kernels": weights.plane,
                # For each value of a whole head, so that they can be compared.
                "bits_per_value": bits_per_value(name, kv_head_dim) * kv_head_dim / spec.head_dim,
                **score.summary(),
            }
            for name, score in scores.items()
        ],
    }


def score_reduced(  # two computers of one text
    whole: Computer,
    reduced: Computer,
    transforms: KVTransforms,
    tokens: list[int],
    codecs: tuple[str, ...],
    on_computed: Callable[[int], None],
) -> dict[str, Score]:
    """Return the score of a text in each codec behind reduced heads, against whole ones.

    Args:
        whole: The model, with whole heads.
        reduced: The same with reduced ones.
        transforms: Of the reduced heads, for the codecs that need them.
        tokens: The text.
        codecs: Names.
        on_computed: Is told how many more tokens are done.
    """
    num_blocks = -(-len(tokens) // SPAN)
    tables = [range(num_blocks)]
    reference = whole.cache(whole.reference, num_blocks, transforms)
    caches = {name: reduced.cache(name, num_blocks, transforms) for name in codecs}
    scores = dict.fromkeys(codecs, Score())
    for index in range(num_blocks):
        start = index * SPAN
        chunk = tuple(tokens[start : start + SPAN])
        targets = torch.tensor(tokens[start + 1 : start + 1 + SPAN])
        rows = slice(len(targets))
        expected = whole.logits(start, chunk, tables, reference.arena)[0][rows].log_softmax(-1)
        for name, cache in caches.items():
            cache.open(index)
            logits = reduced.logits(start, chunk, tables, cache.arena)[0][rows]
            scores[name] += compare(expected, logits.log_softmax(-1), targets)
            if len(chunk) == SPAN:
                scores[name] += Score(num_held=cache.seal(index))
        on_computed(len(chunk))
    return scores


def computer_of(decoder: NativeDecoder | Decoder) -> Computer:
    """Return a decoder with room for K and V of the dimensions that it keeps."""
    computer = (
        NativeComputer(decoder) if isinstance(decoder, NativeDecoder) else TorchComputer(decoder)
    )
    # Of the specification it is the sizes of K and V that are read.
    computer.spec = replace(decoder.spec, head_dim=decoder.kv_head_dim)
    return computer


def _reduction(
    measurement: Measurement, spec: ModelSpec, text: Text, kv_head_dim: int, on_progress: Progress
) -> KVReduction:
    """Return the reduction that is kept of the model where it is of this text, otherwise a new one."""
    fingerprint = content_fingerprint(measurement.path, spec)
    kept = kept_reduction(fingerprint, kv_head_dim)
    if kept is not None and kept.text == text_digest(*text):
        return kept
    reduction = calibrate_reduction(
        load_decoder(measurement.path, spec, torch.float32),
        text,
        fingerprint,
        kv_head_dim,
        lambda done, total: on_progress("reducing heads", done, total),
    )
    keep_reduction(reduction)
    gc.collect()
    return reduction


def _pair(
    measurement: Measurement,
    spec: ModelSpec,
    weights: plan.WeightFormat,
    threads: int,
    reduction: KVReduction,
) -> _Pair:
    decoder: NativeDecoder | Decoder
    if weights.plane == "native":
        pool = native.extension().Pool(threads)
        decoder = load_native_decoder(measurement.path, spec, weights.kind, pool)
    else:
        decoder = load_decoder(measurement.path, spec, getattr(torch, weights.kind))
    return _Pair(whole=computer_of(decoder), reduced=computer_of(decoder.reduced(reduction)))
