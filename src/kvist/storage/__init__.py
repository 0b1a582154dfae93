"""Where block bytes live."""
