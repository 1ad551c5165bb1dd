"""How sparse a model is, and how well it predicts text."""
