"""The Ray side: input, driver, workers, run directory. Knows no kernel and no model family."""
