"""The acts of `interlock demo`."""
