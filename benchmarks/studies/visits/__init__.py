"""Study of methods with state per sample at many visits per row."""
