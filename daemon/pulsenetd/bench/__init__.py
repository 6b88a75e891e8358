"""Measures codecs on two versions of a model: sizes, bounds and speed, beside the layouts of public systems."""
