"""Numeric operations over tensors: readable references, fast implementations, and the choice between them."""
