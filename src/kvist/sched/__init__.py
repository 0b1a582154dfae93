"""The scheduler: which token positions to compute in the next step, in plain integers. Never imports torch."""
