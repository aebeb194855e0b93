"""Side by side with what one would use otherwise. ``make bench`` builds the environment that these modules need."""
