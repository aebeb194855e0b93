"""DeepSpeed: rows beside the engine's checkpoints. Commits need only ``est.attach(engine)``."""

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
    """Call ``engine.save_checkpoint(...)``, with the rows of every rank in ``<save_dir>/<tag>/compopt``.

    DeepSpeed keeps one rank's ``client_state``, under ZeRO 3 every rank's; it gets only the name of the rows'
    checkpoint. The rows are written first: a run killed in between resumes from the previous tag.

    ``ds_to_universal`` does not copy the rows: :func:`load_checkpoint` finds them where ``<tag>`` lies beside the
    universal checkpoint; otherwise copy ``<tag>/compopt`` into that.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        est: the estimator.
        save_dir, tag, client_state, options: arguments of the engine's method; ``tag=None`` is ``global_step<N>``.

    Returns:
        The engine's result.

    Raises:
        ValueError: ``client_state`` has a key ``"compopt"``.
        OSError, RuntimeError: see :func:`compopt.save`; the engine has then written nothing.

    Communicates: collective, as the engine's method.
    """
    client_state = dict(client_state or {})
    if KEY in client_state:
        raise ValueError(f"client_state must leave the key {KEY!r} to compopt")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    client_state[KEY] = {"checkpoint": save(est, Path(save_dir) / tag / KEY).name, "tag": tag}
    return engine.save_checkpoint(os.fspath(save_dir), tag=tag, client_state=client_state, **options)


def load_checkpoint(
    engine: Any, est: Estimator, load_dir: str | os.PathLike[str], tag: str | None = None, **options: Any
) -> tuple[str | None, dict[str, Any] | None]:
    """Call ``engine.load_checkpoint(...)``, then load the rows that were saved with it, on any number of ranks.

    The rows of a universal checkpoint are those of the tag that it was made from, see :func:`save_checkpoint`.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        est: an estimator of the same configuration.
        load_dir, tag, options: arguments of the engine's method; ``tag=None`` is the latest.

    Returns:
        ``(path, client_state)`` as the engine returns them, without compopt's entry. If the engine finds nothing
        (``path`` is ``None``), the estimator is as it was.

    Raises:
        ValueError: the checkpoint was saved without rows.
        FileNotFoundError, ValueError: rows missing, damaged, or of another configuration. The engine has then been
            loaded already.

    Communicates: collective, as the engine's method.
    """
    path, client_state = engine.load_checkpoint(os.fspath(load_dir), tag=tag, **options)
    if path is None:
        return path, client_state
    client_state = dict(client_state or {})
    if KEY not in client_state:
        raise ValueError(f"{path} was saved without rows: save with compopt.integrations.deepspeed.save_checkpoint")
    saved = client_state.pop(KEY)
    # what the engine returns is a file in some versions, the tag's directory in others
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    rows = folder / KEY / saved["checkpoint"]
    if not rows.exists():  # a universal checkpoint: the rows are in another tag beside it; no two have one name
        rows = next(iter(folder.parent.glob(f"*/{KEY}/{saved['checkpoint']}")), rows)
    load_rows(
        est,
        rows,
        f"rows are in the directory of the tag they were saved under, {saved.get('tag', '<tag>')}/{KEY}; "
        f"ds_to_universal does not copy them: copy that folder to {folder / KEY}, and load again (the engine has been "
        f"loaded already)",
    )
    return path, client_state
