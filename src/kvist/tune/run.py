"""A whole measurement: from a model and a text to the figures of each codec.

Responsible for the order of things: tokens, calibration (from its file where there is one for this text), windows (from
the record where they are there), layers one by one where that is asked for, times, figures. Knows nothing of the
command line.
"""

from __future__ import annotations

import gc
import logging
import math
from collections import Counter, defaultdict
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
from kvist.precision import LADDER, PRESETS
from kvist.spec import CODEC_BITS, GIB, SPAN_CODEC_BITS, SPAN_TOKENS
from kvist.tune.calibration import TOKENS, calibrate, text_digest
from kvist.tune.layers import LayerCosts, search
from kvist.tune.quality import (
    CODECS,
    FIRST_RANGE,
    Computer,
    NativeComputer,
    Score,
    TorchComputer,
    bits_per_value,
    range_starts,
    score_window,
)
from kvist.tune.record import ScoreRecord
from kvist.tune.settings import Setting, of_layers, single_layer
from kvist.tune.speed import measure_speed, num_sequences
from kvist.tune.tasks import (
    Continuation,
    Question,
    greedy_score,
    read_questions,
    retrieval_score,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvist.codecs.reduction import KVReduction
    from kvist.codecs.transforms import KVTransforms
    from kvist.config import ModelConfig
    from kvist.spec import ModelSpec

    Progress = Callable[[str, int, int], None]
    """Is told what is being done, how much of it is, and how much there is."""
    Scores = dict[str, dict[int, Score]]
    """By setting and range of positions."""
    Document = dict[str, Any]  # Any: JSON values

logger = logging.getLogger(__name__)

RECORD_VERSION = 9
"""Of what a score means; a change of a codec's encoder is one."""
MAX_SIDE_BY_SIDE = 6
"""Settings that are computed together: each needs room for its K and V, and for the scores of all tokens."""
SCORING = "measuring"
"""Of windows, as progress is shown."""
QUICK_WINDOW_TOKENS = 1024
"""A window of that length in each codec takes less than a minute for a model of 135 million weights on two cores."""


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
    """Names of settings (``settings.Setting``), a codec for each layer excepted."""
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
    context: int | None = None
    """Tokens of a request, for what K and V take; None: those of a window."""
    concurrency: int = 8
    """Requests at once, for the same."""
    budget_gib: float | None = None
    """What they may take; None: nobody asks whether they fit."""
    speed_rounds: int = 0
    """Steps of each setting that are timed; 0: none are. Native kernels only."""
    by_layer: bool = False
    """Whether each layer is measured alone, in the codecs named beside rules, and a codec for each searched for."""
    layer_bits: float | None = None
    """What the search may spend on a value, on average; None: it ends where ``max_loss`` is kept."""
    max_loss: float = 0.01
    """What the perplexity may rise by, as a fraction, for that search."""

    @property
    def request_tokens(self) -> int:
        """Tokens of a request."""
        return self.window_tokens if self.context is None else self.context

    @property
    def layer_codecs(self) -> tuple[str, ...]:
        """Codecs out of which one is searched for each layer."""
        return tuple(name for name in self.codecs if name in CODECS and name != LADDER[0])

    def __post_init__(self) -> None:
        for name in self.codecs:
            is_rule = "=" in name and not name.startswith("layers:")
            if name not in CODECS and name not in PRESETS and not is_rule:
                known = ", ".join(dict.fromkeys((*CODECS, *PRESETS)))
                raise ConfigError(f"[tune] --codecs must be some of {known}, received {name!r}")
            Setting.parse(name)  # refuses a rule that is none
        if not self.codecs or len(set(self.codecs)) < len(self.codecs):
            raise ConfigError(
                "[tune] --codecs must name each codec once, --rules each rule, and one at least"
            )
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
        self._check_purpose()

    def _check_purpose(self) -> None:
        if self.request_tokens < 1 or self.concurrency < 1:
            raise ConfigError(
                f"[tune] --context and --concurrency must be at least 1, received {self.request_tokens} and "
                f"{self.concurrency}"
            )
        if self.budget_gib is not None and not 0 < self.budget_gib < math.inf:
            raise ConfigError(f"[tune] --budget-gib must be above 0, received {self.budget_gib:g}")
        if self.layer_bits is not None and not 0 < self.layer_bits < math.inf:
            raise ConfigError(f"[tune] --layer-bits must be above 0, received {self.layer_bits:g}")
        if self.by_layer and not self.layer_codecs:
            raise ConfigError(
                f"[tune] --layers searches among the codecs named, received {', '.join(self.codecs)}; add int4 and "
                "int3 to --codecs"
            )


def measure(measurement: Measurement, on_progress: Progress) -> Document:
    """Return the figures of each setting, as ``kvist tune --json`` prints them.

    Raises:
        ConfigError: The text is too short, or the setting cannot work here.
        ModelLoadError: The model cannot be read.

    Side effects: Keeps the calibration and the scores of windows in ``envvars.tune_folder()``; sets the tensor
        library's thread count for the whole process.
    """
    subject = _subject(measurement, on_progress)
    jobs = _jobs(measurement, subject.windows, subject.questions)
    totals = _score(measurement.codecs, jobs, subject, on_progress)
    document: Document = {
        "model": measurement.model.model,
        "fingerprint": subject.fingerprint,
        "transforms": subject.transforms.digest,
        "windows": measurement.windows,
        "positions": max(_whole(parts).positions for parts in totals.values()),
        "window_tokens": measurement.window_tokens,
        "weights": subject.weights.kind,
        "plane": subject.weights.plane,
        "calibration_tokens": subject.num_calibration_tokens,
        "context": measurement.request_tokens,
        "concurrency": measurement.concurrency,
        "reference": {"name": LADDER[0], **_memory(LADDER[0], measurement, subject)},
        "codecs": [
            {
                "name": name,
                "kernels": "native" if subject.reads(name) else "emulated",
                **_memory(name, measurement, subject),
                **_whole(parts).summary(),
                "by_position": _by_position(parts, measurement.window_tokens),
            }
            for name, parts in totals.items()
        ],
    }
    if measurement.speed_rounds and subject.weights.plane == "native":
        _add_speed(document, measurement, subject, on_progress)
    if measurement.by_layer:
        exact = _exact(measurement, subject)
        document["layers"] = _layers(measurement, exact, jobs, on_progress)
    return document


class _Subject(NamedTuple):
    """What is measured with, once it has been found."""

    spec: ModelSpec
    fingerprint: str
    weights: plan.WeightFormat
    windows: list[list[int]]
    questions: list[Question]
    transforms: KVTransforms
    num_calibration_tokens: int
    record: ScoreRecord
    computer_of: _Lazy

    def reads(self, name: str) -> bool:
        """Whether the kernels that serve compute with a setting."""
        readable = {*NativeComputer.readable, NativeComputer.reference}
        setting = Setting.parse(name)
        is_native = self.weights.plane == "native" and not setting.layers
        return is_native and readable.issuperset(setting.codecs)


def _subject(measurement: Measurement, on_progress: Progress) -> _Subject:
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
    hardware = plan.detect_hardware()
    threads = measurement.model.threads or hardware.cpus
    torch.set_num_threads(threads)
    transforms = uncalibrated(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    needs_them = any(Setting.parse(name).needs_transforms for name in measurement.codecs)
    if calibration_tokens is not None and needs_them:
        transforms = obtain_transforms(
            measurement.path, spec, fingerprint, (prefix, calibration_tokens), on_progress
        )
    weights = plan.weight_format(measurement.model, spec, "auto", hardware)
    return _Subject(
        spec=spec,
        fingerprint=fingerprint,
        weights=weights,
        windows=windows,
        questions=questions,
        transforms=transforms,
        num_calibration_tokens=len(calibration_tokens or ()) if transforms.is_calibrated else 0,
        record=_record(measurement, fingerprint, weights, transforms),
        computer_of=_Lazy(measurement, spec, weights, threads),
    )


def _record(
    measurement: Measurement,
    fingerprint: str,
    weights: plan.WeightFormat,
    transforms: KVTransforms,
) -> ScoreRecord:
    setting = {
        "version": RECORD_VERSION,
        "model": fingerprint,
        "window_tokens": measurement.window_tokens,
        "weights": [weights.plane, weights.kind, plan.detect_hardware().isa],
        "transforms": transforms.digest,
    }
    record = ScoreRecord(envvars.tune_folder(), setting)
    if measurement.is_fresh:
        record.clear()
    return record


def _exact(measurement: Measurement, subject: _Subject) -> _Subject:
    """Return the subject in float32.

    Where activations are rounded to whole numbers, the least change of K or V moves some of them, which costs a
    divergence of about 0.0001: more than int4 in a single layer.
    """
    weights = plan.TORCH_FLOAT32
    if subject.weights == weights:
        return subject
    subject.computer_of.forget()
    return subject._replace(
        weights=weights,
        record=_record(measurement, subject.fingerprint, weights, subject.transforms),
        computer_of=_Lazy(measurement, subject.spec, weights, torch.get_num_threads()),
    )


def _memory(name: str, measurement: Measurement, subject: _Subject) -> Document:
    """Return bits and bytes of a setting; of what no engine keeps, bits only."""
    setting, spec = Setting.parse(name), subject.spec
    if setting.layers:
        bits = [bits_per_value(codec, spec.head_dim) for codec in setting.layers]
        return {"bits_per_value": sum(bits) / len(bits)}
    if setting.rule is None and name not in CODEC_BITS:
        return {"bits_per_value": bits_per_value(name, spec.head_dim)}
    context = measurement.request_tokens
    estimate = plan.memory_estimate(
        spec,
        codec=setting.rule or name,
        weights=subject.weights,
        context=context,
        concurrency=measurement.concurrency,
        block_size=SPAN_TOKENS,
    )
    num_values = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * context
    request_bits = 8 * estimate.request_bytes / num_values
    has_one_codec = setting.rule is None or name in SPAN_CODEC_BITS
    figures: Document = {
        "bits_per_value": bits_per_value(name, spec.head_dim) if has_one_codec else request_bits,
        "request_bits_per_value": request_bits,
        "kv_bytes_per_request": estimate.request_bytes,
        "kv_bytes_total": estimate.kv_bytes,
    }
    if measurement.budget_gib is not None:
        budget = int(measurement.budget_gib * GIB)
        usable = plan.usable_bytes(spec, setting.rule, SPAN_TOKENS, budget)
        figures["fits"] = usable >= estimate.kv_bytes
    return figures


def _by_position(parts: Mapping[int, Score], window_tokens: int) -> list[Document]:
    figures = ("positions", "kl", "kl_se", "perplexity_delta", "perplexity_delta_se")
    rows: list[Document] = []
    for start, score in sorted(parts.items()):
        summary = score.summary()
        end = min(window_tokens, 2 * start or FIRST_RANGE)
        rows.append({"from": start, "to": end, **{name: summary[name] for name in figures}})
    return rows


def _layers(
    measurement: Measurement, subject: _Subject, jobs: list[_Job], on_progress: Progress
) -> Document:
    """Return what each layer costs alone, in the first window, and what a codec for each layer costs together."""
    codecs, spec = measurement.layer_codecs, subject.spec
    names = {
        (codec, layer): single_layer(layer, codec, spec.num_layers)
        for codec in codecs
        for layer in range(spec.num_layers)
    }
    windows = [job for job in jobs if job.what == SCORING]
    first = [windows[0]._replace(what="measuring layers")]
    alone = {
        name: _whole(parts)
        for name, parts in _score(tuple(names.values()), first, subject, on_progress).items()
    }
    sensitivity = {
        codec: [alone[names[codec, layer]].summary() for layer in range(spec.num_layers)]
        for codec in codecs
    }
    costs = LayerCosts(
        kl={codec: [row["kl"] for row in rows] for codec, rows in sensitivity.items()},
        bits={codec: bits_per_value(codec, spec.head_dim) for codec in codecs},
    )
    # Where a model believes its text, a divergence is what the logarithm of the perplexity rises by.
    chosen = search(costs, max_kl=math.log1p(measurement.max_loss), max_bits=measurement.layer_bits)
    uniform = {codec: of_layers([codec] * spec.num_layers) for codec in codecs}
    together = tuple(dict.fromkeys((of_layers(chosen), *uniform.values())))
    whole = [job._replace(what="measuring the allocation") for job in windows]
    scores = {
        name: _whole(parts).summary()
        for name, parts in _score(together, whole, subject, on_progress).items()
    }
    bits = costs.bits_of(chosen)
    return {
        "kernels": "emulated",
        "weights": subject.weights.kind,
        "positions": len(subject.windows[0]) - 1,
        "sensitivity": {
            codec: [{"kl": row["kl"], "kl_se": row["kl_se"]} for row in rows]
            for codec, rows in sensitivity.items()
        },
        "allocation": {
            "codecs": chosen,
            "bits_per_value": bits,
            "kl_predicted": costs.kl_of(chosen),
            "kl_predicted_by_lot": costs.kl_of_any(bits),
            **scores[of_layers(chosen)],
        },
        "uniform": {
            codec: {"bits_per_value": costs.bits[codec], **scores[name]}
            for codec, name in uniform.items()
        },
    }


def _add_speed(
    document: Document, measurement: Measurement, subject: _Subject, on_progress: Progress
) -> None:
    """Put the speed of each setting that the kernels read into the document."""
    computer = subject.computer_of.get()
    assert isinstance(computer, NativeComputer)
    names = [name for name in measurement.codecs if subject.reads(name)]
    context, rounds = measurement.window_tokens, measurement.speed_rounds
    speeds = measure_speed(
        computer.decoder,
        subject.transforms,
        names,
        context,
        rounds,
        lambda done: on_progress("timing", done, rounds),
    )
    document["speed"] = {
        "sequences": num_sequences(computer.decoder, context),
        "context": context,
        "rounds": rounds,
        "threads": computer.decoder.pool.num_threads,
    }
    for codec in (document["reference"], *document["codecs"]):
        if codec["name"] in speeds:
            speed = speeds[codec["name"]]
            codec["decode_tokens_per_s"] = speed.tokens_per_s
            codec["decode_speed_ratio"] = speed.ratio
            codec["attention_ms"] = speed.attention_ms
            if speed.encode_ms is not None:
                codec["encode_ms"] = speed.encode_ms


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
    """One text in all settings."""

    what: str
    """Of the bar that shows how far it is."""
    key: str
    """Of its scores in the record, beside the setting and where a range begins."""
    number: int
    compute: Callable[..., Scores]  # of a computer, transforms, the text, settings and who is told
    text: Any  # what ``compute`` takes
    num_tokens: int
    starts: list[int]
    """Of the ranges that scores are told of."""


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

    def forget(self) -> None:
        """Give the memory back until it is asked for again."""
        self._computer = None


def _score(
    names: tuple[str, ...], jobs: list[_Job], subject: _Subject, on_progress: Progress
) -> Scores:
    """Return the sum of all jobs for each setting, computing those that the record lacks."""
    record = subject.record
    totals: Scores = {name: defaultdict(Score) for name in names}
    sizes, done = Counter[str](), Counter[str]()
    for job in jobs:
        sizes[job.what] += len(names) * job.num_tokens
    for job in jobs:
        what, start = job.what, done[job.what]
        keys = {name: {at: f"{name}{job.key}{_suffix(at)}" for at in job.starts} for name in names}
        missing = [
            name
            for name in names
            if any(record.get(key, job.number) is None for key in keys[name].values())
        ]

        def on_computed(count: int, what: str = what) -> None:
            done[what] += count
            on_progress(what, done[what], sizes[what])

        on_computed((len(names) - len(missing)) * job.num_tokens)
        for first in range(0, len(missing), MAX_SIDE_BY_SIDE):
            group = missing[first : first + MAX_SIDE_BY_SIDE]
            scores = job.compute(
                subject.computer_of.get(),
                subject.transforms,
                job.text,
                group,
                _times(len(group), on_computed),
            )
            for name in group:
                for at, key in keys[name].items():
                    record.put(key, job.number, scores[name][at])
        on_computed(start + len(names) * job.num_tokens - done[what])
        for name in names:
            for at, key in keys[name].items():
                totals[name][at] += record.get(key, job.number) or Score()
    return totals


def _times(count: int, on_computed: Callable[[int], None]) -> Callable[[int], None]:
    return lambda num_tokens: on_computed(count * num_tokens)


def _suffix(start: int) -> str:
    return f" from {start}" if start else ""


def _whole(parts: Mapping[int, Score]) -> Score:
    return sum(parts.values(), start=Score())


def _jobs(
    measurement: Measurement, windows: list[list[int]], questions: list[Question]
) -> list[_Job]:
    # By their contents, so that more windows of the same text go on where fewer have been.
    digests = [text_digest((), tokens)[:16] for tokens in windows]
    jobs = [
        _Job(SCORING, f" of {digest}", index, score_window, tokens, len(tokens), starts)
        for index, (digest, tokens) in enumerate(zip(digests, windows, strict=True))
        for starts in [range_starts(len(tokens))]
    ]
    count = measurement.generated_tokens
    for index, tokens in enumerate(windows if count else ()):
        prompt = tuple(tokens[: len(tokens) // 2])
        text = Continuation(prompt=prompt, num_tokens=count)
        key = f" generating {count} after {digests[index]}"
        compute = _in_one_part(greedy_score)
        jobs.append(_Job("generating", key, index, compute, text, len(prompt) + count, [0]))
    for index, question in enumerate(questions):
        key, size = f" retrieving {question.digest}", len(question.tokens)
        compute = _in_one_part(retrieval_score)
        jobs.append(_Job("retrieving", key, index, compute, question, size, [0]))
    return jobs


def _in_one_part(compute: Callable[..., dict[str, Score]]) -> Callable[..., Scores]:
    def in_one_part(*arguments: Any) -> Scores:  # noqa: ANN401  # passed on
        return {name: {0: score} for name, score in compute(*arguments).items()}

    return in_one_part


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
