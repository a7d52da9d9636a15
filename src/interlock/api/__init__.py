"""Thin HTTP over the kernel: the public gateway and the internal dispatcher, each on its own listener."""
