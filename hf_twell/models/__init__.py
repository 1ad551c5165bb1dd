"""Sparse models as they are loaded and published: custom classes, adapters, what a card says of them, the Hub."""
