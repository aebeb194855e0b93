"""State per sample: cases that favour it, and what its estimates are worth there."""
