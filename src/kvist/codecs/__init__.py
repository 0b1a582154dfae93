"""Formats of K and V bytes inside a block."""
