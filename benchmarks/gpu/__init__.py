"""Measurements that need an accelerator; ``python -m benchmarks.gpu``."""
