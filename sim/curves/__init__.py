"""Miss-ratio curves: the hit rate of a load at every pool capacity, from one pass over its requests."""
