"""A whole measurement: from a model and a text to the figures of each codec.

Responsible for the order of things: tokens, calibration (from its file where there is one for this text), windows (from
the record where they are there), figures. Knows nothing of the command line.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvist import envvars, plan
from kvist.codecs.transforms import load_transforms, save_transforms, uncalibrated
from kvist.errors import ConfigError
from kvist.kernels import native
from kvist.model.fingerprint import content_fingerprint
from kvist.model.loader import load_decoder
from kvist.model.native_loader import load_native_decoder
from kvist.model.tokenizer import load_tokenizer
from kvist.spec import SPAN_TOKENS
from kvist.tune.calibration import TOKENS, calibrate, text_digest
from kvist.tune.quality import (
    CODECS,
    ROTATED_CODECS,
    Computer,
    NativeComputer,
    Score,
    TorchComputer,
    bits_per_value,
    score_window,
)
from kvist.tune.record import ScoreRecord
from kvist.tune.tasks import (
    Continuation,
    Question,
    greedy_score,
    read_questions,
    retrieval_score,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvist.codecs.reduction import KVReduction
    from kvist.codecs.transforms import KVTransforms
    from kvist.config import ModelConfig
    from kvist.spec import ModelSpec

    Progress = Callable[[str, int, int], None]
    """Is told what is being done, how much of it is, and how much there is."""
    Scores = dict[str, Score]

logger = logging.getLogger(__name__)

RECORD_VERSION = 7
"""Of what a score means; a change of a codec's encoder is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What is to be measured."""

    model: ModelConfig
    """Weights and threads; its name is resolved by the caller."""
    path: Path
    """The model's file or folder."""
    text: str
    """What is scored."""
    codecs: tuple[str, ...]
    windows: int
    window_tokens: int
    calibration_text: str | None
    """What the transforms are made from; None: the codecs go without."""
    generated_tokens: int = 0
    """Length of the continuation of each window's first half that is compared; 0: none is."""
    retrieval: tuple[str, ...] = ()
    """Lines of a file of prompts (``tasks.read_questions``)."""
    retrieval_prompts: int = 0
    """How many of them are asked."""
    is_fresh: bool = False
    """Whether windows that have been measured before are measured again."""

    def __post_init__(self) -> None:
        for name in self.codecs:
            if name not in CODECS:
                raise ConfigError(
                    f"[tune] --codecs must be some of {', '.join(CODECS)}, received {name!r}"
                )
        if not self.codecs or len(set(self.codecs)) < len(self.codecs):
            raise ConfigError("[tune] --codecs must name each codec once, and one at least")
        if self.windows < 1:
            raise ConfigError(f"[tune] --windows must be at least 1, received {self.windows}")
        if self.window_tokens < 2 * SPAN_TOKENS or self.window_tokens % SPAN_TOKENS:
            raise ConfigError(
                f"[tune] --window-tokens must be a multiple of {SPAN_TOKENS} and at least {2 * SPAN_TOKENS}, "
                f"received {self.window_tokens}"
            )
        if not 0 <= self.generated_tokens <= self.window_tokens // 2:
            raise ConfigError(
                f"[tune] --generate must be from 0 to half of --window-tokens, received {self.generated_tokens}"
            )
        if self.retrieval and self.retrieval_prompts < 1:
            raise ConfigError(
                f"[tune] --retrieval-prompts must be at least 1, received {self.retrieval_prompts}"
            )


def measure(measurement: Measurement, on_progress: Progress) -> dict[str, Any]:  # Any: JSON values
    """Return the figures of each codec, as ``kvist tune --json`` prints them.

    Raises:
        ConfigError: The text is too short, or the setting cannot work here.
        ModelLoadError: The model cannot be read.

    Side effects: Keeps the calibration and the scores of windows in ``envvars.tune_folder()``; sets the tensor
        library's thread count for the whole process.
    """
    spec = plan.read_spec(measurement.path)
    fingerprint = content_fingerprint(measurement.path, spec)
    tokenizer = load_tokenizer(measurement.path)
    prefix = tokenizer.encode("")
    tokens = tokenizer.encode(measurement.text, add_special_tokens=False)
    windows = cut_windows(measurement, spec, prefix, tokens)
    questions: list[Question] = []
    if measurement.retrieval:
        questions = read_questions(
            measurement.retrieval,
            measurement.retrieval_prompts,
            measurement.window_tokens,
            tokenizer,
        )
    calibration_tokens: list[int] | None = None
    if measurement.calibration_text is not None:
        text = tokenizer.encode(measurement.calibration_text, add_special_tokens=False)
        calibration_tokens = text[:TOKENS]
    threads = measurement.model.threads or plan.detect_hardware().cpus
    torch.set_num_threads(threads)
    transforms = uncalibrated(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    if calibration_tokens is not None and set(measurement.codecs) & set(ROTATED_CODECS):
        transforms = obtain_transforms(
            measurement.path, spec, fingerprint, (prefix, calibration_tokens), on_progress
        )
    hardware = plan.detect_hardware()
    weights = plan.weight_format(measurement.model, spec, "auto", hardware)
    setting = {
        "version": RECORD_VERSION,
        "model": fingerprint,
        "tokens": text_digest((), [token for window in windows for token in window]),
        "window_tokens": measurement.window_tokens,
        "weights": [weights.plane, weights.kind, hardware.isa],
        "transforms": transforms.digest,
    }
    record = ScoreRecord(envvars.tune_folder(), setting)
    if measurement.is_fresh:
        record.clear()
    computer_of = _Lazy(measurement, spec, weights, threads)
    jobs = _jobs(measurement, windows, questions)
    totals = _score(measurement, jobs, transforms, record, computer_of, on_progress)
    readable = NativeComputer.readable if weights.plane == "native" else ()
    return {
        "model": measurement.model.model,
        "fingerprint": fingerprint,
        "transforms": transforms.digest,
        "windows": measurement.windows,
        "positions": max(score.positions for score in totals.values()),
        "window_tokens": measurement.window_tokens,
        "weights": weights.kind,
        "plane": weights.plane,
        "calibration_tokens": len(calibration_tokens or ()) if transforms.is_calibrated else 0,
        "codecs": [
            {
                "name": name,
                "kernels": "native" if name in readable else "emulated",
                "bits_per_value": bits_per_value(name, spec.head_dim),
                **score.summary(),
            }
            for name, score in totals.items()
        ],
    }


def obtain_transforms(  # of what, from what
    path: Path,
    spec: ModelSpec,
    fingerprint: str,
    text: tuple[list[int], list[int]],
    on_progress: Progress,
    reduction: KVReduction | None = None,
) -> KVTransforms:
    """Return a model's transforms: those of its file where it is sound and of this text, otherwise new ones.

    Args:
        path: The model.
        spec: Its specification.
        fingerprint: Its ``content_fingerprint``.
        text: What every sequence of the model begins with, and the tokens that the transforms are to be made from.
        on_progress: Is told how far the calibration is.
        reduction: What keeps the model's heads in fewer dimensions, of which the transforms are to be; the fingerprint
            is then that of ``reduced_fingerprint``. None: nothing does.

    Raises:
        ConfigError: There is too little text.

    Side effects: New transforms replace what is in the model's file in ``envvars.tune_folder()``.
    """
    file = transforms_file(fingerprint)
    prefix, token_ids = text
    if file.exists():
        try:
            transforms = load_transforms(file, fingerprint)
            if transforms.text == text_digest(prefix, token_ids):
                return transforms
            logger.info("[tune] %s is of another text and will be replaced", file)
        except ConfigError as error:
            logger.warning("[tune] %s", error)
    decoder = load_decoder(path, spec, torch.float32)
    transforms = calibrate(
        decoder if reduction is None else decoder.reduced(reduction),
        (prefix, token_ids),
        fingerprint,
        lambda done, total: on_progress("calibrating", done, total),
    )
    try:
        save_transforms(file, transforms)
    except OSError as error:
        logger.warning("[tune] cannot keep the calibration in %s: %s", file, error.strerror)
    return transforms


def transforms_file(fingerprint: str) -> Path:
    """Return where the transforms of a model are kept; the file need not exist."""
    return envvars.tune_folder() / f"{fingerprint[:32]}.transforms.safetensors"


class _Job(NamedTuple):
    """One text in all codecs."""

    what: str
    """Of the bar that shows how far it is."""
    key: str
    """Of its scores in the record, beside the codec."""
    number: int
    compute: Callable[..., Scores]  # of a computer, transforms, the text, codecs and who is told
    text: Any  # what ``compute`` takes
    num_tokens: int


class _Lazy:
    """The model, loaded when the first window has to be computed."""

    def __init__(
        self, measurement: Measurement, spec: ModelSpec, weights: plan.WeightFormat, threads: int
    ) -> None:
        self._measurement, self._spec = measurement, spec
        self._weights, self._threads = weights, threads
        self._computer: Computer | None = None

    def get(self) -> Computer:
        if self._computer is None:
            gc.collect()  # The decoder of a calibration may still be in memory.
            path, spec = self._measurement.path, self._spec
            if self._weights.plane == "native":
                pool = native.extension().Pool(self._threads)
                decoder = load_native_decoder(path, spec, self._weights.kind, pool)
                self._computer = NativeComputer(decoder)
            else:
                dtype = getattr(torch, self._weights.kind)
                self._computer = TorchComputer(load_decoder(path, spec, dtype))
        return self._computer


def _score(
    measurement: Measurement,
    jobs: list[_Job],
    transforms: KVTransforms,
    record: ScoreRecord,
    computer_of: _Lazy,
    on_progress: Progress,
) -> dict[str, Score]:
    """Return the sum of all jobs for each codec, computing those that the record lacks."""
    totals = dict.fromkeys(measurement.codecs, Score())
    sizes, done = Counter[str](), Counter[str]()
    for job in jobs:
        sizes[job.what] += job.num_tokens
    for job in jobs:
        what, end = job.what, done[job.what] + job.num_tokens

        def on_computed(count: int, what: str = what) -> None:
            done[what] += count
            on_progress(what, done[what], sizes[what])

        keys = {name: name + job.key for name in measurement.codecs}
        missing = [name for name, key in keys.items() if record.get(key, job.number) is None]
        if missing:
            scores = job.compute(computer_of.get(), transforms, job.text, missing, on_computed)
            for name, score in scores.items():
                record.put(keys[name], job.number, score)
        on_computed(end - done[what])
        for name, key in keys.items():
            totals[name] += record.get(key, job.number) or Score()
    return totals


def _jobs(
    measurement: Measurement, windows: list[list[int]], questions: list[Question]
) -> list[_Job]:
    jobs = [
        _Job("measuring", "", index, score_window, tokens, len(tokens))
        for index, tokens in enumerate(windows)
    ]
    count = measurement.generated_tokens
    for index, tokens in enumerate(windows if count else ()):
        prompt = tuple(tokens[: len(tokens) // 2])
        text = Continuation(prompt=prompt, num_tokens=count)
        key = f" generating {count}"
        jobs.append(_Job("generating", key, index, greedy_score, text, len(prompt) + count))
    for index, question in enumerate(questions):
        key, size = f" retrieving {question.digest}", len(question.tokens)
        jobs.append(_Job("retrieving", key, index, retrieval_score, question, size))
    return jobs


def cut_windows(
    measurement: Measurement, spec: ModelSpec, prefix: list[int], tokens: list[int]
) -> list[list[int]]:
    """Return the windows: what every sequence of the model begins with, then tokens of the text, none twice."""
    if measurement.window_tokens > spec.max_context_len:
        raise ConfigError(
            f"[tune] --window-tokens must be at most {spec.max_context_len} for this model, "
            f"received {measurement.window_tokens}"
        )
    size = measurement.window_tokens - len(prefix)
    if len(tokens) < measurement.windows * size:
        raise ConfigError(
            f"[tune] --text has {len(tokens)} tokens, and {measurement.windows} windows of "
            f"{size} need {measurement.windows * size}; lower --windows or --window-tokens"
        )
    return [prefix + tokens[i * size : (i + 1) * size] for i in range(measurement.windows)]
