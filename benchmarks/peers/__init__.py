"""compopt beside other packages. ``make bench`` builds the environment that these modules need."""
