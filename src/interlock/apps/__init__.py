"""Processes: one module for each, which opens stores, builds capabilities, and serves or runs loops."""
