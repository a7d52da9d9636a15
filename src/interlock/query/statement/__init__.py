"""The process that runs one statement: forked from a warm process, confined, and ended with the statement."""
