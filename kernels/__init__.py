"""Operations of the decoding engine, one a file. They know tensors and nothing of decoding.

Keep this module free of heavy imports: transformers probes a library of the same name.
"""
