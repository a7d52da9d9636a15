"""The archive of accepted commands, and replays from it or from dead letters."""
