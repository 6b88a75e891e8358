"""The daemon: owns every socket, file, thread, clock and random source."""
