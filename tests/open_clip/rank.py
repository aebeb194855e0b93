"""Carry out runs of open_clip in one of several processes: `python -m tests.open_clip.rank OUT RUNS`.

It expects torchrun's variables. open_clip always passes `device_ids` to DDP, which rejects them for a model on the CPU.
This is patched here. It does not concern the library: on accelerators no patch is needed.
"""

import json
import os
import sys

import torch

from tests.open_clip import tiny


class OnTheCPU(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids=None, **options):
        super().__init__(module, **options)


def one(ours, theirs, port):
    os.environ["MASTER_PORT"] = str(port)
    watch = tiny.train(ours, theirs)
    rows = watch.rows() if watch.est.n is not None else {}
    done = {"gradients": watch.gradients, "weights": watch.weights, "rows": rows, "t": watch.est.t, "seen": watch.seen}
    torch.distributed.destroy_process_group()
    return done


def main(out, runs):
    torch.nn.parallel.DistributedDataParallel = OnTheCPU
    torch.save({name: one(*run) for name, run in json.loads(runs).items()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
