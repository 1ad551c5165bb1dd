"""Sparse ReLU feed-forward blocks for Hugging Face language models."""

__version__ = "0.1.0"
