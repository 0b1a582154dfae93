from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def isas() -> list[str]: ...

def isa() -> str: ...

def force_isa(name: str) -> None: ...

def self_check(name: str, falsify: str = '') -> str:
    """
    Compares an instruction set's kernels with the portable ones: what differs, or nothing. `falsify` changes the results of one part first, for tests.
    """

class Pool:
    def __init__(self, num_threads: int) -> None: ...

    @property
    def num_threads(self) -> int: ...

    def wake(self) -> None:
        """Wakes threads that sleep, since a run is near; returns at once."""

    def check(self, phases: int, items: int) -> int: ...

def linear_layout() -> str:
    """Names how the current instruction set lays packed weights out."""

class PackedLinear:
    def __init__(self, weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], kind: str, group: int, gate: str, pool: Pool) -> None:
        """Packs (N, K) float32 weights for the current instruction set."""

    @staticmethod
    def from_data(num_outputs: int, num_inputs: int, kind: str, group: int, gate: str, data: object) -> PackedLinear:
        """
        Takes bytes that `data` gave under the same layout; keeps the array if it is aligned, else copies.
        """

    @property
    def nbytes(self) -> int: ...

    @property
    def layout(self) -> str: ...

    @property
    def num_outputs(self) -> int: ...

    @property
    def num_inputs(self) -> int: ...

    @property
    def activation_limit(self) -> int: ...

    def data(self) -> Annotated[NDArray[numpy.uint8], dict(writable=False)]:
        """The packed bytes, read-only."""

    def unpack(self) -> object:
        """The values that the packed weights stand for, (N, K) float32."""

def linear(pool: Pool, weights: PackedLinear, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, out: object | None = None) -> object:
    """One linear layer: (T, K) float32 to (T, N), or (T, N / 2) with a gate."""

def time_linear(pool: Pool, matrices: Sequence[PackedLinear], rows: int, repeats: int) -> float:
    """Seconds per call, measured without Python in between."""

def attention(pool: Pool, queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], arena: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], *, codec: str, num_layers: int, layer: int, num_kv_heads: int, block_size: int, query_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], context_lens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], scale: float, window: int = 0, softcap: float = 0.0, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, codecs: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, transforms: KvTransforms | None = None) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None, None))]: ...

def attention_plan_info(*, num_threads: int, num_heads: int, head_dim: int, num_blocks: int, codec: str, num_kv_heads: int, block_size: int, query_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], context_lens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], window: int = 0, repetitions: int = 1, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, codecs: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, transforms: KvTransforms | None = None) -> dict: ...

def time_attention(pool: Pool, queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], arena: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], *, codec: str, num_layers: int, num_kv_heads: int, block_size: int, query_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], context_lens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], scale: float, window: int = 0, softcap: float = 0.0, repetitions: int = 1, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, codecs: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, transforms: KvTransforms | None = None) -> list[float]: ...

def encode_kv(codec: str, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None))]: ...

def encode_kv_keys(codec: str, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None))]: ...

class KvTransforms:
    def __init__(self, mean: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], key_balance: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], value_balance: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], key_metric: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu', writable=False)] | None = None, frequencies: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None) -> None:
        """
        Copies what int4 and int3 know of a model: (L, K, D) float32 each, and for encoders what an error of a key costs, (L, K, D, D) float32, and by how much a position turns each pair of its channels, (L, D / 2) float64. Without these each channel is rounded by itself.
        """

def kv_codecs() -> list:
    """
    Names of the formats of K and V, in the order of their numbers in tables by block id.
    """

def recode_block(pool: Pool, source: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], target: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], *, source_codec: str, target_codec: str, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, num_tokens: int, transforms: KvTransforms | None = None, start: int = 0) -> int:
    """
    Writes the first positions of a block into another one of another codec or the same; all of them into int4 and int3, which need transforms, to be read as well as to be written. K of raw16 and int8 is turned where a block becomes or was int4 or int3. `start` is the position of the block's first token in its sequence, by which a key metric is turned. Returns how many K or V rows, of int4 and int3 turned components, had values beyond the target's range, which were held within it.
    """

def draw_tokens(pool: Pool, logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], draws: Sequence[tuple[int, float, float, int, float, float, int, int]]) -> list[int]:
    """
    A token for each draw: (row, largest logit, temperature, top_k, top_p, min_p, seed, output_index). The largest logit must be finite and no logit of the row NaN.
    """

def uniform_draw(seed: int, output_index: int) -> float:
    """The draw in [0, 1)."""

class Model:
    def __init__(self, shape: dict, ropes: list, layers: list, embedding: object, final_norm: object, head: object) -> None: ...

    def phase_ns(self) -> dict: ...

    def step(self, pool: Pool, arena: object, codec: str, block_size: int, sequences: list, logits: object, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, codecs: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, transforms: KvTransforms | None = None, meanwhile: object | None = None) -> tuple: ...

def measure_ceiling(pool: Pool, what: str, bytes: int = 0, seconds: float = 0.1) -> float:
    """
    Bytes read (`read`, over a buffer of that size) or operations done a second, all threads together.
    """
