"""Small tokenisers trained on the spot, in both file formats, and SentencePiece's algorithm written plainly.

Responsible for giving differential tests the same vocabulary as tokenizer.json and as GGUF metadata.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's 1234 years old.",
    "She said: \"I'll be there at 12:30 — don't wait!\" They'd waited 100000 minutes already.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 22), add(333, 4444))\n",
    "Ein Kälteeinbruch überraschte die Straßenbahnfahrer; naïve café, déjà vu.",
    "漢字とかなが混ざった文章です。これは試験です。한국어 문장도 있습니다.",
    "Emoji 😀😃 and 👩‍👩‍👧‍👦 and flags 🇸🇪, combining e\u0301 a\u0308.",
    "  leading spaces\tand\ttabs   and trailing   \n\n",
] * 3
"""Trained on, and encoded in tests."""

SAMPLES = [
    *CORPUS[:7],
    "",
    " ",
    "a",
    "Hello world",
    "  two leading spaces 7 8",
    "1234567890 12,345.67",
    "x" * 300,
    "the dog " * 60,
    "\n\n\nline\n\nline  \n",
    "don't DON'T we'LL",
    "unseen: Ωμέγα привет שלום ไทย \x00\x7f",
    "tail <",
]


@dataclass(frozen=True)
class TinyTokenizer:
    """One vocabulary in two formats."""

    backend: Tokenizer
    metadata: dict[str, Any]
    """As in a GGUF file."""
    config: dict[str, Any]
    """tokenizer_config.json."""

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config), encoding="utf-8")
        return folder


def byte_level(
    pre: str, splits: list[str], *, normalizer: Any = None, ignore_merges: bool = False
) -> TinyTokenizer:
    """Train a GPT-2-like tokeniser whose texts are cut by ``splits``; ``pre`` is the name GGUF files give them."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    state = json.loads(backend.to_str())["model"]
    size = backend.get_vocab_size()
    pieces = [backend.id_to_token(i) for i in range(size)]
    types = [3 if piece in special else 4 if piece == "<tool_call>" else 1 for piece in pieces]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["merges"]],
        "tokenizer.ggml.bos_token_id": pieces.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": pieces.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
    }
    return TinyTokenizer(backend, metadata, config)


def sentencepiece(*, has_prefix: bool) -> TinyTokenizer:
    """Train a Llama-2-like tokeniser: BPE over whole texts, scores, byte fallback; without prefix, Gemma-like."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=[])
    )
    ordinary = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    # As SentencePiece lays vocabularies out: control, bytes, merged pieces (best score first), single characters.
    merged = [piece for piece in ordinary if len(piece) > 1]
    single = [piece for piece in ordinary if len(piece) == 1]
    if "▁" not in single:
        single.append("▁")
    control = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*control, *byte_pieces, *merged, *single, "<start_of_image>"]
    first = len(control) + 256
    scores = [0.0] * first + [-float(i) for i in range(len(merged))] + [-1e6] * (len(single) + 1)
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(single)) + [4]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }
    # Each token once per way to join it, in the order of scores: what converters write into tokenizer.json.
    known = {*merged, *single}
    merges = [
        (piece[:border], piece[border:])
        for piece in merged
        for border in range(len(piece) - 1, 0, -1)
        if piece[:border] in known and piece[border:] in known
    ]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if has_prefix else replace
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if has_prefix else steps
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken("<start_of_image>", special=False, normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    return TinyTokenizer(backend, metadata, config)


def encode_sentencepiece_plainly(text: str, metadata: dict[str, Any]) -> list[int]:
    """Return the ids of a text without control tokens: join the best-scored pair until none is left.

    Source: Sennrich et al. (2016) as SentencePiece does it, by scores; ties go to the left.
    """
    pieces = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    ids = {piece: i for i, piece in enumerate(pieces) if types[i] == 1}
    if text and metadata["tokenizer.ggml.add_space_prefix"]:
        text = " " + text
    symbols = list(text.replace(" ", "▁"))
    scores = metadata["tokenizer.ggml.scores"]

    def score(index: int) -> float:
        joined = ids.get(symbols[index] + symbols[index + 1])
        return -math.inf if joined is None else scores[joined]

    while len(symbols) > 1:
        best = max(range(len(symbols) - 1), key=lambda index: (score(index), -index))
        if score(best) == -math.inf:
            break
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
    result = []
    for symbol in symbols:
        if symbol in ids:
            result.append(ids[symbol])
        else:
            result += [pieces.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return result
