"""Kvist measured: against other engines doing the same work, and each kernel against what the machine can do."""
