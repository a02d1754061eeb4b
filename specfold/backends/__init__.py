"""Where a decoding run computes: plain torch operations, or captured graphs of fused kernels."""
