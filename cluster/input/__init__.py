"""Any prompts file as shards of raw rows, and raw rows as prompts and typed columns."""
