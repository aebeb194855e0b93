"""Tests with open_clip, in an environment of their own: `make test-clip`."""
