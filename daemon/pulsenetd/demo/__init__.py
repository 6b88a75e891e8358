"""The demonstration swarm: real reinforcement learning on a real model, over real pulsenet nodes."""
