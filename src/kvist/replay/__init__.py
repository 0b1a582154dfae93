"""Recorded traces through the real control plane, without a model."""
