"""Log of a training: a progress bar, the file ``metrics.jsonl``, and the picture ``curve.png``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm


class RunLog:
    """Write measures of a training to a progress bar, a file and a picture; all processes but the main one do nothing.

    Each line of ``metrics.jsonl`` is a JSON object. A run that continues at a step appends to the file; lines of later
    steps, which an interrupted run has left, are removed first.

    Args:
        folder: directory of both files.
        total: number of steps of the run.
        step: number of steps that are done already.
        main: whether this is the main process.
    """

    def __init__(self, folder: Path, total: int, step: int = 0, main: bool = True) -> None:
        self.folder, self.main = folder, main
        self.path = folder / "metrics.jsonl"
        # disable=None: no bar if the output is not a terminal
        self.bar = tqdm(total=total, initial=step, unit="step", disable=None if main else True)
        self.records = self._records(step) if step else []
        if main:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.write_text("".join(json.dumps(record) + "\n" for record in self.records))

    def _records(self, step: int) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]  # a killed run may leave part of a line
        return [record for record in records if record["step"] <= step]

    def add(self, step: int, loss: float, **measures: Any) -> None:
        """Append a line, and show the step and the loss."""
        if not self.main:
            return
        self.records.append({"step": step, "loss": loss, **measures})
        with open(self.path, "a") as file:
            file.write(json.dumps(self.records[-1]) + "\n")
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update(step - self.bar.n)

    def say(self, text: str) -> None:
        """Print a line above the progress bar, and draw the measures so far, if matplotlib is installed."""
        if self.main:
            self.bar.write(text)
            if importlib.util.find_spec("matplotlib") is not None:
                from recipes import pictures

                pictures.learning_curve(self.records, self.folder / "curve.png")
