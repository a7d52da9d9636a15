"""Bulk jobs beside their limits."""
