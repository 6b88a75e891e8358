"""One module per command of ``pulsenet``; each offers ``add_parser`` and a function that returns an exit code."""
