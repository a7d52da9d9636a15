"""Benchmarks of the dashboard: what each of its pages costs the server, and what open pages cost."""
