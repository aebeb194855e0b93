"""Study of state per sample: cases that favour it, and the accuracy of its estimates there."""
