"""What a KV codec costs in quality: perplexity, KL divergence and top-1 agreement against the cache it replaces.

Responsible for scoring windows of a text and for adding scores up. A window is computed several times with the same
weights by the same kernels, side by side, and only K and V differ. Knows neither files nor the command line.

What the kernels read is measured as it runs: K and V are in int8 from the moment they are written, those of the query's
own block as well; by a rule (int4, int3, mixed, or a user's) blocks are written in raw16 and encoded as they leave its
windows. Anything else is emulated: when a block changes, its K and V are replaced by what the codec's readable version
makes of them; the query's own block is as the reference has it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from kvist.codecs import registry
from kvist.codecs.rotated import INT3, INT4, SPAN, RotatedCodec, Rows
from kvist.errors import ConfigError
from kvist.kernels.batch import AttentionBatch
from kvist.kernels.kv_rows import turn, turn_back
from kvist.model.native_decoder import StepSequence
from kvist.precision import LADDER
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena
from kvist.storage.slabs import SlabArena
from kvist.tune.settings import Setting, sink_of
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
"""What can be measured by itself, beside the rules of ``precision.PRESETS``."""
FIRST_RANGE = 2048
"""Positions that figures are told of together; after them as many as are before."""
_SLAB_BLOCKS = 64
"""Blocks of room for what moves between slabs."""

if TYPE_CHECKING:
    Arena = BlockArena | SlabArena
    Emulation = Callable[[Rows, int], "Emulated"]
    """What a codec makes of a block that starts at a position."""
    Parts = dict[int, "Score"]
    """By the first position of a range (``range_start``)."""


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

    def cache(self, name: str, num_blocks: int, transforms: KVTransforms) -> Cache:
        """Return room for a sequence in a setting whose codecs are all ``readable``."""
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


class _RuleCache:
    """Blocks that are written in raw16 and change by a rule."""

    def __init__(self, arena: SlabArena, setting: Setting) -> None:
        self.arena = arena
        self._setting = setting

    def open(self, index: int) -> None:
        """Have a block to write to."""
        self.arena.apply([MemoryOp("allocate", BlockId(index), self.arena.kv_spec.codec)])

    def seal(self, index: int) -> int:
        """Encode what leaves a window."""
        before = self.arena.stats().num_held_rows
        for block, codec in self._setting.changes(index):
            op = MemoryOp("demote", BlockId(block), codec, block_index=block)
            self.arena.apply([op])
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

    def cache(self, name: str, num_blocks: int, transforms: KVTransforms) -> Cache:  # noqa: ARG002
        """Return room for a sequence; see ``Computer``."""
        return _RowCache(_arena(self.spec, name, num_blocks))

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
        self.decoder = decoder

    def cache(self, name: str, num_blocks: int, transforms: KVTransforms) -> Cache:
        """Return room for a sequence; see ``Computer``."""
        setting = Setting.parse(name)
        if setting.rule is None:
            return _RowCache(_arena(self.spec, name, num_blocks))
        kv_spec = block_spec(self.spec, self.reference)
        num_bytes = (num_blocks + _SLAB_BLOCKS) * kv_spec.block_bytes
        arena = SlabArena(kv_spec, setting.codecs, num_bytes, self.decoder.pool, transforms)
        return _RuleCache(arena, setting)

    def logits(
        self, start: int, chunk: tuple[int, ...], tables: Sequence[range], arena: Arena
    ) -> torch.Tensor:
        """Return the scores of some tokens; see ``Computer``. They are overwritten by the next call."""
        sequences = [StepSequence(start, chunk, tuple(table), len(chunk)) for table in tables]
        step = self.decoder.step(sequences, arena)
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


def is_read(setting: Setting, computer: Computer) -> bool:
    """Return whether a model computes with a setting by itself, and it need not be emulated."""
    lossy = set(setting.codecs) - {computer.reference}
    return not setting.layers and bool(lossy) and lossy <= set(computer.readable)


def range_start(position: int) -> int:
    """Return where the range begins that figures of a position are told in: 0, FIRST_RANGE, twice that and so on."""
    start = 0
    while position >= (2 * start or FIRST_RANGE):
        start = 2 * start or FIRST_RANGE
    return start


def range_starts(num_tokens: int) -> list[int]:
    """Return where the ranges of so many positions begin."""
    return sorted({range_start(position) for position in range(0, num_tokens, SPAN)})


def score_window(
    computer: Computer,
    transforms: KVTransforms,
    tokens: Sequence[int],
    names: Sequence[str],
    on_computed: Callable[[int], None],
) -> dict[str, Parts]:
    """Return the score of a text in each setting, by ranges of positions.

    Args:
        computer: The model.
        transforms: Of the model, for the codecs that need them.
        tokens: The text.
        names: Of settings.
        on_computed: Is told, now and then, how many more tokens are done in all of them.
    """
    scores: dict[str, Parts] = {name: defaultdict(Score) for name in names}
    for chunk in side_by_side(computer, transforms, tokens, names, on_computed):
        targets = torch.tensor(tokens[chunk.start + 1 : chunk.start + 1 + SPAN])
        rows = slice(len(targets))
        part = range_start(chunk.start)
        scores[chunk.name][part] += compare(chunk.reference[rows], chunk.logprobs[rows], targets)
        scores[chunk.name][part] += Score(num_held=chunk.num_held)
    return scores


class Chunk(NamedTuple):
    """What comes after each of some tokens, with a codec and without."""

    name: str
    """Of the setting."""
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
    names: Sequence[str],
    on_computed: Callable[[int], None],
) -> Iterator[Chunk]:
    """Compute a text in each setting, SPAN tokens after SPAN tokens; see ``score_window``."""
    settings = [Setting.parse(name) for name in names]
    emulated = [setting for setting in settings if not is_read(setting, computer)]
    num_blocks = -(-len(tokens) // SPAN)
    shared = _arena(computer.spec, computer.reference, (1 + len(emulated)) * num_blocks)
    own = {
        setting.name: computer.cache(setting.name, num_blocks, transforms)
        for setting in settings
        if is_read(setting, computer)
    }
    # As sequences of one batch. The first one stays as it is.
    tables = [range(i * num_blocks, (i + 1) * num_blocks) for i in range(1 + len(emulated))]
    copies = {
        setting.name: _EmulatedBlocks(shared, table, setting, transforms)
        for setting, table in zip(emulated, tables[1:], strict=True)
    }
    for index in range(num_blocks):
        start = index * SPAN
        chunk = tuple(tokens[start : start + SPAN])
        logits = computer.logits(start, chunk, tables, shared)
        reference = logits[0].log_softmax(-1)
        for (name, copy), row in zip(copies.items(), logits[1:], strict=True):
            num_held = copy.seal(index) if len(chunk) == SPAN else 0
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


class _EmulatedBlocks:
    """The blocks of a sequence that change in place, as a setting has it."""

    def __init__(
        self, arena: BlockArena, table: Sequence[int], setting: Setting, transforms: KVTransforms
    ) -> None:
        self._arena, self._table = arena, table
        self._setting = setting
        self._through = {codec: emulation(codec, transforms) for codec in setting.codecs}
        if setting.layers:
            self._through = {setting.name: partial(_through_layers, setting.layers, transforms)}

    def seal(self, index: int) -> int:
        """Take note that a block is complete; return how many values codecs held within their reach."""
        return sum(
            _replace(self._arena, self._table, block, self._through[codec])
            for block, codec in self._setting.changes(index)
        )


def _through_layers(
    layers: Sequence[str], transforms: KVTransforms, rows: Rows, start: int
) -> Emulated:
    """Return what a codec for each layer makes of a block; LADDER[0] leaves a layer as it is."""
    keys, values, num_held = rows.keys.copy(), rows.values.copy(), 0
    by_codec: dict[str, list[int]] = defaultdict(list)
    for layer, codec in enumerate(layers):
        by_codec[codec if start else sink_of(codec)].append(layer)
    by_codec.pop(LADDER[0], None)
    for codec, indices in by_codec.items():
        through = emulation(codec, transforms.of_layers(np.asarray(indices)))
        emulated = through(Rows(rows.keys[indices], rows.values[indices]), start)
        keys[indices], values[indices] = emulated.rows
        num_held += emulated.num_held
    return Emulated(Rows(keys, values), num_held)


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
    return BlockArena(block_spec(spec, codec), num_blocks)


def block_spec(spec: ModelSpec, codec: str) -> KVSpec:
    """Return the shape of a block of SPAN tokens."""
    return KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=SPAN,
        codec=codec,
    )


def _standard_error(mean: float, sum_of_squares: float, count: int) -> float:
    return math.sqrt(max(0.0, sum_of_squares / count - mean * mean) / count)
