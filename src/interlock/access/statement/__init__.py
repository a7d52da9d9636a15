"""The process that runs one statement: forked from one that is warm, confined, and gone when the statement is."""
