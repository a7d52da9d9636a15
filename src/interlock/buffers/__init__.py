"""Buffered datasets: published batches become rows of tables in the data database, each once."""
