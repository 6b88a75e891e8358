"""Engines in other processes that a node keeps current: attached to, or started and looked after."""
