"""DeepSpeed: rows beside the engine's checkpoints. Commits need only ``est.attach(engine)``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compopt.checkpoint import loading, saving
from compopt.estimator.base import Estimator

KEY = "compopt"


def save_checkpoint(
    engine: Any,
    est: Estimator,
    save_dir: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    """``engine.save_checkpoint(...)``, with the rows of every rank in ``<save_dir>/<tag>/compopt``.

    DeepSpeed keeps one rank's ``client_state``, under ZeRO 3 every rank's; it gets only the name of the rows'
    checkpoint. The rows are written first: a run killed in between resumes from the previous tag.

    ``ds_to_universal`` does not copy the rows: :func:`load_checkpoint` finds them where ``<tag>`` lies beside the
    universal checkpoint; otherwise copy ``<tag>/compopt`` into that.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        est: the estimator.
        save_dir, tag, client_state, save_latest, exclude_frozen_parameters: as for the engine; ``tag=None`` is
            ``global_step<N>`` as there.

    Returns:
        What the engine returns.

    Raises:
        ValueError: ``client_state`` has a key ``"compopt"``.
        OSError, RuntimeError: see :func:`compopt.save`; the engine has then written nothing.

    Communicates: collective, as the engine's method.
    """
    client_state = dict(client_state or {})
    if KEY in client_state:
        raise ValueError(f"client_state must leave the key {KEY!r} to compopt")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    client_state[KEY] = {"checkpoint": saving.save(est, Path(save_dir) / tag / KEY).name, "tag": tag}
    return engine.save_checkpoint(
        os.fspath(save_dir),
        tag=tag,
        client_state=client_state,
        save_latest=save_latest,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def load_checkpoint(
    engine: Any,
    est: Estimator,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> tuple[str | None, dict[str, Any] | None]:
    """``engine.load_checkpoint(...)``, then the rows that were saved with it, on any number of ranks.

    The rows of a universal checkpoint are those of the tag that it was made from, see :func:`save_checkpoint`.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        est: an estimator of the same configuration.
        load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only: as for
            the engine; ``tag=None`` is the latest.

    Returns:
        ``(path, client_state)`` as the engine returns them, without compopt's entry. If the engine finds nothing
        (``path`` is ``None``), the estimator is as it was.

    Raises:
        ValueError: the checkpoint was saved without rows.
        FileNotFoundError, ValueError: rows missing, damaged, or of another configuration. The engine has then been
            loaded already.

    Communicates: collective, as the engine's method.
    """
    path, client_state = engine.load_checkpoint(
        os.fspath(load_dir),
        tag=tag,
        load_module_strict=load_module_strict,
        load_optimizer_states=load_optimizer_states,
        load_lr_scheduler_states=load_lr_scheduler_states,
        load_module_only=load_module_only,
    )
    if path is None:
        return path, client_state
    client_state = dict(client_state or {})
    if KEY not in client_state:
        raise ValueError(f"{path} was saved without rows: save with compopt.integrations.deepspeed.save_checkpoint")
    # what the engine returns is a file in some versions, the tag's directory in others
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    _load_rows(est, folder, client_state.pop(KEY))
    return path, client_state


def _load_rows(est: Estimator, folder: Path, saved: Mapping[str, str]) -> None:
    """From a tag's directory or, for a universal checkpoint, from that of another tag beside it."""
    rows = folder / KEY / saved["checkpoint"]
    if not rows.exists():
        rows = next(iter(folder.parent.glob(f"*/{KEY}/{saved['checkpoint']}")), rows)  # no two have one name
    try:
        loading.load(est, rows)
    except FileNotFoundError as error:
        tag = saved.get("tag", "<tag>")
        raise FileNotFoundError(
            f"{rows} is not there or not complete ({error}). Rows are in the directory of the tag they were saved "
            f"under, {tag}/{KEY}; ds_to_universal does not copy them: copy that folder to {folder / KEY}, and load "
            f"again (the engine has been loaded already)"
        ) from error
