"""Measurements that need an accelerator, run by ``python -m benchmarks.gpu``."""
