"""Tests of compopt; `tests/reference` holds naive reference implementations, `tests/database.py` the configurations."""
