"""Measurements of the engine: the cost of a forward at the shapes of real checkpoints, and decoding mode against mode.

Everything here drives the engine that jobs use; nothing is computed on a path of its own.
"""
