"""Mixing: a trainer averages with whoever is there and goes on with whoever came; no round closes (SPEC 6.15)."""
