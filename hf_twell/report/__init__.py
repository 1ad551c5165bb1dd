"""What `hf_twell.inspection` found, in words and as a page."""
