"""Entry points that a user submits: argument parsing and nothing else of weight."""
