"""pulsenet: peer-to-peer transport for reinforcement-learning post-training of language models."""
