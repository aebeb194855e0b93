"""Where state per sample could pay: cases that favour it, and what its estimates are worth there."""
