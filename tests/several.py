"""Runs of one program, one after another in the same processes: to import it takes longer than such a run.

    python -m torch.distributed.run ... -m tests.several recipes.clip_trainer '[["--epochs", "1"], ...]'

A new process resumes in tests/test_elastic.py and tests/open_clip/test_clip_nodes.py.
"""

import importlib
import json
import sys


def main(module: str, runs: str) -> None:
    program = importlib.import_module(module)
    for arguments in json.loads(runs):
        program.main(arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
