"""Isolation domains of the prefix cache.

Responsible for the fields that keep cached K and V apart. Knows no hash and no block. Nothing is ever shared across
namespaces: the prefix tree has one root for each, compared field by field, and every block identity starts from it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What must be equal for two requests to share blocks, beside their tokens."""

    model: str
    """Fingerprint of the weights."""
    adapter: str = ""
    """Fingerprint of the adapter; empty: none."""
    tenant: str = ""
    """Who may share; comes from the authenticated key. Empty: the one user of a private engine."""
    layout: str = ""
    """RoPE and K/V layout and codec, as far as they change the bytes of a block."""
