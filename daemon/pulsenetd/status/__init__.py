"""What a node knows of itself: samples, log lines, peers, conditions; the parts of ``/status``."""
