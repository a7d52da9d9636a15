"""Jobs of very many tasks: what goes in, what comes out, and the proof that nothing was lost between."""
