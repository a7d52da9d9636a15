"""Jobs of very many tasks: what goes in, what comes out, and the proof that nothing was lost between.

uploads.py      where clients put lists
submission.py   runs that are made of a list, or stay open for more
lists.py        a staged list, split into chunks of whole lines
rows.py         the lines of a chunk as rows of `tasks`
staged.py       a staged list as files here: checked, resumed, read ahead
sources.py      what a run is made of, as the ingest sees it
loading.py      rows into the run's shard, each chunk once
ingest.py       the loop: load, finish, enqueue, total, latch
upkeep.py       runs that are stuck between two steps, and lists that nobody needs any more
"""
