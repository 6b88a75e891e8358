"""Completion for shells, written from the parser itself, so that no option can be missing."""
