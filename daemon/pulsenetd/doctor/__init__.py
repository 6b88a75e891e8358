"""What ``pulsenet doctor`` looks at: one small function a check, all listed in ``checks.py``."""
