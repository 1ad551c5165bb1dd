"""What `hf-twell inspect` finds and shows."""
