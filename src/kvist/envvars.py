"""Every environment variable that Kvist reads, each time it is asked for.

Responsible for names, defaults and validation. Knows nothing of what the values are used for. Nothing is read at
import, so tests and embedding programs may set variables at any time.

    KVIST_MODELS      folder of pulled models; default: <cache>/kvist/models
    XDG_CACHE_HOME    the user's cache folder; default: ~/.cache
    KVIST_ISA         instruction set of the native kernels, for tests and bug reports; read by the extension itself,
                      at the first kernel; default: the best that the CPU has and that passes its self-check

    OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
                      where spans of requests go; default: nowhere
    OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_TRACES_EXPORTER, OTEL_SDK_DISABLED
                      whether that is so, and in a way that Kvist speaks

``HF_TOKEN``, ``HF_ENDPOINT`` and their kin are read by huggingface-hub, pip's variables by pip, the other ``OTEL_*`` by
OpenTelemetry's libraries.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvist.errors import ConfigError


def models_folder() -> Path:
    """Return the absolute path of the folder that holds pulled models; it need not exist yet.

    Raises:
        ConfigError: KVIST_MODELS is empty or names something that is not a folder, XDG_CACHE_HOME is relative, or
            neither is set and there is no home folder.
    """
    value = os.environ.get("KVIST_MODELS")
    if value is None:
        return _cache_folder() / "kvist" / "models"
    if not value.strip():
        raise ConfigError(
            "[environment] KVIST_MODELS must name a folder, received an empty value; unset it or give it a path"
        )
    folder = _absolute(value, "KVIST_MODELS")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"[environment] KVIST_MODELS must name a folder, received {value!r}, which is a file"
        )
    return folder


def packed_folder() -> Path:
    """Return the absolute path of the folder for packed weights of models that lie in folders not to be written to.

    Raises:
        ConfigError: XDG_CACHE_HOME is relative, or it is not set and there is no home folder.
    """
    return _cache_folder() / "kvist" / "packed"


def tune_folder() -> Path:
    """Return the absolute path of the folder for calibrations and measurements of models; it need not exist yet.

    Raises:
        ConfigError: As ``models_folder``.
    """
    return _cache_folder() / "kvist" / "tune"


def bench_folder() -> Path:
    """Return the absolute path of the folder for what benchmarks make once; it need not exist yet.

    Raises:
        ConfigError: As ``models_folder``.
    """
    return _cache_folder() / "kvist" / "bench"


def has_otel_endpoint() -> bool:
    """Return whether OpenTelemetry's own variables say where spans go.

    Raises:
        ConfigError: They do, and ask for a protocol other than OTLP over HTTP.
    """
    read = os.environ.get
    kinds = ("TRACES_ENDPOINT", "ENDPOINT")
    is_on = any(read(f"OTEL_EXPORTER_OTLP_{kind}", "").strip() for kind in kinds)
    is_off = read("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not is_on or is_off or read("OTEL_TRACES_EXPORTER", "otlp").strip() == "none":
        return False
    name = next(
        (
            name
            for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
            if read(name)
        ),
        "",
    )
    if name and read(name) != "http/protobuf":
        raise ConfigError(
            f"[environment] {name} must be http/protobuf, the one way in which Kvist sends spans, received "
            f"{read(name)!r}; unset it, or set OTEL_TRACES_EXPORTER=none"
        )
    return True


def forced_isa() -> str:
    """Return the instruction set that is asked for by hand, or nothing; whether it exists the extension says."""
    return os.environ.get("KVIST_ISA", "")


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment for a subprocess: this process's own, with ``changes`` on top."""
    return {**os.environ, **changes}


def _cache_folder() -> Path:
    value = os.environ.get("XDG_CACHE_HOME")
    if not value:  # the XDG specification treats empty as unset
        return _absolute("~/.cache", "HOME")
    folder = _absolute(value, "XDG_CACHE_HOME")
    if not Path(value).expanduser().is_absolute():
        raise ConfigError(
            f"[environment] XDG_CACHE_HOME must be an absolute path, received {value!r}"
        )
    return folder


def _absolute(value: str, variable: str) -> Path:
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(
            f"[environment] {variable} needs a home folder to start from and none is known; "
            "set KVIST_MODELS to an absolute path"
        ) from error
