"""Checkpoints, configs, weights and texts on disk, read as what a stranger wrote; and what the package carries."""
