"""What only a machine with an accelerator can measure; ``python -m benchmarks.gpu``."""
