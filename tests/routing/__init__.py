"""Events against a naive model of what they should cause."""
