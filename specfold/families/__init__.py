"""Model families: what a checkpoint looks like and how its blocks are denoised. One file a family."""
