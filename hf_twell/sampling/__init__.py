"""Text that a model writes by itself, as rows to train on: `hf-twell sample`."""
