"""Spark through Interlock, compared with hand-written Spark: `python -m bench.spark`.

work      the work of both sides: one transformation, and its input rows
source    files of those rows, committed as the partitions of a source
bare      the same work by hand, in one session with the settings of a worker
steps     single tasks one after the other, with the time of each step
program   the measurements, their order, and the table
"""
