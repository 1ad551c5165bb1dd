"""To the Hub."""
