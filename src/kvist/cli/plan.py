"""``kvist plan``: what a model's weights and KV cache need, before anything is loaded.

Reads at most a configuration file or a GGUF header. The sizes are those that the engine then allocates.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvist.cli.console import print_json, result_console
from kvist.cli.options import Only, takes_options
from kvist.config import EngineConfig
from kvist.errors import ModelLoadError
from kvist.model.catalog import KNOWN_MODELS, local_path, resolve
from kvist.model.shapes import NAMED_SHAPES
from kvist.plan import (
    KV_MEMORY_FRACTION,
    Hardware,
    MemoryEstimate,
    detect_hardware,
    formats,
    memory_estimate,
    precision_of,
    read_spec,
    usable_bytes,
)
from kvist.precision import KVPrecision
from kvist.spec import GIB, ModelSpec


@takes_options
def plan(
    *,
    context: Annotated[
        int, typer.Option(help="tokens of a request, prompt and output", min=1)
    ] = 2048,
    concurrency: Annotated[int, typer.Option(help="requests at once", min=1)] = 8,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the numbers as one line of JSON")
    ] = False,
    config: Annotated[
        EngineConfig,
        Only(
            "model",
            "weights",
            "dtype",
            "kv_cache_dtype",
            "kv_precision",
            "kv_head_dim",
            "block_size",
            "memory_gib",
            "cache_share",
            "pin_fraction",
            "max_batch_tokens",
        ),
    ],
) -> None:
    """Say how much memory a model needs, and how many requests fit; nothing is loaded.

    The model may also be a named shape, such as llama-2-7b, a folder with a config.json, or a .gguf file.
    """
    spec = find_spec(config.model.model)
    hardware = detect_hardware()
    weights, precision = formats(config, spec, hardware)
    estimate = memory_estimate(
        spec,
        codec=config.cache.kv_cache_dtype if precision is None else precision,
        weights=weights,
        context=context,
        concurrency=concurrency,
        block_size=config.cache.block_size,
        kv_head_dim=config.cache.kv_head_dim,
        max_batch_tokens=config.scheduler.max_batch_tokens,
    )
    memory_bytes = _kv_memory_bytes(config, estimate, hardware)
    document = {
        **_document(config, spec, estimate, memory_bytes),
        "plane": weights.plane,
        "isa": hardware.isa if weights.plane == "native" else None,
        "weights": weights.kind,
        "dtype": weights.dtype,
    }
    if as_json:
        print_json(document)
    else:
        _show(document)


def find_spec(name: str) -> ModelSpec:
    """Return the specification of a named shape, a local configuration or checkpoint, or a pulled model.

    Raises:
        ModelLoadError: There is no such model here, or its description cannot be read.
    """
    if name in NAMED_SHAPES:
        return NAMED_SHAPES[name]
    path = local_path(name)
    # A configuration alone is enough here, so its folder need not be a whole checkpoint.
    if path is not None and path.name == "config.json" and path.is_file():
        return read_spec(path.parent)
    if path is not None and (path / "config.json").is_file():
        return read_spec(path)
    try:
        return read_spec(resolve(name).path)
    except ModelLoadError as error:
        if path is not None or name in KNOWN_MODELS:
            raise
        raise ModelLoadError(f"{error}; shapes with a name: {', '.join(NAMED_SHAPES)}") from error


def _kv_memory_bytes(config: EngineConfig, estimate: MemoryEstimate, hardware: Hardware) -> int:
    """Return what KV blocks may take: as the user said, or what the engine would take by itself."""
    if config.cache.memory_gib is not None:
        return int(config.cache.memory_gib * GIB)
    left = hardware.available_bytes - estimate.weight_bytes
    return int(max(0, left) * KV_MEMORY_FRACTION)


def _document(
    config: EngineConfig, spec: ModelSpec, estimate: MemoryEstimate, memory_bytes: int
) -> dict[str, Any]:  # Any: JSON values
    precision = precision_of(config.cache)
    codec = config.cache.kv_cache_dtype
    if codec == "auto":
        codec = "raw16" if precision is None else "mixed"
    pinnable_bytes = int(memory_bytes * config.cache.pin_fraction)
    block_size, kept = config.cache.block_size, config.cache.kv_head_dim
    left_bytes = usable_bytes(spec, precision, block_size, memory_bytes, kept) - pinnable_bytes
    return {
        "model": config.model.model,
        "parameters": estimate.num_parameters,
        "kv_cache_dtype": codec,
        "kv_precision": None if precision is None else str(precision),
        "context": estimate.context,
        "max_context": spec.max_context_len,
        "concurrency": estimate.concurrency,
        "block_size": estimate.block_size,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "kv_head_dim": config.cache.kv_head_dim or spec.head_dim,
        "weight_bytes": estimate.weight_bytes,
        "kv_bytes_per_token": estimate.token_bytes,
        "kv_bytes_per_request": estimate.request_bytes,
        "kv_bytes_per_request_windowed": estimate.windowed_request_bytes,
        "kv_bytes_per_step": estimate.step_bytes,
        "kv_bytes_total": estimate.kv_bytes,
        "total_bytes": estimate.total_bytes,
        "memory_bytes": memory_bytes,
        "pinnable_bytes": pinnable_bytes,
        "cache_shares": {
            name: int(memory_bytes * share) for name, share in config.cache.cache_share.items()
        },
        "requests_that_fit": max(0, left_bytes - estimate.step_bytes) // estimate.request_bytes,
        "fits": left_bytes >= estimate.kv_bytes,
    }


def _show(document: dict[str, Any]) -> None:  # Any: JSON values
    grouping = document["num_heads"] // document["num_kv_heads"]
    shared = f", {grouping} query heads share one KV head" if grouping > 1 else ""
    table = Table(
        "what", "bytes", "", "how",
        # Text: a name in brackets is no markup.
        title=Text(f"{document['model']}: {document['context']:,} tokens a request, {document['concurrency']} at once"),
        title_justify="left", box=None,
    )  # fmt: skip
    table.columns[1].justify = table.columns[2].justify = "right"
    rule = document["kv_precision"]
    codec = document["kv_cache_dtype"] if rule is None else KVPrecision.parse(rule).rest
    kept = f"{document['kv_head_dim']}"
    if document["kv_head_dim"] < document["head_dim"]:
        kept += f" of {document['head_dim']}"
    per_token = (
        f"{document['num_layers']} layers x 2 x {document['num_kv_heads']} KV heads x "
        f"{kept} in {codec}{shared}"
    )
    rows = (
        ("weights", "weight_bytes", f"{document['parameters']:,} values in {document['weights']}"),
        ("KV per token", "kv_bytes_per_token", per_token),
        ("KV per request", "kv_bytes_per_request", f"blocks of {document['block_size']} tokens"),
        ("KV in total", "kv_bytes_total", f"{document['concurrency']} requests, none shared"),
        ("weights and KV", "total_bytes", ""),
    )
    for name, key, how in rows:
        table.add_row(name, f"{document[key]:,}", _human(document[key]), how)
    console = result_console()
    console.print(table)
    if rule is not None:
        console.print(
            f"Blocks by age: {rule}. Each request's youngest are in raw16, as K and V are written; while prompts are "
            f"computed, {_human(document['kv_bytes_per_step'])} more, since blocks get smaller after a step "
            "(--max-batch-tokens)."
        )
    windowed = document["kv_bytes_per_request_windowed"]
    if windowed < document["kv_bytes_per_request"]:
        console.print(
            f"Sliding windows would need only {_human(windowed)} a request; "
            "this version keeps all positions of all layers."
        )
    if document["context"] > document["max_context"]:
        console.print(
            f"The model was made for {document['max_context']:,} tokens a request; the engine refuses longer ones."
        )
    if document["memory_bytes"] == 0:
        console.print("The weights alone need more memory than is free on this machine.")
        return
    console.print(
        f"KV memory of {_human(document['memory_bytes'])} holds {document['requests_that_fit']:,} such requests "
        "(--memory-gib; by default half of what the weights leave free). Requests that share a prefix need less."
    )
    if document["pinnable_bytes"]:
        console.print(
            f"Pins may hold {_human(document['pinnable_bytes'])} of it; requests do without that."
        )
    for name, share in document["cache_shares"].items():
        console.print(f"{name} may fill {_human(share)} of it before its blocks go first.")


def _human(num_bytes: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
