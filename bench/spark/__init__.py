"""Spark through Interlock beside hand-written Spark: `python -m bench.spark`.

work      what both sides do: one transformation, and the rows that it is done to
source    files of those rows, committed as the partitions of a source
bare      the same by hand, in one session with the settings of a worker's
steps     one task after the other, with the time of each step
program   what is measured, in which order, and the table
"""
