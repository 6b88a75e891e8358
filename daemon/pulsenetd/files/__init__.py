"""Models in files, and patches between them, without any network."""
