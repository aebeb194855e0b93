"""Comparison of compopt with other packages. ``make bench`` builds the environment that these modules need."""
