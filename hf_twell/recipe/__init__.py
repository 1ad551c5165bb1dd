"""A training run as a YAML file says."""
