"""The node's end of the hand-off to training loops and engines of this machine."""
