"""Operators of the platform that move data. They alone, of all operator code, are given the data database's address."""
