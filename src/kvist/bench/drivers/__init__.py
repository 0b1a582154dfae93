"""Programs that run a peer each, in the interpreter that has its library; see ``serve.py``."""
