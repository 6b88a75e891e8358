"""How effects are executed: one module per part of the node, each offering ``table()`` for the driver."""
