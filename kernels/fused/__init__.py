"""The engine's kernels on a GPU: fused operations in Triton, whose row counts stay on the device.

Each operation stands beside a torch reference of the same signature (``<name>_reference``). Both write into buffers
that the caller made, so a whole step can be captured as one CUDA graph.
"""
