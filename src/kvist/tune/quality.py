"""What a KV codec costs in quality: perplexity, KL divergence and top-1 agreement against the cache it replaces.

Responsible for scoring windows of a text and for adding scores up. A window is computed twice or more from the same
weights by the same kernels, with K and V of older blocks in each codec; the difference is the codec's alone. Knows
neither files nor the command line.

Two ways to compute:

    native     the kernels that serve requests; K and V are in the codec from the moment they are written. The reference
               is raw16.
    emulated   float32 in torch. A block is encoded and decoded by the codec's reference when it is complete, and a
               query's own block is not. The reference is float32.

Codecs that have native kernels are measured with them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Protocol

import torch

from kvist.codecs import registry
from kvist.codecs.rotated import INT3, INT4, SPAN, RotatedCodec, Rows
from kvist.kernels.batch import AttentionBatch
from kvist.model.native_decoder import StepSequence
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvist.codecs.transforms import KVTransforms
    from kvist.model.decoder import Decoder
    from kvist.model.native_decoder import NativeDecoder
    from kvist.spec import ModelSpec

NATIVE_CODECS = ("int8",)
"""Lossy codecs that the native kernels read."""
ROTATED_CODECS: dict[str, RotatedCodec] = {codec.name: codec for codec in (INT4, INT3)}
CODECS = ("raw16", "int8", *ROTATED_CODECS)
"""What can be measured."""
_CHUNK = 256
"""Tokens of a step of the native kernels."""

Emulation = "Callable[[Rows, bool], Rows | None]"
"""From K and V of a span, and whether it begins a sequence, to what comes back from the codec; None: it stays raw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Sums over positions. Scores of windows add up."""

    positions: int = 0
    agreed: int = 0
    """Positions at which the most probable token is the same."""
    reference_nll: float = 0.0
    """Of the text, without the codec; nats."""
    nll: float = 0.0
    """Of the text, with it."""
    squared_difference: float = 0.0
    """Of the two, squared at each position."""
    kl: float = 0.0
    """Divergence of the distribution with the codec from the one without; nats."""
    squared_kl: float = 0.0
    raw_spans: int = 0
    """Spans that the codec could not hold."""

    def __add__(self, other: Score) -> Score:
        mine, others = asdict(self), asdict(other)
        return Score(**{name: mine[name] + others[name] for name in mine})

    @classmethod
    def from_document(cls, document: Mapping[str, object]) -> Score:
        """Return the score that ``dataclasses.asdict`` gave.

        Raises:
            ValueError: It is none.
        """
        names = {field.name for field in fields(cls)}
        numbers = {k: v for k, v in document.items() if isinstance(v, (int, float))}
        if set(numbers) != names or not all(math.isfinite(x) for x in numbers.values()):
            raise ValueError("it is no score")
        return cls(**numbers)  # type: ignore[arg-type]  # each sum is a number, and that is all they need

    def summary(self) -> dict[str, float | int]:
        """Return the figures of a table; deltas are fractions, standard errors those of a mean over positions."""
        n = self.positions
        difference = (self.nll - self.reference_nll) / n
        kl, agreement = self.kl / n, self.agreed / n
        return {
            "positions": n,
            "perplexity": math.exp(self.nll / n),
            "perplexity_delta": math.expm1(difference),
            "perplexity_delta_se": _standard_error(difference, self.squared_difference, n),
            "kl": kl,
            "kl_se": _standard_error(kl, self.squared_kl, n),
            "top1_agreement": agreement,
            "top1_agreement_se": math.sqrt(agreement * (1 - agreement) / n),
            "raw_spans": self.raw_spans,
        }


class Scorer(Protocol):
    """A way to compute windows."""

    @property
    def kernels(self) -> str:
        """``native`` or ``emulated``."""
        ...

    @property
    def reference(self) -> str:
        """The codec that the others are compared with."""
        ...

    def score(
        self, tokens: Sequence[int], codecs: Sequence[str], on_computed: Callable[[int], None]
    ) -> dict[str, Score]:
        """Return the score of a text in each codec.

        Args:
            tokens: The text, a multiple of SPAN.
            codecs: Names.
            on_computed: Is told, now and then, how many more tokens have been computed in all codecs.
        """
        ...


def bits_per_value(codec: str, head_dim: int, window: int) -> float:
    """Return the bits of a K or V value of a sequence of ``window`` positions, whole spans, all metadata included."""
    if codec not in ROTATED_CODECS:
        return registry.get(codec).bits_per_value(head_dim)
    # The first key of the sequence, 16 bits for each channel.
    return ROTATED_CODECS[codec].bits_per_value(head_dim) + 16 / (2 * window)


class EmulatedScorer:
    """Computes in torch and encodes complete blocks with the codecs' references.

    Args:
        decoder: The model, in float32.
        transforms: Of the model.
    """

    kernels = "emulated"
    reference = "float32"

    def __init__(self, decoder: Decoder, transforms: KVTransforms) -> None:
        self._decoder = decoder
        self._transforms = transforms

    def score(
        self, tokens: Sequence[int], codecs: Sequence[str], on_computed: Callable[[int], None]
    ) -> dict[str, Score]:
        """Return the score of a text in each codec; see ``Scorer``."""
        spec = self._decoder.spec
        emulations = {name: emulation(name, self._transforms) for name in codecs}
        num_blocks, num_sequences = len(tokens) // SPAN, 1 + len(codecs)
        arena = _arena(spec, "float32", num_blocks * num_sequences * SPAN)
        scores = dict.fromkeys(codecs, Score())
        # All codecs side by side, as sequences of one batch. The first one stays as it is.
        tables = [range(i * num_blocks, (i + 1) * num_blocks) for i in range(num_sequences)]
        for index in range(num_blocks):
            start = index * SPAN
            chunk = list(tokens[start : start + SPAN])
            batch = AttentionBatch.from_sequences(
                starts=[start] * num_sequences,
                num_tokens=[SPAN] * num_sequences,
                block_tables=tables,
                block_size=SPAN,
            )
            targets = torch.tensor(tokens[start + 1 : start + 1 + SPAN])
            with torch.inference_mode():
                hidden = self._decoder.forward(torch.tensor(chunk * num_sequences), batch, arena)
                rows = hidden.view(num_sequences, SPAN, -1)[:, : len(targets)]
                reference = self._decoder.logits(rows[0]).log_softmax(-1)
                for i, name in enumerate(codecs, start=1):
                    logits = self._decoder.logits(rows[i])
                    scores[name] += compare(reference, logits.log_softmax(-1), targets)
                    was_kept = _replace(arena, tables[i][index], emulations[name], index == 0)
                    scores[name] += Score(raw_spans=int(not was_kept))
            on_computed(SPAN)
        return scores


class NativeScorer:
    """Computes with the kernels that serve requests.

    Args:
        decoder: The model.
    """

    kernels = "native"
    reference = "raw16"

    def __init__(self, decoder: NativeDecoder) -> None:
        self._decoder = decoder

    def score(
        self, tokens: Sequence[int], codecs: Sequence[str], on_computed: Callable[[int], None]
    ) -> dict[str, Score]:
        """Return the score of a text in each codec; see ``Scorer``."""
        spec = self._decoder.spec
        arenas = {name: _arena(spec, name, len(tokens)) for name in (self.reference, *codecs)}
        scores = dict.fromkeys(codecs, Score())
        for start in range(0, len(tokens), _CHUNK):
            chunk = tuple(tokens[start : start + _CHUNK])
            targets = torch.tensor(tokens[start + 1 : start + 1 + len(chunk)])
            reference = None
            for name, arena in arenas.items():
                table = tuple(range(arena.num_blocks))
                step = self._decoder.step([StepSequence(start, chunk, table, len(chunk))], arena)
                logits = torch.from_numpy(step.logits[: len(targets)]).log_softmax(-1)
                if reference is None:
                    reference = logits
                else:
                    scores[name] += compare(reference, logits, targets)
                    scores[name] += Score(raw_spans=len(step.damaged_rows))
            on_computed(len(chunk))
        return scores


def compare(reference: torch.Tensor, logprobs: torch.Tensor, targets: torch.Tensor) -> Score:
    """Return the score of (T, V) log-probabilities against others, of a text whose next tokens are (T,) ``targets``."""
    before = -reference.gather(1, targets[:, None]).squeeze(1).double()
    after = -logprobs.gather(1, targets[:, None]).squeeze(1).double()
    kl = (reference.exp() * (reference - logprobs)).sum(-1).double()
    return Score(
        positions=len(targets),
        agreed=int((reference.argmax(-1) == logprobs.argmax(-1)).sum()),
        reference_nll=before.sum().item(),
        nll=after.sum().item(),
        squared_difference=(after - before).square().sum().item(),
        kl=kl.sum().item(),
        squared_kl=kl.square().sum().item(),
    )


def emulation(codec: str, transforms: KVTransforms) -> Callable[[Rows, bool], Rows | None]:
    """Return what a codec makes of a span.

    Raises:
        ConfigError: There is no such codec.
    """
    if codec in ROTATED_CODECS:
        rotated = ROTATED_CODECS[codec]

        def through_span(rows: Rows, begins_sequence: bool) -> Rows | None:  # noqa: FBT001
            span = rotated.encode(rows, transforms, begins_sequence=begins_sequence)
            return None if span is None else rotated.decode(span, transforms)

        return through_span
    by_row = registry.get(codec)

    def through_rows(rows: Rows, begins_sequence: bool) -> Rows | None:  # noqa: ARG001, FBT001
        keys, values = (by_row.decode(by_row.encode(torch.from_numpy(x))) for x in rows)
        return Rows(keys.numpy(), values.numpy())

    return through_rows


def _replace(
    arena: BlockArena,
    block_id: int,
    through: Callable[[Rows, bool], Rows | None],
    begins_sequence: bool,  # noqa: FBT001
) -> bool:
    """Put what a codec gives back in the place of a block; False when it takes no such block."""
    layers = range(arena.kv_spec.num_layers)
    stored = torch.stack([arena.layer(index)[block_id] for index in layers])
    rows = through(Rows(stored[:, 0].numpy(), stored[:, 1].numpy()), begins_sequence)
    if rows is None:
        return False
    keys, values = (torch.from_numpy(x) for x in rows)
    for index in layers:
        arena.layer(index)[block_id, 0].copy_(keys[index])
        arena.layer(index)[block_id, 1].copy_(values[index])
    return True


def _arena(spec: ModelSpec, codec: str, num_tokens: int) -> BlockArena:
    kv_spec = KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=SPAN,
        codec=codec,
    )
    return BlockArena(kv_spec, kv_spec.num_blocks_for(num_tokens))


def _standard_error(mean: float, sum_of_squares: float, count: int) -> float:
    return math.sqrt(max(0.0, sum_of_squares / count - mean * mean) / count)
