"""Tests of compopt; `tests/reference` holds the naive twins, `tests/database.py` the configurations."""
