"""HTTP servers: connections and their limits, listeners, decoding, problems, OpenAPI; and a client without asyncio."""
