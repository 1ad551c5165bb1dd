"""Sparse models as they are loaded: custom classes, adapters, and what a card says of them."""
