"""lm-eval tasks."""
