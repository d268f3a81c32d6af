"""Several processes as one run: forming the group, signals, stragglers, launching."""
