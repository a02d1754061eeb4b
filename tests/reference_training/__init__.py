"""How the two bundled reference models are made: task, tokenizer, network, objectives, training, a plain decoder."""
