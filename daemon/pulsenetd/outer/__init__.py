"""The node's part in its run's outer algorithm: rounds or mixing."""
