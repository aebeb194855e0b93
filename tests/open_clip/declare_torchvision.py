"""Make `import torchvision` work with a torch without CUDA; layer.py copies it into .venv-clip and .venv-bench.

The registry's torchvision is built for CUDA. With a CPU build of torch its library of operators does not load, and the
import then fails because the operators are not declared. The packages there use only transforms and models, so
declarations are enough. A `.pth` file imports this at every start of Python; it costs nothing until torchvision is
imported.
"""

import sys
from importlib.metadata import version

OPERATORS = """nms qnms roi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align _ps_roi_align_backward
ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward"""


class Declare:
    """An import hook that finds no module, and declares the operators when torchvision is imported."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and Declare.library is None:
            import torch

            if torch.version.cuda is None and "+cpu" not in version("torchvision"):
                Declare.library = torch.library.Library("torchvision", "DEF")
                for operator in OPERATORS.split():
                    Declare.library.define(f"{operator}(Tensor a) -> Tensor")


sys.meta_path.insert(0, Declare())
