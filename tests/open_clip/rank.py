"""One of several processes, for one run of open_clip after another: `python -m tests.open_clip.rank OUT RUNS`.

It expects torchrun's variables. open_clip gives DDP `device_ids` always, which DDP refuses for a model on the CPU. That
is changed here, and is no concern of the library's: on accelerators it works as it is.
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
