"""Spark tasks that the platform creates for itself: list loads, buffer loads and run exports."""
