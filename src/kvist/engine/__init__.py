"""The step loop and its front ends: the only package that sees both planes."""
