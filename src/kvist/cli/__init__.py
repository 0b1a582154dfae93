"""The command line: flags, progress and tables around the engine and the server.

Files: ``main`` (the application), one file per command group, ``options`` (flags from the configuration dataclasses),
``console`` (what goes to stdout, what to stderr, and the exit codes), ``models`` (finding and pulling a model).
"""
