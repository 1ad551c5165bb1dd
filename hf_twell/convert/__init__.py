"""From a dense model to ReLU blocks, in place."""
