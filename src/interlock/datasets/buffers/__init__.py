"""Buffered datasets: loads published batches as rows into tables of the data database, each batch once."""
