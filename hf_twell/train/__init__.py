"""Sparse training: the L1 term, in Trainer and in a loop of one's own, and what steers it."""
