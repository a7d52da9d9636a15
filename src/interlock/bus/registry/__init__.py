"""The registry of the command bus: its entries, their changes, keys, snapshots, and its loading into caches."""
