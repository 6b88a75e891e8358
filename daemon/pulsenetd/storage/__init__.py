"""What is durable, and the weights in memory: store, mirror, publishing pipeline, spools."""
