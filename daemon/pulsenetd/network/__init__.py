"""Peers and the directory: p2pd, streams, requests, hivemind's DHT, and the watch over all of it."""
