"""Entry point of the command, see :mod:`compopt.integrations.open_clip`."""

from compopt.integrations.open_clip import main

if __name__ == "__main__":
    raise SystemExit(main())
