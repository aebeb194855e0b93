"""Run the kernels in Triton's interpreter if there is no GPU; without Triton there are no tests."""

import os
from importlib.util import find_spec

import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
