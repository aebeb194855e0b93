"""Training recipes: they select components of :mod:`compopt` and contain no algorithms themselves.

Run them from the root of the repository::

    python -m recipes.train_clip --help
    python -m recipes.train_simclr --help
"""
