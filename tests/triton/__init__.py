"""Tests of the kernels in Triton, in an environment of their own: `make test-triton`."""
