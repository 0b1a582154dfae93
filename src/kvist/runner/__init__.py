"""From a plan to the sampled tokens: inputs, forward pass, logits, sampler."""
