"""Prepare the environment in FOLDER for a torch without CUDA: `python -m tests.open_clip.layer FOLDER`.

Packages that it lacks are found in the environment that runs this, unless that is the one in FOLDER.
"""

import shutil
import sys
import sysconfig
from pathlib import Path

HOOK = Path(__file__).with_name("declare_torchvision.py")


def main(folder):
    scheme = {"base": folder, "platbase": folder}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=scheme))
    below = sysconfig.get_path("purelib")
    lines = []
    if (packages / "torchvision").exists():
        shutil.copy(HOOK, packages)
        lines.append(f"import {HOOK.stem}\n")
    if packages.resolve() != Path(below).resolve():
        lines.append(f"import site; site.addsitedir({below!r})\n")
    # .pth files are read in the order of their names, and their lines are run
    (packages / "layer.pth").write_text("".join(lines))


if __name__ == "__main__":
    main(sys.argv[1])
