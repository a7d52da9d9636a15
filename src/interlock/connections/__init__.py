"""HTTP connections of every listener.

limits.py     the figures, light to import
protocol.py   one connection: bounds on head, trailers, framing and pipelining
guard.py      all connections of a server: caps, deadlines, minimum rates
server.py     uvicorn with a guard
"""
