"""The maths of a round: gate, residual, reduction, outer step, state root. Pure, and equal in bits on every machine."""
