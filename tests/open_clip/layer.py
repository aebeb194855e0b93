"""Lay an environment over this one: what it lacks it finds here. `python -m tests.open_clip.layer FOLDER`."""

import shutil
import sys
import sysconfig
from pathlib import Path

HOOK = Path(__file__).with_name("declare_torchvision.py")


def main(folder):
    scheme = {"base": folder, "platbase": folder}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=scheme))
    shutil.copy(HOOK, packages)
    below = sysconfig.get_path("purelib")
    # .pth files are read in the order of their names, and their lines are run
    (packages / "layer.pth").write_text(f"import {HOOK.stem}\nimport site; site.addsitedir({below!r})\n")


if __name__ == "__main__":
    main(sys.argv[1])
