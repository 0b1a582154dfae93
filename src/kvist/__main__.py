"""Run the command line with ``python -m kvist``."""

from kvist.cli.main import main

main()
