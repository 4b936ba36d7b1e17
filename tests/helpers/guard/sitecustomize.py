"""Python imports this at its start where this folder is on PYTHONPATH."""

import unpickle_nothing  # noqa: F401  # beside this file
