"""llama.cpp through the C interface that llama-cpp-python binds: parallel sequences and shared prefixes included.

llama-cpp-python's own ``Llama`` object runs one sequence at a time; what is done here is what llama.cpp's server does
with parallel slots. One context for each kind of work, so that each keeps its own prefixes:

    single   one sequence; a prompt reuses the head it shares with the one before
    fanout   one cell pool for all sequences: the prefix is computed once, its cells are given to every sequence, and
             all sequences decode in one batch
    chat     a sequence for each chat, each with its own cells
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp
import numpy as np

MAX_SEQUENCES = 64
NUM_CHATS = 8
BATCH_TOKENS = 2048
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


class Driver:
    """One model and its contexts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        # Kept: the library holds on to the function it calls.
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            settings["weights"].encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {settings['weights']}")
        self._vocabulary_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._contexts: dict[str, Context] = {}

    def describe(self) -> dict[str, Any]:
        """Return versions and settings."""
        return {
            "llama_cpp_python": llama_cpp.__version__,
            "system_info": llama_cpp.llama_print_system_info().decode(),
            "n_ubatch": self._settings.get("ubatch", 512),
            "flash_attention": self._settings.get("flash", "auto"),
            "type_kv": self._settings.get("type_kv", "f16"),
        }

    def generate(
        self, row: str, prompts: list[list[int]], max_tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        """Generate from all prompts at once."""
        kind = "fanout" if len(prompts) > 1 or row == "fanout" else "chat" if row == "chat" else row
        if kind not in self._contexts:
            self._contexts[kind] = self._open(kind)
        context = self._contexts[kind]
        if kind == "fanout":
            return context.generate_shared(prompts, max_tokens)
        return [context.generate_one(prompts[0], max_tokens)]

    def _open(self, kind: str) -> Context:
        settings = self._settings
        num_sequences = {"fanout": MAX_SEQUENCES + 1, "chat": NUM_CHATS}.get(kind, 1)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings["max_context"] * (NUM_CHATS if kind == "chat" else 1)
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = settings.get("ubatch", 512)
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.flash_attn_type = FLASH_ATTENTION[settings.get("flash", "auto")]
        params.kv_unified = kind == "fanout"
        if settings.get("type_kv") == "q8_0":
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_Q8_0
        handle = llama_cpp.llama_init_from_model(self._model, params)
        if not handle:
            raise RuntimeError(f"llama.cpp cannot open a context for {kind}")
        return Context(handle, num_sequences, self._vocabulary_size)


class Context:
    """A KV cache and the tokens that each of its sequences holds."""

    def __init__(self, handle: Any, num_sequences: int, vocabulary_size: int) -> None:
        self._handle = handle
        self._memory = llama_cpp.llama_get_memory(handle)
        self._held: list[list[int]] = [[] for _ in range(num_sequences)]
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._vocabulary_size = vocabulary_size

    def generate_one(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """Generate in the sequence that holds most of the prompt; of those that hold none, in an empty one."""
        sequence = max(
            range(len(self._held)),
            key=lambda index: (common_len(self._held[index], prompt), not self._held[index]),
        )
        self._keep(sequence, min(common_len(self._held[sequence], prompt), len(prompt) - 1))
        (token_id,) = self._advance([(sequence, prompt[len(self._held[sequence]) :])])
        token_ids, times_s = [token_id], [time.perf_counter()]
        while len(token_ids) < max_tokens:
            (token_id,) = self._advance([(sequence, [token_id])])
            token_ids.append(token_id)
            times_s.append(time.perf_counter())
        return token_ids, times_s

    def generate_shared(
        self, prompts: list[list[int]], max_tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        """Generate from prompts that begin alike; sequence 0 keeps what they share."""
        shared = min([common_len(prompts[0], prompt) for prompt in prompts])
        shared = min(shared, min(map(len, prompts)) - 1)
        if len(prompts) == 1:
            shared = max(shared, common_len(self._held[0], prompts[0]))
        num_held = min(common_len(self._held[0], prompts[0]), shared)
        self._keep(0, num_held)
        if num_held < shared:
            self._advance([(0, prompts[0][num_held:shared])])
        sequences = list(range(1, len(prompts) + 1))
        for sequence in sequences:
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, 0, -1)
            self._held[sequence] = list(self._held[0])
        rests = [prompt[len(self._held[0]) :] for prompt in prompts]
        latest = self._advance(list(zip(sequences, rests)))
        outputs: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        while True:
            now_s = time.perf_counter()
            for (token_ids, times_s), token_id in zip(outputs, latest):
                token_ids.append(token_id)
                times_s.append(now_s)
            if len(outputs[0][0]) == max_tokens:
                break
            latest = self._advance([(s, [t]) for s, t in zip(sequences, latest)])
        for sequence in sequences:
            self._keep(sequence, 0)
        return outputs

    def _keep(self, sequence: int, num_tokens: int) -> None:
        """Forget all but the first tokens of a sequence."""
        if num_tokens < len(self._held[sequence]):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, num_tokens, -1)
            del self._held[sequence][num_tokens:]

    def _advance(self, parts: list[tuple[int, list[int]]]) -> list[int]:
        """Compute the tokens of each (sequence, tokens); return the likeliest next token of each."""
        work = [
            (sequence, token_id, position, index == len(token_ids) - 1)
            for sequence, token_ids in parts
            for index, (position, token_id) in enumerate(
                enumerate(token_ids, start=len(self._held[sequence]))
            )
        ]
        latest: dict[int, int] = {}
        for start in range(0, len(work), BATCH_TOKENS):
            batch = self._batch
            piece = work[start : start + BATCH_TOKENS]
            batch.n_tokens = len(piece)
            for index, (sequence, token_id, position, is_last) in enumerate(piece):
                batch.token[index] = token_id
                batch.pos[index] = position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = is_last
            outcome = llama_cpp.llama_decode(self._handle, batch)
            if outcome != 0:
                raise RuntimeError(f"llama_decode returned {outcome}")
            for index, (sequence, _, _, is_last) in enumerate(piece):
                if is_last:
                    logits = llama_cpp.llama_get_logits_ith(self._handle, index)
                    row = np.ctypeslib.as_array(logits, shape=(self._vocabulary_size,))
                    latest[sequence] = int(row.argmax())
        for sequence, token_ids in parts:
            self._held[sequence].extend(token_ids)
        return [latest[sequence] for sequence, _ in parts]


def common_len(left: list[int], right: list[int]) -> int:
    """Return how many leading tokens are equal."""
    length = 0
    for a, b in zip(left, right):
        if a != b:
            break
        length += 1
    return length
