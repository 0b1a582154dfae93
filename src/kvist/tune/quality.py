"""What a KV codec costs in quality: perplexity, KL divergence and top-1 agreement against the cache it replaces.

Responsible for scoring windows of a text and for adding scores up. A window is computed several times with the same
weights by the same kernels, side by side, and only K and V differ. Knows neither files nor the command line.

A codec that the kernels read is measured as it runs: K and V are in int8 from the moment they are written, those of the
query's own block as well; a block is encoded in int4 or int3 when it is complete, and before that it is in raw16. Any
other codec is emulated: as soon as a block is complete, its K and V are replaced by what the codec's readable version
makes of them, in all layers; the query's own block is as the reference has it. The block that begins a sequence goes to
SINK_CODEC where the codec takes none (int4, int3).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from kvist.codecs import registry
from kvist.codecs.rotated import INT3, INT4, SPAN, RotatedCodec, Rows
from kvist.errors import ConfigError
from kvist.kernels.batch import AttentionBatch
from kvist.kernels.kv_rows import turn, turn_back
from kvist.model.native_decoder import StepSequence
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena
from kvist.storage.slabs import SlabArena
from kvist.types import BlockId, MemoryOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvist.codecs.base import KVCodec
    from kvist.codecs.transforms import KVTransforms
    from kvist.model.decoder import Decoder
    from kvist.model.native_decoder import NativeDecoder
    from kvist.spec import ModelSpec

ROTATED_CODECS: dict[str, RotatedCodec] = {codec.name: codec for codec in (INT4, INT3)}
CODECS = ("raw16", "int8", *ROTATED_CODECS)
"""What can be measured."""
SINK_CODEC = "int8"
"""Of the block that begins a sequence, beside int4 and int3."""
_SLAB_BLOCKS = 64
"""Blocks of room for what moves between slabs."""

if TYPE_CHECKING:
    Arena = BlockArena | SlabArena
    Emulation = Callable[[Rows, int], "Emulated"]
    """What a codec makes of a block that starts at a position."""


class Emulated(NamedTuple):
    """What comes back from a codec."""

    rows: Rows
    num_held: int = 0
    """Values that were beyond its reach."""


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
    num_held: int = 0
    """Values beyond the codec's reach, held to the nearest that it can say; counted by emulations."""
    generated: int = 0
    """Tokens that the model generated, the most probable one each time."""
    generated_agreed: int = 0
    """Of these, those before the first that it would not have generated with the codec."""
    asked: int = 0
    """Values that were to be retrieved by their keys."""
    retrieved: int = 0
    reference_retrieved: int = 0
    """Without the codec."""

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
        n = max(1, self.positions)
        difference = (self.nll - self.reference_nll) / n
        kl, agreement = self.kl / n, self.agreed / n
        figures: dict[str, float | int] = {
            "positions": self.positions,
            "perplexity": math.exp(self.nll / n),
            "perplexity_delta": math.expm1(difference),
            "perplexity_delta_se": _standard_error(difference, self.squared_difference, n),
            "kl": kl,
            "kl_se": _standard_error(kl, self.squared_kl, n),
            "top1_agreement": agreement,
            "top1_agreement_se": math.sqrt(agreement * (1 - agreement) / n),
            "num_held": self.num_held,
        }
        if self.generated:
            figures["greedy_agreement"] = self.generated_agreed / self.generated
        if self.asked:
            figures["retrieval"] = self.retrieved / self.asked
            figures["retrieval_reference"] = self.reference_retrieved / self.asked
        return figures


class Computer(Protocol):
    """A model that computes, and where it keeps K and V."""

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""
        ...

    @property
    def reference(self) -> str:
        """The codec that others are compared with."""
        ...

    @property
    def readable(self) -> tuple[str, ...]:
        """Lossy codecs that it reads by itself."""
        ...

    def cache(self, codec: str, num_blocks: int, transforms: KVTransforms) -> Cache:
        """Return room for a sequence in a codec of ``readable``."""
        ...

    def logits(
        self, start: int, chunk: tuple[int, ...], tables: Sequence[range], arena: Arena
    ) -> torch.Tensor:
        """Compute the same tokens in several sequences and return (sequences, tokens, V) scores.

        Args:
            start: Position of the first of them.
            chunk: The tokens.
            tables: Blocks of each sequence.
            arena: Where they are; what is before ``start`` is in them.
        """
        ...


class Cache(Protocol):
    """The blocks of one sequence, their ids its indices."""

    @property
    def arena(self) -> Arena:
        """Where they are."""
        ...

    def open(self, index: int) -> None:
        """Be ready for tokens in a block."""
        ...

    def seal(self, index: int) -> int:
        """Take note that a block is complete; return how many values were held within the codec's reach."""
        ...


class _RowCache:
    """Blocks of a codec in which tokens are written."""

    def __init__(self, arena: BlockArena) -> None:
        self.arena = arena

    def open(self, index: int) -> None:
        """Nothing is to be done."""

    def seal(self, index: int) -> int:  # noqa: ARG002
        """Nothing is to be done."""
        return 0


class _SpanCache:
    """Blocks that are written in raw16 and encoded when they are complete."""

    def __init__(self, arena: SlabArena, codec: str) -> None:
        self.arena = arena
        self._codec = codec

    def open(self, index: int) -> None:
        """Have a block to write to."""
        self.arena.apply([MemoryOp("allocate", BlockId(index), self.arena.kv_spec.codec)])

    def seal(self, index: int) -> int:
        """Encode it."""
        before = self.arena.stats().num_held_rows
        codec = self._codec if index else SINK_CODEC
        self.arena.apply([MemoryOp("demote", BlockId(index), codec, block_index=index)])
        return self.arena.stats().num_held_rows - before


class TorchComputer:
    """Torch, with K and V in float32; every lossy codec is emulated.

    Args:
        decoder: The model.
    """

    reference = "float32"
    readable: tuple[str, ...] = ()

    def __init__(self, decoder: Decoder) -> None:
        self.spec = decoder.spec
        self._decoder = decoder

    def cache(self, codec: str, num_blocks: int, transforms: KVTransforms) -> Cache:  # noqa: ARG002
        """Return room for a sequence; see ``Computer``."""
        return _RowCache(_arena(self.spec, codec, num_blocks))

    def logits(
        self, start: int, chunk: tuple[int, ...], tables: Sequence[range], arena: Arena
    ) -> torch.Tensor:
        """Return the scores of some tokens; see ``Computer``."""
        assert isinstance(arena, BlockArena)
        batch = AttentionBatch.from_sequences(
            starts=[start] * len(tables),
            num_tokens=[len(chunk)] * len(tables),
            block_tables=tables,
            block_size=SPAN,
        )
        with torch.inference_mode():
            hidden = self._decoder.forward(torch.tensor(chunk * len(tables)), batch, arena)
            return self._decoder.logits(hidden).view(len(tables), len(chunk), -1)


class NativeComputer:
    """The kernels that serve requests.

    Args:
        decoder: The model.
    """

    reference = "raw16"
    readable: tuple[str, ...] = ("int8", "int4", "int3")

    def __init__(self, decoder: NativeDecoder) -> None:
        self.spec = decoder.spec
        self._decoder = decoder

    def cache(self, codec: str, num_blocks: int, transforms: KVTransforms) -> Cache:
        """Return room for a sequence; see ``Computer``."""
        if codec not in ROTATED_CODECS:
            return _RowCache(_arena(self.spec, codec, num_blocks))
        kv_spec = _kv_spec(self.spec, self.reference)
        num_bytes = (num_blocks + _SLAB_BLOCKS) * kv_spec.block_bytes
        codecs = (self.reference, SINK_CODEC, codec)
        arena = SlabArena(kv_spec, codecs, num_bytes, self._decoder.pool, transforms)
        return _SpanCache(arena, codec)

    def logits(
        self, start: int, chunk: tuple[int, ...], tables: Sequence[range], arena: Arena
    ) -> torch.Tensor:
        """Return the scores of some tokens; see ``Computer``. They are overwritten by the next call."""
        sequences = [StepSequence(start, chunk, tuple(table), len(chunk)) for table in tables]
        step = self._decoder.step(sequences, arena)
        if step.damaged_rows:
            raise ConfigError(
                f"[tune] the model computed K or V that is not finite at position {start + step.damaged_rows[0]}; "
                "check the model"
            )
        rows = len(tables) * len(chunk)
        return torch.from_numpy(step.logits[:rows]).view(len(tables), len(chunk), -1)


def bits_per_value(codec: str, head_dim: int) -> float:
    """Return the bits of a K or V value in a codec, all metadata included."""
    if codec in ROTATED_CODECS:
        return ROTATED_CODECS[codec].bits_per_value(head_dim)
    return registry.get(codec).bits_per_value(head_dim)


def score_window(
    computer: Computer,
    transforms: KVTransforms,
    tokens: Sequence[int],
    codecs: Sequence[str],
    on_computed: Callable[[int], None],
) -> dict[str, Score]:
    """Return the score of a text in each codec.

    Args:
        computer: The model.
        transforms: Of the model, for the codecs that need them.
        tokens: The text.
        codecs: Names.
        on_computed: Is told, now and then, how many more tokens are done in all codecs.
    """
    scores = dict.fromkeys(codecs, Score())
    for chunk in side_by_side(computer, transforms, tokens, codecs, on_computed):
        targets = torch.tensor(tokens[chunk.start + 1 : chunk.start + 1 + SPAN])
        rows = slice(len(targets))
        scores[chunk.codec] += compare(chunk.reference[rows], chunk.logprobs[rows], targets)
        scores[chunk.codec] += Score(num_held=chunk.num_held)
    return scores


class Chunk(NamedTuple):
    """What comes after each of some tokens, with a codec and without."""

    codec: str
    start: int
    """Position of the first of them."""
    reference: torch.Tensor
    """(tokens, V) log-probabilities without the codec."""
    logprobs: torch.Tensor
    """(tokens, V), with it."""
    num_held: int


def side_by_side(
    computer: Computer,
    transforms: KVTransforms,
    tokens: Sequence[int],
    codecs: Sequence[str],
    on_computed: Callable[[int], None],
) -> Iterator[Chunk]:
    """Compute a text in each codec, SPAN tokens after SPAN tokens; see ``score_window``."""
    spec = computer.spec
    emulated = [name for name in codecs if name not in computer.readable]
    through = {name: emulation(name, transforms) for name in emulated}
    sink = {name: _sink(name, transforms) for name in emulated}
    num_blocks = -(-len(tokens) // SPAN)
    shared = _arena(spec, computer.reference, (1 + len(emulated)) * num_blocks)
    own = {
        name: computer.cache(name, num_blocks, transforms)
        for name in codecs
        if name in computer.readable
    }
    # As sequences of one batch. The first one stays as it is.
    tables = [range(i * num_blocks, (i + 1) * num_blocks) for i in range(1 + len(emulated))]
    for index in range(num_blocks):
        start = index * SPAN
        chunk = tuple(tokens[start : start + SPAN])
        logits = computer.logits(start, chunk, tables, shared)
        reference = logits[0].log_softmax(-1)
        for name, table, row in zip(emulated, tables[1:], logits[1:], strict=True):
            num_held = 0
            if len(chunk) == SPAN:
                num_held = _replace(shared, table, index, through[name] if index else sink[name])
            yield Chunk(name, start, reference, row.log_softmax(-1), num_held)
        for name, cache in own.items():
            cache.open(index)
            logprobs = computer.logits(start, chunk, tables[:1], cache.arena)[0].log_softmax(-1)
            num_held = cache.seal(index) if len(chunk) == SPAN else 0
            yield Chunk(name, start, reference, logprobs, num_held)
        on_computed(len(chunk))


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


def emulation(codec: str, transforms: KVTransforms) -> Emulation:
    """Return what a codec makes of a block.

    Raises:
        ConfigError: There is no such codec.
    """
    if codec in ROTATED_CODECS:
        return partial(_through_spans, ROTATED_CODECS[codec], transforms)
    return partial(_through_rows, registry.get(codec))


def _sink(codec: str, transforms: KVTransforms) -> Emulation:
    """Return what becomes of a block that begins a sequence."""
    return emulation(SINK_CODEC if codec in ROTATED_CODECS else codec, transforms)


def _through_spans(
    codec: RotatedCodec, transforms: KVTransforms, rows: Rows, start: int
) -> Emulated:
    encoded = codec.encode(rows, transforms, start)
    return Emulated(codec.decode(encoded.records, transforms), encoded.num_held)


def _through_rows(codec: KVCodec, rows: Rows, start: int) -> Emulated:  # noqa: ARG001
    keys, values = (torch.from_numpy(x) for x in rows)
    stored = codec.encode(turn(keys) if codec.turns_keys else keys)
    keys = codec.decode(stored)
    keys = turn_back(keys) if codec.turns_keys else keys
    return Emulated(Rows(keys.numpy(), codec.decode(codec.encode(values)).numpy()))


def _replace(arena: BlockArena, table: Sequence[int], index: int, through: Emulation) -> int:
    """Put what a codec gives back in the place of a sequence's block; return how many values it held."""
    layers = [arena.layer(layer)[table[index]] for layer in range(arena.kv_spec.num_layers)]
    stored = torch.stack(layers).float()
    emulated = through(Rows(stored[:, 0].numpy(), stored[:, 1].numpy()), index * SPAN)
    for layer, keys, values in zip(layers, *emulated.rows, strict=True):
        layer[0].copy_(torch.from_numpy(keys))
        layer[1].copy_(torch.from_numpy(values))
    return emulated.num_held


def _arena(spec: ModelSpec, codec: str, num_blocks: int) -> BlockArena:
    return BlockArena(_kv_spec(spec, codec), num_blocks)


def _kv_spec(spec: ModelSpec, codec: str) -> KVSpec:
    return KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=SPAN,
        codec=codec,
    )


def _standard_error(mean: float, sum_of_squares: float, count: int) -> float:
    return math.sqrt(max(0.0, sum_of_squares / count - mean * mean) / count)
