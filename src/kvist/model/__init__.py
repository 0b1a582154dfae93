"""One config-driven decoder, its weights and its tokeniser."""
