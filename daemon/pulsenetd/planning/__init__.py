"""Shows what ``pulsenet.outer.plan`` computes: a table, a picture, and the link that a node observed."""
