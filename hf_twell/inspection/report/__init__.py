"""What `hf_twell.inspection.inspecting` found, in words and as a page."""
