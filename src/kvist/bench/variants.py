"""The settings in which each peer is measured: its best ones, so that a ratio is against what a user could have.

Responsible for turning ``--peer NAME=WHERE`` into peers to start: which driver, which weights, which options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvist.bench.peers import DriverPeer, DriverSettings, ServerPeer
from kvist.bench.reference import reference_settings
from kvist.bench.weights import identity, replacing, requantised
from kvist.envvars import bench_folder
from kvist.errors import BenchError


@dataclass(frozen=True, slots=True)
class Variant:
    """One setting of a peer."""

    weights: str
    """``file`` as the model is, ``folder`` as transformers writes one, or a kind that ``requantised`` makes."""
    options: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON values
    """For the driver."""


VARIANTS: dict[str, dict[str, Variant]] = {
    "openvino": {"q8_0": Variant("q8_0")},
    "llamacpp": {"q8_0": Variant("q8_0"), "q4_0": Variant("q4_0")},
    "vllm": {
        "f32": Variant("folder"),
        "bf16": Variant("folder", {"dtype": "bfloat16"}),
        "f32-compiled": Variant("folder", {"eager": False}),
    },
    "transformers": {"f32": Variant("file")},
}
"""By driver. Each is a peer of its own; ``--peer NAME:VARIANT=...`` asks for one of them."""

ENVIRONMENT = {
    # One process, its threads where the system puts them.
    "vllm": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
}
"""For drivers whose libraries are told things by no other way."""


@dataclass(frozen=True, slots=True)
class PeerOption:
    """One ``--peer``."""

    name: str
    variant: str | None
    """None: all of them. With a slash: a path of weights in the peer's own format."""
    where: str
    """Interpreter, or URL of a server."""

    @classmethod
    def parse(cls, text: str) -> PeerOption:
        """Read ``NAME=URL``, ``NAME=PYTHON`` or ``NAME:VARIANT=PYTHON``.

        Raises:
            BenchError: It is none of these, or names no known peer or variant.
        """
        names, separator, where = text.partition("=")
        name, _, variant = names.partition(":")
        option = cls(name, variant or None, where)
        if not (separator and name and where):
            raise BenchError(
                f"[bench] --peer must be NAME=PYTHON or NAME=http://HOST:PORT, received {text!r}"
            )
        if option.is_server:
            return option
        if name not in VARIANTS:
            raise BenchError(
                f"[bench] --peer {name} is not known here: expected one of {', '.join(VARIANTS)}, "
                "or any name with the URL of a server"
            )
        if option.variant and "/" not in option.variant and option.variant not in VARIANTS[name]:
            raise BenchError(
                f"[bench] {name} has the variants {', '.join(VARIANTS[name])}, received {variant!r}; "
                "a path of weights has a slash"
            )
        return option

    @property
    def is_server(self) -> bool:
        """Whether it is a URL."""
        return self.where.startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What all peers share."""

    weights: Path
    """The model's own file or folder."""
    threads: int
    max_context: int


Opener = Callable[[], DriverPeer | ServerPeer]
"""Starts a peer."""


def openers(option: PeerOption, common: Common) -> dict[str, Opener]:
    """Return how to start the peers that one option asks for, by name; weights that are missing are made first.

    Raises:
        BenchError: Weights cannot be made.
    """
    if option.is_server:
        return {option.name: lambda: ServerPeer(option.name, option.where)}
    if option.variant is not None and "/" in option.variant:
        path = Path(option.variant)
        found: dict[str, tuple[Path, dict[str, Any]]] = {path.name: (path, {})}
    else:
        chosen = VARIANTS[option.name]
        if option.variant is not None:
            chosen = {option.variant: chosen[option.variant]}
        found = {
            name: (_weights(variant.weights, common), dict(variant.options))
            for name, variant in chosen.items()
        }
    return {
        f"{option.name} {name}": _opener(
            DriverSettings(
                name=f"{option.name} {name}",
                family=option.name,
                driver=option.name,
                python=option.where,
                environment={
                    "OMP_NUM_THREADS": str(common.threads),
                    **ENVIRONMENT.get(option.name, {}),
                },
                settings={
                    "weights": str(weights),
                    "threads": common.threads,
                    "max_context": common.max_context,
                    **options,
                },
            )
        )
        for name, (weights, options) in found.items()
    }


def _opener(settings: DriverSettings) -> Opener:
    return lambda: DriverPeer(settings)


def _weights(kind: str, common: Common) -> Path:
    if kind == "file" or (kind == "folder" and common.weights.is_dir()):
        return common.weights
    if kind != "folder":
        return requantised(common.weights, kind)
    target = bench_folder() / f"{identity(common.weights)}-folder"
    if not target.exists():
        with (
            replacing(target) as incoming,
            DriverPeer(
                reference_settings(common.weights, common.threads, common.max_context)
            ) as peer,
        ):
            peer.export(incoming)
    return target
