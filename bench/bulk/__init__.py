"""Bulk jobs, compared with their limits."""
