"""Training recipes: they pick components of :mod:`compopt` and hold no algorithm of their own.

Run them from the root of the repository::

    python -m recipes.train_clip --help
    python -m recipes.train_simclr --help
"""
