"""DeepSpeed: rows in the engine's checkpoints. For commits, ``est.attach(engine)`` suffices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compopt.checkpoint import save
from compopt.estimator.base import Estimator
from compopt.integrations.refusals import load_rows

KEY = "compopt"


def save_checkpoint(
    engine: Any,
    est: Estimator,
    save_dir: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Save a checkpoint of the engine, and the rows of every rank with it.

    Example:
        >>> engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)  # doctest: +SKIP
        >>> est.attach(engine)  # doctest: +SKIP
        >>> save_checkpoint(engine, est, "run", client_state={"epoch": 1})  # doctest: +SKIP

    DeepSpeed saves the ``client_state`` of one rank, under ZeRO 3 of every rank; only the name of the checkpoint of
    rows is added to it. The rows are written first: a run that is killed in between resumes from the previous tag.

    ``ds_to_universal`` does not copy the rows. :func:`load_checkpoint` finds them if ``<tag>`` and the universal
    checkpoint are in the same folder; otherwise copy ``<tag>/compopt`` into the universal checkpoint.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        est: the estimator.
        save_dir, tag, client_state, options: arguments of the engine's method; ``tag=None``: ``global_step<N>``.

    Returns:
        The result of the engine's method.

    Raises:
        ValueError: ``client_state`` has a key ``"compopt"``.
        OSError, RuntimeError: see :func:`compopt.save`; the engine has written nothing in this case.

    Communicates: collective, as the engine's method.
    """
    client_state = dict(client_state or {})
    if KEY in client_state:
        raise ValueError(f"client_state must not contain the key {KEY!r}, which is reserved")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    client_state[KEY] = {"checkpoint": save(est, Path(save_dir) / tag / KEY).name, "tag": tag}
    return engine.save_checkpoint(os.fspath(save_dir), tag=tag, client_state=client_state, **options)


def load_checkpoint(
    engine: Any, est: Estimator, load_dir: str | os.PathLike[str], tag: str | None = None, **options: Any
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint of the engine, then the rows saved with it, on any number of ranks.

    Example:
        >>> path, client_state = load_checkpoint(engine, est, "run")  # doctest: +SKIP
        >>> first_epoch = 0 if path is None else client_state["epoch"]  # doctest: +SKIP

    The rows of a universal checkpoint are those of the tag from which it was converted, see :func:`save_checkpoint`.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        est: an estimator of the same configuration.
        load_dir, tag, options: arguments of the engine's method; ``tag=None``: the latest tag.

    Returns:
        ``(path, client_state)`` of the engine, without compopt's entry. If the engine finds no checkpoint (``path`` is
        ``None``), the estimator is unchanged.

    Raises:
        ValueError: the checkpoint was saved without rows.
        FileNotFoundError, ValueError: the rows are missing, damaged, or of another configuration. The engine has
            already been loaded in this case.

    Communicates: collective, as the engine's method.
    """
    path, client_state = engine.load_checkpoint(os.fspath(load_dir), tag=tag, **options)
    if path is None:
        return path, client_state
    client_state = dict(client_state or {})
    if KEY not in client_state:
        raise ValueError(f"{path} was saved without rows: save with compopt.integrations.deepspeed.save_checkpoint")
    saved = client_state.pop(KEY)
    # the engine returns a file in some versions, and the tag's directory in others
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    rows = folder / KEY / saved["checkpoint"]
    if not rows.exists():  # a universal checkpoint: the rows are in another tag of the folder; their names are unique
        rows = next(iter(folder.parent.glob(f"*/{KEY}/{saved['checkpoint']}")), rows)
    load_rows(
        est,
        rows,
        f"rows are in the directory of the tag they were saved under, {saved.get('tag', '<tag>')}/{KEY}; "
        f"ds_to_universal does not copy them: copy that folder to {folder / KEY}, and load again (the engine has been "
        f"loaded already)",
    )
    return path, client_state
