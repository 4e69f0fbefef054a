"""Capacity planning: the highest rate, the fewest replicas, the smallest pool that keep a promise."""
