"""The command: see :mod:`compopt.integrations.open_clip`."""

from __future__ import annotations

from compopt.integrations.open_clip.run import main

if __name__ == "__main__":
    raise SystemExit(main())
