"""Run one program several times in the same processes, since its import takes longer than such a run.

    python -m torch.distributed.run ... -m tests.several recipes.clip_trainer '[["--epochs", "1"], ...]'

tests/open_clip/test_clip_nodes.py resumes in new processes.
"""

import importlib
import json
import sys
from unittest import mock

import torch.distributed as dist


def main(module: str, runs: str) -> None:
    program = importlib.import_module(module)
    # there is one accelerate state and one process group per process; some programs destroy the group at their end
    with mock.patch.object(dist, "destroy_process_group"):
        for arguments in json.loads(runs):
            program.main(arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
