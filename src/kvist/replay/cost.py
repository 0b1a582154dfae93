"""What a step costs: five prices in place of a model.

Responsible for turning the numbers of a step into time. Knows no requests. Time is a whole number of picoseconds
everywhere in a simulation, so that sums do not depend on the order in which they are made.

    time of a step = step + prefill tokens * prefill_token + (query, key) pairs of the prefill * prefill_pair
                   + decode tokens * decode_token + tokens that decoding attends to * decode_attended

A sequence that computes one position in a step decodes; one that computes more prefills.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

PS_PER_S = 10**12
"""Picoseconds in a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Prices in seconds, each finite and >= 0; step_s is > 0, so that time moves.

    The defaults are of the order of the embedded model (SmolLM2-135M, float32) on two slow CPU cores;
    ``benchmarks/cost_model.py`` measures those of a machine.

    Raises:
        ConfigError: A price is out of range.
    """

    step_s: float = 0.020
    """Of any step."""
    prefill_token_s: float = 0.0030
    """Of a position, in a sequence that computes more than one."""
    prefill_pair_s: float = 2.0e-6
    """Of a position and one of the positions it attends to, in the same."""
    decode_token_s: float = 0.0060
    """Of a sequence that computes one position."""
    decode_attended_s: float = 4.0e-6
    """Of one of the positions that it attends to."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            price = getattr(self, field.name)
            if isinstance(price, bool) or not isinstance(price, (int, float)):
                raise ConfigError(
                    f"[replay] the cost model's {field.name} must be a number, received {price!r}"
                )
            if not (math.isfinite(price) and price >= 0):
                raise ConfigError(
                    f"[replay] the cost model's {field.name} must be >= 0, received {price}"
                )
        if round(self.step_s * PS_PER_S) < 1:
            raise ConfigError(
                f"[replay] the cost model's step_s must be > 0, received {self.step_s}"
            )

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Read the prices from a JSON object; those that are absent keep their defaults.

        Other keys are refused, except that an object with the key ``cost_model`` stands for its value: that is what
        ``benchmarks/cost_model.py`` prints.

        Raises:
            ConfigError: The file cannot be read, is not such an object, or a price is out of range.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"[replay] cannot read the cost model {path}: {error}") from error
        if isinstance(document, dict) and "cost_model" in document:
            document = document["cost_model"]
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(document, dict) or not document.keys() <= set(names):
            raise ConfigError(
                f"[replay] expected {path} to hold a JSON object with keys among {', '.join(names)}, "
                f"received {sorted(document) if isinstance(document, dict) else type(document).__name__}"
            )
        return cls(**document)


class StepPrices:
    """A cost model in picoseconds."""

    __slots__ = ("decode_attended", "decode_token", "prefill_pair", "prefill_token", "step")

    def __init__(self, model: CostModel) -> None:
        self.step = round(model.step_s * PS_PER_S)
        self.prefill_token = round(model.prefill_token_s * PS_PER_S)
        self.prefill_pair = round(model.prefill_pair_s * PS_PER_S)
        self.decode_token = round(model.decode_token_s * PS_PER_S)
        self.decode_attended = round(model.decode_attended_s * PS_PER_S)

    def prefill(self, start: int, num_tokens: int) -> int:
        """Return the share of a sequence that computes positions ``[start, start + num_tokens)``, more than one."""
        num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.prefill_token + num_pairs * self.prefill_pair

    def decode(self, num_sequences: int, num_attended: int) -> int:
        """Return the share of sequences that compute one position each and attend to so many in all."""
        return num_sequences * self.decode_token + num_attended * self.decode_attended

    def alone(
        self, num_cached_tokens: int, num_prompt_tokens: int, num_output_tokens: int, chunk: int
    ) -> int:
        """Return the time of a request that has the engine to itself, O(prompt / chunk)."""
        time = 0
        start = num_cached_tokens
        while start < num_prompt_tokens:
            num_tokens = min(chunk, num_prompt_tokens - start)
            is_decode = num_tokens == 1
            time += self.step
            time += self.decode(1, start + 1) if is_decode else self.prefill(start, num_tokens)
            start += num_tokens
        num_steps = max(0, num_output_tokens - 1)
        attended = num_steps * num_prompt_tokens + num_steps * (num_steps + 1) // 2
        return time + num_steps * self.step + self.decode(num_steps, attended)
