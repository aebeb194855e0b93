"""Wait until gloo's threads are idle before a launched process ends.

A thread that frees a tensor of its last collective while the interpreter ends aborts the process: "terminate called
without an active exception", pytorch issues 179291 and 190489. Ending the process group helps only if no other
reference keeps it alive, and DeepSpeed keeps one in default arguments. Python imports this file when it starts, if its
folder is in ``PYTHONPATH``; the exit function that is registered first runs last.
"""

import atexit
import time
from pathlib import Path


def resting() -> bool:
    """Return whether every thread of gloo sleeps."""
    for stat in Path("/proc/self/task").glob("*/stat"):
        name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        if name.startswith("pt_gloo") and rest.split()[0] != "S":
            return False
    return True


def wait() -> None:
    looks = 0
    for _ in range(500):
        looks = looks + 1 if resting() else 0
        if looks == 3:
            return
        time.sleep(0.01)


atexit.register(wait)
