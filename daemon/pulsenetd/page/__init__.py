"""The status page: ``/status`` as HTML, drawn by the daemon."""
