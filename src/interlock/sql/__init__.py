"""Schema migrations and named statements, by area."""
