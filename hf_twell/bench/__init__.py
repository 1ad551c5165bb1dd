"""What `hf-twell bench` times."""
